"""``outrider train``: from a text file to a head that drafts, and one-line errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import TEXT, make_folder

from outrider.heads.checkpoint import write_folder
from outrider.runner import loading

from .test_errors import Run, assert_one_line

FAST = ("--epochs", "0.3", "--batch-tokens", "96", "--seq-len", "24")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 6)
    return path


@pytest.mark.parametrize(
    "kind, method, options",
    [
        ("medusa", "medusa", ("--heads", "2")),
        ("medusa", "medusa", ("--heads", "2", "--draft-vocab", "100")),
        ("eagle", "eagle", ("--generation", "1", "--regenerate", "--prompt-len", "8")),
        ("mtp", "mtp", ("--steps", "2", "--format", "deepseek")),
        ("dflash", "dflash", ("--block-size", "4", "--layers", "1", "--hidden-states", "1,2", "--markov-rank", "4")),
        (
            "eagle",
            "eagle",
            ("--hidden-states", "0,1,2", "--steps", "2", "--draft-vocab", "100", "--format", "speculators,native"),
        ),
    ],
)
def test_a_head_is_trained_and_drafts(outrider: Run, target: Path, text: Path, tmp_path: Path, kind, method, options) -> None:
    common = ("--target", target, "--text", text, "--out", tmp_path / "head")
    made = outrider("train", kind, *common, *FAST, *options)
    assert made.code == 0, made.err
    assert f"--method {method}" in made.err
    assert outrider("train", kind, *common, *FAST, *options).code == 0  # repeating the command has nothing to do
    used = ("--method", method, "-k", "2", "--max-tokens", "12", "--compile", "never", "--json")
    drafted = outrider("generate", "--target", target, "--draft", tmp_path / "head", *used, "def add(")
    plain = outrider(
        "generate",
        "--target",
        target,
        "-k",
        "0",
        "--max-tokens",
        "12",
        "--compile",
        "never",
        "--json",
        "def add(",
    )
    assert drafted.code == 0, drafted.err
    assert json.loads(drafted.out)["text"] == json.loads(plain.out)["text"]


@pytest.mark.parametrize(
    "kind, options",
    [
        ("draft", ("--layers", "1", "--width", "8", "--loss", "tv", "--on-policy", "0.5", "--prompt-len", "6")),
        ("draft", ("--layers", "1", "--parallel", "3", "--keep", "0.8", "--keep-least", "0.5")),
        ("early-exit", ("--regenerate", "--prompt-len", "8", "--rotation", "2")),
    ],
)
def test_a_model_is_trained_and_drafts(outrider: Run, text: Path, tmp_path: Path, kind, options) -> None:
    target = make_folder(tmp_path / "target", num_hidden_layers=4)
    made = outrider("train", kind, "--target", target, "--text", text, "--out", tmp_path / "made", *FAST, *options)
    assert made.code == 0, made.err
    drafting = ("--draft", tmp_path / "made") if kind == "draft" else ("--method", "early-exit")
    assert " ".join(map(str, drafting)) in made.err
    final = target if kind == "draft" else tmp_path / "made"
    used = ("--target", final, "--max-tokens", "12", "--compile", "never", "--json", "def add(")
    drafted, plain = (
        outrider("generate", *drafting, "-k", "2", *used),
        outrider("generate", "-k", "0", *used),
    )
    assert drafted.code == 0, drafted.err
    assert json.loads(drafted.out)["text"] == json.loads(plain.out)["text"]


def test_usage_errors_of_model_training_are_one_line(outrider: Run, target: Path, text: Path, tmp_path: Path) -> None:
    def train(kind: str, *options: object) -> object:
        return outrider("train", kind, "--target", target, "--text", text, "--out", tmp_path / "made", *FAST, *options)

    assert_one_line(train("draft", "--layers", 0), "--layers 0: expected a whole number, at least 1")
    assert_one_line(train("draft", "--start", target, "--width", 8), "--start determines the sizes: omit --width")
    given = ("--start", target, "--generation", 1, "--hidden-states", "1,2,3")
    assert_one_line(train("eagle", *given), "--hidden-states and --draft-vocab are")
    assert_one_line(train("eagle", "--start", target, "--draft-vocab", 40), "omit --draft-vocab")
    assert_one_line(train("eagle", "--start", target), "is not an EAGLE head: fc.weight is missing")
    assert_one_line(train("medusa", "--start", target, "--heads", 2), "omit --heads")
    assert_one_line(train("dflash", "--start", target, "--markov-rank", 8), "omit --markov-rank")
    assert_one_line(train("draft", "--start", tmp_path / "none"), "none")
    assert_one_line(train("draft", "--from-layers", "first"), "--from-layers")
    assert_one_line(train("draft", "--loss", "mse"), "kl or tv")
    assert_one_line(train("draft", "--parallel", 0), "invalid --parallel 0: expected a whole number, at least 2")
    assert_one_line(train("draft", "--parallel", 1), "invalid --parallel 1: expected a whole number, at least 2")
    assert_one_line(train("draft", "--parallel", 4, "--keep", 0), "invalid --keep 0")
    assert_one_line(train("draft", "--parallel", 40), "rows of 24 tokens are too short for 40 parallel drafts")
    assert_one_line(train("early-exit", "--max-drop", 1.5), "--max-drop 1.5")
    assert_one_line(train("early-exit", "--rotation", 0), "--rotation 0")
    assert_one_line(train("early-exit"), "at least three layers")
    assert_one_line(train("dflash", "--block-size", 1), "invalid --block-size 1: expected a whole number, at least 2")
    assert_one_line(train("dflash", "--markov-rank", -1), "invalid --markov-rank -1: expected a whole number, at least 0")
    assert_one_line(train("dflash", "--hidden-states", "low"), "--hidden-states")
    assert_one_line(train("dflash", "--hidden-states", "1,7"), "has 0 to 2")
    assert_one_line(train("dflash", "--block-size", 23), "rows of 24 tokens are too short for blocks of 23")
    assert_one_line(train("mtp", "--steps", 0), "--steps 0")
    assert_one_line(train("mtp", "--format", "gguf"), "invalid --format 'gguf': expected qwen, deepseek or mimo")
    assert_one_line(train("mtp", "--start", target), "holds no MTP head: none of mtp.fc.weight")


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("eagle", ("--temperature", 0.5), "--temperature needs --regenerate"),
        ("eagle", ("--prompt-len", 10), "--prompt-len needs --regenerate"),
        (
            "eagle",
            ("--regenerate", "--prompt-len", 24),
            "nothing to generate after prompts of 24: expected a lower --prompt-len",
        ),
        ("eagle", ("--regenerate", "--prompt-len", 8, "--temperature", -1), "invalid --temperature -1"),
        ("eagle", ("--generation", 1, "--draft-vocab", 100), "omit them with --generation 1"),
        ("eagle", ("--generation", 1, "--hidden-states", "0,1,2"), "omit them with --generation 1"),
        ("eagle", ("--hidden-states", "1,2"), "invalid hidden states (1, 2): EAGLE-3 reads three"),
        ("medusa", ("--minutes", "nan"), "invalid --minutes nan"),
        ("eagle", ("--minutes", "nan"), "invalid --minutes nan"),
        ("dflash", ("--minutes", "nan"), "invalid --minutes nan"),
        ("dflash", ("--layers", 0), "invalid --layers 0: expected a whole number, at least 1"),
        ("dflash", ("--markov-rank", 4, "--selector-rank", 4), "exclude each other"),
        ("mtp", ("--format", "foo"), "invalid --format 'foo'"),
        ("draft", ("--keep", 0.8), "--keep and --keep-least need --parallel"),
        ("draft", ("--keep-least", 0.3), "--keep and --keep-least need --parallel"),
        ("draft", ("--loss", "foo"), "kl or tv"),
        ("draft", ("--on-policy", 2), "invalid --on-policy 2.0: expected a finite number, at least 0, at most 1"),
        ("draft", ("--on-policy", 0.5, "--prompt-len", 24), "nothing to generate after prompts of 24"),
        ("draft", ("--target", "packed"), "is quantised"),
        ("draft", ("--start", "packed"), "is quantised"),
        ("early-exit", ("--target", "packed"), "is quantised"),
        ("early-exit", ("--minutes", "nan"), "invalid --minutes nan"),
        ("mtp", ("--out", "."), "invalid --out '.': give a named folder"),
        ("mtp", ("--out", "/"), "invalid --out '/': give a named folder"),
        ("mtp", ("--out", ""), "invalid --out '.': give a named folder"),
        ("mtp", ("--out", "TARGET"), "is the model that is read: give another folder"),
        ("mtp", ("--start", "packed", "--out", "packed"), "is the model that is read: give another folder"),
        ("mtp", ("--out", "packed"), "holds a model that was not trained here: give another folder"),
        ("eagle", ("--format", "native,speculators"), "made-speculators holds a model that was not trained here"),
        ("mtp", ("--text", "packed"), "is not a file"),
        ("mtp", ("--text", "binary"), "it has NUL characters"),
    ],
)
def test_errors_are_found_before_the_target_is_loaded(  # noqa: PLR0913 - fixtures
    outrider: Run, target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind, options, message
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the target was loaded")

    packed = make_folder(tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (packed / "config.json").write_text(json.dumps(config))
    shutil.copytree(packed, tmp_path / "made-speculators")
    monkeypatch.setattr("outrider.runner.ModelRunner.load", never)
    monkeypatch.setattr("outrider.runner.loading.load_model", never)
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(9))
    named = {"packed": packed, "TARGET": target, "binary": binary}
    common = ("--target", target, "--text", text, "--out", tmp_path / "made", *FAST)
    assert_one_line(outrider("train", kind, *common, *(named.get(each, each) for each in options)), message)
    assert not (tmp_path / "made").exists() and not (tmp_path / "made-work").exists()


@pytest.mark.parametrize(
    "kind, copies, needed",
    [("draft", 1, "float32 take"), ("early-exit", 3, "float32, with gradients and optimizer state, take")],
)
def test_a_model_for_training_is_loaded_once_if_it_fits_in_float32(
    outrider: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind, copies, needed
) -> None:
    target = make_folder(tmp_path / "target", num_hidden_layers=3, dtype="bfloat16")
    loaded, load, size = [], loading.load_model, (target / "model.safetensors").stat().st_size
    monkeypatch.setattr(loading, "load_model", lambda source, *rest: (loaded.append(source), load(source, *rest))[1])
    train = ("train", kind, "--target", target, "--text", text, "--out", tmp_path / "made", *FAST)
    with monkeypatch.context() as patch:
        patch.setattr("outrider.memory.total_memory", lambda: 2 * copies * size - 1)
        assert_one_line(outrider(*train), f"the weights of {target} in {needed}", "of memory: choose a smaller model")
    assert not loaded
    made = outrider(*train)
    assert made.code == 0, made.err
    assert loaded == [str(target)]
    assert json.loads((tmp_path / "made" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_head_replaces_an_earlier_one_and_no_index_of_its_files_is_left(
    outrider: Run, target: Path, text: Path, tmp_path: Path
) -> None:
    train = ("train", "mtp", "--target", target, "--text", text, "--out", tmp_path / "head", *FAST, "--steps", 1)
    assert outrider(*train).code == 0
    index = tmp_path / "head" / "model.safetensors.index.json"
    index.write_text("{}")
    again = outrider(*train)
    assert again.code == 0, again.err
    assert not index.exists()


def test_a_run_that_was_interrupted_while_it_wrote_the_head_is_repeated(
    outrider: Run, target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any, **rates: object) -> None:
        write_folder(*given, **rates)
        raise KeyboardInterrupt

    train = ("train", "mtp", "--target", target, "--text", text, "--out", tmp_path / "head", *FAST, "--steps", 1)
    with monkeypatch.context() as patch:
        patch.setattr("outrider.heads.mtp_formats.write_folder", interrupted)
        assert outrider(*train).code != 0
    again = outrider(*train)
    assert again.code == 0, again.err


def test_usage_errors_are_one_line(outrider: Run, target: Path, text: Path, tmp_path: Path) -> None:
    def train(*options: object) -> object:
        return outrider("train", "eagle", "--target", target, "--out", tmp_path / "head", *options)

    assert_one_line(train(), "--text")
    assert_one_line(train("--text", tmp_path / "none.txt"), "does not exist")
    assert_one_line(train("--text", text, "--generation", 2), "invalid --generation 2: expected 1 or 3")
    assert_one_line(train("--text", text, "--format", "gguf"), "native, speculators")
    assert_one_line(train("--text", text, "--steps", 0), "--steps 0")
    assert_one_line(train("--text", text, "--epochs", "nan"), "invalid --epochs nan: expected a finite number, above 0")
    assert_one_line(train("--text", text, "--seq-len", 24), "a target with 2 layers", "name three of them")
    assert_one_line(train("--text", text, "--seq-len", 24, "--hidden-states", "0,1,7"), "has 0 to 2")
    assert_one_line(train("--text", text, "--hidden-states", "low"), "--hidden-states")
