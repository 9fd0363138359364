"""Suffix drafting: a suffix automaton finds the longest suffix that occurred before; its continuation is drafted.

After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975): the longer the match, the longer the draft, as long as the
continuation is frequent.
The index is the online suffix automaton of Blumer et al. 1985: O(1) amortised per token, at most 2n states and 3n transitions
for n tokens. A suffix tree of bounded depth d takes O(d) per token and misses longer matches.

A continuation is counted for the longest matching context, and for longer contexts in which it is new: *update exclusion*, as
in the text compressor PPM (Moffat 1990). Extending the automaton visits exactly these states, so counting adds no cost;
counting in all contexts of a token takes O(n) in the worst case.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from outrider.options import CheckedOptions, number, option, whole
from outrider.proposers.base import Proposer, chain_proposal
from outrider.proposers.method import MethodSpec
from outrider.proposers.portable import Form
from outrider.types import Context, OutriderError, Proposal, Request, owner_of

END = -1  # separator after each earlier text: not a token, so no match or draft crosses it
ROOT = 0
NUM_BLOCKS = 4  # earlier texts are stored in this number of blocks; the oldest block is dropped first
FIRST_MATCH_TOKENS = 64  # tokens that are matched against a block of earlier texts when a request first uses it


@dataclass(frozen=True)
class SuffixConfig(CheckedOptions):
    """Settings of suffix drafts: matches, lengths, and the tokens of earlier requests that are stored."""

    min_match: int = option(whole(1), 1, "Minimum length of a match in tokens; after a short match the draft is short, too.")
    drafts_per_match: float = option(number(above=0, at_most=1000), 2.0, "Maximum number of drafts per matched token.")
    min_prob: float = option(number(0, 1), 0.1, "Minimum probability of the whole draft, estimated from counts.")
    earlier_tokens: int = option(
        whole(0),
        0,
        f"Tokens of each client's earlier requests to store, with outputs; 0: none, otherwise at least {2 * NUM_BLOCKS}.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.earlier_tokens < 2 * NUM_BLOCKS:
            raise OutriderError(f"invalid earlier_tokens {self.earlier_tokens}: expected 0 or at least {2 * NUM_BLOCKS}")


class SuffixAutomaton:
    """Substrings of a growing sequence with counts of their continuations.

    A state represents all substrings with the same set of end positions; the longest has ``lens[state]`` tokens.
    ``links[state]`` is the state of its longest suffix with more end positions. The root is state 0.
    """

    __slots__ = ("_best", "_counts", "_last", "_next", "_totals", "lens", "links")

    def __init__(self) -> None:
        self.lens = [0]
        self.links = [-1]
        self._next: list[dict[int, int]] = [{}]
        self._totals = [0]  # number of counted continuations
        self._best = [END]  # most frequent continuation, the latest on ties
        self._counts: list[dict[int, int] | None] = [None]  # counts by token; None: only ``_best``, ``_totals`` times
        self._last = ROOT

    @property
    def end(self) -> int:
        """Return the state of the longest suffix that occurred before; the root if there is none."""
        return max(self.links[self._last], ROOT)

    def extend(self, token: int) -> None:
        """Append a token (Blumer et al. 1985) and count it, in amortised O(1)."""
        following, links = self._next, self.links
        state, new = self._last, self._add(self.lens[self._last] + 1, {})
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            self._count(state, token)
            state = links[state]
        if state < 0:
            links[new] = ROOT
        else:
            self._count(state, token)
            links[new] = self._clone_if_needed(state, token)
        self._last = new

    def follow(self, state: int, length: int, token_ids: Sequence[int]) -> tuple[int, int]:
        """Extend a match of ``length`` tokens in ``state`` by more tokens; return the longest match and its length."""
        following, links, lens = self._next, self.links, self.lens
        while state and length <= lens[links[state]]:  # the state was split after the last call
            state = links[state]
        for token in token_ids:
            after = following[state].get(token)
            while after is None and state:
                state = links[state]
                length = lens[state]
                after = following[state].get(token)
            state, length = (ROOT, 0) if after is None else (after, length + 1)
        return state, length

    def continuation(self, state: int, k: int, min_len: int, min_prob: float) -> list[int]:
        """Return at most k tokens, each the most frequent continuation, while their joint probability is at least ``min_prob``.

        A draft that reaches the end of the sequence continues after its longest suffix of at least ``min_len`` tokens that
        occurred elsewhere, so that a repetition goes on.
        """
        drafts: list[int] = []
        prob = 1.0
        while len(drafts) < k:
            total = self._totals[state]
            if not total:
                state = self.links[state]
                if self.lens[state] < min_len:
                    break
                continue
            token, counts = self._best[state], self._counts[state]
            if counts is not None:
                prob *= counts[token] / total
            if token == END or prob < min_prob:
                break
            drafts.append(token)
            state = self._next[state][token]
        return drafts

    def _add(self, length: int, following: dict[int, int]) -> int:
        self.lens.append(length)
        self.links.append(-1)
        self._next.append(following)
        self._totals.append(0)
        self._best.append(END)
        self._counts.append(None)
        return len(self.lens) - 1

    def _clone_if_needed(self, state: int, token: int) -> int:
        """Return the state whose longest substring is that of ``state`` plus the token; create it by a split if needed."""
        following, links = self._next, self.links
        found = following[state][token]
        length = self.lens[state] + 1
        if self.lens[found] == length:
            return found
        split = self._add(length, dict(following[found]))
        counts = self._counts[found]
        self._totals[split], self._best[split] = self._totals[found], self._best[found]
        self._counts[split] = None if counts is None else dict(counts)
        links[split] = links[found]
        links[found] = split
        while state >= 0 and following[state].get(token) == found:
            following[state][token] = split
            state = links[state]
        return split

    def _count(self, state: int, token: int) -> None:
        total, best, counts = self._totals[state], self._best[state], self._counts[state]
        self._totals[state] = total + 1
        if total == 0:
            self._best[state] = token
        elif counts is not None or token != best:
            if counts is None:
                counts = self._counts[state] = {best: total}
            counts[token] = counts.get(token, 0) + 1
            if counts[token] >= counts[best]:
                self._best[state] = token


@dataclass(eq=False, slots=True)
class Cursor:
    """Longest match of a request's suffix in a block of earlier texts."""

    block: SuffixAutomaton
    state: int = ROOT
    length: int = 0

    def read(self, token_ids: Sequence[int]) -> None:
        self.state, self.length = self.block.follow(self.state, self.length, token_ids)


class EarlierTexts:
    """Texts of finished requests, at most ``max_tokens`` including one separator per text; the oldest quarter is dropped."""

    def __init__(self, max_tokens: int) -> None:
        self._block_size = max_tokens // NUM_BLOCKS
        self._used = self._block_size
        self.blocks: deque[SuffixAutomaton] = deque(maxlen=NUM_BLOCKS)  # newest first

    def add(self, token_ids: Sequence[int]) -> None:
        """Add a text, or its last tokens if it is longer than the memory."""
        room = self._block_size * NUM_BLOCKS - 1
        for token in [*token_ids[-room:], END]:
            if self._used == self._block_size:
                self.blocks.appendleft(SuffixAutomaton())
                self._used = 0
            self.blocks[0].extend(token)
            self._used += 1


class _RequestIndex:
    """The automaton of one request, and its matches in earlier texts."""

    def __init__(self, request: Request) -> None:
        self.token_ids = request.token_ids  # the request's own list, which holds all tokens when it finishes
        self.own = SuffixAutomaton()
        self.cursors: list[Cursor] = []
        self._num_indexed = 0

    def catch_up(self, token_ids: Sequence[int], blocks: Sequence[SuffixAutomaton]) -> None:
        """Process new tokens."""
        fresh = token_ids[self._num_indexed :]
        for token in fresh:
            self.own.extend(token)
        if blocks or self.cursors:
            known = {id(cursor.block): cursor for cursor in self.cursors}
            self.cursors = [known.get(id(block)) or Cursor(block) for block in blocks]
            for cursor in self.cursors:
                cursor.read(fresh if id(cursor.block) in known else token_ids[-FIRST_MATCH_TOKENS:])
        self._num_indexed = len(token_ids)

    def longest(self) -> Cursor:
        """Return the longest match; on ties the request's own, then the newest block's."""
        longest = Cursor(self.own, self.own.end, self.own.lens[self.own.end])
        for cursor in self.cursors:
            if cursor.length > longest.length:
                longest = cursor
        return longest


class SuffixProposer(Proposer):
    """Drafts the most frequent continuation of the longest match in prompt, output and, if enabled, earlier requests."""

    name = "suffix"
    is_model_free = True
    auto_drafts = 31

    def __init__(self, config: SuffixConfig = SuffixConfig()) -> None:
        self._config = config
        self.memory = None
        self._indexes: dict[str, _RequestIndex] = {}

    @property
    def memory(self) -> defaultdict[str, EarlierTexts] | None:
        """Texts of earlier requests, by their owner; None if not enabled."""
        return self._earlier

    @memory.setter
    def memory(self, known: defaultdict[str, EarlierTexts] | None) -> None:
        size = self._config.earlier_tokens
        self._earlier = known if known is not None or not size else defaultdict(partial(EarlierTexts, size))

    def prefill(self, requests: Sequence[Request]) -> list[bool]:
        """Store the requests' own token lists; in a round with forced tokens, ``propose`` is given copies."""
        for request in requests:
            self._index(request)
        return [True] * len(requests)

    def propose(self, context: Context, k: int) -> Proposal:
        """Return point masses; none without a match."""
        each = zip(context.requests, context.limits, strict=True)
        return chain_proposal([self._drafts(request, min(k, limit)) for request, limit in each])

    def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._indexes.pop(request_id, None)

    def retire(self, request_ids: Sequence[str]) -> None:
        if self._earlier is not None:
            for request_id in request_ids:
                if request_id in self._indexes:
                    self._earlier[owner_of(request_id)].add(self._indexes[request_id].token_ids)
        self.release(request_ids)

    def _index(self, request: Request) -> _RequestIndex:
        if request.request_id not in self._indexes:
            self._indexes[request.request_id] = _RequestIndex(request)
        return self._indexes[request.request_id]

    def _drafts(self, request: Request, k: int) -> list[int]:
        index = self._index(request)
        blocks = self._earlier[owner_of(request.request_id)].blocks if self._earlier is not None else ()
        index.catch_up(request.token_ids, blocks)
        match, config = index.longest(), self._config
        if match.length < config.min_match:
            return []
        k = min(k, int(config.drafts_per_match * match.length))
        return match.block.continuation(match.state, k, config.min_match, config.min_prob)


class SuffixMethod(MethodSpec):
    proposer = SuffixProposer
    options = SuffixConfig
    exported = Form.TEXT


METHOD = SuffixMethod()
