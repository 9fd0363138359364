"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): head i predicts the token i + 2 positions after the last hidden state, with
residual blocks and a linear layer.

FasterDecoding's format (medusa_lm_head.pt) and vLLM's are read; vLLM's is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.heads.checkpoint import HeadFiles, TargetSizes, check_ids, read_config, stored_rates, write_folder
from outrider.types import OutriderError, dtype_name, over_vocabulary

Accuracies = tuple[tuple[float, ...], ...]  # [head][rank]: probability that the candidate of that rank is the target's token


@dataclass(frozen=True)
class MedusaShape:
    """Shape of the heads."""

    num_heads: int
    num_layers: int  # residual blocks per head
    hidden_size: int
    vocab_size: int  # the target's vocabulary size, or the length of a token map
    bias: bool = True
    mapped: bool = False


class ResidualBlock(nn.Module):
    """Residual block: x + SiLU(W x) per layer."""

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.layers = nn.ModuleList([nn.Linear(size, size, bias=shape.bias) for _ in range(shape.num_layers)])

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        for layer in self.layers:
            hidden = hidden + silu(layer(hidden))
        return hidden


class MedusaHeads(nn.Module):
    """All heads of a target. Names are vLLM's."""

    token_map: Tensor | None  # [V'] target id of each head id

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList([ResidualBlock(shape) for _ in range(shape.num_heads)])
        self.lm_heads = nn.ModuleList(
            [nn.Linear(shape.hidden_size, shape.vocab_size, bias=False) for _ in range(shape.num_heads)]
        )
        self.register_buffer("token_map", torch.arange(shape.vocab_size) if shape.mapped else None)

    def forward(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:
        """Map hidden states [..., H] to logits [heads, ..., V'] of the first ``num_heads`` heads (None: all)."""
        count = self.shape.num_heads if num_heads is None else min(num_heads, self.shape.num_heads)
        return torch.stack([self.one(index, hidden) for index in range(count)])

    def one(self, index: int, hidden: Tensor) -> Tensor:
        """Map hidden states [..., H] to logits [..., V'] of one head."""
        return self.lm_heads[index](self.blocks[index](hidden))

    def to_target_vocabulary(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Expand [..., V'] to float32 [..., V] over the target's vocabulary, ``IMPOSSIBLE_LOGIT`` for tokens the heads lack."""
        return over_vocabulary(logits.float(), vocab_size, self.token_map)

    def candidates(self, hidden: Tensor, num_heads: int, count: int) -> Tensor:
        """Return the ``count`` most likely tokens of each head for hidden states [B, H]: int64 [B, heads, count]."""
        found = self(hidden, num_heads).float().topk(min(count, self.shape.vocab_size), -1).indices.transpose(0, 1)
        return found if self.token_map is None else self.token_map[found]


def load(source: str | Path | HeadFiles, target: TargetSizes) -> tuple[MedusaHeads, list[list[float]] | None]:
    """Read heads for this target in float32, and their measured accuracies, if stored.

    Raises ``OutriderError`` if parts are missing or do not fit.
    """
    files = HeadFiles.read(source)
    files.rename(lambda name: re.sub(r"^medusa_heads?\.", "", name))
    if any(re.match(r"\d+\.\d+\.", name) for name in files.tensors):
        files.rename(_from_original)
    tensors = files.tensors
    if not any(name.startswith("blocks.0.") for name in tensors):
        raise OutriderError(f"{files.source} has no Medusa heads: expected '0.0.linear.weight' or 'blocks.0.layers.0.weight'")
    # The number of heads is counted in the file, because configs are often wrong.
    num_heads, layers = files.count_numbered(r"blocks\.(\d+)\."), files.count_numbered(r"blocks\.0\.layers\.(\d+)\.")
    shared = tensors.pop("lm_head.weight", None)
    if shared is not None:  # vLLM's original_lm_head
        tensors |= {f"lm_heads.{head}.weight": shared for head in range(num_heads) if f"lm_heads.{head}.weight" not in tensors}
    first = tensors.get("lm_heads.0.weight")
    if first is None:
        raise OutriderError(f"{files.source} has no lm_heads.0.weight")
    files.check_dims({"lm_heads.0.weight": 2})
    num_tokens, hidden_size = first.shape
    is_biased, is_mapped = "blocks.0.layers.0.bias" in tensors, "token_map" in tensors
    heads = files.fill(MedusaHeads(MedusaShape(num_heads, layers, hidden_size, num_tokens, is_biased, is_mapped)))
    check_fit(heads, target)
    return heads, stored_rates(files.config, "accuracies", 2, files.source)


def _from_original(name: str) -> str:
    """Return vLLM's name of a tensor ``{head}.{layer}.linear.weight`` or ``{head}.{layers}.weight``."""
    block, output = re.match(r"(\d+)\.(\d+)\.linear\.(\w+)$", name), re.match(r"(\d+)\.\d+\.weight$", name)
    if block:
        return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
    if output:
        return f"lm_heads.{output[1]}.weight"
    raise OutriderError(f"unknown tensor {name} in Medusa heads")


def export(heads: MedusaHeads, folder: Path, vocab_size: int, accuracies: Sequence[Sequence[float]] | None = None) -> None:
    """Write heads in vLLM's format; ``accuracies`` are stored in the config, for the tree."""
    shape = heads.shape
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": shape.vocab_size,
        "medusa_fc_bias": shape.bias,
        "original_lm_head": False,
        "torch_dtype": dtype_name(next(heads.lm_heads.parameters()).dtype),
    }
    write_folder(folder, config, heads.state_dict(), accuracies=accuracies)


def is_exported(folder: Path, heads: MedusaHeads) -> bool:
    """Return whether a folder, not a single file, has the format of ``export``, including the number of heads."""
    config = read_config(folder)
    is_named = config.get("model_type") == "medusa" and config.get("num_heads") == heads.shape.num_heads
    return folder.is_dir() and bool(is_named)


def check_fit(heads: MedusaHeads, target: TargetSizes) -> None:
    """Raise ``OutriderError`` for heads whose sizes do not fit this target."""
    shape = heads.shape
    if shape.hidden_size != target.hidden_size:
        raise OutriderError(f"the heads expect hidden size {shape.hidden_size}, but {target.name} has {target.hidden_size}")
    if heads.token_map is None and shape.vocab_size != target.vocab_size:
        raise OutriderError(
            f"the heads have a vocabulary of {shape.vocab_size} tokens, but {target.name} has {target.vocab_size}"
        )
    check_ids(heads.token_map, target.vocab_size, "the heads' token map", target.name)
