"""Same-text mode: compare every method, draft length and batch with plain decoding, token by token.

It also measures the cost: the same generations in turn with and without the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

from outrider.audit.runner import AuditRunner, RoundSetup
from outrider.bench.race import first_difference
from outrider.engine.config import build_verifier
from outrider.engine.llm import LLM
from outrider.proposers.base import Proposer
from outrider.proposers.plain import PlainProposer
from outrider.registry import PLAIN
from outrider.types import SamplingParams

COST_PROMPTS, COST_REPEATS = 6, 3  # of each cost measurement, at the first batch size

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
        self._verifier = build_verifier(llm.speculation)
        self._plain: dict[float, list[list[int]]] = {}

    @property
    def left(self) -> list[dict[str, Any]]:
        """Return the remaining cells."""
        known = [{key: cell[key] for key in ("method", "k", "batch", "temperature")} for cell in self.results]
        return [cell for cell in self.grid.cells() if cell not in known]

    def run(self, cell: Mapping[str, Any], report: ReportStep) -> dict[str, Any]:
        """Run one cell: number of outputs that differ, first position of each difference, and cost at the first batch size."""
        name, k, batch, temperature = cell["method"], cell["k"], cell["batch"], cell["temperature"]
        wanted = self._reference(temperature, report)
        setup = self._setup(name, k, coupled=True)
        faults = self.runner.faults
        report(f"{name} k={k}, batch {batch}, temperature {temperature:g}")
        texts = self._texts(setup, self.grid.prompts, temperature, batch)
        differences = [
            {"prompt": index, "place": first_difference(one, other)}
            for index, (one, other) in enumerate(zip(wanted, texts, strict=True))
            if one != other
        ]
        found = {**cell, "prompts": len(texts), "differing": len(differences), "differences": differences}
        found["faults"] = self.runner.faults - faults
        found["cost"] = self._cost(name, k, temperature, report) if batch == self.grid.batches[0] and name != PLAIN else None
        self.results.append(found)
        return found

    def _reference(self, temperature: float, report: ReportStep) -> list[list[int]]:
        if temperature not in self._plain:
            report(f"plain decoding, temperature {temperature:g}")
            setup = self._setup(PLAIN, 0, coupled=True)
            self._plain[temperature] = self._texts(setup, self.grid.prompts, temperature, self.grid.batches[0])
        return self._plain[temperature]

    def _texts(self, setup: RoundSetup, prompts: Sequence[Sequence[int]], temperature: float, batch: int) -> list[list[int]]:
        params = replace(self.grid.params, temperature=temperature)
        texts: list[list[int]] = []
        for start in range(0, len(prompts), batch):
            texts += [text.token_ids for text in self.runner.generate(setup, prompts[start : start + batch], params)]
        return texts

    def _cost(self, name: str, k: int, temperature: float, report: ReportStep) -> float:
        """Return the median ratio of seconds with and without same-text mode, measured in turn."""
        prompts = self.grid.prompts[:COST_PROMPTS]
        ratios = []
        for repeat in range(COST_REPEATS):
            report(f"{name} k={k}, temperature {temperature:g}: cost, {repeat + 1} of {COST_REPEATS}")
            seconds = {}
            for coupled in (True, False) if repeat % 2 else (False, True):
                started = perf_counter()
                self._texts(self._setup(name, k, coupled), prompts, temperature, self.grid.batches[0])
                seconds[coupled] = perf_counter() - started
            ratios.append(seconds[True] / seconds[False])
        return round(median(ratios), 4)

    def _setup(self, name: str, k: int, coupled: bool) -> RoundSetup:
        return RoundSetup(self._proposers[name], self._verifier, k, coupled)
