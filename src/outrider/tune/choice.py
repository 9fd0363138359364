"""Choose the K of each request of a batch, including 0: those with the highest expected tokens per second of the batch, the
goodput of SmartSpec (Liu et al. 2024, arXiv 2406.14066), from costs and acceptance measured so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from outrider.runner.cost_book import RoundCosts
from outrider.tune.sharing import Allocation
from outrider.tune.track import TrackedBatch, rows_by_depth
from outrider.types import DraftPrices

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 23)  # candidate lengths, in addition to 0 and the maximum
CAPS = (1, 2, 4, 8, 16)  # candidate maximum K if each request has its own
HYSTERESIS = 1.02  # predicted gain required to change K, and for a K per request: with few observations both may be chance
ALIKE = 0.1  # requests get one K if their expected gains differ by less than this share
PREFILL_HORIZON = 64  # tokens over which a proposer's prefill must pay off


class Choice(NamedTuple):
    """Chosen lengths, and what is expected of them."""

    lens: list[int]  # K of each request
    speedup: float = 1.0  # expected speed / that of plain decoding
    prices: DraftPrices | None = None  # of further drafts; None while costs are unknown


def choose(batch: TrackedBatch, costs: RoundCosts, before: list[int], lengths: Sequence[int], is_optimistic: bool) -> Choice:
    """Return the fastest of the ``lengths``, or plain decoding. ``before``, the last chosen ones, are kept unless other lengths
    are predicted to be ``HYSTERESIS`` times as fast.

    ``is_optimistic``: drafting stops only if it would not pay at the optimistic costs of later rounds either.
    """
    allocation = _allocation(batch, costs, lengths[-1])
    plain_speed = len(before) / costs.plain
    speed, lens = _best(batch, allocation, lengths)
    may_pay = is_optimistic and replace(allocation, costs=costs.at_best).best_uniform(lengths)[0] > HYSTERESIS * plain_speed
    kept_speed = allocation.speed(before) if any(before) else plain_speed
    if max(speed, plain_speed) < HYSTERESIS * kept_speed and (any(before) or not may_pay):
        speed, lens = kept_speed, before
    if speed <= plain_speed and not may_pay:
        lens = [0] * len(before)
    speed = max(speed, plain_speed)
    return Choice(lens, speed / plain_speed, _prices(allocation, speed, max(lens)))


def _allocation(batch: TrackedBatch, costs: RoundCosts, longest: int) -> Allocation:
    """Return what drafts up to ``longest`` gain and take."""
    gains, made_rates, catch_up = [], [], []  # per request
    for b, (track, request) in enumerate(zip(batch.tracks, batch.requests, strict=True)):
        own_k, limit = request.num_draft_tokens if request.may_draft else 0, batch.context.limits[b]
        gains.append(track.gains(longest, longest if own_k is None else own_k))
        made_rates.append(track.made_rates(longest))
        catch_up.append(batch.costs.catch_up(batch.num_unseen(b)) / min(PREFILL_HORIZON, 1 + limit))
    # A proposer that stops early takes less time and fewer rows: the mean share of its drafts that get to each depth.
    shares_by_request = [accumulate([1.0, *rates[1:]], mul) for rates in made_rates]
    shares = [sum(each) / len(made_rates) for each in zip(*shares_by_request, strict=True)]
    rows, depths = [*map(mul, rows_by_depth(batch.num_nodes, longest), shares)], [*accumulate(shares, initial=0.0)]
    grammar_rate = sum([track.grammar_rate for track in batch.tracks]) / len(batch.tracks)
    return Allocation(gains, [rates[0] for rates in made_rates], rows, catch_up, costs, grammar_rate, depths)


def _best(batch: TrackedBatch, allocation: Allocation, lengths: Sequence[int]) -> tuple[float, list[int]]:
    """Return the best speed of the batch with drafts, and its lengths: one for all requests unless they differ."""
    speed, lens = allocation.best_uniform(lengths)
    if not all([request.may_draft for request in batch.requests]):
        lens = batch.zero_left_out(lens)
        speed = allocation.speed(lens) if any(lens) else 0.0
    if not allocation.are_alike(ALIKE):
        apart = allocation.best([k for k in lengths if k in CAPS or k == lengths[-1]])
        speed, lens = apart if apart[0] >= HYSTERESIS * speed else (speed, lens)
    return speed, lens


def _prices(allocation: Allocation, speed: float, k: int) -> DraftPrices:
    """Return the prices of a draft beyond k, at this expected speed of the batch."""
    costs, batch, depth = allocation.costs, allocation.batch, allocation.depths[max(k, 1)]
    step, widening = costs.draft(2, batch) - costs.draft(1, batch), costs.score(1 + depth) - costs.score(1)
    return DraftPrices(speed * step, speed * max(widening, 0.0) / (batch * depth))


def candidate_lengths(longest_so_far: int, max_k: int) -> list[int]:
    """Return the lengths above 0 that may be requested now, in ascending order: up to about twice the longest draft so far."""
    return sorted({k for k in (*LENGTHS, max_k) if k <= min(2 * longest_so_far + 1, max_k)})


def best_common_k(
    gains: list[float], batch: int, costs: RoundCosts, num_nodes: Callable[[int], int], lengths: Sequence[int]
) -> tuple[float, int]:
    """Return the best speed, and its K, of a batch of requests with the same ``gains`` whose drafts are all made."""
    allocation = Allocation([gains] * batch, [1.0] * batch, rows_by_depth(num_nodes, len(gains)), [0.0] * batch, costs)
    speed, lens = allocation.best_uniform(lengths)
    return speed, lens[0]
