"""The engine loop: admit requests, prefill prompts, run one round for the other requests, emit their output.

The round itself is ``engine/round.py``. Independent of drafting methods. If the proposer fails, or the target fails on
drafts, requests continue without drafts; a request on which the target fails without drafts too ends with an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from outrider.engine.clock import ClockedRunner, PhaseClock
from outrider.engine.grammar_drafts import GrammarDrafts
from outrider.engine.guard import GuardedProposer
from outrider.engine.ledger import Ledger
from outrider.engine.logprobs import token_logprobs
from outrider.engine.outputs import Emission
from outrider.engine.policy import LengthPolicy
from outrider.engine.round import Parts, RoundResult, TargetError, finish_round, run_round
from outrider.engine.scheduler import Batch, Entry, Scheduler, State
from outrider.engine.stats import GenerationStats
from outrider.errors import TARGET_FAILED
from outrider.proposers.base import Proposer
from outrider.runner import ModelRunner
from outrider.sampling import Sampler
from outrider.sampling.min_tokens import check_masks
from outrider.types import Context, OutriderError, Proposal, Request, Round
from outrider.verifiers.base import Verifier
from outrider.verifiers.exact import ExactMatchVerifier

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests, one round per step. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        runner: ModelRunner,
        proposer: Proposer,
        verifier: Verifier,
        policy: LengthPolicy,
        scheduler: Scheduler,
        coupled: bool = False,
        grammar_drafts: bool = True,
    ) -> None:
        """``coupled``: key the sampler's noise by seed and position. ``grammar_drafts``: draft the tokens that a request's
        grammar determines, independently of proposer and policy.
        """
        self.runner = runner
        self.proposer = proposer
        self.policy = policy
        self.scheduler = scheduler
        # Called after each round; its time is not counted. The tensors are valid until the next step only. The tokens are
        # committed: penalties, ``min_tokens`` and grammars of the sampler apply to the next round's positions.
        self.observer: Callable[[RoundResult, Round], None] | None = None
        self._make_sampler = partial(
            Sampler,
            vocab_size=runner.vocab_size,
            device=runner.device,
            coupled=coupled,
            eos_token_ids=scheduler.eos_token_ids,
        )
        self._hidden = proposer.needs_hidden
        self._clock = PhaseClock(runner.device)
        self._ledger = Ledger(runner.costs, drafts_with_model=not proposer.is_model_free)
        # A lossy verifier also applies to deterministic rounds; a lossless one would give the same result more slowly.
        deterministic = ExactMatchVerifier() if verifier.lossless else verifier
        supports_trees = runner.supports_trees and verifier.supports_trees
        self._guard = GuardedProposer(proposer, self._clock, runner.vocab_size, self._ledger.add_faults, supports_trees)
        ahead = proposer.drafts_ahead and not self._hidden  # forced tokens have no hidden states before they are scored
        drafter = GrammarDrafts(self._guard, drafts_ahead=ahead, max_drafts=runner.max_drafts)
        self._grammar_drafts = drafter if grammar_drafts else None
        self._parts = Parts(
            self._grammar_drafts or self._guard,
            ClockedRunner(runner, self._clock),
            scheduler,
            (verifier, deterministic),
            self._hidden,
        )

    @property
    def stats(self) -> GenerationStats:
        """Return the totals over all requests."""
        return self._ledger.total

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check(self, request: Request) -> None:
        """Raise ``OutriderError`` if the request can never run. Thread-safe, because it changes no state."""
        self.scheduler.check(request)
        check_masks(request.params, self.runner.vocab_size, self.scheduler.eos_token_ids)

    def add(self, request: Request, fork_of: str | None = None, client: str = "", priority: int = 0) -> None:
        """Queue a request. Raises ``OutriderError`` if it can never run.

        ``fork_of``: id of a request with the same prompt, whose cache is copied. Within a priority, the highest first, clients
        take turns.
        """
        self.check(request)
        self.scheduler.add(request, fork_of, client, priority)
        if fork_of is not None:
            self._guard.keep_prompt_hidden(fork_of)

    def abort(self, request_id: str) -> str:
        """End a request at once. Returns the text that the detokenizer still held back."""
        entry = self.scheduler.find(request_id)
        return "" if entry is None else self._end(entry, "abort")

    @torch.no_grad()
    def step(self) -> list[Emission]:
        """Admit waiting requests, prefill a chunk of each long prompt, then run one round for the other running requests.

        After an exception every request can continue from its last committed token; the last round's may not have been emitted.
        """
        failed = self._admit() + self._prefill()
        if failed:  # the round, which may raise, follows in the next step
            return failed
        self._clock.enter("host")
        try:
            batch = self.scheduler.next_batch(self._make_sampler)
            try:
                return self._round(batch) if batch.entries else []
            except BaseException:
                self._recover(batch)
                raise
        finally:
            self._clock.enter(None)

    # --- rounds -------------------------------------------------------------------------------------------------------------

    def _round(self, batch: Batch) -> list[Emission]:
        """Run one round. If the target fails, rerun it for each request alone, so that only those at fault are affected."""
        k, requested = self._plan_drafts(batch)
        if k:
            batch = Batch(batch.entries, requested)
            k = k if max(requested.limits) > 0 else 0
        try:
            result = run_round(batch, k, self._parts)
        except TargetError as failure:
            self._clock.take()  # the time of a failure is not that of a round
            return self._isolate(batch, k, failure)
        return self._settle(batch, result, requested)

    def _recover(self, batch: Batch) -> None:
        """Drop the caches of a failed round's requests; those that have not finished are prefilled again."""
        self._release(batch.context.request_ids)  # they may contain tokens that were not committed
        for entry in batch.entries:
            self.scheduler.move(entry, State.PREFILL)
            if entry.finish_reason is None:
                self._reserve(entry)
            else:
                self._forget([entry.request.request_id])
        self._clock.take()

    def _plan_drafts(self, batch: Batch) -> tuple[int, Context]:
        """Return the largest K of this round and its context, limited to each request's K, with the proposer's cache filled."""
        if self._grammar_drafts is not None:
            self._grammar_drafts.find_tokens(batch.context)  # before K is applied, which does not limit them
        lengths = self._lengths(batch)
        k, requested = max(lengths), batch.context
        if lengths.count(k) < len(lengths):
            requested = requested.limited(lengths)
        return k, self._prefill_drafts(replace(requested, prices=self.policy.prices)) if k else requested

    def _lengths(self, batch: Batch) -> list[int]:
        """Return K for each request: its own, or the policy's.

        K is 0 for a request whose prompt is prefilled in this round, because drafts would delay its first token, and in its
        first round if the proposer needs hidden states, because there are none yet.
        """
        requests = batch.context.requests
        pairs = zip(self.policy.next_lengths(batch.context), [request.num_draft_tokens for request in requests], strict=True)
        lengths = [min(k if own is None else own, self.proposer.max_drafts) for k, own in pairs]
        if self.runner.max_drafts is not None:
            lengths = [min(length, self.runner.max_drafts) for length in lengths]
        if batch.is_prefill:
            if self._hidden:
                ready = [entry.state is State.DECODE for entry in batch.entries]
            else:
                ready = self.runner.is_prefilled(batch.context.request_ids, [request.token_ids for request in requests])
            lengths = [length if is_ready else 0 for length, is_ready in zip(lengths, ready, strict=True)]
        return lengths

    def _isolate(self, batch: Batch, k: int, failure: TargetError) -> list[Emission]:
        """Rerun a failed round for each request alone, and without its drafts if it fails again.

        The policy does not observe these rounds, whose batch it did not see.
        """
        lens = failure.proposal.lens.tolist()
        emissions = []
        for b, entry in enumerate(batch.entries):
            alone, proposal = batch.take([b]), failure.proposal.take([b]).narrow([lens[b]])
            result, error = self._rerun(alone, k, proposal) if len(lens) > 1 else (None, failure.__cause__)
            # No token is decided yet, and these drafts follow from committed tokens. Sampled ones may fail because of their
            # values, and leaving them out for that would bias the output.
            if result is None and lens[b] and (proposal.probs is None or alone.context.sampler.is_deterministic):
                self._guard.forget_drafts(entry.request)
                on_drafts = error
                result, error = self._rerun(alone, k, Proposal.empty(1))
                if result is not None:
                    self._stop_drafts(entry.request, on_drafts)
            emissions += [self._fail(entry, error)] if result is None else self._settle(alone, result)
        return emissions

    def _rerun(self, batch: Batch, k: int, proposal: Proposal) -> tuple[RoundResult | None, BaseException | None]:
        """Rerun a failed round with these drafts. Return its result, or None and the error."""
        try:
            return finish_round(batch, k, proposal, self._parts), None
        except TargetError as failure:
            self._clock.take()
            return None, failure.__cause__

    def _stop_drafts(self, request: Request, error: BaseException | None) -> None:
        """Stop the drafts of the proposer and of the grammar for a request on whose drafts the target fails."""
        self._guard.stop([request], f"the target fails on its drafts: {type(error).__name__}: {error}")
        if self._grammar_drafts is not None:
            self._grammar_drafts.stop(request)

    def _settle(self, batch: Batch, result: RoundResult, requested: Context | None = None) -> list[Emission]:
        """Record a round and return its emissions. ``requested``: the context with the requested K; None in reruns."""
        self._guard.keep_hidden(result)
        ended = [entry.request.request_id for entry in batch.entries if entry.finish_reason is not None]
        if ended:
            self._retire(ended)
        round_, origins = self._ledger.record(result, self._clock.take(), batch.is_prefill)
        if requested is not None:
            self.policy.observe(requested, round_)
        emissions = [self._emission(entry, b, result, origins[b]) for b, entry in enumerate(batch.entries)]
        if round_.is_prefill:
            for entry in batch.entries:
                self.scheduler.move(entry, State.DECODE)
        if ended:
            self._forget(ended)
        if self.observer is not None:
            self._clock.enter(None)
            self.observer(result, round_)
        return emissions

    def _emission(self, entry: Entry, b: int, result: RoundResult, origins: list[str]) -> Emission:
        request, token_ids = entry.request, result.token_ids[b]
        logprobs = None
        if request.params.logprobs is not None and token_ids:
            rows = [0] + [node + 1 for node in result.verdict.paths[b]]
            logprobs = token_logprobs(result.scores.logits[b], rows[: len(token_ids)], token_ids, request.params.logprobs)
        stats = self._ledger.stats_of(request.request_id)
        reasons = entry.finish_reason, entry.stop_reason
        is_first = request.num_output_tokens == len(token_ids)
        prompt_logprobs = entry.prompt_logprobs if is_first and request.scores_prompt else None
        text, error = result.texts[b], entry.error
        return Emission(request.request_id, token_ids, origins, text, logprobs, *reasons, error, stats, prompt_logprobs)

    # --- prefill ------------------------------------------------------------------------------------------------------------

    def _prefill(self) -> list[Emission]:
        """Prefill the next chunk of prompts too long for one pass, so that decoding requests are not delayed."""
        prefilling = [entry for entry in self.scheduler.running if entry.state is not State.DECODE]
        if not prefilling:
            return []
        failed: list[Emission] = []
        with self._clock.phase("prefill"):
            try:
                self._prefill_chunk(prefilling)
            except Exception as first:
                if len(prefilling) == 1:
                    return [self._fail(prefilling[0], first)]
                for entry in prefilling:  # retry each request alone to find the ones at fault
                    try:
                        self._prefill_chunk([entry])
                    except Exception as error:
                        failed.append(self._fail(entry, error))
        return failed

    def _prefill_chunk(self, entries: Sequence[Entry]) -> None:
        unscored = [entry for entry in entries if entry.is_prompt_unscored]
        if unscored:
            self._score_prompts(unscored)
        ready = [entry for entry in entries if not entry.is_prompt_unscored]  # maybe since this chunk
        are_prefilled = self.runner.prefill(*_sequences(ready), self._hidden)
        for entry, is_prefilled in zip(ready, are_prefilled, strict=True):
            self.scheduler.move(entry, State.FIRST_ROUND if is_prefilled else State.PREFILL)

    def _score_prompts(self, entries: Sequence[Entry]) -> None:
        """Prefill the next chunk of prompts whose log-probabilities are wanted, and compute those of its tokens."""

        def read(b: int, start: int, logits: Tensor) -> None:
            entry, request = entries[b], entries[b].request
            token_ids = request.token_ids[start + 1 : start + 1 + len(logits)]
            del entry.prompt_logprobs[start:]  # of a pass that failed for another request
            entry.prompt_logprobs += token_logprobs(logits, list(range(len(logits))), token_ids, request.params.logprobs or 0)

        self.runner.prefill_with_logits(*_sequences(entries), read, self._hidden)

    def _prefill_drafts(self, context: Context) -> Context:
        """Prefill new prompts with the proposer. Returns the context with limit 0 for requests that it cannot draft for yet."""
        drafting = [request for request, limit in zip(context.requests, context.limits, strict=True) if limit > 0]
        if not drafting:
            return context
        ready = self._guard.prefill(drafting)
        if all(ready):
            return context
        can_draft = {request.request_id for request, is_ready in zip(drafting, ready, strict=True) if is_ready}
        pairs = zip(context.request_ids, context.limits, strict=True)
        return context.limited([limit if request_id in can_draft else 0 for request_id, limit in pairs])

    # --- request lifecycle --------------------------------------------------------------------------------------------------

    def _admit(self) -> list[Emission]:
        """Admit waiting requests. Returns error emissions for those whose cache could not be copied."""
        failed, admitted = [], self.scheduler.admit(self._reserve)
        for entry in admitted:
            try:
                self._fork(entry)
                if entry.state is State.PREFILL:
                    self._start(entry.request)
            except Exception as error:
                failed.append(self._fail(entry, error))
        if admitted:
            self._guard.drop_prompts(entry.fork_of for entry in self.scheduler.waiting)
        return failed

    def _start(self, request: Request) -> None:
        """Start a new request from its longest cached prefix, cut where the proposer lacks hidden states."""
        token_ids, limit = request.token_ids, None
        if self._hidden:
            num_draft_cached = self._guard.start(request)
            if request.follows_policy:
                num_recomputed = max(self.runner.num_cached(request.request_id, token_ids) - num_draft_cached, 0)
                request.may_draft = self.policy.start(request, len(self.scheduler.running), num_draft_cached, num_recomputed)
            limit = num_draft_cached if request.may_draft else None
        if request.scores_prompt:
            limit = 0  # cached tokens have no logits
        self._ledger.start(request.request_id, self.runner.start(request.request_id, token_ids, limit))

    def _fork(self, entry: Entry) -> None:
        """If the prompt is already cached for another request, copy that cache."""
        if entry.fork_of is None:
            return
        request, source = entry.request, self.scheduler.find(entry.fork_of)
        if source is not None:
            request.may_draft = source.request.may_draft  # hidden states of the prompt are kept for both or for neither
        if not self._guard.fork(entry.fork_of, request):
            return
        if self._hidden:  # the source may have started from a cached prefix, whose hidden states are not known here
            self._guard.start(request)
        # The last prompt token is scored again, for this sample's first token.
        if self.runner.fork(entry.fork_of, request.request_id, request.num_prompt_tokens - 1):
            self.scheduler.move(entry, State.DECODE)

    def _reserve(self, entry: Entry) -> bool:
        try:
            return self.runner.admit(entry.request.request_id, entry.request.num_prompt_tokens + entry.max_tokens)
        except Exception as error:  # admit it: waiting would block the queue forever, and prefill fails if memory is missing
            logger.warning("cannot reserve memory for request %s: %s", entry.request.request_id, error)
            return True

    def _retire(self, request_ids: Sequence[str]) -> None:
        """Drop the caches of requests that finished, or keep them for requests with the same prefix."""
        self.runner.retire(request_ids)
        self._guard.retire(request_ids)

    def _release(self, request_ids: Sequence[str]) -> None:
        """Drop the caches of requests."""
        self.runner.release(request_ids)
        self._guard.release(request_ids)

    def _forget(self, request_ids: Sequence[str]) -> None:
        """Drop what policy, statistics and grammar drafts know of requests that ended."""
        self.policy.release(request_ids)
        if self._grammar_drafts is not None:
            self._grammar_drafts.release(request_ids)
        self._ledger.close(request_ids)

    def _end(self, entry: Entry, reason: str) -> str:
        """End a request outside of a round. Returns its remaining text. The cache of a failed request is not reused."""
        text, request_id = self.scheduler.finish(entry, reason), entry.request.request_id
        if reason == "error":
            self._release([request_id])
        else:
            self._retire([request_id])
        self._forget([request_id])
        return text

    def fail_running(self, error: BaseException) -> list[Emission]:
        """End every running request with an error, after ``step`` raised an exception."""
        return [self._fail(entry, error) for entry in list(self.scheduler.running)]

    def _fail(self, entry: Entry, error: BaseException | None) -> Emission:
        """End one request with an error. Output emitted before stays valid."""
        logger.debug("request %s failed", entry.request.request_id, exc_info=error)
        stats = self._ledger.stats_of(entry.request.request_id)
        text = self._end(entry, "error")
        return Emission(entry.request.request_id, text=text, finish_reason="error", error=_message(error), stats=stats)


def _sequences(entries: Sequence[Entry]) -> tuple[list[str], list[list[int]]]:
    """Return the ids and tokens of requests."""
    return [entry.request.request_id for entry in entries], [entry.request.token_ids for entry in entries]


def error_emission(request_id: str, error: BaseException) -> Emission:
    """Error emission for a request that the engine does not know: rejected, lost in a step that failed, or after a stop."""
    return Emission(request_id, finish_reason="error", error=_message(error))


def _message(error: BaseException | None) -> str:
    return str(error) if isinstance(error, OutriderError) else f"{TARGET_FAILED}: {type(error).__name__}: {error}"
