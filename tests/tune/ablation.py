"""Measure the effect of each tuned constant of the draft-length policy and its cost book in the simulation.

``python -m tests.tune.ablation`` neutralises one constant at a time. Over a third of the cells (``--all``: over all) it prints
the change of the mean speed, and the worst cell relative to plain decoding. ``--only NAME,NAME`` selects constants,
``--together`` neutralises all at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import inf, log
from types import ModuleType

from outrider.runner import cost_book
from outrider.tune import acceptance, choice, policy, probes, track
from tests.tune import grid
from tests.tune.simulation import MAX_K, Cell, automatic, plain

MANY = 10**9
# constant -> its module, and the value that disables its mechanism, or the simplest value
NEUTRAL: dict[str, tuple[ModuleType, object]] = {
    "LENGTHS": (choice, tuple(range(1, MAX_K + 1))),
    "CAPS": (choice, tuple(range(1, MAX_K + 1))),
    "DECISION_PERIOD": (policy, 1),
    "EARLY_ROUNDS": (policy, 0),
    "TRIAL_ROUNDS": (policy, 0),
    "HYSTERESIS": (choice, 1.0),
    "ALIKE": (choice, 0.0),
    "DECAY": (track, 1.0),
    "IDLE_DECAY": (track, track.DECAY),
    "SHARED_DECAY": (policy, 1.0),
    "FIRST_LONGEST": (policy, MAX_K),
    "PREFILL_HORIZON": (choice, MANY),
    "FIRST_PAUSE": (probes, 1),
    "MAX_PAUSE": (probes, MANY),
    "NEW_REQUEST_WAIT": (probes, MANY),
    "MAX_NEW_REQUEST_FACTOR": (probes, 1),
    "PROBE_RATE": (probes, 0.99),
    "MAX_PROBE": (probes, 1),
    "EXPLORATION_SHARE": (probes, 1.0),
    "FIRST_BUDGET": (probes, 0.0),
    "MAX_BUDGET": (probes, inf),
    "PLAIN_CHECK_PERIOD": (policy, MANY),
    "THIN_GAIN": (policy, inf),
    "OPTIMISTIC_RATE": (acceptance, 0.5),
    "EXPECTED_WEIGHT": (acceptance, 1.0),
    "ALIKE_WEIGHT": (acceptance, acceptance.EXPECTED_WEIGHT),
    "CACHE_BUCKET": (cost_book, MANY),
    "WEIGHT": (cost_book, 1.0),
    "SPIKE": (cost_book, inf),
    "FIRST_SPIKE": (cost_book, inf),
    "JUMP": (cost_book, 0.0),
    "LINE_JUMP": (cost_book, 0.0),
    "DEFAULT_SLOPE": (cost_book, 0.0),
    "WIDTH_RESOLUTION": (cost_book, 1),
    "UNKNOWN_COST_RATIO": (cost_book, 0.0),
    "MAX_FIRST_CATCH_UP": (cost_book, inf),
    "CATCH_UP_WEIGHT": (cost_book, 1.0),
    "LINE_MEMORY": (cost_book, 1.0),
    "START_WEIGHT": (cost_book, 1e-6),
    "LINE_SPIKE": (cost_book, inf),
}
USERS = (policy, choice, probes, track, acceptance, cost_book)


@contextmanager
def neutral(name: str) -> Iterator[None]:
    """Context manager: set a constant to its neutral value in every module that reads it."""
    module, value = NEUTRAL[name]
    before = getattr(module, name)
    users = [user for user in USERS if getattr(user, name, None) is before]
    for user in users:
        setattr(user, name, value)
    try:
        yield
    finally:
        for user in users:
            setattr(user, name, before)


def speeds(cells: Mapping[grid.Key, Cell]) -> dict[grid.Key, float]:
    return {key: automatic(cell) for key, cell in cells.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="simulate all cells instead of a third")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default=",".join(NEUTRAL))
    parser.add_argument("--together", action="store_true", help="neutralise all constants of --only at once")
    args = parser.parse_args()
    chosen = [(grid.cells if args.all else grid.sample)(seed) for seed in range(args.seeds)]
    before = [speeds(cells) for cells in chosen]
    without = [{key: plain(cell) for key, cell in cells.items()} for cells in chosen]
    print(f"{len(chosen[0])} cells, {args.seeds} seeds: worst {worst(before, without):.3f} of plain")
    print("| constant | neutral at | mean | worst cell of plain | most lost in a family |\n|---|---|---|---|---|")
    names = args.only.split(",")
    for group in [names] if args.together else [[name] for name in names]:
        with ExitStack() as stack:
            for name in group:
                stack.enter_context(neutral(name))
            after = [speeds(cells) for cells in chosen]
        changes: dict[str, list[float]] = {}
        for then, now in zip(before, after, strict=True):
            for key in then:
                changes.setdefault(key[0], []).append(log(now[key] / then[key]))
        every = [each for values in changes.values() for each in values]
        family = min(changes, key=lambda each: grid.mean(changes[each]))
        values = [NEUTRAL[name][1] for name in group]
        said = ", ".join("all" if isinstance(value, tuple) else f"{value:g}" for value in values)
        print(
            f"| {', '.join(group)} | {said} | {grid.mean(every):+.2%} | {worst(after, without):.3f} "
            f"| {grid.mean(changes[family]):+.2%} ({family}) |",
            flush=True,
        )


def worst(found: list[dict[grid.Key, float]], without: list[dict[grid.Key, float]]) -> float:
    """Return the lowest speed relative to plain decoding over the cells, each the mean over seeds."""
    ratios = [{key: auto[key] / each[key] for key in auto} for auto, each in zip(found, without, strict=True)]
    return min(grid.mean([each[key] for each in ratios]) for key in ratios[0])


if __name__ == "__main__":
    main()
