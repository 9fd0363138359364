"""Chat replies of every known form are read whole and in any chunks; what cannot be parsed stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_folder import make_tokenizer

from outrider.server import formats
from outrider.server.protocol import ChatBody
from outrider.server.replies import (
    ArgumentsReply,
    ListReply,
    ParsedReply,
    Part,
    Replies,
    Reply,
    load_response_template,
    response_template,
)

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "time.now"}},
]
PARIS, NOW = ("weather", {"city": 'the "old" {Paris}', "days": 3}), ("time.now", {})
ARGUMENTS = json.dumps(PARIS[1])
HERMES_CALLS = (
    f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time.now", "arguments": {}}\n</tool_call>'
)
XML_CALLS = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nthe "old" {Paris}\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
    "</function>\n</tool_call>\n<tool_call>\n<function=time.now>\n</function>\n</tool_call>"
)
GEMMA_CALLS = (
    '<|tool_call>call:weather{city:<|"|>the "old" {Paris}<|"|>,days:3}<tool_call|><|tool_call>call:time.now{}<tool_call|>'
)
LISTED = json.dumps([{"name": PARIS[0], "arguments": PARIS[1]}, {"name": NOW[0], "arguments": NOW[1]}])
# (form, reply, content, reasoning, calls)
CASES: dict[str, tuple[dict[str, Any], str, str, str, list[tuple[str, Any]]]] = {
    "hermes": (formats.HERMES, HERMES_CALLS, "", "", [PARIS, NOW]),
    "hermes, everything": (
        formats.HERMES,
        f"<think>\nI <b>should</b> ask.\n</think>\n\nLet me see.\n\n{HERMES_CALLS}\nDone.\n",
        "Let me see.\nDone.\n",
        "I <b>should</b> ask.",
        [PARIS, NOW],
    ),
    "hermes, no call": (formats.HERMES, "\n a < b, <tool and <think> too\n", "\n a < b, <tool and <think> too\n", "", []),
    "hermes, arguments as text": (
        formats.HERMES,
        f"<tool_call>{json.dumps({'name': 'weather', 'arguments': ARGUMENTS})}</tool_call>",
        "",
        "",
        [PARIS],
    ),
    "hermes, the last token is missing": (formats.HERMES, '<tool_call>{"name": "time.now"}', "", "", [NOW]),
    "xml": (formats.QWEN_XML, f"Let me see.\n\n{XML_CALLS}", "Let me see.", "", [PARIS, NOW]),
    "xml, the first token is missing": (formats.QWEN_XML, XML_CALLS.removeprefix("<tool_call>\n"), "", "", [PARIS, NOW]),
    "xml, an indented value": (
        formats.QWEN_XML,
        "<tool_call><function=weather><parameter=city>\n  if a:\n    b\n\n</parameter></function></tool_call>",
        "",
        "",
        [("weather", {"city": "  if a:\n    b\n"})],
    ),
    "gemma": (formats.GEMMA, GEMMA_CALLS, "", "", [PARIS, NOW]),
    "gemma, everything": (
        formats.GEMMA,
        f"<|channel>thought\nI should ask.\n<channel|>Let me see.{GEMMA_CALLS}",
        "Let me see.",
        "I should ask.",
        [PARIS, NOW],
    ),
    "llama": (formats.LLAMA, f'{{"name": "weather", "parameters": {ARGUMENTS}}}', "", "", [PARIS]),
    "llama, python tag": (formats.LLAMA, f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}', "", "", [PARIS]),
    "llama, other JSON": (formats.LLAMA, '{"names": ["Ada"]}', '{"names": ["Ada"]}', "", []),
    "llama, no parameters": (formats.LLAMA, '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', "", []),
    "mistral": (formats.MISTRAL, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time.now[ARGS]{{}}", "", "", [PARIS, NOW]),
    "mistral, everything": (
        formats.MISTRAL,
        f"[THINK]I should ask.[/THINK]Let me see.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}",
        "Let me see.",
        "I should ask.",
        [PARIS],
    ),
    "mistral list": (formats.MISTRAL_LIST, f"[TOOL_CALLS] {LISTED}", "", "", [PARIS, NOW]),
}
# Replies with a call that cannot be parsed: (form, reply, calls that can)
BROKEN: dict[str, tuple[dict[str, Any], str, list[tuple[str, Any]]]] = {
    "no JSON": (formats.HERMES, "Hm <tool_call>\nweather(Paris)\n</tool_call> and so on", []),
    "no name": (formats.HERMES, '<tool_call>{"arguments": {"city": "Paris"}}</tool_call>', []),
    "an empty name": (formats.HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>', []),
    "a list": (formats.HERMES, '<tool_call>["weather"]</tool_call>', []),
    "text as arguments": (formats.HERMES, '<tool_call>{"name": "weather", "arguments": "Paris"}</tool_call>', []),
    "a number that JSON has not": (
        formats.HERMES,
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
        [],
    ),
    "deeply nested": (formats.HERMES, f"<tool_call>{'[' * 100_000}</tool_call>", []),
    "cut": (formats.HERMES, '<tool_call>{"name": "weather", "argum', []),
    "cut in the first token": (formats.HERMES, "Hm <tool_ca", []),
    "cut, xml": (formats.QWEN_XML, "<tool_call><function=weather><parameter=city>Paris</parameter><parameter=da", []),
    "cut between parameters": (formats.QWEN_XML, "<tool_call><function=weather><parameter=city>Paris</parameter>", []),
    "text between parameters": (
        formats.QWEN_XML,
        "<tool_call><function=weather><parameter=city>Paris<parameter=days>3</function></tool_call>",
        [],
    ),
    "cut, gemma": (formats.GEMMA, '<|tool_call>call:weather{city:<|"|>Par', []),
    "cut, llama": (formats.LLAMA, '{"name": "weather", "parameters": {"city": "Par', []),
    "text after it, llama": (formats.LLAMA, '{"name": "time.now", "parameters": {}} is the call', []),
    "cut, mistral": (formats.MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Par', []),
    "not a list": (formats.MISTRAL_LIST, '[TOOL_CALLS]{"name": "weather"}', []),
}


def read(reply: Reply, chunks: Iterable[str]) -> Part:
    part = Part()
    for chunk in chunks:
        part.add(reply.feed(chunk))
    part.add(reply.finish())
    return part


def parsed(form: dict[str, Any], chunks: Iterable[str], prompt_end: str = "", tools: Sequence[Any] = TOOLS) -> Part:
    return read(ParsedReply(load_response_template(form), None, prompt_end, list(tools)), chunks)


def splits(text: str) -> list[list[str]]:
    """Return the text whole, in single characters, and in two parts at each place."""
    return [[text], list(text), *([text[:at], text[at:]] for at in range(1, min(len(text), 500)))]


def calls_of(part: Part) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in part.calls]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("case", CASES)
def test_every_form_is_read_in_any_chunks(case: str) -> None:
    form, text, *wanted = CASES[case]
    for chunks in splits(text):
        part = parsed(form, chunks)
        assert [part.content, part.reasoning, calls_of(part)] == wanted


@pytest.mark.parametrize("case", BROKEN)
def test_a_call_that_cannot_be_parsed_is_text(case: str) -> None:
    form, text, calls = BROKEN[case]
    for chunks in splits(text) if len(text) < 1000 else [[text]]:
        part = parsed(form, chunks)
        assert (part.content, calls_of(part)) == (text, calls)


def test_the_reply_goes_on_after_a_broken_call() -> None:
    broken, good = "<tool_call>oh</tool_call>", '<tool_call>{"name": "time.now"}</tool_call>'
    part = parsed(formats.HERMES, [f"One{broken}two{good}three"])
    assert re.sub(r"\s", "", part.content) == f"One{broken}twothree" and calls_of(part) == [NOW]


@pytest.mark.parametrize("form", [form for _, form in formats.FORMATS])
def test_calls_are_text_without_tools(form: dict[str, Any]) -> None:
    for case in ("hermes", "xml", "gemma", "llama", "mistral", "mistral list"):
        text = CASES[case][1]
        assert parsed(form, list(text), tools=()).content == text


@pytest.mark.parametrize(
    ("prompt_end", "reply", "content", "reasoning"),
    [
        ("<|im_start|>assistant\n<think>\n", "I see.\n</think>\n\nYes", "Yes", "I see."),
        ("<|im_start|>assistant\n<think>\n", "I see", "", "I see"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes <think>", "Yes <think>", ""),
        ("<|im_start|>assistant\n<think>\nold</think><|im_end|>\n<|im_start|>assistant\n", "<think>a</think>b", "b", "a"),
        ("<think>\n", "Yes", "Yes", ""),  # where the reply begins is unknown
    ],
)
def test_the_prompt_may_begin_the_reply(prompt_end: str, reply: str, content: str, reasoning: str) -> None:
    for chunks in splits(reply):
        part = parsed(formats.HERMES, chunks, prompt_end)
        assert (part.content, part.reasoning) == (content, reasoning)


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=weather>",
        "</function>",
        "<parameter=city>",
        "</parameter>",
        "<|tool_call>call:",
    ),
    *("<tool_call|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "{", "}", '"name": "', '"', "\n", " "),
    *('{"name": "weather", "arguments": {"city": "', '"}}', '{"city": "', '"}', "[THINK]", "<|channel>thought\n", "<channel|>"),
]


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    data=st.data(),
    form=st.sampled_from([form for _, form in formats.FORMATS]),
)
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
def test_nothing_is_lost_and_chunks_do_not_matter(pieces: list[str], data: st.DataObject, form: dict[str, Any]) -> None:
    words = [f"w{index}w" for index in range(len(pieces))]
    text = "".join(word + piece for word, piece in zip(words, pieces, strict=True))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    whole = parsed(form, [text])
    part = parsed(form, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    assert (part.content, part.reasoning, calls_of(part)) == (whole.content, whole.reasoning, calls_of(whole))
    said = whole.content + whole.reasoning + json.dumps(calls_of(whole))
    assert all(word in said for word in words)


def test_ids_suit_every_template_and_differ() -> None:
    found = parsed(formats.HERMES, [HERMES_CALLS]).calls + parsed(formats.HERMES, [HERMES_CALLS]).calls
    assert [call["index"] for call in found] == [0, 1, 0, 1]
    ids = {call["id"] for call in found}
    assert len(ids) == 4 and all(re.fullmatch("[a-zA-Z0-9]{9}", each) for each in ids)


def test_a_list_of_calls_is_complete_call_by_call() -> None:
    reply = ListReply()
    assert not reply.feed('[{"name": "weather", "arguments": {"city": "}').calls
    assert calls_of(reply.feed('"}}')) == [("weather", {"city": "}"})]
    assert not reply.feed(',\n {"name": "time.now", "argu').calls
    assert read(reply, []).content == '{"name": "time.now", "argu'
    cut = len('{"name": "time.now", "arguments": {}}]')
    for text, content, calls in (
        (LISTED, "", [PARIS, NOW]),
        (LISTED[:-5], LISTED[-cut:-5], [PARIS]),
        (LISTED[:9], LISTED[:9], []),
    ):
        for chunks in splits(text):
            part = read(ListReply(), chunks)
            assert (part.content, calls_of(part)) == (content, calls)


def test_arguments_of_one_function_are_streamed() -> None:
    for chunks in splits(ARGUMENTS):
        first, *others = read(ArgumentsReply("weather"), chunks).calls
        assert first["function"]["name"] == "weather" and all(call.keys() == {"index", "function"} for call in others)
        assert "".join(call["function"]["arguments"] for call in (first, *others)) == ARGUMENTS


TEMPLATES = {
    "Hermes, Qwen": ("<|im_start|><tool_call>", formats.HERMES),
    "Qwen3-Coder": ("<|im_start|><tool_call><function=", formats.QWEN_XML),
    "Gemma": ("<|tool_call>", formats.GEMMA),
    "Llama": ('<|start_header_id|>{"name": name, "parameters": {}}', formats.LLAMA),
    "Mistral": ("[TOOL_CALLS]name[ARGS]", formats.MISTRAL),
    "older Mistral": ("[TOOL_CALLS] [", formats.MISTRAL_LIST),
    "another one": ("<|call|>", None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_found_by_the_chat_template(name: str) -> None:
    text, form = TEMPLATES[name]
    tokenizer = make_tokenizer(chat_template="{{ tools }}" + text)
    assert response_template(tokenizer) == (None if form is None else load_response_template(form))
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": text}
    assert response_template(tokenizer) == (None if form is None else load_response_template(form))


def test_the_tokenizers_own_form_is_preferred(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer(chat_template=TEMPLATES["Gemma"][0])
    own = {
        "start_anchor": "assistant:",
        "fields": {"thinking": {"open": "(", "close_pattern": r"\)+"}, "content": {"close": "END"}},
    }
    tokenizer.response_template = own
    for chunks in splits("(well))yesEND"):
        part = read(ParsedReply(response_template(tokenizer), None, "assistant:", []), chunks)
        assert (part.content, part.reasoning) == ("yes", "well")
    tokenizer.response_template = {"version": 2, "fields": {}}
    assert response_template(tokenizer) == load_response_template(formats.GEMMA)
    assert "response_template is not used" in caplog.text


def test_special_tokens_are_left_out_of_the_text() -> None:
    tokenizer = make_tokenizer(chat_template=TEMPLATES["Hermes, Qwen"][0])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<tool_call>"]})
    text = f"Let <|im_start|>me<|im_end|> see.{HERMES_CALLS}<|end|>"
    for skip, content in ((True, "Let me see."), (False, "Let <|im_start|>me<|im_end|> see.\n<|end|>")):
        body = ChatBody(messages=[{"role": "user", "content": "?"}], tools=TOOLS, skip_special_tokens=skip)
        for chunks in splits(text):
            part = read(Replies(tokenizer).readers(body, tokenizer.encode("<|im_start|>assistant\n"))[0], chunks)
            assert (part.content, calls_of(part)) == (content, [PARIS, NOW])
