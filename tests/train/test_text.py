"""Reading training text: plain files and all kinds of JSONL lines, and one-line errors for what cannot be read."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from tiny_folder import END, TEXT, make_tokenizer
from tokenizers import processors

from outrider.train.text import check_text_file, read_documents, token_rows
from outrider.types import OutriderError


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_text_is_read_from_plain_files_and_all_kinds_of_lines(tokenizer, tmp_path):
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text(TEXT)
    chat = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "1"}]
    old = [{"from": "human", "value": "add"}, {"from": "gpt", "value": "1"}]
    entries = [{"text": "x = 1"}, {"prompt": "a", "completion": "b"}, {"messages": chat}, {"conversations": old}]
    lines.write_text("\n".join(map(json.dumps, entries)))
    found = [tokenizer.decode(ids) for ids in read_documents(lines, tokenizer)]
    chat_only = [{"text": text, "prompt": None, "messages": chat} for text in (None, "")]
    rest = [{"text": None, "prompt": "a", "completion": "b"}, {"text": ""}]
    lines.write_text("\n".join(map(json.dumps, [*chat_only, *rest])))
    assert [tokenizer.decode(ids) for ids in read_documents(lines, tokenizer)] == [found[2], found[2], "ab", ""]
    lines.write_text("\n".join(map(json.dumps, entries)))
    assert found[:2] == ["x = 1", "ab"] and found[2] == found[3] == "<|user|>add\n<|assistant|>1\n"
    rows = token_rows([plain, lines], tokenizer, 16, 10**6)
    assert tokenizer.decode(rows.flatten().tolist()).startswith(TEXT[:40])
    assert token_rows([plain], tokenizer, 16, 40).shape == (2, 16)
    for kind, content in (("a.txt", TEXT.encode()), ("b.jsonl", lines.read_bytes())):
        packed = tmp_path / f"{kind}.gz"
        packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + content))  # some editors write a byte order mark
        assert list(read_documents(packed, tokenizer)) == list(read_documents(tmp_path / kind, tokenizer))


def test_text_is_read_in_pieces_and_only_as_far_as_needed(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.train.text.PIECE", 100)
    path, read = tmp_path / "a.txt", []
    path.write_text(TEXT * 4)
    (whole,) = read_documents(path, tokenizer)
    assert tokenizer.decode(whole) == TEXT * 4
    counting = SimpleNamespace(
        bos_token_id=None, eos_token_id=1, encode=lambda text, **_: (read.append(text), [5] * len(text))[1]
    )
    missing = tmp_path / "none.txt"
    assert token_rows([path, missing], counting, 16, 70).shape == (4, 16)
    assert len(read) == 1 and read[0] == TEXT[: len(read[0])] and read[0].endswith("\n")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.txt", b"na\xefve", "'utf-8' codec can't decode byte 0xef in position 2"),
        ("a.jsonl", b'{"text": "na\xefve"}', "'utf-8' codec can't decode byte 0xef"),
        ("a.txt", gzip.compress(b"text", mtime=0), "can't decode byte 0x8b"),
        ("a.txt.gz", b"text", "Not a gzipped file"),
        ("a.txt", b"text" + bytes(9), "it has NUL characters, like UTF-16 or binary files"),
        ("a.txt", "plain text".encode("utf-16-le"), "it has NUL characters"),
        ("a.jsonl", json.dumps({"text": "x"}).encode("utf-16-le"), "it has NUL characters"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}' * 9, mtime=0)[:-9], "ended before the end-of-stream marker"),
    ],
)
def test_a_file_that_is_not_text_is_refused(name, content, why, tokenizer, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OutriderError, match=rf"cannot read .*{name}: .*{why}.*; expected UTF-8 text, or JSONL, plain or .gz"):
        list(read_documents(tmp_path / name, tokenizer))
    with pytest.raises(OutriderError, match="is not a file"):
        list(read_documents(tmp_path, tokenizer))


def beginning_tokenizer():
    """Return a tokenizer that writes a begin token before each text."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_every_row_begins_as_a_request_does(tmp_path):
    tokenizer, path = beginning_tokenizer(), tmp_path / "a.txt"
    path.write_text(TEXT)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    (whole,) = read_documents(path, tokenizer)
    rows = token_rows([path, path], tokenizer, 16, 10**6)
    assert rows.dtype == torch.int32 and (rows[:, 0] == begin).all()
    found, given = ([each for each in ids if each != begin] for ids in (rows.flatten().tolist(), 2 * [*whole, end]))
    assert found == given[: len(found)] and len(given) - len(found) < 16  # no token is lost or read twice
    assert token_rows([path], tokenizer, 16, 40).shape == (2, 16)
    lines = tmp_path / "b.jsonl"  # documents of one row have their own begin token
    lines.write_text("\n".join([json.dumps({"text": "x = 1"})] * 3))
    document = [*next(read_documents(lines, tokenizer)), end]
    assert token_rows([lines], tokenizer, len(document), 10**6).tolist() == [document] * 3


def test_a_chat_has_the_begin_token_of_its_template_only(tmp_path):
    tokenizer = beginning_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"messages": [{"role": "user", "content": "add"}]}) + "\n" + json.dumps({"text": "add"}))
    for ids in read_documents(lines, tokenizer):
        assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("written", ["", END, f"{END}\n"])
def test_a_chat_has_one_end_token(written, tokenizer, tmp_path, monkeypatch):
    ending = written.replace("\n", "\\n")
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}{{ '" + ending + "' }}")
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"messages": [{"role": "user", "content": "add"}]})] * 9))
    rows = token_rows([tmp_path / "a.jsonl"], tokenizer, 2, 10**6)
    assert tokenizer.decode(rows.flatten().tolist()).startswith(f"add{written or END}" * 8)


def test_a_chat_keeps_its_tools_tool_calls_and_reasoning(tmp_path):
    """As in OpenAI's files: arguments are a string of JSON, a call has no content, and unused columns are null."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{{ tools[0].function.name }};{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}"
        "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}"
        "{% endif %}|{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    chat = [
        {"role": "user", "content": "go", "tool_calls": None},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "8"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(json.dumps({"messages": chat, "tools": form}) for form in (tools, json.dumps(tools))))
    for ids in read_documents(lines, tokenizer):
        assert tokenizer.decode(ids) == "add;user:go|assistant:hmadd7|tool:8|"


def test_a_chat_is_trained_as_it_is_served(tokenizer, tmp_path, monkeypatch):
    """As messages of a request: the role developer, other names of reasoning, parts of a content, results without one."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}|{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    chat = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "reasoning": "hm", "content": "c"},
        {"role": "tool", "content": None},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}))
    (ids,) = read_documents(tmp_path / "a.jsonl", tokenizer)
    assert tokenizer.decode(ids) == "system:be kind|user:a\nb|assistant:hmc|tool:|"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "line 1: .* .invalid tool_calls 'x': expected a list as in"),
        ({"messages": [{"role": "a", "content": "b"}], "tools": {"a": 1}}, r'line 1: .* \(tools is {"a": 1}, not a list\)'),
        ({"text": "a\ud800"}, "line 1: invalid Unicode: unpaired surrogate at index 1"),
        ({"messages": [{"role": "system", "content": "x"}]}, "line 1: the target's chat template failed: no system role"),
        ([{"text": "a"}], r"line 1: .* \(it is a list, not an object\)"),
        ({"body": 1}, r"line 1: .* \(no 'prompt'\)"),
        ({"messages": []}, r"line 1: .* \(messages is \[\], not a list of messages\)"),
        ({"messages": "hi"}, r'line 1: .* \(messages is "hi", not a list of messages\)'),
        ({"messages": [{"role": "user"}]}, "line 1: .* .invalid content None of a message: expected text"),
        ({"messages": [{"content": "hi"}]}, r"line 1: .* \(no 'role'\)"),
        ({"messages": [{"role": "user", "content": 5}]}, r"line 1: .* \(invalid content 5 of a message: expected text"),
        ({"text": None}, r"line 1: .* \(text is null, not a string\)"),
        ({"text": ["a", "b"]}, r'line 1: .* \(text is \["a", "b"\], not a string\)'),
        ({"prompt": None, "completion": "x"}, r"line 1: .* \(prompt is null, not a string\)"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(entry, message, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    (tmp_path / "a.jsonl").write_text(json.dumps(entry))
    with pytest.raises(OutriderError, match=message):
        list(read_documents(tmp_path / "a.jsonl", tokenizer))


def test_nul_characters_after_the_beginning_are_refused(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.train.text.PIECE", 100)
    (tmp_path / "a.txt").write_text(TEXT * 4 + "\0")
    with pytest.raises(OutriderError, match="NUL characters"):
        list(read_documents(tmp_path / "a.txt", tokenizer))


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.Jsonl.gz"])
def test_jsonl_is_recognised_by_all_its_names(name, tokenizer, tmp_path):
    line = b'{"text": "x = 1"}\n'
    (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith("gz") else line)
    assert [tokenizer.decode(ids) for ids in read_documents(tmp_path / name, tokenizer)] == ["x = 1"]


def test_a_file_that_is_not_text_is_found_without_a_tokenizer(tmp_path):
    for name, content, why in (("a.txt", bytes(5), "NUL"), ("a.jsonl", b"[]", "it is a list"), ("b.txt", b"\xff", "codec")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OutriderError, match=why):
            check_text_file(tmp_path / name)
