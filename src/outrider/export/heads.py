"""Convert heads to another engine's format if necessary."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from outrider.export.deployment import Deployment
from outrider.heads import block_formats, eagle_formats, medusa, mtp_formats
from outrider.heads.block import BlockShape
from outrider.heads.checkpoint import MTP, find_folder, kinds_of, read_config, read_folder
from outrider.heads.eagle import EagleShape, check_hidden_states
from outrider.proposers.method import TargetFiles
from outrider.proposers.portable import Portable
from outrider.types import OutriderError

Heads = TypeVar("Heads", bound=nn.Module)
FOLDER = "heads"  # inside the folder of an export


def feature_head(kind: Portable, deployment: Deployment, folder: Path, eagle_1: str) -> tuple[str, EagleShape]:
    """Return the head's folder (relative to ``folder`` if converted) and its shape.

    A native head whose config names its layers in both numbering conventions is not converted; otherwise engines guess or
    misread them. ``eagle_1``: the engine's architecture for EAGLE-1 heads. Raises ``OutriderError`` for a head or
    hidden states that do not fit the target.
    """
    target = _files(deployment)
    head = eagle_formats.load(kind.source, target)
    if kind.config.hidden_states is not None:
        check_hidden_states(kind.config.hidden_states, head, target.num_layers)
        if head.shape.generation == 1 and kind.config.hidden_states != head.hidden_states:
            reads = "other engines feed EAGLE-1 heads the last hidden state only: remove hidden_states from the method"
            raise OutriderError(f"invalid hidden_states {kind.config.hidden_states}: {reads}")
    written = read_config(find_folder(kind.source))
    names = written.get("architectures")
    if names == [eagle_1] and head.shape.generation == 1 and not written.get("bias"):  # engines read it as the attention's
        return kind.source, head.shape
    inner = (written.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    is_native = names == ["LlamaForCausalLMEagle3"]
    if is_native and kind.config.hidden_states is None and inner and written.get("eagle_aux_hidden_state_layer_ids"):
        return kind.source, head.shape
    if kind.config.hidden_states is not None:
        head.shape = replace(head.shape, hidden_states=kind.config.hidden_states)
    eagle_formats.export(_as_stored(head, kind.source), folder / FOLDER, architecture=eagle_1)
    return FOLDER, head.shape


def own_head(kind: Portable, deployment: Deployment, engine: str, types: Collection[str]) -> str | None:
    """Return the folder of a head of the target's own kind; None: the target's.

    Raises ``OutriderError`` if it holds none, or for a model type other than ``types``, for which the engine has MTP heads.
    """
    own, folder = kind.source, Path(kind.source or deployment.target)
    found = kinds_of(folder)
    if found and MTP not in found:
        raise OutriderError(f"{folder} holds no MTP head: give the method's draft a folder that does, or train one")
    named = deployment.whole_config.model_type if own is None else read_config(find_folder(own)).get("model_type")
    if named not in types:
        advice = "train an EAGLE head (outrider train eagle), or serve the plan with `outrider serve`"
        raise OutriderError(f"{engine} has no MTP heads for models of type {named!r}: {advice}")
    return own


def num_layers(own: str | None, deployment: Deployment) -> int:
    """Return the number of layers of an MTP head by its config; ``own``: its folder, None if it is the target's."""
    config = deployment.config.to_dict() if own is None else read_config(find_folder(own))
    counts = (config.get(layout.count) for layout in mtp_formats.LAYOUTS.values())
    return next((count for count in counts if isinstance(count, int) and count > 0), 1)


def block_drafter(kind: Portable, deployment: Deployment, folder: Path, reads_speculators: bool) -> tuple[str, BlockShape]:
    """Return the folder of a block drafter, and its shape.

    It is converted to z-lab's layout for engines that do not read speculators'. Raises ``OutriderError`` for a head that does
    not fit the target, or has what the layout lacks.
    """
    source, sizes = find_folder(kind.source), _files(deployment)
    is_converted = not reads_speculators and "speculators_model_type" in read_config(source)
    with torch.device("cpu" if is_converted else "meta"):
        head = block_formats.load(source, sizes)
    if not is_converted:
        return kind.source, head.shape
    block_formats.export(_as_stored(head, kind.source), folder / FOLDER, sizes.num_layers)
    return FOLDER, head.shape


def parallel_heads(kind: Portable, deployment: Deployment, folder: Path) -> tuple[str, int]:
    """Return the folder of the heads in vLLM's format and their number. Raises ``OutriderError`` for heads that do not fit."""
    heads, _ = medusa.load(kind.source, _files(deployment))
    if medusa.is_exported(find_folder(kind.source), heads):
        return kind.source, heads.shape.num_heads
    medusa.export(_as_stored(heads, kind.source), folder / FOLDER, deployment.config.vocab_size)
    return FOLDER, heads.shape.num_heads


def _files(deployment: Deployment) -> TargetFiles:
    return TargetFiles(deployment.target, Path(deployment.target), deployment.config)


def _as_stored(heads: Heads, source: str) -> Heads:
    """Convert heads to the dtype of their file, because loading converts them to float32."""
    _, tensors = read_folder(find_folder(source))
    return heads.to(next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32))
