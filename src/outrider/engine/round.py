"""One round of speculative decoding: propose, score, convert logits, verify, commit, emit.

Plain decoding is a round without drafts. This file is the algorithm only: guard.py handles failures of the proposer, clock.py
measures times, and ledger.py derives statistics from the ``RoundResult``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from outrider.engine.scheduler import Batch, Scheduler
from outrider.sampling.grammar_masks import without_dead_ends
from outrider.types import Context, Proposal, Scores, Verdict
from outrider.verifiers.base import Verifier


class DraftSource(Protocol):
    """The part of a proposer that a round uses."""

    def propose(self, context: Context, k: int) -> Proposal: ...
    def commit(self, context: Context, verdict: Verdict) -> None: ...


class Scorer(Protocol):
    """The part of a model runner that a round uses."""

    def score(self, context: Context, proposal: Proposal, hidden: tuple[int, ...]) -> Scores: ...
    def commit(self, context: Context, verdict: Verdict) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine that a round uses."""

    proposer: DraftSource
    runner: Scorer
    scheduler: Scheduler
    sampled_verifier: Verifier
    deterministic_verifier: Verifier
    needs_hidden: tuple[int, ...]  # see ``Proposer.needs_hidden``


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Inputs and outputs of one round, read by the ledger, the policy and observers. Row b belongs to request b."""

    context: Context
    k: int  # drafts requested from the proposer
    proposal: Proposal
    scores: Scores
    verdict: Verdict
    token_ids: list[list[int]]  # emitted tokens, cut where the request finished
    texts: list[str]  # text completed by these tokens


class TargetError(Exception):
    """Scoring or verification failed, and no token was committed. ``proposal`` can be scored again, request by request."""

    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal


def run_round(batch: Batch, k: int, parts: Parts) -> RoundResult:
    """Draft up to k tokens for each request, score them in one target pass and keep what the verifier accepts."""
    return finish_round(batch, k, parts.proposer.propose(batch.context, k), parts)


def finish_round(batch: Batch, k: int, proposal: Proposal, parts: Parts) -> RoundResult:
    """Run the rest of a round after its proposal. Raises ``TargetError`` if the target fails."""
    context, sampler = batch.context, batch.context.sampler
    verifier = parts.deterministic_verifier if sampler.is_deterministic else parts.sampled_verifier
    try:
        scores = parts.runner.score(context, proposal, parts.needs_hidden)
        if proposal.probs is not None:  # a proposer may compute them on another device
            proposal = replace(proposal, probs=proposal.probs.to(scores.logits.device))
        to_target = sampler.tokens if verifier.target_input == "tokens" else sampler.probs
        target = to_target(scores.logits, proposal.token_ids, proposal.parents, lens=proposal.lens)
        verdict = verifier.verify(proposal, target, sampler)
        verdict = without_dead_ends(verdict, proposal, context.requests)  # of grammars
    except Exception as error:
        raise TargetError(proposal) from error
    parts.runner.commit(context, verdict)  # the KV cache keeps the accepted path
    parts.proposer.commit(context, verdict)
    result = RoundResult(context, k, proposal, scores, verdict, token_ids=[], texts=[])
    drafts = proposal.token_ids.tolist()
    for entry, row, path, next_token in zip(batch.entries, drafts, verdict.paths, verdict.next_tokens, strict=True):
        kept, text = parts.scheduler.commit(entry, [*(row[node] for node in path), next_token])
        result.token_ids.append(kept)
        result.texts.append(text)
    return result
