"""Training against greedy loops, and the share of outputs that loop.

Small models loop under greedy decoding. Sequence-level unlikelihood (Welleck et al. 2020, arXiv 1908.04319, section 5.2) lets
the model continue text greedily and lowers the probability of repeated tokens. The paper counts every repeated 4-gram; here
only loops count, from their second period on, because repeated n-grams are normal in code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.bench.loops import MAX_PERIOD, in_loops, loop_share
from outrider.cli.options import READABLE_TEMPERATURE, READABLE_TOP_P
from outrider.train.continuation import continue_rows
from outrider.train.layer_skip import EarlyExitLoss
from outrider.train.precision import arithmetic

from . import samples
from .config import TOKEN_IDS, AgainstLoops

HELD_OUT = ("tales", "books", "tldr", "gsm8k", "chats")  # sources of the prompts other than signatures
OPENINGS, OPENING = 10, 24  # documents of each source, and the first tokens of each


@dataclass
class LoopLoss:
    """Loss of the text and, every few steps, unlikelihood of loops in the model's own continuations of it."""

    text: EarlyExitLoss
    net: LlamaForCausalLM
    options: AgainstLoops

    def __call__(self, ids: Tensor, step: int, pass_index: int, progress: float) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of ids [B, S + 1]."""
        loss, parts = self.text(ids, step, pass_index, progress)
        if step % self.options.every:
            return loss, parts
        prompts = ids[: self.options.rows, : self.options.prompt_tokens]
        greedy = torch.zeros(len(prompts), device=ids.device)
        rows = continue_rows(self.net, prompts, self.options.new_tokens, greedy, torch.Generator(ids.device))
        end = TOKEN_IDS["eos_token_id"]
        repeated = torch.tensor([repeats(row, end) for row in rows[:, prompts.shape[1] :].tolist()], device=ids.device)
        unlikely = self._unlikelihood(rows, prompts.shape[1], repeated)
        parts |= {"loops": repeated.float().mean(), "unlikelihood": unlikely.detach()}
        return loss + self.options.weight * unlikely, parts

    def _unlikelihood(self, rows: Tensor, start: int, repeated: Tensor) -> Tensor:
        """Return the mean of -log(1 - p) over the ``repeated`` [B, N] tokens of the continuations, which begin at ``start``."""
        decoder = self.text.decoder
        with arithmetic(rows.device, self.text.dtype):
            logits = decoder.logits(decoder.hidden_states(rows[:, :-1])[-1][:, start - 1 :]).float()
        # log(1 - p) as the sum of the other probabilities, because a p that rounds to 1 would have no gradient
        others = logits.scatter(-1, rows[:, start:, None], float("-inf")).logsumexp(-1)
        return ((logits.logsumexp(-1) - others) * repeated).mean()


def repeats(token_ids: Sequence[int], end: int) -> list[bool]:
    """Return for each token whether it repeats the previous period of a loop. Tokens after the end of the text do not count."""
    length = token_ids.index(end) + 1 if end in token_ids else len(token_ids)
    looping, found = in_loops(token_ids[:length]), [False] * len(token_ids)
    for period in range(1, MAX_PERIOD + 1):
        for at in range(period, length):
            found[at] |= looping[at] and looping[at - period] and token_ids[at] == token_ids[at - period]
    return found


def loop_prompts(tokens: Path, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the signatures of `samples.py`, and openings of held-out documents."""
    openings: list[str] = []
    for name in HELD_OUT:
        ids = np.fromfile(tokens / f"val_{name}.bin", dtype=np.uint16)
        begins = [0, *(np.flatnonzero(ids == tokenizer.eos_token_id)[:-1] + 1).tolist()]
        long = [begin for begin, stop in zip(begins, [*begins[1:], len(ids)], strict=True) if stop - begin > 2 * OPENING]
        openings += [str(tokenizer.decode(ids[begin : begin + OPENING].tolist())) for begin in long[:OPENINGS]]
    return [*samples.SIGNATURES, *openings]


def measure(
    net: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], new_tokens: int
) -> dict[str, Any]:
    """Return the share of texts that end in a loop and of tokens in loops, greedy and sampled."""
    found: dict[str, Any] = {"prompts": len(prompts), "new_tokens": new_tokens}
    for name, temperature, top_p in (("greedy", 0.0, 1.0), ("sampled", READABLE_TEMPERATURE, READABLE_TOP_P)):
        texts = samples.continuations(net, tokenizer, prompts, new_tokens, temperature, top_p)
        ends = sum(in_loops(text)[-1:] == [True] for text in texts) / len(texts)
        found[name] = {"texts_that_end_in_a_loop": round(ends, 4), "tokens_in_loops": round(loop_share(texts), 4)}
    return found
