"""The choice of a plan among the finalists of a search, with the reason for each that was not chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log

from outrider.bench.contenders import Contender
from outrider.bench.grid import PLAIN_CONTENDER
from outrider.method_text import split_method
from outrider.proposers.base import Proposer
from outrider.registry import PLAIN, PROPOSERS
from outrider.search.halving import Ranking
from outrider.search.measurements import Ratio

MAX_LOSS = 0.03  # largest loss of speed accepted for a simpler method


@dataclass(frozen=True)
class Decision:
    """The chosen contender and the reason; for each other one, by label, the reason against it."""

    chosen: Contender
    speedup: Ratio | None  # over plain decoding; None for plain decoding itself
    reason: str
    others: dict[str, str]


def simplicity(contender: Contender, proposers: Mapping[str, Proposer]) -> tuple[int, ...]:
    """Return a sort key, simplest to serve first: no drafts, a single method, no second model, no model that drafts."""
    if contender.is_plain:
        return (0,)
    name, _ = split_method(contender.method)
    return 1, name.count("+"), PROPOSERS.get(name).takes_draft, not proposers[contender.method].is_model_free


def choose(
    finalists: Sequence[Contender], ratio: Callable[[str, str], Ratio], proposers: Mapping[str, Proposer], last: Ranking
) -> Decision:
    """Choose the simplest method that is as fast as the fastest one, at its fastest draft length.

    ``ratio``: speed of one label / speed of another; ``last``: the last ranking, which knows the noise. A method is as fast as
    the fastest if their difference is within noise, or the interval of their ratio contains 1, and the loss is at most
    ``MAX_LOSS``. A contender that is not significantly faster than plain decoding is never chosen: its interval must lie above
    1, and its speedup above what the fastest of all candidates reaches by chance (with few groups of prompts intervals are too
    narrow).
    """
    speedups = {each: ratio(each.label, PLAIN) for each in finalists}
    winners = [each for each in finalists if is_faster(speedups[each]) and log(speedups[each].value) > last.least_gain]
    others: dict[str, str] = {}
    for each in finalists:
        if each not in winners:
            interval = speedups[each].interval
            words = "slower" if interval is not None and interval[1] < 1 else "not significantly faster"
            others[each.label] = f"{_ratio_text(speedups[each])} plain decoding's speed: {words}"
    if not winners:
        reason = "no candidate is significantly faster than plain decoding: do not speculate"
        return Decision(PLAIN_CONTENDER, None, reason, others)
    winners.sort(key=lambda each: -speedups[each].value)
    leaders = {each.method: each for each in reversed(winners)}  # fastest length of each method
    best = winners[0]
    against = {each: ratio(best.label, each.label) for each in leaders.values() if each != best}
    alike = [best, *(each for each, lead in against.items() if _is_alike(lead, last.margin))]
    chosen = min(alike, key=lambda each: (*simplicity(each, proposers), -speedups[each].value))
    others[PLAIN] = f"{chosen.label} is {_ratio_text(speedups[chosen])} its speed"
    for each in winners:
        if each != chosen:
            leader = best if each is leaders[each.method] else leaders[each.method]
            beaten = f"not significantly faster than {chosen.label}" if each in alike else f"slower than {leader.label}"
            others[each.label] = f"{_ratio_text(speedups[each])} plain decoding's speed, {beaten}"
    reason = f"{_ratio_text(speedups[chosen])} the speed of plain decoding"
    if chosen != best:
        lead = against[chosen]
        reason += f"; {best.label} measured {lead.value:.2f} times as fast, within noise, but this is simpler"
    return Decision(chosen, speedups[chosen], reason, others)


def is_faster(speedup: Ratio) -> bool:
    """Return whether a ratio is significantly above 1; without an interval nothing is significant."""
    return speedup.interval is not None and speedup.interval[0] > 1


def _is_alike(lead: Ratio, margin: float) -> bool:
    within = lead.interval is None or lead.interval[0] <= 1 or log(lead.value) <= margin
    return within and lead.value <= 1 + MAX_LOSS


def _ratio_text(found: Ratio) -> str:
    spread = "" if found.interval is None else f" ({found.interval[0]:.2f} to {found.interval[1]:.2f})"
    return f"{found.value:.2f}{spread} times"
