"""OpenAI's client gets the offline engine's output, streamed and whole, for all sampling parameters."""

from __future__ import annotations

import gzip
import json
import math
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from toy import outputs_of

from outrider import LLM, SamplingParams
from outrider.engine.logprobs import TokenLogprobs
from outrider.engine.outputs import Completion
from outrider.server.answers import Answer, ChatAnswer, CompletionAnswer, TokenTexts
from outrider.server.protocol import Message

from .served import Served

PROMPT = "def add(first, second):"
MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "The ship"}]},
]


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)


def offline(plain: LLM, prompt: Any = PROMPT, **params: Any) -> list[Any]:
    return outputs_of(plain.generate(prompt, SamplingParams(**({"max_tokens": 24} | params))))


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 1.3, "top_p": 0.7},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "min_p": {"temperature": 1.3, "min_p": 0.05},
    "presence_penalty": {"temperature": 0.7, "presence_penalty": 1.5},
    "frequency_penalty": {"temperature": 0.7, "frequency_penalty": 1.5},
    "repetition_penalty": {"temperature": 0.7, "repetition_penalty": 1.7},
    "logit_bias": {"temperature": 0.9, "logit_bias": {70: 9.0, 71: -50.0}},
    "banned_token_ids": {"temperature": 0.0, "banned_token_ids": [35, 100, 262]},
    "allowed_token_ids": {"temperature": 0.9, "allowed_token_ids": [*range(60, 120)]},
    "stop": {"temperature": 1.0, "stop": ["e", "1"]},
    "stop_token_ids": {"temperature": 1.0, "stop_token_ids": [*range(1, 60)]},
    "min_tokens": {"temperature": 1.0, "stop_token_ids": [*range(1, 60)], "stop": ["e"], "min_tokens": 9},
    "include_stop_str_in_output": {"temperature": 1.0, "stop": ["e", "1"], "include_stop_str_in_output": True},
    "ignore_eos": {"temperature": 1.5, "ignore_eos": True},
    "seed": {"temperature": 1.0, "seed": 12345},
}
OURS = {"top_k", "min_p", "repetition_penalty", "banned_token_ids", "allowed_token_ids", "stop_token_ids", "ignore_eos"}
OURS |= {"min_tokens", "include_stop_str_in_output"}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_parameter_matches_plain_decoding_over_http(name: str, client: openai.OpenAI, plain: LLM) -> None:
    settings = {"seed": 7} | SETTINGS[name]
    extra = {key: value for key, value in settings.items() if key in OURS}
    usual = {key: value for key, value in settings.items() if key not in OURS}
    answer = client.completions.create(model="outrider", prompt=PROMPT, max_tokens=24, extra_body=extra, **usual)
    wanted = offline(plain, **{key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})[0]
    assert answer.choices[0].text == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason
    assert answer.usage is not None and answer.usage.completion_tokens == len(wanted.token_ids)
    if name != "greedy":
        assert wanted.token_ids != offline(plain, seed=7, temperature=0.0)[0].token_ids


def test_several_prompts_and_samples_come_in_order(client: openai.OpenAI, plain: LLM) -> None:
    prompts = [PROMPT, "The ship"]
    answer = client.completions.create(model="outrider", prompt=prompts, n=3, seed=3, temperature=1.0, max_tokens=12)
    wanted = offline(plain, prompts, n=3, seed=3, temperature=1.0, max_tokens=12)
    assert [choice.text for choice in answer.choices] == [completion.text for completion in wanted]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len({choice.text for choice in answer.choices}) > 2


def test_token_ids_are_a_prompt(client: openai.OpenAI, plain: LLM) -> None:
    ids = plain.encode(PROMPT)
    for prompt in (ids, [ids]):
        answer = client.completions.create(model="outrider", prompt=prompt, temperature=0, max_tokens=8)
        assert answer.choices[0].text == offline(plain, ids, max_tokens=8)[0].text


def test_null_means_omitted(served: Served, plain: LLM) -> None:
    nothing = dict.fromkeys(["top_p", "n", "stop", "presence_penalty", "logit_bias", "stream", "logprobs", "user", "suffix"])
    assert served.text(PROMPT, **nothing) == offline(plain)[0].text
    said = {"role": "assistant", "content": "Hello", "refusal": None, "tool_calls": None}  # as clients store an answer
    answer = served.post("/v1/chat/completions", messages=[*MESSAGES, said], max_tokens=4, tools=None)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
def test_an_impossible_token_has_a_finite_log_probability(kind: type[Answer]) -> None:
    found = TokenLogprobs(-0.5, ((1, -0.5), (2, -math.inf)))
    completion, texts = Completion("r", [1], ["plain"], "a", [found], "stop", num_prompt_tokens=1), TokenTexts(None)
    texts._bytes = [b"a", b"b", b"c"]
    said = json.dumps(kind("c", "m", texts, [completion]).response(), allow_nan=False)
    assert "-9999.0" in said


def test_the_generated_token_is_among_the_likeliest_ones() -> None:
    found = TokenLogprobs(-2.5, ((1, -0.5), (2, -1.5)))
    completion, texts = Completion("r", [0], ["plain"], "a", [found], "stop", num_prompt_tokens=1), TokenTexts(None)
    texts._bytes = [b"a", b"b", b"c"]
    (choice,) = CompletionAnswer("c", "m", texts, [completion]).response()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"b": -0.5, "c": -1.5, "a": -2.5}]


def test_the_stop_reason_tells_stop_strings_from_the_end_of_the_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "outrider", "prompt": PROMPT, "max_tokens": 40, "seed": 5}
    text = client.completions.create(**asked).choices[0].text
    (choice,) = client.completions.create(**asked, stop=[text[9:12]]).choices
    assert choice.finish_reason == "stop" and choice.model_extra == {"stop_reason": text[9:12]}
    (choice,) = client.completions.create(**asked, stop=["never there"]).choices
    assert choice.model_extra == {"stop_reason": None}


def test_a_speakers_name_reaches_the_template() -> None:
    shown = Message(role="user", content="Hello", name="Ada").for_template()
    assert shown == {"role": "user", "content": "Hello", "name": "Ada"}


@pytest.mark.parametrize("stop", [None, ["e"]])
def test_a_stream_equals_the_whole_answer(client: openai.OpenAI, stop: list[str] | None) -> None:
    asked: dict[str, Any] = {"model": "outrider", "prompt": PROMPT, "max_tokens": 40, "seed": 5, "n": 2, "stop": stop}
    whole = client.completions.create(**asked)
    texts, reasons, usage = ["", ""], ["", ""], None
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert [text.encode() for text in texts] == [choice.text.encode() for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_chat_equals_a_completion_of_the_rendered_template(client: openai.OpenAI, plain: LLM) -> None:
    answer = client.chat.completions.create(model="outrider", messages=MESSAGES, temperature=0, max_completion_tokens=16)
    prompt = plain.chat_prompt([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The ship"}])
    assert answer.choices[0].message.content == offline(plain, prompt, max_tokens=16)[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)


def test_usage_counts_the_prompt_tokens_that_were_cached(client: openai.OpenAI, plain: LLM) -> None:
    prompt = plain.encode("A prompt that no other test of this file begins with: " * 3)
    again = [prompt, [*prompt[:-1], 5], [7, *prompt]]
    counts = []
    for each in (prompt, again):
        usage = client.completions.create(model="outrider", prompt=each, max_tokens=2, n=2).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        counts.append(usage.prompt_tokens_details.cached_tokens)
    assert counts == [0, 2 * (len(prompt) - 1)]


def test_a_streamed_chat_starts_with_the_role_and_equals_the_whole_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "outrider", "messages": MESSAGES, "temperature": 0.8, "seed": 1, "max_tokens": 16}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_served_model_is_described(client: openai.OpenAI) -> None:
    assert client.models.retrieve("outrider").id == "outrider"
    with pytest.raises(openai.NotFoundError, match="this server serves 'outrider'"):
        client.models.retrieve("owner/other")


def test_logprobs_are_the_models_own(client: openai.OpenAI, plain: LLM) -> None:
    wanted = offline(plain, max_tokens=10, logprobs=3)[0].logprobs
    answer = client.completions.create(model="outrider", prompt=PROMPT, temperature=0, max_tokens=10, logprobs=3)
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs == pytest.approx([each.logprob for each in wanted], abs=1e-5)
    assert found.top_logprobs is not None and all(len(top) == 3 for top in found.top_logprobs)
    assert found.tokens is not None and len(found.tokens) == 10
    assert found.text_offset is not None
    places = [(token, at) for token, at in zip(found.tokens, found.text_offset, strict=True) if not token.startswith("bytes:")]
    assert 0 < len(places) < 10  # parts of characters too
    assert [answer.choices[0].text[at:][: len(token)] for token, at in places] == [token for token, _ in places]
    chat = client.chat.completions.create(
        model="outrider", messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content and all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in content)
    assert b"".join(bytes(each.bytes or ()) for each in content).decode(errors="replace") == chat.choices[0].message.content


@pytest.mark.parametrize(
    ("speculative", "drafts"),
    [
        ({"num_draft_tokens": 0}, False),
        ({"method": "plain"}, False),
        ({"method": "draft", "num_draft_tokens": 2}, True),
        ({"num_draft_tokens": "auto"}, True),
    ],
)
def test_a_request_chooses_its_own_drafts(client: openai.OpenAI, plain: LLM, speculative: dict[str, Any], drafts: bool) -> None:
    answer = client.completions.create(
        model="outrider", prompt=PROMPT, temperature=0, max_tokens=24, extra_body={"speculative": speculative}
    )
    assert answer.choices[0].text == offline(plain)[0].text
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    details = answer.usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens or 0, details.rejected_prediction_tokens or 0
    assert bool(accepted + rejected) == drafts
    metrics = (answer.model_extra or {}).get("metrics")
    assert (metrics is not None) == drafts
    if metrics:
        found = metrics["speculative_decoding"]
        steps, histogram = found["num_spec_steps"], found["acceptance_histogram"]
        assert sum(histogram) == steps > 0
        assert sum(j * count for j, count in enumerate(histogram)) == found["num_accepted_draft_tokens"] == accepted
        assert found["num_draft_tokens"] == accepted + rejected <= steps * found["num_spec_tokens"]
        assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
        assert found["draft_acceptance_rate"] == pytest.approx(accepted / (accepted + rejected))


def test_a_stream_has_metrics_with_its_usage(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="outrider", prompt=PROMPT, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert not any("metrics" in (chunk.model_extra or {}) for chunk in chunks)
    assert (last.model_extra or {})["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_samples_have_no_metrics_of_one_request(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="outrider", prompt=PROMPT, max_tokens=8, n=2)
    assert "metrics" not in (answer.model_extra or {})


def test_models_are_listed_and_others_are_refused(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["outrider"]
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        client.completions.create(model="gpt-9", prompt="a")


def test_fields_that_change_nothing_are_accepted(served: Served) -> None:
    neutral = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "top_k": -1, "min_tokens": 0}
    neutral |= {"modalities": ["text"], "add_generation_prompt": True, "service_tier": "flex", "skip_special_tokens": True}
    neutral |= {"prediction": {"type": "content", "content": "Hi"}, "prompt_cache_retention": "24h", "verbosity": "low"}
    neutral |= {"prompt_cache_options": {"mode": "implicit", "ttl": "30m", "prewarm": False}}
    neutral |= {"tools": [{"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}]}
    neutral["tool_choice"] = "none"
    sent_back = {"role": "assistant", "content": "Hello", "refusal": None, "annotations": [], "parsed": {"a": 1}}
    hints = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
    sent_back["content"] = [{"type": "text", "text": "Hello", **hints}]
    sent_back["cache_control"] = {"type": "ephemeral"}
    plain, full = (
        served.post("/v1/chat/completions", messages=[*MESSAGES, message, *MESSAGES], max_tokens=4, **more)
        for message, more in (({"role": "assistant", "content": "Hello"}, {}), (sent_back, neutral))
    )
    assert full.status_code == 200, full.text
    assert plain.json()["choices"] == full.json()["choices"]


def test_a_refusal_in_the_history_is_what_the_assistant_said(served: Served) -> None:
    usages = []
    for said in (
        {"content": "No."},
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": None, "refusal": "No."},  # as the SDK stores an answer
        {"content": "", "refusal": "No."},
    ):
        messages = [*MESSAGES, {"role": "assistant", **said}, *MESSAGES]
        usages.append(served.post("/v1/chat/completions", messages=messages, max_tokens=4).json()["usage"]["prompt_tokens"])
    assert len(set(usages)) == 1
    messages[2]["content"] = [{"type": "refusal"}]
    error = served.post("/v1/chat/completions", messages=messages).json()["error"]
    assert error["message"].startswith("messages.2.content.0.text: missing")


def test_fields_of_completions_that_change_nothing_are_accepted(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "outrider", "prompt": PROMPT, "max_tokens": 8, "seed": 1, "temperature": 1, "n": 2}
    plain = client.completions.create(**asked)
    full = client.completions.create(**asked, best_of=2, suffix="")
    assert [choice.text for choice in full.choices] == [choice.text for choice in plain.choices]
    for more, told in (
        ({"best_of": 3}, "invalid best_of 3: expected n=2, because all samples are returned"),
        ({"suffix": "}"}, "suffix: fill-in-the-middle is not supported: write the model's own markers into"),
    ):
        with pytest.raises(openai.BadRequestError, match=told):
            client.completions.create(**asked, **more)


@pytest.mark.parametrize("path", ["/embeddings", "/responses/resp_1", "/chat/completions/", "/%0A" + "x" * 500])
def test_an_unknown_path_is_refused_with_those_that_exist(client: openai.OpenAI, path: str) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served: expected POST /v1/chat/completions, ") as error:
        client.post(path, cast_to=object, body={})
    assert error.value.code == "unknown_url" and len(error.value.message) < 300
    with pytest.raises(openai.APIStatusError, match="GET '/v1/completions' is not served") as error_:
        client.get("/completions", cast_to=object)
    assert error_.value.status_code == 405


@pytest.mark.parametrize("is_streamed", [False, True])
def test_offsets_count_special_tokens_that_are_shown(served: Served, is_streamed: bool) -> None:
    assert served.llm.tokenizer is not None
    end, other = served.llm.tokenizer.eos_token_id, served.llm.tokenizer.convert_tokens_to_ids("a")
    asked = {
        "frequency_penalty": 2,
        "allowed_token_ids": [end, other],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 0,
    }
    answer = served.post("/v1/completions", prompt="a", seed=1, temperature=1, stream=is_streamed, **asked)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(event)["choices"][0] for event in (events if is_streamed else [answer.text])]
    text = "".join(choice["text"] for choice in choices)
    tokens, offsets = (
        [each for choice in choices if choice["logprobs"] for each in choice["logprobs"][name]]
        for name in ("tokens", "text_offset")
    )
    assert {*tokens} == {served.llm.tokenizer.eos_token, "a"} and "".join(tokens) == text
    assert all(text.startswith(token, at) for token, at in zip(tokens, offsets, strict=True))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("[" * 200_000 + "]" * 200_000, "invalid JSON: nested too deeply"),
        ("9" * 5000, "invalid JSON: a number has too many digits"),
    ],
)
def test_json_that_python_cannot_read_is_refused_with_the_reason(served: Served, value: str, says: str) -> None:
    answer = served.send("/v1/completions", f'{{"prompt": {value}}}'.encode())
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(says)


@pytest.mark.parametrize(
    ("encoding", "status", "says"),
    [("gzip", 415, "the body is compressed"), ("identity", 400, "invalid JSON: expected text in UTF-8")],
)
def test_a_body_that_is_no_text_is_refused(served: Served, encoding: str, status: int, says: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = httpx.post(served.url + "/v1/completions", content=gzip.compress(b"{}"), headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"][: len(says)]) == (status, says)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"temperature": -1}, "temperature"),
        ({"functions": []}, "functions"),
        (
            {"min_tokens": 9, "max_completion_tokens": 8},
            "exceeds max_completion_tokens=8: lower min_tokens or raise max_completion",
        ),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 exceeds max_tokens=8: lower min_tokens or raise max_tokens"),
        ({"min_tokens": 9, "max_tokens": 10, "max_completion_tokens": 8}, "exceeds max_completion_tokens=8"),
        ({"max_completion_tokens": 1 << 31}, "max_completion_tokens: expected a value less than or equal to 2147483647"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm: expected False"),
        ({"speculative": {"method": "medusa"}}, "draft"),
        ({"speculative": {"num_draft_tokens": -1}}, "speculative"),
        ({"logit_bias": {"100000": 1}}, "vocabulary"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 4000}]}, "context"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "Unicode"),
    ],
)
def test_unsupported_requests_are_refused_with_the_reason(served: Served, body: dict[str, Any], says: str) -> None:
    answer = served.post("/v1/chat/completions", **({"messages": MESSAGES} | body))
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_min_tokens_above_the_context_leaves_the_end_to_the_context(served: Served) -> None:
    ends = []
    for most in ({}, {"max_tokens": 10_000}):
        answer = served.post("/v1/chat/completions", messages=MESSAGES, min_tokens=10_000, **most).json()
        ends.append((answer["choices"][0]["finish_reason"], answer["usage"]["total_tokens"]))
    assert ends == [("length", served.llm.runner.max_len)] * 2


def test_a_schema_that_is_missing_means_any_object(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "anything"}}
    answers = [
        served.post("/v1/completions", prompt=PROMPT, max_tokens=12, response_format=each).json()["choices"]
        for each in (form, {"type": "json_object"})
    ]
    assert answers[0] == answers[1] and answers[0][0]["text"].lstrip().startswith("{")


def test_states_are_read_without_a_body(served: Served) -> None:
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert httpx.head(served.url + path).status_code == 200


def test_the_openapi_document_allows_the_fields_that_are_accepted_without_effect(served: Served) -> None:
    parts = httpx.get(served.url + "/openapi.json").json()["components"]
    block = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [block]}
    chat = {"messages": [message | {"parsed": {}}], "max_tokens": 1, "user": "ada", "metadata": {}, "prompt_cache_key": "c"}
    streamed = {"stream": True, "stream_options": {"include_obfuscation": False}}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "/v1/chat/completions": ("ChatBody", chat | streamed),
        "/v1/responses": ("ResponseBody", {"input": "Hi", "max_output_tokens": 1, "max_tool_calls": 3, "client_metadata": {}}),
        "/v1/messages": ("MessagesBody", {"messages": [message], "max_tokens": 1, "speed": "fast"}),
    }
    for path, (name, body) in bodies.items():
        jsonschema.validate(body, {"$ref": f"#/components/schemas/{name}", "components": parts})
        assert served.post(path, **body).status_code == 200, path
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(body | {"bogus": 1}, {"$ref": f"#/components/schemas/{name}", "components": parts})
