"""A draft whose ids have other meanings is found before it drafts."""

from __future__ import annotations

import json

import pytest
from tiny_folder import make_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from outrider.runner import tokenizers
from outrider.runner.tokenizers import (
    DifferentVocabulary,
    byte_alphabet,
    check_same_files,
    check_same_vocabulary,
    has_tokenizer,
    is_tokenizer_of,
    load_tokenizer,
    token_bytes,
)
from outrider.types import OutriderError


def tokenizer(vocab: dict[str, int], **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="a")), **special)


ABC = {"a": 0, "b": 1, "c": 2}


def refusal(target, draft) -> str:
    with pytest.raises(OutriderError) as error:
        check_same_vocabulary(target, draft)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_same_vocabulary_passes():
    target = make_tokenizer()
    check_same_vocabulary(target, target)
    check_same_vocabulary(target, make_tokenizer(chat_template=None))


def test_swapped_ids_are_named():
    swapped = tokenizer({"a": 0, "b": 2, "c": 1})
    assert "3 tokens each; 'b' is 1 in the target and 2 in the draft" in refusal(tokenizer(ABC), swapped)


def test_a_token_missing_in_the_draft_is_named():
    line = refusal(tokenizer(ABC), tokenizer({"a": 0, "b": 1}))
    assert "3 tokens in the target, 2 in the draft; 1 of the target's are unknown to the draft, the first 'c'" in line


def test_a_token_missing_in_the_target_is_named():
    assert "1 of the draft's are unknown to the target, the first 'd'" in refusal(tokenizer(ABC), tokenizer(ABC | {"d": 3}))


def test_other_special_tokens_are_described_and_accepted():
    told = check_same_vocabulary(tokenizer(ABC, eos_token="b"), tokenizer(ABC, eos_token="c"))
    assert told == "special tokens differ: eos_token_id is 1 in the target, 2 in the draft"
    chat = tokenizer(ABC | {"<user>": 3}, additional_special_tokens=["<user>"])
    assert check_same_vocabulary(chat, tokenizer(ABC)) == "special tokens differ: 1 of them, the first '<user>'"
    assert check_same_vocabulary(tokenizer(ABC), chat) is not None
    renamed = tokenizer(ABC | {"<reserved>": 3}, additional_special_tokens=["<reserved>"])
    assert "2 of them" in check_same_vocabulary(chat, renamed)


def test_an_added_token_with_the_id_of_a_learned_one_is_another_vocabulary():
    refusal(tokenizer(ABC | {"d": 3}), tokenizer(ABC | {"<user>": 3}, additional_special_tokens=["<user>"]))


def test_a_missing_end_of_text_token_is_accepted():
    assert check_same_vocabulary(tokenizer(ABC, eos_token="b"), tokenizer(ABC)) is None


def test_folders_whose_tokenizers_differ_in_special_tokens_are_accepted(tmp_path):
    chat = make_tokenizer()
    chat.add_special_tokens({"additional_special_tokens": ["<user>"]})
    for name, each in (("target", chat), ("draft", make_tokenizer())):
        each.save_pretrained(tmp_path / name)
    check_same_files(tmp_path / "target", tmp_path / "draft")
    make_tokenizer(300).save_pretrained(tmp_path / "other")
    with pytest.raises(DifferentVocabulary):
        check_same_files(tmp_path / "target", tmp_path / "other")


def test_an_id_after_a_gap_has_its_bytes():
    told = json.loads(make_tokenizer().backend_tokenizer.to_str())
    vocab = told["model"]["vocab"]
    last = max(vocab, key=vocab.get)
    was, vocab[last] = vocab[last], 400
    table = token_bytes(PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(told))))
    assert len(table) == 401 and table[was] == b""
    assert table[400] == bytes(byte_alphabet()[character] for character in last)


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model", "qwen.tiktoken", "spiece.spm", "tekken.json"])
def test_a_vocabulary_that_cannot_be_read_is_not_a_missing_one(name, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not has_tokenizer(tmp_path)
    with pytest.raises(OutriderError, match=r"the folder has no tokenizer.json, .*tekken.json.*: copy the tokenizer's files"):
        load_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(b"\0")
    assert has_tokenizer(tmp_path)
    with pytest.raises(OutriderError, match="cannot load a tokenizer from") as error:
        load_tokenizer(tmp_path)
    assert "the folder has no" not in str(error.value)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_a_folder_without_a_vocabulary_has_no_tokenizer(kind, tmp_path):
    """For Qwen's model types transformers returns an empty tokenizer, to which every text is empty."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(OutriderError, match=r"the folder has no tokenizer.json, .*: copy the tokenizer's files"):
        load_tokenizer(tmp_path)


def test_tokenizers_without_files_in_common_cannot_be_compared(tmp_path):
    for name, file in (("target", "tekken.json"), ("draft", "tokenizer.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text('{"model": {"vocab": {}}}')
    with pytest.raises(DifferentVocabulary, match=r"the tokenizers cannot be compared: .*target has no tokenizer.json"):
        check_same_files(tmp_path / "target", tmp_path / "draft")


def test_the_chat_template_may_be_in_a_file_of_its_own(tmp_path):
    """As in the folders of LLaVA and Pixtral."""
    make_tokenizer(chat_template=None).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not load_tokenizer(tmp_path).chat_template
    for content in ("{", "[" * 100_000, "[]", '{"template": "no"}', '{"chat_template": null}', '{"chat_template": ["no"]}'):
        (tmp_path / "chat_template.json").write_text(content)
        assert not load_tokenizer(tmp_path).chat_template
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    assert load_tokenizer(tmp_path).chat_template == "{{ messages }}"
    make_tokenizer(chat_template="own").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).chat_template == "own"


def test_a_tokenizer_belongs_to_every_source_with_equal_files(tmp_path):
    for name in ("target", "draft", "other", "settings"):
        make_tokenizer(300 if name == "other" else 320).save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text("{}")
    own = load_tokenizer(tmp_path / "target")
    assert is_tokenizer_of(own, tmp_path / "target") and is_tokenizer_of(own, tmp_path / "draft")
    (tmp_path / "settings" / "tokenizer_config.json").write_text("{}")
    assert not any(is_tokenizer_of(own, tmp_path / name) for name in ("other", "settings", "missing"))
    assert not is_tokenizer_of(make_tokenizer(), tmp_path / "target")


def test_a_tokenizer_with_tokens_that_its_files_lack_belongs_to_no_source(tmp_path):
    """A draft has no embeddings for them."""
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    own = load_tokenizer(tmp_path)
    own.add_tokens(["<user>"])
    assert not is_tokenizer_of(own, tmp_path)


def test_files_of_another_source_that_cannot_be_read_are_not_equal(tmp_path, monkeypatch):
    for name in ("target", "draft"):
        make_tokenizer().save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text("{}")
    own = load_tokenizer(tmp_path / "target")

    def compare(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tokenizers.filecmp, "cmp", compare)
    assert not is_tokenizer_of(own, tmp_path / "draft")


def test_the_targets_vocabulary_is_read_once_for_all_candidates(tmp_path, monkeypatch):
    for name, size in (("target", 320), ("first", 300), ("second", 301)):
        make_tokenizer(size).save_pretrained(tmp_path / name)
    read, loads = [], json.loads
    monkeypatch.setattr(tokenizers.json, "loads", lambda text: read.append(text) or loads(text))
    for name in ("first", "second"):
        with pytest.raises(DifferentVocabulary):
            check_same_files(tmp_path / "target", tmp_path / name)
    assert len(read) == 3
    make_tokenizer(300).save_pretrained(tmp_path / "target")
    check_same_files(tmp_path / "target", tmp_path / "first")
