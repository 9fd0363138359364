"""Prompt lookup: draft what followed the last occurrence of the same n tokens (Saxena 2023, prompt lookup decoding).

The index covers prompt and output and grows in O(1) per token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.options import CheckedOptions, option, whole
from outrider.proposers.base import Proposer, chain_proposal
from outrider.proposers.method import MethodSpec
from outrider.proposers.portable import Form
from outrider.types import Context, OutriderError, Proposal


@dataclass(frozen=True)
class NgramConfig(CheckedOptions):
    """Lengths of matches. Longer matches are tried first."""

    max_n: int = option(whole(1), 4, "Longest match in tokens.")  # longer matches rarely change the continuation
    min_n: int = option(whole(1), 2, "Shortest match in tokens.")  # drafts after a match of one token are mostly rejected

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_n > self.max_n:
            raise OutriderError(f"invalid min_n {self.min_n}: expected at most max_n, which is {self.max_n}")


class NgramProposer(Proposer):
    """Drafts the continuation of the most recent earlier occurrence of the longest matching n-gram at the end."""

    name = "ngram"
    is_model_free = True

    def __init__(self, config: NgramConfig = NgramConfig()) -> None:
        self._indexes: defaultdict[str, NgramIndex] = defaultdict(lambda: NgramIndex(config))

    def propose(self, context: Context, k: int) -> Proposal:
        """Return at most k point masses per request; none without a match."""
        chains = []
        for request, limit in zip(context.requests, context.limits, strict=True):
            index = self._indexes[request.request_id]
            index.catch_up(request.token_ids)
            chains.append(index.continuation(request.token_ids, min(k, limit)))
        return chain_proposal(chains)

    def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._indexes.pop(request_id, None)


class NgramMethod(MethodSpec):
    proposer = NgramProposer
    options = NgramConfig
    exported = Form.LOOKUP


METHOD = NgramMethod()


class NgramIndex:
    """Index from n-grams to the position after their last occurrence in the tokens of a request.

    Each call is given all tokens so far, possibly in another list than before.
    """

    def __init__(self, config: NgramConfig) -> None:
        self._sizes = range(config.min_n, config.max_n + 1)
        self._follows: list[dict[tuple[int, ...], int]] = [{} for _ in self._sizes]  # n-gram -> position after it
        self._num_indexed = 0  # n-grams that end before this position are indexed

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Index new n-grams except those at the end, which would only match themselves."""
        for end in range(max(self._num_indexed, 1), len(token_ids)):
            for n, follows in zip(self._sizes, self._follows, strict=True):
                if n <= end:
                    follows[tuple(token_ids[end - n : end])] = end
        self._num_indexed = max(len(token_ids), 1)

    def continuation(self, token_ids: Sequence[int], k: int) -> list[int]:
        """Return at most k tokens that followed the longest, most recent match, repeated if the match reaches the end."""
        if k <= 0:
            return []
        for n, follows in zip(reversed(self._sizes), reversed(self._follows), strict=True):
            if n > len(token_ids):
                continue
            start = follows.get(tuple(token_ids[-n:]))
            if start is not None:
                drafts = list(token_ids[start : start + k])
                period = len(token_ids) - start
                while len(drafts) < k:  # the match overlaps the end: continue the repetition
                    drafts.append(drafts[len(drafts) - period])
                return drafts
        return []
