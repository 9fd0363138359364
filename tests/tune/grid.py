"""Cells on which the draft-length policy is tested: families of machine and method, each with several texts.

``python -m tests.tune.grid`` simulates all of them, which takes one or two minutes, and prints a line per family and batch
size.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from tests.tune.simulation import LENGTHS, Cell, Machine, Text, weigh

DRAFTED = {
    **{f"rate {rate}": Text((rate,)) for rate in (0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95)},
    "falling": Text((0.8,), decay=0.9),
    "steeply falling": Text((0.9,), decay=0.7),
    "by turns": Text((0.2, 0.95)),
    "by long turns": Text((0.95, 0.1), stretch=100),
    "by short turns": Text((0.3, 0.9), stretch=12),
}
LOOKED_UP = {
    **{f"{made} made, rate {rate}": Text((rate,), (made,)) for made in (0.05, 0.3, 0.9) for rate in (0.1, 0.5, 0.9)},
    "a rare copy": Text((0.2, 0.2, 0.97), (0.1, 0.1, 1.0), stretch=40),
    "mostly copies": Text((0.98, 0.3), (1.0, 0.2), stretch=64),
}
SHORT = {f"at most {longest}, rate {rate}": Text((rate,), longest=longest) for longest in (1, 2, 4) for rate in (0.5, 0.7, 0.9)}
FAMILIES = {
    "embedded, draft": (Machine(1.4, 0.08, 0.4, 0.33, 0.042, 0.36, crowd=0.15), DRAFTED),
    "embedded, cheaper draft": (Machine(1.4, 0.05, 0.15, 0.25, 0.042, 0.3, crowd=0.1), DRAFTED),
    "embedded in cache, draft": (Machine(0.36, 0.05, 0.12, 0.11, 0.01, 0.1, crowd=0.1, cold=0.4, cold_outside=2.0), DRAFTED),
    "embedded, short drafts": (Machine(2.9, 0.05, 3.0, 0.2, 0.05, 0.7), SHORT),
    "embedded, lookup": (Machine(1.4, 0.05, 0.11, 0.002, 0.003, 0.36, crowd=0.5), LOOKED_UP),
    "1B, draft": (Machine(98, 0.035, 0.6, 0.4, 0.042, 0.6, crowd=0.1), DRAFTED),
    "1B, lookup": (Machine(98, 0.035, 0.11, 0.002, 0.003, 0.6, crowd=0.5), LOOKED_UP),
    "steep rows, draft": (Machine(20, 0.3, 1.0, 1.0, 0.05, 0.5, crowd=0.1), DRAFTED),
    "draft as slow as the target": (Machine(10, 0.05, 0.0, 10.0, 0.3, 0.3, crowd=0.1), DRAFTED),
}
BATCHES = (1, 4, 8)
MIXED = {
    "one in four is predictable": (Text((0.95,)), (Text((0.2,)),) * 3),
    "one in four is not": (Text((0.2,)), (Text((0.9,)),) * 3),
    "one in four is a copy": (Text((0.98,)), (Text((0.3,), (0.2,)),) * 3),
}
# A server: requests of the same kind follow one another; drafting for each must pay for the prefill of its prompt in 64 tokens.
SERVED = {
    "embedded, served": Machine(1.6, 0.12, 0.3, 0.6, 0.06, 0.7, crowd=0.1, cold=0.2, unsteady=True),
    "embedded in cache, served": Machine(
        0.42, 0.07, 0.12, 0.14, 0.01, 0.1, crowd=0.1, cold=0.4, cold_outside=2.0, unsteady=True
    ),
    "1B, served": Machine(80, 0.02, 0.3, 0.6, 0.06, 0.7, crowd=0.1, unsteady=True),
}
ANSWERS = 24 * (64, 60, 64)
Key = tuple[str, str, int]  # family, text, batch


def cells(seed: int = 0) -> dict[Key, Cell]:
    drafted = {
        (family, text, batch): Cell(machine, texts[text], batch, seed=seed)
        for family, (machine, texts) in FAMILIES.items()
        for text, batch in product(texts, BATCHES)
    }
    mixed = {
        # Prompts cost the same with and without drafts. They are free here, because a prompt just before or after the last
        # counted token would distort the result.
        (family, text, batch): Cell(replace(machine, prompt=0.0), first, batch, 2 * LENGTHS, seed, others=others)
        for family, (machine, _) in FAMILIES.items()
        for (text, (first, others)), batch in product(MIXED.items(), BATCHES[1:])
    }
    served = {
        (family, f"rate {rate}", batch): Cell(
            machine, Text((rate,)), batch, ANSWERS, seed, others=(Text((rate,)),) * (batch - 1)
        )
        for family, machine in SERVED.items()
        for rate, batch in product((0.5, 0.65, 0.7, 0.75, 0.8, 0.85), (2, 4, 8))
    }
    return drafted | mixed | served


def sample(seed: int = 0) -> dict[Key, Cell]:
    """Return a third of the cells: each text of each family, at one batch size."""
    every = cells(seed)
    return {key: every[key] for at, key in enumerate(every) if (at // len(BATCHES) + at) % len(BATCHES) == 0}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def report(weighed: dict[Key, tuple[float, float]]) -> str:
    """Return a line per family and batch size: worst cell relative to plain decoding, mean relative to the best K."""
    lines = []
    for family, batch in dict.fromkeys((family, batch) for family, _, batch in weighed):
        group = {text: weighed[f, text, b] for f, text, b in weighed if (f, b) == (family, batch)}
        worst = min(group, key=lambda text: group[text][0])
        against_best = mean([best for _, best in group.values()])
        lines.append(f"{family}, batch {batch}: worst {group[worst][0]:.3f} ({worst}), against best {against_best:.3f}")
    worst_of_all, best_of_all = min(plain for plain, _ in weighed.values()), mean([best for _, best in weighed.values()])
    return "\n".join([*lines, f"all: worst {worst_of_all:.3f}, against best {best_of_all:.3f}"])


if __name__ == "__main__":
    print(report({key: weigh(cell) for key, cell in cells().items()}))
