"""Heads in GGUF files: configs and values are those of the folder that a file was converted from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from toy import outputs_of
from transformers import LlamaConfig, LlamaForCausalLM

from outrider import LLM, SamplingParams
from outrider.engine.finding import INSIDE, NEXT_TO, candidates, choices, target_files
from outrider.heads import block_formats, eagle_formats
from outrider.heads.checkpoint import BLOCK, EAGLE, kinds_of, read_config, read_folder
from outrider.runner import ModelRunner, RunnerConfig
from outrider.types import OutriderError

from . import block_checkpoints, writers

VOCAB, LAYERS, HIDDEN = 320, 9, writers.HIDDEN
MASK = VOCAB - 1
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
SHORT = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
NAMES = {  # names in a head's folder, without the layer -> names in the file
    "fc": "fc",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection": "selector_hidden",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give block drafters the vocabulary of the tests' tokenizers."""
    monkeypatch.setattr(block_checkpoints, "VOCAB", VOCAB)
    monkeypatch.setattr(block_checkpoints, "MASK", MASK)
    monkeypatch.setitem(block_checkpoints.LAYER_CONFIG, "vocab_size", VOCAB)


class Sizes:
    """The target of the tests' heads."""

    name, hidden_size, num_layers, vocab_size = "target", HIDDEN, LAYERS, VOCAB


def convert(folder: Path, kind: Kind = Kind.F32, tensors: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a head's folder as llama.cpp's converter does, and return the file.

    ``tensors``: more tensors; ``changes``: other values of entries, None for none.
    """
    config, found = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    layer, inner = config.get("transformer_layer_config") or config, config.get("dflash_config") or {}
    is_eagle = "midlayer.hidden_norm.weight" in found or "layers.0.hidden_norm.weight" in found
    architecture, path = "eagle3" if is_eagle else "dflash", folder.parent / f"{folder.name}.gguf"
    states = config.get("eagle_aux_hidden_state_layer_ids") or config.get("aux_hidden_state_layer_ids")
    entries: dict[str, Any] = {
        "block_count": layer["num_hidden_layers"],
        "context_length": layer["max_position_embeddings"],
        "embedding_length": layer["hidden_size"],
        "feed_forward_length": layer["intermediate_size"],
        "attention.head_count": layer["num_attention_heads"],
        "attention.head_count_kv": layer["num_key_value_heads"],
        "attention.key_length": layer["head_dim"],
        "attention.value_length": layer["head_dim"],
        "attention.layer_norm_rms_epsilon": float(layer["rms_norm_eps"]),
        "rope.freq_base": float(layer["rope_theta"]),
        "target_layers": states or [index + 1 for index in inner.get("target_layer_ids") or config["target_layer_ids"]],
    }
    if is_eagle:
        entries |= {"target_hidden_size": HIDDEN, "norm_before_residual": config.get("norm_before_residual", False)}
        entries |= {"norm_before_fc": "input_norm.weight" in found, "rope.dimension_count": layer["head_dim"]}
    else:
        entries |= block_entries(config | inner, layer, is_dspark="markov_head.markov_w1.weight" in found)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_token_list([f"t{index}" for index in range(VOCAB)])
    for name, value in (entries | changes).items():
        add_entry(writer, name if name.startswith("tokenizer.") else f"{architecture}.{name}", value)
    more = dict(tensors or {})
    if layer.get("rope_scaling"):
        more["rope_freqs.weight"] = divisors(layer["head_dim"], layer["rope_theta"])
    for name, array in more.items():
        writer.add_tensor(name, array)
    heads = {"q": layer["num_attention_heads"], "k": layer["num_key_value_heads"]} if is_eagle else {}
    for name, tensor in found.items():
        add_tensor(writer, name.replace("midlayer.", "layers.0."), tensor, kind, heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def block_entries(config: dict[str, Any], layer: dict[str, Any], is_dspark: bool) -> dict[str, Any]:
    found = {
        "tokenizer.ggml.mask_token_id": MASK,
        "block_size": config["block_size"],
        "attention.causal": config.get("is_causal"),
    }
    found |= {name: config.get(name) for name in ("conv_kernel_size", "conv_group_size", "selector_rank")}
    found |= {"selector_top_k": config.get("selector_top_k"), "logit_scale": config.get("output_multiplier")}
    found["final_logit_softcapping"] = config.get("final_logit_softcapping")
    if layer.get("use_sliding_window"):
        found["attention.sliding_window"] = layer["sliding_window"]
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in layer["layer_types"]]
    if is_dspark:
        found |= {"sample_from_anchor": config.get("sample_from_anchor", True), "has_confidence_head": True}
    return found


def add_entry(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if value is not None:
        adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        adders[type(value)](name, value)


def add_tensor(writer: gguf.GGUFWriter, own: str, tensor: torch.Tensor, kind: Kind, heads: dict[str, int]) -> None:
    if own == "t2d":
        return
    if own == "d2t":
        writer.add_tensor("d2t", (tensor.long() + torch.arange(len(tensor))).numpy())
        return
    prefix, base = "", own
    if own.startswith("layers."):
        prefix, base = f"blk.{own.split('.')[1]}.", own.split(".", 2)[2]
    stem, _, ending = base.rpartition(".") if base.endswith((".weight", ".bias")) else (base, "", "")
    name = NAMES.get(stem) or ("attn_norm_2" if prefix else "enc.output_norm")  # hidden_norm of EAGLE-3, of DFlash
    array = tensor.float().numpy()
    part = name.removeprefix("attn_")
    if part in heads:  # llama.cpp turns neighbours in place of the two halves of a head
        array = array.reshape(heads[part], 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    stored = prefix + name + (f".{ending}" if ending else "")
    if array.ndim < 2 or kind is Kind.F32 or array.shape[-1] % 32:
        writer.add_tensor(stored, np.ascontiguousarray(array))
    else:
        writer.add_tensor(stored, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)


def divisors(dim: int, theta: float) -> Any:
    """Return Llama 3's divisors of rotary frequencies by llama.cpp's code."""
    frequencies = 1.0 / theta ** (np.arange(0, dim, 2) / dim)
    lengths, found = 2 * np.pi / frequencies, np.ones(dim // 2, np.float32)
    smooth = (8192 / lengths - 1.0) / (4.0 - 1.0)
    found = np.where(lengths > 8192 / 1.0, 8.0, 1 / ((1 - smooth) / 8.0 + smooth))
    return np.where(lengths < 8192 / 4.0, 1.0, found).astype(np.float32)


def eagle(folder: Path, **config: Any) -> None:
    writers.write_eagle3(folder, VOCAB, 200, config={"eagle_aux_hidden_state_layer_ids": [2, 4, 6]} | config)


def own_tables(folder: Path) -> None:
    """Write speculators' EAGLE-3, which has an embedding, and a norm before fc."""
    writers.write_speculators(folder, VOCAB, 200, extra="norm_before_fc")
    writers.set_config(folder, norm_before_residual=True)


def block(folder: Path, config: dict[str, Any], *more: dict[str, torch.Tensor]) -> None:
    tensors = block_checkpoints.head_tensors()
    for each in more:
        tensors |= each
    block_checkpoints.write(folder, config, tensors)


def reduced() -> dict[str, torch.Tensor]:
    """Return the tables of a block drafter for 200 tokens."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:200].sort().values
    return {"d2t": ids - torch.arange(200), "lm_head.weight": torch.randn(200, HIDDEN)}


c = block_checkpoints
HEADS: dict[str, Callable[[Path], None]] = {
    "eagle3": eagle,
    "eagle3, norm before residual": lambda folder: eagle(folder, norm_before_residual=True),
    "eagle3, own tables": own_tables,
    "eagle3, Llama 3's positions": lambda folder: eagle(
        folder, rope_theta=500000.0, rope_scaling=LLAMA3, head_dim=writers.DIM, max_position_embeddings=131072
    ),
    "dflash": lambda folder: block(folder, c.native_config()),
    "dflash, causal windows": lambda folder: block(folder, c.native_config(**SHORT)),
    "dflash, windows": lambda folder: block(folder, c.native_config(**SHORT, is_causal=False)),
    "dflash 2": lambda folder: block(folder, c.second_config(), c.second_tensors()),
    "dflash 2, scaled": lambda folder: block(
        folder, c.second_config(output_multiplier=0.5, final_logit_softcapping=20.0), c.second_tensors()
    ),
    "dspark": lambda folder: block(folder, c.dspark_config(), c.markov_tensors(vocab=VOCAB)),
    "dspark, reduced": lambda folder: block(
        folder, c.speculators_config("dspark", draft_vocab_size=200), c.markov_tensors(vocab=200), reduced()
    ),
}


def load(source: Path, name: str) -> Any:
    if name.startswith("eagle3"):
        return eagle_formats.load(source, Sizes())
    return block_formats.load(source, Sizes())


def described(head: Any) -> dict[str, Any]:
    """Return everything that a head's shape says about it."""
    layers = head.shape.config
    keys = (
        "rope_parameters",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "hidden_act",
    )
    found = {name: value for name, value in vars(head.shape).items() if name != "config"}
    return found | {key: getattr(layers, key) for key in keys} | {"eps": pytest.approx(layers.rms_norm_eps)}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_that_of_the_converted_folder(name: str, small: None, tmp_path: Path) -> None:
    HEADS[name](tmp_path / "head")
    file = convert(tmp_path / "head")
    expected, found = load(tmp_path / "head", name), load(file, name)
    assert described(found) == described(expected)
    assert torch.equal(found.rotary_emb.inv_freq, expected.rotary_emb.inv_freq)
    values = expected.state_dict()
    assert found.state_dict().keys() == values.keys() and len(values) > 10
    for key, value in found.state_dict().items():
        assert torch.equal(value, values[key]), key
    assert kinds_of(file) == kinds_of(tmp_path / "head")
    assert kinds_of(file)[0] is (EAGLE if name.startswith("eagle3") else BLOCK)


@pytest.mark.parametrize("name", ["eagle3", "dspark, reduced"])
def test_quantised_tensors_have_the_values_of_the_file(name: str, small: None, tmp_path: Path) -> None:
    HEADS[name](tmp_path / "head")
    exact, found = load(tmp_path / "head", name), load(convert(tmp_path / "head", Kind.Q8_0), name)
    for key, value in exact.state_dict().items():
        rounded = value
        if value.dim() > 1 and value.shape[-1] % 32 == 0:
            rounded = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(value.numpy(), Kind.Q8_0), Kind.Q8_0))
            assert not torch.equal(rounded, value)
        assert torch.equal(found.state_dict()[key], rounded), key


def test_only_the_header_is_read_on_the_meta_device(small: None, tmp_path: Path) -> None:
    HEADS["eagle3, Llama 3's positions"](tmp_path / "head")
    file = convert(tmp_path / "head", Kind.Q8_0)
    expected = read_folder(file)[1]
    with torch.device("meta"):
        found = read_folder(file)[1]
    assert {name: each.shape for name, each in found.items()} == {name: each.shape for name, each in expected.items()}
    assert all(each.is_meta for each in found.values())
    assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in expected.items()}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target in a GGUF file only."""
    folder = tmp_path_factory.mktemp("target")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=128)
    torch.manual_seed(0)
    model = gguf_files.randomised(LlamaForCausalLM(config), std=0.8)
    gguf_files.write(folder / "model.gguf", model, lambda _: Kind.F32)
    return folder


@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_a_head_beside_the_target_drafts_the_same_text(name: str, target: Path, small: None, tmp_path: Path) -> None:
    HEADS[name](tmp_path / "head")
    file = convert(tmp_path / "head")
    (tmp_path / "model.gguf").symlink_to(target / "model.gguf")
    texts, drafts = [], []
    for options in ({"method": "plain"}, {"method": "auto"}, {"draft": str(tmp_path / "head")}):
        llm = LLM(str(tmp_path / "model.gguf"), **{"num_draft_tokens": 3, "compile": "never"} | options)
        found = llm.generate([[7, 3, 11, 4], [5, 6]], SamplingParams(max_tokens=16, ignore_eos=True))
        texts.append([output.token_ids for output in outputs_of(found)])
        drafts.append(llm.stats.num_drafts)
        assert llm.stats.faults == 0
        if options == {"method": "auto"}:
            assert str(file) in llm.drafter and NEXT_TO in llm.drafter
    assert texts[0] == texts[1] == texts[2]
    assert drafts[0] == 0 < min(drafts[1:])


def test_a_folder_may_hold_a_model_its_head_and_its_encoder_of_images(target: Path, small: None, tmp_path: Path) -> None:
    HEADS["dflash"](tmp_path / "a" / "head")
    folder = tmp_path / "model"
    folder.mkdir()
    convert(tmp_path / "a" / "head").rename(folder / "any name.gguf")
    (folder / "model.gguf").symlink_to(target / "model.gguf")
    encoder = gguf.GGUFWriter(folder / "mmproj.gguf", "clip")
    encoder.write_header_to_file()
    encoder.write_kv_data_to_file()
    encoder.write_tensors_to_file()
    encoder.close()
    files = target_files(str(folder))
    assert files is not None and files.num_layers == LAYERS
    assert [(each.method, each.where) for each in candidates(files) if each.misfit == ""] == [("dflash", INSIDE)]
    assert next(choices(files, None, {})).draft == str(folder / "any name.gguf")


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown tensor": (
        "eagle3",
        {"tensors": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}},
        "tensor blk.0.attn_sinks.weight is not supported in a head of architecture eagle3",
    ),
    "unknown entry": (
        "dflash",
        {"attention.value_scale": 0.5},
        "dflash.attention.value_scale=0.5 is not supported: draft with the folder that the file was converted from",
    ),
    "scaled embedding": ("dflash", {"embedding_scale": 2.0}, "input_embedding_scale 2.0, which is not"),
    "few rotated features": ("dflash", {"rope.dimension_count": 4}, "rotary positions of 4 of 8 features, expected all"),
    "other positions": (
        "eagle3",
        {"tensors": {"rope_freqs.weight": np.array([1, 2, 3, 8], np.float32)}},
        "rope_freqs.weight holds other divisors than Llama 3's",
    ),
    "no layers": ("eagle3", {"target_layers": None}, "its header lacks 'target_layers'"),
    "no mask token": ("dflash", {"tokenizer.ggml.mask_token_id": None}, "mask_token_id=None: expected a whole number"),
    "other width": ("eagle3", {"target_hidden_size": 40}, "fc.weight has shape [32, 96], expected 120 inputs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_head_that_is_not_supported_is_refused_in_one_line(case: str, small: None, tmp_path: Path) -> None:
    name, changes, message = WRONG[case]
    HEADS[name](tmp_path / "head")
    file = convert(tmp_path / "head", **changes)
    with pytest.raises(OutriderError) as error:
        load(file, name)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(file) in str(error.value)


def test_a_head_is_no_model_and_a_model_no_head(target: Path, small: None, tmp_path: Path) -> None:
    HEADS["eagle3"](tmp_path / "head")
    file = convert(tmp_path / "head")
    with pytest.raises(OutriderError, match=r"drafts for another model \(eagle3\): give it as the draft"):
        ModelRunner.load(file, RunnerConfig(compile="never"))
    with pytest.raises(OutriderError, match="is a model of architecture llama, not a head"):
        read_config(target / "model.gguf")
