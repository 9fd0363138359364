"""Tokenizers of GGUF files give the ids of the models' own tokenizers, where transformers' reading of the header does not."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf", reason="needs the package gguf")

import gguf_files  # noqa: E402
from gguf import GGMLQuantizationType as Kind  # noqa: E402
from tiny_folder import make_tokenizer  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from outrider.engine.config import load_tokenizer  # noqa: E402
from outrider.engine.prompts import template_of  # noqa: E402
from outrider.runner.loading import load_config  # noqa: E402
from outrider.types import OutriderError  # noqa: E402

NAME = "tokenizer.ggml."
EXAMPLES = Path(__file__).parent.parent / "examples"


def loaded(folder, *args, **kwargs):
    """Return the tokenizer of a file, see ``write``."""
    write(folder, *args, **kwargs)
    return load_tokenizer(folder / "model.gguf")


def write(folder, rule="gpt-2", tokens=None, kind="gpt2", scores=None, bos=None, prefix=None, architecture="llama", types=None):  # noqa: PLR0913
    """Write a file with the tokenizer of ``tiny_folder``, with another rule and other tokens by id."""

    def change(writer):
        entries = writer.kv_data[0]
        entries[NAME + "pre"].value = rule
        entries[NAME + "model"].value = kind
        for index, token in (tokens or {}).items():
            entries[NAME + "tokens"].value[index : index + 1] = [token]
        for index, number in (types or {}).items():
            entries[NAME + "token_type"].value[index] = number
        if prefix is not None:
            writer.add_add_space_prefix(prefix)
        if bos is not None:
            writer.add_bos_token_id(bos)
        if scores is not None:
            del entries[NAME + "merges"]
            writer.add_token_scores(scores)

    gguf_files.write(folder / "model.gguf", gguf_files.make_model(architecture), lambda _: Kind.F16, change)


def test_special_tokens_may_have_any_characters(tmp_path):
    """DeepSeek's have bars outside the byte alphabet; transformers gives them ids beyond the vocabulary."""
    tokenizer, original = loaded(tmp_path, tokens={0: "<｜end｜>"}), make_tokenizer()
    assert tokenizer.eos_token_id == 0 and tokenizer.all_special_ids == [0] and len(tokenizer) == len(original)
    assert tokenizer.encode("def<｜end｜>add") == original.encode("def<|end|>add")
    assert tokenizer.decode([0], skip_special_tokens=True) == ""


def test_a_large_vocabulary_loads_offline(tmp_path):
    """transformers looks for the config of a model whose tokenizer has more than 100,000 tokens."""
    tokenizer = loaded(tmp_path, tokens={index: f"t{index}" for index in range(320, 100_001)})
    assert len(tokenizer) == 100_001 and tokenizer.name_or_path == str(tmp_path / "model.gguf")


def test_a_special_token_of_gpt_2_is_text_in_other_vocabularies(tmp_path):
    tokenizer, text = loaded(tmp_path), "a <|endoftext|> b"
    assert tokenizer.encode(text) == make_tokenizer().encode(text) and max(tokenizer.encode(text)) < 320


@pytest.mark.parametrize(("rule", "joins"), [("llama-bpe", True), ("glm4", True), ("gpt-2", False), ("qwen2", False)])
def test_a_piece_of_text_that_is_a_token_stays_one(rule, joins, tmp_path):
    """Llama 3 has tokens that no merges lead to."""
    ids = loaded(tmp_path, rule, tokens={256: "zqx"}).encode("zqx", add_special_tokens=False)  # in place of an unused byte
    assert (ids == [256]) is joins


@pytest.mark.parametrize(("rule", "adds"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False)])
def test_bos_is_added_by_rule_if_the_file_does_not_say(rule, adds, tmp_path):
    assert (loaded(tmp_path, rule, bos=0).encode("def")[0] == 0) is adds


@pytest.mark.parametrize(
    ("rule", "text", "pieces"),
    [
        ("gpt-2", "12345", ["12345"]),
        ("jais", "12345", ["12345"]),
        ("trillion", "12345", ["12345"]),
        ("command-r", "123", ["1", "2", "3"]),
        ("mellum2", "123", ["1", "2", "3"]),
        ("hunyuan", "123", ["1", "2", "3"]),
        ("stablelm2", "I'LL 123", ["I", "'LL", " ", "1", "2", "3"]),
        ("solar-open", "I'LL 123", ["I", "'LL", " ", "1", "2", "3"]),
        ("glm4", "12345", ["123", "45"]),
        ("minicpm5", "(12345", ["(", "123", "45"]),
        ("jais-2", "12345      x", ["123", "45", "    ", " ", " x"]),
        ("seed-coder", "a);\n12", ["a", ");", "\n", "1", "2"]),
        ("exaone-moe", "ab cd()\n\n12", ["ab cd", "()\n", "\n", "1", "2"]),
        ("youtu", "camelCase12\u4f60\u597d", ["camel", "Case", "1", "2", "\u4f60\u597d"]),
        ("deepseek-v3", "12345", ["123", "45"]),
        ("deepseek-llm", "caf\u00e9 12\n\n", ["caf", "\u00e9", " ", "1", "2", "\n", "\n"]),
        ("deepseek-coder", " a_b!=12", [" a", "_", "b", "!", "=", "1", "2"]),
        ("afmoe", "1234567, 12", ["1", "234", "567", ",", " ", "12"]),
        ("tiny_aya", "1234567 camelCase", ["1", "234", "567", " camel", "Case"]),
        ("superbpe", "a b 1234", ["a b ", "1", "234"]),
        ("viking", "a, b12", ["a", ",", " b", "1", "2"]),
    ],
)
def test_text_is_split_by_the_files_rule(rule, text, pieces, tmp_path, caplog):
    split = loaded(tmp_path, rule).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == pieces
    assert "which is not known here" not in caplog.text


@pytest.mark.parametrize("rule", ["qwen2", "qwen35", "command-r", "tiny_aya"])
def test_text_of_qwen_and_cohere_is_composed_first(rule, tmp_path):
    tokenizer = loaded(tmp_path, rule)
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("caf\u00e9")


def test_llama_2_adds_a_space_before_one(tmp_path):
    """SentencePiece prepends a space to any text; transformers, not to a text that begins with one."""
    tokens = {1: "\u2581", 2: "\u2581\u2581", 3: "\u2581\u2581d"}
    scores = [-1000.0] * 320
    scores[1:4] = [-3.0, -1.0, -2.0]
    tokenizer = loaded(tmp_path, "default", tokens, kind="llama", scores=scores)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(" d", add_special_tokens=False)) == ["\u2581\u2581d"]


@pytest.mark.parametrize(("architecture", "prefix"), [("llama", False), ("gemma3n", False), ("llama", True), ("llama", None)])
def test_text_gets_a_space_only_if_the_file_says_so(architecture, prefix, tmp_path):
    tokens = {1: "\u2581", 2: "d", 3: "\u2581d"}
    scores = [-1000.0] * 320
    scores[1:4] = [-3.0, -2.0, -1.0]
    tokenizer = loaded(tmp_path, "default", tokens, "llama", scores, architecture=architecture, prefix=prefix)
    ids = tokenizer.encode("d", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == (["d"] if prefix is False else ["\u2581d"])
    assert tokenizer.decode(tokenizer.encode(" d", add_special_tokens=False)) == " d"


@pytest.mark.parametrize(("architecture", "takes"), [("phi3", True), ("llama", False)])
def test_special_tokens_of_phi_3_take_the_blanks_after_them(architecture, takes, tmp_path):
    tokens = {1: "\u2581", 2: "Hi", 3: "\u2581Hi", 4: "<s>", 5: "<|user|>", 6: "</s>", 7: "<0x0A>"}
    scores = [-1000.0] * 320
    scores[1:4] = [-3.0, -2.0, -1.0]
    types = {4: 3, 5: 3, 6: 4, 7: 6}
    tokenizer = loaded(tmp_path, "default", tokens, "llama", scores, architecture=architecture, types=types)

    def pieces(text):
        return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))

    blanks = [] if takes else ["\u2581", "<0x0A>"]
    assert pieces("<|user|>\nHi") == ["<|user|>", *blanks, "\u2581Hi" if takes else "Hi"]
    assert pieces("</s> Hi") == ["</s>", *blanks[:1], "\u2581Hi"]
    assert pieces("<s> Hi") == ["<s>", "\u2581", "\u2581Hi"]
    assert (
        tokenizer.decode(tokenizer.encode("<|user|>\nHi", add_special_tokens=False), skip_special_tokens=True).strip() == "Hi"
    )


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        ({7: "<end_of_turn>"}, [0, 7]),  # Gemma's files name the end of the text only
        ({7: "<|end|>", 8: "<|return|>", 9: "<|call|>"}, [0, 8, 9]),  # of gpt-oss; a channel ends with <|end|>
        ({7: "<|end|>", 8: "<|eom_id|>"}, [0, 7, 8]),
        ({}, 0),
    ],
)
def test_a_turn_ends_with_the_tokens_that_are_named_so(tokens, ends, tmp_path):
    write(tmp_path, tokens={0: "</s>", **tokens})
    assert load_config(tmp_path / "model.gguf").eos_token_id == ends


def test_named_chat_templates_of_the_file_are_used(tmp_path):
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools }}"}]

    def change(writer):
        writer.kv_data[0].pop("tokenizer.chat_template", None)
        writer.add_chat_template(templates)

    gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model("llama"), lambda _: Kind.F16, change)
    tokenizer = load_tokenizer(tmp_path / "model.gguf")
    assert template_of(tokenizer) == "plain" and template_of(tokenizer, with_tools=True) == "with {{ tools }}"


def test_a_file_of_an_unsupported_model_is_refused_before_its_tokenizer_is_built(tmp_path, monkeypatch):
    """transformers takes 7 s for the tokenizer."""
    path, model = tmp_path / "model.gguf", gguf_files.make_model("llama")
    gguf_files.write(path, model, lambda _: Kind.F16, lambda w: setattr(w.kv_data[0]["general.architecture"], "value", "odd"))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("it was built"))
    with pytest.raises(OutriderError, match="is a model of architecture odd: supported in GGUF files are"):
        load_tokenizer(path)


def test_a_file_that_names_no_end_of_text_has_none(tmp_path):
    """Not that of transformers' config class."""

    def change(writer):
        writer.kv_data[0].pop(NAME + "eos_token_id")
        writer.kv_data[0][NAME + "tokens"].value[0] = "<odd>"  # <|end|> is known by its name

    gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model("llama"), lambda _: Kind.F16, change)
    assert load_config(tmp_path / "model.gguf").eos_token_id is None


def test_the_example_of_a_proposer_takes_gguf_files(tmp_path, capsys):
    write(tmp_path)
    runpy.run_path(str(EXAMPLES / "custom_proposer.py"))["main"](str(tmp_path / "model.gguf"))
    assert "faults: 0" in capsys.readouterr().out
