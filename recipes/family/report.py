"""Measurements of the exported family, the source of the model card."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.cli.options import READABLE_TEMPERATURE, READABLE_TOP_P
from outrider.train.continuation import continue_rows

from . import evaluate, model, samples
from .config import SEED
from .evaluate import HeldOut
from .prompts import function_prompts

PROMPT, NEW = 64, 128
SAMPLE_TOKENS = 128


def speculation(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tokens: Path
) -> dict[str, Any]:
    """Measure the agreement of exits and draft with the target on its greedy text after held-out signatures."""
    stream = np.fromfile(tokens / "val_functions.bin", dtype=np.uint16)
    prompts = torch.stack(list(function_prompts(stream, tokenizer, PROMPT))[:32])
    rows = continue_rows(target, prompts, NEW, torch.zeros(len(prompts)), torch.Generator().manual_seed(SEED))
    mask = evaluate.before_end(rows, PROMPT, tokenizer.eos_token_id)
    matches = evaluate.draft_matches(draft, rows, PROMPT)
    with torch.no_grad():
        decoder = model.LlamaDecoder(target)
        best = [decoder.logits(hidden[:, PROMPT - 1 :]).argmax(-1) for hidden in decoder.hidden_states(rows[:, :-1])]
    return {
        "prompts": len(prompts),
        "positions": int(mask.sum()),
        "draft_agreement": round(float(matches[mask].float().mean()), 4),
        "mean_acceptance_length": {k: evaluate.mean_acceptance_length(matches, mask, k) for k in (2, 3, 4, 5, 8)},
        "exit_agreement": [round(float((b == rows[:, PROMPT:])[mask].float().mean()), 4) for b in best],
    }


def own_prompts(target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the share of greedy continuations of the signatures that parse, and the draft's agreement on them."""
    prompts = samples.SIGNATURES
    written = samples.continuations(target, tokenizer, prompts, SAMPLE_TOKENS, 0.0)
    texts = [samples.text_of(tokenizer, ids) for ids in written]
    parsed = [samples.parses(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    same = total = 0
    for prompt, ids in zip(prompts, written, strict=True):
        start = tokenizer.encode(prompt)
        matches = evaluate.draft_matches(draft, torch.tensor([start + ids]), len(start))
        same, total = same + int(matches.sum()), total + matches.numel()
    return {
        "parse_share": sum(parsed) / len(parsed),
        "draft_agreement": round(same / max(total, 1), 4),
        "code": list(zip(prompts[::5], texts[::5], parsed[::5], strict=True)),
    }


def measure(folder: Path, tokens: Path, held_out: HeldOut, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Measure the models in `target` and `draft` under `folder`, with the exported weights."""
    target, draft = model.load(folder / "target"), model.load(folder / "draft")
    written = samples.continuations(target, tokenizer, samples.ENGLISH, 80, READABLE_TEMPERATURE, READABLE_TOP_P)
    english = [samples.text_of(tokenizer, ids) for ids in written]
    with torch.no_grad():
        bpb = {name: evaluate.bits_per_byte(net, held_out) for name, net in (("target", target), ("draft", draft))}
    return {
        "seed": SEED,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "bpb": bpb,
        "held_out_functions": speculation(target, draft, tokenizer, tokens),
        "own_signatures": own_prompts(target, draft, tokenizer),
        "english": list(zip(samples.ENGLISH, english, strict=True)),
    }
