"""MTP heads in GGUF files: values are those of the file, and a file with a head needs no option to be drafted for with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import gguf_entries
import gguf_files
import numpy as np
import pytest
import torch
from architectures.tiny import randomised
from gguf import GGMLQuantizationType as Kind
from toy import outputs_of
from transformers import PreTrainedModel

from outrider import LLM, SamplingParams
from outrider.engine.finding import NEXT_TO, OWN, candidates, choices, target_files
from outrider.heads import mtp_formats
from outrider.heads.checkpoint import MODEL, MTP, kinds_of
from outrider.heads.mtp import LayerTemplate, MtpHead
from outrider.runner import ModelRunner, RunnerConfig
from outrider.types import OutriderError

CONFIG = RunnerConfig(compile="never", max_batch=2)
PARTS = {
    "fc.weight": "nextn.eh_proj.weight",
    "embed_norm.weight": "nextn.enorm.weight",
    "hidden_norm.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
}


def make_head(model: PreTrainedModel, seed: int = 5) -> MtpHead:
    """Return a head with random matrices and norms."""
    torch.manual_seed(seed)
    body, told = LayerTemplate.of(model.config, type(model)), model.config.to_dict()
    head = randomised(MtpHead(body, body.layer_for("n_routed_experts" in told or "num_experts" in told)), std=0.3)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.normal_(std=0.1)
    return head


def add_head(
    writer: gguf.GGUFWriter, model: PreTrainedModel, kind: Kind, architecture: str = "qwen35", without: str = ""
) -> dict[str, torch.Tensor]:
    """Add the tensors of a head for this model as llama.cpp's converter does; return its values as stored."""
    head, layers = make_head(model), model.config.num_hidden_layers
    enum = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names, values = gguf.get_tensor_name_map(enum, layers), {name: each.clone() for name, each in head.state_dict().items()}
    writer.add_block_count(layers + 1)
    writer.add_nextn_predict_layers(1)
    prefix = f"model.layers.{layers - 1}."  # the package knows the names of the model's layers only

    def layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {prefix + name.removeprefix("layers.0."): each for name, each in tensors.items() if name.startswith("layers.")}

    sizes = model.config.to_dict()
    found = [
        (name.replace(f"blk.{layers - 1}.", f"blk.{layers}."), weight, place)
        for _, name, weight, place in gguf_files.file_tensors(names, layer(head.state_dict()), layer(values), sizes)
    ]
    found += [(f"blk.{layers}.{name}", head.state_dict()[own], values[own]) for own, name in PARTS.items()]
    shift = np.float32(architecture.startswith("qwen35"))  # of norms that multiply by 1 + weight
    for name, weight, place in found:
        array = weight.contiguous().numpy()
        if name.endswith(without) and without:
            continue
        if array.ndim < 2 or "ffn_gate_inp" in name:
            change = shift if "norm" in name else np.float32(0)
            writer.add_tensor(name, array + change)
            place.copy_(torch.from_numpy(array + change - change).view(place.shape))
            continue
        data = gguf.quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        place.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind).astype(np.float32)))
    return values


def write(path: Path, architecture: str = "qwen35", kind: Kind = Kind.F32, **options: Any) -> dict[str, torch.Tensor]:
    """Write a model with a head; return the head's values."""
    model, values = gguf_files.make_model(architecture), {}
    gguf_files.write(
        path, model, lambda _: kind, lambda writer: values.update(add_head(writer, model, kind, architecture, **options))
    )
    return values


def write_alone(path: Path, kind: Kind = Kind.F32) -> dict[str, torch.Tensor]:
    """Write a head in a file of its own, as llama.cpp's ``--mtp`` does; return its values."""
    model = gguf_files.make_model("qwen35")
    writer = gguf.GGUFWriter(path, "qwen35")
    gguf_entries.add_entries(writer, "qwen35", model.config)
    values = add_head(writer, model, kind)
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", np.zeros((320, 256), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def assert_equal(head: Any, values: Mapping[str, torch.Tensor]) -> None:
    found = head.state_dict()
    assert found.keys() == values.keys()
    for name, expected in values.items():
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.BF16])
@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe", "glm4moe", "deepseek2"])
def test_a_head_has_the_values_of_the_file(architecture: str, kind: Kind, tmp_path: Path) -> None:
    values = write(tmp_path / "model.gguf", architecture, kind)
    target = ModelRunner.load(tmp_path / "model.gguf", CONFIG)
    assert_equal(mtp_formats.load_any(tmp_path / "model.gguf", target), values)
    assert_equal(mtp_formats.load_any(tmp_path, target), values)  # the folder holds this file only


@pytest.mark.parametrize("architecture", ["qwen35", "glm4moe", "deepseek2"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_the_text_with_the_files_head_is_plain_decodings(kind: Kind, architecture: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", architecture, kind)
    texts, prompts = [], [[7, 3, 11, 4], [5, 6]]
    for method in ("plain", "auto"):
        llm = LLM(str(tmp_path / "model.gguf"), method=method, num_draft_tokens=3, compile="never", max_batch=2)
        found = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
        texts.append([output.token_ids for output in outputs_of(found)])
    assert "MTP head" in llm.drafter and llm.stats.num_drafts > 0 and llm.stats.faults == 0
    assert texts[0] == texts[1]


def test_a_head_in_the_targets_file_is_found(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf")
    target = target_files(tmp_path / "model.gguf")
    assert target is not None
    first = next(candidates(target))
    assert (first.method, first.where, first.what, first.misfit) == ("mtp", OWN, "MTP head", "")
    assert next(choices(target, None, {})).draft is None
    assert kinds_of(tmp_path / "model.gguf") == [MODEL, MTP]


def test_a_file_with_a_head_next_to_the_targets_file_is_found(tmp_path: Path) -> None:
    model = gguf_files.make_model("qwen35")
    gguf_files.write(tmp_path / "model.gguf", model, lambda _: Kind.Q8_0)
    values, target = write_alone(tmp_path / "mtp-model.gguf"), target_files(tmp_path / "model.gguf")
    assert target is not None
    found = next(candidates(target))
    assert (found.method, found.where, found.source) == ("mtp", NEXT_TO, tmp_path / "mtp-model.gguf")
    assert kinds_of(tmp_path / "mtp-model.gguf") == [MTP]
    runner = ModelRunner.load(tmp_path / "model.gguf", CONFIG)
    assert_equal(mtp_formats.load_any(tmp_path / "mtp-model.gguf", runner), values)


def test_a_file_without_a_head_drafts_with_something_else(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model("qwen35"), lambda _: Kind.Q8_0)
    target = target_files(tmp_path / "model.gguf")
    assert [choice.method for choice in choices(target, None, {})] == ["suffix"]
    with pytest.raises(OutriderError, match=r"holds no MTP head: it has no tensor blk\.4\.nextn\.eh_proj\.weight"):
        LLM(str(tmp_path / "model.gguf"), method="mtp", compile="never")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: write(path, without="nextn.hnorm.weight"), r"the first blk\.4\.nextn\.hnorm\.weight"),
        (
            lambda path: write(path, without="attn_q.weight"),
            r"lacks 1 of the head's tensors, the first layers\.0\.self_attn\.q_proj",
        ),
        (lambda path: write_odd(path, "blk.4.attn_odd.weight"), r"unexpected tensor blk\.4\.attn_odd\.weight"),
    ],
)
def test_a_broken_head_is_refused_in_one_line(change: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    change(tmp_path / "model.gguf")
    target = ModelRunner.load(tmp_path / "model.gguf", CONFIG)
    with pytest.raises(OutriderError, match=said) as error:
        mtp_formats.load_any(tmp_path / "model.gguf", target)
    assert "\n" not in str(error.value)


def write_odd(path: Path, name: str) -> None:
    """Write a model with a head and one more tensor."""
    model = gguf_files.make_model("qwen35")

    def add(writer: gguf.GGUFWriter) -> None:
        add_head(writer, model, Kind.F32)
        writer.add_tensor(name, np.zeros((256, 256), np.float32))

    gguf_files.write(path, model, lambda _: Kind.F32, add)


def test_a_head_of_another_width_or_model_is_refused(tmp_path: Path) -> None:
    write_alone(tmp_path / "head.gguf")
    narrow = gguf_files.make_model("qwen35", hidden_size=128)
    gguf_files.write(tmp_path / "narrow.gguf", narrow, lambda _: Kind.F32)
    with pytest.raises(OutriderError, match=r"has shape \[256, 512\], expected \[128, 256\] for this target"):
        mtp_formats.load_any(tmp_path / "head.gguf", ModelRunner.load(tmp_path / "narrow.gguf", CONFIG))
    other = gguf_files.make_model("qwen3", num_hidden_layers=4)
    gguf_files.write(tmp_path / "other.gguf", other, lambda _: Kind.F32)
    with pytest.raises(OutriderError, match=r"is of a qwen3_5_text model, but .*other\.gguf is a qwen3 model"):
        mtp_formats.load_any(tmp_path / "head.gguf", ModelRunner.load(tmp_path / "other.gguf", CONFIG))
