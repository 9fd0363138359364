"""Benchmark documents with known numbers in the format of ``outrider bench``, made without a model or a clock."""

from __future__ import annotations

import random
from typing import Any

PLAIN_MS = {"draft": 0.0, "score": 10.0, "verify": 0.5, "host": 0.5}


def cell(
    method: str, k: int | str, speeds: list[float], plain_speeds: list[float], workload: str = "code", **more: Any
) -> dict[str, Any]:
    """Return a cell whose repeats have these speeds."""
    speedups = [ours / plain for ours, plain in zip(speeds, plain_speeds, strict=True)]
    middle, is_plain = sorted(speedups)[len(speedups) // 2], k == 0
    longest = k if isinstance(k, int) else 3
    given = {
        "method": method,
        "k": k,
        "temperature": 0.0,
        "batch": 1,
        "workload": workload,
        "busy": 0,
        "tok_s": sorted(speeds)[len(speeds) // 2],
        "plain_tok_s": sorted(plain_speeds)[len(speeds) // 2],
        "speedup": middle,
        "speedup_interval": [0.97 * middle, 1.03 * middle],
        "decode_speedup": middle,
        "decode_speedup_interval": [0.97 * middle, 1.03 * middle],
        "repeat_tok_s": speeds,
        "repeat_speedup": speedups,
        "mean_acceptance_length": 1.0 if is_plain else 2.5,
        "acceptance_rate": None if is_plain else 0.7,
        "acceptance_histogram": {"0": 40} if is_plain else {str(n): 10 + 5 * n for n in range(longest + 1)},
        "acceptance_by_position": [0.7**place for place in range(1, longest + 1)],
        "conditional_acceptance": [0.7 for _ in range(longest)],
        "mean_k": float(longest),
        "cost_ratio": None if is_plain else 0.1,
        "expected_speedup": None if is_plain else 2.1,
        "difference": None
        if is_plain
        else {"acceptance": -0.1, "draft": 0.0, "score": -0.4, "verify": 0.0, "host": 0.1, "other": 0.0},
        "time_to_first_token_ms": {"p50": 40.0, "p95": 60.0},
        "inter_token_ms": {"p50": 5.0, "p95": 12.0},
        "pause_ms": {"p50": 11.0, "p95": 14.0},
        "predicted_plain_tok_s": 95.0,
        "prediction_error_percent": -5.0,
        "same_text": 1.0,
        "ms": PLAIN_MS if is_plain else {"draft": 2.0, "score": 12.0, "verify": 0.8, "host": 0.7},
        "faults": 0,
        "tokens": 64,
        "loop_share": 0.0,
        "tokens_before_loops": 64,
        "before_loops": None,
        "prompts": 2,
        "repeats": len(speeds),
    }
    return given | more


def document(cells: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a document of these cells."""
    given = {
        "version": "0.1.0",
        "commit": "0123456789ab",
        "device": "cpu: test",
        "dtype": "float32",
        "threads": 2,
        "target": "toy <model>",
        "command": "outrider bench",
        "max_tokens": 64,
        "repeat": 5,
        "cells": cells,
    }
    return given | more


def noisy(mean: float, noise: float, generator: random.Random, repeats: int = 5) -> list[float]:
    """Return speeds around a mean, with relative noise."""
    return [mean * (1 + generator.gauss(0, noise)) for _ in range(repeats)]


def grid(temperatures: tuple[float, ...] = (0.0,), batches: tuple[int, ...] = (1,)) -> dict[str, Any]:
    """Return plain decoding and two methods at several K over two workloads."""
    cells = []
    for temperature in temperatures:
        for batch in batches:
            for workload, ease in (("code", 1.0), ("story", 0.7)):
                where = {"temperature": temperature, "batch": batch}
                cells.append(cell("plain", 0, [100.0] * 3, [100.0] * 3, workload, **where))
                for method, gain in (("draft", 1.0), ("ngram", 0.6)):
                    for k, speed in ((1, 120.0), (2, 150.0), (4, 190.0), (8, 170.0), ("auto", 185.0)):
                        speeds = [speed * gain * ease * wobble for wobble in (0.98, 1.0, 1.03)]
                        cells.append(cell(method, k, speeds, [100.0] * 3, workload, **where))
    return document(cells)
