"""Greedy text with and without drafts, and what stands behind the first difference: a tie within rounding, or a defect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from outrider.audit.rig import Rig, Text, Way
from outrider.types import SamplingParams

EXPLAINED = 1000  # steps of the arithmetic's type: more, or more than one nat, is no rounding
NUM_TOP = 16  # likeliest tokens of each place that are compared between the two runs


@dataclass(frozen=True)
class Difference:
    """Where two greedy texts part. Log-probabilities are logits less a constant that both tokens share."""

    prompt: int
    place: int  # equal tokens before it
    plain_token: int
    speculative_token: int
    plain_logprobs: tuple[float, float]  # of the two tokens, after bias and penalties, in plain decoding's own pass
    speculative_logprobs: tuple[float, float] | None  # of the two in the drafts' pass, before them; None: one is far behind
    gap: float  # plain decoding's score of its own token less that of the other
    is_tie: bool


@dataclass
class GreedyResult:
    """The comparison over a set of prompts."""

    num_prompts: int
    num_tokens: int
    rounding: float  # largest difference of a log-probability between the two runs, on text that both have
    resolution: float  # what one step of the arithmetic's type is at the size of the target's logits
    differences: list[Difference] = field(default_factory=list)

    @property
    def threshold(self) -> float:
        """A gap up to this is a tie: each of two logits may have moved by the rounding, one up and one down."""
        return 2 * max(self.rounding, self.resolution)

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains how far the two runs are apart after equal texts. A cache gone wrong is apart, too, and
        would make a tie of every difference."""
        return self.rounding <= min(EXPLAINED * self.resolution, 1.0)

    @property
    def num_defects(self) -> int:
        return sum(not each.is_tie for each in self.differences)


def audit_greedy(rig: Rig, way: Way, prompts: Sequence[Sequence[int]], params: SamplingParams) -> GreedyResult:
    """The same tokens as plain decoding? ``params`` are the user's; the temperature is taken to be 0."""
    params = replace(params, temperature=0.0, logprobs=NUM_TOP)
    plain, drafted = rig.generate(Way(), prompts, params), rig.generate(way, prompts, params)
    places = [_first_difference(a.token_ids, b.token_ids) for a, b in zip(plain, drafted, strict=True)]
    result = GreedyResult(len(prompts), sum(len(text.token_ids) for text in drafted), 0.0, resolution(rig, prompts[0]))
    for a, b, place in zip(plain, drafted, places, strict=True):
        result.rounding = max(result.rounding, _rounding(a, b, len(a.token_ids) if place is None else place + 1))
    for index, place in enumerate(places):
        if place is not None:
            texts = plain[index], drafted[index]
            result.differences.append(_difference(rig, index, place, prompts[index], texts, params, result.threshold))
    return result


def resolution(rig: Rig, prompt: Sequence[int]) -> float:
    """One unit in the last place of the largest logit after a prompt, in the type that the passes compute in."""
    runner = rig.runner
    try:
        largest = runner.extend(["resolution-probe"], [list(prompt)]).abs()
        largest = largest[largest.isfinite()].max()
    finally:
        runner.release(["resolution-probe"])
    return float(largest) * torch.finfo(runner.cache.dtype).eps


def _first_difference(plain: Sequence[int], drafted: Sequence[int]) -> int | None:
    return next((place for place, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b), None)


def _rounding(plain: Text, drafted: Text, num_places: int) -> float:
    """Over the first places, where the text before is the same in both runs."""
    largest = 0.0
    for a, b in zip(plain.logprobs[:num_places], drafted.logprobs[:num_places], strict=True):
        others = dict(b.top)
        largest = max([largest, *(abs(value - others[token]) for token, value in a.top if token in others)])
    return largest


def _difference(
    rig: Rig,
    index: int,
    place: int,
    prompt: Sequence[int],
    texts: tuple[Text, Text],
    params: SamplingParams,
    threshold: float,
) -> Difference:
    """Looks at one difference again: the scores that plain decoding chose by, penalties included."""
    plain, drafted = texts
    a, b = plain.token_ids[place], drafted.token_ids[place]
    scores: list[tuple[float, float]] = []

    def show(prefixes: list[tuple[int, ...]], probs: torch.Tensor) -> None:
        if len(prefixes[0]) == place:
            law = probs[0].double().log()
            scores.append((float(law[a]), float(law[b])))

    # at temperature 1 and without truncation probabilities tell the scores themselves
    open_params = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logprobs=None)
    rig.follow(prompt, [plain.token_ids[: place + 1]], open_params, show)
    seen = dict(drafted.logprobs[place].top)
    in_drafts = (seen[a], seen[b]) if a in seen and b in seen else None
    gap = scores[0][0] - scores[0][1]
    return Difference(index, place, a, b, scores[0], in_drafts, gap, gap <= threshold)
