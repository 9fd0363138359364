"""Memory for a model: what the machine and its control group allow, and weights that exceed it."""

from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_folders import FORMATS as QUANTISED
from quantised_folders import write
from safetensors.torch import save_file
from tiny_folder import make_folder
from transformers import LlamaConfig, LlamaForCausalLM

from outrider import LLM, OutriderError, memory, weight_files
from outrider.runner import ModelRunner, RunnerConfig, checkpoint_files, footprint, loading
from outrider.runner.checkpoint_files import check_weight_files
from outrider.runner.checkpoints.formats import FORMATS
from outrider.runner.footprint import fetch_fitting_weights, growth_of

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    return tmp_path


def group(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self: line if str(self) == "/proc/self/cgroup" else real(self))


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/a/b", "a/b/memory.max"),
        ("0::/a/b", "a/memory.max"),
        ("0::/a/b", "memory.max"),
        ("5:memory:/a/b", "memory/a/memory.limit_in_bytes"),
        ("5:memory:/a", "memory/a/memory.limit_in_bytes"),
        ("5:cpu,memory:/", "memory/memory.limit_in_bytes"),
    ],
)
def test_the_memory_limit_of_the_control_group_is_used(
    line: str, file: str, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (groups / file).parent.mkdir(parents=True, exist_ok=True)
    (groups / file).write_text(f"{GIB}\n")
    group(monkeypatch, line)
    assert memory.total_memory() == GIB and (memory.free_memory() or 0) <= GIB


@pytest.mark.parametrize(
    ("folder", "line", "names", "prefix"),
    [
        ("", "0::/", ("memory.max", "memory.current"), ""),
        ("memory", "5:memory:/", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ],
)
def test_memory_that_the_control_group_uses_is_not_free(
    folder: str, line: str, names: tuple[str, str], prefix: str, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, mib = groups / folder, 1 << 20
    place.mkdir(exist_ok=True)
    for name, number in zip(names, (64 * mib, 50 * mib), strict=True):
        (place / name).write_text(f"{number}\n")
    (place / "memory.stat").write_text(f"anon 7\n{prefix}inactive_file {3 * mib}\n{prefix}active_file {mib}\n")
    group(monkeypatch, line)
    assert memory.total_memory() == 64 * mib and memory.free_memory() == 18 * mib


@pytest.mark.parametrize("limit", ["max", str(0x7FFFFFFFFFFFF000), "", None])
def test_an_unlimited_control_group_has_no_limit(limit: str | None, groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if limit is not None:
        (groups / "memory.max").write_text(limit)
    group(monkeypatch, "0::/")
    assert memory.total_memory() == memory._meminfo("MemTotal:")


@pytest.mark.parametrize(
    ("quantization", "has_reader", "growth"),
    [
        (None, False, 1),
        ({"quant_method": "mxfp4"}, False, 4),
        ({"quant_method": "fp8"}, True, 4),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, True, 2),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, True, 6 / 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True, 4),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}, True, 1),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}},
            True,
            4,
        ),
    ],
)
def test_weights_that_are_widened_need_more_memory_than_their_files(
    quantization: dict[str, Any] | None, has_reader: bool, growth: float
) -> None:
    config = LlamaConfig()
    if quantization is not None:
        config.quantization_config = quantization
    reader = FORMATS[quantization["quant_method"]](quantization) if quantization is not None and has_reader else None
    assert growth_of("unknown/name", config, None, reader, RunnerConfig()) == growth
    if quantization is not None:
        assert growth_of("unknown/name", config, None, reader, RunnerConfig(weights="int8")) == 1  # rounded tensor by tensor


@pytest.mark.parametrize(
    ("dtype", "growth"), [("auto", 1), ("float32", 2), (torch.float32, 2), ("bfloat16", 1), ("float16", 1)]
)
def test_weights_that_are_converted_need_the_memory_of_their_new_type(dtype: torch.dtype | str, growth: float) -> None:
    for options in (RunnerConfig(dtype=dtype), RunnerConfig(dtype=dtype, weights="int8")):
        assert growth_of("unknown/name", LlamaConfig(dtype="bfloat16"), None, None, options) == growth
        assert growth_of("unknown/name", LlamaConfig(), None, None, options) == 1  # unknown


@pytest.mark.parametrize(("stored", "stated", "growth"), [("bfloat16", "float32", 2), ("float32", "bfloat16", 0.5)])
def test_what_is_converted_is_seen_in_the_files(stored: str, stated: str, growth: float, tmp_path: Path) -> None:
    """transformers loads the dtype that config.json states, whatever the files hold."""
    save_file(
        {"a.weight": torch.zeros(100, 10, dtype=getattr(torch, stored)), "b": torch.zeros(5)}, tmp_path / "model.safetensors"
    )
    for options in (RunnerConfig(), RunnerConfig(weights="int4")):
        assert growth_of(tmp_path, LlamaConfig(dtype=stated), LlamaForCausalLM, None, options) == growth


@pytest.mark.parametrize("has_archive", [True, False])
def test_files_of_pytorch_are_mapped_only_as_archives(has_archive: bool, tmp_path: Path) -> None:
    torch.save({"a.weight": torch.zeros(10)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=has_archive)
    config, options = (
        LlamaConfig(hidden_size=64, intermediate_size=128, vocab_size=64, dtype="bfloat16"),
        RunnerConfig(weights="int4"),
    )
    assert (growth_of(tmp_path, config, LlamaForCausalLM, None, options) < 0.5) == has_archive


def test_weights_larger_than_memory_are_rejected_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "total_memory", lambda: 1000)
    monkeypatch.setattr("outrider.runner.loading.load_model", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(OutriderError, match=r"^the weights in .* take .*, but this process has .* of memory: choose a smaller"):
        LLM(str(make_folder(tmp_path / "target")))


@pytest.mark.parametrize(("dtype", "bytes_of_16_bits"), [("auto", 2), ("float16", 2), ("float32", 4), (torch.float32, 4)])
def test_only_float8_and_converted_weights_of_a_checkpoint_grow(
    dtype: torch.dtype | str, bytes_of_16_bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {
        "embed.weight": torch.zeros(100, 10, dtype=torch.bfloat16),
        "a.weight": torch.zeros(10, 10).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = LlamaConfig()
    config.quantization_config = {"quant_method": "fp8"}
    reader = FORMATS["fp8"]({"quant_method": "fp8"})
    needed = 1000 * bytes_of_16_bits + 100 * 4
    for total, is_refused in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(memory, "total_memory", lambda total=total: total)
        with pytest.raises(OutriderError, match=r"the weights in .* take") if is_refused else nullcontext():
            fetch_fitting_weights(tmp_path, config, None, reader, RunnerConfig(dtype=dtype))


def test_a_quantised_model_is_not_refused_before_its_download_by_an_upper_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[float] = []
    for module in (footprint, loading):
        monkeypatch.setattr(module, "fetch_weights", lambda _, growth=0.0: bounds.append(growth))
    ModelRunner.load(write(tmp_path / "model", *QUANTISED["fp8-block"]).folder, RunnerConfig(compile="never"))
    assert bounds == [1.0, 0.0]  # 0: no further bound


def test_weights_that_are_not_loaded_are_not_counted(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(b"")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in weight_files.weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert weight_files.weight_files(tmp_path) == []  # reported when it is loaded


def test_the_weights_of_a_cached_hub_id_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    snapshot = make_folder(repository / "snapshots" / "c0ffee")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    assert weight_files.weight_files("some/model") == [snapshot / "model.safetensors"]
    assert weight_files.weight_files("some/other") == []


@pytest.mark.parametrize(("number", "refused"), [(errno.EFAULT, True), (errno.EINVAL, False)])
def test_weights_on_a_failing_disk_are_rejected(
    number: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mapped(checkpoint_files.mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(number, "Bad address")

    folder = make_folder(tmp_path / "target")
    monkeypatch.setattr(checkpoint_files.mmap, "mmap", Mapped)
    if refused:
        with pytest.raises(OutriderError, match=r"^cannot read .*model\.safetensors: the disk reports an error$"):
            check_weight_files(folder)
    else:  # a kernel without this request
        check_weight_files(folder)


@pytest.mark.parametrize(
    ("granted", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 64), ("", 64), (None, 64)]
)
def test_the_cpu_quota_of_the_control_group_limits_the_cores(
    granted: str | None, cores: int, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if granted is not None:
        (groups / "cpu.max").write_text(granted)
    group(monkeypatch, "0::/")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64), raising=False)
    assert memory.num_cores() == cores


@pytest.mark.parametrize(
    ("line", "files", "cores"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 64),
        ("4:cpu,cpuacct:/a/b", {"cpu/cpu.cfs_quota_us": "500000", "cpu/cpu.cfs_period_us": "100000"}, 5),
    ],
)
def test_quotas_of_parents_and_of_version_1_limit_the_cores(
    line: str, files: dict[str, str], cores: int, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    group(monkeypatch, line)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64), raising=False)
    assert memory.num_cores() == cores
