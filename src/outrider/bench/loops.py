"""Detect loops in outputs: the share of tokens in loops, and the start of the first one. Works on token ids.

A loop is a run of tokens with a period of at most ``MAX_PERIOD`` tokens, repeated at least ``MIN_REPEATS`` times. A token is in
a loop if any such run contains it, including the first period. Loops are easy to draft, so a speedup measured on outputs with
loops does not apply to others.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 32
MIN_REPEATS = 3


def in_loops(token_ids: Sequence[int]) -> list[bool]:
    """Return for each token whether it is in a loop."""
    found = [False] * len(token_ids)
    for period in range(1, min(MAX_PERIOD, len(token_ids) // MIN_REPEATS) + 1):
        begin = 0  # start of the run with this period that contains ``at``
        for at in range(period, len(token_ids) + 1):
            if at < len(token_ids) and token_ids[at] == token_ids[at - period]:
                continue
            if at - begin >= MIN_REPEATS * period:
                found[begin:at] = [True] * (at - begin)
            begin = at - period + 1
    return found


def loop_start(token_ids: Sequence[int]) -> int:
    """Return the number of tokens before the first loop, ``len(token_ids)`` without loops."""
    found = in_loops(token_ids)
    return found.index(True) if True in found else len(found)


def loop_share(texts: Sequence[Sequence[int]]) -> float:
    """Return the share of all tokens of all outputs that are in loops; 0 without tokens."""
    found = [each for token_ids in texts for each in in_loops(token_ids)]
    return sum(found) / len(found) if found else 0.0
