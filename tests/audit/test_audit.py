"""Audits of the running engine on a table: correct verifiers pass, wrong ones are caught, lossy ones are named lossy."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace

import pytest
import torch

from outrider.audit import wrong
from outrider.audit.certificate import Certificate, document
from outrider.audit.greedy import Difference, GreedyResult
from outrider.audit.runner import AuditRunner, RoundSetup
from outrider.audit.sampling import AS_IS, STRESSED, AuditSettings, Caught, Outcome, SamplePlan, audit_samples, judge, make_plan
from outrider.audit.watching import PowerEstimate, Stressed
from outrider.proposers.base import ScriptedProposer
from outrider.proposers.plain import PlainProposer
from outrider.types import OutriderError, Proposal, SamplingParams
from outrider.verifiers.base import Verifier
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.rejection import RejectionVerifier
from outrider.verifiers.typical import TypicalVerifier

from .toys import PROMPTS, TableDraft, table_runner

SETTINGS = AuditSettings(PROMPTS, SamplingParams(temperature=1.0), k=2, tv=0.2)


def quiet(what: str, steps: int, total: float) -> None:
    """Progress callback that does nothing."""


@pytest.fixture(scope="module")
def runner() -> AuditRunner:
    return AuditRunner(table_runner())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def drafts(runner: AuditRunner) -> TableDraft:
    return TableDraft(runner.target)  # type: ignore[arg-type]


def certificate(runner: AuditRunner, setup: RoundSetup, settings: AuditSettings = SETTINGS) -> Certificate:
    """Return a certificate without the greedy part, which needs a model."""
    found = Certificate("table", "", setup.verifier.lossless, settings, GreedyResult(2, 0, 0.0, 1e-6))
    found.sampling = audit_samples(runner, setup, settings, quiet)
    return found


@pytest.fixture(scope="module")
def audited(runner: AuditRunner, drafts: TableDraft) -> Certificate:
    return certificate(runner, RoundSetup(drafts, RejectionVerifier(), 2))


def test_a_correct_verifier_is_certified_and_every_wrong_one_caught(audited: Certificate) -> None:
    assert audited.verdict == "certified", (audited.findings, audited.doubts)
    told = document(audited)
    controls = told["sampling"]["controls"]
    assert [each["caught"] for each in controls] == [True] * 3
    # each sample takes one forward step, so a control uses the part that detects it with the fewest samples
    assert {each["name"]: each["planned_part"] for each in controls}["leaky"] == STRESSED
    assert all(each["samples"] <= 1.5 * each["planned_samples"] + len(PROMPTS) for each in controls)
    for part in (AS_IS, STRESSED):
        origins = told["sampling"]["parts"][part]["origins"]
        assert set(origins) == {"accepted", "corrected", "bonus"}  # every tested token is from a round with drafts
        assert {test["token"] for test in told["sampling"]["parts"][part]["tests"]} == {None, 1, 2, 3, 4}
    first = told["sampling"]["parts"][AS_IS]["tests"][0]
    assert first["name"] == "G" and first["smallest_tv"] <= 0.2


@pytest.fixture(scope="module")
def plan(audited: Certificate) -> SamplePlan:
    """Plan for ``SETTINGS``; it depends on the drafts but not on the verifier."""
    assert audited.sampling is not None
    return audited.sampling.plan


@pytest.mark.parametrize("control", wrong.CONTROLS, ids=lambda control: control.name)
def test_a_wrong_verifier_is_not_certified(
    runner: AuditRunner, drafts: TableDraft, plan: SamplePlan, control: wrong.Control
) -> None:
    """A control that is detectable with unchanged drafts does not need the many samples with replaced drafts."""
    enough = plan if plan.controls[control.name].part == STRESSED else few_stressed(plan)
    assert least_p(judge(runner, RoundSetup(drafts, control.verifier(5), 2), SETTINGS, enough, quiet)) <= SETTINGS.alpha


def least_p(outcome: Outcome) -> float:
    """Return the smallest adjusted p-value; 0 if an impossible token was emitted."""
    return 0.0 if outcome.impossible else min((value for values in outcome.adjusted.values() for value in values), default=1.0)


def few_stressed(plan: SamplePlan) -> SamplePlan:
    return replace(plan, samples={**plan.samples, STRESSED: 300})


@pytest.mark.parametrize("verifier", [BlockVerifier(), RejectionVerifier()], ids=["block", "rejection"])
def test_point_masses_and_truncation_pass_too(runner: AuditRunner, drafts: TableDraft, verifier: Verifier) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2)
    settings = replace(SETTINGS, params=params, seed=3)
    copying = ScriptedProposer.of_chains(lambda context, k: [request.token_ids[-k:] for request in context.requests])
    for proposer in (drafts, copying):
        setup = RoundSetup(proposer, verifier, 2)
        assert least_p(judge(runner, setup, settings, make_plan(runner, setup, settings, quiet), quiet)) > settings.alpha


def test_a_lossy_verifier_fails_and_is_called_lossy(runner: AuditRunner, drafts: TableDraft, plan: SamplePlan) -> None:
    setup = RoundSetup(drafts, TypicalVerifier(), 2)
    assert least_p(judge(runner, setup, SETTINGS, few_stressed(plan), quiet)) <= 1e-6
    assert Certificate("m", "TypicalVerifier", setup.verifier.lossless, SETTINGS, GreedyResult(1, 1, 0, 0)).verdict == "lossy"


def test_a_control_that_is_not_caught_makes_it_void(audited: Certificate) -> None:
    assert audited.sampling is not None
    controls = [*audited.sampling.controls[:2], Caught(wrong.CONTROLS[2], 100, 0.2, "")]
    found = replace(audited, sampling=replace(audited.sampling, controls=controls))
    assert found.verdict == "void" and "leaky" in found.doubts[0]


def test_rare_bonus_tokens_give_a_remark_and_rare_accepted_ones_void(audited: Certificate) -> None:
    assert audited.sampling is not None

    def without(origin: str) -> Certificate:
        outcome = copy.deepcopy(audited.sampling.outcome)  # type: ignore[union-attr]
        for evidence in outcome.evidence.values():
            evidence.origins[origin] = 7
        return replace(audited, sampling=replace(audited.sampling, outcome=outcome))  # type: ignore[type-var]

    assert without("bonus").verdict == "certified" and "bonus" in document(without("bonus"))["remarks"][0]
    assert without("accepted").verdict == "void" and not document(audited)["remarks"]


def test_a_method_that_does_not_draft_is_refused(runner: AuditRunner) -> None:
    with pytest.raises(OutriderError, match="drafts nothing"):
        make_plan(runner, RoundSetup(PlainProposer(), RejectionVerifier(), 2), SETTINGS, quiet)


def test_audits_with_too_many_samples_are_refused(runner: AuditRunner, drafts: TableDraft) -> None:
    setup, settings = RoundSetup(drafts, RejectionVerifier(), 2), replace(SETTINGS, tv=0.002)
    with pytest.raises(OutriderError, match=r"needs [\d,]+ samples .*, more than --max-samples") as error:
        make_plan(runner, setup, settings, quiet)
    needed = int(re.search(r"needs ([\d,]+)", str(error.value))[1].replace(",", ""))  # type: ignore[index]
    assert needed <= make_plan(runner, setup, replace(settings, max_samples=needed), quiet).total


def test_controls_are_planned_at_the_level_at_which_they_are_caught(
    runner: AuditRunner, drafts: TableDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels, samples_for = [], PowerEstimate.samples_for

    def noted(self: PowerEstimate, name: str, level: float, *args: float) -> float:
        levels.append(level)
        return samples_for(self, name, level, *args)

    monkeypatch.setattr(PowerEstimate, "samples_for", noted)
    make_plan(runner, RoundSetup(drafts, RejectionVerifier(), 2), SETTINGS, quiet)
    assert set(levels) == {SETTINGS.strictest / 2 / 3}  # half for the ends of three stages


def test_a_failing_proposer_makes_it_void(runner: AuditRunner, plan: SamplePlan) -> None:
    class Failing(TableDraft):
        def propose(self, context, k):  # type: ignore[no-untyped-def]
            if any(request.num_output_tokens > 1 for request in context.requests):
                raise RuntimeError("broken")
            return super().propose(context, k)

    small = replace(plan, samples=dict.fromkeys(plan.samples, 40))
    outcome = judge(runner, RoundSetup(Failing(runner.target), RejectionVerifier(), 2), SETTINGS, small, quiet)  # type: ignore[arg-type]
    assert outcome.faults > 0


def test_follow_reports_the_targets_distributions(runner: AuditRunner) -> None:
    laws: dict[tuple[int, ...], torch.Tensor] = {}

    def show(prefixes: list[tuple[int, ...]], probs: torch.Tensor) -> None:
        laws.update(zip(prefixes, probs, strict=True))

    runner.follow([3, 1, 4], [(5, 9), (5, 2), (6, 5)], SamplingParams(temperature=0.5), show)
    assert set(laws) == {(), (5,), (6,)}
    wanted = torch.softmax(runner.target.table[4, 5] / 0.5, -1)  # type: ignore[attr-defined]
    assert torch.allclose(laws[5,], wanted, atol=1e-6)


def test_replaced_drafts_have_correct_probabilities(runner: AuditRunner) -> None:
    stressed, seen = Stressed(ScriptedProposer.of_chains(lambda context, k: [[4] * k for _ in context.requests]), seed=1), []
    setup = RoundSetup(_Spy(stressed, seen), RejectionVerifier(), 2)
    for _ in runner.sample(setup, [3, 1, 4], SamplingParams(temperature=1.0), 600, 3, seed=2):
        pass
    ids = torch.cat([proposal.token_ids[:, 0] for proposal in seen])
    probs = torch.cat([proposal.probs[:, 0] for proposal in seen])
    assert torch.allclose(probs.sum(-1), torch.ones(len(probs)), atol=1e-5)
    share, due = float((ids == 4).float().mean()), 0.5 + 0.5 / 17
    assert share == pytest.approx(due, abs=4 * math.sqrt(due * (1 - due) / len(ids)))
    assert float(probs[0, 4]) == pytest.approx(due) and float(probs[0, 3]) == pytest.approx(0.5 / 17)


class _Spy(Stressed):
    """Stores the proposals of the wrapped proposer."""

    def __init__(self, inner: Stressed, seen: list[Proposal]) -> None:
        super().__init__(inner, seed=0)
        self.seen = seen

    def propose(self, context, k):  # type: ignore[no-untyped-def]
        self.seen.append(self.inner.propose(context, k))
        return self.seen[-1]


class _Coins:
    """Reject every draft and sample the most likely token."""

    def bernoulli(self, probs: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(probs, dtype=torch.bool)

    def categorical(self, probs: torch.Tensor) -> torch.Tensor:
        return probs.argmax(-1)


@pytest.mark.parametrize("parents", [None, [[-1, -1, 0]]], ids=["chain", "tree"])
def test_wrong_verifiers_have_the_documented_distributions(parents: list[list[int]] | None) -> None:
    tree = None if parents is None else torch.tensor(parents)
    proposal = Proposal(torch.tensor([[0, 1, 2]]), torch.tensor([3]), None, tree)
    target = torch.full((1, 4, 4), 0.1)
    target[0, :, 0], target[0, 1] = 0.7, torch.tensor([0.0, 0.0, 0.0, 1.0])
    right = RejectionVerifier().verify(proposal, target, _Coins())
    assert right.paths == [[]] and right.next_tokens != [0]  # a rejected draft is not sampled again
    assert wrong.WithoutResidual().verify(proposal, target, _Coins()).next_tokens == [0]
    leaked = wrong.Leaky(leak=1.0).verify(proposal, target, _Coins())
    assert leaked.paths == [[0]] and leaked.next_tokens == [3]
    assert wrong.Leaky(leak=0.0).verify(proposal, target, _Coins()).paths == [[]]
    told = wrong.flattened(proposal, target)
    assert told[0, 0].tolist() == pytest.approx([0.85, 0.05, 0.05, 0.05])
    assert told[0, 2].tolist() == pytest.approx([0.35, 0.05, 0.55, 0.05] if tree is None else [0.0, 0.0, 0.5, 0.5])


def test_a_gap_within_rounding_is_a_tie_and_a_larger_one_a_defect() -> None:
    result = GreedyResult(4, 100, rounding=0.01, resolution=1e-4)
    assert result.threshold == pytest.approx(0.02)
    assert GreedyResult(4, 100, rounding=0.0, resolution=1e-6).threshold == pytest.approx(2e-6)
    result.differences = [Difference(0, 3, 1, 2, (-1.0, -1.01), None, 0.01, is_tie=True)]
    found = Certificate("m", "v", True, replace(SETTINGS, params=SamplingParams()), result)
    assert found.verdict == "certified"
    result.differences.append(Difference(1, 3, 1, 2, (-1.0, -1.5), None, 0.5, is_tie=False))
    assert found.verdict == "not certified" and "1 prompt" in found.findings[0]


@pytest.mark.parametrize(("rounding", "resolution"), [(0.5, 1e-6), (1.5, 0.2)])
def test_differences_beyond_rounding_are_not_ties(rounding: float, resolution: float) -> None:
    """A wrong cache changes every score, so measuring rounding by it would turn every difference into a tie."""
    result = GreedyResult(4, 100, rounding, resolution, [Difference(0, 3, 1, 2, (-1.0, -1.2), None, 0.2, is_tie=True)])
    found = Certificate("m", "v", True, replace(SETTINGS, params=SamplingParams()), result)
    assert found.verdict == "void" and "more than rounding explains" in document(found)["doubts"][0]
    result.rounding = 0.9 * min(1000 * resolution, 1.0)
    assert found.verdict == "certified"


def test_the_score_of_an_impossible_token_is_null_in_json() -> None:
    result = GreedyResult(1, 9, 0.0, 1e-6, [Difference(0, 3, 1, 2, (-0.5, -math.inf), None, math.inf, is_tie=False)])
    told = document(Certificate("m", "v", True, replace(SETTINGS, params=SamplingParams()), result))
    assert told["greedy"]["differences"][0]["plain_logprobs"] == [-0.5, None]
    assert "Infinity" not in json.dumps(told)
