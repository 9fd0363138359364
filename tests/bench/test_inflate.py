"""An inflated checkpoint computes its source's function."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_folder import make_folder
from transformers import AutoModelForCausalLM

from outrider.bench import inflate as module
from outrider.bench.inflate import inflate, inflated
from outrider.bench.shapes import Shape, count_params, num_params, shape_for
from outrider.bench.widening import Inflater, Noise
from outrider.cli.options import INFLATABLE
from outrider.types import OutriderError

TOKENS = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1))


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return model(TOKENS).logits.float()


def perturb_norms(folder: Path) -> None:
    """Perturb norm weights like trained ones, so that a wrong position or scale is visible."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if "norm" in name:
            weights[name] = (weight + 0.3 * torch.randn_like(weight)).contiguous()
    save_file(weights, file, metadata={"format": "pt"})


SHAPES = {
    "hidden x4, more of everything": Shape(hidden=64, layers=5, heads=16, kv_heads=4, ffn=96),
    "hidden x1": Shape(hidden=16, layers=2, heads=4, kv_heads=2, ffn=24),
    "hidden x16": Shape(hidden=256, layers=3, heads=8, kv_heads=4, ffn=64),
    "smaller groups: a real key/value head in two places": Shape(hidden=64, layers=4, heads=4, kv_heads=4, ffn=32),
    "larger groups": Shape(hidden=64, layers=4, heads=16, kv_heads=2, ffn=32),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_equal_those_of_the_source(tmp_path: Path, shape: Shape, tied: bool) -> None:
    source = make_folder(tmp_path / "small", tie_word_embeddings=tied)
    perturb_norms(source)
    out = inflate(source, tmp_path / "large", shape)
    torch.testing.assert_close(logits(out), logits(source), atol=2e-4, rtol=1e-4)
    config = json.loads((out / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (shape.hidden, shape.layers)
    assert config["head_dim"] == 8


@pytest.mark.parametrize("bias", [True, False])
def test_biases_are_kept(tmp_path: Path, bias: bool) -> None:
    source = make_folder(tmp_path / "small", attention_bias=bias, mlp_bias=bias)
    weights = load_file(source / "model.safetensors")
    for name in weights:
        if name.endswith("bias"):
            weights[name] = torch.randn_like(weights[name])
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    out = inflate(source, tmp_path / "large", Shape(64, 4, 16, 4, 96))
    torch.testing.assert_close(logits(out), logits(source), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("hidden", [64, 256])
def test_norm_weights_are_scaled_exactly_in_bfloat16(tmp_path: Path, hidden: int) -> None:
    source = make_folder(tmp_path / "small", dtype="bfloat16")
    perturb_norms(source)
    out = inflate(source, tmp_path / "large", Shape(hidden, 3, 8, 2, 32))
    small = load_file(source / "model.safetensors")["model.norm.weight"].double()
    large = load_file(next(out.glob("model-*.safetensors")))["model.norm.weight"]
    assert large.dtype == torch.bfloat16
    scale = large[:16].double() / small
    assert torch.all(scale == scale[0]) and torch.log2(scale[0]) % 1 == 0
    assert torch.all(large[16:] == 0)


def test_extra_weights_are_random_and_real_ones_few(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "small")
    out = inflate(source, tmp_path / "large", Shape(64, 5, 16, 4, 96))
    weights = load_file(next(out.glob("model-*.safetensors")))
    extra = weights["model.layers.1.mlp.up_proj.weight"]
    assert 0.01 < extra.std() < 0.03
    matrices = [weight for weight in weights.values() if weight.ndim == 2]
    assert not any(torch.equal(a, b) for i, a in enumerate(matrices) for b in matrices[:i] if a.shape == b.shape)
    note = json.loads((out / "config.json").read_text())["outrider_inflated"]
    assert note["real_layers"] == [0, 2]
    assert note["parameters"] == sum(w.numel() for w in weights.values())


def test_masked_weights_are_neither_constant_nor_repeated(tmp_path: Path) -> None:
    """Otherwise an engine that stores equal constants once, or compresses zeros, would read less than its parameters."""
    source = make_folder(tmp_path / "small")
    perturb_norms(source)
    shape = Shape(256, 5, 32, 8, 256)
    out = inflate(source, tmp_path / "large", shape)
    weights = {name: weight for file in out.glob("model-*.safetensors") for name, weight in load_file(file).items()}
    real = json.loads((out / "config.json").read_text())["outrider_inflated"]["real_layers"]
    extra = [name for name in weights if name.startswith("model.layers.") and int(name.split(".")[2]) not in real]
    for name in extra:
        weight = weights[name]
        assert torch.all((weight != 0) if weight.ndim == 2 else (weight != 0).sum() == 256 - 16), f"{name} has zeros"
        assert weight.unique().numel() > 0.5 * min(weight.numel(), 1000), f"{name} has repeated values"
    for writer in ("self_attn.o_proj", "mlp.down_proj"):
        silent = weights[f"model.layers.{real[0]}.{writer}.weight"][:, -8:]  # weights without effect: extra heads, extra rows
        assert silent.count_nonzero() == silent.numel()
    every = list(weights.values())
    assert not any(torch.equal(a, b) for i, a in enumerate(every) for b in every[:i] if a.shape == b.shape)


def test_a_longer_context_can_be_declared(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "small")
    out = inflate(source, tmp_path / "large", Shape(64, 4, 8, 4, 64), context=4096)
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 4096
    torch.testing.assert_close(logits(out), logits(source), atol=2e-4, rtol=1e-4)


def test_shards_hold_every_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 20_000)
    source = make_folder(tmp_path / "small")
    out = inflate(source, tmp_path / "large", Shape(64, 4, 8, 4, 64))
    shards = sorted(out.glob("model-*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(shards) > 3
    assert {name: shard.name for shard in shards for name in load_file(shard)} == index
    torch.testing.assert_close(logits(out), logits(source), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("size", "params"), [("1b", 1.06e9), ("8b", 8e9), ("700m", 7e8), ("3b", 3e9)])
@pytest.mark.parametrize(("hidden", "layers", "heads"), [(256, 8, 4), (512, 12, 8), (384, 10, 6)])
def test_sizes_are_met_within_eight_percent(size: str, params: float, hidden: int, layers: int, heads: int) -> None:
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 3 * hidden,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
    }
    shape = shape_for(config, num_params(size))
    assert count_params(config, shape) == pytest.approx(params, rel=0.08)
    Inflater(config, shape, Noise(torch.bfloat16, 0), torch.bfloat16)  # fits


def test_the_cache_is_keyed_by_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("outrider.bench.inflate.shape_for", lambda config, params: SHAPES["hidden x4, more of everything"])
    source = make_folder(tmp_path / "small")
    first = inflated(source, "1b")
    assert inflated(source, "1b") == first and first.is_relative_to(tmp_path / "cache")
    perturb_norms(source)
    assert inflated(source, "1b") != first
    second = inflated(source, "1b")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    assert inflated(source, "1b") not in (first, second)
    assert not list(first.parent.glob("*.part-*"))


def test_two_processes_may_inflate_the_same_model_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "shape_for", lambda config, params: SHAPES["hidden x4, more of everything"])
    write_config = module._write_config

    def last_step(part: Path, *more: Any) -> None:
        write_config(part, *more)
        folder = part.with_name(part.name.partition(".part-")[0])
        folder.mkdir()  # another process finishes first
        (folder / "config.json").touch()

    monkeypatch.setattr(module, "_write_config", last_step)
    folder = inflated(make_folder(tmp_path / "small"), "1b")
    assert [file.name for file in folder.iterdir()] == ["config.json"] and list(folder.parent.iterdir()) == [folder]


def test_processes_with_the_same_id_do_not_share_an_unfinished_folder(tmp_path: Path) -> None:
    with module.new_folder(tmp_path / "deep" / "out") as first:
        with pytest.raises(ValueError, match="no"), module.new_folder(tmp_path / "deep" / "out") as second:
            assert second != first
            raise ValueError("no")
        (first / "config.json").touch()
    assert [each.name for each in (tmp_path / "deep" / "out").iterdir()] == ["config.json"]


def test_an_unreadable_source_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path, out: Path) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    source = make_folder(tmp_path / "small")
    (source / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(module.shutil, "copyfile", refuse)
    with pytest.raises(OutriderError, match=r"cannot read \S+small/tokenizer.json: Permission denied"):
        inflate(source, tmp_path / "large", SHAPES["hidden x4, more of everything"])


@pytest.mark.parametrize("size", ["", "b", "huge", "-1b", "nanb", "1e30b"])
def test_an_invalid_size_is_refused(size: str) -> None:
    with pytest.raises(OutriderError, match="expected a size"):
        num_params(size)


def test_a_size_below_the_source_is_refused(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "small", intermediate_size=30_000)  # 2.9 M parameters
    with pytest.raises(OutriderError, match=r"a model of 0\.00\d+ B parameters to 0\.001 B: give a larger size"):
        inflate(source, tmp_path / "x", "1m")


@pytest.mark.parametrize(
    "more", [{"layer_types": ["full_attention", "sliding_attention"]}, {"use_sliding_window": True, "max_window_layers": 1}]
)
def test_layers_with_and_without_a_window_are_refused(tmp_path: Path, more: dict[str, object]) -> None:
    source = make_folder(tmp_path / "small")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"} | more))
    with pytest.raises(OutriderError, match="some layers may have a sliding window"):
        inflate(source, tmp_path / "x")


def test_unsupported_sources_are_refused(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "small")
    with pytest.raises(OutriderError, match="power of four"):
        inflate(source, tmp_path / "x", Shape(32, 4, 8, 4, 64))
    with pytest.raises(OutriderError, match="does not fit"):
        inflate(source, tmp_path / "x", Shape(64, 1, 8, 4, 64))
    with pytest.raises(OutriderError, match="already exists"):
        inflate(source, source, Shape(64, 4, 8, 4, 64))
    with pytest.raises(OutriderError, match="not a model folder"):
        inflate(tmp_path / "missing", tmp_path / "x")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(OutriderError, match="Llama-shaped"):
        inflate(source, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("outrider.bench.inflate.shutil.disk_usage", lambda _: SimpleNamespace(free=10**9))
    monkeypatch.setattr("outrider.bench.inflate._write_shards", lambda *_: pytest.fail("weights were written"))
    message = r"takes 4\.\d GB, but .*cache/inflated has 1\.0 GB of free disk space: choose a smaller size, .*OUTRIDER_CACHE"
    with pytest.raises(OutriderError, match=message):
        inflated(make_folder(tmp_path / "small"), "1b")
    assert not list((tmp_path / "cache" / "inflated").iterdir())


def test_the_size_and_the_folder_are_said_before_they_are_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "outrider")
    source = make_folder(tmp_path / "small")
    inflate(source, tmp_path / "large", SHAPES["hidden x4, more of everything"])
    assert re.fullmatch(rf"writing the inflated model to {re.escape(str(tmp_path))}/large: \d+ MB", caplog.messages[-1])


def test_truncated_files_give_a_one_line_error(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "small")
    weights = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(OutriderError, match=r"cannot read .*\.safetensors"):
        inflate(source, tmp_path / "large", "1b")
    (source / "config.json").write_text("{")
    with pytest.raises(OutriderError, match="is not JSON"):
        inflate(source, tmp_path / "large", "1b")


@pytest.mark.parametrize("kind", ["config", "float8", "packed"])
def test_quantised_sources_are_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    source = make_folder(tmp_path / "small")
    file, config = source / "model.safetensors", source / "config.json"
    if kind == "config":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    else:
        weights, dtype = load_file(file), torch.float8_e4m3fn if kind == "float8" else torch.int32
        save_file({name: each.to(dtype) if "q_proj" in name else each for name, each in weights.items()}, file)
    with pytest.raises(
        OutriderError, match=r"cannot inflate .*small: it is quantised .*; expected weights in 16 or 32 bits"
    ) as error:
        inflate(source, tmp_path / "large", Shape(64, 4, 16, 4, 96))
    assert "\n" not in str(error.value) and not (tmp_path / "large").exists()


def test_the_help_names_every_type_that_can_be_inflated() -> None:
    assert all(name in INFLATABLE.lower() for name in module.MODEL_TYPES)
