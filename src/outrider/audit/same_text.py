"""Same-text mode: compare every method, draft length and batch with plain decoding, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.audit.runner import AuditRunner, RoundSetup
from outrider.bench.race import first_difference
from outrider.engine.config import build_verifier
from outrider.engine.llm import LLM
from outrider.proposers.base import Proposer
from outrider.proposers.plain import PlainProposer
from outrider.registry import PLAIN
from outrider.types import SamplingParams

ReportStep = Callable[[str], None]  # description


@dataclass(frozen=True)
class Grid:
    """The grid: methods x draft lengths x batches x temperatures, over the same prompts."""

    methods: Mapping[str, int]  # method -> its maximum number of drafts
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    prompts: Sequence[Sequence[int]]
    params: SamplingParams

    def cells(self) -> list[dict[str, Any]]:
        """Return all comparisons: plain decoding at the further batch sizes, then the methods up to their maximum."""
        plain = [(PLAIN, 0, batch) for batch in self.batches if batch != self.batches[0]]
        lengths = {method: dict.fromkeys(min(k, most) for k in self.lengths) for method, most in self.methods.items()}
        drafted = [(method, k, batch) for method, distinct in lengths.items() for k in distinct for batch in self.batches]
        return [
            {"method": method, "k": k, "batch": batch, "temperature": temperature}
            for method, k, batch in [*plain, *drafted]
            for temperature in self.temperatures
        ]


def compared(
    llm: LLM, grid: Grid, proposers: Mapping[str, Proposer], cells: Sequence[dict[str, Any]], report: ReportStep
) -> Iterator[dict[str, Any]]:
    """Run cells of a grid; yield each with the number of outputs that differ, and the first position of each difference.

    Plain decoding runs once per temperature. ``proposers``: method -> proposer.
    """
    runner, verifier = AuditRunner(llm.runner), build_verifier(llm.speculation)
    proposers = {**proposers, PLAIN: PlainProposer()}
    plain: dict[float, list[list[int]]] = {}

    def texts(method: str, k: int, batch: int, temperature: float) -> list[list[int]]:
        setup = RoundSetup(proposers[method], verifier, k, coupled=True)
        prompts, params = grid.prompts, replace(grid.params, temperature=temperature)
        parts = (runner.generate(setup, prompts[start : start + batch], params) for start in range(0, len(prompts), batch))
        return [text.token_ids for part in parts for text in part]

    for cell in cells:
        temperature = cell["temperature"]
        if temperature not in plain:
            report(f"plain decoding, temperature {temperature:g}")
            plain[temperature] = texts(PLAIN, 0, grid.batches[0], temperature)
        report(f"{cell['method']} k={cell['k']}, batch {cell['batch']}, temperature {temperature:g}")
        faults, found = runner.faults, texts(**cell)
        differences = [
            {"prompt": index, "place": first_difference(one, other)}
            for index, (one, other) in enumerate(zip(plain[temperature], found, strict=True))
            if one != other
        ]
        counts = {"prompts": len(found), "differing": len(differences), "faults": runner.faults - faults}
        yield {**cell, **counts, "differences": differences}
