"""Account for rounds: statistics of each request and in total, origins of tokens, and the prices of target passes.

Everything is derived from the ``RoundResult`` and the seconds of its phases; what the policy learns from is the ``Round`` that
comes out. Names are those of docs/glossary.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.round import RoundResult
from outrider.engine.stats import GenerationStats
from outrider.runner.cost_book import CostBook
from outrider.types import PhaseTimes, Proposal, Round

NUM_COLD = 3  # rounds without drafts that are slower after a model drafted: it took the target's place in the CPU's caches


class Ledger:
    """The books of one engine."""

    def __init__(self, costs: CostBook, drafts_with_model: bool) -> None:
        """``costs`` learns from every decoding round; ``drafts_with_model``: whether the proposer runs a model."""
        self.total = GenerationStats()
        self._costs, self._drafts_with_model = costs, drafts_with_model
        self._requests: dict[str, GenerationStats] = {}
        self._num_cold = 0  # rounds without drafts that are still slower

    def of(self, request_id: str) -> GenerationStats:
        """The statistics of a request, live until it ends."""
        stats = self._requests.get(request_id)
        if stats is None:
            stats = self._requests[request_id] = GenerationStats()
        return stats

    def close(self, request_ids: Sequence[str]) -> None:
        """Forget requests that ended; the totals keep what they did."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def add_faults(self, request_ids: Sequence[str]) -> None:
        """Count a failure of the proposer for each of these requests."""
        self.total.faults += len(request_ids)
        for request_id in request_ids:
            self.of(request_id).faults += 1

    def record(self, result: RoundResult, times: PhaseTimes, is_prefill: bool) -> tuple[Round, list[list[str]]]:
        """Book a round. Return it in numbers, and the origin of each emitted token of each request.

        Origins are "accepted", "corrected" (after a rejection), "bonus" (after all drafts were accepted), "plain" in a round
        without drafts, or "grammar" for drafts that a grammar left no choice about, which no other count includes.
        ``is_prefill``: the pass also read prompts, so its seconds are no price of decoding.
        """
        proposal, lens = result.proposal, result.proposal.lens.tolist()
        is_forced = [[False] * n for n in lens] if proposal.forced is None else proposal.forced.tolist()
        forced = None if proposal.forced is None else [sum(each) for each in is_forced]
        accepted, judged, origins = [], [], []
        rows = zip(result.context.requests, lens, result.paths, result.token_ids, strict=True)
        for b, (request, num_scored, path, token_ids) in enumerate(rows):
            num_drafts = num_scored - (forced[b] if forced is not None else 0)
            last = _last_origin(proposal, b, num_scored, path) if num_drafts else "plain"
            found = ["grammar" if is_forced[b][node] else "accepted" for node in path]
            accepted.append(found.count("accepted"))
            judged.append(accepted[b] + (last == "corrected"))
            origins.append([*found, last][: len(token_ids)])
            num_forced = origins[b].count("grammar")
            for stats in (self.of(request.request_id), self.total):
                stats.count(num_drafts, judged[b], accepted[b], len(token_ids), num_forced)
        is_cold = not any(lens) and self._num_cold > 0
        drafted_with_model = self._drafts_with_model and result.k > 0
        self._num_cold = NUM_COLD if drafted_with_model else max(self._num_cold - 1, 0)
        depths = path_depths(proposal, is_forced)
        reaches = None if proposal.own is None else path_depths(proposal, (~proposal.own).tolist())
        round_ = Round(result.k, lens, depths, accepted, times, result.scores.first_layer, is_cold, judged, forced, reaches)
        self._clock(result, round_, is_prefill)
        return round_, origins

    def _clock(self, result: RoundResult, round_: Round, is_prefill: bool) -> None:
        """Book seconds: to the prices of passes, to each request and to the total."""
        requests, times = result.context.requests, round_.times
        cache_len = max([len(request.token_ids) for request in requests])
        is_greedy = all([request.params.is_greedy for request in requests])
        if not is_prefill:
            outside = times.verify + times.host
            self._costs.record_round(
                round_.lens, cache_len, times.score, outside, is_greedy, round_.first_layer, round_.is_cold
            )
        plain = self._costs.plain_round(len(requests), cache_len, is_greedy)
        num_emitted = 0
        for request, token_ids in zip(requests, result.token_ids, strict=True):
            num_emitted += len(token_ids)
            self.of(request.request_id).clock(round_, is_prefill, len(token_ids), plain)
        self.total.clock(round_, is_prefill, num_emitted / len(requests), plain)


def path_depths(proposal: Proposal, is_skipped: Sequence[Sequence[bool]]) -> list[int]:
    """Return the most drafts on a path of each request, without those that are skipped [B][N]."""
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


def _last_origin(proposal: Proposal, b: int, num_drafts: int, path: list[int]) -> str:
    """Where the token after the accepted path comes from, in a round with drafts."""
    if proposal.parents is None:
        is_leaf = len(path) == num_drafts
    else:
        is_leaf = (path[-1] if path else -1) not in proposal.parents[b, :num_drafts].tolist()
    return "bonus" if is_leaf else "corrected"
