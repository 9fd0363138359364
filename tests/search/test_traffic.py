"""Traffic: formats of lines, precedence of settings, and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import make_tokenizer

from outrider.search.traffic import RecordedPrompt, encoded, read_builtin, read_file
from outrider.types import OutriderError, SamplingParams

DEFAULTS = SamplingParams(max_tokens=40, temperature=0.3)


def written(path: Path, *lines: dict[str, Any]) -> Path:
    file = path / "traffic.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_settings_of_a_line_override_the_command_line(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"prompt": "one"},
        {"prompt": "two", "temperature": 0, "max_tokens": 9, "stop": "x", "top_p": 0.9},
        {"prompt": "three", "max_tokens": 500, "n": 4, "seed": 3, "temperature": None},
    )
    one, two, three = (asked.params for asked in read_file(file, 8, DEFAULTS))
    assert one == SamplingParams(max_tokens=40, temperature=0.3, seed=0)
    assert two == SamplingParams(max_tokens=9, temperature=0.0, stop=("x",), top_p=0.9, seed=1)
    assert three == SamplingParams(max_tokens=40, temperature=0.3, seed=3)


def test_a_minimum_above_the_commands_maximum_is_lowered(tmp_path: Path) -> None:
    file = written(
        tmp_path, {"prompt": "a", "min_tokens": 300}, {"model": "m", "prompt": "b", "min_tokens": 41, "temperature": None}
    )
    first, logged = read_file(file, 8, DEFAULTS)
    assert [(each.params.min_tokens, each.params.max_tokens) for each in (first, logged)] == [(40, 40), (40, 40)]
    assert logged.params.temperature == 1.0  # null is OpenAI's default, too
    with pytest.raises(OutriderError, match="line 1: min_tokens=9 exceeds max_tokens=5"):
        read_file(written(tmp_path, {"prompt": "a", "min_tokens": 9, "max_tokens": 5}), 8, DEFAULTS)


def test_invalid_values_are_refused_and_other_servers_names_accepted(tmp_path: Path) -> None:
    for field, value in [
        ("stop", 5), ("stop", ["a", 1]), ("max_tokens", float("nan")), ("max_tokens", 2.5), ("max_tokens", 0), ("seed", "x"),
        ("seed", 10**400), ("ignore_eos", "no"), ("top_p", True), ("temperature", float("inf")),
    ]:  # fmt: skip
        with pytest.raises(OutriderError, match=rf"line 2: .*{field}") as caught:
            read_file(written(tmp_path, {"prompt": "x"}, {"prompt": "x", field: value}), 1, DEFAULTS)
        assert "\n" not in str(caught.value)
    (asked,) = read_file(written(tmp_path, {"prompt": "x", "top_k": -1, "max_tokens": 7.0, "user": {"a": 1}}), 1, DEFAULTS)
    assert (asked.params.top_k, asked.params.max_tokens) == (0, 7)


def test_bodies_of_requests_are_read_with_their_defaults(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]
    file = written(
        tmp_path,
        {"model": "m", "messages": [{"role": "user", "content": parts}], "max_completion_tokens": 7, "stream": True},
        {"custom_id": "a", "method": "POST", "body": {"model": "m", "prompt": "Hello", "temperature": 0.5}},
    )
    chat, completion = read_file(file, 8, DEFAULTS)
    assert chat.prompt.messages[0]["content"] == "Hi\n there"
    assert chat.params.temperature == 1.0 and chat.params.max_tokens == 7
    assert completion.prompt.text == "Hello" and completion.params.temperature == 0.5


def test_requests_of_a_log_that_cannot_run_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    image = {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}
    logged = [image, {"model": "m", "prompt": [5, 6]}, {"body": {"model": "m", "input": "embed this"}}]
    (asked,) = read_file(written(tmp_path, *logged, {"model": "m", "prompt": "Hello"}), 8, DEFAULTS)
    assert asked.prompt.text == "Hello"
    (warning,) = caplog.messages
    assert "skipped 3 of 4 requests; the first is line 1: invalid content" in warning
    with pytest.raises(OutriderError, match="line 1: invalid content"):
        read_file(written(tmp_path, *logged), 8, DEFAULTS)
    with pytest.raises(OutriderError, match="line 2: "):  # a line written for Outrider is right or is an error
        read_file(written(tmp_path, {"model": "m", "prompt": "Hello"}, {"prompt": [5, 6]}), 8, DEFAULTS)


def test_conversations_with_tools_are_read(tmp_path: Path) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "When?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "a", "content": ""},
    ]
    tools = [{"type": "function", "function": {"name": "now"}}]
    line = {"model": "m", "messages": messages, "tools": tools}
    broken = [{"role": "assistant", "tool_calls": [{**call, "function": {"name": "now", "arguments": "UTC"}}]}]
    other = [
        line | {"messages": broken},
        line | {"tools": ["now"]},
        line | {"messages": [{"role": "assistant", "tool_calls": [1]}]},
    ]
    asked, untold = read_file(written(tmp_path, line, line | {"tool_choice": "none"}, *other), 8, DEFAULTS)
    assert asked.prompt.tools == tuple(tools) and untold.prompt.tools == ()
    assert (
        asked.prompt.messages
        == untold.prompt.messages
        == (
            {"role": "user", "content": "When?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{**call, "function": {"name": "now", "arguments": {"zone": "UTC"}}}],
            },
            {"role": "tool", "content": "", "tool_call_id": "a"},
        )
    )
    tokenizer = make_tokenizer(
        chat_template="{{ messages | length }}{% for tool in tools or [] %} {{ tool.function.name }}{% endfor %}"
    )
    assert [tokenizer.decode(each.prompt) for each in encoded(tokenizer, [asked, untold], 200)] == ["3 now", "3"]
    tokenizer.chat_template = "{{ messages | length }}"  # a model without tools is measured without them
    assert [tokenizer.decode(each.prompt) for each in encoded(tokenizer, [asked], 200)] == ["3"]


def test_a_requests_template_variables_are_applied(tmp_path: Path) -> None:
    line = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    lines = [
        line | {"chat_template_kwargs": {"enable_thinking": False}},
        line | {"reasoning_effort": "none"},
        line | {"reasoning_effort": "low", "verbosity": "high"},
        line | {"chat_template_kwargs": [1]},
    ]
    asked = read_file(written(tmp_path, *lines), 8, DEFAULTS)  # the last one is skipped
    tokenizer = make_tokenizer(chat_template="{{ enable_thinking }}|{{ reasoning_effort }}|{{ verbosity }}")
    assert [tokenizer.decode(each.prompt) for each in encoded(tokenizer, asked, 200)] == ["False||", "False|none|", "|low|high"]


def test_few_prompts_are_spread_over_the_whole_file(tmp_path: Path) -> None:
    file = written(tmp_path, *({"prompt": str(number)} for number in range(10)))
    assert [asked.prompt.text for asked in read_file(file, 5, DEFAULTS)] == ["0", "2", "4", "6", "8"]
    assert len(read_file(file, 50, DEFAULTS)) == 10


def test_built_in_kinds_take_turns() -> None:
    asked = read_builtin(["code", "story"], 5, DEFAULTS)
    assert [each.prompt.workload for each in asked] == ["code", "story", "code", "story", "code"]
    assert len({each.params.seed for each in asked}) == 5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"time": "t", "level": "info", "event": "request", "request_id": "r", "path": "/v1/completions"}, "contains no text"),
        ({"body": 3}, "must be a JSON object"),
        ({"answer": "x"}, 'expected "prompt"'),
        ({"prompt": "x", "temperature": "hot"}, "expected a finite number"),
        ({"prompt": "x", "temperature": -1}, "invalid temperature -1: "),
        ({"prompt": [1, 2]}, "must be a non-empty string"),
    ],
)
def test_an_invalid_line_gives_a_one_line_error(tmp_path: Path, line: dict[str, Any], words: str) -> None:
    with pytest.raises(OutriderError, match=words) as caught:
        read_file(written(tmp_path, line), 8, DEFAULTS)
    assert "\n" not in str(caught.value)


def test_a_long_prompt_keeps_its_end_and_leaves_room_for_the_answer() -> None:
    tokenizer = make_tokenizer()
    asked = read_builtin(["story"], 1, SamplingParams(max_tokens=20))
    (text,) = encoded(tokenizer, asked, 60)
    assert len(text.prompt) == 39
    with pytest.raises(OutriderError, match="no room for a prompt"):
        encoded(tokenizer, asked, 20)
    with pytest.raises(OutriderError, match="no tokenizer"):
        encoded(None, asked, 60)


def test_all_contenders_generate_the_recorded_number_of_tokens() -> None:
    params = SamplingParams(max_tokens=50, temperature=0.7, stop=("x",), stop_token_ids=(3,))
    again = RecordedPrompt([1], params, [4, 5, 6]).replay_params
    assert again == SamplingParams(max_tokens=3, temperature=0.7, ignore_eos=True)
