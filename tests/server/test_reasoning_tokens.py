"""``usage`` counts the tokens between the markers of reasoning, exactly and however they arrive."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.engine.detokenizer import BytesDetokenizer
from outrider.server import formats
from outrider.server.answers import TokenEnds
from outrider.server.protocol import ChatBody
from outrider.server.replies import ParsedReply, load_response_template

from . import test_tools
from .served import Served
from .test_tools import AT_ONCE, Says

tooled, says = test_tools.tooled, test_tools.says  # fixtures
USER = [{"role": "user", "content": "Hi"}]
BODY = ChatBody(messages=USER)  # type: ignore[arg-type]
ANALYSIS = "<|channel|>", "analysis", "<|message|>"


@pytest.mark.parametrize(
    ("form", "prompt_end", "tokens", "expected"),
    [
        (formats.HERMES, "Hi", ["<think>", "\n", "A", " b", "\n", "</think>", "\n\n", "C", ""], 4),
        (formats.HERMES, "Hi<think>\n", ["A", " b", "</think>", "C"], 2),  # the prompt begins it
        (formats.HERMES, "Hi<think>", ["</think>", "C"], 0),
        (formats.HERMES, "Hi<think></think>", ["", "C"], 0),
        (formats.HERMES, "Hi", ["A", "<think>", "B", "</think>"], 0),  # text
        (formats.HERMES, "Hi", ["<th", "ink>", "A", " b", "</", "thi", "nk>", "C"], 2),  # markers of several tokens
        (formats.HERMES, "Hi", ["<think>A", " b", ".</think>", "C"], 1),  # tokens that are partly markers
        (formats.HERMES, "Hi", ["<think>A</think>", "C"], 0),
        (formats.HERMES, "Hi", ["<think>", "A", "</thi", ""], 3),  # cut; the last token ends the text
        (formats.HERMES, "Hi", ["<think>", b"\xf0\x9f", b"\x98", b"\x80", "</think>", "C"], 3),
        (formats.HERMES, "Hi", ["<think>", b"\xf0\x9f", "</think>", "C"], 1),  # invalid UTF-8
        (
            formats.GPT_OSS,
            "<|start|>assistant",
            [*ANALYSIS, "A", " b", "<|end|>", "<|start|>assistant", *ANALYSIS, "C", "<|start|>", "assistant", *ANALYSIS[:1]],
            3,
        ),
    ],
)
def test_the_tokens_between_markers_count(
    form: dict[str, Any], prompt_end: str, tokens: list[str | bytes], expected: int
) -> None:
    table = [token if isinstance(token, bytes) else token.encode() for token in tokens]
    for size in range(1, len(tokens) + 1):
        reply, ends = ParsedReply(load_response_template(form), prompt_end, BODY), TokenEnds(BytesDetokenizer(table))
        text, counts = BytesDetokenizer(table), [0]
        for start in range(0, len(tokens), size):
            group = range(len(tokens))[start : start + size]
            ends.add(group)
            reply.feed(text.feed(group))
            counts.append(sum(ends.count(*span) for span in reply.reasoning_spans))
        reply.finish()
        counts.append(sum(ends.count(*span) for span in reply.reasoning_spans))
        assert counts[-1] == expected and counts == sorted(counts)


def test_tokens_begin_where_the_engine_shows_their_text() -> None:
    table = [b" Hello", b" wor", b"\xf0\x9f", b"ld", b"\xf0\x9f", b"\x98\x80", b"!"]
    text = BytesDetokenizer(table, strips_space=True).feed(range(len(table)))  # type: ignore[arg-type]
    ends = TokenEnds(BytesDetokenizer(table, strips_space=True))  # type: ignore[arg-type]
    begins = [*ends.add(range(3)), *ends.add(range(3, len(table)))]
    assert text == "Hello wor\ufffdld\U0001f600!" and begins == [0, 5, 9, 10, 12, 12, 13]


def thinks(server: Served, says: Says) -> list[int]:
    """Make the model write two replies in turn, and return their numbers of tokens of reasoning."""
    assert server.llm.tokenizer is not None
    encode, tokens = server.llm.tokenizer.encode, list[list[int]]()
    for thought in ("\nI should add, and then ask.\n", "Yes."):
        tokens.append(encode(thought))
    says(*[[*encode("<think>"), *each, *encode("</think>"), *encode("\n\nDone, I think.")] for each in tokens])
    return [len(each) for each in tokens]


def usages(answer: Any) -> list[dict[str, Any]]:
    """Return the usage of each event of a stream that has one."""
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    return [each["usage"] for event in events for each in (event, event.get("response", {})) if each.get("usage")]


@pytest.mark.parametrize("more", [{}, {"include_reasoning": False}, {"stop": ["ink."]}, {"skip_special_tokens": False}])
def test_chat_counts_the_tokens_of_reasoning(tooled: Served, says: Says, more: dict[str, Any]) -> None:
    asked = {"messages": USER, "n": 2, "max_tokens": 400, **more}
    expected = sum(thinks(tooled, says))
    answer = tooled.post("/v1/chat/completions", **asked).json()
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == expected > 4
    thinks(tooled, says)
    (last,) = usages(tooled.post("/v1/chat/completions", **asked, stream=True, stream_options={"include_usage": True}))
    assert last["completion_tokens_details"]["reasoning_tokens"] == expected
    thinks(tooled, says)
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = usages(tooled.post("/v1/chat/completions", **asked, stream=True, stream_options=options))
    counts = [each["completion_tokens_details"]["reasoning_tokens"] for each in found]
    assert counts == sorted(counts) and counts[-1] == expected and len({*counts}) > 2


def test_the_responses_api_counts_the_tokens_of_reasoning(tooled: Served, says: Says) -> None:
    for is_streamed in (False, True):
        expected, _ = thinks(tooled, says)
        answer = tooled.post("/v1/responses", input="Hi", max_output_tokens=400, stream=is_streamed)
        usage = usages(answer)[-1] if is_streamed else answer.json()["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == expected > 4
        assert usage["output_tokens_details"].keys() >= {"accepted_prediction_tokens", "rejected_prediction_tokens"}
        assert usage["input_tokens_details"].keys() == {"cached_tokens", "cache_write_tokens"}


def test_reasoning_that_is_truncated_counts(tooled: Served, says: Says) -> None:
    thinks(tooled, says)
    usage = tooled.post("/v1/chat/completions", messages=USER, max_tokens=4).json()["usage"]
    assert usage["completion_tokens"] == 4 and usage["completion_tokens_details"]["reasoning_tokens"] == 3


def test_answers_without_reasoning_count_none(tooled: Served, served: Served) -> None:
    for server in (tooled, served):
        chat = server.post("/v1/chat/completions", messages=USER, max_tokens=4, **AT_ONCE).json()["usage"]
        text = server.post("/v1/completions", prompt="<think>Hi", max_tokens=4).json()["usage"]
        for usage in (chat, text):
            assert usage["completion_tokens"] == 4 and usage["completion_tokens_details"]["reasoning_tokens"] == 0
