"""Measure the cost and gain of speculation on a recurrent hybrid of 1.1 billion parameters with Qwen3.5's proportions.

    python bench/hybrid_check.py --out results/hybrid.json                                     # 3 GB, some minutes
    python bench/hybrid_check.py --hidden 256 --layers 4 --max-tokens 16 --repeat 2            # quick test

Three of four layers are Gated DeltaNet. The weights are random, because only costs matter. Each measurement has a bar:

- cost of a pass over 8 tokens / a pass over 1 token, alternating: median over pairs;
- share of a round's time taken by commit and rollback;
- speed of plain decoding / transformers' generate, alternating;
- speed with drafts / plain decoding, alternating; the proposer knows the text, and each draft survives with probability 0.8.

Greedy output with drafts must equal plain output. Exit code 1 if a bar is missed. The last line of output is the result as
JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from outcome import count, finish, parsed, parser_of
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from outrider import LLM, SamplingParams
from outrider.bench.provenance import provenance
from outrider.proposers.base import ScriptedProposer
from outrider.proposers.degraded import Degraded
from outrider.runner import ModelRunner
from outrider.types import Context, Verdict

WIDE = 8  # tokens of the wide pass
SURVIVE = 0.8
WIDE_COST, WIDE_COST_WITHOUT_UNITS = 1.3, 1.8  # maximum cost ratio, on processors with and without matrix units
COMMIT_SHARE = 0.02  # maximum
OVER_GENERATE, OVER_PLAIN = 2.0, 2.2  # minimum


def model_of(hidden: int, layers: int) -> PreTrainedModel:
    """Build a model with random bfloat16 weights; hidden 2048 and 24 layers are 1.1 billion parameters."""
    torch.manual_seed(0)
    heads = max(1, hidden // 256)
    config = Qwen3_5TextConfig(
        vocab_size=16384,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=256,
        linear_num_key_heads=2 * heads,
        linear_num_value_heads=2 * heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: PreTrainedModel = Qwen3_5ForCausalLM(config).eval()
        return model
    finally:
        torch.set_default_dtype(before)


class Clocked:
    """Measure the seconds of a runner's commits, which roll the cache back to the accepted tokens."""

    def __init__(self, runner: ModelRunner) -> None:
        self.seconds, self._commit = 0.0, runner.commit
        runner.commit = self  # type: ignore[method-assign]

    def __call__(self, context: Context, verdict: Verdict) -> None:
        started = perf_counter()
        self._commit(context, verdict)
        self.seconds += perf_counter() - started


def knowing(text: list[int]) -> Degraded:
    """Return a proposer that drafts the known continuation; each draft survives with probability ``SURVIVE``."""

    def chains(context: Context, k: int) -> list[list[int]]:
        pairs = zip(context.requests, context.limits, strict=True)
        return [text[len(request.token_ids) :][: min(k, limit)] for request, limit in pairs]

    return Degraded(ScriptedProposer.of_chains(chains), SURVIVE)


def wide_cost(runner: ModelRunner, repeat: int) -> float:
    """Return the median cost ratio of a pass over ``WIDE`` tokens to one over 1 token."""
    pairs = [[runner.measure_pass(width, 1, 256, repeat=2) for width in (WIDE, 1)] for _ in range(repeat)]
    return median(wide / narrow for wide, narrow in pairs)


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], ModelRunner]:
    """Measure everything. Returns the figures and the runner."""
    model = model_of(args.hidden, args.layers)
    prompt = torch.randint(model.config.vocab_size, (64,)).tolist()
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"max_batch": 1, "compile": args.compile, "max_len": 1024}
    plain = LLM(model, method="plain", **options)
    text = prompt + list(plain.generate([prompt], params)[0].outputs[0].token_ids)
    drafted = LLM(model, proposer=knowing(text), num_draft_tokens=args.k, **options)
    clock = Clocked(drafted.runner)

    def generate() -> list[int]:
        ids = torch.tensor([prompt])
        ends = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}
        own: Any = model.generate
        found: list[int] = own(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.max_tokens, **ends)[0].tolist()
        return found

    def by(llm: LLM) -> list[int]:
        return prompt + list(llm.generate([prompt], params)[0].outputs[0].token_ids)

    ways: dict[str, Callable[[], list[int]]] = {"generate": generate, "plain": lambda: by(plain), "drafts": lambda: by(drafted)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    same = True
    for turn in range(args.repeat + 1):
        if turn == 1:  # end of the warm-up
            clock.seconds = 0.0
        for name, way in ways.items():
            started = perf_counter()
            found = way()
            if turn:
                seconds[name].append(perf_counter() - started)
            same &= name == "generate" or found == text
        print(f"turn {turn} of {args.repeat}", file=sys.stderr, flush=True)

    def speedup(over: str, of: str) -> float:
        return median(slow / fast for slow, fast in zip(seconds[over], seconds[of], strict=True))

    figures = {
        "parameters": sum(each.numel() for each in model.parameters()),
        "wide_cost": round(wide_cost(plain.runner, args.repeat), 3),
        "commit_share": round(clock.seconds / sum(seconds["drafts"]), 5),
        "plain_over_generate": round(speedup("generate", "plain"), 3),
        "drafts_over_plain": round(speedup("plain", "drafts"), 3),
        "accepted": round(drafted.stats.num_accepted / max(1, drafted.stats.num_drafts), 3),
        "same_text": same,
        "compiled": plain.runner.passes.is_compiled and drafted.runner.passes.is_compiled,
        "seconds": {name: [round(each, 3) for each in times] for name, times in seconds.items()},
    }
    return figures, plain.runner


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--hidden", type=count, default=2048)
    parser.add_argument("--layers", type=count, default=24)
    parser.add_argument("--max-tokens", type=count, default=96)
    parser.add_argument("--k", type=count, default=7, help="drafts per round")
    parser.add_argument("--repeat", type=count, default=5)
    parser.add_argument("--compile", default="always")
    args = parsed(parser)
    found, runner = measure(args)
    where = provenance(runner)
    most = WIDE_COST if "amx" in where["cpu"] else WIDE_COST_WITHOUT_UNITS
    holds = {
        "wide_cost": found["wide_cost"] <= most,
        "commit_share": found["commit_share"] <= COMMIT_SHARE,
        "plain_over_generate": found["plain_over_generate"] >= OVER_GENERATE,
        "drafts_over_plain": found["drafts_over_plain"] >= OVER_PLAIN,
        "same_text": found["same_text"],
    }
    return finish({**where, **found, "bars": holds, "holds": all(holds.values())}, args.out)


if __name__ == "__main__":
    sys.exit(main())
