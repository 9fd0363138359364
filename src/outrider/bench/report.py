"""JSON document of a benchmark: cells and provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outrider.bench.cells import cells
from outrider.bench.grid import Group, Plan
from outrider.bench.provenance import provenance

if TYPE_CHECKING:
    from outrider.runner import ModelRunner

DEFINITIONS = (
    "tok_s: tokens / seconds, prefill included; decode_tok_s: after the first tokens; speedup: median of the ratios to "
    "plain decoding within a repeat; *_interval: 95%, paired bootstrap over repeats and prompts; ms: milliseconds per round of "
    "the batch; same_text: share of outputs equal to plain decoding's; expected_speedup: the formula's, for decoding, "
    "at the measured alpha, c and mean K; difference: decode_speedup - expected_speedup by part; loop_share: share of tokens "
    "in loops (a period of up to 32 tokens, repeated at least three times); before_loops: the same values for tokens before "
    "the first loop of each output; all keys: docs/bench.md"
)


def document(plan: Plan, groups: Sequence[Group], runner: ModelRunner, target: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the benchmark document, JSON-ready."""
    return {
        "target": target,
        **provenance(runner),
        **extra,
        "max_tokens": plan.max_tokens,
        "repeat": plan.repeat,
        "definitions": DEFINITIONS,
        "cells": cells(groups, bool(extra.get("same_text_mode"))),
    }
