"""Every user error is one line on stderr and exit code 2, without a traceback."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import block_checkpoints, mtp_checkpoints, writers
from safetensors.torch import load_file, save_file
from tiny_folder import make_folder, make_tokenizer

from outrider.cli.options import in_flags

Run = Callable[..., "tuple[int, str, str]"]


def assert_one_line(outcome: tuple[int, str, str], *words: str, code: int = 2) -> None:
    exit_code, out, err = outcome
    told = [line for line in err.splitlines() if line.strip()]
    # All lines except durations and the drafter that was found.
    lines = [
        line
        for line in told
        if not line.endswith("...") and not line.startswith(("compiling ", "drafts with ", "method auto: "))
    ]
    assert exit_code == code, err
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    assert "Traceback" not in out + err
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize("command", ["generate", "chat", "compare"])
def test_a_missing_model_folder(outrider: Run, command: str, tmp_path: Path) -> None:
    assert_one_line(outrider(command, "--target", tmp_path / "nowhere", "hi"), "no model folder", "nowhere")


def test_a_model_name_too_long_for_a_path(outrider: Run, target: Path) -> None:
    assert_one_line(outrider("generate", "--target", "x y" * 100, "hi"), "no model folder")
    assert_one_line(outrider("generate", "--target", target, "--draft", "x y" * 100, "hi"), "x yx y")


def test_a_missing_gguf_file(outrider: Run, tmp_path: Path) -> None:
    expected = "expected a folder, a .gguf file or a Hugging Face id owner/name"
    assert_one_line(outrider("generate", "--target", tmp_path / "nope.gguf", "hi"), "nope.gguf", expected)


@pytest.mark.parametrize("command", ["bench", "compare"])
@pytest.mark.parametrize("name", ["model.gguf", "."])
def test_a_gguf_file_cannot_be_inflated(
    outrider: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    (tmp_path / "model.gguf").write_text("GGUF")
    monkeypatch.chdir(tmp_path)
    more = ["hi"] if command == "compare" else []
    outcome = outrider(command, "--target", name, "--inflate", "1b", "--method", "suffix", *more)
    assert_one_line(outcome, "--inflate needs a folder with config.json and 16- or 32-bit weights, not a GGUF file")


def test_a_folder_without_a_model(outrider: Run, tmp_path: Path) -> None:
    assert_one_line(outrider("generate", "--target", tmp_path, "hi"), "config.json is missing")


def test_a_file_instead_of_a_folder(outrider: Run, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("x")
    assert_one_line(outrider("generate", "--target", tmp_path / "model.bin", "hi"), "is a file", "or a .gguf file")


def test_a_file_in_another_format_than_gguf(outrider: Run, tmp_path: Path, target: Path) -> None:
    (tmp_path / "model.gguf").write_text("x")
    for options in (("--target", tmp_path / "model.gguf"), ("--target", target, "--draft", tmp_path / "model.gguf")):
        assert_one_line(outrider("generate", *options, "hi"), "model.gguf is not a GGUF file")


def test_a_hub_id_without_the_hub(outrider: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_one_line(
        outrider("generate", "--target", "nobody/nothing", "hi"), "no model 'nobody/nothing'", "HF_HUB_OFFLINE is set"
    )


def test_a_model_other_than_a_causal_lm(outrider: Run, tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    assert_one_line(outrider("generate", "--target", tmp_path, "hi"), "not a causal language model")


def test_a_config_with_invalid_json(outrider: Run, target: Path, tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert_one_line(outrider("generate", "--target", tmp_path, "hi"), "config")


WRONG_CONFIGS: list[tuple[Any, str]] = [
    ([], "must be an object, got a list"),
    (None, "must be an object"),
    ({"num_attention_heads": 0}, "num_attention_heads=0: expected a whole number from 1 to"),
    ({"num_attention_heads": "x"}, "'num_attention_heads' expected int, got str"),
    ({"num_attention_heads": 3}, "num_attention_heads=3 and num_key_value_heads=2: expected a divisor"),
    ({"num_attention_heads": 8}, "o_proj.weight is [16, 32], expected [16, 64]"),
    ({"num_key_value_heads": 4}, "k_proj.weight is [16, 16], expected [32, 16]"),
    ({"num_hidden_layers": 1}, "belongs to no layer, expected 1 layers"),
    ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
    ({"num_hidden_layers": 10**20}, "from 1 to 10000"),
    ({"num_hidden_layers": 3}, "lacks 9 of the model's tensors"),
    ({"hidden_size": 10**20}, "hidden_size=1000"),
    ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
    ({"hidden_act": "magic"}, "unknown hidden_act 'magic'"),
    ({"dtype": "float99"}, "float99"),
    ({"quantization_config": 3}, "cannot read the config"),
    ({"text_config": 3}, "text_config must be an object"),
    ({"layer_types": 3}, "cannot read the config"),
    ({"model_type": []}, "cannot read the config"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG_CONFIGS)
def test_a_config_with_invalid_values(outrider: Run, wrong: Any, words: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | wrong if isinstance(wrong, dict) else wrong))
    assert_one_line(outrider("generate", "--target", folder, "--compile", "never", "--method", "plain", "hi"), words)


WRONG_HEADS: list[dict[str, Any]] = [
    {"num_key_value_heads": 0},
    {"intermediate_size": -1},
    {"head_dim": 10**20},
    {"rope_theta": "x"},
]


@pytest.mark.parametrize("wrong", WRONG_HEADS)
def test_a_head_with_invalid_config_values(outrider: Run, wrong: dict[str, Any], tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", hidden_size=writers.HIDDEN, num_hidden_layers=6)
    writers.write_eagle3(tmp_path / "head", 320, 64)
    file = tmp_path / "head" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    assert_one_line(outrider("generate", "--target", folder, "--method", f"eagle:draft={file.parent}", "hi"), str(file.parent))


def test_an_mtp_head_with_missing_renamed_or_truncated_tensors(outrider: Run, tmp_path: Path) -> None:
    model = mtp_checkpoints.tiny_target("qwen2", vocab_size=320)
    mtp_checkpoints.write_checkpoint("qwen2", tmp_path, model)
    make_tokenizer().save_pretrained(tmp_path)
    run = ("generate", "--target", tmp_path, "--compile", "never", "--method", "mtp", "--max-tokens", "4", "hi")
    assert outrider(*run)[0] == 0
    name = "model.mtp_layers.0.hidden_layernorm.weight"
    mtp_checkpoints.rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(3)}))
    assert_one_line(outrider(*run), f"{name} has shape [3], expected [32]")
    mtp_checkpoints.rewrite(tmp_path, lambda tensors: tensors.update({f"{name}s": tensors.pop(name)}))
    assert_one_line(outrider(*run), f"lacks 1 of the head's tensors, the first {name}")
    mtp_checkpoints.rewrite(tmp_path, lambda tensors: [tensors.pop(each) for each in list(tensors) if "mtp" in each])
    writers.set_config(tmp_path, num_nextn_predict_layers=1)
    assert_one_line(outrider(*run), "holds no MTP head", "model.mtp_layers.0.input_proj.weight")
    assert_one_line(outrider(*run[:-1], "--draft", tmp_path, "hi"), "holds a draft model, and method 'mtp' needs an MTP head")


def test_a_truncated_renamed_foreign_or_newer_block_drafter(outrider: Run, tmp_path: Path) -> None:
    block_checkpoints.block_target(vocab_size=320).save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    config, head = block_checkpoints.native_config(vocab_size=320), tmp_path / "head"
    block_checkpoints.write(head, config, block_checkpoints.head_tensors())
    run = ("generate", "--target", tmp_path / "target", "--compile", "never", "--max-tokens", "4", "--draft", head, "hi")
    assert outrider(*run)[0] == 0  # the method determines the kind
    run = (*run, "--method", "dflash")
    assert outrider(*run)[0] == 0
    name = "layers.1.mlp.up_proj.weight"
    mtp_checkpoints.rewrite(head, lambda tensors: tensors.update({name: torch.ones(3, 3)}))
    assert_one_line(outrider(*run), f"{name} has shape [3, 3], expected [48, 32]")
    mtp_checkpoints.rewrite(head, lambda tensors: tensors.update({f"{name}s": tensors.pop(name)}))
    assert_one_line(outrider(*run), f"lacks 1 of the head's tensors, the first {name}")
    mtp_checkpoints.rewrite(head, lambda tensors: tensors.update({"candidate_selector.successor_codebook": torch.ones(3)}))
    assert_one_line(outrider(*run), "DFlash 2's path selector (candidate_selector.successor_codebook)")
    writers.write_eagle3(tmp_path / "eagle", 320, 64)
    foreign = (*run[:-2], "--method", f"dflash:draft={tmp_path / 'eagle'}")
    assert_one_line(outrider(*foreign), "holds an EAGLE head, and method 'dflash' needs a block drafter")
    (head / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes()[:500])
    assert_one_line(outrider(*run), str(head))


def test_a_broken_tokenizer(outrider: Run, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    assert_one_line(outrider("generate", "--target", folder, "hi"), "cannot load a tokenizer from")


def test_weights_with_nan(outrider: Run, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_one_line(outrider("generate", "--target", folder, "hi"), "NaN", "layers.1.mlp")


def test_different_vocabularies(outrider: Run, target: Path, other_vocabulary: Path) -> None:
    pair = ("--target", target, "--draft", other_vocabulary)
    assert_one_line(outrider("generate", *pair, "--method", "draft", "hi"), "vocabular", "cross-tokenizer")
    outcome = outrider("generate", *pair, "--max-tokens", 4, "--compile", "never", "hi")
    assert outcome.code == 0 and "different vocabularies" in " ".join(outcome.err.split())


def test_an_unknown_method_lists_the_known_ones(outrider: Run, target: Path) -> None:
    known = ("plain", "draft", "ngram")
    assert_one_line(outrider("generate", "--target", target, "--method", "magic", "hi"), "unknown method 'magic'", *known)
    assert_one_line(outrider("bench", "--target", target, "--method", "ngram,magic"), "unknown method 'magic'", *known)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("sufix", "unknown method 'sufix' (did you mean suffix?); known: plain"),
        ("suffix+drat:min_first=2", "unknown method 'drat' (did you mean draft?)"),
        ("suffix+", "invalid combination 'suffix+': a method is missing after the plus"),
        ("+suffix", "invalid combination '+suffix': a method is missing before the plus"),
    ],
)
def test_a_typo_in_a_method_is_explained(outrider: Run, target: Path, method: str, said: str) -> None:
    assert_one_line(outrider("generate", "--target", target, "--method", method, "hi"), said)


@pytest.mark.parametrize("k", ["-1", "-7", "many", "2.5", ""])
def test_an_invalid_number_of_drafts(outrider: Run, target: Path, k: str) -> None:
    assert_one_line(outrider("generate", "--target", target, "-k", k, "hi"), "--num-draft-tokens")
    assert_one_line(outrider("bench", "--target", target, f"-k=2,{k}"), "--num-draft-tokens")


def test_the_method_draft_without_a_draft(outrider: Run, target: Path) -> None:
    assert_one_line(outrider("generate", "--target", target, "--method", "draft", "hi"), "draft")
    for methods in ("draft", "ngram,suffix+draft"):
        assert_one_line(outrider("bench", "--target", target, "--method", methods), "--draft")


def test_a_prompt_longer_than_the_context(outrider: Run, target: Path) -> None:
    assert_one_line(outrider("generate", "--target", target, "x" * 600), "600", "context", "(--max-len) if the model")


def test_an_empty_prompt(outrider: Run, target: Path) -> None:
    assert_one_line(outrider("generate", "--target", target, ""), "empty")
    assert_one_line(outrider("generate", "--target", target, "-", stdin=""), "empty")


def test_a_prompt_that_is_not_utf_8_is_found_before_loading(
    outrider: Run, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.cli import session

    monkeypatch.setattr(session, "load", lambda *args, **more: pytest.fail("it was loaded"))
    piped = outrider("generate", "--target", target, "-", stdin="caf\udce9")  # as Python reads it in the C locale
    assert_one_line(piped, "standard input is not UTF-8 text", "byte 0xe9 in position 3")
    assert_one_line(outrider("generate", "--target", target, "caf\udce9"), "invalid Unicode: unpaired surrogate at index 3")


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--temperature", "-1", "temperature"),
        ("--top-p", "0", "--top-p"),
        ("--max-tokens", "0", "--max-tokens"),
        ("--stop", "", "stop"),
        ("--verifier", "magic", "unknown verifier"),
        ("--dtype", "int3", "dtype"),
        ("--compile", "perhaps", "compile"),
        ("--device", "abacus", "abacus"),
        ("--max-len", "0", "max-len"),
        ("--temperature", "hot", "invalid --temperature 'hot': expected a finite number"),
        ("--frobnicate", "1", "frobnicate"),
        ("--k", "4", "No such option: --k (use -k)"),  # not --top-k
    ],
)
def test_option_values_out_of_range(outrider: Run, target: Path, option: str, value: str, word: str) -> None:
    assert_one_line(outrider("generate", "--target", target, option, value, "hi"), word)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["serve", "--port", 70000], "invalid --port 70000: expected a whole number"),
        (["demo", "--port", 70000], "invalid --port 70000: expected a whole number"),
        (["bench", "--temperature", -1], "invalid --temperature -1.0: expected"),
        (["generate", "--same-text", "--verifier", "typical", "hi"], "--same-text needs a lossless verifier"),
    ],
)
def test_messages_name_flags(outrider: Run, target: Path, command: list[object], message: str) -> None:
    assert_one_line(outrider(*command, "--target", target), f"error: {message}")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("max_len=512 is reduced", "--max-len 512 is reduced"),
        ("device=cuda:1: omit weights=..., please", "--device cuda:1: omit --weights, please"),
        ("same_text=True: slow; self_check=False disables", "--same-text: slow; --no-self-check disables"),
        ("eagle:draft=a:top_k=2: vocab_size=7, ./seed=1", "eagle:draft=a:top_k=2: vocab_size=7, ./seed=1"),
        ("line 3: invalid max_tokens 0", "line 3: invalid max_tokens 0"),
    ],
)
def test_options_written_as_in_python_are_shown_as_flags(message: str, shown: str) -> None:
    assert in_flags(message) == shown


def test_an_invalid_line_of_prompts_is_named(outrider: Run, target: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": 7}\n')
    assert_one_line(outrider("bench", "--target", target, "--prompts", file), "line 3")
    file.write_text('{"prompt": "a"}\nnot json\n')
    assert_one_line(outrider("bench", "--target", target, "--prompts", file), "line 2")
    file.write_text("")
    assert_one_line(outrider("bench", "--target", target, "--prompts", file), "no prompts")
    assert_one_line(outrider("bench", "--target", target, "--prompts", tmp_path / "missing.jsonl"), "cannot read")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"prompt": "caf\u00e9"}'.encode("latin-1"), "expected UTF-8 text"),
        ('{"prompt": "hi"}'.encode("utf-16"), "expected UTF-8 text"),
        (gzip.compress(b'{"prompt": "hi"}', mtime=0), "expected UTF-8 text, got gzip: its name must end in .gz"),
    ],
)
def test_prompts_that_are_not_text(outrider: Run, target: Path, tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)
    _, _, err = outcome = outrider("bench", "--target", target, "--prompts", file)
    assert_one_line(outcome)
    assert err.endswith(f"error: cannot read {file}: {why}\n")


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["bench", "--method", ""], "invalid method ''"),
        (["bench", "--workloads", ""], "unknown workload ''"),
        (["bench", "serve", "--workloads", ""], "unknown workload ''"),
        (["audit", "--method", ""], "unknown method ''"),
        (["demo", "--port", "0", "--method", ""], "unknown method ''"),
    ],
)
def test_an_empty_value_is_not_the_default(outrider: Run, command: list[str], what: str) -> None:
    assert_one_line(outrider(*command), what)


def test_an_unwritable_output_file(outrider: Run, target: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_one_line(outrider("bench", "--target", target, "--out", tmp_path / "file" / "x.json"), "cannot write --out")
    assert_one_line(outrider("bench", "--target", target, "--out", tmp_path), "cannot write --out")


@pytest.mark.parametrize(
    "options",
    [
        ["--batch", "0"],
        ["--temperature", "-1"],
        ["--workloads", "poems"],
        ["--num-prompts", "0"],
        ["--inflate", "huge"],
    ],
)
def test_bench_axes_out_of_range(outrider: Run, target: Path, options: list[str]) -> None:
    assert_one_line(outrider("bench", "--target", target, *options))


@pytest.mark.parametrize(
    ("command", "option", "value", "expected"),
    [
        ("bench", "--temperature", "0,a", "numbers separated by commas, got 'a'"),
        ("bench", "--batch", "1.5", "whole numbers separated by commas, got '1.5'"),
        ("bench serve", "--concurrency", "a", "whole numbers separated by commas, got 'a'"),
    ],
)
def test_a_list_of_other_values_says_what_was_expected(
    outrider: Run, command: str, option: str, value: str, expected: str
) -> None:
    assert_one_line(outrider(*command.split(), option, value), f"invalid {option} '{value}': expected {expected}")


def test_values_out_of_range_are_found_before_anything_is_loaded(
    outrider: Run, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.cli import session

    def never(*args: object, **more: object) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(session, "load", never)
    monkeypatch.setattr("outrider.bench.inflate.inflated", never)
    few = ["--batch", "1,8", "--num-prompts", "7"]
    seed = ["--seed", str(2**64 - 1)]  # repeats use the following ones
    for options in (["--batch", "4,0"], ["--temperature", "0,-1"], few, ["--batch", "64"], seed):
        assert_one_line(outrider("bench", "--target", target, "--inflate", "8b", *options), options[0].removeprefix("--"))
    for command, most in (("audit", 0), ("doctor", 1), ("tune", 1)):
        assert_one_line(outrider(command, "--target", target, "--max-tokens", most), "--max-tokens")


@pytest.mark.parametrize("command", ["generate", "bench", "audit", "tune"])
@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("suffix:min_prob=2", "min_prob"),
        ("early-exit:layers=two", "invalid layers 'two': expected a whole number"),
        ("suffix+ngram:ngram.max_n=x", "invalid max_n 'x': expected"),
        ("draft:foo=1", "the method has no option foo"),
        ("draft:draft=./nowhere", "no model folder './nowhere'"),
    ],
)
def test_options_and_drafts_of_methods_are_checked_before_loading(
    outrider: Run, target: Path, command: str, method: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from outrider.runner import ModelRunner

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ModelRunner, "load", lambda *args, **more: pytest.fail("it was loaded"))
    more = {"generate": ["hi"], "tune": ["--workloads", "math"]}.get(command, [])
    assert_one_line(outrider(command, "--target", target, "--method", method, *more), said)


def test_a_command_without_arguments(outrider: Run) -> None:
    code, _, err = outrider("train")
    assert code == 2 and "error: no command was given; see outrider train --help" in err


def test_a_misfit_method_is_found_before_others_are_warmed_up(
    outrider: Run, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.bench import grid

    def never(*args: object) -> None:
        raise AssertionError("it was warmed up")

    monkeypatch.setattr(grid, "warm_up", never)
    command = ["bench", "--target", target, "--compile", "never", "--workloads", "math", "--method", "suffix,ngram:max_n=x"]
    assert_one_line(outrider(*command), "ngram:max_n=x: invalid max_n 'x': expected a whole number")
    assert_one_line(
        outrider("audit", "--target", target, "--compile", "never", "-k", 900),
        "--num-draft-tokens it exceeds",
        "context of 512",
    )


def test_bench_prompts_longer_than_the_context(outrider: Run, target: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "x" * 600}))
    assert_one_line(outrider("bench", "--target", target, "--prompts", file), "context", "600")


def test_chat_without_a_template(outrider: Run, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", tokenizer=make_tokenizer(chat_template=None))
    assert_one_line(outrider("chat", "--target", folder, "hi"), "chat template")


def test_no_command_and_unknown_command(outrider: Run) -> None:
    assert_one_line(outrider("frobnicate"), "frobnicate")


def test_debug_shows_the_traceback(outrider: Run, tmp_path: Path) -> None:
    code, _, err = outrider("generate", "--target", tmp_path / "nowhere", "--debug", "hi")
    assert code == 2 and "Traceback" in err and "no model folder" in err


def test_an_internal_error_is_marked(outrider: Run, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.cli import session

    def fail(*args: object, **more: object) -> None:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr(session, "load", fail)
    assert_one_line(outrider("generate", "--target", target, "hi"), "ZeroDivisionError: a b", "--debug", code=1)
