"""The choice of a plan among the finalists of a search, with the reason for each that was not chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.contenders import PLAIN_CONTENDER, Contender
from outrider.method_text import split_method
from outrider.proposers.base import Proposer
from outrider.registry import PLAIN, PROPOSERS
from outrider.search.halving import Ranking

MAX_LOSS = 0.03  # largest loss of speed accepted for a simpler method


@dataclass(frozen=True)
class Decision:
    """The chosen contender and the reason; for each other one, by label, the reason against it."""

    chosen: Contender
    reason: str
    others: dict[str, str]


def simplicity(contender: Contender, proposers: Mapping[str, Proposer]) -> tuple[int, ...]:
    """Return a sort key, simplest to serve first: no drafts, a single method, no second model, no model that drafts."""
    if contender.is_plain:
        return (0,)
    name, _ = split_method(contender.method)
    return 1, name.count("+"), PROPOSERS.get(name).takes_draft, not proposers[contender.method].is_model_free


def choose(finalists: Sequence[Contender], last: Ranking, proposers: Mapping[str, Proposer]) -> Decision:
    """Choose the simplest method that is as fast as the fastest one, at its fastest draft length.

    ``last``: the last ranking. A method is as fast as the fastest if their difference is within noise and the loss at most
    ``MAX_LOSS``. A contender that is not significantly faster than plain decoding is never chosen.
    """
    speedups = {each: last.speedups[each.label] for each in finalists}
    winners = sorted((each for each in finalists if last.is_gain(each.label)), key=lambda each: -speedups[each])
    others: dict[str, str] = {}
    for each in finalists:
        if each not in winners:
            words = "slower" if last.is_slower(each.label, 1.0) else "not significantly faster"
            others[each.label] = f"{_speedup_text(last, each)} plain decoding's speed: {words}"
    if not winners:
        reason = "no candidate is significantly faster than plain decoding: do not speculate"
        return Decision(PLAIN_CONTENDER, reason, others)
    leaders = {each.method: each for each in reversed(winners)}  # fastest length of each method
    best = winners[0]
    least = speedups[best] / (1 + MAX_LOSS)
    alike = [each for each in leaders.values() if not last.is_slower(each.label, speedups[best]) and speedups[each] >= least]
    chosen = min(alike, key=lambda each: (*simplicity(each, proposers), -speedups[each]))
    others[PLAIN] = f"{chosen.label} is {_speedup_text(last, chosen)} its speed"
    for each in winners:
        if each != chosen:
            leader = best if each is leaders[each.method] else leaders[each.method]
            beaten = f"not significantly faster than {chosen.label}" if each in alike else f"slower than {leader.label}"
            others[each.label] = f"{_speedup_text(last, each)} plain decoding's speed, {beaten}"
    reason = f"{_speedup_text(last, chosen)} the speed of plain decoding"
    if chosen != best:
        lead = speedups[best] / speedups[chosen]
        reason += f"; {best.label} measured {lead:.2f} times as fast, within noise, but this is simpler"
    return Decision(chosen, reason, others)


def _speedup_text(last: Ranking, contender: Contender) -> str:
    interval = last.interval(contender.label)
    spread = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
    return f"{last.speedups[contender.label]:.2f}{spread} times"
