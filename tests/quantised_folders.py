"""Tiny quantised checkpoints, written from each format's published layout, and the values they represent.

Nothing here uses Outrider. ``Written.values`` are the exact values that a reader must return.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_folder import make_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, PreTrainedModel, Qwen3Config

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "vocab_size": 320,
}
Stored = tuple[dict[str, Tensor], Tensor]  # tensors by the last part of their names; values [outputs, inputs] float32
Write = Callable[[Tensor, np.random.Generator], Stored]


@dataclass
class Written:
    folder: Path
    model: PreTrainedModel  # float32, with the values of the file
    values: dict[str, Tensor]  # by the layer's name


def write(
    folder: Path,
    quantization: dict[str, Any],
    write_layer: Write,
    kind: str = "llama",
    seed: int = 0,
    keep: tuple[str, ...] = ("lm_head",),
    **config: Any,
) -> Written:
    """Save a random model whose linear layers, except those named in ``keep``, are written by ``write_layer``."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    own = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**SIZES | config)
    model = AutoModelForCausalLM.from_config(own, dtype=torch.float32).eval()
    values, tensors = {}, {}
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.7 / parameter.shape[-1] ** 0.5)
            parameter.data = parameter.data.half().float()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not any(part in name for part in keep):
            stored, values[name] = write_layer(module.weight.detach(), rng)
            tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in stored.items()}
            module.weight.data = values[name].clone(memory_format=torch.contiguous_format)
    rest = {name: tensor for name, tensor in model.state_dict().items() if name.removesuffix(".weight") not in values}
    tensors |= {name: tensor.half().clone() for name, tensor in rest.items()}
    _save(folder, tensors, own, model, quantization, "float16")
    return Written(folder, model, values)


def rounded(
    weight: Tensor,
    bits: int,
    group: int,
    is_symmetric: bool,
    rng: np.random.Generator,
    scale_dtype: torch.dtype = torch.float16,
):
    """Return codes [outputs, inputs], scales and zeros [outputs, groups] that approximate a weight; zeros are at least 1."""
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    parts = torch.nn.functional.pad(weight, (0, groups * group - inputs)).view(outputs, groups, group)
    most = (1 << bits) - 1
    if is_symmetric:
        scales = parts.abs().amax(2) / (most // 2)
        zeros = torch.full_like(scales, (most + 1) // 2)
    else:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = (high - low) / most
        zeros = (-low / scales).round().clamp(1, most)
    scales = scales.to(scale_dtype)
    codes = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most).view(outputs, -1)[:, :inputs]
    return codes.numpy().astype(np.int64), scales, zeros.numpy().astype(np.int64)


def meaning(codes: np.ndarray, scales: Tensor, zeros: np.ndarray, group_of: np.ndarray) -> Tensor:
    """Return (code - zero) * scale computed in float64 and rounded to float32, which is exact for 16-bit scales."""
    wide = scales.double().numpy()[:, group_of]
    return torch.from_numpy(((codes - zeros[:, group_of]) * wide).astype(np.float32))


def words(codes: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes [rows, n] into int32 [rows, n * bits / 32].

    Code ``i`` of a word starts at bit ``bits * places[i]`` (default: ``bits * i``).
    """
    each = 32 // bits
    rows, n = codes.shape
    out = np.zeros((rows, -(-n // each)), dtype=np.uint64)
    for column in range(n):
        place = column % each if places is None else places[column % each]
        out[:, column // each] |= (codes[:, column].astype(np.uint64) & ((1 << bits) - 1)) << np.uint64(bits * place)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32).copy())


def gptq(
    bits: int = 4,
    group: int = 128,
    sym: bool = True,
    by_activation: bool = False,
    version: int = 1,
    dtype: torch.dtype = torch.float16,
):
    """Return the quantisation config and the layer writer of a GPTQ checkpoint."""

    def write_layer(weight: Tensor, rng: np.random.Generator) -> Stored:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        group_of = np.arange(inputs) // size
        order = np.random.default_rng(inputs).permutation(inputs) if by_activation else np.arange(inputs)
        codes, scales, zeros = rounded(weight[:, order], bits, size, sym, rng, dtype)
        back = np.argsort(order)  # the files keep the original order of inputs
        codes, group_of = codes[:, back], group_of[back]
        stored = zeros - 1 if version == 1 else zeros
        tensors = {
            "qweight": words(codes, bits).T,  # along inputs
            "qzeros": words(stored.T, bits),  # [groups, outputs / each]
            "scales": scales.T,
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
        return tensors, meaning(codes, scales, zeros, group_of)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": by_activation}
    return config | {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, write_layer


def awq(group: int = 64):
    """Return the quantisation config and the layer writer of an AWQ checkpoint (gemm)."""
    places = tuple([0, 2, 4, 6, 1, 3, 5, 7].index(i) for i in range(8))  # nibble k contains output [0, 2, 4, 6, 1, 3, 5, 7][k]

    def write_layer(weight: Tensor, rng: np.random.Generator) -> Stored:
        size = weight.shape[1] if group == -1 else group
        codes, scales, zeros = rounded(weight, 4, size, False, rng)
        tensors = {"qweight": words(codes.T, 4, places), "qzeros": words(zeros.T, 4, places), "scales": scales.T}
        return tensors, meaning(codes, scales, zeros, np.arange(weight.shape[1]) // size)

    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}, write_layer


def packed(bits: int = 4, group: int = 32, sym: bool = True, by_activation: bool = False, plain_zeros: bool = False):
    """Return those of compressed-tensors' ``pack-quantized``."""

    def write_layer(weight: Tensor, rng: np.random.Generator) -> Stored:
        outputs, inputs = weight.shape
        size = inputs if group == -1 else group
        group_of = np.arange(inputs) // size
        order = np.random.default_rng(inputs).permutation(inputs) if by_activation else np.arange(inputs)
        codes, scales, zeros = rounded(weight[:, order], bits, size, sym, rng, torch.bfloat16)
        back = np.argsort(order)
        codes, group_of = codes[:, back], group_of[back]
        tensors = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor([outputs, inputs])}
        if not sym and plain_zeros:
            tensors["weight_zero_point"] = torch.from_numpy((zeros - (1 << (bits - 1))).astype(np.int8))
        elif not sym:
            tensors["weight_zero_point"] = words(zeros.T, bits).T  # along outputs
        if by_activation:
            tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        return tensors, meaning(codes, scales, zeros, group_of)

    strategy = "channel" if group == -1 else "group"
    scheme = {
        "num_bits": bits,
        "type": "int",
        "symmetric": sym,
        "strategy": strategy,
        "group_size": None if group == -1 else group,
    }
    return _compressed("pack-quantized", scheme | ({"actorder": "group"} if by_activation else {})), write_layer


def _compressed(form: str, scheme: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def integers(per: str = "channel", zero: int | None = None):
    """Return those of compressed-tensors' ``int-quantized``: W8A8. ``zero``: one zero point for all outputs."""

    def write_layer(weight: Tensor, rng: np.random.Generator) -> Stored:
        scales = (weight.abs().amax(1, keepdim=True) if per == "channel" else weight.abs().amax().reshape(1)) / 127
        scales = scales.to(torch.bfloat16)
        codes = (weight / scales.float() + (zero or 0)).round().clamp(-128, 127)
        tensors = {"weight": codes.to(torch.int8), "weight_scale": scales}
        if zero is not None:
            tensors["weight_zero_point"] = torch.tensor([zero], dtype=torch.int8)
        return tensors, ((codes.double() - (zero or 0)) * scales.double()).float()

    return _compressed("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": per}), write_layer


def floats(per: str = "channel", dtype: torch.dtype = torch.bfloat16, library: str = "compressed-tensors", power: bool = False):
    """Return those of FP8: compressed-tensors', or Qwen's and DeepSeek's. ``power``: scales are powers of two."""

    def write_layer(weight: Tensor, rng: np.random.Generator) -> Stored:
        outputs, inputs = weight.shape
        high, wide = {"tensor": (outputs, inputs), "channel": (1, inputs), "block": (128, 128)}[per]
        scales = torch.zeros(-(-outputs // high), -(-inputs // wide))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                scales[i, j] = weight[i * high : (i + 1) * high, j * wide : (j + 1) * wide].abs().max() / 448
        scales = (torch.exp2(scales.log2().ceil()) if power else scales).to(dtype)
        each = scales.float()[torch.arange(outputs) // high][:, torch.arange(inputs) // wide]
        codes = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        key = "weight_scale" if library == "compressed-tensors" else "weight_scale_inv"
        stored = scales.reshape(1) if per == "tensor" else scales
        return {"weight": codes, key: stored}, (codes.double() * each.double()).float()

    if library == "fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        }, write_layer
    return _compressed("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": per}), write_layer


E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def in_e2m1(weight: Tensor, each: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the nearest 4-bit floats, two to a byte, and their values. ``each``: the scale of each weight."""
    codes = np.abs(weight.numpy()[..., None] / each[..., None] - E2M1).argmin(2)
    pairs = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return torch.from_numpy(pairs), torch.from_numpy((E2M1[codes] * each).astype(np.float32))


def mxfp4():
    """Return those of compressed-tensors' ``mxfp4-pack-quantized``."""

    def write_layer(weight: Tensor, rng: np.random.Generator) -> Stored:
        parts = weight.view(len(weight), -1, 32).numpy()
        exponents = np.ceil(np.log2(np.abs(parts).max(2) / 6)).astype(int)
        pairs, values = in_e2m1(weight, np.exp2(exponents.astype(float)).repeat(32, 1))
        return {"weight_packed": pairs, "weight_scale": torch.from_numpy((exponents + 127).astype(np.uint8))}, values

    scheme = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return _compressed("mxfp4-pack-quantized", scheme), write_layer


def nvfp4(library: str = "compressed-tensors", power: bool = False):
    """Return those of NVFP4: compressed-tensors' or ModelOpt's. ``power``: the number of the whole weight is a power of two."""

    def write_layer(weight: Tensor, rng: np.random.Generator) -> Stored:
        largest = weight.view(len(weight), -1, 16).abs().amax(2)
        factor = (largest.max() / (6 * 448)).reshape(1)
        factor = torch.exp2(factor.log2().ceil()) if power else factor
        scales = (largest / 6 / factor).to(torch.float8_e4m3fn)
        number = factor if library == "modelopt" else 1 / factor
        # The product or the quotient is rounded to float32, as in both libraries.
        each = scales.float() * number if library == "modelopt" else scales.float() / number
        pairs, values = in_e2m1(weight, each.double().numpy().repeat(16, 1))
        if library == "modelopt":
            scale = {"weight_scale_2": number.reshape(()), "input_scale": torch.tensor(0.01)}
            return {"weight": pairs, "weight_scale": scales, **scale}, values
        return {"weight_packed": pairs, "weight_scale": scales, "weight_global_scale": number}, values

    if library == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, write_layer
    scheme = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    return _compressed("nvfp4-pack-quantized", scheme), write_layer


def modelopt_mixed():
    """Return those of a ModelOpt checkpoint with layers in NVFP4 and in FP8, per tensor and per output."""
    (_, in_4), (_, in_8), (_, by_output) = nvfp4("modelopt"), floats("tensor", torch.float32), floats("channel", torch.float32)

    def write_layer(weight: Tensor, rng: np.random.Generator) -> Stored:
        return (in_4, in_8, by_output)[rng.integers(0, 3)](weight, rng)

    layers = {f"layer {n}": {"quant_algo": kind} for n, kind in enumerate(("NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN"))}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, write_layer


FORMATS = {
    "gptq": gptq(),
    "gptq-asym": gptq(sym=False, group=32),
    "gptq-v2": gptq(sym=False, group=64, version=2),
    "gptq-one-group": gptq(group=-1, sym=False),
    "gptq-by-activation": gptq(by_activation=True, group=32),
    "gptq-8": gptq(bits=8, group=128),
    "gptq-8-asym": gptq(bits=8, group=64, sym=False, version=2, by_activation=True),
    "gptq-bfloat16": gptq(dtype=torch.bfloat16),
    "awq": awq(),
    "awq-128": awq(128),
    "awq-one-group": awq(-1),
    "w4a16": packed(group=128),
    "w4a16-asym": packed(group=32, sym=False),
    "w4a16-plain-zeros": packed(group=32, sym=False, plain_zeros=True),
    "w4a16-by-activation": packed(group=32, by_activation=True, sym=False),
    "w4a16-channel": packed(group=-1),
    "w8a16": packed(bits=8, group=64, sym=False),
    "w8a8": integers(),
    "w8a8-tensor": integers("tensor"),
    "w8a8-tensor-zero": integers("tensor", zero=5),
    "fp8-tensor": floats("tensor"),
    "fp8-channel": floats("channel"),
    "fp8-block": floats("block"),
    "fp8-qwen": floats("block", torch.bfloat16, "fp8"),
    "fp8-deepseek": floats("block", torch.float32, "fp8"),
    "fp8-powers": floats("block", torch.float32, "fp8", power=True),
    "mxfp4": mxfp4(),
    "nvfp4": nvfp4(),
    "nvfp4-powers": nvfp4(power=True),
    "nvfp4-modelopt": nvfp4("modelopt"),
    "modelopt-mixed": modelopt_mixed(),
}


def write_experts(folder: Path) -> Written:
    """Write a tiny gpt-oss whose experts are stored in MXFP4, as in the published checkpoints."""
    sizes = SIZES | {
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    config = GptOssConfig(**sizes, sliding_window=16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    tensors, values = {}, {}
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.7 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.2)
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = parameter.detach().bfloat16()
            parameter.data = tensors[name].float()
            continue
        experts, inputs, outputs = parameter.shape
        codes = rng.integers(0, 16, size=(experts, outputs, inputs))
        exponents = rng.integers(-5, -3, size=(experts, outputs, inputs // 32))
        tensors[f"{name}_blocks"] = torch.from_numpy((codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)).unflatten(
            2, (-1, 16)
        )
        tensors[f"{name}_scales"] = torch.from_numpy((exponents + 127).astype(np.uint8))
        meant = E2M1[codes] * np.exp2(exponents.astype(float)).repeat(32, 2)
        values[name] = torch.from_numpy(meant.astype(np.float32)).transpose(1, 2).contiguous()
        parameter.data = values[name].clone()
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    _save(folder, tensors, config, model, quantization, "bfloat16")
    return Written(folder, model, values)


def _save(
    folder: Path, tensors: dict[str, Tensor], config: Any, model: PreTrainedModel, quantization: dict[str, Any], dtype: str
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = {"quantization_config": quantization, "dtype": dtype, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | said))
    make_tokenizer().save_pretrained(folder)
