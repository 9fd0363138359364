"""Measure what 8- and 4-bit weights cost in perplexity and gain in speed and memory, relative to the checkpoint's weights.

    python bench/weights_check.py --target FOLDER --text held-out.txt --out results/weights.json
    python bench/weights_check.py --target FOLDER --text held-out.txt --other q4_k_m.gguf  # compared with a tool's file
    python bench/weights_check.py --text README.md --tokens 512 --repeat 1  # quick test with the embedded target

Each precision is measured in a separate process, one after another:

- perplexity over the first tokens of a text file, in windows, computed with the passes used for decoding;
- tokens per second of plain greedy decoding after the first token, batch 1;
- cost of a pass over 8 tokens / a pass over 1 token, alternating: median over pairs;
- bytes of the weights; increase of the process's memory since before loading, after the runs and at its peak.

Exit code 1 if the perplexity of int8 or int4 misses its bar. The last line of output is the result as JSON.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from outcome import count, finish, parsed, parser_of
from processes import resident

from outrider import LLM, SamplingParams
from outrider.bench.provenance import provenance
from outrider.runner import ModelRunner
from outrider.sampling import Sampler
from outrider.types import Context, Proposal, Request, Verdict

WIDE = 8  # tokens of the wide pass
DEPTH = 128  # cached tokens before the timed passes
CHUNK = 64  # tokens per pass when computing perplexity
BARS = {"int8": 1.01, "int4": 1.04}  # maximum ratio of perplexity to the checkpoint's
PROMPT = "The"


def perplexity(runner: ModelRunner, ids: Sequence[int], window: int) -> float:
    """Return the perplexity of a text in independent windows, without the first token of each."""
    total, number = 0.0, 0
    chunk = min(CHUNK, runner.max_drafts or CHUNK)
    for start in range(0, len(ids) - 1, window):
        text = list(ids[start : start + window])
        request = Request("text", text[:1], 1, SamplingParams(), 0)
        for done in range(1, len(text), chunk):
            part = torch.tensor([text[done : done + chunk]])
            request.token_ids = text[:done]
            context = Context((request,), (part.shape[1],), Sampler((request,), runner.vocab_size))
            scores = runner.score(context, Proposal(part, torch.tensor([part.shape[1]])))
            found = scores.logits[0, :-1].log_softmax(-1).gather(1, part.T)
            total, number = total - float(found.double().sum()), number + part.shape[1]
            runner.commit(context, Verdict([list(range(part.shape[1]))], part[0, -1:].tolist()))
        runner.release(["text"])
    return math.exp(total / max(1, number))


def plain_speed(llm: LLM, max_tokens: int) -> float:
    """Return tokens per second after the first token."""
    seconds = []
    for tokens in (1, max_tokens):
        began = perf_counter()
        llm.generate(PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True))
        seconds.append(perf_counter() - began)
    return (max_tokens - 1) / (seconds[1] - seconds[0])


def measure(weights: str | None, target: str | None, text: str | list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Measure one precision, and return the token ids of the text, too. Runs in a separate process.

    ``text``: token ids for other files, whose own tokenizers may differ.
    """
    before = resident()
    options = {"max_batch": 1, "max_len": args.max_len, "prefix_cache": False, "compile": args.compile}
    llm = LLM(target, method="plain", weights=weights, **options)
    tensors = {each.data_ptr(): each.nbytes for each in [*llm.runner.model.parameters(), *llm.runner.model.buffers()]}
    ids = llm.encode(text)[: args.tokens] if isinstance(text, str) else text
    if max(ids) >= llm.runner.vocab_size:
        return {"refused": f"{target} has {llm.runner.vocab_size} tokens, expected more than {max(ids)}: it is another model"}
    llm.warmup()
    speeds, narrow, wide = [], [], []
    for _ in range(args.repeat):
        speeds.append(plain_speed(llm, args.max_tokens))
        narrow.append(llm.runner.measure_pass(1, 1, DEPTH))
        wide.append(llm.runner.measure_pass(WIDE, 1, DEPTH))
    after = resident()
    with torch.inference_mode():
        found = perplexity(llm.runner, ids, args.window)
    return {
        "ids": ids,
        "perplexity": round(found, 4),
        "tokens": len(ids),
        "tok_s": round(median(speeds), 2),
        "pass_ms": {"1": round(1000 * median(narrow), 3), str(WIDE): round(1000 * median(wide), 3)},
        "wide_over_narrow": round(median(w / n for w, n in zip(wide, narrow, strict=True)), 3),
        "weight_bytes": sum(tensors.values()),
        "memory_bytes": after - before,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "provenance": provenance(llm.runner),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--target", help="folder or hub id (default: the embedded target)")
    other = "quantised folder or GGUF file of the same model to compare with; repeatable"
    parser.add_argument("--other", action="append", default=[], help=other)
    parser.add_argument("--text", type=Path, required=True, help="held-out text")
    parser.add_argument("--tokens", type=count, default=16384, help="maximum tokens of the text (default: %(default)s)")
    parser.add_argument("--window", type=count, default=512, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--max-tokens", type=count, default=64, help="tokens of a plain run, at least 2 (default: %(default)s)")
    parser.add_argument("--max-len", type=count, default=1024, help="context length (default: %(default)s)")
    parser.add_argument("--repeat", type=count, default=5, help="runs and pairs of passes (default: %(default)s)")
    parser.add_argument("--compile", choices=("auto", "always", "never"), default="always", help="default: %(default)s")
    args = parsed(parser)
    if args.max_tokens < 2:
        parser.error("invalid --max-tokens 1: expected at least 2, because the first token is not timed")
    for other in args.other:
        if not Path(other).exists() or other in BARS:
            parser.error(f"invalid --other {other}: expected a folder or a GGUF file, not named {' or '.join(BARS)}")
    text = args.text.read_text(encoding="utf-8")
    if not text:
        parser.error(f"{args.text} is empty: expected a text")
    cells: list[dict[str, Any]] = []
    for name in (None, *BARS, *args.other):
        weights, target = (name, args.target) if name is None or name in BARS else (None, name)
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # separate memory
            found = pool.apply(measure, (weights, target, text, args))
        if "refused" in found:
            print(found["refused"], file=sys.stderr)
            continue
        text = found.pop("ids")
        cells.append({"weights": name, **found})
        print({name: value for name, value in cells[-1].items() if name != "provenance"}, file=sys.stderr)
    own = cells[0]["perplexity"]
    ratios = {cell["weights"]: round(cell["perplexity"] / own, 4) for cell in cells[1:]}
    result = {
        "target": args.target or "embedded",
        **cells[0]["provenance"],
        "text": args.text.name,
        "window": args.window,
        "cells": [{name: value for name, value in cell.items() if name != "provenance"} for cell in cells],
        "perplexity_over_checkpoint": ratios,
        "holds": all(ratios[weights] <= bar for weights, bar in BARS.items()),
    }
    return finish(result, args.out)


if __name__ == "__main__":
    sys.exit(main())
