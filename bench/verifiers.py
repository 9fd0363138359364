"""Compare verifiers with the same drafter and prompts, alternating at each prompt: acceptance, speed and ratios.

    python bench/verifiers.py --method eagle:max_nodes=15 -k 6 --prompts HumanEval.jsonl.gz --out results/tree-verifiers.json

The first verifier is the baseline of the ratios. Each repeat has its own seeds; intervals are bootstrapped over prompts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from outcome import count, finish, parsed, parser_of

from outrider import LLM, SamplingParams
from outrider.bench import workloads
from outrider.bench.provenance import origin
from outrider.bench.statistics import Timings, speedup_interval


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--target", help="folder or hub id (default: the embedded target)")
    parser.add_argument("--draft")
    parser.add_argument("--method", default="eagle:max_nodes=15")
    parser.add_argument("-k", type=count, default=6)
    parser.add_argument("--verifiers", nargs="+", default=["rejection", "block"])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=count, default=40)
    parser.add_argument("--max-tokens", type=count, default=64)
    parser.add_argument("--repeat", type=count, default=5)
    args = parsed(parser)
    options = {"draft": args.draft, "method": args.method, "num_draft_tokens": args.k}
    options |= {"prefix_cache": False, "compile": "always"}
    llms = {name: LLM(args.target, verifier=name, **options) for name in args.verifiers}
    prompts = [
        workloads.encode(llms[args.verifiers[0]].tokenizer, each)
        for each in workloads.from_file(args.prompts, args.num_prompts)
    ]
    for llm in llms.values():
        llm.warmup()
    counts = {name: np.zeros((len(prompts), 3)) for name in llms}  # tokens, rounds, seconds
    for repeat in range(args.repeat):
        for number, prompt in enumerate(prompts):
            seed = repeat * len(prompts) + number
            params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=seed, ignore_eos=True)
            start = (repeat + number) % len(llms)  # not the seed: with an even number of prompts each would keep its order
            order = args.verifiers[start:] + args.verifiers[:start]
            for name in order:
                started = perf_counter()
                stats = llms[name].generate(prompt, params)[0].outputs[0].stats
                counts[name][number] += stats.num_tokens, stats.num_rounds, perf_counter() - started
        print(f"repeat {repeat + 1} of {args.repeat}", file=sys.stderr)
    settings = {name: getattr(args, name) for name in ("method", "k", "temperature", "max_tokens", "repeat")}
    settings["num_prompts"] = len(prompts)  # the file may have fewer
    rows = {name: figures(counts[name], counts[args.verifiers[0]]) for name in llms}
    return finish({"schema": "outrider-verifiers/1", **origin(), **settings, "holds": True, "verifiers": rows}, args.out)


def figures(own: np.ndarray, base: np.ndarray) -> dict[str, Any]:
    """Return figures and their ratios to the baseline with 95% intervals.

    Both arguments: [prompts, (tokens, rounds, seconds)].
    """
    found: dict[str, Any] = {}
    for column, what in enumerate(("tokens_per_round", "tok_s"), start=1):
        mine, theirs = (Timings(counts[None, :, 0], counts[None, :, column]) for counts in (own, base))
        rate, base_rate = (float(counts[:, 0].sum() / counts[:, column].sum()) for counts in (own, base))
        found[what], found[f"{what}_ratio"] = rate, rate / base_rate
        found[f"{what}_interval"] = speedup_interval(mine, theirs)
    return found


if __name__ == "__main__":
    sys.exit(main())
