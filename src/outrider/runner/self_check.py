"""Self-check of a loaded model: compare its logits over Outrider's cache with its own forward pass without a cache.

It finds architectures that Outrider would run incorrectly. One short sequence runs over the cache in every way that a request
can (the prompt at once and in chunks, one token, several, again after a rollback, several requests in one pass); the logits
must equal the model's own. The disk cache stores that a model has passed. It is checked again if its files, its config,
Outrider's code, a library or the CPU or GPU has changed.
"""

from __future__ import annotations

import inspect
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider import disk_cache
from outrider.errors import first_line
from outrider.runner import attention, disk_keys
from outrider.runner.blocks import exact_activations
from outrider.runner.forward import described
from outrider.runner.kv_cache import KVCache
from outrider.runner.layouts import Layouts
from outrider.runner.linear import is_plain
from outrider.runner.loading import num_experts, text_config
from outrider.runner.passes import PassRunner
from outrider.types import OutriderError
from outrider.weight_files import weight_files

logger = logging.getLogger(__name__)

KIND, SUFFIX = "checks", ".passed"  # of the disk cache
MIN_BYTES = 64 << 20  # of weights: checking smaller models takes less time than is worth a file
LENGTH = 12  # tokens of the sequence
# Tokens of each request after the first pass and after the second one, which continues with several tokens, with one, and
# with several that overwrite rejected ones, as after a rollback.
FIRST, SECOND = (7, 5, 8), (11, 6, 12)
REJECTED = (0, 0, 4)  # additional wrong tokens of the first pass, overwritten by the second
TOLERANCE = {torch.float32: 1e-3}  # relative to the largest logit
TOLERANCE_ROUNDED = 0.05  # in 16 bits and less kernels may round differently; errors are far larger
NUM_TEXTS = 8  # for rounded mixtures, whose routers may choose other experts at a near tie; an error shows in every text


@torch.inference_mode()
def check_itself(
    model: PreTrainedModel, cache: KVCache, layouts: Layouts, own_attention: str | None, source: str | Path | None = None
) -> None:
    """Raise ``OutriderError`` unless passes over the cache give the logits of the model's own forward pass without a cache.

    ``own_attention``: transformers' name of the attention that the model was loaded with; None if it still uses it.
    ``source``: where it was loaded from; None for a model object. Runs three short passes, for rounded mixtures more if they
    differ; none if a large model with the same files and code has passed.
    """
    key = None if source is None else _key(model, cache, source)
    if key is not None and disk_cache.find(KIND, key, SUFFIX) is not None:
        return
    is_exact = is_plain(model) and cache.dtype in TOLERANCE
    tolerance = TOLERANCE[cache.dtype] if is_exact else TOLERANCE_ROUNDED
    num_texts = NUM_TEXTS if num_experts(text_config(model)) and not is_exact else 1
    # Rounded to 8 bits, activations of both would differ by more than an error: in 16 bits attention rounds differently.
    with exact_activations():
        differences = []
        for index in range(num_texts):
            differences.append(_difference(model, cache, layouts, own_attention, tolerance, index))
            if differences[-1] is None:
                with suppress(OSError):  # a cache that cannot be written
                    if key is not None:
                        disk_cache.store(Path(os.devnull), KIND, key, SUFFIX)
                return
    raise OutriderError(
        f"{type(model).__name__} gives different logits with Outrider's cache than without a cache ({differences[0]}): run it"
        " with transformers' generate; self_check=False disables this check"
    )


def _key(model: PreTrainedModel, cache: KVCache, source: str | Path) -> str | None:
    """Return the cache key of a passed self-check; None for small models and for unreadable files."""
    try:
        files = weight_files(source)
        stats = disk_keys.state_of(files)
        if sum(size for _, size, _ in stats) < MIN_BYTES:
            return None
        code = disk_keys.code_of(model)
    except OSError:
        return None
    weights = [(name, each.shape, each.dtype) for name, each in (*model.named_parameters(), *model.named_buffers())]
    sizes = cache.shape, cache.dtype, min(cache.max_rows, len(FIRST)), min(cache.max_len, LENGTH)
    return disk_keys.key(files, stats, weights, described(model), sizes, disk_keys.machine(cache.device), code)


def _difference(
    model: PreTrainedModel, cache: KVCache, layouts: Layouts, own_attention: str | None, tolerance: float, index: int
) -> str | None:
    """Describe where the logits of text ``index`` differ by more than ``tolerance`` times the largest; None if nowhere.

    Raises ``OutriderError`` if the model fails, or if its own logits are not finite.
    """
    kind, vocab_size = type(model).__name__, int(text_config(model).vocab_size)
    text = [(7 * at * at + 3 * at + 1 + 31 * index) % vocab_size for at in range(min(LENGTH, cache.max_len))]
    try:
        own = _own_logits(model, torch.tensor([text], device=cache.device), own_attention)
        found = _cached_logits(model, cache, layouts, text)
    except OutriderError:
        raise
    except Exception as failure:  # model code can fail in many ways
        logger.debug("%s fails over Outrider's cache", kind, exc_info=failure)
        raise OutriderError(f"{kind} fails when it runs over Outrider's cache: {first_line(failure)}") from failure
    if not bool(torch.isfinite(own).all()):
        raise OutriderError(f"{kind} gives NaN or infinite logits without a cache, too: its weights or config are broken")
    allowed = tolerance * max(1.0, float(own.abs().max()))
    for what, start, logits in found:
        if logits.shape[1] != own.shape[1]:
            raise OutriderError(
                f"{kind} returns {logits.shape[1]} logits per token over Outrider's cache, and {own.shape[1]} without"
            )
        if not bool(torch.isfinite(logits).all()):
            return f"{what}: they are NaN or infinite"
        errors = (logits - own[start : start + len(logits)]).abs().amax(1)
        # Most tokens must agree, not all: in 16 bits one rounded router may choose another expert.
        if float(errors.median()) > allowed:
            return f"{what}: they differ by {float(errors.median()):.2g}"
    return None


def _own_logits(model: PreTrainedModel, ids: Tensor, own_attention: str | None) -> Tensor:
    """Return float32 [T, V] of the model's own forward pass over ``ids`` [1, T], with the attention that it was loaded with."""
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        inputs["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None]  # like generate
    if own_attention is not None:
        model.set_attn_implementation(own_attention)
    try:
        logits: Tensor = model(**inputs).logits[0].float()
    finally:
        if own_attention is not None:
            model.set_attn_implementation(attention.NAME)
    return logits


def _cached_logits(model: PreTrainedModel, cache: KVCache, layouts: Layouts, text: list[int]) -> list[tuple[str, int, Tensor]]:
    """Return for parts of the sequence over the cache: a description, the index of the first token, the logits [n, V]."""
    passes = PassRunner(model, cache, "never")
    vocab_size = int(text_config(model).vocab_size)
    wrong = [(token + 1) % vocab_size for token in text]
    found = []
    with cache.temporary_rows(min(len(FIRST), cache.max_rows)) as rows:
        for what, starts, stops, spare in ("prompts", (0, 0, 0), FIRST, REJECTED), ("drafts", FIRST, SECOND, (0, 0, 0)):
            if max(stops) > len(text):  # the context window is too short
                break
            parts = [text[start:stop] for start, stop, _ in zip(starts, stops, rows, strict=False)]
            # The ring of recurrent layers must still hold the state before the rejected tokens.
            extra = [min(more, cache.states.slots - 1) for more in spare]
            fed = [part + wrong[stop : stop + more] for part, stop, more in zip(parts, stops, extra, strict=False)]
            inputs = layouts.chain(fed, rows, list(starts[: len(rows)]))
            lens = [len(part) for part in parts]
            logits, _ = passes.run(inputs.ids, inputs.layout, (), layouts.row_indices(inputs.starts, lens))
            for start, part in zip(starts, logits.float().split(lens), strict=False):
                found.append((f"{what}, {len(part)} tokens from {start} on", start, part))
    return found
