"""The Responses API with OpenAI's client: the same answers as chat, whole and as semantic events."""

from __future__ import annotations

import itertools
import json
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from outrider.server.responses import ResponseBody

from . import test_tools
from .served import Served
from .test_tools import ARGUMENTS, AT_ONCE, CALL, REPLY, TOOLS, USER, Says, chat

tooled, client, says, failing = test_tools.tooled, test_tools.client, test_tools.says, test_tools.failing  # fixtures

FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ASKED: dict[str, Any] = {"input": "How is Oslo?", "tools": FLAT, "max_output_tokens": 400}
TEXT = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
CALLED = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


def respond(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.post("/v1/responses", **ASKED | body)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json(), strict=True)
    found: dict[str, Any] = answer.json()
    return found


def streamed(served: Served, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each valid by itself, with their numbers in order."""
    answer = served.post("/v1/responses", **ASKED | body, stream=True)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    pairs = [event.split("\n") for event in answer.text.removesuffix("\n\n").split("\n\n")]
    events: list[dict[str, Any]] = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event, strict=True)
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Return the kinds of events, consecutive deltas as one."""
    return [kind.removeprefix("response.") for kind, _ in itertools.groupby(event["type"] for event in events)]


def lasting(response: dict[str, Any]) -> dict[str, Any]:
    """Return what is the same in two responses to one request."""
    output = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]]
    changing = ("id", "created_at", "usage", "metrics")
    return {name: value for name, value in response.items() if name not in changing} | {"output": output}


def test_an_answer_equals_that_of_chat(tooled: Served, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "outrider", "temperature": 0, "extra_body": AT_ONCE}
    messages: Any = [{"role": "system", "content": "Be brief."}, USER]
    wanted = client.chat.completions.create(messages=messages, max_tokens=24, **asked)
    answer = client.responses.create(instructions="Be brief.", input=[USER], max_output_tokens=24, **asked)  # type: ignore[list-item]
    assert answer.output_text == wanted.choices[0].message.content != ""
    assert wanted.usage is not None and answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (wanted.usage.prompt_tokens, 24)
    assert answer.usage.input_tokens_details.cached_tokens > 0  # of the request before
    assert (answer.instructions, answer.temperature, answer.max_output_tokens) == ("Be brief.", 0, 24)
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.status == answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert answer.model_extra is not None and answer.usage.output_tokens_details.model_extra is not None
    num_drafts = answer.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"]
    assert sum(answer.usage.output_tokens_details.model_extra.values()) == num_drafts > 0


def test_settings_of_sampling_reach_the_engine(tooled: Served) -> None:
    sampled = {"temperature": 1.2, "top_p": 0.9, "seed": 5, "top_k": 40, "speculative": {"num_draft_tokens": 0}, **AT_ONCE}
    wanted = chat(tooled, tools=None, max_tokens=16, **sampled)["choices"][0]["message"]["content"]
    answer = respond(tooled, tools=None, max_output_tokens=16, **sampled)
    assert answer["output"][0]["content"][0]["text"] == wanted and "metrics" not in answer
    assert wanted != respond(tooled, tools=None, max_output_tokens=16, **AT_ONCE)["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("interval", [0.0, 0.02])
def test_a_stream_ends_with_the_whole_answer(
    tooled: Served,
    says: Says,
    interval: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tooled.service.bridge, "interval", interval)
    says(REPLY)
    whole = respond(tooled)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "I should ask."}]
    assert whole["output"][1]["content"][0]["text"] == "Let me see." and whole["status"] == "completed"
    assert [json.loads(item["arguments"]) for item in whole["output"][2:]] == [ARGUMENTS] * 2
    assert whole["output"][2]["call_id"] != whole["output"][3]["call_id"]
    says(REPLY)
    events = streamed(tooled)
    texts = [kind.format(name) for name in ("reasoning_text", "output_text") for kind in TEXT]
    assert kinds(events) == ["created", "in_progress", *texts, *CALLED, *CALLED, "completed"]
    assert lasting(events[-1]["response"]) == lasting(whole)
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == events[-1]["response"]["output"]
    added = [event["item"] for event in events if event["type"].endswith("item.added")]
    assert [item.get("content", item.get("arguments")) for item in added] == [[], [], "", ""]
    for index, item in enumerate(events[-1]["response"]["output"]):
        said = "".join(event["delta"] for event in events if "delta" in event and event["output_index"] == index)
        assert said == (item["arguments"] if "arguments" in item else item["content"][0]["text"])


def test_openais_client_collects_a_stream(client: openai.OpenAI, says: Says) -> None:
    says(REPLY)
    asked: dict[str, Any] = {"model": "outrider", **ASKED}
    with client.responses.stream(**asked) as stream:
        answer = stream.get_final_response()
    assert answer.output_text == "Let me see."
    calls = [item.parsed_arguments for item in answer.output if item.type == "function_call"]
    assert calls == [ARGUMENTS] * 2
    says(REPLY)
    events = list(client.responses.create(stream=True, **asked))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Let me see."
    assert events[-1].type == "response.completed"


@pytest.mark.parametrize("interval", [0.0, 0.02])
def test_a_text_after_a_call_is_a_message_of_its_own(
    tooled: Served, says: Says, interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tooled.service.bridge, "interval", interval)
    says(f"One.{CALL}Two.")
    whole = respond(tooled)
    says(f"One.{CALL}Two.")
    events = streamed(tooled, speculative={"num_draft_tokens": 0})
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "message"]
    assert [item["content"][0]["text"].strip() for item in whole["output"][::2]] == ["One.", "Two."]
    assert lasting(events[-1]["response"])["output"] == lasting(whole)["output"]


class Forecast(BaseModel):
    city: Literal["Oslo", "Lima"]
    days: Literal[1, 2, 3]


def test_a_model_is_parsed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "outrider", "input": "How is Oslo?", "text_format": Forecast, "extra_body": AT_ONCE}
    answer = client.responses.parse(max_output_tokens=60, **asked)
    assert isinstance(answer.output_parsed, Forecast) and answer.status == "completed"
    with client.responses.stream(max_output_tokens=60, **asked) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed


def test_any_json_object_can_be_asked_for(tooled: Served) -> None:
    form = {"format": {"type": "json_object"}, "verbosity": "low"}
    answer = respond(tooled, tools=None, text=form, max_output_tokens=8, temperature=1, seed=2, **AT_ONCE)
    assert answer["output"][0]["content"][0]["text"].lstrip().startswith("{") and answer["text"] == form


def test_json_or_a_call_can_be_asked_for(tooled: Served, says: Says) -> None:
    says(CALL, '{"a": "<tool_call>"}')
    answers = [respond(tooled, text={"format": {"type": "json_object"}}, max_output_tokens=400) for _ in range(2)]
    assert [[item["type"] for item in answer["output"]] for answer in answers] == [["function_call"], ["message"]]


def test_calls_and_reasoning_go_back_as_they_came(tooled: Served, client: openai.OpenAI, says: Says) -> None:
    says(f"<think>Hm.</think>Let me see.{CALL}")
    asked: dict[str, Any] = {"model": "outrider", "tools": FLAT, "max_output_tokens": 400}
    items: list[Any] = [USER]
    first = client.responses.create(input=items, **asked)
    items += first.output
    (called,) = (item for item in first.output if item.type == "function_call")
    items.append({"type": "function_call_output", "call_id": called.call_id, "output": "Rain."})
    says("It rains.")
    answer = client.responses.create(input=items, **asked)
    assert answer.output_text == "It rains." and answer.usage is not None
    call = {"id": called.call_id, "type": "function", "function": {"name": "weather", "arguments": called.arguments}}
    said = {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": called.call_id, "content": "Rain."}
    assert answer.usage.input_tokens == len(tooled.llm.chat_prompt([USER, said, result], TOOLS))


@pytest.mark.parametrize("exclude_unset", [True, False])
def test_parsed_answers_go_back_as_they_came(client: openai.OpenAI, says: Says, exclude_unset: bool) -> None:
    says(f"<think>Hm.</think>Let me see.{CALL}")
    asked: dict[str, Any] = {"model": "outrider", "tools": FLAT[:1], "max_output_tokens": 400}
    first = client.responses.parse(input=[USER], **asked)  # type: ignore[list-item]
    items = [item.model_dump(exclude_unset=exclude_unset) for item in first.output]
    assert items[-1]["parsed_arguments"] == ARGUMENTS
    says("It rains.")
    assert client.responses.create(input=[USER, *items], **asked).output_text == "It rains."  # type: ignore[list-item]


def test_a_text_after_calls_goes_back_with_them() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "o"}
    for said, content in ((["One.", call, "\nTwo.", call], "One.\nTwo."), ([call, "Two."], "Two."), ([call], "")):
        items = [message("assistant", each) if isinstance(each, str) else each for each in said]
        first, second = ResponseBody.model_validate({"input": [*items, result]}).chat().messages
        assert (first.role, first.content, second.role) == ("assistant", content, "tool")
        assert len(first.tool_calls or ()) == said.count(call)


def message(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def test_items_are_translated_into_messages() -> None:
    call = {"type": "function_call", "id": "fc_1", "status": "completed", "name": "now", "arguments": '{"a": 1}'}
    items = [
        {"role": "developer", "content": "D"},
        message("user", "a", "b"),
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "S"}], "encrypted_content": "x"},
        message("assistant", "T"),
        call | {"call_id": "1"},
        call | {"call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "o"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "p"}]},
        {"type": "reasoning", "id": "rs_2", "summary": []},
        message("assistant", "x"),
        message("assistant", "y"),
    ]
    function = {"name": "now", "arguments": {"a": 1}}
    calls = [{"id": number, "type": "function", "function": function} for number in "12"]
    rest = [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "T", "reasoning_content": "S", "tool_calls": calls},
        {"role": "tool", "content": "o", "tool_call_id": "1"},
        {"role": "tool", "content": "p", "tool_call_id": "2"},
        {"role": "assistant", "content": "x\ny"},
    ]
    for given, first in (({}, ("system", "D")), ({"instructions": "I"}, ("system", "I\n\nD"))):
        body = ResponseBody.model_validate({"input": items, **given}).chat()
        assert [each.for_template() for each in body.messages] == [dict(zip(("role", "content"), first, strict=True)), *rest]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_calls_can_be_forced(tooled: Served, choice: Any) -> None:
    asked = {"tool_choice": choice, "parallel_tool_calls": False, **AT_ONCE}
    whole, events = respond(tooled, **asked), streamed(tooled, **asked)
    assert [item["type"] for item in whole["output"]] == ["function_call"] and whole["tool_choice"] == choice
    assert kinds(events) == ["created", "in_progress", *CALLED, "completed"]
    assert lasting(events[-1]["response"]) == lasting(whole)
    num_deltas = [event["type"] for event in events].count("response.function_call_arguments.delta")
    assert num_deltas > 2 or choice == "required"


def test_tools_that_may_not_be_called_are_not_shown(tooled: Served, says: Says) -> None:
    says(CALL)
    answer = respond(tooled, tool_choice="none")
    assert answer["output"][0]["content"][0]["text"] == CALL and answer["tools"] == FLAT
    assert answer["usage"]["input_tokens"] == respond(tooled, tools=None)["usage"]["input_tokens"]


def test_some_of_the_tools_may_be_allowed(tooled: Served) -> None:
    group = {"type": "namespace", "name": "far", "tools": FLAT[:1]}
    tools: Any = [*FLAT, group, {"type": "web_search"}]
    for allowed, names in (
        ([{"type": "function", "name": "now"}, {"type": "web_search"}], ["now"]),
        ([group], ["far__weather"]),
    ):
        choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
        body = ResponseBody(input="Hi", tools=tools, tool_choice=choice).chat()
        assert [tool["function"]["name"] for tool in body.template_tools] == names and body.may_call
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    answer = respond(tooled, tool_choice=choice, parallel_tool_calls=False, **AT_ONCE)
    assert [item["name"] for item in answer["output"]] == ["now"] and answer["tool_choice"] == choice


def test_functions_in_namespaces_are_called_by_both_names(tooled: Served, says: Says) -> None:
    """As Codex sends them; tools that OpenAI's servers run are not shown to the model."""
    name = FLAT[0]["name"]
    group = {"type": "namespace", "name": "far", "description": "Abroad", "tools": FLAT[:1]}
    tools = [group, {"type": "web_search", "external_web_access": False}]
    says(CALL.replace(f'"{name}"', f'"far__{name}"'))
    events = streamed(tooled, tools=tools)
    whole = respond(tooled, tools=tools)
    (call,) = whole["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "far", name)
    assert lasting(events[-1]["response"]) == lasting(whole) and whole["tools"] == tools
    found = ResponseBody(input="Hi", tools=tools).chat().template_tools
    assert [tool["function"]["name"] for tool in found] == [f"far__{name}"]
    back = ResponseBody(input=[USER, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}])
    assert back.chat().messages[1].tool_calls[0].function.name == f"far__{name}"  # type: ignore[index]
    chosen = respond(tooled, tools=tools, tool_choice={"type": "function", "namespace": "far", "name": name})
    assert (chosen["output"][0]["namespace"], chosen["output"][0]["name"]) == ("far", name)


def test_a_truncated_answer_is_incomplete(tooled: Served, says: Says) -> None:
    says(REPLY)
    whole = respond(tooled, max_output_tokens=30)
    says(REPLY)
    events = streamed(tooled, max_output_tokens=30)
    assert events[-1]["type"] == "response.incomplete" and lasting(events[-1]["response"]) == lasting(whole)
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in whole["output"]][-1] == "incomplete"


def test_only_what_was_truncated_is_incomplete(tooled: Served, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tooled.service.bridge, "interval", 0.0)
    assert tooled.llm.tokenizer is not None
    most, wanted = len(tooled.llm.tokenizer.encode(f"One.{CALL}{CALL[:20]}")), ["completed", "completed", "incomplete"]
    says(f"One.{CALL}{CALL}")
    whole = respond(tooled, max_output_tokens=most)
    says(f"One.{CALL}{CALL}")
    events = streamed(tooled, max_output_tokens=most)
    assert lasting(events[-1]["response"]) == lasting(whole)
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "message"]
    assert [item["status"] for item in whole["output"]] == wanted
    assert whole["output"][-1]["content"][0]["text"] == CALL[:20]


def test_a_call_is_complete_as_soon_as_it_is_read(tooled: Served, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tooled.service.bridge, "interval", 0.0)
    says(f"{CALL}Two.")
    events = streamed(tooled, speculative={"num_draft_tokens": 0})
    assert kinds(events)[2:-1] == [*CALLED, *(kind.format("output_text") for kind in TEXT)]
    says(CALL)
    assert tooled.llm.tokenizer is not None
    answer = respond(tooled, max_output_tokens=len(tooled.llm.tokenizer.encode(CALL)))
    assert answer["status"] == "incomplete" and [item["status"] for item in answer["output"]] == ["completed"]


def test_a_forced_call_that_was_truncated_is_incomplete(tooled: Served) -> None:
    answer = respond(tooled, tool_choice={"type": "function", "name": "weather"}, max_output_tokens=4, **AT_ONCE)
    assert [(item["type"], item["status"]) for item in answer["output"]] == [("function_call", "incomplete")]


@pytest.mark.parametrize("text", ["", "<think>Hm.</think>"])
def test_a_complete_answer_without_text_has_an_empty_one(tooled: Served, says: Says, text: str) -> None:
    says(text)
    answer = respond(tooled)
    assert answer["status"] == "completed" and answer["output"][-1]["type"] == "message"
    assert answer["output"][-1]["content"] == [{"type": "output_text", "text": "", "annotations": []}]


def test_variables_reach_the_template(tooled: Served) -> None:
    for body, variables in (
        ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "max"}}, {"reasoning_effort": "max"}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
    ):
        answer = respond(tooled, max_output_tokens=1, **body)
        assert answer["usage"]["input_tokens"] == len(tooled.llm.chat_prompt([USER], TOOLS, variables))
    body = ResponseBody(input="x", text={"verbosity": "low"}, include_reasoning=False)  # type: ignore[arg-type]
    assert body.chat().variables == {"verbosity": "low"} and not body.chat().include_reasoning


def test_fields_that_change_nothing_are_accepted(tooled: Served) -> None:
    include = ["reasoning.encrypted_content", "web_search_call.results"]
    codex = {"store": False, "include": include, "prompt_cache_key": "a", "client_metadata": {"a": "b"}, "prediction": {}}
    nothing = {"truncation": "disabled", "background": False, "top_logprobs": 0, "max_tool_calls": 3, "conversation": None}
    answer = respond(tooled, metadata={"a": "b"}, user="u", service_tier="auto", max_output_tokens=1, **codex, **nothing)
    assert answer["metadata"] == {"a": "b"} and not answer["store"]
    neutral = {"prompt_cache_options": {"mode": "implicit"}, "reasoning": {"context": "auto", "mode": "standard"}}
    tools = [tool | {"defer_loading": False, "allowed_callers": ["direct"]} for tool in FLAT]
    neutral["tools"] = [tool | {"output_schema": {"type": "string"}} for tool in tools]  # type: ignore[assignment]
    call = {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "o"}
    said, refusal = message("assistant", "No."), {"type": "refusal", "refusal": "No."}
    plain = respond(tooled, input=[said, call, result], max_output_tokens=4)
    called = {"caller": {"type": "direct"}}
    items = [said | {"content": [refusal]}, call | called, result | called | {"name": "now", "namespace": None}]
    full = respond(tooled, input=items, max_output_tokens=4, **neutral)
    assert full["output"][0]["content"] == plain["output"][0]["content"] and full["tools"] == tools
    assert full["usage"]["input_tokens"] == plain["usage"]["input_tokens"]


def test_a_hint_about_the_cache_and_options_of_a_stream_change_nothing(tooled: Served) -> None:
    part = {"type": "input_text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    options = {"stream_options": {"include_obfuscation": False, "include_usage": True}}
    answer = streamed(tooled, input=[{"role": "user", "content": [part]}], max_output_tokens=4, **options)[-1]["response"]
    assert lasting(answer) == lasting(respond(tooled, input="Hi", max_output_tokens=4))


def nested(depth: int) -> Any:
    """Return an object with this many levels of objects."""
    return {"a": nested(depth - 1)} if depth > 1 else {}


STORES_NOTHING = "the server stores no responses: send the whole conversation as input"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"previous_response_id": "resp_1"}, f"previous_response_id: {STORES_NOTHING}"),
        ({"conversation": "conv_1"}, f"conversation: {STORES_NOTHING}"),
        ({"background": True}, "background: responses cannot run in the background: leave it out"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt: the server stores no prompts: send instructions and input"),
        ({"response_format": {"type": "text"}}, "response_format: expected text.format"),
        ({"max_tokens": 5}, "max_tokens: expected max_output_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens: expected max_output_tokens"),
        ({"messages": [USER]}, "messages: expected input"),
        ({"previous_response_id": False}, f"previous_response_id: {STORES_NOTHING}"),
        (
            {"min_tokens": 9, "max_output_tokens": 8},
            "min_tokens=9 exceeds max_output_tokens=8: lower min_tokens or raise max_output_tokens",
        ),
        ({"max_output_tokens": 1 << 31}, "max_output_tokens: expected a value less than or equal to 2147483647"),
        (
            {"input": [{"type": "reasoning", "summary": []}]},
            "input has no text: expected at least one message, call or reasoning item with text",
        ),
        ({"input": [USER] * 4096, "instructions": "x"}, "input: too many messages: the limit is 4096"),
        ({"metadata": nested(65)}, "metadata: nested more than 64 levels deep"),
        ({"truncation": "auto"}, "truncation: expected 'disabled'"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema: missing",
        ),
        (
            {"tools": [{"type": "mcp"}]},
            'tools.0: unsupported tool \'mcp\': expected {"type": "function", "name": ...}',
        ),
        ({"tools": [FLAT[0]] * 2}, "tools: 'weather' occurs more than once"),
        (
            {"tool_choice": {"type": "function", "name": "other"}},
            "tool_choice: unknown tool 'other': expected one of weather, now",
        ),
        (
            {"tool_choice": {"type": "web_search"}},
            'tool_choice: unsupported choice \'web_search\': expected {"type": "function", "name": ...} or allowed_tools',
        ),
        ({"tool_choice": "sometimes"}, "tool_choice: expected 'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name: missing"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}},
            "tool_choice: unknown tool 'other': expected one of weather, now",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}},
            "tool_choice: no function is allowed: expected at least one",
        ),
        ({"tools": [FLAT[0] | {"defer_loading": True}]}, "tools.0.defer_loading: expected False"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context: expected 'auto'"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema: expected a JSON object"),
        ({"input": [5]}, "input.0: expected a JSON object"),
        (
            {"input": [{"type": None, "role": "cat", "content": "x"}]},
            "input.0.role: expected 'system', 'developer', 'user' or 'assistant'",
        ),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input.0: unsupported item 'item_reference': expected message, reasoning, function_call or function_call_output",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            'input.0.content.0: unsupported part \'input_image\': expected {"type": "input_text", "text": ...}',
        ),
        ({"input": [{"role": "user", "content": "x", "speaker": "Ada"}]}, "input.0.speaker: unknown field"),
        ({"metadata": {"a": "\ud800"}}, "metadata: invalid Unicode: unpaired surrogate"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"const": "\ud800"}}}},
            "invalid JSON in tools, text.format or metadata: expected finite numbers, Unicode text and little nesting",
        ),
    ],
)
def test_what_is_not_supported_is_refused_in_plain_words(tooled: Served, body: dict[str, Any], told: str) -> None:
    answer = tooled.post("/v1/responses", **ASKED | body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, told)
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_errors_are_those_of_chat(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="unknown model 'other'"):
        client.responses.create(model="other", input="a")
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="outrider", input="a" * 100_000)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="outrider", input="a", temperature=-1)
    assert error.value.param == "temperature"


@pytest.mark.usefixtures("failing")
def test_a_failure_ends_a_stream(tooled: Served) -> None:
    events = streamed(tooled, speculative={"num_draft_tokens": 0})
    assert kinds(events)[-4:] == ["output_text.done", "content_part.done", "output_item.done", "failed"]
    response = events[-1]["response"]
    assert response["status"] == "failed" and response["error"]["code"] == "server_error"
    assert "MemoryError" in response["error"]["message"]
    assert [item["status"] for item in response["output"]] == ["incomplete"]
