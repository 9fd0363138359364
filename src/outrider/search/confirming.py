"""The confirming run: candidates and plain decoding in turn on the traffic itself, fewer of them and more of it each time.

Successive halving (Jamieson and Talwalkar 2016): who is clearly behind on a part of the traffic is not run on the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import geometric_mean

import numpy as np

from outrider.bench.contenders import Contender, Contenders
from outrider.bench.grid import PLAIN_CONTENDER, warm_up
from outrider.bench.measure import generate
from outrider.bench.statistics import Timings, speedup_interval
from outrider.search.measurements import Ratio
from outrider.search.traffic import Text

SHARES = (0.5, 1.0)  # of the traffic, in the first two rounds of elimination: a quarter lost the best to noise
FINALISTS = 3
Tick = Callable[[str, int], None]  # what is being done, and how many runs were since the last call
Measured = dict[str, dict[str, list[list[float]]]]  # label -> "tokens" and "seconds": [repeats][batches of prompts]


@dataclass(frozen=True)
class Heat:
    """One round of elimination: who runs, on which of the texts, how often."""

    contenders: tuple[Contender, ...]  # without plain decoding, which always runs
    texts: Sequence[Text]
    repeat: int

    def num_runs(self, batch: int) -> int:
        """Timed generations of one batch of prompts."""
        return self.repeat * (1 + len(self.contenders)) * ceil(len(self.texts) / batch)


def heats(candidates: Sequence[Contender], texts: Sequence[Text], repeat: int) -> list[tuple[int, int, int]]:
    """(how many run, texts, repeats) of each heat; who goes on is decided by the one before."""
    plan, count = [], len(candidates)
    for share in SHARES:
        if count > FINALISTS:
            plan.append((count, min(max(2, ceil(share * len(texts))), len(texts)), 1))
            count = max(FINALISTS, ceil(count / 2))
    return [*plan, (count, len(texts), repeat)]


def run(
    contenders: Contenders, heat: Heat, batch: int, warm: set[tuple[Contender, int]], tick: Tick = lambda what, advance: None
) -> Iterator[Measured]:
    """Yields the measurements of each repeat.

    Contenders follow each other on each batch of prompts, beginning with another one each time, so that a machine that slows
    down or speeds up does so for all of them. ``warm``: those that need no warming up at that batch size any more.
    """
    order = [PLAIN_CONTENDER, *heat.contenders]
    for contender in order:
        if (contender, batch) not in warm:
            tick(f"{contender.label}, batch {batch}: warming up", 0)
            warm_up(contenders, contender, [text.prompt for text in heat.texts], batch)
            warm.add((contender, batch))
    turn = done = 0
    for _ in range(heat.repeat):
        contenders.forget()
        measured: Measured = {contender.label: {"tokens": [[]], "seconds": [[]]} for contender in order}
        for start in range(0, len(heat.texts), batch):
            part = heat.texts[start : start + batch]
            prompts, params = [text.prompt for text in part], [text.again for text in part]
            for contender in order[turn % len(order) :] + order[: turn % len(order)]:
                tick(f"{contender.label}, batch {batch}", done)
                generated = generate(contenders, contender, prompts, params, batch)
                measured[contender.label]["tokens"][0].append(generated.num_tokens)
                measured[contender.label]["seconds"][0].append(generated.seconds)
                done = 1
            turn += 1
        yield measured


def added(repeats: Sequence[Measured]) -> Measured:
    """Several repeats as one measurement."""
    kinds = ("tokens", "seconds")
    return {label: {kind: [row for each in repeats for row in each[label][kind]] for kind in kinds} for label in repeats[0]}


def timings(measured: Measured, label: str) -> Timings:
    """One repeat: of each batch of prompts the median over all of them, which a hiccup does not move. One batch: as it is."""
    every = Timings.of(measured[label]["tokens"], measured[label]["seconds"])
    if every.seconds.shape[1] == 1:
        return every
    return Timings(np.median(every.tokens, axis=0, keepdims=True), np.median(every.seconds, axis=0, keepdims=True))


def ratio(measured: Sequence[Measured], label: str, base: str) -> Ratio:
    """``measured``: of each batch size."""
    values, bounds = [], []
    for each in measured:
        mine, theirs = timings(each, label), timings(each, base)
        values.append(_speed(mine) / _speed(theirs))
        bounds.append(speedup_interval(mine, theirs))
    known = [found for found in bounds if found is not None and min(found) > 0]
    interval = None
    if len(known) == len(bounds):
        interval = geometric_mean(low for low, _ in known), geometric_mean(high for _, high in known)
    return Ratio(geometric_mean(values), interval)


def _speed(mine: Timings) -> float:
    """Tokens a second over everything measured."""
    return float(mine.tokens.sum() / mine.seconds.sum())
