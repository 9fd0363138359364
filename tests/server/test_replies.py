"""Chat replies of every known form are read whole and in any chunks; what cannot be parsed stays text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_folder import make_tokenizer

from outrider.engine import detokenizer
from outrider.engine.detokenizer import DetokenizerFactory
from outrider.server import formats
from outrider.server.calls import plain_json
from outrider.server.parameters import typed
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
KIMI_CALLS = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.time.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
LISTED = json.dumps([{"name": PARIS[0], "arguments": PARIS[1]}, {"name": NOW[0], "arguments": NOW[1]}])
HUNYUAN, GRANITE = formats.form_of("<tool_calls><answer>"), formats.form_of("<|tool_call|><response></response>")
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
    "hermes, parameters": (
        formats.HERMES,
        f'<tool_call>{{"name": "weather", "parameters": {ARGUMENTS}}}</tool_call>',
        "",
        "",
        [PARIS],
    ),
    "hermes, two in one": (formats.HERMES, HERMES_CALLS.replace("</tool_call>\n<tool_call>", ""), "", "", [PARIS, NOW]),
    "hermes, null": (formats.HERMES, '<tool_call>{"name": "time.now", "arguments": null}</tool_call>', "", "", [NOW]),
    "hermes, half a character": (
        formats.HERMES,
        r'<tool_call>{"name": "weather", "arguments": {"city": "\ud83d"}}</tool_call>',
        "",
        "",
        [("weather", {"city": "\ud83d"})],
    ),
    "hermes, text that looks like other types": (
        formats.HERMES,
        '<tool_call>{"name": "weather", "arguments": {"days": "3", "city": "None"}}</tool_call>',
        "",
        "",
        [("weather", {"days": "3", "city": "None"})],
    ),
    "xml, the last token is missing": (formats.QWEN_XML, XML_CALLS.removesuffix("</tool_call>"), "", "", [PARIS, NOW]),
    "xml, two functions in one": (
        formats.QWEN_XML,
        XML_CALLS.replace("</tool_call>\n<tool_call>\n", ""),
        "",
        "",
        [PARIS, NOW],
    ),
    "xml, two functions alone": (
        formats.QWEN_XML,
        re.sub("</?tool_call>", "", XML_CALLS) + "Done </b>",
        "Done </b>",
        "",
        [PARIS, NOW],
    ),
    "xml, a marker in a value": (
        formats.QWEN_XML,
        "<function=weather><parameter=city>a</function>b</parameter></function> <b>",
        "<b>",
        "",
        [("weather", {"city": "a</function>b"})],
    ),
    "gemma, other keys and spaces": (
        formats.GEMMA,
        '<|tool_call>call:weather{city: <|"|>{a:1}<|"|>, user-id: "x,y:1", days :3}<tool_call|>',
        "",
        "",
        [("weather", {"city": "{a:1}", "user-id": "x,y:1", "days": 3})],
    ),
    "llama, a type first": (
        formats.LLAMA,
        f'{{"type": "function", "name": "weather", "parameters": {ARGUMENTS}}}',
        "",
        "",
        [PARIS],
    ),
    "llama, arguments": (formats.LLAMA, f'{{"name": "weather", "arguments": {ARGUMENTS}}}', "", "", [PARIS]),
    "llama, null": (formats.LLAMA, '{"name": "time.now", "parameters": null}', "", "", [NOW]),
    "llama, several": (
        formats.LLAMA,
        f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "time.now", "parameters": {{}}}}\n'
        f'{{"type": "function", "name": "weather", "parameters": {ARGUMENTS}}}',
        "",
        "",
        [PARIS, NOW, PARIS],
    ),
    "lfm": (
        formats.LFM,
        "<think>Hm.</think><|tool_call_start|>[weather(city='the \"old\" {Paris}', days=3), time.now()]"
        "<|tool_call_end|>I look.",
        "I look.",
        "Hm.",
        [PARIS, NOW],
    ),
    "lfm, cut after the call": (
        formats.LFM,
        '<|tool_call_start|>[weather(city="the \\"old\\" {Paris}", days=3)]',
        "",
        "",
        [PARIS],
    ),
    "lfm, names and values of other languages": (
        formats.LFM,
        "<|tool_call_start|>[f(from='true', class=true, x=None, y={'a': null}, is_set=(1, -2))]<|tool_call_end|>",
        "",
        "",
        [("f", {"from": "true", "class": True, "x": None, "y": {"a": None}, "is_set": [1, -2]})],
    ),
    "olmo": (
        formats.OLMO,
        "Let me see.<function_calls>\nweather(city='the \"old\" {Paris}', days=3)\ntime.now()\n</function_calls>",
        "Let me see.",
        "",
        [PARIS, NOW],
    ),
    "hermes, a list": (formats.HERMES, f"Let me see.<TOOLCALL>{LISTED}</TOOLCALL>", "Let me see.", "", [PARIS, NOW]),
    "hermes, lines": (
        formats.HERMES,
        f'<tool_calls>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n{{"name": "time.now", "arguments": {{}}}}\n'
        "</tool_calls>",
        "",
        "",
        [PARIS, NOW],
    ),
    "hermes, no end": (formats.HERMES, f"<|tool_call|>{LISTED}", "", "", [PARIS, NOW]),
    "hermes, a marker in a string": (
        formats.HERMES,
        r'<tool_call>{"name": "weather", "arguments": {"city": "\"</tool_call> <tool_call>"}}</tool_call>!',
        "!",
        "",
        [("weather", {"city": '"</tool_call> <tool_call>'})],
    ),
    "mistral, a marker in a string": (
        formats.MISTRAL,
        '[TOOL_CALLS]weather[ARGS]{"city": "[TOOL_CALLS]"}[TOOL_CALLS]time.now[ARGS]{}',
        "",
        "",
        [("weather", {"city": "[TOOL_CALLS]"}), NOW],
    ),
    "gemma, Python's names": (
        formats.GEMMA,
        '<|tool_call>call:weather{city:<|"|>None<|"|>,days:None,b:[True,False]}<tool_call|>',
        "",
        "",
        [("weather", {"city": "None", "days": None, "b": [True, False]})],
    ),
    "seed": (
        formats.SEED,
        "<seed:think>I should ask.</seed:think>Let me see.\n\n<seed:tool_call>\n<function=weather>\n"
        '<parameter=city>the "old" {Paris}</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n'
        "<seed:tool_call>\n<function=time.now>\n</function>\n</seed:tool_call>",
        "Let me see.",
        "I should ask.",
        [PARIS, NOW],
    ),
    "minimax": (
        formats.MINIMAX,
        '<think>\nI should ask.\n</think>\n\nLet me see.\n<minimax:tool_call>\n<invoke name="weather">\n'
        '<parameter name="city">the "old" {Paris}</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="time.now">\n</invoke>\n</minimax:tool_call>',
        "Let me see.",
        "I should ask.",
        [PARIS, NOW],
    ),
    "deepseek, tags": (
        formats.DEEPSEEK_TAGS,
        'Let me see.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">'
        'the "old" {Paris}</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="time.now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Let me see.",
        "",
        [PARIS, NOW],
    ),
    "deepseek": (
        formats.DEEPSEEK,
        f"Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>time.now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Let me see.",
        "",
        [PARIS, NOW],
    ),
    "deepseek, older": (
        formats.DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time.now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "",
        [PARIS, NOW],
    ),
    "kimi": (
        formats.KIMI,
        f"<think>I should ask.</think>Let me see.{KIMI_CALLS}",
        "Let me see.",
        "I should ask.",
        [PARIS, NOW],
    ),
    "xml, a call in reasoning": (
        formats.QWEN_XML,
        f"<think>\nI call <tool_call> with <function=weather>:\n\n{XML_CALLS}\nDone.",
        "Done.",
        "I call <tool_call> with <function=weather>:",
        [PARIS, NOW],
    ),
    "kimi, a call in reasoning": (formats.KIMI, f"<think>I should ask. {KIMI_CALLS}", "", "I should ask.", [PARIS, NOW]),
    "hermes, a call in reasoning": (formats.HERMES, f"<think>So {HERMES_CALLS}</think>", "", f"So {HERMES_CALLS}", []),
    "glm": (
        formats.GLM,
        "\n<think>I should ask.</think>\nLet me see.\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        '<arg_value>the "old" {Paris}</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n'
        "<tool_call>time.now\n</tool_call>",
        "Let me see.",
        "I should ask.",
        [PARIS, NOW],
    ),
    "glm, without lines": (
        formats.GLM,
        "<tool_call>time.now</tool_call><tool_call>weather<arg_key>city</arg_key><arg_value> </tool_call></arg_value>"
        "</tool_call>",
        "",
        "",
        [NOW, ("weather", {"city": " </tool_call>"})],
    ),
    "gpt-oss": (
        formats.GPT_OSS,
        "<|channel|>analysis<|message|>I should ask.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
        "<|start|>assistant to=functions.time.now<|channel|>commentary json<|message|>{}",
        "Let me see.",
        "I should ask.",
        [PARIS, NOW],
    ),
    "gpt-oss, no call": (
        formats.GPT_OSS,
        "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        "Yes",
        "I see.",
        [],
    ),
    "gpt-oss, no channel": (formats.GPT_OSS, "Yes <|end|>", "Yes <|end|>", "", []),
    "command": (
        formats.COMMAND,
        "<|START_THINKING|>I should ask.<|END_THINKING|><|START_ACTION|>[\n"
        f'{{"tool_call_id": "0", "tool_name": "weather", "parameters": {ARGUMENTS}}},\n'
        '{"tool_call_id": "1", "tool_name": "time.now", "parameters": {}}\n]<|END_ACTION|>',
        "",
        "I should ask.",
        [PARIS, NOW],
    ),
    "command, no call": (formats.COMMAND, "<|START_RESPONSE|>Yes<|END_RESPONSE|>", "Yes", "", []),
    "llama, reasoning": (formats.LLAMA, "<think>\nHm.\n</think>\n\nYes", "Yes", "Hm.", []),
    "hunyuan": (
        HUNYUAN,
        "<think>\nHm.\n</think>\n<answer>\nYes <answer>\n</answer>",
        "Yes <answer>",
        "Hm.",
        [],
    ),
    "hunyuan, no reasoning": (HUNYUAN, "<answer>\nYes\n</answer>", "Yes", "", []),
    "hunyuan, a call": (
        HUNYUAN,
        f"<think>Hm.</think>\n{HERMES_CALLS}",
        "",
        "Hm.",
        [PARIS, NOW],
    ),
    "granite": (
        GRANITE,
        f"<think>Hm.</think> No tags, <response> is text.{HERMES_CALLS}",
        "No tags, <response> is text.",
        "Hm.",
        [PARIS, NOW],
    ),
    "only reasoning": (formats.THINKING, "<think>\nHm.\n</think>\n\nYes <think>", "Yes <think>", "Hm.", []),
}
# Replies with a call that cannot be parsed: (form, reply, calls that can)
BROKEN: dict[str, tuple[dict[str, Any], str, list[tuple[str, Any]]]] = {
    "no JSON": (formats.HERMES, "Hm <tool_call>\nweather(Paris)\n</tool_call> and so on", []),
    "arguments under another name": (formats.HERMES, '<tool_call>{"name": "weather", "params": {"city": "a"}}</tool_call>', []),
    "no arguments of an unknown function": (formats.HERMES, '<tool_call>{"name": "Ada"}</tool_call>', []),
    "half a character in the name": (formats.HERMES, r'<tool_call>{"name": "a\ud83d", "arguments": {}}</tool_call>', []),
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
    "cut, lfm": (formats.LFM, '<|tool_call_start|>[weather(city="Par', []),
    "an argument without a name": (formats.LFM, '<|tool_call_start|>[weather("Paris")]<|tool_call_end|>', []),
    "unpacked arguments": (formats.LFM, '<|tool_call_start|>[weather(**{"city": "Paris"})]<|tool_call_end|>', []),
    "a call as an argument": (formats.LFM, "<|tool_call_start|>[weather(city=home())]<|tool_call_end|>", []),
    "a statement": (formats.OLMO, "<function_calls>import time\ntime.now()</function_calls>", []),
    "an assignment": (formats.OLMO, "<function_calls>now = time.now()</function_calls>", []),
    "an infinite number": (formats.OLMO, "<function_calls>weather(days=1e999)</function_calls>", []),
    "no call": (formats.LFM, "<|tool_call_start|>[]<|tool_call_end|>", []),
    "a set": (formats.LFM, "<|tool_call_start|>[weather(city={1})]<|tool_call_end|>", []),
    "deeply nested, in Python": (formats.LFM, f"<|tool_call_start|>{'[' * 100_000}<|tool_call_end|>", []),
    "not a list": (formats.MISTRAL_LIST, '[TOOL_CALLS]{"name": "weather"}', []),
}


def read(reply: Reply, chunks: Iterable[str]) -> Part:
    part = Part()
    for chunk in chunks:
        part.add(reply.feed(chunk))
    part.add(reply.finish())
    return part


def parsed(
    form: dict[str, Any], chunks: Iterable[str], prompt_end: str = "", tools: Sequence[Any] = TOOLS, **fields: Any
) -> Part:
    return read(parsed_reply(form, prompt_end, tools=list(tools), **fields), chunks)


def parsed_reply(form: dict[str, Any], prompt_end: str = "", **fields: Any) -> ParsedReply:
    return ParsedReply(load_response_template(form), prompt_end, chat_body(**{"tools": TOOLS} | fields))


def chat_body(**fields: Any) -> ChatBody:
    return ChatBody(messages=[{"role": "user", "content": "?"}], **fields)


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
    for case in ("hermes", "xml", "gemma", "llama", "mistral", "mistral list", "deepseek", "glm, without lines"):
        text = CASES[case][1]
        assert parsed(form, list(text), tools=()).content == text


@pytest.mark.parametrize(
    ("prompt_end", "reply", "content", "reasoning"),
    [
        ("<|im_start|>assistant\n<think>\n", "I see.\n</think>\n\nYes", "Yes", "I see."),
        ("<|im_start|>assistant\n<think>\n", "I see", "", "I see"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes <think>", "Yes <think>", ""),
        ("<|im_start|>assistant\n<think>\nold</think><|im_end|>\n<|im_start|>assistant\n", "<think>a</think>b", "b", "a"),
        ("assistant: <think>\n", "I see.</think>Yes", "Yes", "I see."),
        ("<think>\nold</think>", "Yes", "Yes", ""),
    ],
)
def test_the_prompt_may_begin_the_reply(prompt_end: str, reply: str, content: str, reasoning: str) -> None:
    for chunks in splits(reply):
        part = parsed(formats.HERMES, chunks, prompt_end)
        assert (part.content, part.reasoning) == (content, reasoning)


@pytest.mark.parametrize(
    ("prompt_end", "reply", "content", "reasoning"),
    [
        ("<think>a</think>b<|user|>c<|assistant|>", "\n<think>d</think>e", "e", "d"),
        ("<|assistant|><think>\n", "d\n</think>\n\ne <think>", "e <think>", "d"),
        ("<|assistant|>\n<think></think>\n", "e <think>", "e <think>", ""),
    ],
)
def test_reasoning_is_read_without_a_format_of_calls(prompt_end: str, reply: str, content: str, reasoning: str) -> None:
    for chunks in splits(reply):
        part = parsed(formats.THINKING, chunks, prompt_end)
        assert (part.content, part.reasoning) == (content, reasoning)
        part = parsed(formats.THINKING, chunks, prompt_end, include_reasoning=False)
        assert (part.content, part.reasoning) == (content, "")


def test_the_prompt_may_end_before_the_tags_around_the_content() -> None:
    form = formats.form_of("<think><answer>")
    for prompt_end, reasoning in (("<think>\n\n</think>\n\n", ""), ("<think>\n", "Hm.")):
        text = f"{reasoning}\n</think>\n" * bool(reasoning) + "<answer>\nYes\n</answer>"
        for chunks in splits(text):
            part = parsed(form, chunks, prompt_end)
            assert (part.content, part.reasoning) == ("Yes", reasoning)


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
    *('{"type": "function", "name": "weather", "parameters": {"city": "', ";", "\n" * 9, '<|"|>', ":", ",", "</tool", "</"),
    *("<seed:think>", "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", '<invoke name="weather">', "</invoke>"),
    *(
        '<parameter name="city">',
        "</minimax:tool_call>",
        '<｜DSML｜invoke name="weather">',
        "</｜DSML｜invoke>",
        "[TOOL_CALLS]weather",
    ),
    *(
        '<｜DSML｜parameter name="city" string="true">',
        "</｜DSML｜parameter>",
        "</｜DSML｜function_calls>",
        "</｜DSML｜tool_calls>",
    ),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n", "\n```", "<｜tool▁sep｜>", "{}", "functions.weather:0"),
    *(
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "weather",
        "</arg",
    ),
    *("<tool_call>weather", "<arg_key>city</arg_key>", "<arg_value>", "</arg_value>", "<|start|>assistant", "<|channel|>final"),
    *("<|channel|>analysis", "<|channel|>commentary", " to=functions.weather", "<|message|>", "<|end|>", "<|START_ACTION|>"),
    *('[{"tool_name": "weather", "parameters": {"city": "', "}]<|END_ACTION|>", "<|START_THINKING|>", "<|START_RESPONSE|>"),
    *(
        "</answer>",
        "<|tool_call_start|>",
        "[weather(city='",
        "')]",
        "<|tool_call_end|>",
        "<function_calls>",
        "</function_calls>",
    ),
]


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    data=st.data(),
    form=st.sampled_from([*(form for _, form in formats.FORMATS), HUNYUAN]),
    begun=st.sampled_from(["", "<think>", "<think></think>\n<answer>"]),
)
@settings(max_examples=600, deadline=None, derandomize=True, database=None)
def test_nothing_is_lost_and_chunks_do_not_matter(
    pieces: list[str], data: st.DataObject, form: dict[str, Any], begun: str
) -> None:
    words = [f"w{index}w" for index in range(len(pieces))]
    text = begun + "".join(word + piece for word, piece in zip(words, pieces, strict=True))
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


def test_ids_that_a_model_writes_are_kept() -> None:
    assert [call["id"] for call in parsed(formats.KIMI, [KIMI_CALLS]).calls] == ["functions.weather:0", "functions.time.now:1"]


def test_an_id_that_a_model_repeats_is_used_once() -> None:
    calls = parsed(formats.KIMI, [KIMI_CALLS.replace("functions.time.now:1", "functions.weather:0")]).calls
    assert calls[0]["id"] == "functions.weather:0" and re.fullmatch("[a-zA-Z0-9]{9}", calls[1]["id"])


@pytest.mark.parametrize("case", ["hermes", "xml", "gemma", "llama, several", "mistral", "mistral list"])
def test_only_the_first_call_is_kept_without_parallel_calls(case: str) -> None:
    form, text, content, *_ = CASES[case]
    for chunks in splits(text):
        part = parsed(form, chunks, parallel_tool_calls=False)
        assert (part.content, calls_of(part)) == (content, [PARIS])


def test_values_of_xml_get_the_types_of_their_schema() -> None:
    place = {"type": "object", "properties": {"c": {"type": "string"}}}
    kinds: dict[str, tuple[dict[str, Any], str, Any]] = {
        "place": ({"$ref": "#/$defs/Pl~1ace"}, '{"c": "Oslo"}', {"c": "Oslo"}),
        "option": ({"anyOf": [{"$ref": "#/$defs/Pl~1ace"}, {"type": "null"}]}, '{"c": "Oslo"}', {"c": "Oslo"}),
        "nothing": ({"anyOf": [{"$ref": "#/$defs/Pl~1ace"}, {"type": "null"}]}, "None", None),
        "all": ({"allOf": [{"$ref": "#/$defs/Pl~1ace"}]}, '{"c": "Oslo"}', {"c": "Oslo"}),
        "itself": ({"$ref": "#"}, "{}", {}),
        "loop": ({"$ref": "#/properties/loop"}, "1", "1"),
        "chosen": ({"enum": [1, 2]}, "1", 1),
        "fixed": ({"const": False}, "False", False),
        "text": ({"enum": ["1", "2"]}, "1", "1"),
        "quoted": ({"type": "string"}, '"use strict"', '"use strict"'),
        "escaped": ({"type": ["string", "null"]}, '"a\\n"', '"a\\n"'),
        "zip": ({"type": ["integer", "string"]}, "00123", "00123"),
        "whole": ({"type": "integer"}, "3.0", 3),
        "number": ({"type": "number", "nullable": True}, "3", 3),
        "none": ({"type": "number", "nullable": True}, "null", None),
        "wrong": ({"type": "integer"}, "three", "three"),
        "list": ({"type": "array"}, "[NaN]", "[NaN]"),
        "deep": ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        "any": ({}, "1", "1"),
        "odd": ({"type": [{}, "integer"]}, "1", 1),
        "tilde": ({"$ref": "#/$defs/Pl~01ace"}, "1", 1),
    }
    properties = {name: schema for name, (schema, _, _) in kinds.items()}
    parameters = {"type": "object", "properties": properties, "$defs": {"Pl/ace": place, "Pl~1ace": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    values = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, (_, text, _) in kinds.items())
    part = parsed(formats.QWEN_XML, [f"<function=f>{values}<parameter=other>\n1\n</parameter></function>"], tools=tools)
    assert calls_of(part) == [("f", {name: value for name, (_, _, value) in kinds.items()} | {"other": "1"})]


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


@pytest.mark.parametrize(
    "arguments",
    [
        '{"n": 1e999, "m": 0.1234567890123456789012, "k": [1.10e2, -0]}',
        '{"n": ' + "1" * 5000 + "}",
        r'{"a": "\ud83d", "b\\": "\"}]\\", "c": {"d": "{[\\\""}}',
        '{"a":' * 2000 + "{}" + "}" * 2000,
    ],
)
def test_arguments_in_a_list_are_not_changed(arguments: str) -> None:
    text = f'[ {{"name": "weather", "arguments": {arguments} }},\n{{"name":"time.now","arguments":{{}}}}]'
    for chunks in splits(text) if len(text) < 300 else [[text], list(text)]:
        part = read(ListReply(), chunks)
        found = [(call["function"]["name"], call["function"]["arguments"]) for call in part.calls]
        assert found == [("weather", arguments), ("time.now", "{}")] and not part.content


@pytest.mark.parametrize("seed", range(40))
def test_lists_of_calls_are_read_in_any_chunks(seed: int) -> None:
    rng = random.Random(seed)
    pieces = ['"', "\\", "{", "}", "[", "]", ",", "u", "é"]
    calls = [(name, {"a": "".join(rng.choices(pieces, k=rng.randint(0, 12)))}) for name in rng.choices(["f", "g.h"], k=4)]
    text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls], indent=rng.choice([None, 2]))
    cuts = sorted(rng.choices(range(len(text)), k=8))
    part = read(ListReply(), [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    assert calls_of(part) == calls and not part.content


def test_reading_takes_linear_time() -> None:
    strings = '<|"|>a<|"|>,' * 40_000
    for reply, text, step in (
        (ListReply(), '[{"name": "f", "arguments": {"a": [' + '{"b":1},' * 20_000 + "1]}}]", 8),
        (parsed_reply(formats.QWEN_XML), "<function=f>" + "<parameter=a>" * 9000 + "</parameter></function>", 13),
        (
            parsed_reply(formats.HERMES),
            f'<tool_call>{{"name": "f", "arguments": {{"a": "{"</tool_call>" * 9000}{HERMES_CALLS}',
            12,
        ),
        (parsed_reply(formats.GEMMA), "<|tool_call>call:weather{a:[" + strings + "1]}<tool_call|>", 10_000),
    ):
        started = process_time()
        part = read(reply, [text[at : at + step] for at in range(0, len(text), step)])
        assert part.calls and process_time() - started < 3.0


def test_a_string_that_is_not_closed_takes_linear_time() -> None:
    text, started = '{a: "' + r"\"" * 30_000, process_time()
    assert plain_json(text, {"unquoted_keys": True}) == '{"a": "' + r"\"" * 30_000
    assert process_time() - started < 1.0


def test_numbers_that_are_not_finite_stay_text() -> None:
    schema = {"properties": {"x": {"type": "number"}, "y": {"type": "array"}}}
    given = {"x": "1e999", "y": "[1, -1e999]"}
    assert typed(given, schema) == given and typed({"x": "1e3"}, schema) == {"x": 1000.0}


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
    "GLM": ("<tool_call>{name}<arg_key></tool_call> <|assistant|>\n<think></think>", formats.GLM),
    "Granite 4": ("<|start_of_role|><tool_call>", formats.HERMES),
    "EXAONE 4": ("[|assistant|]<tool_call>", formats.HERMES),
    "Hermes 4": ('<|start_header_id|><tool_call>{"name": name, "parameters": {}}', formats.HERMES),
    "Nemotron Nano": ("<think><TOOLCALL>", formats.HERMES),
    "Seed": ("<seed:tool_call><function=", formats.SEED),
    "MiniMax": ("<think><minimax:tool_call>", formats.MINIMAX),
    "DeepSeek-V3.2": ("<think><｜DSML｜invoke", formats.DEEPSEEK_TAGS),
    "DeepSeek-V3.1": ("<think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", formats.DEEPSEEK),
    "Kimi": ("<|im_start|><|tool_call_begin|>{id}<|tool_call_argument_begin|>", formats.KIMI),
    "gpt-oss": ("<|channel|>commentary to=functions.", formats.GPT_OSS),
    "Command": ("<|START_ACTION|>[", formats.COMMAND),
    "LFM2": ("List of tools: <|tool_list_start|>[", formats.LFM),
    "LFM2.5": ("<think>List of tools: [", formats.LFM),
    "OLMo 3": ("<functions></functions><function_calls>", formats.OLMO),
    "reasoning only": ("{{ tool }}<think>", formats.THINKING),
    "another one": ("<|call|>", formats.THINKING),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_found_by_the_chat_template(name: str) -> None:
    text, form = TEMPLATES[name]
    tokenizer = make_tokenizer(chat_template="{{ tools }}" + text)
    assert response_template(tokenizer) == load_response_template(form)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": text}
    assert response_template(tokenizer) == load_response_template(form)


def test_the_tokenizers_own_form_is_preferred(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer(chat_template=TEMPLATES["Gemma"][0])
    own = {
        "start_anchor": "assistant:",
        "fields": {"thinking": {"open": "(", "close_pattern": r"\)+"}, "content": {"close": "END"}},
    }
    tokenizer.response_template = own
    for chunks in splits("(well))yesEND"):
        part = read(ParsedReply(response_template(tokenizer), "assistant:", chat_body()), chunks)
        assert (part.content, part.reasoning) == ("yes", "well")
    tokenizer.response_template = {"version": 2, "fields": {}}
    assert response_template(tokenizer) == load_response_template(formats.GEMMA)
    assert "response_template is not used" in caplog.text


@pytest.mark.parametrize("is_byte_level", [True, False])
def test_only_special_tokens_are_left_out_of_the_text(is_byte_level: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(chat_template=TEMPLATES["Mistral"][0])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>", "[INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]"]})
    if not is_byte_level:
        monkeypatch.setattr(detokenizer, "byte_table", lambda _: None)
    factory, replies = DetokenizerFactory(tokenizer), Replies(tokenizer)
    prompt = tokenizer.encode("Hi[/INST]")
    special = tokenizer.convert_tokens_to_ids(["<s>", "[INST]"])
    called = tokenizer.encode(f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}")
    tokenizer.backend_tokenizer.encode_special_tokens = True
    spelled = tokenizer.backend_tokenizer.encode("Use <s>old</s> and [INST] x.").ids
    tokenizer.backend_tokenizer.encode_special_tokens = False
    for skip, before in ((True, ""), (False, "<s>[INST]")):
        body = chat_body(tools=TOOLS, skip_special_tokens=skip)
        text = factory(prompt, skip, replies.delimiters(body))
        chunks = [*(text.feed([token]) for token in [*special, *spelled, *called]), text.flush()]
        part = read(replies.readers(body, prompt)[0], chunks)
        assert (part.content, calls_of(part)) == (before + "Use <s>old</s> and [INST] x.", [PARIS])
    assert not replies.delimiters(chat_body(tools=TOOLS, tool_choice="required"))


def test_delimiters_are_found_in_patterns() -> None:
    tokenizer = make_tokenizer(chat_template="")
    names = [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "x",
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    found = {}
    for case in ("Hermes, Qwen", "Gemma", "Llama", "older Mistral", "reasoning only"):
        tokenizer.chat_template = TEMPLATES[case][0]
        found[case] = set(tokenizer.convert_ids_to_tokens(sorted(Replies(tokenizer).delimiters(chat_body()))))
    assert found == {
        "Hermes, Qwen": {"<tool_call>", "</tool_call>", "<think>"},
        "Gemma": {"<|tool_call>", "<tool_call|>", '<|"|>'},
        "Llama": {"<|python_tag|>", "<think>"},
        "older Mistral": {"[TOOL_CALLS]"},
        "reasoning only": {"<think>"},
    }
