"""Test sampled output against the target's exact distribution: sample sizes, tests, and controls that must fail."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from outrider.audit.evidence import LEAKS, MIN_EXPECTED, Evidence, PrefixCounts, Test
from outrider.audit.runner import AuditRunner, RoundSetup
from outrider.audit.statistics import holm, smallest_tv
from outrider.audit.watching import PowerEstimate, Stressed, Watched
from outrider.audit.wrong import CONTROLS, Control
from outrider.sampling.randomness import key_of
from outrider.types import OutriderError, SamplingParams
from outrider.verifiers.rejection import RejectionVerifier

AS_IS, STRESSED = "as it is", "half of the drafts replaced"
MAX_PLANNED = 10**9  # larger numbers of samples are not computed
PILOT_SAMPLES = 48  # samples per prompt for planning
MIN_TOKENS = 30  # minimum tokens of an origin
CONTROL_STAGES = 3  # numbers of samples after which a control may be caught: as planned, then all of each part
ReportProgress = Callable[[str, int, float], None]  # description, samples since the last call, total samples (0: unknown)


@dataclass(frozen=True)
class AuditSettings:
    """Prompts, sampler settings and error probabilities of an audit."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    k: int
    alpha: float = 0.01  # probability of a false alarm in the audit of a method
    power: float = 0.99  # probability of detecting a deviation of tv
    tv: float = 0.05  # total variation distance of the first token's distribution to detect
    seed: int = 0
    max_samples: int = 100_000
    rounding: float = 0.0  # rounding of log-probabilities between passes, measured on greedy output

    @property
    def length(self) -> int:
        """Return the number of tested positions: heads draft from the second token on, and a bonus token follows K drafts."""
        return self.k + 2

    @property
    def strictest(self) -> float:
        """Return the level of Holm's first step, the strictest: each part has two tests per position and one of all rounds."""
        return self.alpha / (2 * (2 * self.length + 1))

    @property
    def stage_level(self) -> float:
        """Return the level of a control's tests at the end of a stage: the ends of all stages share half of the strictest."""
        return self.strictest / 2 / CONTROL_STAGES

    def level_of_look(self, look: int) -> float:
        """Return the level of a control's tests after each prompt of a stage; ``look`` counts them from 1 over all stages.

        Those before the end of a stage share as much as its end has, because each may reject the control.
        """
        num_prompts = len(self.prompts)
        return self.stage_level if look % num_prompts == 0 else self.stage_level / (num_prompts - 1)

    @property
    def threshold(self) -> float:
        """Return the log-value that one of the averaged likelihood ratios must reach for rejection."""
        return math.log(len(LEAKS) / self.strictest)


@dataclass(frozen=True)
class ControlPlan:
    """The part that detects a control with the fewest samples, and their number at the required power."""

    part: str
    samples: float


@dataclass(frozen=True)
class SamplePlan:
    """Samples per part over all prompts, with the reasons."""

    samples: dict[str, int]
    controls: dict[str, ControlPlan]  # by name of the control
    distance: float  # total variation of target and draft at the start of a round
    stressed_distance: float
    smallest_leak: float | None  # smallest detectable leak with unchanged drafts; None: not even 100%

    @property
    def total(self) -> float:
        """Return the samples of the audited verifier and, until they are caught, of the controls."""
        return sum(self.samples.values()) + sum(each.samples for each in self.controls.values())


@dataclass
class Outcome:
    """Samples of one verifier."""

    tests: dict[str, list[Test]]  # part -> its tests
    evidence: dict[str, Evidence]
    faults: int = 0

    @property
    def adjusted(self) -> dict[str, list[float]]:
        """Return Holm-adjusted p-values over the tests of both parts."""
        values = iter(holm([test.p_value for tests in self.tests.values() for test in tests]))
        return {part: [next(values) for _ in tests] for part, tests in self.tests.items()}

    @property
    def impossible(self) -> int:
        """Return the number of sampled tokens with probability zero."""
        return sum(each.impossible for each in self.evidence.values())

    @property
    def num_samples(self) -> int:
        return sum(each.num_samples for each in self.evidence.values())


@dataclass(frozen=True)
class Caught:
    """Result of a control."""

    control: Control
    num_samples: int  # samples until it was caught, or all
    p_value: float  # smallest p-value, at Holm's strictest level
    by: str  # the test that caught it; "" if none did


@dataclass
class SamplingResult:
    """Results of the sampled part of an audit."""

    plan: SamplePlan
    outcome: Outcome
    controls: list[Caught] = field(default_factory=list)

    def reasons_void(self) -> list[str]:
        """Return why the tests are inconclusive; empty if they are not."""
        reasons = [
            f"the control {each.control.name!r} ({each.control.text}) was not caught" for each in self.controls if not each.by
        ]
        few = self._few("accepted", "corrected")
        if few:
            reasons.append(f"fewer than {MIN_TOKENS} {' and '.join(few)} tokens: the method rarely drafts on these prompts")
        if self.outcome.faults:
            reasons.append(f"drafting failed {self.outcome.faults} time(s), and plain decoding continued")
        return reasons

    @property
    def remarks(self) -> list[str]:
        """Return remarks about origins that were too rare to test, and too rare to matter."""
        return [
            f"fewer than {MIN_TOKENS} {origin} tokens: the token after a fully accepted round was not tested"
            for origin in self._few("bonus")
        ]

    def _few(self, *origins: str) -> list[str]:
        counts = sum((each.origins for each in self.outcome.evidence.values()), start=Counter[str]())
        return [origin for origin in origins if counts[origin] < MIN_TOKENS]


def audit_samples(runner: AuditRunner, setup: RoundSetup, settings: AuditSettings, report: ReportProgress) -> SamplingResult:
    """Plan, sample, test, and run every control. ``setup.verifier`` is audited; controls replace it."""
    plan = make_plan(runner, setup, settings, report)
    result = SamplingResult(plan, judge(runner, setup, settings, plan, report))
    for number, control in enumerate(CONTROLS, start=1):
        result.controls.append(catch(runner, setup, settings, plan, control, number, report))
    return result


def make_plan(runner: AuditRunner, setup: RoundSetup, settings: AuditSettings, report: ReportProgress) -> SamplePlan:
    """Plan samples to detect ``tv`` with unchanged drafts, and with half replaced for controls not detected otherwise."""
    estimates, per_sample = {}, {}
    for number, part in enumerate((AS_IS, STRESSED)):
        report("planning", 0, 0)
        estimate = estimates[part] = PowerEstimate(settings.rounding > 0)
        pilot = replace(_part(setup, part, settings.seed), verifier=RejectionVerifier())
        num_rounds = 0
        for index, prompt in enumerate(settings.prompts):
            seed = key_of(settings.seed, 7, number, index) >> 1
            watched_setup = replace(pilot, verifier=Watched(pilot.verifier, estimate))
            waves = runner.sample(watched_setup, prompt, settings.params, PILOT_SAMPLES, settings.length, seed)
            num_rounds += sum(len(sample.draft_probs) for wave in waves for sample in wave)
        if not estimate.num_rounds or not num_rounds:
            raise OutriderError("the method drafts nothing on these prompts: use other --prompts or another method")
        per_sample[part] = num_rounds / (PILOT_SAMPLES * len(settings.prompts))
    needed_as_is = samples_for_tv(runner, settings)
    controls = {}
    for control in CONTROLS:
        both = [
            ControlPlan(part, estimate.samples_for(control.name, settings.stage_level, settings.power, per_sample[part]))
            for part, estimate in estimates.items()
        ]
        controls[control.name] = min(
            (each for each in both if each.part == STRESSED or each.samples <= needed_as_is), key=lambda each: each.samples
        )
    under_stress = [each.samples for each in controls.values() if each.part == STRESSED]
    samples = {AS_IS: needed_as_is, STRESSED: max([PILOT_SAMPLES * len(settings.prompts), *under_stress])}
    part, needed = max(samples.items(), key=lambda each: each[1])
    if needed > settings.max_samples:
        shown = f"more than {MAX_PLANNED:,}" if math.isinf(needed) else f"{math.ceil(needed):,}"
        drafts = "the method's own drafts" if part == AS_IS else part
        raise OutriderError(
            f"the audit needs {shown} samples with {drafts}, more than --max-samples {settings.max_samples}: raise it, raise"
            " --tv or lower --power"
        )
    return SamplePlan(
        {part: _rounded_up(needed, len(settings.prompts)) for part, needed in samples.items()},
        controls,
        estimates[AS_IS].mean_distance,
        estimates[STRESSED].mean_distance,
        estimates[AS_IS].smallest_leak(samples[AS_IS] * per_sample[AS_IS], settings.threshold, settings.power),
    )


def samples_for_tv(runner: AuditRunner, settings: AuditSettings) -> float:
    """Return the samples over all prompts with which the G-test of the first token detects ``tv``, at most ``MAX_PLANNED``.

    inf if more are needed.
    """
    target_probs: list[np.ndarray[Any, Any]] = []  # after each prompt
    for prompt in settings.prompts:
        runner.follow(prompt, [(0,)], settings.params, lambda _, found: target_probs.append(found[0].double().cpu().numpy()))
    each: float = 2 * MIN_EXPECTED
    while each * len(target_probs) <= MAX_PLANNED:
        kept = [probs[probs * each >= MIN_EXPECTED] for probs in target_probs]
        freedom = sum(max(0, len(likely) - ((1 - likely.sum()) * each < MIN_EXPECTED)) for likely in kept)
        if freedom and smallest_tv(freedom, each * len(target_probs), settings.strictest, settings.power) <= settings.tv:
            return each * len(target_probs)
        if not freedom and all(probs.max() > 1 - 1e-9 for probs in target_probs):
            return each * len(target_probs)  # the settings allow a single token
        each *= 1.2
    return math.inf


def judge(runner: AuditRunner, setup: RoundSetup, settings: AuditSettings, plan: SamplePlan, report: ReportProgress) -> Outcome:
    """Draw all samples of the plan with the audited verifier."""
    report(AS_IS, 0, plan.total)
    before = runner.faults
    stages = list(plan.samples.items())
    *_, outcome = _outcomes(runner, setup, settings, stages, 1, lambda part, done: report(part, done, plan.total))
    outcome.faults = runner.faults - before
    return outcome


def catch(
    runner: AuditRunner,
    setup: RoundSetup,
    settings: AuditSettings,
    plan: SamplePlan,
    control: Control,
    number: int,
    report: ReportProgress,
) -> Caught:
    """Run a control, prompt by prompt, until a test rejects it.

    First with the planned number of samples, then with all of the plan.
    """
    planned = plan.controls[control.name]
    stages = [(planned.part, _rounded_up(planned.samples, len(settings.prompts)))]
    stages += sorted(plan.samples.items(), key=lambda stage: stage[0] != planned.part)
    assert len(stages) <= CONTROL_STAGES  # they share the level
    wrong = replace(setup, verifier=control.verifier(settings.seed))
    outcomes = _outcomes(
        runner, wrong, settings, stages, 1 + number, lambda part, done: report(f"{control.name}, {part}", done, plan.total)
    )
    for look, outcome in enumerate(outcomes, start=1):
        least, test = _least(outcome, settings)
        if least <= settings.level_of_look(look):
            return Caught(control, outcome.num_samples, least, test)
    return Caught(control, outcome.num_samples, least, "")


def _least(outcome: Outcome, settings: AuditSettings) -> tuple[float, str]:
    """Return the smallest p-value, and the name of its test."""
    found = [(test.p_value, f"{test.name}, {part}") for part, tests in outcome.tests.items() for test in tests]
    if outcome.impossible and settings.rounding == 0:  # otherwise also a correct verifier emits tokens at a border
        found.append((0.0, "a token of probability 0"))
    return min(found, default=(1.0, ""))


def _outcomes(
    runner: AuditRunner,
    setup: RoundSetup,
    settings: AuditSettings,
    stages: Sequence[tuple[str, int]],
    stream: int,
    report: Callable[[str, int], None],
) -> Iterator[Outcome]:
    """Run stages, each a part and its samples over all prompts; yield the tests over all samples so far.

    ``stream``: index that separates the random number streams of verifiers.
    """
    outcome = Outcome({}, {})
    for stage, (part, num_samples) in enumerate(stages):
        evidence = outcome.evidence.setdefault(part, Evidence(settings.length, settings.rounding > 0))
        part_setup = _part(setup, part, key_of(settings.seed, stream, stage))
        for index, prompt in enumerate(settings.prompts):
            samples = []
            seed = key_of(settings.seed, stream, stage, index) >> 1
            for wave in runner.sample(
                part_setup, prompt, settings.params, num_samples // len(settings.prompts), settings.length, seed
            ):
                samples += wave
                report(part, len(wave))
            prefix_counts = PrefixCounts(samples)
            runner.follow(prompt, prefix_counts.texts, settings.params, partial(evidence.observe, prefix_counts))
            evidence.add_likelihood_ratios(prefix_counts)
            outcome.tests[part] = evidence.tests()
            yield outcome


def _part(setup: RoundSetup, part: str, seed: int) -> RoundSetup:
    """Return ``setup`` with unchanged drafts, or with half of them replaced."""
    return setup if part == AS_IS else replace(setup, proposer=Stressed(setup.proposer, seed % 2**63))


def _rounded_up(number: float, parts: int) -> int:
    """Round up to a multiple of ``parts``."""
    return math.ceil(number / parts) * parts
