"""The fuzzer starts from inputs that are accepted, sees what is wrong, and what it once found stays mended."""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outrider.types import OutriderError

ROOT = Path(__file__).parents[2]
SEEDS = ROOT / "tests" / "fuzz_seeds"


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("fuzz")


@pytest.fixture
def make(fuzz: ModuleType) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(contextlib.closing(fuzz.TARGETS[name]()))


@pytest.mark.parametrize("name", sorted(folder.name for folder in SEEDS.iterdir()))
def test_earlier_findings_are_handled(fuzz: ModuleType, make: Any, name: str) -> None:
    target, files = make(name), sorted((SEEDS / name).iterdir())
    assert files and {file.name: fuzz.attempt(target, file.read_bytes()) for file in files} == dict.fromkeys(
        file.name for file in files
    )


@pytest.mark.parametrize("name", ["plan", "model", "gguf", "head"])
def test_valid_inputs_are_accepted(make: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fuzz_targets

    target = make(name)
    monkeypatch.setattr(fuzz_targets, "refusing", lambda work: work())
    for data in target.valid():
        target.run(data)


def test_formats_have_their_own_valid_inputs(make: Any) -> None:
    formats = {name: {seed.split(b"/", 1)[0] for seed in make(name).valid()} for name in ("quantised", "gguf", "head")}
    assert {b"gptq", b"awq", b"w4a16", b"w8a8", b"fp8-block", b"mxfp4", b"experts"} <= formats["quantised"]
    assert formats["gguf"] == {b"llama", b"qwen2", b"qwen3"}
    assert {b"eagle1", b"eagle3", b"speculators", b"medusa", b"dflash", b"dspark", b"deepseek_v3"} <= formats["head"]


@pytest.mark.parametrize("name", ["of_bytes", "of_toml", "of_safetensors", "of_gguf"])
def test_a_mutation_changes_bytes_and_depends_on_the_seed_alone(fuzz: ModuleType, name: str) -> None:
    mutate = getattr(importlib.import_module("mutations"), name)
    header = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    data = len(header).to_bytes(8, "little") + header + bytes(200)
    if name == "of_toml":
        data = b'target = "here"\nmax_len = 8\n'
    made = [mutate(data, random.Random(seed)) for seed in range(50)]
    assert made == [mutate(data, random.Random(seed)) for seed in range(50)]
    assert sum(each != data for each in made) > 40 and len(set(made)) > 40


def test_what_is_wrong_is_seen(fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuzz_targets import Target, check_refusal, refusing

    def refuse(message: str) -> None:
        raise OutriderError(message)

    class Failing(Target):
        name = "failing"

        def run(self, data: bytes) -> None:
            refusing(lambda: refuse(data.decode()) if data else {}["missing"])

    with contextlib.closing(Failing()) as target:
        assert fuzz.attempt(target, b"a size of 3: expected 4") is None
        assert "KeyError in test_fuzz.py" in fuzz.attempt(target, b"")
        for message in ("", "two\nlines", "x" * 1000, "<class 'int'>", "a Head object at 0x7f"):
            with pytest.raises(Exception, match="error message"):
                check_refusal(message)
    monkeypatch.setattr("sys.argv", ["fuzz.py", "--targets", "plan", "--minutes", "0"])
    assert fuzz.main() == 1  # without cases nothing holds


def test_a_target_that_does_not_start_ends_the_fuzzer(
    fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fuzz.Run("missing", 0, tmp_path)
    monkeypatch.setattr(run, "found", lambda wrong, data: pytest.fail(f"counted as a case: {wrong}"))
    with pytest.raises(SystemExit, match="the target missing does not start"):
        run.run_for(60.0)
