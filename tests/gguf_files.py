"""GGUF files of tiny models, written with the gguf package, and models with the values stored in the files."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from architectures.tiny import randomised
from gguf import GGMLQuantizationType as Kind
from gguf_configs import ARCHITECTURES, CONFIGS
from gguf_entries import add_entries
from transformers import AutoModelForCausalLM, PreTrainedModel

TURNED = (
    "llama",
    "mistral3",
    "granite",
    "granitemoe",
    "granitehybrid",
    "smollm3",
    "arcee",
)  # llama.cpp interleaves the halves of their heads
# Offsets of the float16 scales in the bytes of a block, and their size for weights of usual magnitude.
SCALES = {
    Kind.Q2_K: {80: 6e-3, 82: 5e-3},
    Kind.Q3_K: {108: 9e-4},
    Kind.Q4_K: {0: 2.5e-4, 2: 1.5e-3},
    Kind.Q5_K: {0: 1.2e-4, 2: 1.5e-3},
    Kind.Q6_K: {208: 3e-5},
    Kind.IQ4_XS: {0: 1.2e-5},
    Kind.IQ3_S: {0: 5e-5},
    Kind.IQ3_XXS: {0: 1e-4},
    Kind.IQ2_S: {0: 2e-4},
    Kind.IQ2_XS: {0: 2e-4},
    Kind.IQ2_XXS: {0: 2e-4},
    Kind.IQ1_S: {0: 3e-3},
    Kind.IQ4_NL: {0: 4e-4},
    Kind.NVFP4: {},  # which has scales of 8 bits
}


def mixed(name: str) -> Kind:
    """Return the type of a tensor as in Q4_K_M files: 6 bits for sensitive ones, 4 bits for the others."""
    return Kind.Q6_K if any(part in name for part in ("attn_v", "ffn_down", "token_embd", "output.weight")) else Kind.Q4_K


def make_model(architecture: str, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Return a random float32 model whose greedy tokens vary."""
    torch.manual_seed(seed)
    model = randomised(AutoModelForCausalLM.from_config(CONFIGS[architecture](**config), dtype=torch.float32), std=0.8)
    for own, parameter in model.named_parameters():
        if ".act_fn." in own:  # Apertus's activation, other in each layer
            parameter.data += torch.rand(())
    return model


def write(
    path: Path,
    model: PreTrainedModel,
    kind_of: Callable[[str], Kind],
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    without: tuple[str, ...] = (),
    architecture: str = "",
    tensors_a_part: int = 0,
) -> PreTrainedModel:
    """Write a model, each matrix in the type given by ``kind_of`` its name. Returns a copy with the values of the file.

    K types and NVFP4 have random codes, because the package cannot quantise to them. ``change`` adds entries or tensors before
    writing.
    ``architecture``: llama.cpp's name, if it is not the usual one of such a model. ``tensors_a_part``: 0 for one file.
    """
    config, model_type = model.config, model.config.model_type.removesuffix("_text")
    architecture = architecture or ARCHITECTURES.get(model_type, model_type)
    if architecture == "nemotron_h" and config.to_dict().get("n_routed_experts"):
        architecture = "nemotron_h_moe"
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_part)
    add_entries(writer, architecture, config)
    if change is not None:
        change(writer)
    exact = copy.deepcopy(model)
    values = exact.state_dict()
    enum = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(enum, config.num_hidden_layers)
    rng = np.random.default_rng(0)
    tensors = without_activations(writer, stacked(model.state_dict()))
    for own, name, weight, value in file_tensors(names, tensors, stacked(values), config.to_dict()):
        base = own.rpartition(".")[0]
        if (own == "lm_head.weight" and config.tie_word_embeddings) or name in without:
            continue
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(base.rpartition(".")[2])
        turned = getattr(config, heads) if heads and architecture in TURNED else None
        array = weight.contiguous().numpy()
        order = None if architecture == "qwen3next" else value_heads(own, array, config)
        if order is not None:
            array = np.take(array, *order)
        if (
            array.ndim < 2
            or name.endswith(".bias")
            or "ffn_gate_inp" in name
            or "altup_correct" in name
            or "altup_predict" in name
            or "conv" in name.rpartition(".")[0].rpartition(".")[2]
        ):
            adds_one = (
                architecture in ("nemotron", "gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
                and re.search(r"norm\w*\.weight", own) is not None
                and "linear_attn" not in own
            )
            shift = np.float32(adds_one)  # these multiply by 1 + weight
            stored = -np.exp(array) if name.endswith("ssm_a") else array + shift
            written = stored.squeeze(1) if "conv" in name and stored.ndim == 3 else stored
            written = interleaved(written, turned)
            if (".mamba." in own or ".mixer." in own) and name.endswith(("ssm_a", "ssm_d", "ssm_norm.weight")):
                written = written.reshape(-1, 1) if written.ndim == 1 and "norm" not in name else written.reshape(1, -1)
            writer.add_tensor(name, written)
            back = np.log(-stored) if name.endswith("ssm_a") else stored - shift
            value.copy_(torch.from_numpy(back if order is None else np.take(back, np.argsort(order[0]), order[1])))
            continue
        kind = kind_of(name)
        array = interleaved(array, turned)
        data = random_codes(array.shape, kind, rng) if kind in SCALES else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        decoded = gguf.quants.dequantize(data, kind).astype(np.float32)
        if turned:
            decoded = decoded.reshape(turned, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        value.copy_(torch.from_numpy(decoded if order is None else np.take(decoded, np.argsort(order[0]), order[1])))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


def interleaved(array: np.ndarray, heads: int | None) -> np.ndarray:
    """Return rows in which the two halves of each head alternate; None: as they are."""
    return array if heads is None else array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


OWN_NAMES = {  # names in a block of tensors that the package does not map
    "scale": "ffn_gate_inp.scale",
    "per_expert_scale": "ffn_down_exps.scale",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "D": "ssm_d",
    "e_score_correction_bias": "exp_probs_b.bias",
    "expert_bias": "exp_probs_b.bias",
}


class Rows:
    """Rows of a tensor that are no view of it."""

    def __init__(self, whole: torch.Tensor, index: np.ndarray) -> None:
        self._whole, self._index = whole, torch.from_numpy(index)

    def contiguous(self) -> torch.Tensor:
        return self._whole[self._index]

    def copy_(self, values: torch.Tensor) -> None:
        self._whole[self._index] = values


class Stack(list[torch.Tensor]):
    """Parameters that are one tensor of a file."""

    def contiguous(self) -> torch.Tensor:
        return torch.stack(self)

    def copy_(self, values: torch.Tensor) -> None:
        for part, value in zip(self, values, strict=True):
            part.copy_(value)


def stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors by name, each of Gemma 3n's lists of matrices as one."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if part := re.fullmatch(r"(model\.altup_\w+)\.\d+(\.weight)", name):
            found.setdefault(part[1] + part[2], Stack()).append(tensor)
        else:
            found[name] = tensor
    return found


def without_activations(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> dict[str, Any]:
    """Move the numbers of Apertus's activations into entries with a number for each layer."""
    for part in ("alpha_n", "alpha_p", "beta", "eps"):
        numbers = [float(tensors.pop(own)) for own in list(tensors) if own.endswith(f".act_fn.{part}")]
        if numbers:
            getattr(writer, f"add_xielu_{part}")(numbers)
    return tensors


MIXER = {  # of Nemotron's layers
    "in_proj": "ssm_in",
    "out_proj": "ssm_out",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
    **{f"{part}_proj": f"attn_{part}" for part in "qkv"},
    "o_proj": "attn_output",
    "gate": "ffn_gate_inp",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "fc1_latent_proj": "ffn_latent_down",
    "fc2_latent_proj": "ffn_latent_up",
}


def unmapped(own: str, block: str, sizes: Mapping[str, Any]) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the names of a parameter's tensors that the package does not map, each with its view of the parameter."""
    base, _, suffix = own.rpartition(".")
    module = base.rpartition(".")[2]
    if suffix in OWN_NAMES:
        return {block + OWN_NAMES[suffix]: lambda whole: whole}
    if ".mixer." in own:
        group = own.partition(".mixer.")[2].split(".")
        ending = {"experts": "_exps", "shared_experts": "_shexp"}.get(group[0], "")
        name = MIXER[group[1] if ending else group[0]]
        return {f"{block}{name}{ending}.{'bias' if suffix == 'bias' else 'weight'}": lambda whole: whole}
    if module == "pre_ff_layernorm":
        return {f"{block}ffn_norm": lambda whole: whole}
    if module == "router" and "block_sparse_moe" in base:
        return {f"{block}ffn_gate_inp.weight": lambda whole: whole}
    if module == "kv_b_proj":  # of each head a part for keys, whose columns are rows in files, and one for values
        heads, keys = sizes["num_attention_heads"], sizes["qk_nope_head_dim"]
        return {
            f"{block}attn_k_b.weight": lambda whole: whole.unflatten(0, (heads, -1))[:, :keys].transpose(1, 2),
            f"{block}attn_v_b.weight": lambda whole: whole.unflatten(0, (heads, -1))[:, keys:],
        }
    if module == "in_proj_qkvz":  # of each key head queries, keys, values and gates; files have all of the first three
        heads, size = sizes["linear_num_key_heads"], sizes["linear_key_head_dim"]
        rows = np.arange(2 * heads * size + 2 * sizes["linear_num_value_heads"] * sizes["linear_value_head_dim"]).reshape(
            heads, -1
        )
        width = (rows.shape[1] - 2 * size) // 2
        kinds = np.split(rows, [size, 2 * size, 2 * size + width], 1)
        return {
            f"{block}attn_qkv.weight": partial(Rows, index=np.concatenate([kind.reshape(-1) for kind in kinds[:3]])),
            f"{block}attn_gate.weight": partial(Rows, index=kinds[3].reshape(-1)),
        }
    ending = "_shexp.weight" if sizes.get("num_local_experts") else ".weight"  # of Granite 4 with and without experts
    if module == "input_linear":
        halves = {"gate": lambda whole: whole.chunk(2)[0], "up": lambda whole: whole.chunk(2)[1]}
        return {f"{block}ffn_{part}{ending}": view for part, view in halves.items()}
    return {f"{block}ffn_down{ending}": lambda whole: whole} if module == "output_linear" else {}


def file_tensors(
    names: gguf.TensorNameMap,
    weights: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    sizes: Mapping[str, Any],
) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
    """Return the model's name, the file's name, the weight and a place for its value, for every tensor of a file.

    Of experts, weight and place are views in the layout of files: gate and up projection are a tensor each.
    """
    for own, weight in weights.items():
        base, _, suffix = own.rpartition(".")
        block = "".join(f"blk.{number}." for number in re.findall(r"\.layers\.(\d+)\.", own))
        if parts := unmapped(own, block, sizes):
            for name, view in parts.items():
                yield own, name, view(weight), view(values[own])
            continue
        if ".experts." not in own:
            is_buffer = suffix in ("layer_scalar", "sinks", "correct_output_scale")
            yield own, f"{names.get_name(own)}.weight" if is_buffer else f"{names.get_name(base)}.{suffix}", weight, values[own]
            continue
        if base.endswith("layers." + block[4:] + "experts"):  # Gemma 4's: gate and up projection are one tensor
            yield own, f"{names.get_name(own)}.weight", weight, values[own]
            continue
        part, ending = suffix.split("_proj")
        stem = f"{block}ffn_"
        views = [weight, values[own]]
        is_gpt_oss = f"{base}.down_proj_bias" in weights  # which has inputs first, and alternates gate and up
        if is_gpt_oss and not ending:
            views = [view.transpose(1, 2) for view in views]
        halves = [[view] for view in views]
        if part == "gate_up":
            halves = [[view[:, ::2], view[:, 1::2]] if is_gpt_oss else [*view.chunk(2, 1)] for view in views]
        for name, source, place in zip(("gate", "up") if part == "gate_up" else ("down",), *halves, strict=True):
            yield own, f"{stem}{name}_exps.{'bias' if ending else 'weight'}", source, place


def value_heads(own: str, array: np.ndarray, config: Any) -> tuple[np.ndarray, int] | None:
    """Return the order of rows or columns of a Qwen3.5 tensor in files, and the axis; None for tensors in their own order.

    In files the first value heads of all key heads come first, then the second ones.
    """
    part = own.rpartition("linear_attn.")[2]
    size = getattr(config, "linear_value_head_dim", 1)
    sizes = dict.fromkeys(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"), 1)
    sizes |= dict.fromkeys(("in_proj_z.weight", "in_proj_qkv.weight", "conv1d.weight", "out_proj.weight"), size)
    if part == own or part not in sizes:
        return None
    keys, heads, axis = config.linear_num_key_heads, config.linear_num_value_heads, int(part == "out_proj.weight")
    order = [key * heads // keys + which for which in range(heads // keys) for key in range(keys)]
    index = np.add.outer(np.array(order) * sizes[part], np.arange(sizes[part])).ravel()
    start = array.shape[axis] - len(index)  # rows of queries and keys
    return np.concatenate([np.arange(start), start + index]), axis


def random_codes(shape: tuple[int, ...], kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Return bytes of random codes with scales of usual size."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // weights, size), dtype=np.uint8)
    for at, largest in SCALES[kind].items():
        raw[..., at : at + 2] = rng.uniform(0.5, 1, (*raw.shape[:-1], 1)).astype(np.float16).view(np.uint8)
        half = raw[..., at : at + 2].copy().view(np.float16) * np.float16(largest * 16 / shape[-1] ** 0.5)
        raw[..., at : at + 2] = half.astype(np.float16).view(np.uint8)
    if kind is Kind.NVFP4:
        raw[..., :4] = rng.integers(8, 16, raw[..., :4].shape)  # 1/64 to 1/32
    return raw.reshape(*shape[:-1], -1)
