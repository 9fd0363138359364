"""Built-in prompts, and files of prompts in common formats."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import make_tokenizer

from outrider import OutriderError
from outrider.bench import workloads
from outrider.bench.workload_names import WORKLOADS
from outrider.bench.workloads import Prompt

HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": ""}
GSM8K = {"question": "2 + 2?", "answer": "#### 4"}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Hello", "again"]}
SPEC_BENCH = {"question_id": 300, "category": "translation", "turns": ["Translate: Haus"], "reference": ["house"]}
SPEED_BENCH = {  # as NeMo-Skills prepares it
    "category": "rag",
    "src_id": "7",
    "multiturn": True,
    "messages": [{"role": "user", "content": "Where?"}, {"role": "user", "content": "When?"}],
}


def write(path: Path, *items: Any) -> Path:
    path.write_text("\n".join(json.dumps(item) for item in items) + "\n")
    return path


def asked(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def test_every_workload_has_at_least_twenty_different_prompts() -> None:
    for name in WORKLOADS:
        prompts = workloads.builtin(name)
        said = [prompt.text or json.dumps(prompt.messages) for prompt in prompts]
        assert len(set(said)) == len(said) >= 20
        assert not any("%%" in prompt.text or prompt.text != prompt.text.rstrip("\n") for prompt in prompts)
        assert all(prompt.is_chat == (name == "chat") for prompt in prompts)
    assert len(workloads.builtin("code", 3)) == 3
    with pytest.raises(OutriderError, match="known: code, edit"):
        workloads.builtin("poems")


def test_built_in_prompts_leave_room_in_the_embedded_context() -> None:
    from tokenizers import Tokenizer

    from outrider.family import TARGET

    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    for name in WORKLOADS:
        for prompt in workloads.builtin(name):
            said = prompt.text or "".join(message["content"] for message in prompt.messages)
            assert 15 <= len(tokenizer.encode(said).ids) <= 400


@pytest.mark.parametrize(
    ("item", "workload", "text", "messages"),
    [
        (HUMANEVAL, "humaneval", "def f():\n", ()),
        (GSM8K, "gsm8k", "", asked("2 + 2?")),
        (MT_BENCH, "mt-bench", "", asked("Hello")),
        (SPEC_BENCH, "translation", "", asked("Translate: Haus")),
        ({**SPEC_BENCH, "category": "coding", "src_id": "7", "multiturn": False}, "coding", "", asked("Translate: Haus")),
        (SPEED_BENCH, "rag", "", asked("Where?")),
        ({"prompt_id": 1, "prompt": ["Hello", "again"], "category": "writing"}, "mt-bench", "", asked("Hello")),
        ({"prompt_id": "x", "prompt": "Write", "category": "writing"}, "mine", "Write", ()),
        ({"prompt_id": "x", "prompt": "Write", "category": "x", "messages": [*asked("Write")]}, "mine", "", asked("Write")),
        ({"problem": "1 + 1", "answer": "2", "level": 1}, "math-500", "", asked("1 + 1")),
        ({"task_id": 2, "text": "Write f.", "code": "", "test_list": []}, "mbpp", "", asked("Write f.")),
        ({"task_id": 2, "prompt": "Write f.", "code": "", "test_list": []}, "mbpp", "", asked("Write f.")),
        ({"prompt": "x"}, "mine", "x", ()),
        ({"prompt": "x", "workload": "other"}, "other", "x", ()),
        ({"turns": ["one", "two"]}, "mine", "", asked("one")),
        ({"question": "Why?"}, "mine", "", asked("Why?")),
        ({"messages": [*asked("Hi"), {"role": "assistant", "content": "Yes?", "more": 1}]}, "mine", "",
         (*asked("Hi"), {"role": "assistant", "content": "Yes?"})),
    ],
)  # fmt: skip
def test_the_format_of_a_line_is_recognised_by_its_fields(
    tmp_path: Path, item: dict[str, Any], workload: str, text: str, messages: tuple[dict[str, str], ...]
) -> None:
    assert workloads.from_file(write(tmp_path / "mine.jsonl", item)) == [Prompt(workload, text, messages)]


def test_gzipped_files_are_read_up_to_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl.gz"
    with gzip.open(file, "wt") as stream:
        stream.write("\n".join(map(json.dumps, [HUMANEVAL, MT_BENCH])) + "\n\nnever read\n")
    assert [prompt.workload for prompt in workloads.from_file(file, 2)] == ["humaneval", "mt-bench"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[]", "not a JSON object"),
        ("3", "not a JSON object"),
        ("null", "not a JSON object"),
        ('{"prompt": "x"', "invalid JSON: .* at character 15"),
        ("[" * 100_000, "unreadable JSON"),
        ('{"prompt": ' + "9" * 5000 + "}", "unreadable JSON"),
        ('{"text": "x", "n": 1}', 'expected "prompt", "turns", "messages" or "question", got "text", "n"'),
        ('{"prompt": ""}', '"prompt" must be a non-empty string'),
        ('{"prompt": 3}', '"prompt" must be a non-empty string'),
        ('{"prompt": "a\\ud800"}', '"prompt": invalid Unicode: unpaired surrogate at index 1'),
        ('{"turns": []}', '"turns" must be a'),
        ('{"turns": [""], "category": "qa"}', 'the first of "turns"'),
        ('{"turns": ["x"], "category": 3, "src_id": "1"}', '"workload" must be a string'),
        ('{"prompt": [], "category": "math", "prompt_id": 1}', '"prompt" must be a non-empty list of strings'),
        ('{"messages": [], "category": "qa", "src_id": "1"}', '"messages" must be a non-empty list'),
        (
            '{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"], "category": "qa",'
            ' "src_id": "1"}',
            "lacks this prompt",
        ),
        ('{"messages": [{"role": "user"}]}', "invalid content None of a message"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [{"a": "\\ud800"}]}', '"tools": invalid Unicode'),
        ('{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tokenize": true}}', "without .*tokenize"),
        ('{"prompt": "x", "workload": 3}', '"workload" must be a string'),
    ],
)
def test_an_invalid_line_is_refused_with_its_number_and_reason(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(OutriderError, match=f"line 2: .*{why}"):
        workloads.from_file(file)


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match="cannot read"):
        workloads.from_file(tmp_path / "nothing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(OutriderError, match="contains no prompts"):
        workloads.from_file(tmp_path / "empty.jsonl")


def test_a_damaged_archive_is_refused_and_a_byte_order_mark_accepted(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl.gz"
    whole = gzip.compress(json.dumps(HUMANEVAL).encode())
    file.write_bytes(whole[:10] + b"\xff" * len(whole[10:]))
    with pytest.raises(OutriderError, match="cannot read"):
        workloads.from_file(file)
    marked = tmp_path / "marked.jsonl"
    marked.write_text(json.dumps(HUMANEVAL) + "\n", encoding="utf-8-sig")
    assert workloads.from_file(marked)[0].workload == "humaneval"


def test_a_refusing_template_and_a_missing_tokenizer_are_reported() -> None:
    strict = make_tokenizer(chat_template="{{ raise_exception('roles must take turns') }}")
    with pytest.raises(OutriderError, match=r"rejects these messages \(user\): roles must take turns"):
        workloads.encode(strict, Prompt("chat", messages=asked("Hi")))
    with pytest.raises(OutriderError, match="no tokenizer"):
        workloads.encode(None, Prompt("x", "y"))


def test_chat_uses_the_template_if_there_is_one() -> None:
    prompt = Prompt("chat", messages=(*asked("Hi"), {"role": "assistant", "content": "Yes?"}, *asked("Bye")))
    templated, plain = make_tokenizer(), make_tokenizer(chat_template=None)
    text = templated.decode(workloads.encode(templated, prompt))
    assert text == "<|user|>Hi\n<|assistant|>Yes?\n<|user|>Bye\n<|assistant|>"
    text = plain.decode(workloads.encode(plain, prompt))
    assert text == "Question: Hi\n\nAnswer: Yes?\n\nQuestion: Bye\n\nAnswer:"
