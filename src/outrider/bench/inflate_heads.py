"""Inflate heads together with their target: the same drafts, at the cost of a head with the large model's widths.

A head reads the small target's hidden state padded with zeros (see ``inflate``), and its output is padded in the same way. It
reads the inputs of the same real layers, which are further apart in the large model. Its layers get the widths of the large
target's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from outrider.bench.inflate import built_once, cache_folder, new_folder
from outrider.bench.shapes import Shape, source_shape
from outrider.bench.widening import Inflater, InputWidener, Noise
from outrider.heads import eagle_formats, medusa
from outrider.heads.checkpoint import (
    BLOCK,
    MEDUSA,
    MTP,
    find_folder,
    kind_of,
    read_config,
    read_folder,
    stored_rates,
    write_folder,
)
from outrider.heads.eagle import EagleHead, EagleShape
from outrider.proposers.method import TargetFiles
from outrider.types import OutriderError, dtype_name

FORMAT = 2  # part of the cache key: increment it when the same head and target give other weights
SEED = 1  # seed of the random weights, different from the target's


@dataclass(frozen=True)
class InflatedTarget:
    """Facts about the inflated target."""

    small: Shape
    large: Shape
    vocab_size: int
    real_layers: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def read(cls, folder: Path) -> InflatedTarget:
        """Read the facts. Raises ``OutriderError`` for a folder that ``inflate`` did not write."""
        config = json.loads((folder / "config.json").read_text())
        note = config.get("outrider_inflated")
        if note is None:
            raise OutriderError(f"{folder} is not an inflated model: heads can only be inflated for one")
        dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))
        layers = tuple(note["real_layers"])
        return cls(Shape(**note["source"]), source_shape(config), config["vocab_size"], layers, dtype)

    @property
    def small_target(self) -> TargetFiles:
        """Return the sizes of the small target."""
        small = self.small
        config = LlamaConfig(hidden_size=small.hidden, num_hidden_layers=small.layers, vocab_size=self.vocab_size)
        return TargetFiles("the small target", Path(), config)

    def hidden_state(self, index: int) -> int:
        """Return the large target's index of the small target's hidden state."""
        return self.real_layers[index] if index < self.small.layers else self.large.layers


def wide_medusa(heads: medusa.MedusaHeads, target: InflatedTarget) -> medusa.MedusaHeads:
    """Return Medusa heads for the inflated target. Raises ``OutriderError`` if they are not as wide as the small one."""
    check_width(heads.shape.hidden_size, target)
    shape, hidden = heads.shape, target.large.hidden
    widen_inputs = InputWidener(target.small.hidden, hidden, Noise(target.dtype, SEED))
    features, tokens = torch.arange(shape.hidden_size), torch.arange(shape.vocab_size)
    tensors = {}
    for name, weight in heads.state_dict().items():
        if name.startswith("lm_heads."):
            tensors[name] = widen_inputs(weight, shape.vocab_size, tokens)
        elif name.endswith(".weight"):
            tensors[name] = widen_inputs(weight, hidden, features, is_silent=True)
        elif name.endswith(".bias"):
            tensors[name] = nn.functional.pad(weight, (0, hidden - shape.hidden_size)).to(target.dtype)
        else:
            tensors[name] = weight
    made = medusa.MedusaHeads(replace(shape, hidden_size=hidden)).to(target.dtype)
    made.load_state_dict(tensors, assign=True)
    return made


def check_width(width: int, target: InflatedTarget) -> None:
    """Raise ``OutriderError`` for a head that is not as wide as the small target."""
    if width != target.small.hidden:
        raise OutriderError(f"cannot inflate a head of width {width} on a target of width {target.small.hidden}")


class _Widener:
    """Widens the tensors of a head, whose layers have the names of the target's."""

    def __init__(self, config: Mapping[str, Any], target: InflatedTarget) -> None:
        small, large, own = target.small, target.large, source_shape(config)
        check_width(own.hidden, target)
        shape = replace(large, ffn=max(large.ffn, own.ffn), layers=max(large.layers, own.layers))
        self.target, self.wide = target, Inflater(config, shape, Noise(target.dtype, SEED), target.dtype)
        self.widen_inputs = self.wide.widen_inputs
        self.features = torch.arange(small.hidden)
        self.num_kernels = 2 * (config.get("dflash_config") or {}).get("conv_kernel_size", 0)
        self.sizes = self.wide.sizes | {"dtype": dtype_name(target.dtype)}

    def tensor(self, name: str, weight: Tensor) -> Tensor:
        """Return one inflated tensor."""
        hidden, module = self.wide.large.hidden, name.removesuffix(".weight").rpartition(".")[2]
        if module == "fc":
            return self.widen_inputs(weight, hidden, self.features, is_silent=True)
        if module == "embed_tokens":
            return self.wide.embedding(weight)
        if module in ("norm", "hidden_norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            return self.wide.norm(weight)
        if module in ("lm_head", "hidden_projection"):
            return self.widen_inputs(weight, len(weight), torch.arange(len(weight)))
        if module == "base_kernel":
            return self._channels(weight, hidden)
        if module == "kernel_projection":
            return self._kernels(weight)
        if name.startswith("markov_head.") or module.endswith("_codebook"):
            return weight.to(self.target.dtype)
        return self.wide.layer_tensor(name, weight, real=True)

    def _channels(self, weight: Tensor, num: int) -> Tensor:
        """Widen [..., c] to [..., num] with zeros."""
        return nn.functional.pad(weight, (0, num - weight.shape[-1])).to(self.target.dtype)

    def _kernels(self, weight: Tensor) -> Tensor:
        """Widen the projection [2 * taps * groups, h] to the coefficients of groups of channels."""
        ratio = self.wide.large.hidden // self.wide.small.hidden
        by_group = weight.view(self.num_kernels, -1, weight.shape[1]).transpose(1, 2)  # [2 * taps, h, groups]
        wide = self._channels(by_group, ratio * by_group.shape[2]).transpose(1, 2).flatten(0, 1)
        return self.widen_inputs(wide, len(wide), torch.arange(len(wide)))


class _EagleWidener(_Widener):
    """Widens an EAGLE head."""

    def __init__(self, shape: EagleShape, target: InflatedTarget) -> None:
        super().__init__(shape.config.to_dict(), target)
        self.shape = shape

    def tensor(self, name: str, weight: Tensor) -> Tensor:
        wide, shape = self.wide, self.shape
        if name == "draft_ids":
            return weight
        if name == "fc.bias":
            return wide.embedding(weight[None])[0]
        if name == "input_norm.weight":
            return torch.cat([wide.norm(part) for part in weight.split(wide.small.hidden)])
        if name.startswith("fc_norm."):
            return wide.norm(weight)
        module = name.rsplit(".", 2)[-2]
        if shape.generation == 3 and name.startswith("layers.0.") and module in ("q_proj", "k_proj", "v_proj"):
            total, places, source = wide.attention_rows(module)  # reads the concatenated embedding and feature
            return self.widen_inputs(weight[source], total, places, is_silent=module == "v_proj")
        return super().tensor(name, weight)


def wide_eagle(head: EagleHead, target: InflatedTarget) -> EagleHead:
    """Return an EAGLE head for the inflated target."""
    wide = _EagleWidener(head.shape, target)
    config = deepcopy(head.shape.config)
    config.update(wide.wide.sizes)
    states = tuple(map(target.hidden_state, head.shape.hidden_states))
    shape = replace(head.shape, config=config, target_hidden_size=target.large.hidden, hidden_states=states)
    made = EagleHead(shape).to(target.dtype)
    own = head.to(target.dtype).state_dict()
    made.load_state_dict({name: wide.tensor(name, weight) for name, weight in own.items()}, assign=True)
    return made


def wide_mtp(folder: Path, target: Path, facts: InflatedTarget) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of an MTP head in Qwen's layout for the inflated target."""
    config, tensors = read_folder(folder, "mtp.")
    if not tensors:
        raise OutriderError(f"{folder}: only MTP heads in Qwen's layout (mtp.*) can be inflated")
    wide = _Widener(config, facts)
    own = {key: value for key, value in read_config(target).items() if key != "outrider_inflated"} | wide.sizes
    kept = {key: config[key] for key in ("mtp_num_hidden_layers", "outrider") if key in config}
    return own | kept, {name: wide.tensor(name, tensor) for name, tensor in tensors.items()}


def wide_block(folder: Path, facts: InflatedTarget) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of a block drafter in z-lab's format for the inflated target."""
    config, tensors = read_folder(folder)
    wide = _Widener(config, facts)
    inner = config["dflash_config"]
    states = [index + 1 for index in inner["target_layer_ids"]]
    layers = [facts.hidden_state(state) - 1 for state in states]
    changed = wide.sizes | {"num_target_layers": facts.large.layers, "dflash_config": inner | {"target_layer_ids": layers}}
    if "target_layer_ids" in config:
        changed["target_layer_ids"] = layers
    return config | changed, {name: wide.tensor(name, tensor) for name, tensor in tensors.items()}


def inflate_head(source: str | Path, target: Path, out: Path) -> Path:
    """Write the head in ``source`` for the inflated ``target`` to the new folder ``out``, in a public format.

    Raises ``OutriderError`` for a head that does not fit the small target or cannot be inflated.
    """
    facts, folder = InflatedTarget.read(target), find_folder(source)
    kind = kind_of(folder)
    with new_folder(out) as part:
        if kind == MTP:
            write_folder(part, *wide_mtp(folder, target, facts))
        elif kind == BLOCK:
            write_folder(part, *wide_block(folder, facts))
        elif kind == MEDUSA:
            heads, accuracies = medusa.load(folder, facts.small_target)
            medusa.export(wide_medusa(heads, facts), part, facts.vocab_size, accuracies)
        else:
            head = eagle_formats.load(folder, facts.small_target)
            acceptance = stored_rates(read_config(folder), "acceptance_by_rank", 1, folder)
            eagle_formats.export(wide_eagle(head, facts), part, verifier=str(target), acceptance=acceptance)
    return out


def inflated_head(source: str | Path, target: Path) -> Path:
    """Return the cached folder of a head inflated with ``target``, built if missing; keyed by content, target and format."""
    folder = find_folder(source)
    key = f"{FORMAT}/".encode() + (target / "config.json").read_bytes()
    out = cache_folder(f"{folder.resolve().name}-{target.name[:40]}", key, folder)
    return built_once(out, lambda: inflate_head(folder, target, out))
