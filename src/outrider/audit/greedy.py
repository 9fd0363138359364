"""Compare greedy output with and without drafts; classify the first difference as a tie within rounding or a defect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from outrider.audit.runner import AuditRunner, RoundSetup
from outrider.bench.race import first_difference
from outrider.engine.outputs import Emission
from outrider.types import SamplingParams

EXPLAINED = 1000  # floating-point steps; a larger difference, or more than one nat, is not rounding
NUM_TOP = 16  # most likely tokens per position that are compared between the two runs


@dataclass(frozen=True)
class Difference:
    """The first difference of two greedy outputs. Log-probabilities are logits minus a constant shared by both tokens."""

    prompt: int
    place: int  # number of equal tokens before it
    plain_token: int
    speculative_token: int
    # scores of both tokens in plain decoding, after bias and penalties
    plain_logprobs: tuple[float, float]
    # scores of both tokens with drafts, before bias and penalties; None: one is not in the top tokens
    speculative_logprobs: tuple[float, float] | None
    gap: float  # plain decoding's score of its token minus that of the other
    is_tie: bool


@dataclass
class GreedyResult:
    """Comparison over a set of prompts."""

    num_prompts: int
    num_tokens: int
    rounding: float  # largest difference of a log-probability between the two runs on equal prefixes
    resolution: float  # one floating-point step at the size of the target's logits
    differences: list[Difference] = field(default_factory=list)

    @property
    def threshold(self) -> float:
        """Return the largest gap that counts as a tie: twice the rounding, since both logits may move."""
        return 2 * max(self.rounding, self.resolution)

    @property
    def is_rounding(self) -> bool:
        """Return whether rounding explains the differences after equal prefixes. A wrong cache also causes differences and
        would turn every defect into a tie."""
        return self.rounding <= min(EXPLAINED * self.resolution, 1.0)

    @property
    def num_defects(self) -> int:
        return sum(not each.is_tie for each in self.differences)


def audit_greedy(
    runner: AuditRunner, setup: RoundSetup, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> GreedyResult:
    """Compare tokens with plain decoding. ``params`` are the user's, with temperature 0."""
    params = replace(params, temperature=0.0, logprobs=NUM_TOP)
    plain, drafted = runner.generate(RoundSetup(), prompts, params), runner.generate(setup, prompts, params)
    places = [first_difference(a.token_ids, b.token_ids) for a, b in zip(plain, drafted, strict=True)]
    result = GreedyResult(len(prompts), sum(len(text.token_ids) for text in drafted), 0.0, resolution(runner, prompts[0]))
    for a, b, place in zip(plain, drafted, places, strict=True):
        result.rounding = max(result.rounding, _rounding(a, b, len(a.token_ids) if place is None else place + 1))
    for index, place in enumerate(places):
        if place is not None:
            texts = plain[index], drafted[index]
            result.differences.append(_difference(runner, index, place, prompts[index], texts, params, result.threshold))
    return result


def resolution(runner: AuditRunner, prompt: Sequence[int]) -> float:
    """Return one unit in the last place of the largest logit after a prompt, in the passes' dtype."""
    target = runner.target
    try:
        largest = target.extend(["resolution-probe"], [list(prompt)]).abs()
        largest = largest[largest.isfinite()].max()
    finally:
        target.release(["resolution-probe"])
    return float(largest) * torch.finfo(target.cache.dtype).eps


def _rounding(plain: Emission, drafted: Emission, num_places: int) -> float:
    """Measure rounding at the first positions, where both runs have the same prefix."""
    largest = 0.0
    for a, b in zip((plain.logprobs or [])[:num_places], (drafted.logprobs or [])[:num_places], strict=True):
        others = dict(b.top)
        largest = max([largest, *(abs(value - others[token]) for token, value in a.top if token in others)])
    return largest


def _difference(
    runner: AuditRunner,
    index: int,
    place: int,
    prompt: Sequence[int],
    texts: tuple[Emission, Emission],
    params: SamplingParams,
    threshold: float,
) -> Difference:
    """Examine one difference with plain decoding's scores, penalties included."""
    plain, drafted = texts
    a, b = plain.token_ids[place], drafted.token_ids[place]
    scores: list[tuple[float, float]] = []

    def show(prefixes: list[tuple[int, ...]], probs: torch.Tensor) -> None:
        if len(prefixes[0]) == place:
            logprobs = probs[0].double().log()
            scores.append((float(logprobs[a]), float(logprobs[b])))

    # at temperature 1 without truncation, probabilities determine the scores
    open_params = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logprobs=None)
    runner.follow(prompt, [plain.token_ids[: place + 1]], open_params, show)
    seen = dict((drafted.logprobs or [])[place].top)
    in_drafts = (seen[a], seen[b]) if a in seen and b in seen else None
    gap = scores[0][0] - scores[0][1]
    return Difference(index, place, a, b, scores[0], in_drafts, gap, gap <= threshold)
