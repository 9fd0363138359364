"""Draft the tokens that a grammar determines or makes likely, in addition to the drafts of a method.

A token that the masks of a request leave as the only one has probability 1 under the target, whatever its logits and the
sampler's settings: as a draft it is accepted at any temperature, for one more row of a pass instead of a pass. Where the masks
leave a few tokens, such as white space and punctuation between the keys of a JSON object, the one chosen there before is
guessed (``TokenGuesser``). A guess is a draft like any other: the target may reject it.

``GrammarDrafts`` stands between the round and the guarded proposer. Forced tokens come before the proposer's drafts, which it
makes as if they were committed, and after a chain of drafts. A proposer without ``drafts_ahead`` cannot continue after forced
tokens. If the forced span is shorter than K, the proposer drafts it itself (the masks leave no choice); otherwise it makes no
drafts in this round. Its own drafts that are forced are marked too, so that they do not count as accepted. The proposer
receives the verdict on its own drafts only. It never drafts after guesses, which may be rejected: they take the place of its
drafts if they are not far fewer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.engine.round import DraftSource
from outrider.sampling.grammar_masks import allowed_after, is_dead_end, is_empty, path_to
from outrider.types import Context, Matcher, Proposal, Request, Verdict, owner_of

MAX_DRAFTS = 15  # forced and guessed drafts of a request in one round: a pass of 16 rows; a longer span takes another round
MAX_CHOICES = 256  # tokens among which one is guessed
MAX_STATES = 1024  # states that are remembered of an owner, up to 1 KiB each; the oldest is dropped
MAX_OWNERS = 64  # whose tokens are remembered; those of the one that was last active longest ago are dropped
MAX_COUNTER = 3  # a state's counter starts at 1; a right guess adds 1, a wrong one takes 1, and at 0 nothing is guessed


class TokenGuesser:
    """Guess the token that was chosen before where masks leave a few. Two-bit counters (Smith, 1981) tell whether to guess.

    A state is the token before and the set of allowed tokens, which distinguishes most states of a grammar. In a new state, the
    allowed token that was chosen last anywhere is guessed: white space and punctuation mostly continue alike. States are shared
    by all grammars of an owner (see ``owner_of``).
    """

    def __init__(self) -> None:
        self._choices: OrderedDict[tuple[int, bytes], tuple[int, int]] = OrderedDict()  # state -> token, counter
        self._latest: dict[int, int] = {}  # token -> when it was chosen last
        self._now = 0

    def guess(self, before: int, allowed: Tensor) -> int | None:
        """Return the token to guess after ``before``; None if there is none. ``allowed``: bool [V], on the CPU."""
        few = _few(allowed)
        if few is None:
            return None
        state = before, few.tobytes()
        if state in self._choices:
            token, counter = self._choices[state]
            return token if counter > 0 else None
        latest: int = max(few.tolist(), key=lambda token: self._latest.get(token, -1))
        return latest if latest in self._latest else None

    def learn(self, before: int, allowed: Tensor, token: int) -> None:
        """Learn which of the allowed tokens came after ``before``."""
        few = _few(allowed)
        if few is None:
            return
        self._now += 1
        self._latest[token] = self._now
        state = before, few.tobytes()
        known, counter = self._choices.pop(state, (token, 0))
        if known == token:
            self._choices[state] = token, min(counter + 1, MAX_COUNTER)
        else:
            self._choices[state] = (known, counter - 1) if counter > 0 else (token, 0)
        if len(self._choices) > MAX_STATES:
            self._choices.popitem(last=False)


def _few(allowed: Tensor) -> np.ndarray[Any, Any] | None:
    """Return the ids of the allowed tokens; None if one is allowed, or many."""
    mask = allowed.numpy()
    return np.flatnonzero(mask).astype(np.int32) if 1 < np.count_nonzero(mask) <= min(MAX_CHOICES, len(mask) // 2) else None


@dataclass(slots=True)
class _Row:
    """The drafts of one constrained request in this round: ``before``, those of the inner drafter, ``after``."""

    room: int  # maximum number of drafts
    before: list[int]
    num_certain: int  # of those before: forced tokens before the first guess
    own: list[bool] = field(default_factory=list)  # whether each draft of the inner drafter is forced
    after: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # all of these, in the order of the round's proposal

    @property
    def has_guesses(self) -> bool:
        return len(self.before) > self.num_certain

    @property
    def has_any(self) -> bool:
        return bool(self.before or self.after or any(self.own))


class GrammarDrafts:
    """Add forced and guessed tokens to the drafts of another drafter."""

    def __init__(
        self,
        inner: DraftSource,
        *,
        drafts_ahead: bool,
        max_drafts: int | None = None,
    ) -> None:
        """``drafts_ahead``: whether the inner drafter can draft after tokens that the target has not processed yet.

        ``max_drafts``: maximum drafts of a request in one target pass; None: unlimited.
        """
        self._inner, self._drafts_ahead, self._max_drafts = inner, drafts_ahead, max_drafts
        self._most = MAX_DRAFTS if max_drafts is None else min(MAX_DRAFTS, max_drafts)
        self._guessers: OrderedDict[str, TokenGuesser] = OrderedDict()  # by owner, the one that was active last at the end
        self._stopped: set[str] = set()  # requests without these drafts
        self._rows: dict[str, _Row] = {}  # by request id, for requests with a grammar
        self._ahead: Context | None = None  # of this round, with forced tokens as if they were committed; None without any

    def find_tokens(self, context: Context) -> None:
        """Find the forced and guessed tokens of a round. ``context.limits``: maximum number of drafts per request.

        A request that asked for no drafts gets none, nor does one that is stopped or at a dead end.
        """
        self._rows, self._ahead = {}, None
        for request, limit in zip(context.requests, context.limits, strict=True):
            is_stopped = request.num_draft_tokens == 0 or request.request_id in self._stopped
            if request.matcher is not None and not is_stopped and limit > 0:
                room = limit if self._max_drafts is None else min(limit, self._max_drafts)
                before, num_certain = forced_and_guessed_tokens(request, [], min(self._most, limit), self._guesser(request))
                self._rows[request.request_id] = _Row(0 if is_dead_end(request, []) else room, before, num_certain)

    def propose(self, context: Context, k: int) -> Proposal:
        """Return the tokens that ``find_tokens`` found, at most k drafts of the inner drafter, and the grammar's after them."""
        if not self._rows:
            return self._inner.propose(context, k)
        proposal = self._inner.propose(self._inner_context(context, k), k)
        self._extend(context, proposal)
        rows = [self._rows.get(request_id) for request_id in context.request_ids]
        return _joined(rows, proposal) if any(row is not None and row.has_any for row in rows) else proposal

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Pass on the verdict on the inner drafter's own drafts, and learn what was chosen."""
        if self._rows:
            self._learn(context, verdict)
            verdict = self._verdict_on_inner_drafts(context, verdict)
        if self._ahead is not None:
            rows = {request_id: b for b, request_id in enumerate(self._ahead.request_ids)}
            context = self._ahead.take([rows[request_id] for request_id in context.request_ids])
        self._inner.commit(context, verdict)

    def stop(self, request: Request) -> None:
        """Make no more drafts for a request, because the target fails on them."""
        self._stopped.add(request.request_id)

    def release(self, request_ids: Sequence[str]) -> None:
        """Drop requests that ended; the next round would, but may be far off."""
        self._stopped.difference_update(request_ids)
        for request_id in request_ids:
            self._rows.pop(request_id, None)
        if not self._rows:
            self._ahead = None

    def _guesser(self, request: Request) -> TokenGuesser:
        """Return the guesser of the request's owner."""
        owner = owner_of(request.request_id)
        if owner not in self._guessers:
            self._guessers[owner] = TokenGuesser()
            if len(self._guessers) > MAX_OWNERS:
                self._guessers.popitem(last=False)
        self._guessers.move_to_end(owner)
        return self._guessers[owner]

    def _inner_context(self, context: Context, k: int) -> Context:
        """Return the inner drafter's context: requests with forced tokens as if those were committed, or without drafts."""
        limits, ahead = list(context.limits), {}  # ahead: by row, the requests with forced tokens
        for b, request in enumerate(context.requests):
            row = self._rows.get(request.request_id)
            if row is None:
                continue
            self._choose_prefix(row, min(k, limits[b]))
            limits[b] = self._inner_limit(row, limits[b])
            if row.before and k > 0 and limits[b] > 0:
                ahead[b] = _with_committed(request, row.before)
        context = replace(context, limits=tuple(limits))
        if not ahead:
            return context
        requests = tuple([ahead.get(b, request) for b, request in enumerate(context.requests)])
        self._ahead = replace(context, requests=requests, sampler=context.sampler.continued(ahead))
        return self._ahead

    def _choose_prefix(self, row: _Row, wanted: int) -> None:
        """Choose the tokens before the inner drafter's drafts, if it is asked for ``wanted`` of them."""
        if wanted > 2 * len(row.before):  # otherwise guesses are worth more: they take no pass of a draft model
            row.before = row.before[: row.num_certain]
        if not self._drafts_ahead and not row.has_guesses and wanted > len(row.before):
            row.before = []  # the proposer drafts these itself, because the masks allow no others

    def _inner_limit(self, row: _Row, limit: int) -> int:
        """Return how many drafts the inner drafter may make: none after guesses, or after tokens that it cannot continue."""
        if row.has_guesses or (row.before and not self._drafts_ahead):
            return 0
        return max(min(limit, row.room - len(row.before)), 0)

    def _extend(self, context: Context, proposal: Proposal) -> None:
        """Mark what is forced of each request's drafts, and find what is forced or guessed after a chain of them."""
        drafts = proposal.token_ids.tolist()
        trees = None if proposal.parents is None else proposal.parents.tolist()
        for b, (request, num_own) in enumerate(zip(context.requests, proposal.lens.tolist(), strict=True)):
            row = self._rows.get(request.request_id)
            if row is None:
                continue
            tree = None if trees is None else trees[b]
            for node, token in enumerate(drafts[b][:num_own]):
                path = path_to(node, drafts[b], tree)[:-1]
                row.own.append(_only_token(allowed_after(request, [*row.before, *path])) == token)
            known = [*row.before, *drafts[b][:num_own]]
            room = min(self._most, row.room) - len(known)
            if room > 0 and (trees is None or num_own == 0):
                row.after, _ = forced_and_guessed_tokens(request, known, room, self._guesser(request))
            row.drafts = [*known, *row.after]

    def _learn(self, context: Context, verdict: Verdict) -> None:
        """Learn which tokens the target chose where masks leave a few."""
        for request, path, token in zip(context.requests, verdict.paths, verdict.next_tokens, strict=True):
            row = self._rows.get(request.request_id)
            if row is None:
                continue
            guesser = self._guesser(request)
            chosen = [*(row.drafts[node] for node in path), token]
            for at, (before, each) in enumerate(pairwise([request.token_ids[-1], *chosen])):
                allowed = allowed_after(request, chosen[:at])
                if allowed is not None:
                    guesser.learn(before, allowed, each)

    def _verdict_on_inner_drafts(self, context: Context, verdict: Verdict) -> Verdict:
        paths, next_tokens = list(verdict.paths), list(verdict.next_tokens)
        for b, request_id in enumerate(context.request_ids):
            row = self._rows.get(request_id)
            if row is not None:
                first, stop = len(row.before), len(row.before) + len(row.own)
                if paths[b] and paths[b][-1] >= stop:
                    next_tokens[b] = row.after[0]
                paths[b] = [node - first for node in paths[b] if first <= node < stop]
        return Verdict(paths, next_tokens)


@dataclass(frozen=True, slots=True)
class _MatcherAhead:
    """Matcher of a request whose output includes tokens that are not committed yet."""

    inner: Matcher
    num_committed: int  # number of committed tokens in the output

    def allowed(self, output: Sequence[int], path: Sequence[int]) -> Tensor | None:
        return self.inner.allowed(output[: self.num_committed], [*output[self.num_committed :], *path])


def _with_committed(request: Request, token_ids: Sequence[int]) -> Request:
    """Return the request as it is once these tokens are committed."""
    assert request.matcher is not None
    matcher = _MatcherAhead(request.matcher, request.num_output_tokens)
    return replace(request, token_ids=[*request.token_ids, *token_ids], matcher=matcher)


def forced_and_guessed_tokens(request: Request, path: Sequence[int], most: int, guesser: TokenGuesser) -> tuple[list[int], int]:
    """Return at most that many tokens after a request's output and the drafts of ``path``: the only ones allowed, and guesses.

    Also return how many come before the first guess. The last token is left out if none can follow it (the end of the text, a
    dead end): the round's own token is that one.
    """
    run: list[int] = []
    num_certain: int | None = None
    while True:
        allowed = allowed_after(request, [*path, *run])
        token = _only_token(allowed)
        if token is None:
            if allowed is None or is_empty(allowed):
                run = run[:-1]
                break
            token = guesser.guess([request.token_ids[-1], *path, *run][-1], allowed)
            if token is None:
                break
            num_certain = len(run) if num_certain is None else num_certain
        if len(run) == most:
            break
        run.append(token)
    return run, len(run) if num_certain is None else min(num_certain, len(run))


def _only_token(allowed: Tensor | None) -> int | None:
    """Return the token that a mask on the CPU leaves; None if it leaves several or none."""
    if allowed is None or np.count_nonzero(allowed.numpy()) != 1:
        return None
    return int(allowed.numpy().argmax())


def _joined(rows: Sequence[_Row | None], proposal: Proposal) -> Proposal:
    """Return the proposal with a grammar's drafts as chains of point masses before and after each request's own ones."""
    own: list[int] = proposal.lens.tolist()
    lens = [n if row is None else len(row.drafts) for row, n in zip(rows, own, strict=True)]
    batch, width = len(rows), max(lens)
    token_ids = proposal.token_ids.new_zeros(batch, width)
    is_grammar, is_proposed = torch.zeros(2, batch, width, dtype=torch.bool)
    probs = parents = None
    if proposal.probs is not None:
        probs = proposal.probs.new_zeros(batch, width, proposal.probs.shape[2])
    if proposal.parents is not None:
        parents = proposal.parents.new_full((batch, width), -1)
    for b, (row, n, length) in enumerate(zip(rows, own, lens, strict=True)):
        first = 0 if row is None else len(row.before)
        inner = slice(first, first + n)  # of the request's own drafts
        if row is not None:
            token_ids[b, :length] = token_ids.new_tensor(row.drafts)
            is_grammar[b, :length] = torch.tensor([True] * first + row.own + [True] * len(row.after), dtype=torch.bool)
        token_ids[b, inner], is_proposed[b, inner] = proposal.token_ids[b, :n], True
        if probs is not None and proposal.probs is not None:
            probs[b, torch.arange(length), token_ids[b, :length]] = 1.0
            probs[b, inner] = proposal.probs[b, :n]
        if parents is not None and proposal.parents is not None:
            parents[b, :length] = torch.arange(-1, length - 1)
            parents[b, inner] = proposal.parents[b, :n] + first  # the root is the last token before
    joined = replace(proposal, token_ids=token_ids, lens=torch.tensor(lens), probs=probs, parents=parents)
    return replace(joined, is_grammar=is_grammar, is_proposed=is_proposed)
