"""Tool calls and reasoning over HTTP, with OpenAI's client: whole and streamed, free and forced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
from pydantic import BaseModel
from tiny_folder import make_folder, make_tokenizer
from torch import Tensor

from outrider import LLM, OutriderError, SamplingParams
from outrider.engine.prompts import chat_ids, shown_tool, takes_tools
from outrider.search.traffic import encoded, read_file
from outrider.server.grammar import GrammarCompiler
from outrider.server.prompts import tokenizer_data
from outrider.server.protocol import ChatBody, Tool
from outrider.server.replies import Part

from .served import Served, serving

CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer with <tool_call>JSON</tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}{{ call.function.arguments.items() | list }}"
    "</tool_call>{% endfor %}{% if message.tool_call_id %} for {{ message.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% if thinking is false %}-{% endif %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
)
CITY = {"enum": ["Paris", "Lima", "Oslo"]}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/place"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["place", "days"],
    "examples": [{"place": None}],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "A forecast.", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
ARGUMENTS = {"place": {"city": "Oslo"}, "days": 2}
AT_ONCE = {"chat_template_kwargs": {"enable_thinking": False}}  # a random model would reason without end
USER: dict[str, Any] = {"role": "user", "content": "How is Oslo?"}
CALL = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': ARGUMENTS})}\n</tool_call>"
REPLY = f"<think>\nI should ask.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"


class Script:
    """Grammar that allows one output: samples of a request get the texts in turn."""

    def __init__(self, outputs: Sequence[list[int]], vocab_size: int) -> None:
        self._outputs, self._vocab_size, self._num_started = outputs, vocab_size, 0

    def matcher(self) -> ScriptMatcher:
        self._num_started += 1
        return ScriptMatcher(self._outputs[(self._num_started - 1) % len(self._outputs)], self._vocab_size)


class ScriptMatcher:
    def __init__(self, output: list[int], vocab_size: int) -> None:
        self._output, self._vocab_size = output, vocab_size

    def allowed(self, output: Sequence[int], path: Sequence[int]) -> Tensor | None:
        done = [*output, *path]
        if done != self._output[: len(done)] or len(done) >= len(self._output):
            return None
        return torch.arange(self._vocab_size) == self._output[len(done)]


def load(folder: Path, template: Any, method: str = "draft") -> LLM:
    tokenizer = make_tokenizer(chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<think>"]})
    options: dict[str, Any] = {"tokenizer": tokenizer, "max_position_embeddings": 4096}
    target, draft = make_folder(folder / "target", **options), make_folder(folder / "draft", num_hidden_layers=1, **options)
    return LLM(target, draft=draft, method=method, num_draft_tokens=3, max_batch=4, compile="never", same_text=True)


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(load(tmp_path_factory.mktemp("tooled"), CHATML)) as server:
        yield server


@pytest.fixture(scope="module")
def client(tooled: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=tooled.url + "/v1", api_key="none", max_retries=0)


Says = Callable[..., None]


@pytest.fixture
def says(tooled: Served, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Return ``says(text, ...)``, which makes the model write these texts (or token ids) in turn."""
    llm, requests_for = tooled.llm, tooled.llm.requests_for
    assert llm.tokenizer is not None
    encode = llm.tokenizer.encode

    def says(*texts: str | list[int]) -> None:
        outputs = [[*(encode(text) if isinstance(text, str) else text), 0] for text in texts]
        script = Script(outputs, llm.runner.vocab_size)
        monkeypatch.setattr(
            llm, "requests_for", lambda ids, params, owner: requests_for(ids, replace(params, grammar=script), owner)
        )

    return says


@pytest.fixture
def failing(tooled: Served, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the target fail in the ninth round of a text."""
    rounds, score = iter(range(10**6)), tooled.llm.runner.score

    def failing_score(*given: Any, **options: Any) -> Any:
        if next(rounds) == 8:
            raise MemoryError("cannot allocate memory")
        return score(*given, **options)

    says("Let me see what " + "the weather is " * 20)
    monkeypatch.setattr(tooled.service.bridge, "interval", 0.0)
    monkeypatch.setattr(tooled.llm.runner, "score", failing_score)


def chat(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.post("/v1/chat/completions", **({"messages": [USER], "tools": TOOLS, "max_tokens": 400} | body))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{name: value for name, value in call.items() if name != "id"} for call in message.get("tool_calls", ())]
    return message | ({"tool_calls": calls} if calls else {})


def streamed(served: Served, **body: Any) -> tuple[list[dict[str, Any]], list[str | None], int]:
    """Return the messages that a stream's chunks join to, their finish reasons, and the number of chunks."""
    n = body.get("n", 1)
    parts, reasons = [Part() for _ in range(n)], [None] * n
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 400, "stream": True} | body
    answer = served.post("/v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: {")]
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            delta, part = choice["delta"], parts[choice["index"]]
            assert reasons[choice["index"]] is None  # the finish reason comes last
            reasons[choice["index"]] = choice["finish_reason"]
            part.add(Part(delta.get("content") or "", delta.get("reasoning_content", "")))
            for call in delta.get("tool_calls", ()):
                if call["index"] < len(part.calls):
                    part.calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
                else:
                    part.add(Part(calls=[call]))
    return [part.message() for part in parts], reasons, len(events)


def test_calls_and_reasoning_are_separated(client: openai.OpenAI, says: Says) -> None:
    says(REPLY)
    answer = client.chat.completions.create(model="outrider", messages=[USER], tools=TOOLS, max_tokens=400)  # type: ignore[call-overload]
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert choice.message.model_extra == {"reasoning_content": "I should ask."}
    assert [(call.type, call.function.name) for call in choice.message.tool_calls] == [("function", "weather")] * 2
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [ARGUMENTS] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_the_content_of_a_call_alone_is_null(tooled: Served, says: Says) -> None:
    says(CALL)
    (choice,) = chat(tooled)["choices"]
    assert choice["message"].keys() == {"role", "content", "tool_calls"} and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0].keys() == {"id", "type", "function"}


@pytest.mark.parametrize("interval", [0.0, 0.02])
def test_a_stream_equals_the_whole_reply(tooled: Served, says: Says, interval: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tooled.service.bridge, "interval", interval)
    texts = (REPLY, "No calls < here.", CALL, "Broken: <tool_call>weather</tool_call>")
    says(*texts)
    whole = chat(tooled, n=4)["choices"]
    assert [choice["finish_reason"] for choice in whole] == ["tool_calls", "stop", "tool_calls", "stop"]
    assert [choice["message"]["content"] for choice in whole] == ["Let me see.", texts[1], None, texts[3]]
    says(*texts)
    messages, reasons, _ = streamed(tooled, n=4, speculative={"num_draft_tokens": 0})
    assert [without_ids(message) for message in messages] == [without_ids(choice["message"]) for choice in whole]
    assert reasons == [choice["finish_reason"] for choice in whole]


def test_openais_client_collects_a_stream(client: openai.OpenAI, says: Says) -> None:
    says(REPLY)
    asked: dict[str, Any] = {"model": "outrider", "messages": [USER], "tools": TOOLS, "max_tokens": 400}
    with client.chat.completions.stream(**asked) as stream:
        answer = stream.get_final_completion()
    message = answer.choices[0].message
    assert message.content == "Let me see." and answer.choices[0].finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments) for call in message.tool_calls or ()] == [ARGUMENTS] * 2


@pytest.mark.parametrize("choice", ["auto", NAMED])
@pytest.mark.parametrize("interval", [0.0, 5.0])
def test_the_last_call_of_a_stream_ends_before_its_finish_reason(
    tooled: Served, client: openai.OpenAI, says: Says, choice: Any, interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tooled.service.bridge, "interval", interval)
    arguments = json.dumps(ARGUMENTS)
    text, names = (f"One.{CALL}{CALL}", ["weather"] * 2) if choice == "auto" else (arguments, ["weather"])
    says(text)
    asked: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "max_tokens": 400, "tool_choice": choice}
    with client.chat.completions.stream(model="outrider", logprobs=True, **asked) as stream:
        events = list(stream)
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.parsed_arguments or json.loads(event.arguments)) for event in done] == [
        (name, ARGUMENTS) for name in names
    ]
    choices = [choice for event in events if event.type == "chunk" for choice in event.chunk.choices]
    tokens = [token.token for each in choices if each.logprobs for token in each.logprobs.content or ()]
    assert "".join(tokens) == text + "<|end|>"  # each token once
    ending = choices[-1]
    assert ending.finish_reason == ("tool_calls" if choice == "auto" else "stop") and ending.delta.to_dict() == {}
    assert not any(each.finish_reason for each in choices[:-1])


def test_a_reply_that_is_cut_keeps_its_text(tooled: Served, says: Says) -> None:
    says(CALL)
    assert tooled.llm.tokenizer is not None
    num_tokens = len(tooled.llm.tokenizer.encode(CALL)) // 2
    (choice,) = chat(tooled, max_tokens=num_tokens)["choices"]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert CALL.startswith(choice["message"]["content"]) and len(choice["message"]["content"]) > 20


def test_log_probabilities_and_usage_count_every_token(tooled: Served, says: Says) -> None:
    says(REPLY)
    answer = chat(tooled, logprobs=True)
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert len(tokens) == answer["usage"]["completion_tokens"]
    assert "".join(token["token"] for token in tokens) == REPLY + "<|end|>"


def test_tools_that_may_not_be_called_are_not_shown(tooled: Served, says: Says) -> None:
    says(REPLY)
    answer = chat(tooled, tool_choice="none")
    assert answer["choices"][0]["message"]["content"] == f"Let me see.\n{CALL}\n{CALL}"
    assert answer["choices"][0]["finish_reason"] == "stop"
    without = chat(tooled, tools=None)
    assert without["choices"][0]["message"] == answer["choices"][0]["message"]
    counts = [each["usage"]["prompt_tokens"] for each in (answer, without, chat(tooled))]
    assert counts[0] == counts[1] < counts[2]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_some_of_the_tools_may_be_allowed(tooled: Served, says: Says) -> None:
    body = ChatBody(messages=[USER], tools=TOOLS, tool_choice=allowed("auto", "now"))
    assert [tool["function"]["name"] for tool in body.template_tools] == ["now"] and body.may_call
    asked = {"tool_choice": allowed("required", "now"), "n": 4, "temperature": 1.5, "max_tokens": 60, **AT_ONCE}
    calls = [call for choice in chat(tooled, **asked)["choices"] for call in choice["message"].get("tool_calls", ())]
    assert {call["function"]["name"] for call in calls} == {"now"}
    says(CALL)
    usage = [chat(tooled, **each)["usage"] for each in ({"tool_choice": asked["tool_choice"]}, {"tools": TOOLS[1:]})]
    assert usage[0]["prompt_tokens"] == usage[1]["prompt_tokens"]


def test_a_conversation_returns_calls_and_results(tooled: Served, client: openai.OpenAI, says: Says) -> None:
    says(f"<think>Hm.</think>{CALL}")
    asked: dict[str, Any] = {"model": "outrider", "tools": TOOLS, "max_tokens": 400}
    first = client.chat.completions.create(messages=[USER], **asked).choices[0].message
    assert first.tool_calls is not None
    result: Any = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "Rain."}
    says("It rains.")
    messages = [USER, first, result]
    answer = client.chat.completions.create(messages=messages, **asked)
    assert answer.choices[0].message.content == "It rains." and answer.choices[0].finish_reason == "stop"
    said = {**first.model_dump(exclude_none=True), "content": ""}
    prompt = tooled.llm.chat_prompt([USER, said, result], TOOLS)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    assert tooled.llm.tokenizer is not None
    text = tooled.llm.tokenizer.decode(prompt)
    assert "<think>Hm.</think><tool_call>weather[('place', {'city': 'Oslo'}), ('days', 2)]</tool_call>" in text
    assert f"Rain. for {first.tool_calls[0].id}" in text and '"name": "now"' in text and '"examples": [{"place": null}]' in text


def test_the_example_of_the_page_runs(client: openai.OpenAI, says: Says, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text().partition("### Tools and reasoning")[2]
    example = page.partition("```python\n")[2].partition("```")[0]
    says(CALL, "It rains.")
    exec(example.replace("my-model", "outrider"), {"client": client})
    assert capsys.readouterr().out == "It rains.\n"


@pytest.mark.parametrize("seed", range(4))
def test_required_calls_match_the_parameters(tooled: Served, seed: int) -> None:
    sampled = {"temperature": 0.8 * (seed > 0), "seed": seed, "n": 3, "parallel_tool_calls": False} | AT_ONCE
    found = chat(tooled, tool_choice="required", **sampled)["choices"]
    for choice in found:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        (call,) = choice["message"]["tool_calls"]
        schema = {"weather": WEATHER, "now": {"maxProperties": 0}}[call["function"]["name"]]
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    plain = chat(tooled, tool_choice="required", speculative={"num_draft_tokens": 0}, **sampled)["choices"]
    assert [without_ids(choice["message"]) for choice in plain] == [without_ids(choice["message"]) for choice in found]
    messages, reasons, _ = streamed(tooled, tool_choice="required", **sampled)
    assert [without_ids(message) for message in messages] == [without_ids(choice["message"]) for choice in found]
    assert reasons == ["tool_calls"] * 3


def test_several_calls_may_be_required(tooled: Served) -> None:
    found = chat(tooled, tool_choice="required", n=12, temperature=1.5, seed=1)["choices"]
    assert max(len(choice["message"].get("tool_calls", ())) for choice in found) > 1
    names = {call["function"]["name"] for choice in found for call in choice["message"].get("tool_calls", ())}
    assert names == {"weather", "now"}


def test_required_calls_that_are_cut_keep_their_text(tooled: Served) -> None:
    (choice,) = chat(tooled, tool_choice="required", max_tokens=8, **AT_ONCE)["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"].startswith("[")


def test_a_named_function_gets_its_arguments(tooled: Served) -> None:
    (choice,) = chat(tooled, tool_choice=NAMED)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] is None and call["function"]["name"] == "weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)
    plain = chat(tooled, tool_choice=NAMED, speculative={"method": "plain"})["choices"][0]
    assert without_ids(plain["message"]) == without_ids(choice["message"])
    (message,), reasons, num_chunks = streamed(tooled, tool_choice=NAMED)
    assert without_ids(message) == without_ids(choice["message"]) and reasons == ["stop"] and num_chunks > 2


def test_a_function_without_parameters_gets_an_empty_object(tooled: Served) -> None:
    (choice,) = chat(tooled, tool_choice={"type": "function", "function": {"name": "now"}}, **AT_ONCE)["choices"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {}


CALLED = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now", "arguments": ""}}]}


def called(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
    return [USER, {"role": "assistant", "tool_calls": [call]}]


def nested(depth: int) -> dict[str, Any]:
    return {"properties": {"a": nested(depth - 1)}} if depth else {}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools: 'weather' occurs more than once"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools.0.function.name: "),
        ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools.0.function.name: "),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type: "),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": nested(40)}}]}, "more than 64 levels deep"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"a": "\ud800"}}}]}, "unpaired surrogate"),
        ({"tools": [TOOLS[0]] * 300}, "tools: too many tools: the limit is 256"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": "sometimes"}, "tool_choice: "),
        (
            {"tool_choice": {"type": "function", "function": {"name": "other"}}},
            "unknown tool 'other': expected one of weather, now",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "expected 'object'"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": ["object"]}}}]}, "expected 'object'"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "'chat_template' is set by the server"),
        ({"chat_template_kwargs": {"a": "\ud800"}}, "unpaired surrogate"),
        ({"reasoning_effort": "much"}, "reasoning_effort: expected 'none', 'minimal'"),
        (
            {"messages": [{"role": "user"}]},
            "content is missing: only an assistant's message with tool_calls, reasoning_content or refusal",
        ),
        ({"messages": [USER, CALLED, {"role": "tool", "content": "x"}]}, "messages.2: tool_call_id is missing"),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]}, "content is missing"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"messages": [USER, CALLED | {"refusal": "no", "speaker": "Ada"}]}, "messages.1.speaker: "),
    ],
)
def test_invalid_tools_and_calls_are_refused(tooled: Served, body: dict[str, Any], says: str) -> None:
    answer = tooled.post("/v1/chat/completions", **({"messages": [USER], "tools": TOOLS, "max_tokens": 2} | body))
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tool_choice": {"type": "x"}}, "tool_choice.type: expected 'function' or 'allowed_tools'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice: expected the fields type and function"),
        (
            {"tool_choice": NAMED | allowed("auto", "now")},
            "tool_choice: expected the fields type and allowed_tools",
        ),
        (
            {"tool_choice": allowed("auto", "now", "other")},
            "tool_choice: unknown tool 'other': expected one of weather, now",
        ),
        ({"tool_choice": allowed("auto", "now"), "tools": []}, "tool_choice needs tools"),
        (
            {"tool_choice": allowed("required")},
            "tool_choice: no function is allowed: expected at least one",
        ),
        ({"tool_choice": 5}, "tool_choice: expected 'none', 'auto' or 'required'; tool_choice: expected a JSON object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            'messages.0.content.0: unsupported part \'image_url\': expected {"type": "text", "text": ...}',
        ),
        ({"guided_json": {}}, "guided_json: unknown field: use response_format"),
        ({"functions": []}, "functions: unknown field: use tools"),
        ({"function_call": "auto"}, "function_call: unknown field: use tool_choice"),
        ({"system": "Hi"}, 'system: unknown field: send a message with "role": "system"'),
        ({"a." * 1000: 1}, "a." * 98 + "a..."),
        ({"tools": 5}, "tools: expected a valid list"),
    ],
)
def test_errors_are_in_plain_words(tooled: Served, body: dict[str, Any], message: str) -> None:
    answer = tooled.post("/v1/chat/completions", **({"messages": [USER], "tools": TOOLS, "max_tokens": 2} | body))
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize("arguments", ['{"city": "O', "[1]", "[" * 100_000, '{"a":' * 80 + "1" + "}" * 80, r'{"a": "\ud800"}'])
def test_arguments_that_are_not_complete_can_be_sent_back(tooled: Served, arguments: str) -> None:
    answers = [chat(tooled, messages=called(given), max_tokens=2) for given in (arguments, "{}")]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


def test_a_message_may_have_only_reasoning(tooled: Served) -> None:
    said = {"role": "assistant", "content": None, "reasoning_content": "Hm."}
    answer = chat(tooled, messages=[USER, said], max_tokens=2)
    assert answer["usage"]["prompt_tokens"] == len(tooled.llm.chat_prompt([USER, said], TOOLS))


@pytest.mark.parametrize("choice", ["none", "required", NAMED])
def test_tools_that_must_or_cannot_be_called_can_be_combined_with_a_response_format(tooled: Served, choice: Any) -> None:
    asked = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    (choice_,) = chat(tooled, tool_choice=choice, response_format=asked, **AT_ONCE)["choices"]
    if choice == "none":
        assert choice_["message"]["content"] in ('"yes"', '"no"')
    else:
        assert choice_["message"]["tool_calls"]


class City(BaseModel):
    city: str


def test_a_client_gets_calls_or_parsed_json(client: openai.OpenAI, says: Says) -> None:
    json_text = '{"city": "<think></think><tool_call>"}'
    says(f"<think>\nI should ask.\n</think>\n\n{CALL}\n{CALL}", f"<think>I know.</think>\n{json_text}")
    for expected in ((None, ["weather"] * 2, "tool_calls"), (City(city="<think></think><tool_call>"), [], "stop")):
        answer = client.chat.completions.parse(model="outrider", messages=[USER], tools=TOOLS[:1], response_format=City)  # type: ignore[list-item]
        (choice,) = answer.choices
        names = [call.function.name for call in choice.message.tool_calls or ()]
        assert (choice.message.parsed, names, choice.finish_reason) == expected


def test_parsed_calls_go_back_as_they_came(tooled: Served, client: openai.OpenAI, says: Says) -> None:
    says(f"Let me see.{CALL}")
    message = client.chat.completions.parse(model="outrider", messages=[USER], tools=TOOLS[:1]).choices[0].message  # type: ignore[list-item]
    (call,) = message.tool_calls or ()
    assert call.function.parsed_arguments == ARGUMENTS
    plain = {"id": call.id, "type": "function", "function": {"name": "weather", "arguments": call.function.arguments}}
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    says("It rains.")
    messages: Any = [USER, message, result]
    answer = client.chat.completions.create(model="outrider", messages=messages, tools=TOOLS[:1])
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": [plain]}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tooled.llm.chat_prompt([USER, said, result], TOOLS[:1]))


def test_a_request_sets_variables_of_the_template(tooled: Served) -> None:
    def length(**body: Any) -> int:
        return int(chat(tooled, max_tokens=1, **body)["usage"]["prompt_tokens"])

    for body, variables in (
        ({}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "max"}, {"reasoning_effort": "max"}),
        ({"verbosity": "low"}, {"verbosity": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
            {"reasoning_effort": "none", "thinking": True},
        ),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "none"}),
    ):
        assert length(**body) == len(tooled.llm.chat_prompt([USER], TOOLS, variables))
    lengths = {
        length(**body) for body in ({}, {"reasoning_effort": "high"}, {"chat_template_kwargs": {"enable_thinking": False}})
    }
    assert len(lengths) == 3


def test_reasoning_can_be_left_out(tooled: Served, says: Says) -> None:
    for is_streamed in (False, True):
        says(REPLY)
        if is_streamed:
            (message,), *_ = streamed(tooled, include_reasoning=False)
        else:
            message = chat(tooled, include_reasoning=False)["choices"][0]["message"]
        assert message["content"] == "Let me see." and "reasoning_content" not in message and len(message["tool_calls"]) == 2


def test_half_a_character_in_a_call_is_no_error(tooled: Served, says: Says) -> None:
    text = r'<tool_call>{"name": "weather", "arguments": {"place": "\ud83d"}}</tool_call>'
    says(text)
    whole = chat(tooled)["choices"][0]["message"]
    assert json.loads(whole["tool_calls"][0]["function"]["arguments"]) == {"place": "\ud83d"}
    says(text)
    assert without_ids(streamed(tooled)[0][0]) == without_ids(whole)


def test_a_stream_has_the_line_breaks_of_its_format_only(tooled: Served, says: Says) -> None:
    """Clients such as httpx split lines at more characters."""
    text = "One\u2028two\u2029three\x85four"
    says(text)
    assert streamed(tooled)[0][0]["content"] == text


def test_text_that_looks_like_a_special_token_is_kept(tooled: Served, says: Says) -> None:
    tokenizer = tooled.llm.tokenizer
    assert tokenizer is not None
    text = "Write <|im_end|> or <think>."
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    spelled = backend.encode(text).ids
    backend.encode_special_tokens = False
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    says([special, *spelled, special])
    assert chat(tooled)["choices"][0]["message"]["content"] == text


REFERRING: dict[str, dict[str, Any]] = {
    "path": {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"const": 1}}},
    "itself": {"properties": {"a": {"const": 1}, "b": {"$ref": "#"}}},
    "anchor": {"properties": {"a": {"$ref": "#b"}}, "$defs": {"b": {"$anchor": "b", "const": 1}}},
    "id": {
        "$id": "https://a.b/c",
        "properties": {"a": {"$ref": "#/$defs/b"}, "$id": {"const": 1}},
        "$defs": {"b": {"const": 1}},
    },
}


@pytest.mark.parametrize("case", REFERRING)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_references_in_parameters_stay_valid(tooled: Served, case: str, choice: Any) -> None:
    schema = {**REFERRING[case], "required": ["a"], "additionalProperties": False}
    tools = [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = ChatBody(messages=[USER], tools=tools, tool_choice=choice)
    grammar = GrammarCompiler(tokenizer_data(tooled.llm)).json(body.output_schema)
    for value, is_valid in ((1, True), (2, False)):
        arguments = json.dumps({"a": value})
        text = f'[{{"name": "f", "arguments": {arguments}}}]' if choice == "required" else arguments
        assert tooled.llm.tokenizer is not None
        ids = [*tooled.llm.tokenizer.encode(text), 0]
        matcher = grammar.matcher()
        accepted = all(bool(matcher.allowed(ids[:at], [])[token]) for at, token in enumerate(ids[:-1]))  # type: ignore[index]
        assert accepted == is_valid


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}, {"properties": {}, "title": "Now"}])
def test_empty_properties_are_no_parameters(parameters: Any) -> None:
    tool = Tool(type="function", function={"name": "now", "parameters": parameters})
    assert tool.arguments_schema()["additionalProperties"] is False
    free = Tool(type="function", function={"name": "now", "parameters": {"properties": {}, "additionalProperties": True}})
    assert free.arguments_schema()["additionalProperties"] is True
    some = Tool(type="function", function={"name": "now", "parameters": {"properties": {"a": {}}}})
    assert "additionalProperties" not in some.arguments_schema()


def test_what_clients_store_is_accepted(tooled: Served) -> None:
    stored = [
        CALLED | {"reasoning": "Hm.", "refusal": "no", "content": None},
        {"role": "tool", "content": "", "tool_call_id": "a"},
    ]
    stored[0]["tool_calls"][0]["index"] = 0  # type: ignore[index]
    assert chat(tooled, messages=[USER, *stored], max_tokens=2, parallel_tool_calls=True)


def test_an_unknown_format_can_be_forced(tmp_path: Path) -> None:
    with serving(load(tmp_path, CHATML.replace("<tool_call>", "<call>"))) as server:
        refused = server.post("/v1/chat/completions", messages=[USER], tools=TOOLS)
        assert refused.status_code == 400
        assert "no tool-call format of this model is known: force a call with tool_choice" in refused.json()["error"]["message"]
        (choice,) = chat(server, tool_choice="required", parallel_tool_calls=False, **AT_ONCE)["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] in ("weather", "now")
        assert chat(server, tool_choice="none", max_tokens=2)["choices"][0]["message"].keys() == {"role", "content"}


def test_a_template_without_tools_is_refused(served: Served) -> None:
    for choice in ("auto", "required", NAMED):
        answer = served.post("/v1/chat/completions", messages=[USER], tools=TOOLS, tool_choice=choice)
        assert answer.status_code == 400
        assert "the model's chat template has no place for tools" in answer.json()["error"]["message"]
    flat, own = [{"type": "function", "name": "now"}], [{"name": "now", "input_schema": {}}]
    for path, body in (
        ("chat/completions", {"messages": [USER], "tools": TOOLS}),
        ("responses", {"input": "x", "tools": flat}),
        ("messages", {"messages": [USER], "tools": own, "max_tokens": 1}),
    ):
        assert served.post(f"/v1/{path}", model="gpt-9", **body).status_code == 404  # this error is more important
    with pytest.raises(OutriderError, match="no place for tools"):
        served.llm.chat([USER], SamplingParams(max_tokens=1), TOOLS)


@pytest.mark.parametrize(
    ("template", "is_read"),
    [
        ("{% if tools is defined and tools %}{{ tools }}{% endif %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}{% break %}", True),
        ("{% for tool in tools %}{% generation %}{{ tool }}{%- endgeneration -%}{% endfor %}", True),
        ("{{ xml_tools }}{% generation %}{% endgeneration %}", False),
        ("{% for message in messages %}{{ message['tools'] }} Use your tools.{% endfor %}", False),
        ("{{ tools", True),
        (None, False),
    ],
)
def test_tools_are_a_variable_of_the_template(template: str | None, is_read: bool) -> None:
    assert takes_tools(template) == is_read


def test_templates_get_the_fields_of_tools_that_clients_may_omit() -> None:
    function = {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
    for given in ({}, {"description": None, "parameters": {}}, {"parameters": {"type": "object"}}):
        tool = {"type": "function", "function": {"name": "now", **given}}
        assert shown_tool(tool) == {"type": "function", "function": function}
        assert ChatBody(messages=[USER], tools=[tool]).template_tools == [shown_tool(tool)]  # type: ignore[list-item]
    for other in (
        {"name": "now"},
        {"function": {"name": "now", "description": "The time.", "parameters": None, "strict": True}},
    ):
        assert shown_tool(other)[next(iter(other))] == other.get(
            "name", function | {"description": "The time.", "strict": True}
        )
    tokenizer = make_tokenizer(
        chat_template="{% for t in tools %}{{ t.function.description + t.function.parameters.type }}{% endfor %}"
    )
    assert tokenizer.decode(chat_ids(tokenizer, [USER], TOOLS)) == "A forecast.objectobject"


def test_a_tokenizer_may_have_a_template_for_tools(tmp_path: Path) -> None:
    llm = load(tmp_path, {"default": "{{ messages[0].content }}", "tool_use": CHATML})
    with serving(llm) as server:
        counts = [chat(server, max_tokens=1, **body)["usage"]["prompt_tokens"] for body in ({}, {"tool_choice": "none"})]
    assert counts == [len(llm.chat_prompt([USER], TOOLS)), len(llm.chat_prompt([USER]))] and counts[0] > 2 * counts[1]


def test_a_template_of_an_image_model_gets_texts_as_parts(tmp_path: Path) -> None:
    """SmolVLM's template shows the characters of a plain text as parts without a type: it drops the text."""
    template = (
        "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}{% if part['type'] == 'text' %}"
        "{{ part['text'] }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
    )
    llm = load(tmp_path, template)
    assert llm.tokenizer is not None
    wanted = llm.tokenizer.encode("user: add two numbers\n", add_special_tokens=False)
    message = {"role": "user", "content": "add two numbers"}
    assert llm.chat_prompt([message]) == wanted
    with serving(llm) as server:
        assert chat(server, messages=[message], tools=None, max_tokens=1)["usage"]["prompt_tokens"] == len(wanted)


def test_python_shows_tools_and_keeps_special_tokens(tooled: Served, tmp_path: Path) -> None:
    llm, tokenizer = load(tmp_path, CHATML), tooled.llm.tokenizer  # another one: a server owns its LLM
    assert tokenizer is not None
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    for skip, text in ((True, ""), (False, "<|im_start|>" * 3)):
        params = SamplingParams(max_tokens=3, allowed_token_ids=[start], skip_special_tokens=skip)
        assert llm.chat([USER], params, TOOLS).outputs[0].text == text
        answer = tooled.post("/v1/completions", prompt="x", max_tokens=3, allowed_token_ids=[start], skip_special_tokens=skip)
        assert answer.json()["choices"][0]["text"] == text
    stopped = SamplingParams(max_tokens=3, allowed_token_ids=[0], skip_special_tokens=False)
    assert llm.chat([USER], stopped, TOOLS).outputs[0].text == ""  # the stop token is not part of the text


def test_recorded_tools_are_traffic(tmp_path: Path) -> None:
    llm = load(tmp_path, CHATML)
    file = tmp_path / "asked.jsonl"
    messages = [USER, CALLED, {"role": "tool", "content": "", "tool_call_id": "a"}]
    with serving(llm, record=file) as server:
        counts = [
            chat(server, messages=messages, max_tokens=2, tool_choice=choice)["usage"]["prompt_tokens"]
            for choice in ("none", "required")
        ]
    asked = read_file(file, 9, SamplingParams(max_tokens=20))
    assert [len(text.prompt) for text in encoded(llm.tokenizer, asked, 4096)] == counts
