"""Packed weights are stored on disk: the next load does not read the 16-bit weights, and damaged files are rebuilt."""

from __future__ import annotations

import errno
import io
import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_folder import make_folder
from tiny_hybrids import hybrid

from outrider import native
from outrider.proposers import draft_model
from outrider.proposers.method import Setting
from outrider.runner import (
    ModelRunner,
    RunnerConfig,
    blocks,
    disk_keys,
    huge_pages,
    linear,
    loading,
    packed_files,
    quantized,
    self_check,
)
from outrider.runner.packed_files import PackedFile
from outrider.types import OutriderError
from outrider.weight_files import weight_bytes

from .rounds import make_model, make_text
from .test_architectures import longrope_model, small_config

pytestmark = pytest.mark.skipif(not native.load(), reason="no C++ compiler")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
INT4 = RunnerConfig(weights="int4", compile="never")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_folder(tmp_path / "model", hidden_size=64, intermediate_size=96)


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """Return the list of sources whose 16-bit weights were read."""
    sources, load = [], loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda source, *args: sources.append(str(source)) or load(source, *args))
    return sources


def logits(runner):
    return runner.extend(["a"], [[token % runner.vocab_size for token in make_text(30, 1)]])[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
def test_the_second_load_does_not_read_the_16_bit_weights(tied, mapped, tmp_path, cache, read, monkeypatch):
    folder = make_folder(tmp_path / "model", hidden_size=64, intermediate_size=96, tie_word_embeddings=tied, dtype="bfloat16")
    monkeypatch.setattr(packed_files, "free_memory", lambda: 0 if mapped else 1 << 40)
    expected = logits(ModelRunner.load(folder, INT4))
    assert len(read) == 1 and len(list(cache.iterdir())) == 1
    for file in folder.glob("*.safetensors"):  # same size and time, but without weights
        times = file.stat().st_atime_ns, file.stat().st_mtime_ns
        file.write_bytes(bytes(file.stat().st_size))
        os.utime(file, ns=times)
    (folder / "generation_config.json").write_text("{ broken" if mapped else '{"eos_token_id": 0}')
    again = ModelRunner.load(folder, INT4)
    assert len(read) == 1
    assert torch.equal(logits(again), expected)
    assert not any(tensor.is_meta for tensor in (*again.model.parameters(), *again.model.buffers()))
    table, head = again.model.get_input_embeddings(), again.model.get_output_embeddings()
    assert (table.packed.data_ptr() == head.packed.data_ptr()) == tied
    assert head.packed.data_ptr() % 64 == 0
    assert again.model.generation_config.eos_token_id == 0


def test_a_checkpoint_with_a_head_that_its_config_ties_to_the_embedding_keeps_both(tmp_path, read):
    folder = make_folder(tmp_path / "model", hidden_size=64, intermediate_size=96, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    expected = logits(ModelRunner.load(folder, INT4))
    again = ModelRunner.load(folder, INT4)
    assert len(read) == 1 and torch.equal(logits(again), expected)


KINDS = (
    *("llama", "gemma2", "gemma3_text", "qwen3", "gpt2", "gpt_neox", "phi3", "cohere", "qwen3_5_text", "bamba", "lfm2"),
    "apertus",  # has buffers without dimensions
    "longrope",  # has a buffer that is created in a pass
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_equal_those_of_the_first_load(kind, dtype, tmp_path, read):
    if kind == "longrope":
        model = longrope_model(**SIZES)
    else:
        model = hybrid(kind) if kind in ("qwen3_5_text", "bamba", "lfm2") else make_model(small_config(kind, **SIZES))
    model.to(dtype).save_pretrained(tmp_path / "model")
    first = ModelRunner.load(tmp_path / "model", INT4)
    again = ModelRunner.load(tmp_path / "model", INT4)
    assert len(read) == 1
    assert torch.equal(logits(again), logits(first))
    assert linear.is_in_blocks(again.model)
    assert again.model.config.to_dict() == first.model.config.to_dict()  # the key of compiled passes


def test_a_target_has_the_files_of_its_number_of_bits(folder, cache):
    """The part of the name that stays the same must not change: files of earlier versions would not be replaced."""
    ModelRunner.load(folder, INT4)
    (file,) = cache.iterdir()
    assert file.name.startswith(f"{PackedFile.of(folder, 4, 'auto').family}-")


def test_each_number_of_bits_and_each_state_of_the_files_has_its_own_file(folder, cache, read):
    ModelRunner.load(folder, INT4)
    ModelRunner.load(folder, RunnerConfig(weights="int8", compile="never"))
    assert len(read) == 2 and len(list(cache.iterdir())) == 2
    weights = folder / "model.safetensors"
    before = logits(ModelRunner.load(folder, INT4))
    make_folder(folder, hidden_size=64, intermediate_size=96, seed=1)
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 10**9))
    after = logits(ModelRunner.load(folder, INT4))
    assert len(read) == 3 and not torch.equal(before, after)
    assert len(list(cache.iterdir())) == 2  # the file of the earlier state was deleted


@pytest.mark.parametrize("name", ["linear.py", "kernels.py", "fp8.py", "blocks.cpp", "codes4.inc"])
def test_a_file_belongs_to_the_code_that_packed_it(name, folder, monkeypatch):
    before, read_bytes = PackedFile.of(folder, 4, "auto"), Path.read_bytes
    monkeypatch.setattr(disk_keys, "own_code", disk_keys.own_code.__wrapped__)  # not cached
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(path) + b"changed" * (path.name == name))
    assert PackedFile.of(folder, 4, "auto").key != before.key


@pytest.mark.parametrize("damage", ["cut", "empty", "an unknown class"])
def test_a_damaged_file_is_rebuilt_with_one_warning(damage, folder, cache, read, caplog):
    expected = logits(ModelRunner.load(folder, INT4))
    (file,) = cache.iterdir()
    if damage == "an unknown class":  # torch's message has several lines
        torch.save({"modules": {"head": Path("x")}}, file)
    else:
        file.write_bytes(file.read_bytes()[:-64] if damage == "cut" else b"")
    assert torch.equal(logits(ModelRunner.load(folder, INT4)), expected)
    (warning,) = [text for record in caplog.records if "does not fit the model" in (text := record.getMessage())]
    assert len(read) == 2 and "\n" not in warning
    ModelRunner.load(folder, INT4)
    assert len(read) == 2


def test_a_file_of_another_model_is_rebuilt(folder, tmp_path, cache, read, caplog, monkeypatch):
    """For example, from a version of a model with other buffers."""
    ModelRunner.load(folder, INT4)
    prepare = loading.prepare_for_passes

    def with_another_buffer(model, by_request):
        model.register_buffer("other", torch.zeros(1))
        return prepare(model, by_request)

    monkeypatch.setattr(loading, "prepare_for_passes", with_another_buffer)
    ModelRunner.load(folder, INT4)
    assert len(read) == 2 and "does not fit the model (its tensor " in caplog.text


def test_a_file_is_kept_when_memory_runs_out(folder, cache, read, monkeypatch):
    ModelRunner.load(folder, INT4)
    monkeypatch.setattr(packed_files, "_fill", raising(MemoryError()))
    with pytest.raises(MemoryError):
        ModelRunner.load(folder, INT4)
    assert len(list(cache.iterdir())) == 1 and len(read) == 1


def test_without_a_cache_folder_loading_continues_with_one_warning(folder, tmp_path, read, caplog, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "cache"))
    first = logits(ModelRunner.load(folder, INT4))
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "the weights are quantised again at the next start" in caplog.text
    assert torch.equal(logits(ModelRunner.load(folder, INT4)), first) and len(read) == 2


class FullDisk(io.RawIOBase):
    """A file on a disk with room for 2,000 bytes. torch raises its own error when writing fails within a tensor."""

    size = 0

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self.size += len(data)
        if self.size > 2000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data)


def test_on_a_full_disk_loading_continues_with_one_warning(folder, cache, monkeypatch, caplog):
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda stored, file: save(stored, FullDisk()))
    ModelRunner.load(folder, INT4)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "No space left" in warnings[0] and "quantised again at the next start" in warnings[0]
    assert not list(cache.iterdir())


def test_a_packed_file_is_mapped_where_memory_is_short(folder, read, monkeypatch):
    ModelRunner.load(folder, INT4)
    monkeypatch.setattr("outrider.memory.total_memory", lambda: 1000)
    monkeypatch.setattr(packed_files, "free_memory", lambda: 1000)
    monkeypatch.setattr(huge_pages, "empty", lambda *_: pytest.fail("weights were copied"))
    ModelRunner.load(folder, INT4)
    assert len(read) == 1


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_only_the_rounded_weights_must_fit_into_memory(weights, tmp_path, monkeypatch):
    sizes = SIZES | {"num_hidden_layers": 8, "dtype": "bfloat16"}
    folder, options = make_folder(tmp_path / "model", **sizes), RunnerConfig(weights=weights, compile="never")
    model = ModelRunner.load(folder, options).model
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    in_file = weight_bytes(folder)
    for total, is_refused in ((int(1.05 * held), False), (int(0.9 * held), True)):
        assert total < in_file
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / str(total)))  # nothing is packed yet
        monkeypatch.setattr("outrider.memory.total_memory", lambda total=total: total)
        with pytest.raises(OutriderError, match=r"the weights in .* take") if is_refused else nullcontext():
            ModelRunner.load(folder, options)
    with pytest.raises(OutriderError, match=r"the weights in .* take"):  # converted weights are copied
        monkeypatch.setattr("outrider.memory.total_memory", lambda: int(1.5 * in_file))
        ModelRunner.load(folder, replace(options, dtype="float32"))


def test_experts_are_copied_before_they_are_rounded(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    make_model(small_config("qwen3_moe", hidden_size=64, moe_intermediate_size=64)).save_pretrained(folder)
    monkeypatch.setattr("outrider.memory.total_memory", lambda: weight_bytes(folder) - 1)
    with pytest.raises(OutriderError, match=r"the weights in .* take"):
        ModelRunner.load(folder, INT4)


def test_a_new_commit_of_a_hub_id_replaces_the_file_of_the_last(tmp_path, cache):
    snapshots = tmp_path / "models--a--b" / "snapshots"
    files = []
    for commit in ("c0", "d0"):
        ModelRunner.load(make_folder(snapshots / commit, hidden_size=64, intermediate_size=96), INT4)
        files.append([file.name for file in cache.iterdir()])
    assert len(files[0]) == len(files[1]) == 1 and files[0] != files[1]


def draft_of(path, **options):
    target = ModelRunner.load(make_model(small_config("llama")), RunnerConfig(compile="never"))
    return draft_model.load_draft(Setting(target, draft=path), draft_model.DraftOptions(**options))


@pytest.mark.parametrize(
    "kind",
    ["folder", "llama", "llama, 5 bits", "gemma3", "gpt-oss", "phi3", "falcon-h1", pytest.param("folder, untied", id="untied")],
)
def test_a_rounded_draft_is_stored_with_its_values(kind, tmp_path, cache, read, monkeypatch):
    monkeypatch.setattr(quantized, "MAX_16_BIT_BYTES", 0)
    path = tmp_path / "draft.gguf"
    if kind.startswith("folder"):
        path = make_folder(tmp_path / "draft", hidden_size=64, tie_word_embeddings=kind == "folder", dtype="bfloat16")
    else:
        pytest.importorskip("gguf")
        import gguf_files

        def kind_of(name):  # layers with one input may have the same form only when they are rounded
            return gguf_files.Kind.Q5_K if kind.endswith("5 bits") and "_v" not in name else gguf_files.mixed(name)

        gguf_files.write(path, gguf_files.make_model(kind.partition(",")[0]), kind_of)
    first = draft_of(path)
    again = draft_of(path)
    assert len(read) == 1 and len(list(cache.iterdir())) == 1
    assert {blocks.bits_of(layer.packed) for layer in linear.packed_layers(again.model)} == {4}
    assert torch.equal(logits(again), logits(first))
    assert again.model.config.to_dict() == first.model.config.to_dict()
    assert draft_of(path, bits=16).file is None and len(read) == 2
    assert {blocks.bits_of(layer.packed) for layer in linear.packed_layers(draft_of(path, bits=8).model)} != {4}


def test_a_small_draft_is_not_stored(tmp_path, cache):
    draft_of(make_folder(tmp_path / "draft"))
    assert not cache.exists()


def test_a_large_model_is_checked_once_for_each_state_of_its_files(folder, tmp_path, monkeypatch):
    checked, own_logits = [], self_check._own_logits
    monkeypatch.setattr(self_check, "_own_logits", lambda *args: checked.append(args) or own_logits(*args))
    monkeypatch.setattr(self_check, "MIN_BYTES", 0)
    eager = RunnerConfig(compile="never")
    for config, expected in ((eager, 1), (eager, 1), (replace(eager, dtype="bfloat16"), 2), (INT4, 3), (INT4, 3)):
        ModelRunner.load(folder, config)
        assert len(checked) == expected
    os.utime(folder / "model.safetensors", ns=(0, 10**9))
    ModelRunner.load(folder, eager)
    assert len(checked) == 4
    monkeypatch.setattr(disk_keys, "code_of", lambda _: "changed")
    ModelRunner.load(folder, eager)
    assert len(checked) == 5
    ModelRunner.load(make_model(small_config("llama")), eager)
    ModelRunner.load(make_model(small_config("llama")), eager)
    assert len(checked) == 7


def test_folders_and_broken_links_beside_the_code_are_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(native.build, "FOLDER", tmp_path)
    (tmp_path / "kernel.cpp").write_text("int a;")
    before = disk_keys.own_code.__wrapped__()
    (tmp_path / "backup.h").mkdir()
    (tmp_path / "other.cpp").symlink_to("missing")
    assert disk_keys.own_code.__wrapped__() == before
    (tmp_path / "kernel.cpp").write_text("int b;")
    assert disk_keys.own_code.__wrapped__() != before


def test_a_model_that_fails_the_self_check_is_checked_again(folder, monkeypatch):
    monkeypatch.setattr(self_check, "MIN_BYTES", 0)
    own_logits = self_check._own_logits
    monkeypatch.setattr(self_check, "_own_logits", lambda *args: own_logits(*args) + 100)
    for _ in range(2):
        with pytest.raises(OutriderError, match="gives different logits"):
            ModelRunner.load(folder, RunnerConfig(compile="never"))
