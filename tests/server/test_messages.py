"""Anthropic's Messages API: the same answers as chat, whole and as events, and errors in its format."""

from __future__ import annotations

import itertools
import json
from time import monotonic
from typing import Any

import httpx
import pytest

from outrider.server.config import Client, KeyRing
from outrider.server.messages import CountBody

from . import test_tools
from .served import TLS, Served, serving
from .test_tools import ARGUMENTS, AT_ONCE, CALL, REPLY, TOOLS, USER, Says, chat

tooled, says, failing = test_tools.tooled, test_tools.says, test_tools.failing  # fixtures

CUSTOM: list[Any] = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description"),
        "input_schema": tool["function"].get("parameters", {"type": "object", "properties": {}}),
        "cache_control": {"type": "ephemeral"},
    }
    for tool in TOOLS
]
SHOWN = [  # to the chat template
    {
        "type": "function",
        "function": {"name": tool["name"], "description": tool["description"] or "", "parameters": tool["input_schema"]},
    }
    for tool in CUSTOM
]
ASKED: dict[str, Any] = {"model": "outrider", "messages": [USER], "tools": CUSTOM, "max_tokens": 400}
ASKED |= {"thinking": {"type": "enabled"}}
THINKS: dict[str, Any] = {"enable_thinking": True, "thinking": True}
THINKS_NOT = {"enable_thinking": False, "thinking": False}
FIELD_OF_DELTA = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
FIELD_OF_DELTA |= {"input_json_delta": "partial_json"}


def send(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.post("/v1/messages", **ASKED | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "outrider")
    return found


def streamed(served: Served, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, which have names."""
    answer = served.post("/v1/messages", **ASKED | body, stream=True)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    pairs = [event.split("\n") for event in answer.text.removesuffix("\n\n").split("\n\n")]
    events: list[dict[str, Any]] = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    return events


def collected(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client collects from events. One block is extended at a time."""
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == ["message_start", "message_delta", "message_stop"]
    message, blocks, is_open = events[0]["message"], [], False
    for event in events[1:-2]:
        kind = event["type"].removeprefix("content_block_")
        assert is_open == (kind != "start") and event["index"] == len(blocks) - (kind != "start")
        is_open = kind != "stop"
        if kind == "start":
            blocks.append(dict(event["content_block"]))
        elif kind == "delta":
            name = FIELD_OF_DELTA[event["delta"]["type"]]
            blocks[-1][name] = blocks[-1].get(name, "") + event["delta"][name]
        elif blocks[-1]["type"] == "tool_use":
            assert blocks[-1]["input"] == {}
            blocks[-1]["input"] = json.loads(blocks[-1].pop("partial_json"))
    assert not is_open
    return message | events[-2]["delta"] | {"content": blocks, "usage": message["usage"] | events[-2]["usage"]}


def lasting(message: dict[str, Any]) -> dict[str, Any]:
    """Return what is the same in two answers to one request."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {"content": content, "stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}


def kinds(message: dict[str, Any]) -> list[str]:
    return [block["type"] for block in message["content"]]


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    """Return status, type and message of an error in Anthropic's format."""
    body = answer.json()
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return answer.status_code, body["error"]["type"], body["error"]["message"]


def test_an_answer_equals_that_of_chat(tooled: Served) -> None:
    wanted = chat(tooled, messages=[{"role": "system", "content": "Be brief."}, USER], tools=None, max_tokens=24, **AT_ONCE)
    answers = [
        send(tooled, system=system, tools=None, max_tokens=24, **AT_ONCE)
        for system in ("Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    ]
    for answer in answers:
        assert answer["content"] == [{"type": "text", "text": wanted["choices"][0]["message"]["content"]}]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
        usage = answer["usage"]
        assert usage["cache_read_input_tokens"] > 0 == usage["cache_creation_input_tokens"]  # of the request before
        num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert (num_prompt, usage["output_tokens"]) == (wanted["usage"]["prompt_tokens"], 24)
        assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_settings_of_sampling_reach_the_engine(tooled: Served) -> None:
    sampled = {"temperature": 1.2, "top_p": 0.9, "seed": 5, "top_k": 40, "speculative": {"num_draft_tokens": 0}, **AT_ONCE}
    wanted = chat(tooled, tools=None, max_tokens=16, **sampled)["choices"][0]["message"]["content"]
    answer = send(tooled, tools=None, max_tokens=16, **sampled)
    assert answer["content"][0]["text"] == wanted and "metrics" not in answer
    assert wanted != send(tooled, tools=None, max_tokens=16, **AT_ONCE)["content"][0]["text"]


@pytest.mark.parametrize("interval", [0.0, 0.02])
def test_a_stream_has_the_whole_answer(tooled: Served, says: Says, interval: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tooled.service.bridge, "interval", interval)
    says(REPLY, REPLY)
    whole, events = send(tooled), streamed(tooled)
    assert whole["content"][:2] == [
        {"type": "thinking", "thinking": "I should ask.", "signature": ""},
        {"type": "text", "text": "Let me see."},
    ]
    assert kinds(whole)[2:] == ["tool_use"] * 2 and whole["stop_reason"] == "tool_use"
    assert [(block["name"], block["input"]) for block in whole["content"][2:]] == [("weather", ARGUMENTS)] * 2
    assert whole["content"][2]["id"] != whole["content"][3]["id"]
    assert lasting(collected(events)) == lasting(whole)
    opening = events[0]["message"]
    assert (opening["content"], opening["stop_reason"], opening["usage"]["output_tokens"]) == ([], None, 0)
    assert opening["usage"]["input_tokens"] == sum(whole["usage"].values()) - whole["usage"]["output_tokens"]
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert [kind for kind, _ in itertools.groupby(deltas)] == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
    ]


def test_a_text_after_a_call_is_a_block_of_its_own(tooled: Served, says: Says) -> None:
    says(f"One.{CALL}Two.")
    answer = send(tooled)
    assert kinds(answer) == ["text", "tool_use", "text"] and answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize("text", ["", "<think>Hm.</think>"])
def test_a_complete_answer_without_text_has_an_empty_one(tooled: Served, says: Says, text: str) -> None:
    says(text, text)
    answer = send(tooled)
    assert answer["content"][-1] == {"type": "text", "text": ""} and answer["stop_reason"] == "end_turn"
    assert lasting(collected(streamed(tooled))) == lasting(answer)


def test_the_reason_of_the_end_is_named(tooled: Served, says: Says) -> None:
    says("One, two, three.")
    assert lasting(send(tooled, stop_sequences=["never", " three"])) == {
        "content": [{"type": "text", "text": "One, two,"}],
        "stop_reason": "stop_sequence",
        "stop_sequence": " three",
    }
    says(f"{CALL} Now.")
    assert send(tooled, stop_sequences=["Now"])["stop_reason"] == "stop_sequence"
    says(REPLY)
    answer = send(tooled, max_tokens=5)
    assert (kinds(answer), answer["stop_reason"]) == (["thinking"], "max_tokens")
    says(" the" * 50)
    filling = [{"role": "user", "content": "x" * (tooled.llm.runner.max_len - 60)}]
    assert send(tooled, messages=filling, max_tokens=9000, tools=None)["stop_reason"] == "model_context_window_exceeded"
    says("One.")
    assert send(tooled, stop_token_ids=[0], tools=None)["stop_reason"] == "end_turn"


def test_an_answer_goes_back_as_it_came(tooled: Served, says: Says) -> None:
    says(f"<think>Hm.</think>Let me see.{CALL}", "It rains.")
    first = send(tooled)
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "Rain.", "is_error": False}
    messages = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    answer = send(tooled, messages=messages)
    assert answer["content"] == [{"type": "text", "text": "It rains."}]
    function = {"name": "weather", "arguments": ARGUMENTS}
    calls = [{"id": result["tool_use_id"], "type": "function", "function": function}]
    said = {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": calls}
    prompt = tooled.llm.chat_prompt([USER, said, {"role": "tool", "tool_call_id": calls[0]["id"], "content": "Rain."}], SHOWN)
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == len(prompt)


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content, "citations": None}


def test_blocks_are_translated_into_messages() -> None:
    call = {"type": "tool_use", "name": "now", "input": {"a": 1}, "caller": {"type": "direct"}}
    thinking = {"type": "thinking", "signature": "x"}
    messages = [
        {"role": "system", "content": "C"},
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "user", "content": "c"},
        {"role": "system", "content": [text("D")]},
        {"role": "assistant", "content": [thinking | {"thinking": "S"}, text("T"), call | {"id": "1"}, call | {"id": "2"}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [text("o"), text("p")]},
                {"type": "tool_result", "tool_use_id": "2", "is_error": True, "content": "no"},
                text("d"),
            ],
        },
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("U"), text("V")]},
        {"role": "assistant", "content": [thinking | {"thinking": "R"}, call | {"id": "3"}]},
        {"role": "assistant", "content": "W"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "3"}]},
    ]
    function = {"name": "now", "arguments": {"a": 1}}
    calls = [{"id": number, "type": "function", "function": function} for number in "12"]
    system = [text("x-anthropic-billing-header: cc_version=1;"), text("A"), text("B")]
    body = CountBody.model_validate({"system": system, "messages": messages}).chat()
    assert [each.for_template() for each in body.messages] == [
        {"role": "system", "content": "A\n\nB\n\nC"},
        {"role": "user", "content": "a\nb\nc\n<system-reminder>\nD\n</system-reminder>"},
        {"role": "assistant", "content": "T", "reasoning_content": "S", "tool_calls": calls},
        {"role": "tool", "content": "o\np", "tool_call_id": "1"},
        {"role": "tool", "content": "Error: no", "tool_call_id": "2"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "UV\nW", "reasoning_content": "R", "tool_calls": [calls[0] | {"id": "3"}]},
        {"role": "tool", "content": "", "tool_call_id": "3"},
    ]


@pytest.mark.parametrize("system", ["x-anthropic-billing-header: cc_version=1;\n\nBe brief.", "Be brief."])
def test_a_line_about_billing_is_left_out(system: str) -> None:
    first = CountBody(messages=[USER], system=system).chat().messages[0]  # type: ignore[list-item]
    assert (first.role, first.content) == ("system", "Be brief.")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_calls_can_be_forced(tooled: Served, choice: dict[str, Any]) -> None:
    asked = {"tool_choice": choice | {"disable_parallel_tool_use": True}, **AT_ONCE}
    whole, events = send(tooled, **asked), streamed(tooled, **asked)
    assert (kinds(whole), whole["stop_reason"]) == (["tool_use"], "tool_use")
    assert lasting(collected(events)) == lasting(whole)
    assert [event["type"] for event in events].count("content_block_delta") > 1 or choice["type"] == "any"


def test_a_forced_call_that_was_truncated_has_no_input(tooled: Served) -> None:
    answer = send(tooled, tool_choice={"type": "tool", "name": "weather"}, max_tokens=4, **AT_ONCE)
    assert (kinds(answer), answer["stop_reason"], answer["content"][0]["input"]) == (["tool_use"], "max_tokens", {})


def test_many_turns_of_one_role_are_joined_at_once() -> None:
    """Appending each to the last one copied the text of all that came before."""
    turns = [{"role": "user", "content": 20_000 * "x"}] * 4096
    started = monotonic()
    (message,) = CountBody.model_validate({"messages": turns}).chat().messages
    assert len(message.content or "") == 4096 * 20_001 - 1 and monotonic() - started < 10


def test_only_the_first_call_is_returned_if_one_is_allowed(tooled: Served, says: Says) -> None:
    says(REPLY)
    answer = send(tooled, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert kinds(answer) == ["thinking", "text", "tool_use"]


def test_tools_that_cannot_be_called_are_not_shown(tooled: Served, says: Says) -> None:
    says(CALL)
    answer = send(tooled, tool_choice={"type": "none"})
    assert answer["content"] == [{"type": "text", "text": CALL}]
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    assert [tool["function"]["name"] for tool in CountBody(messages=[USER], tools=[hosted, *CUSTOM]).chat().template_tools] == [
        "weather",
        "now",
    ]


@pytest.mark.parametrize(
    ("body", "variables"),
    [
        ({"thinking": {"type": "disabled"}}, THINKS_NOT),
        ({"thinking": None}, THINKS_NOT),  # the default of Anthropic's API
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, THINKS),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, THINKS | {"reasoning_effort": "high"}),
        ({"thinking": None, "output_config": {"effort": "max"}}, THINKS_NOT | {"reasoning_effort": "max"}),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    ],
)
def test_thinking_and_effort_reach_the_template(tooled: Served, body: dict[str, Any], variables: dict[str, Any]) -> None:
    assert CountBody.model_validate(ASKED | body).chat().variables == variables
    num_tokens = tooled.post("/v1/messages/count_tokens", **ASKED | body).json()
    assert num_tokens == {"input_tokens": len(tooled.llm.chat_prompt([USER], SHOWN, variables))}


def test_reasoning_can_be_left_out(tooled: Served, says: Says) -> None:
    says(REPLY, REPLY)
    for body in ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"include_reasoning": False}):
        assert kinds(send(tooled, **body)) == ["text", "tool_use", "tool_use"]


def test_json_with_a_schema_can_be_asked_for(tooled: Served) -> None:
    form = {"format": {"type": "json_schema", "schema": {"enum": ["Oslo", "Lima"]}}}
    answer = send(tooled, tools=None, output_config=form, **AT_ONCE)
    assert json.loads(answer["content"][0]["text"]) in ("Oslo", "Lima") and answer["stop_reason"] == "end_turn"


def test_the_tokens_of_a_prompt_are_counted(tooled: Served) -> None:
    conversation = {name: value for name, value in ASKED.items() if name != "max_tokens"} | {"system": "Be brief."}
    answer = tooled.post("/v1/messages/count_tokens", **conversation)
    usage = send(tooled, system="Be brief.", max_tokens=1)["usage"]
    assert answer.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    last = {"role": "assistant", "content": "Rain."}
    longer = tooled.post("/v1/messages/count_tokens", **conversation | {"messages": [USER, last]})
    assert longer.json()["input_tokens"] > answer.json()["input_tokens"]
    assert error_of(tooled.post("/v1/messages/count_tokens", messages=[]))[:2] == (400, "invalid_request_error")


def test_fields_that_change_nothing_are_accepted(tooled: Served) -> None:
    claude_code = {"context_management": {"edits": []}, "metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}}
    neutral = {"service_tier": "auto", "stop_sequences": [], "speed": "standard", "diagnostics": {"previous_message_id": None}}
    tools = [tool | {"allowed_callers": ["direct"], "defer_loading": False} for tool in CUSTOM]
    asked: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    full = send(tooled, **asked, tools=tools, **neutral, **claude_code)
    assert full["content"] == send(tooled, **asked)["content"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_thread_is_refused_with_the_details_that_clients_read(tooled: Served, path: str) -> None:
    """Anthropic's client then sends the whole conversation without it."""
    for more in ({}, {"temperature": -1}):  # another error does not hide them
        answer = tooled.post(path, **ASKED | {"thread": {"type": "create"}} | more)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        told = "thread: the server stores no conversations: send all messages, without thread"
        assert told in answer.json()["error"]["message"]
    assert tooled.post(path, **ASKED | {"thread": None, "max_tokens": 1}).status_code == 200


def test_the_id_of_a_call_is_sent_in_anthropics_header(tooled: Served) -> None:
    body = {"messages": [USER], "max_tokens": 1}
    for path, names in (("/v1/messages", {"request-id", "x-request-id"}), ("/v1/chat/completions", {"x-request-id"})):
        answer = httpx.post(tooled.url + path, json=body, headers={"x-request-id": "mine"}, verify=TLS)
        assert {name for name, value in answer.headers.items() if value == "mine"} == names


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"max_tokens": None}, "max_tokens: missing"),
        ({"max_tokens": 0}, "max_tokens: expected a value greater than or equal to 1"),
        ({"messages": [{"role": "cat", "content": "a"}]}, "messages.0.role: expected 'user', 'assistant' or 'system'"),
        (
            {"messages": [USER, {"role": "assistant", "content": "It is"}]},
            "the last message is the assistant's: expected the user's, because answers do not continue a text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "messages.0.content.0: unsupported block 'image': expected text, tool_use, tool_result or thinking",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "now", "input": {}}]}]},
            "messages.0: unsupported block 'tool_use' in a message with role user: expected text or tool_result",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]}
                ]
            },
            'messages.0.content.0.content.0: unsupported part \'image\': expected {"type": "text", "text": ...}',
        ),
        ({"system": [{"type": "image"}]}, 'system.0: unsupported part \'image\': expected {"type": "text", "text": ...}'),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            'tools.0: unsupported tool \'bash_20250124\': expected {"name": ..., "input_schema": ...}',
        ),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: missing"),
        ({"tools": [CUSTOM[0]] * 2}, "tools: 'weather' occurs more than once"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: type tool needs name: the tool to call"),
        ({"tool_choice": {"type": "auto", "name": "now"}}, "tool_choice: name needs type: tool"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: unknown tool 'x': expected one of weather, now"),
        ({"stop": ["x"]}, "stop: expected stop_sequences"),
        ({"response_format": {"type": "text"}}, "response_format: expected output_config.format"),
        ({"stream_options": {"include_usage": True}}, "stream_options: every stream has the usage: leave it out"),
        (
            {"messages": [{"role": "user", "content": []}]},
            "messages have no blocks: expected at least one message with a text or a block",
        ),
        ({"container": "c"}, "container: unknown field"),
        ({"tools": [CUSTOM[0] | {"defer_loading": True}]}, "tools.0.defer_loading: expected False"),
        (
            {"tools": [CUSTOM[0] | {"allowed_callers": ["code_execution_20250825"]}]},
            "tools.0.allowed_callers.0: expected 'direct'",
        ),
        ({"system": "x", "messages": [USER, {"role": "assistant", "content": "y"}] * 2047 + [USER] * 2}, None),
        (
            {"system": "x", "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}] * 4096},
            "messages: too many messages: the limit is 4096",
        ),
    ],
)
def test_what_is_not_supported_is_refused_in_plain_words(tooled: Served, body: dict[str, Any], told: str | None) -> None:
    answer = tooled.post("/v1/messages", **ASKED | body)
    if told is None:  # messages of the user in a row are one
        assert answer.json()["error"]["message"].startswith("the prompt is too long")
    else:
        assert error_of(answer) == (400, "invalid_request_error", told)


@pytest.mark.parametrize(("argument", "given"), [(r'"\ud83d"', "\ud83d"), ("-1e999", None), ("[1e5]", [100000.0])])
def test_arguments_that_json_cannot_write_again_are_no_error(tooled: Served, says: Says, argument: str, given: object) -> None:
    says(f'<tool_call>{{"name": "weather", "arguments": {{"place": {argument}}}}}</tool_call>')
    (block,) = send(tooled)["content"]
    assert block["type"] == ("text" if given is None else "tool_use")  # an infinite number makes the call a text
    assert block.get("input") == (None if given is None else {"place": given})


def test_an_infinite_number_of_a_forced_call_is_the_largest_finite_one(tooled: Served, says: Says) -> None:
    number = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    says('{"x": -1e999}')
    tool = {"name": "scale", "input_schema": number}
    (block,) = send(tooled, tools=[tool], tool_choice={"type": "tool", "name": "scale"})["content"]
    assert block["input"] == {"x": -1.7976931348623157e308}


def test_errors_have_anthropics_format_on_its_paths_only(tooled: Served) -> None:
    status, kind, message = error_of(tooled.post("/v1/messages", **ASKED | {"messages": [USER | {"content": "a " * 50_000}]}))
    assert (status, kind) == (400, "invalid_request_error") and "prompt is too long" in message  # as Claude Code looks for it
    assert error_of(tooled.post("/v1/messages", **ASKED | {"model": "other"}))[:2] == (404, "not_found_error")
    assert error_of(tooled.post("/v1/messages/batches"))[:2] == (404, "not_found_error")
    assert error_of(tooled.send("/v1/messages", b"{"))[:2] == (400, "invalid_request_error")
    assert error_of(tooled.send("/v1/messages", b" " * (5 << 20)))[:2] == (413, "request_too_large")
    assert tooled.post("/v1/chat/completions", messages=[USER], model="other").json()["error"]["code"] == "model_not_found"


def test_a_key_is_sent_in_either_header(load: Any) -> None:
    with serving(load(), KeyRing([("secret", Client())])) as served:

        def ask(**headers: str) -> httpx.Response:
            body = {"messages": [USER], "max_tokens": 1}
            headers |= {"anthropic-version": "2023-06-01"}
            return httpx.post(served.url + "/v1/messages", json=body, headers=headers, verify=TLS)

        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert ask(**headers).status_code == 200
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Basic secret"}):
            assert error_of(ask(**headers))[:2] == (401, "authentication_error")
        queue_is_full = served.service.bridge.reserve_places(served.llm.engine.scheduler.max_batch + 256, Client())
        with queue_is_full:
            answer = ask(**{"x-api-key": "secret"})
        assert error_of(answer)[:2] == (429, "rate_limit_error") and "retry-after" in answer.headers


@pytest.mark.usefixtures("failing")
def test_a_failure_ends_a_stream(tooled: Served) -> None:
    events = streamed(tooled, speculative={"num_draft_tokens": 0})
    assert [event["type"] for event in events[-2:]] == ["content_block_delta", "error"]
    assert events[-1]["error"]["type"] == "api_error" and "MemoryError" in events[-1]["error"]["message"]
    assert events[0]["message"]["id"] == "msg_" + events[-1]["request_id"]
