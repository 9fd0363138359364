"""Loops in generated text: how much of it repeats itself, and where the repetition begins. Knows token ids only.

A loop is a run of tokens with a period of at most ``MAX_PERIOD`` tokens, repeated ``MIN_REPEATS`` times or more, end to end. A
token is in a loop if any such run contains it, the first period included. Drafts guess loops easily, so a speedup measured on
text that loops says little about text that does not.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 32
MIN_REPEATS = 3


def in_loops(token_ids: Sequence[int], max_period: int = MAX_PERIOD, min_repeats: int = MIN_REPEATS) -> list[bool]:
    """Whether each token is in a loop: ``len(token_ids)`` values."""
    found = [False] * len(token_ids)
    for period in range(1, min(max_period, len(token_ids) // min_repeats) + 1):
        begin = 0  # of the run with this period that contains ``at``
        for at in range(period, len(token_ids) + 1):
            if at < len(token_ids) and token_ids[at] == token_ids[at - period]:
                continue
            if at - begin >= min_repeats * period:
                found[begin:at] = [True] * (at - begin)
            begin = at - period + 1
    return found


def loop_start(token_ids: Sequence[int]) -> int:
    """The number of tokens before the first loop; ``len(token_ids)`` where there is none."""
    found = in_loops(token_ids)
    return found.index(True) if True in found else len(found)


def ends_in_loop(token_ids: Sequence[int]) -> bool:
    """Whether the last token is in a loop."""
    return in_loops(token_ids)[-1:] == [True]


def loop_share(texts: Sequence[Sequence[int]]) -> float:
    """The share of all tokens of all texts that are in loops; 0 without tokens."""
    found = [each for token_ids in texts for each in in_loops(token_ids)]
    return sum(found) / len(found) if found else 0.0
