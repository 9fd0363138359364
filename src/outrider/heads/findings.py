"""Check from a head's files whether it fits a target, before drafting with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.heads import block_formats, eagle_formats, medusa, mtp_formats
from outrider.heads.block import BlockHead
from outrider.heads.checkpoint import HeadFiles, stored_rates
from outrider.heads.copied_tables import SHARED
from outrider.heads.eagle import EagleHead
from outrider.heads.feature_head import FeatureHead
from outrider.runner import ModelRunner
from outrider.runner.linear import PackedEmbedding, PackedLinear
from outrider.types import Finding

ENOUGH, FEW = 0.95, 0.85  # share of a text's tokens that a reduced vocabulary should cover, and below which it is suspicious
LARGE = 0.25  # share of the target's weights above which drafting is expensive


def of_eagle(folder: Path, target: ModelRunner, sample: Sequence[int]) -> Iterator[Finding]:
    """Check an EAGLE head. ``sample``: token ids of a text. Raises ``OutriderError`` for unreadable or invalid files."""
    files = HeadFiles.read(folder)
    config, tensors = files.config, files.tensors
    head = eagle_formats.load(files, target, target.model)
    if head.shape.own_embedding or not any(name.endswith("embed_tokens.weight") for name in tensors):  # else the target's
        layer = config.get("transformer_layer_config") or config.get("model") or config
        yield from _vocabulary(layer.get("vocab_size"), target)
    yield from _draft_vocabulary(head.draft_ids, tensors, target, sample)
    if head.shape.generation == 3:
        yield from _layers(config, head.shape.hidden_states, target.num_layers)
    yield from _norms(head)
    yield from _context(head, target)
    if head.shape.own_embedding:
        yield from _embedding(head, target)
    yield _size(head, target, "one tree level")


def of_mtp(folder: Path, target: ModelRunner, sample: Sequence[int]) -> Iterator[Finding]:
    """Check an MTP head; the sample is not needed. Raises ``OutriderError`` for unreadable or invalid files."""
    head = mtp_formats.load_any(folder, target)
    yield _size(head, target, "one tree level")


def of_block(folder: Path, target: ModelRunner, sample: Sequence[int]) -> Iterator[Finding]:
    """Check a block drafter. Raises ``OutriderError`` for unreadable or invalid files."""
    files = HeadFiles.read(folder)
    config, tensors = files.config, files.tensors
    head = block_formats.load(files, target, target.model)
    shape = head.shape
    yield from _vocabulary(shape.config.vocab_size, target)
    yield from _draft_vocabulary(head.draft_ids, tensors, target, sample)
    text = f"reads the hidden states {', '.join(map(str, shape.hidden_states))} of {target.num_layers}"
    meant = config.get("num_target_layers")
    if meant not in (None, target.num_layers):
        yield Finding("suspicious", "layers", f"{text}, but its config says that its target has {meant} layers")
    elif not any(block_formats.stated_layers(config)):
        yield Finding("suspicious", "layers", f"{text}, assumed because its config does not name them")
    else:
        yield Finding("ok", "layers", text)
    kind = "each by the one before" if shape.in_order else "each by itself"
    yield Finding("ok", "block", f"at most {shape.max_drafts} drafts in one pass, {kind}; mask token {shape.mask_token_id}")
    rates = stored_rates(config, "acceptance_by_position", 1, folder)
    if rates:
        yield Finding("ok", "acceptance", f"measured in training, by position: {', '.join(f'{rate:.0%}' for rate in rates)}")
    yield from _norms(head)
    yield from _context(head, target)
    yield _size(head, target, "a block")


def of_medusa(folder: Path, target: ModelRunner, sample: Sequence[int]) -> Iterator[Finding]:
    """Check Medusa heads."""
    files = HeadFiles.read(folder)
    config, tensors = files.config, files.tensors
    heads, accuracies = medusa.load(files, target)
    yield from _vocabulary(config.get("vocab_size"), target)
    yield from _draft_vocabulary(heads.token_map, tensors, target, sample)
    declared, held = config.get("num_heads", config.get("medusa_num_heads")), heads.shape.num_heads
    if declared is not None and declared != held:
        yield Finding("note", "heads", f"the config names {declared} heads, the file has {held}; the file's are used")
    else:
        yield Finding("ok", "heads", f"{held} heads of {heads.shape.num_layers} blocks")
    if accuracies is None:
        text = "no measured accuracies: typical ones shape the tree; set the option accuracies if they are known"
        yield Finding("note", "tree", text)
    yield _size(heads, target, "a round")


def _vocabulary(declared: Any, target: ModelRunner) -> Iterator[Finding]:
    """Compare ``vocab_size`` of a config, which may be missing or not a number."""
    if declared is not None and declared != target.vocab_size:
        size = f"{declared:,}" if isinstance(declared, int) else repr(declared)
        yield Finding(
            "wrong", "vocabulary", f"made for a vocabulary of {size} tokens, but the target has {target.vocab_size:,}"
        )
    else:
        yield Finding("ok", "vocabulary", f"{target.vocab_size:,} tokens, as in the target")


def _draft_vocabulary(
    ids: Tensor | None, tensors: Mapping[str, Tensor], target: ModelRunner, sample: Sequence[int]
) -> Iterator[Finding]:
    """Check the coverage of a reduced vocabulary, and that d2t and t2d agree."""
    if ids is None:
        return
    known = set(ids.tolist())
    text = f"covers {len(known):,} of {target.vocab_size:,} tokens"
    share = sum(token in known for token in sample) / max(len(sample), 1)
    if sample:
        text += f", {share:.0%} of a sample text, the upper bound of acceptance"
    is_unclear = not sample or FEW <= share < ENOUGH
    yield Finding("note" if is_unclear else "ok" if share >= ENOUGH else "suspicious", "draft vocabulary", text)
    if len(known) < len(ids):
        yield Finding("suspicious", "draft vocabulary", "its map contains a token twice: a part of the output head is unused")
    marked = tensors.get("t2d")
    if marked is not None and not torch.equal(marked.nonzero().flatten(), ids.unique()):
        yield Finding("suspicious", "draft vocabulary", "t2d and d2t disagree; d2t is used")


def _layers(config: Mapping[str, Any], states: tuple[int, ...], num_layers: int) -> Iterator[Finding]:
    """Check which hidden states are read, and whether the config names them unambiguously."""
    outer, inner = eagle_formats.stated_layers(config)
    text = f"reads the hidden states {', '.join(map(str, states))} of {num_layers}"
    if not outer and not inner:
        yield Finding("suspicious", "layers", f"{text}, assumed because its config does not name them")
    elif outer and inner and inner != [index - 1 for index in outer]:
        is_list = isinstance(inner, list) and all(isinstance(index, int) for index in inner)
        names = ", ".join(str(index + 1) for index in inner) if is_list else repr(inner)
        text = f"{text} by its top-level config; eagle_config names {names}"
        yield Finding("suspicious", "layers", text)
    elif list(states) != sorted(set(states)):
        yield Finding("suspicious", "layers", f"{text}, which are not in ascending order")
    else:
        yield Finding("ok", "layers", text)


def _norms(head: EagleHead | BlockHead) -> Iterator[Finding]:
    empty = [name for name, weight in head.named_parameters() if "norm" in name and not bool(weight.any())]
    if empty:
        yield Finding("suspicious", "norms", f"the weights of {empty[0]} are all zero")


def _context(head: EagleHead | BlockHead, target: ModelRunner) -> Iterator[Finding]:
    reach = int(head.shape.config.max_position_embeddings or target.max_len)
    if reach < target.max_len:
        text = f"made for {reach} tokens, the target's context is {target.max_len}: acceptance may drop beyond"
        yield Finding("suspicious", "context", text)


def _embedding(head: EagleHead, target: ModelRunner) -> Iterator[Finding]:
    """Compare a head's own embedding with the target's."""
    own = head.embed_tokens.weight
    if own.shape[1] != target.hidden_size:
        return
    ids = torch.arange(min(len(own), target.vocab_size), device=target.device)
    own, other = own[: len(ids)].float(), target.model.get_input_embeddings()(ids).float().cpu()
    distance = float((own - other).norm() / other.norm().clamp_min(1e-12))
    text = f"its own, differs from the target's by {distance:.0%}"
    if distance > SHARED:
        yield Finding("suspicious", "embedding", f"{text}: made for another target, or trained further")
    else:
        yield Finding("ok", "embedding", text)


def _size(head: nn.Module, target: ModelRunner, what: str) -> Finding:
    """Compare the weights read for drafting with those of a target pass."""
    own = sum(weight.numel() for name, weight in head.named_parameters() if "embed_tokens" not in name)
    if isinstance(head, FeatureHead) and head.uses_targets_output:
        own += target.vocab_size * target.hidden_size
    whole = _num_weights(target.model)
    text = f"{what} reads {own / 1e6:.1f} M weights, {own / max(whole, 1):.0%} of the target's"
    if own > LARGE * whole:
        return Finding("suspicious", "size", f"{text}: drafting is expensive")
    return Finding("ok", "size", text)


def _num_weights(model: nn.Module) -> int:
    """Return the number of weights, of which several may share a byte of a packed layer."""
    counts = {tensor: tensor.numel() for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            counts[module.packed] = module.out_features * module.in_features
        elif isinstance(module, PackedEmbedding):
            counts[module.packed] = module.num_embeddings * module.embedding_dim
    return sum(counts.values())
