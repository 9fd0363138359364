"""Guard against wrong text: compare a loaded model over Outrider's cache with its own forward pass without a cache.

Architectures differ in ways that nobody lists. One short text is run over Outrider's cache in every way that a request is (its
prompt at once and in pieces, one token, several, again after a rollback; several requests in one pass), and what comes out
must be what the model itself says of that text.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.runner import attention
from outrider.runner.kv_cache import KVCache
from outrider.runner.layouts import Layouts
from outrider.runner.linear import is_in_blocks, is_plain
from outrider.runner.loading import text_config
from outrider.runner.passes import PassRunner
from outrider.types import OutriderError, first_line

logger = logging.getLogger(__name__)

LENGTH = 12  # tokens of the text
# How many tokens of the text each request reads in the first pass, and up to where it goes on in the second: with several
# tokens, with one, and with several in the place of others that it has read, as after a rollback.
FIRST, SECOND = (7, 5, 8), (11, 6, 12)
REJECTED = (0, 0, 4)  # tokens that are not the text's, read in the first pass and then overwritten
TOLERANCE = {torch.float32: 1e-3}  # of the largest logit
TOLERANCE_16_BIT = 0.05  # kernels may round differently, and what is wrong is off by far more


@torch.inference_mode()
def check_itself(model: PreTrainedModel, cache: KVCache, layouts: Layouts, own_attention: str | None) -> None:
    """Raises ``OutriderError`` unless passes over the cache give the logits of the model's own forward, without a cache.

    ``own_attention``: transformers' name of the attention that the model was loaded with; None where it still has that.
    Takes three short passes.
    """
    kind, vocab_size = type(model).__name__, int(text_config(model).vocab_size)
    length = min(LENGTH, cache.max_len)
    text = [(7 * index * index + 3 * index + 1) % vocab_size for index in range(length)]
    try:
        own = _own_logits(model, text, own_attention)
        found = _cached_logits(model, cache, layouts, text)
    except OutriderError:
        raise
    except Exception as failure:  # a model's own code, called in a way that it does not know
        logger.debug("%s fails over Outrider's cache", kind, exc_info=failure)
        raise OutriderError(f"{kind} fails when it runs over Outrider's cache: {first_line(failure)}") from failure
    if not bool(torch.isfinite(own).all()):
        raise OutriderError(f"{kind} gives NaN or infinite logits without a cache, too: its weights are broken")
    in_float32 = is_plain(model) and not is_in_blocks(model)  # activations of blocks may be rounded to 8 bits
    tolerance = TOLERANCE.get(cache.dtype, TOLERANCE_16_BIT) if in_float32 else TOLERANCE_16_BIT
    allowed = tolerance * max(1.0, float(own.abs().max()))
    for what, start, logits in found:
        if logits.shape[1] != own.shape[1]:
            raise OutriderError(
                f"{kind} gives {logits.shape[1]} logits a token over Outrider's cache, and {own.shape[1]} without"
            )
        errors = (logits - own[start : start + len(logits)]).abs().amax(1)
        # Most tokens must agree, not all: in 16 bits one rounded router may choose another expert.
        if not bool(errors.median() <= allowed):
            raise OutriderError(
                f"{kind} does not say over Outrider's cache what it says without a cache ({what}: logits are off by"
                f" {float(errors.median()):.2g}): run it with transformers' generate; self_check=False runs it all the same"
            )


def _own_logits(model: PreTrainedModel, text: list[int], own_attention: str | None) -> Tensor:
    """float32 [T, V] of the model's own forward, with the attention that it was loaded with."""
    ids = torch.tensor([text], device=model.device)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        inputs["position_ids"] = torch.arange(len(text), device=model.device)[None]  # as generate counts
    if own_attention is not None:
        model.set_attn_implementation(own_attention)
    try:
        logits: Tensor = model(**inputs).logits[0].float()
    finally:
        if own_attention is not None:
            model.set_attn_implementation(attention.NAME)
    return logits


def _cached_logits(model: PreTrainedModel, cache: KVCache, layouts: Layouts, text: list[int]) -> list[tuple[str, int, Tensor]]:
    """Logits [n, V] of parts of the text over the cache: what was done, the index of the part's first token, the logits."""
    passes = PassRunner(model, cache, "never")
    names = [f"self-check-{index}" for index in range(min(len(FIRST), cache.max_rows))]
    vocab_size = int(text_config(model).vocab_size)
    wrong = [(token + 1) % vocab_size for token in text]
    found = []
    try:
        rows = [cache.row(name) for name in names]
        for what, starts, stops, spare in ("prompts", (0, 0, 0), FIRST, REJECTED), ("drafts", FIRST, SECOND, (0, 0, 0)):
            if max(stops) > len(text):  # of a context window that is too short
                break
            parts = [text[start:stop] for start, stop, _ in zip(starts, stops, rows, strict=False)]
            # Of recurrent layers the state before what is rejected must still be there.
            extra = [min(more, cache.states.slots - 1) for more in spare]
            fed = [part + wrong[stop : stop + more] for part, stop, more in zip(parts, stops, extra, strict=False)]
            laid = layouts.chain(fed, rows, list(starts[: len(rows)]))
            lens = [len(part) for part in parts]
            logits, _ = passes.run(laid.ids, laid.layout, (), layouts.places(laid.starts, lens))
            for start, part in zip(starts, logits.float().split(lens), strict=False):
                found.append((f"{what}, {len(part)} tokens from {start} on", start, part))
    finally:
        cache.release(names)
    return found
