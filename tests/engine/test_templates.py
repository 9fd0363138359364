"""Messages and variables are adapted to what the chat templates of several families read."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_folder import make_tokenizer

from outrider.engine.prompts import as_messages, chat_ids
from outrider.engine.templates import as_read_by, variables_for
from outrider.types import OutriderError

LOOP, END = "{% for m in messages %}[{{ m.role }}]", "{% endfor %}"
CONTENT = "{{ m.content }}"
OBJECTS = "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
JOINED = "{% for call in m.tool_calls %}{{ '=' + call.function.arguments }}{% endfor %}"  # DeepSeek
WRITTEN = "{% for call in m.tool_calls %}{{ call.function.arguments | string }}{% endfor %}"  # Apriel
NAMED = "{% for call in m.tool_calls %}{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}"
CHATML = LOOP + CONTENT + OBJECTS + END
QWEN = LOOP + "<think>{{ m.reasoning_content }}</think>" + CONTENT + OBJECTS + END
LFM = LOOP + "{% if m.thinking is defined %}<think>{{ m.thinking }}</think>{% endif %}" + CONTENT + NAMED + "{% endfor %}" + END
LFM_WITHOUT_CALLS = "{{ 'List of tools: [' }}" + LOOP + CONTENT + END
GPT_OSS = (
    LOOP
    + "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    + "<|channel|>analysis{{ m.thinking or m.content }}{% else %}{{ m.content }}{% endif %}"
    + OBJECTS
    + END
)
ALTERNATES = (
    "{% set ns = namespace(index=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
)
MISTRAL = (
    ALTERNATES
    + LOOP
    + "{% if m.content is string %}{{ m.content }}{% else %}{% for block in m.content %}{% if block.type == 'text' %}"
    + "{{ block.text }}{% else %}{{ '[THINK]' + block['thinking'] + '[/THINK]' }}{% endif %}{% endfor %}{% endif %}"
    + OBJECTS
    + END
)
PARTS = LOOP + "{% for part in m.content if part is mapping %}{{ part.text }}{% endfor %}" + END

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CALL: dict[str, Any] = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"city": "Malmö"}}}
SAID: dict[str, Any] = {"role": "assistant", "content": "I ask.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "123456789", "content": "Rain"}


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    """Return the prompt, without the markers of roles."""
    tokenizer = make_tokenizer(chat_template=template)
    text = tokenizer.decode(chat_ids(tokenizer, messages))
    return str(text).replace("[user]", "|").replace("[assistant]", "|").replace("[tool]", "|")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, '|Hi|I ask.{"city": "Malmö"}|Rain'),
        (LOOP + CONTENT + JOINED + END, '|Hi|I ask.={"city": "Malmö"}|Rain'),
        (LOOP + CONTENT + WRITTEN + END, '|Hi|I ask.{"city": "Malmö"}|Rain'),
        (QWEN, '|<think></think>Hi|<think>Hm.</think>I ask.{"city": "Malmö"}|<think></think>Rain'),
        (LFM, "|Hi|<think>Hm.</think>I ask.city=Malmö|Rain"),
        (LFM_WITHOUT_CALLS, 'List of tools: [|Hi|<|tool_call_start|>[f(city="Malmö")]<|tool_call_end|>I ask.|Rain'),
        (GPT_OSS, '|Hi|<|channel|>analysisHm.\n\nI ask.{"city": "Malmö"}|Rain'),
        (MISTRAL, '|Hi|[THINK]Hm.[/THINK]I ask.{"city": "Malmö"}|Rain'),
        (PARTS, "|Hi|I ask.|Rain"),
    ],
)
def test_a_template_shows_reasoning_and_arguments_of_earlier_calls(template: str, expected: str) -> None:
    assert rendered(template, [USER, SAID, RESULT]) == expected


@pytest.mark.parametrize("template", [CHATML, LOOP + CONTENT + WRITTEN + END, LFM_WITHOUT_CALLS, GPT_OSS, MISTRAL, PARTS])
def test_messages_are_not_changed(template: str) -> None:
    messages: list[dict[str, Any]] = [{**USER}, {**SAID, "tool_calls": [{**CALL}]}, {**RESULT}, {**USER}]
    as_read_by(template, messages)
    assert messages == [USER, SAID, RESULT, USER]


def test_other_names_of_a_role_and_of_reasoning_are_known() -> None:
    given = [{"role": "developer", "content": "Be brief."}, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}]
    assert rendered(QWEN, as_messages(given)) == "[system]<think></think>Be brief.|<think>Hm.</think>Yes."


def test_reasoning_alone_has_no_text() -> None:
    assert rendered(MISTRAL, [USER, {**SAID, "content": "", "tool_calls": []}, USER]) == "|Hi|[THINK]Hm.[/THINK]|Hi"
    assert as_read_by(MISTRAL, [SAID | {"content": ""}])[0]["content"] == [{"type": "thinking", "thinking": "Hm."}]


def test_a_user_after_a_result_is_part_of_it_only_where_the_template_requires_it() -> None:
    messages = [USER, SAID, RESULT, {**RESULT, "content": "Snow"}, {**USER, "content": "Well?"}]
    assert rendered(MISTRAL, messages).endswith("|Rain|Snow\n\nWell?")
    assert rendered(CHATML, messages).endswith("|Rain|Snow|Well?")
    with pytest.raises(OutriderError, match="roles must alternate"):
        rendered(MISTRAL, [USER, USER])


@pytest.mark.parametrize(
    ("effort", "expected"), [("none", "low"), ("minimal", "low"), ("low", "low"), ("xhigh", "high"), ("max", "high"), (3, 3)]
)
def test_gpt_oss_gets_an_effort_that_it_knows(effort: Any, expected: Any) -> None:
    given = {"reasoning_effort": effort, "a": "none"}
    assert variables_for(GPT_OSS, given) == {"reasoning_effort": expected, "a": "none"}
    assert variables_for(CHATML, given) == variables_for(None, given) == given
    tokenizer = make_tokenizer(chat_template=GPT_OSS + "{{ reasoning_effort }}")
    assert tokenizer.decode(chat_ids(tokenizer, [USER], variables=given)).endswith(str(expected))
