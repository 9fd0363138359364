"""Same-text mode: compare every method, draft length and batch with plain decoding, token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.audit.runner import AuditRunner, RoundSetup
from outrider.bench.race import first_difference
from outrider.engine.config import build_verifiers
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


class SameText:
    """Run a grid cell by cell; plain decoding runs once per temperature."""

    def __init__(self, llm: LLM, grid: Grid, proposers: Mapping[str, Proposer], done: Sequence[Mapping[str, Any]]) -> None:
        """``proposers``: method -> proposer; ``done``: finished cells of an earlier run of the same grid."""
        self.llm, self.grid, self.runner = llm, grid, AuditRunner(llm.runner)
        self.results: list[dict[str, Any]] = [dict(cell) for cell in done]
        self._proposers = {**proposers, PLAIN: PlainProposer()}
        self._verifier = build_verifiers(llm.speculation)[0]
        self._plain: dict[float, list[list[int]]] = {}

    @property
    def left(self) -> list[dict[str, Any]]:
        """Return the remaining cells."""
        known = [{key: cell[key] for key in ("method", "k", "batch", "temperature")} for cell in self.results]
        return [cell for cell in self.grid.cells() if cell not in known]

    def run(self, cell: Mapping[str, Any], report: ReportStep) -> dict[str, Any]:
        """Run one cell: number of outputs that differ, and first position of each difference."""
        name, k, batch, temperature = cell["method"], cell["k"], cell["batch"], cell["temperature"]
        wanted = self._reference(temperature, report)
        setup = self._setup(name, k)
        faults = self.runner.faults
        report(f"{name} k={k}, batch {batch}, temperature {temperature:g}")
        texts = self._texts(setup, temperature, batch)
        differences = [
            {"prompt": index, "place": first_difference(one, other)}
            for index, (one, other) in enumerate(zip(wanted, texts, strict=True))
            if one != other
        ]
        found = {**cell, "prompts": len(texts), "differing": len(differences), "differences": differences}
        found["faults"] = self.runner.faults - faults
        self.results.append(found)
        return found

    def _reference(self, temperature: float, report: ReportStep) -> list[list[int]]:
        if temperature not in self._plain:
            report(f"plain decoding, temperature {temperature:g}")
            setup = self._setup(PLAIN, 0)
            self._plain[temperature] = self._texts(setup, temperature, self.grid.batches[0])
        return self._plain[temperature]

    def _texts(self, setup: RoundSetup, temperature: float, batch: int) -> list[list[int]]:
        prompts, params = self.grid.prompts, replace(self.grid.params, temperature=temperature)
        texts: list[list[int]] = []
        for start in range(0, len(prompts), batch):
            texts += [text.token_ids for text in self.runner.generate(setup, prompts[start : start + batch], params)]
        return texts

    def _setup(self, name: str, k: int) -> RoundSetup:
        return RoundSetup(self._proposers[name], self._verifier, k, coupled=True)
