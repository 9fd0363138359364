"""Audit of one method: greedy output, sampled output, controls, and the verdict as a JSON-ready document."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from outrider.audit.evidence import Test
from outrider.audit.greedy import Difference, GreedyResult, audit_greedy
from outrider.audit.runner import AuditRunner, RoundSetup
from outrider.audit.sampling import AS_IS, STRESSED, AuditSettings, ReportProgress, SamplingResult, audit_samples
from outrider.bench.cells import rounded

Verdict = Literal["certified", "not certified", "void", "lossy"]
VERDICTS: dict[Verdict, str] = {
    "certified": "statistically indistinguishable from plain decoding; every wrong verifier was caught",
    "not certified": "the output differs from plain decoding",
    "void": "no conclusion: the audit could not have detected a difference",
    "lossy": "the verifier is lossy by design and cannot be certified",
}


@dataclass
class Certificate:
    """Results for one method. ``sampling`` is None if only greedy output was tested."""

    method: str
    verifier: str
    is_lossless: bool  # declared by the verifier
    settings: AuditSettings
    greedy: GreedyResult
    sampling: SamplingResult | None = None

    @property
    def findings(self) -> list[str]:
        """Return the evidence against equality with plain decoding."""
        found = []
        if self.greedy.num_defects:
            found.append(f"greedy output differs on {self.greedy.num_defects} prompt(s) beyond ties")
        if self.sampling is None:
            return found
        outcome, alpha = self.sampling.outcome, self.settings.alpha
        if outcome.impossible and self.greedy.rounding == 0:
            found.append(f"{outcome.impossible} sampled token(s) with probability zero under the sampler settings")
        for part, tests in outcome.tests.items():
            for test, value in zip(tests, outcome.adjusted[part], strict=True):
                if value <= alpha:
                    found.append(f"{test.name}{_at(test)}, {part}: p = {value:.2g} after Holm's correction")
        return found

    @property
    def doubts(self) -> list[str]:
        """Return why the tests would be inconclusive."""
        doubts = [] if self.sampling is None else self.sampling.reasons_void()
        if not self.greedy.is_rounding:
            doubts.append(
                f"log-probabilities after equal prefixes differ by up to {self.greedy.rounding:.2g} with and without drafts:"
                " more than rounding explains"
            )
        return doubts

    @property
    def verdict(self) -> Verdict:
        if not self.is_lossless:
            return "lossy"
        if self.findings:
            return "not certified"
        return "void" if self.doubts else "certified"


def audit(runner: AuditRunner, method: str, setup: RoundSetup, settings: AuditSettings, report: ReportProgress) -> Certificate:
    """Audit one method. At temperature 0 only greedy output is tested."""
    report("greedy text", 0, 0)
    greedy = audit_greedy(runner, setup, settings.prompts, settings.params)
    verifier = setup.verifier
    certificate = Certificate(method, type(verifier).__name__, verifier.lossless, settings, greedy)
    if not settings.params.is_greedy:
        certificate.sampling = audit_samples(runner, setup, replace(settings, rounding=greedy.rounding), report)
    return certificate


def document(certificate: Certificate) -> dict[str, Any]:
    """Return the certificate as JSON-ready data."""
    settings, greedy = certificate.settings, certificate.greedy
    found = {
        "method": certificate.method,
        "verifier": certificate.verifier,
        "lossless_by_design": certificate.is_lossless,
        "k": settings.k,
        "verdict": certificate.verdict,
        "findings": certificate.findings,
        "doubts": certificate.doubts,
        "remarks": [] if certificate.sampling is None else certificate.sampling.remarks,
        "greedy": {
            "prompts": greedy.num_prompts,
            "tokens": greedy.num_tokens,
            "rounding": greedy.rounding,
            "resolution": greedy.resolution,
            "threshold": greedy.threshold,
            "ties": len(greedy.differences) - greedy.num_defects,
            "defects": greedy.num_defects,
            "differences": [_difference(each) for each in greedy.differences],
        },
        "sampling": None if certificate.sampling is None else _sampling(certificate.sampling, settings),
    }
    return rounded(found)


def _sampling(result: SamplingResult, settings: AuditSettings) -> dict[str, Any]:
    plan, outcome = result.plan, result.outcome
    return {
        "alpha": settings.alpha,
        "power": settings.power,
        "tv": settings.tv,
        "tokens_per_sample": settings.length,
        "draft_distance": plan.distance,
        "draft_distance_stressed": plan.stressed_distance,
        "smallest_leak_as_it_is": plan.smallest_leak,
        "impossible_tokens": outcome.impossible,
        "faults": outcome.faults,
        "parts": {
            part: {
                "samples": outcome.evidence[part].num_samples,
                "origins": dict(outcome.evidence[part].origins),
                "tests": [
                    _test(test, value, settings)
                    for test, value in zip(outcome.tests[part], outcome.adjusted[part], strict=True)
                ],
            }
            for part in (AS_IS, STRESSED)
        },
        "controls": [
            {
                "name": each.control.name,
                "text": each.control.text,
                "caught": bool(each.by),
                "by": each.by,
                "samples": each.num_samples,
                "p_value": each.p_value,
                "planned_samples": plan.controls[each.control.name].samples,
                "planned_part": plan.controls[each.control.name].part,
                "planned_power": settings.power,
            }
            for each in result.controls
        ],
    }


def _test(test: Test, adjusted: float, settings: AuditSettings) -> dict[str, Any]:
    return asdict(test) | {"holm_p_value": adjusted, "smallest_tv": test.smallest_tv(settings.strictest, settings.power)}


def _difference(each: Difference) -> dict[str, Any]:
    """Return a difference as JSON-ready data, with None instead of infinite scores and gaps."""
    scores = [score if math.isfinite(score) else None for score in each.plain_logprobs]
    return asdict(each) | {"plain_logprobs": scores, "gap": each.gap if math.isfinite(each.gap) else None}


def _at(test: Test) -> str:
    return "" if test.token is None else f" of token {test.token}"
