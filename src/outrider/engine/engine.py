"""The one loop: propose, score, verify, commit. Plain decoding is the round with no drafts, batch 1 the batch of one.

Knows the interfaces of the other rooms and the name of no method. A proposer's failure costs speculation, never text; a
target's failure is an error for the request that causes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from outrider.engine.drafting import Drafts, GuardedProposer
from outrider.engine.logprobs import TokenLogprobs, token_logprobs
from outrider.engine.policy import LengthPolicy
from outrider.engine.scheduler import Entry, Scheduler
from outrider.engine.stats import GenerationStats
from outrider.sampling import Sampler
from outrider.types import Context, OutriderError, PhaseTimes, Proposal, Request, Round, Scores, Verdict

if TYPE_CHECKING:
    from outrider.proposers.base import Proposer
    from outrider.runner import ModelRunner
    from outrider.verifiers.base import Verifier

logger = logging.getLogger(__name__)

# Drafts that take so long, as a part of the score, are those of a model: it takes the target's place in the processor's
# caches, and this many rounds without drafts take longer after it than those that follow.
OTHER_MODEL, NUM_COLD = 0.1, 3


@dataclass(frozen=True, slots=True)
class Emission:
    """What one request gained in one step."""

    request_id: str
    token_ids: list[int]
    origins: list[str]  # of each token: "accepted", "corrected", "bonus", or "plain" in a round without drafts
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None  # None while it runs, then "stop", "length" or "error"
    error: str | None
    stats: GenerationStats  # the request's own, live

    def followed_by(self, later: Emission) -> Emission:
        """What the request gained in both."""
        logprobs = self.logprobs
        if later.logprobs is not None:
            logprobs = (logprobs or []) + later.logprobs
        return replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            origins=self.origins + later.origins,
            text=self.text + later.text,
            logprobs=logprobs,
        )


@dataclass(frozen=True, slots=True)
class Observation:
    """A settled round with everything that was in it. The next step may write over its tensors."""

    context: Context
    proposal: Proposal
    scores: Scores
    verdict: Verdict
    round: Round
    is_prefill: bool


class Engine:
    """Runs requests to their end, one round a step. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        runner: ModelRunner,
        proposer: Proposer,
        verifiers: tuple[Verifier, Verifier],
        policy: LengthPolicy,
        scheduler: Scheduler,
        coupled: bool = False,
    ) -> None:
        """``verifiers``: the one for sampled rounds, then the one for rounds in which the sampler leaves nothing to chance."""
        self.runner = runner
        self.proposer = proposer
        self.policy = policy
        self.scheduler = scheduler
        self.stats = GenerationStats()
        self.observer: Callable[[Observation], None] | None = None  # sees each round last; its time is no round's
        self._sampled, self._deterministic = verifiers
        # Not a method of the engine's: the proposer's guard keeps it, and a cycle would keep dropped models in memory.
        self._make_sampler: Callable[[Sequence[Request]], Sampler] = partial(
            Sampler, vocab_size=runner.vocab_size, device=runner.device, coupled=coupled
        )
        self._unbooked = 0.0  # seconds of the accounting itself: they go to the next round
        self._is_decided = True  # whether the policy chose the lengths of this round
        self._read_seconds = 0.0  # of prompts since the last round
        self._num_warming = 0  # rounds until the caches are the target's again, after drafts that took them
        self._guarded = GuardedProposer(proposer, runner.vocab_size, self._make_sampler, self.stats)
        self.costs = runner.costs
        self._hidden = proposer.needs_hidden
        if proposer.drafts_trees:
            self._check_tree(self._sampled)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check(self, request: Request) -> None:
        """Raises ``OutriderError`` if the request can never run. Changes nothing: any thread may ask."""
        self.scheduler.check(request)
        self._make_sampler([request])  # refuses token ids that there are not

    def add(self, request: Request, fork_of: str | None = None, client: str = "", priority: int = 0) -> None:
        """Queues a request; ``fork_of`` names one with the same prompt. Raises ``OutriderError`` if it can never run.

        Clients take turns; a higher ``priority`` goes before all lower ones.
        """
        self.check(request)
        self.scheduler.add(request, fork_of, client, priority)
        if fork_of is not None:
            self._guarded.share(fork_of)

    def abort(self, request_id: str) -> str:
        """Ends a request at once. Returns the text that was still held back."""
        entry = self.scheduler.remove(request_id)
        if entry is None:
            return ""
        return self._end(entry, "abort")

    @torch.no_grad()
    def step(self) -> list[Emission]:
        """Reads on in long prompts, then one round for every other running request.

        An exception leaves every request at its last committed token.
        """
        failed = self._admit()
        failed += self._read_prompts()
        started = perf_counter()
        entries, context = self.scheduler.next_batch(self._make_sampler)
        if not entries:
            return failed
        try:
            k, context = self._lengths(entries, context)
            drafts = self._guarded.propose(entries, context, k)
            return failed + self._settle(entries, context, drafts, started)
        except BaseException:
            # The caches may be ahead of the committed text. Dropped, they are filled again from it.
            self._forget(context.request_ids)
            for entry in entries:
                entry.is_cached = entry.is_followed = False
            raise

    def _settle(self, entries: Sequence[Entry], context: Context, drafts: Drafts, started: float) -> list[Emission]:
        """Score, verify, commit: from drafts to emitted tokens."""
        proposal, sampler = drafts.proposal, context.sampler
        verifier = self._deterministic if sampler.is_deterministic else self._sampled
        if proposal.parents is not None:
            self._check_tree(verifier)
        before = perf_counter()
        try:
            scores = self.runner.score(context, proposal, self._hidden)
            scored = perf_counter()
            judge = sampler.tokens if verifier.judges == "tokens" else sampler.probs
            target = judge(scores.logits, proposal.token_ids, proposal.parents, lens=proposal.lens)
            verdict = verifier.verify(proposal, target, sampler)
        except Exception as error:
            return self._isolate(entries, context, drafts, error)
        paths, counts, next_tokens = verdict.path.tolist(), verdict.num_accepted.tolist(), verdict.next_token.tolist()
        times = PhaseTimes(drafts.seconds, scored - before, perf_counter() - scored)

        self.runner.commit(context, verdict)
        self._guarded.commit(entries, context, drafts, verdict)
        paths = [path[:count] for path, count in zip(paths, counts, strict=True)]
        self._guarded.keep_features(entries, scores, drafts, paths)
        judged = [entry.stats.num_judged for entry in entries]
        emissions = [self._emit(entry, b, drafts, paths[b], next_tokens[b], scores) for b, entry in enumerate(entries)]
        ended = [emission.request_id for emission in emissions if emission.finish_reason is not None]
        if ended:
            self._forget(ended, ended=True)
        measured = perf_counter()
        times.host = measured - started - times.total + self._unbooked
        times.read, self._read_seconds = self._read_seconds, 0.0
        judged = [entry.stats.num_judged - before for entry, before in zip(entries, judged, strict=True)]
        is_cold = not any(drafts.lens) and self._num_warming > 0
        self._num_warming = NUM_COLD if times.draft > OTHER_MODEL * times.score else max(self._num_warming - 1, 0)
        round_ = Round(drafts.k, drafts.lens, drafts.depths, counts, times, scores.first_layer, is_cold, judged)
        is_prefill = not all([entry.is_cached for entry in entries])
        self._account(entries, context, round_, emissions, is_prefill)
        if ended:
            self.policy.release(ended)
        self._unbooked = perf_counter() - measured
        if self.observer is not None:
            self.observer(Observation(context, proposal, scores, verdict, round_, is_prefill))
        return emissions

    def _emit(self, entry: Entry, b: int, drafts: Drafts, path: list[int], next_token: int, scores: Scores) -> Emission:
        """One request's tokens of the round, cut where plain decoding would have stopped."""
        ids, num_drafts, num_accepted = drafts.token_ids[b], drafts.lens[b], len(path)
        token_ids = [ids[node] for node in path]
        token_ids.append(next_token)
        kept, text = self.scheduler.commit(entry, token_ids)
        last = "plain"
        if num_drafts:
            last = "bonus" if _is_leaf(drafts.proposal, b, num_drafts, path) else "corrected"
        num_judged = num_accepted + (last == "corrected")
        origins = (["accepted"] * num_accepted + [last])[: len(kept)]
        entry.stats.count(num_drafts, num_judged, num_accepted, len(kept))
        self.stats.count(num_drafts, num_judged, num_accepted, len(kept))
        request = entry.request
        logprobs = None
        if request.params.logprobs is not None:
            rows = [0] + [node + 1 for node in path]
            logprobs = token_logprobs(scores.logits[b], rows[: len(kept)], kept, request.params.logprobs)
        return Emission(request.request_id, kept, origins, text, logprobs, entry.finish_reason, None, entry.stats)

    def _account(
        self, entries: Sequence[Entry], context: Context, round_: Round, emissions: list[Emission], is_prefill: bool
    ) -> None:
        """Seconds go to the requests, the total and the policy."""
        cache_len = max([len(request.token_ids) for request in context.requests])
        if not is_prefill:
            prices = self.costs.behind(round_.first_layer)
            prices.observe(prices.width(round_.lens), len(entries), cache_len, round_.times.score, round_.is_cold)
            if not any(round_.lens):
                self.costs.observe_outside(len(entries), round_.times.verify + round_.times.host, round_.is_cold)
        plain = self.costs.plain_round(len(entries), cache_len)
        emitted = 0
        for entry, emission in zip(entries, emissions, strict=True):
            entry.is_cached = True
            emitted += len(emission.token_ids)
            entry.stats.clock(round_, is_prefill, len(emission.token_ids), plain)
        self.stats.clock(round_, is_prefill, emitted / len(entries), plain)
        if self._is_decided:
            self.policy.observe(context, round_, is_prefill)

    def _lengths(self, entries: Sequence[Entry], context: Context) -> tuple[int, Context]:
        """The most drafts to ask for, and the limits that give each request its K: the policy's, or one of its own.

        None behind a text that the score of this round reads: its first token would wait for them, where rows cost most.
        """
        lengths = self.policy.next_lengths(context)
        self._is_decided = True
        own = [request.num_draft_tokens for request in context.requests]
        if own.count(None) < len(own):
            pairs = zip(lengths, own, strict=True)
            lengths = [k if length is None else min(length, self.proposer.max_drafts) for k, length in pairs]
        if not all([entry.is_cached for entry in entries]):
            has_read = self.runner.is_prefilled(context.request_ids, [request.token_ids for request in context.requests])
            lengths = [length if read else 0 for length, read in zip(lengths, has_read, strict=True)]
        if lengths.count(lengths[0]) < len(lengths):
            context = context.limited(lengths)
        return max(lengths), context

    # --- requests come and go -----------------------------------------------------------------------------------------------

    def _admit(self) -> list[Emission]:
        """Takes waiting requests in. Returns the ends of those for which there was no memory after all."""
        failed = []
        for entry in self.scheduler.admit(self._fits):
            try:
                self._fork(entry)
            except Exception as error:
                failed.append(self._fail(entry, error))
        return failed

    def _fork(self, entry: Entry) -> None:
        """A request whose prompt is cached already starts from a copy."""
        if entry.fork_of is not None and self._guarded.fork(entry.fork_of, entry.request.request_id):
            # The last token of the prompt is scored again, for this sample's first token.
            self.runner.fork(entry.fork_of, entry.request.request_id, entry.request.num_prompt_tokens - 1)
            entry.is_cached = True

    def _fits(self, entry: Entry) -> bool:
        try:
            return self.runner.admit(entry.request.request_id, self.scheduler.slots(entry.request))
        except Exception as error:  # first in the queue for ever, it would let nobody in: reading it shows what there is
            logger.warning("no memory could be set apart for request %s: %s", entry.request.request_id, error)
            return True

    def _read_prompts(self) -> list[Emission]:
        """Reads on in texts too long to be scored, a part a step, so that those who wait for their next token wait little."""
        unread = [entry for entry in self.scheduler.running if not entry.is_cached]
        if not unread:
            return []
        started = perf_counter()
        failed: list[Emission] = []
        try:
            self._read(unread)
        except Exception:  # one request's fault, perhaps: each alone shows whose
            for entry in unread:
                try:
                    self._read([entry])
                except Exception as error:
                    failed.append(self._fail(entry, error))
        self._read_seconds += perf_counter() - started
        return failed

    def _read(self, entries: Sequence[Entry]) -> None:
        ids, texts = zip(*[(entry.request.request_id, entry.request.token_ids) for entry in entries], strict=True)
        for entry, is_read in zip(entries, self.runner.prefill(ids, texts, self._hidden), strict=True):
            self.scheduler.read(entry, not is_read)

    def _forget(self, request_ids: Sequence[str], ended: bool = False) -> None:
        """Drops what the caches hold of requests; of those that came to a good end it may serve others."""
        if ended and not self._hidden:  # a cached prefix has no hidden states for the proposer
            self.runner.retire(request_ids)
        else:
            self.runner.release(request_ids)
        self._guarded.release(request_ids, ended)

    def _isolate(self, entries: Sequence[Entry], context: Context, drafts: Drafts, error: Exception) -> list[Emission]:
        """The target failed: runs each request alone, so that the error is only for those that cause it."""
        if len(entries) == 1:
            return [self._fail(entries[0], error)]
        self._is_decided = False  # what follows are other rounds than the one that the policy decided on
        emissions = []
        for b, entry in enumerate(entries):
            requests = context.requests[b : b + 1]
            alone = Context(requests, context.limits[b : b + 1], self._make_sampler(requests))
            emissions += self._settle([entry], alone, drafts.row(b), perf_counter())
        return emissions

    def _end(self, entry: Entry, reason: str) -> str:
        """Ends a request outside of a round, in all that knows of it; what is cached of one that failed serves nobody."""
        text = self.scheduler.finish(entry, reason)
        self._forget([entry.request.request_id], ended=reason != "error")
        self.policy.release([entry.request.request_id])
        return text

    def fail_running(self, error: BaseException) -> list[Emission]:
        """Ends every running request with an error, after a step that raised one."""
        return [self._fail(entry, error) for entry in list(self.scheduler.running)]

    def _fail(self, entry: Entry, error: BaseException) -> Emission:
        """Ends one request with an error; what it has generated stays."""
        logger.debug("request %s failed", entry.request.request_id, exc_info=error)
        text = self._end(entry, "error")
        return Emission(entry.request.request_id, [], [], text, None, "error", _said(error), entry.stats)

    @staticmethod
    def _check_tree(verifier: Verifier) -> None:
        if not verifier.handles_trees:
            raise OutriderError(
                f"{type(verifier).__name__} judges chains, but the proposer drafts trees: choose a verifier that handles trees"
            )


def lost(request_id: str, error: BaseException) -> Emission:
    """What is said of a request of which the engine knows nothing: it was not taken, or something broke."""
    return Emission(request_id, [], [], "", None, "error", _said(error), GenerationStats())


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, OutriderError) else f"the target failed: {type(error).__name__}: {error}"


def _is_leaf(proposal: Proposal, b: int, num_drafts: int, path: list[int]) -> bool:
    """Whether nothing was drafted beyond the accepted path."""
    if proposal.parents is None:
        return len(path) == num_drafts
    last = path[-1] if path else -1
    return last not in proposal.parents[b, :num_drafts].tolist()
