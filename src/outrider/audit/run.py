"""Audit several methods over one target, and describe the results as one JSON-ready document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from outrider.audit import certificate
from outrider.audit.runner import AuditRunner, RoundSetup
from outrider.audit.same_text import Grid, compared
from outrider.audit.sampling import AuditSettings, ReportProgress
from outrider.bench.provenance import digest, provenance, same_program
from outrider.engine.config import build_verifier
from outrider.engine.llm import LLM
from outrider.errors import OutriderError
from outrider.proposers.base import Proposer


@dataclass(frozen=True)
class Audited:
    """A target and the methods that are audited with it."""

    llm: LLM
    proposers: Mapping[str, Proposer]  # by method
    not_possible: dict[str, str]  # method -> why it cannot be audited
    models: Mapping[str, Any]  # options of the models
    sampler: Mapping[str, Any]  # sampler settings, for the document

    def document(self, kind: str, certified: bool, seconds: float, **more: Any) -> dict[str, Any]:
        """Return a document of this kind with the fields that all documents have."""
        return {
            "schema": "outrider-audit/1",
            "kind": kind,
            "certified": certified,
            "target": self.models.get("target") or "embedded",
            **provenance(self.llm.runner),
            "seconds": round(seconds, 1),
            "not_possible": self.not_possible,
            **more,
        }


def certificates(
    audited: Audited, settings: AuditSettings, batch: int, report_of: Callable[[str], ReportProgress]
) -> Iterator[dict[str, Any]]:
    """Audit each method; yield the document after each certificate, and at the end.

    ``report_of``: returns the callback for the progress of a method.
    """
    started, count, found = perf_counter(), len(audited.proposers), list[dict[str, Any]]()
    settings = replace(settings, alpha=settings.alpha / max(count, 1))  # Bonferroni: the given one holds for the whole audit
    runner, verifier = AuditRunner(audited.llm.runner, batch), build_verifier(audited.llm.speculation)

    def whole() -> dict[str, Any]:
        is_certified = 0 < len(found) == count and all(each["verdict"] == "certified" for each in found)
        seconds = perf_counter() - started
        return audited.document("certificate", is_certified, seconds, settings=audited.sampler, methods=found)

    for name, proposer in audited.proposers.items():
        k = min(settings.k, proposer.max_drafts)
        setup = RoundSetup(proposer, verifier, k)
        try:
            result = certificate.audit(runner, name, setup, replace(settings, k=k), report_of(name))
            found.append(certificate.document(result))
        except OutriderError as error:
            audited.not_possible[name] = str(error)
        else:
            yield whole()
    yield whole()


def plan_of(audited: Audited, grid: Grid) -> dict[str, Any]:
    """Return the grid's entry in the document; a run may be continued only if it is equal."""
    return {
        "methods": list(grid.methods),
        "k": list(grid.lengths),
        "batches": list(grid.batches),
        "temperatures": list(grid.temperatures),
        "prompts": len(grid.prompts),
        "max_tokens": grid.params.max_tokens,
        "settings": audited.sampler,
        "digest": digest(grid.prompts),
        "models": audited.models,
        "program": same_program(audited.llm.runner),
    }


def same_text(
    audited: Audited, grid: Grid, earlier: Mapping[str, Any] | None, report: ReportProgress
) -> Iterator[dict[str, Any]]:
    """Run the cells of a grid that ``earlier`` lacks; yield the document of all finished cells after each."""
    earlier = earlier or {"cells": [], "seconds": 0.0}
    started, plan = perf_counter() - earlier["seconds"], plan_of(audited, grid)
    cells, every = list(earlier["cells"]), grid.cells()
    left = [cell for cell in every if not any(cell.items() <= known.items() for known in cells)]

    def whole() -> dict[str, Any]:
        counts = {name: sum(cell[name] for cell in cells) for name in ("differing", "faults")}
        is_certified = len(cells) == len(every) and not any(counts.values())
        return audited.document("same-text", is_certified, perf_counter() - started, grid=plan, **counts, cells=cells)

    if cells:
        yield whole()
    for cell in compared(audited.llm, grid, audited.proposers, left, lambda what: report(what, 0, len(left))):
        cells.append(cell)
        report("", 1, len(left))
        yield whole()
