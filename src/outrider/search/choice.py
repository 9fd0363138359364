"""Which candidate becomes the plan, and why each of the others does not. Knows numbers and what proposers say of themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.bench.contenders import PLAIN, Contender
from outrider.bench.grid import PLAIN_CONTENDER
from outrider.proposers.base import Proposer
from outrider.registry import split_method
from outrider.search.confirming import Measured, ratio
from outrider.search.measurements import Ratio

CANDIDATES = 8  # confirmed at most
OF_ONE_METHOD = 2  # fixed lengths, beside the one that adapts
HOPELESS = 0.7  # of the best prediction, or of plain decoding: predictions are not that far off
ALIKE = 0.03  # at most given away for a simpler method


@dataclass(frozen=True)
class Prediction:
    """What replay and prices say of a candidate."""

    method: str
    k: int | str
    speedup: float  # over plain decoding, prompts included, by geometric mean over the batch sizes
    tau: float
    by_batch: dict[str, float]

    @property
    def contender(self) -> Contender:
        return Contender(self.method, self.k)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Choice:
    """The candidate that was chosen, and what is said of it and of every other by its label."""

    chosen: Contender
    speedup: Ratio | None  # over plain decoding; None where it is plain decoding
    reason: str
    others: dict[str, str]


def simplicity(contender: Contender, proposers: Mapping[str, Proposer]) -> tuple[int, ...]:
    """Sorts what is simpler to serve first: no drafts, one method, no second model, no model."""
    if contender.is_plain:
        return (0,)
    proposer, (name, _) = proposers[contender.method], split_method(contender.method)
    return 1, name.count("+"), proposer.takes_draft, not proposer.reads_text_only


def shortlist(predictions: Sequence[Prediction]) -> tuple[list[Contender], dict[str, str]]:
    """The candidates to confirm, best first, and why each of the others is not."""
    ranked = sorted(predictions, key=lambda each: -each.speedup)
    best = max(ranked[0].speedup, 1.0) if ranked else 1.0
    chosen: list[Contender] = []
    reasons: dict[str, str] = {}
    for each in ranked:
        label = each.contender.label
        mine = sum(other.method == each.method and isinstance(other.k, int) for other in chosen)
        if each.speedup < HOPELESS * best:
            reasons[label] = f"predicted at {each.speedup:.2f} times plain decoding: too slow to be confirmed"
        elif mine >= OF_ONE_METHOD and isinstance(each.k, int):
            reasons[label] = f"predicted at {each.speedup:.2f}: {OF_ONE_METHOD} lengths that promised more were confirmed"
        elif len(chosen) >= CANDIDATES:
            reasons[label] = f"predicted at {each.speedup:.2f}: {CANDIDATES} candidates that promised more were confirmed"
        else:
            chosen.append(each.contender)
    return chosen, reasons


def survivors(
    candidates: Sequence[Contender], measured: Sequence[Measured], count: int
) -> tuple[list[Contender], dict[str, str]]:
    """The fastest ``count`` of a heat, in order, and why the others are out. ``measured``: of each batch size."""
    found = {each: ratio(measured, each.label, PLAIN_CONTENDER.label) for each in candidates}
    ranked = sorted(candidates, key=lambda each: -found[each].value)
    reasons = {each.label: f"measured at {found[each].value:.2f}, behind {ranked[0].label}" for each in ranked[count:]}
    return ranked[:count], reasons


def choose(finalists: Sequence[Contender], ratio: Callable[[str, str], Ratio], proposers: Mapping[str, Proposer]) -> Choice:
    """Choose the simplest method among those as fast as the fastest one, plain decoding included, at its fastest length.

    ``ratio``: the speed of one label over that of another. As fast as the fastest: the interval of the ratio holds 1, and the
    ratio costs at most ``ALIKE``. A contender that is not faster than plain decoding beyond noise is never chosen.
    """
    speedups = {each: ratio(each.label, PLAIN) for each in finalists}
    winners = [each for each in finalists if is_faster(speedups[each])]
    others: dict[str, str] = {}
    for each in finalists:
        if each not in winners:
            others[each.label] = f"{_said(speedups[each])} plain decoding's speed, which is within noise or slower"
    if not winners:
        reason = "no candidate is faster than plain decoding by more than the noise: do not speculate"
        return Choice(PLAIN_CONTENDER, None, reason, others)
    winners.sort(key=lambda each: -speedups[each].value)
    leaders = {each.method: each for each in reversed(winners)}  # the fastest length of each method
    best = winners[0]
    against = {each: ratio(best.label, each.label) for each in leaders.values() if each != best}
    alike = [best, *(each for each, lead in against.items() if _is_alike(lead))]
    chosen = min(alike, key=lambda each: (*simplicity(each, proposers), -speedups[each].value))
    others[PLAIN] = f"{chosen.label} is {_said(speedups[chosen])} its speed"
    for each in winners:
        if each != chosen:
            leader = best if each is leaders[each.method] else leaders[each.method]
            beaten = f"no faster than {chosen.label} beyond noise" if each in alike else f"slower than {leader.label}"
            others[each.label] = f"{_said(speedups[each])} plain decoding's speed, {beaten}"
    reason = f"{_said(speedups[chosen])} the speed of plain decoding"
    if chosen != best:
        lead = against[chosen]
        reason += f"; {best.label} measured {lead.value:.2f} times as fast, which is within noise, and this is simpler"
    return Choice(chosen, speedups[chosen], reason, others)


def is_faster(speedup: Ratio) -> bool:
    """Beyond noise; without an interval by more than is given away for simplicity."""
    return speedup.interval[0] > 1 if speedup.interval is not None else speedup.value > 1 + ALIKE


def _is_alike(lead: Ratio) -> bool:
    within = lead.interval is None or lead.interval[0] <= 1
    return within and lead.value <= 1 + ALIKE


def _said(found: Ratio) -> str:
    spread = "" if found.interval is None else f" ({found.interval[0]:.2f} to {found.interval[1]:.2f})"
    return f"{found.value:.2f}{spread} times"
