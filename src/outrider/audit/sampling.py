"""Sampled text against the target's exact law: how many samples, the tests, and the wrong verifiers that must fail them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from outrider.audit.evidence import LEAKS, MIN_EXPECTED, Evidence, Tally, Test
from outrider.audit.rig import Rig, Way
from outrider.audit.statistics import holm, smallest_tv
from outrider.audit.watching import Gauge, Stressed, Watched
from outrider.audit.wrong import CONTROLS, Control
from outrider.sampling.randomness import key_of
from outrider.types import OutriderError, SamplingParams
from outrider.verifiers.rejection import RejectionVerifier

AS_IS, STRESSED = "as it is", "half of the drafts replaced"
PILOT = 48  # samples of each prompt from which the rest is planned
FLOOR = 1e-3  # see Evidence
LEAST = 30  # accepted, corrected and bonus tokens without which nothing has been tested
Say = Callable[[str, int, float], None]  # what is being done, samples drawn since the last call, and in all (0: not known yet)


@dataclass(frozen=True)
class Question:
    """What is asked of a method: on which prompts, with which sampler, and how sure one wants to be."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    k: int
    alpha: float = 0.01  # chance of a false alarm in the whole audit of a method
    power: float = 0.99  # chance that what is to be caught is caught
    tv: float = 0.05  # total variation distance of the first token's law that is to be caught
    seed: int = 0
    max_samples: int = 100_000
    rounding: float = 0.0  # of log-probabilities between passes of different widths, as greedy text showed it

    @property
    def length(self) -> int:
        """Places tested: heads draft from the second token on, and a bonus token follows K drafts."""
        return self.k + 2

    @property
    def num_tests(self) -> int:
        """Of both parts, at most."""
        return 2 * (2 * self.length + 1)

    @property
    def strictest(self) -> float:
        """The level of the first of Holm's steps: what is caught there is caught for certain."""
        return self.alpha / self.num_tests

    @property
    def threshold(self) -> float:
        """Logarithm that one likelihood ratio must reach, all of them being averaged, for the test to reject."""
        return math.log(len(LEAKS) / self.strictest)


@dataclass(frozen=True)
class Reach:
    """Where a wrong verifier shows soonest: the part, and its samples after which it is caught at the power asked."""

    part: str
    samples: float


@dataclass(frozen=True)
class Plan:
    """How many samples of each part, over all prompts, and why."""

    samples: dict[str, int]
    reach: dict[str, Reach]  # by the name of the wrong verifier
    distance: float  # total variation of target and draft where a round begins
    stressed_distance: float
    smallest_leak: float | None  # that shows in the drafts as they are; None: not even the passing of all

    @property
    def total(self) -> float:
        """Of the audited verifier and, until they are caught, of the wrong ones."""
        return sum(self.samples.values()) + sum(each.samples for each in self.reach.values())


@dataclass
class Outcome:
    """One verifier's samples under the plan."""

    tests: dict[str, list[Test]]  # part -> its tests
    evidence: dict[str, Evidence]
    faults: int = 0

    @property
    def adjusted(self) -> dict[str, list[float]]:
        """Holm's p-values, over the tests of both parts."""
        values = iter(holm([test.p_value for tests in self.tests.values() for test in tests]))
        return {part: [next(values) for _ in tests] for part, tests in self.tests.items()}

    @property
    def impossible(self) -> int:
        """Sampled tokens that the sampler settings rule out."""
        return sum(each.impossible for each in self.evidence.values())

    def num_samples(self) -> int:
        return sum(each.num_samples for each in self.evidence.values())

    def least_p(self) -> float:
        """The least adjusted p-value; 0 where a token was said that cannot be."""
        return 0.0 if self.impossible else min((value for values in self.adjusted.values() for value in values), default=1.0)


@dataclass(frozen=True)
class Caught:
    """What became of a wrong verifier."""

    control: Control
    num_samples: int  # that it took, or that were drawn
    p_value: float  # the least, at the strictest of Holm's levels
    by: str  # the test that caught it; "" if none did


@dataclass
class SamplingResult:
    """Everything the sampled part of an audit found."""

    plan: Plan
    outcome: Outcome
    controls: list[Caught] = field(default_factory=list)

    def reasons_void(self) -> list[str]:
        """Why nothing follows from the tests; empty where something does."""
        reasons = [
            f"the control {each.control.name!r} ({each.control.text}) was not caught" for each in self.controls if not each.by
        ]
        counts = sum((each.origins for each in self.outcome.evidence.values()), start=Counter[str]())
        few = [origin for origin in ("accepted", "corrected", "bonus") if counts[origin] < LEAST]
        if few:
            reasons.append(f"fewer than {LEAST} {' and '.join(few)} tokens: the method hardly drafts on these prompts")
        if self.outcome.faults:
            reasons.append(f"the proposer failed {self.outcome.faults} time(s), and plain decoding went on")
        return reasons


def audit_samples(rig: Rig, way: Way, question: Question, say: Say) -> SamplingResult:
    """Plans, samples, tests, and lets every wrong verifier be caught. ``way.verifier`` judges; controls stand in its place."""
    plan = make_plan(rig, way, question, say)
    result = SamplingResult(plan, judge(rig, way, question, plan, say))
    for number, control in enumerate(CONTROLS, start=1):
        result.controls.append(catch(rig, way, question, plan, control, number, say))
    return result


def make_plan(rig: Rig, way: Way, question: Question, say: Say) -> Plan:
    """Samples for the asked ``tv`` in the drafts as they are; with half of them replaced, for the controls not caught there."""
    gauges, per_sample = {}, {}
    for number, part in enumerate((AS_IS, STRESSED)):
        say("planning", 0, 0)
        gauge = gauges[part] = Gauge()
        pilot = replace(_part(way, part, question.seed), verifier=RejectionVerifier())
        num_rounds = 0
        for index, prompt in enumerate(question.prompts):
            seed = key_of(question.seed, 7, number, index) >> 1
            way_watched = replace(pilot, verifier=Watched(pilot.verifier, gauge))
            waves = rig.sample(way_watched, prompt, question.params, PILOT, question.length, seed)
            num_rounds += sum(len(sample.draft_probs) for wave in waves for sample in wave)
        if not gauge.num_rounds or not num_rounds:
            raise OutriderError("the method drafts nothing on these prompts: give others with --prompts, or another --method")
        per_sample[part] = num_rounds / (PILOT * len(question.prompts))
    needed_as_is = samples_for_tv(rig, question)
    reach = {}
    for control in CONTROLS:
        both = [
            Reach(part, gauge.samples_for(control.name, question.strictest, question.power, per_sample[part]))
            for part, gauge in gauges.items()
        ]
        reach[control.name] = min(
            (each for each in both if each.part == STRESSED or each.samples <= needed_as_is), key=lambda each: each.samples
        )
    under_stress = [each.samples for each in reach.values() if each.part == STRESSED]
    samples = {AS_IS: needed_as_is, STRESSED: max([PILOT * len(question.prompts), *under_stress])}
    for part, needed in samples.items():
        if needed > question.max_samples:
            told = f"more than {question.max_samples:,}" if math.isinf(needed) else f"{needed:,.0f}"
            raise OutriderError(
                f"what is asked would take {told} samples ({part}): ask for less --power, a larger --tv, or allow more with"
                " --max-samples"
            )
    return Plan(
        {part: _whole(needed, len(question.prompts)) for part, needed in samples.items()},
        reach,
        gauges[AS_IS].mean_distance,
        gauges[STRESSED].mean_distance,
        gauges[AS_IS].smallest_leak(samples[AS_IS] * per_sample[AS_IS], question.threshold, question.power),
    )


def samples_for_tv(rig: Rig, question: Question) -> float:
    """Samples, over all prompts, after which the G-test of the first token catches the asked total variation distance."""
    laws: list[np.ndarray[Any, Any]] = []
    for prompt in question.prompts:
        rig.follow(prompt, [(0,)], question.params, lambda _, probs: laws.append(probs[0].double().cpu().numpy()))
    each: float = 2 * MIN_EXPECTED
    while each * len(laws) <= question.max_samples:
        kept = [law[law * each >= MIN_EXPECTED] for law in laws]
        freedom = sum(max(0, len(likely) - ((1 - likely.sum()) * each < MIN_EXPECTED)) for likely in kept)
        if freedom and smallest_tv(freedom, each * len(laws), question.strictest, question.power) <= question.tv:
            return each * len(laws)
        if not freedom and all(law.max() > 1 - 1e-9 for law in laws):
            return each * len(laws)  # the settings leave one token only
        each *= 1.2
    return math.inf


def judge(rig: Rig, way: Way, question: Question, plan: Plan, say: Say) -> Outcome:
    """All samples of the plan with the verifier that is audited."""
    before = rig.faults
    *_, outcome = _outcomes(rig, way, question, list(plan.samples.items()), 1, lambda part, done: say(part, done, plan.total))
    outcome.faults = rig.faults - before
    return outcome


def catch(rig: Rig, way: Way, question: Question, plan: Plan, control: Control, number: int, say: Say) -> Caught:
    """A wrong verifier, prompt by prompt, until a test rejects at the strictest level: first as many samples as it should
    take, then all those of the plan."""
    reach = plan.reach[control.name]
    stages = [(reach.part, _whole(reach.samples, len(question.prompts)))]
    stages += sorted(plan.samples.items(), key=lambda stage: stage[0] != reach.part)
    wrong = replace(way, verifier=control.verifier(question.seed))
    best, samples, least = "", 0, 1.0
    for outcome in _outcomes(
        rig, wrong, question, stages, 1 + number, lambda part, done: say(f"{control.name}, {part}", done, plan.total)
    ):
        samples = outcome.num_samples()
        found = [(test.p_value, f"{test.name}, {part}") for part, tests in outcome.tests.items() for test in tests]
        if outcome.impossible:
            found.append((0.0, "a token of probability 0"))
        least, best = min(found, default=(1.0, ""))
        if least <= question.strictest:
            break
    return Caught(control, samples, least, best if least <= question.strictest else "")


def _outcomes(
    rig: Rig,
    way: Way,
    question: Question,
    stages: Sequence[tuple[str, int]],
    stream: int,
    say: Callable[[str, int], None],
) -> Iterator[Outcome]:
    """Stages of (part, samples of all prompts), prompt by prompt: what the tests say so far, of all samples of each part.

    ``stream`` keeps the random numbers apart.
    """
    outcome = Outcome({}, {})
    for stage, (part, num_samples) in enumerate(stages):
        floor = FLOOR if question.rounding else 0.0
        evidence = outcome.evidence.setdefault(part, Evidence(question.length, floor))
        part_way = _part(way, part, key_of(question.seed, stream, stage))
        for index, prompt in enumerate(question.prompts):
            samples = []
            seed = key_of(question.seed, stream, stage, index) >> 1
            for wave in rig.sample(
                part_way, prompt, question.params, num_samples // len(question.prompts), question.length, seed
            ):
                samples += wave
                say(part, len(wave))
            tally = Tally(samples)

            def show(prefixes: list[tuple[int, ...]], probs: Tensor, tally: Tally = tally, into: Evidence = evidence) -> None:
                into.observe(tally, prefixes, probs)

            rig.follow(prompt, tally.texts, question.params, show)
            evidence.settle(tally)
            outcome.tests[part] = evidence.tests()
            yield outcome


def _part(way: Way, part: str, seed: int) -> Way:
    """``way`` with its drafts as they are, or with half of them replaced."""
    return way if part == AS_IS else replace(way, proposer=Stressed(way.proposer, seed % 2**63))


def _whole(number: float, parts: int) -> int:
    """The next number that ``parts`` divides."""
    return math.ceil(number / parts) * parts
