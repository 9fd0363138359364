"""Record rounds: statistics per request and in total, origins of tokens, and the costs of target passes.

The input is a ``RoundResult`` and its phase times, the output the ``Round`` from which the draft-length policy learns. Terms
are defined in docs/glossary.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from outrider.engine.round import RoundResult
from outrider.engine.stats import GenerationStats
from outrider.runner.cost_book import CostBook
from outrider.types import PhaseTimes, Proposal, Round

NUM_COLD = 3  # plain rounds after model drafting that are slower: the draft model evicted the target from the CPU caches


class Ledger:
    """Statistics of one engine."""

    def __init__(self, costs: CostBook, drafts_with_model: bool) -> None:
        """``costs`` records every decoding round; ``drafts_with_model``: whether the proposer runs a model."""
        self.total = GenerationStats()
        self._costs, self._drafts_with_model = costs, drafts_with_model
        self._requests: defaultdict[str, GenerationStats] = defaultdict(GenerationStats)
        self._num_cold = 0  # next plain rounds that still count as cold; none if not positive

    def stats_of(self, request_id: str) -> GenerationStats:
        """Return the statistics of a request, updated until it ends."""
        return self._requests[request_id]

    def start(self, request_id: str, num_cached: int) -> None:
        """Count the prompt tokens that a new request found cached."""
        self.stats_of(request_id).num_cached += num_cached
        self.total.num_cached += num_cached

    def close(self, request_ids: Sequence[str]) -> None:
        """Drop requests that ended; they stay included in the totals."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def add_faults(self, request_ids: Sequence[str]) -> None:
        """Count a failure of the proposer, or of the target on drafts, for each of these requests."""
        self.total.faults += len(request_ids)
        for request_id in request_ids:
            self.stats_of(request_id).faults += 1

    def record(self, result: RoundResult, times: PhaseTimes, is_prefill: bool) -> tuple[Round, list[list[str]]]:
        """Record a round. Return its counts and times, and the origin of each emitted token of each request.

        Origins are "accepted", "corrected" (after a rejection), "bonus" (after all drafts were accepted), "plain" (without
        drafts), or "grammar" (a draft of a grammar, which the acceptance counts exclude).
        """
        proposal, lens = result.proposal, result.proposal.lens.tolist()
        is_grammar = [[False] * n for n in lens]
        if proposal.is_grammar is not None:
            is_grammar = [row[:n] for row, n in zip(proposal.is_grammar.tolist(), lens, strict=True)]
        # The policy learns from all decided tokens; statistics count the emitted ones, which end at a stop.
        decided = [_origins(proposal, b, is_grammar[b], path) for b, path in enumerate(result.verdict.paths)]
        emitted = [origins[: len(token_ids)] for origins, token_ids in zip(decided, result.token_ids, strict=True)]
        is_cold = not any(lens) and self._num_cold > 0
        drafted_with_model = self._drafts_with_model and result.k > 0
        self._num_cold = NUM_COLD if drafted_with_model else self._num_cold - 1
        depths = path_depths(proposal, is_grammar)
        proposed = depths if proposal.is_proposed is None else path_depths(proposal, (~proposal.is_proposed).tolist())
        round_ = Round(
            k=result.k,
            lens=lens,
            depths=depths,
            proposed_depths=proposed,
            num_accepted=[origins.count("accepted") for origins in decided],
            num_reached=[origins.count("accepted") + origins.count("corrected") for origins in decided],
            times=times,
            first_layer=result.scores.first_layer,
            is_cold=is_cold,
            num_grammar=None if proposal.is_grammar is None else [sum(row) for row in is_grammar],
            is_prefill=is_prefill,
        )
        for request, num_drafts, origins in zip(result.context.requests, round_.num_drafts, emitted, strict=True):
            num_accepted, num_grammar = origins.count("accepted"), origins.count("grammar")
            num_reached = num_accepted + origins.count("corrected")
            for stats in (self.stats_of(request.request_id), self.total):
                stats.add_counts(num_drafts, num_reached, num_accepted, len(origins), num_grammar)
        self._record_times(result, round_)
        return round_, emitted

    def _record_times(self, result: RoundResult, round_: Round) -> None:
        """Add a round's times to the costs of passes, to each request and to the total."""
        requests, times = result.context.requests, round_.times
        cache_len = result.context.cache_len
        is_greedy = all([request.params.is_greedy for request in requests])
        if not round_.is_prefill:
            self._costs.record_round(
                round_.lens, cache_len, times.score, times.overhead, is_greedy, round_.first_layer, round_.is_cold
            )
        plain = self._costs.plain_round(len(requests), cache_len, is_greedy)
        num_emitted = 0
        for request, token_ids in zip(requests, result.token_ids, strict=True):
            num_emitted += len(token_ids)
            self.stats_of(request.request_id).add_times(round_, len(token_ids), plain)
        self.total.add_times(round_, num_emitted / len(requests), plain)


def path_depths(proposal: Proposal, is_skipped: Sequence[Sequence[bool]]) -> list[int]:
    """Return the length of the longest path of each request's drafts, where drafts of ``is_skipped`` [B][N] do not count."""
    lens = proposal.lens.tolist()
    if proposal.parents is None:
        return [length - sum(skipped[:length]) for length, skipped in zip(lens, is_skipped, strict=True)]
    longest = []
    for parents, length, skipped in zip(proposal.parents.tolist(), lens, is_skipped, strict=True):
        depths: list[int] = []
        for parent, is_out in zip(parents[:length], skipped, strict=False):
            depths.append((depths[parent] if parent >= 0 else 0) + (not is_out))
        longest.append(max(depths, default=0))
    return longest


def _origins(proposal: Proposal, b: int, is_grammar: Sequence[bool], path: list[int]) -> list[str]:
    """Return the origins of the tokens that a round decided for a request: its accepted drafts, then the next token.

    ``is_grammar``: of its scored drafts.
    """
    accepted = ["grammar" if is_grammar[node] else "accepted" for node in path]
    if all(is_grammar):
        return [*accepted, "plain"]
    if proposal.parents is None:
        is_bonus = all(is_grammar[len(path) :])  # a rejected guess after the proposer's drafts corrects none of them
    else:
        is_bonus = (path[-1] if path else -1) not in proposal.parents[b, : len(is_grammar)].tolist()
    return [*accepted, "bonus" if is_bonus else "corrected"]
