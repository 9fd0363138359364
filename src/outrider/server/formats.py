"""Forms of chat replies, as response templates of transformers, for tokenizers that come without one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

CALLS = "tool_calls"  # name of the field of tool calls
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of fields of reasoning

CALL = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
MAX_NAME = 128  # characters of a function's name: OpenAI allows 64, Anthropic 128
NAME = rf"(?P<name>[\w.-]{{1,{MAX_NAME}}})"
# Repetitions are bounded, because patterns are searched whenever text arrives. Later in a reply, <think> is text.
THINK = {"open_pattern": r"\A\s{0,8}(?:<think>|<seed:think>)", "close_pattern": r"\s{0,8}(?:</think>|</seed:think>)"}
# An opening marker at the end of the prompt begins the reply; it may be closed, too.
BEGUN = r"(?=(?:<think>|<seed:think>)\s{0,8}(?:</think>\s{0,8}|</seed:think>\s{0,8})?\Z)"


def _form(calls: dict[str, Any], reasoning: dict[str, Any] | None = THINK, **anchor: Any) -> dict[str, Any]:
    """Return a template of replies with tool calls in JSON, which repeat unless ``calls`` says otherwise."""
    fields = {} if reasoning is None else {REASONING[0]: reasoning}
    fields[CALLS] = {"repeats": True, "content": "json", **calls}
    return {**(anchor or {"start_anchor_pattern": BEGUN}), "fields": {**fields, "content": {}}}


def _then(*ends: str) -> str:
    """Return a pattern of one of these markers, which may be missing, or cut at the end of the text."""
    cut = "|".join(re.escape(end[:size]) for end in ends for size in range(len(end)))
    return rf"(?:\s{{0,8}}(?:{_any(*ends)}|(?:{cut})\Z))?"


def _any(*markers: str) -> str:
    return "|".join(map(re.escape, markers))


def _tags(function: str, parameter: str, ends: tuple[str, str], around: Sequence[str] = (), edge: str = "") -> dict[str, Any]:
    """Return the form of calls with a tag per argument.

    ``function``, ``parameter``: patterns of the opening tags with %s for the name. ``ends``: markers after a value and after a
    call. ``around``: names of tags around calls, which may be missing. ``edge``: pattern before and after a value.
    """
    name = rf'[^<>"\s]{{1,{MAX_NAME}}}'
    # Values may contain the marker after a call, which ends one only after the function's name or a value.
    after_value, after_call = map(re.escape, ends)
    before = rf"(?:(?:{_any(*[f'<{tag}>' for tag in around])})\s{{0,8}})?" if around else ""
    after = _then(*[f"</{tag}>" for tag in around]) if around else ""
    key, opened = parameter % r'(?P<key>[^<>"\n]+)', function % name
    calls = {
        "open_pattern": rf"\s{{0,8}}{before}(?={function % f'(?P<name>{name})'})",
        "close_pattern": rf"(?:{opened}|{after_value})\s{{0,8}}{after_call}{after}",
        "content": "xml-inline",
        # Anything else matches without a key, which is an error.
        "content_args": {"tag_pattern": rf"(?:\A{opened}\s*)?{key}{edge}(?P<value>.*?){edge}(?:{after_value}|\Z)|\S"},
        "transform": NAMED,
    }
    return _form(calls)


MISTRAL_TURN = {"start_anchor": ["[/INST]", "[/TOOL_RESULTS]"]}
HERMES = _form(
    {
        "open_pattern": r"\s{0,8}(?:<tool_call>|<tool_calls>|<TOOLCALL>|<\|tool_call\|>)",
        "close_pattern": r"</tool_call>|</tool_calls>|</TOOLCALL>|<\|/tool_call\|>",
        "transform": CALL,
    }
)
# Qwen3-Coder often omits <tool_call> or </tool_call>, or encloses several functions in them.
QWEN_XML = _tags("<function=%s>", "<parameter=%s>", ("</parameter>", "</function>"), ("tool_call",), edge=r"\n?")
SEED = _tags("<function=%s>", "<parameter=%s>", ("</parameter>", "</function>"), ("seed:tool_call",))
MINIMAX = _tags('<invoke name="%s">', '<parameter name="%s">', ("</parameter>", "</invoke>"), ("minimax:tool_call",))
DEEPSEEK_TAGS = _tags(
    '<｜DSML｜invoke name="%s">',
    '<｜DSML｜parameter name="%s"(?: string="(?:true|false)")?>',
    ("</｜DSML｜parameter>", "</｜DSML｜invoke>"),
    ("｜DSML｜function_calls", "｜DSML｜tool_calls"),
)
GLM = _tags(r"<tool_call>\s{0,8}%s\s{0,8}(?=<)", r"<arg_key>%s</arg_key>\s{0,8}<arg_value>", ("</arg_value>", "</tool_call>"))
GEMMA = _form(
    {
        "open_pattern": r"\s{0,8}<\|tool_call>call:" + NAME,
        "close": "<tool_call|>",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": NAMED,
    },
    {"open": "<|channel>thought\n", "close_pattern": r"\s{0,8}<channel\|>"},
    start_anchor=["<|turn>model\n", "<tool_response|>"],
)
LLAMA = _form(
    {
        "open_pattern": r"\A\s{0,8}(?:<\|python_tag\|>\s{0,8})?"
        r'(?=\{\s{0,8}"(?:name"\s{0,8}:|type"\s{0,8}:\s{0,8}"function"))',
        "transform": CALL,
    }
)
MISTRAL = _form(
    {
        "open_pattern": rf"\s{{0,8}}\[TOOL_CALLS\]\s{{0,8}}{NAME}(?:\[CALL_ID\]\w{{1,64}})?\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
        "transform": NAMED,
    },
    {"open_pattern": r"\A\s{0,8}\[THINK\]", "close_pattern": r"\s{0,8}\[/THINK\]"},
    **MISTRAL_TURN,
)
MISTRAL_LIST = _form(
    {
        "open_pattern": r"\s{0,8}\[TOOL_CALLS\]",
        "repeats": False,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        "transform_each": True,
    },
    None,
    **MISTRAL_TURN,
)
# Calls as Python writes them: a list, or one on each line.
LFM = _form(
    {"open_pattern": r"\s{0,8}<\|tool_call_start\|>", "close": "<|tool_call_end|>", "content": "text", "transform": CALL}
)
OLMO = _form({"open_pattern": r"\s{0,8}<function_calls>", "close": "</function_calls>", "content": "text", "transform": CALL})
KIMI = _form(
    {
        "open_pattern": r"\s{0,8}(?:<\|tool_calls_section_begin\|>\s{0,8})?<\|tool_call_begin\|>\s{0,8}"
        rf"(?P<id>(?:functions\.)?{NAME}(?::\d{{1,4}})?)\s{{0,8}}<\|tool_call_argument_begin\|>",
        "close_pattern": r"<\|tool_call_end\|>" + _then("<|tool_calls_section_end|>"),
        "transform": NAMED,
    }
)
DEEPSEEK = _form(
    {
        # V3 and R1 write the kind and a block of Markdown.
        "open_pattern": r"\s{0,8}(?:<｜tool▁calls▁begin｜>\s{0,8})?<｜tool▁call▁begin｜>\s{0,8}(?:function<｜tool▁sep｜>"
        rf"{NAME}\s{{1,8}}```json|(?!function<｜tool▁sep｜>){NAME}<｜tool▁sep｜>)",
        "close_pattern": r"(?:\s{0,8}```)?\s{0,8}<｜tool▁call▁end｜>" + _then("<｜tool▁calls▁end｜>"),
        "transform": NAMED,
    }
)
GPT_TURN, GPT_END = r"(?:<\|start\|>assistant)?\s{0,8}", r"<\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>)"
GPT_CHANNEL = r"(?:<\|channel\|>(?:commentary|analysis))?\s{0,8}"
GPT_OSS = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        REASONING[0]: {"open_pattern": GPT_TURN + r"<\|channel\|>analysis\s{0,8}<\|message\|>", "close_pattern": GPT_END},
        CALLS: {
            "open_pattern": rf"{GPT_TURN}{GPT_CHANNEL}to=functions\.{NAME}\s{{0,8}}{GPT_CHANNEL}"
            r"(?:<\|constrain\|>)?\w{0,64}\s{0,8}<\|message\|>",
            "close_pattern": GPT_END,
            "repeats": True,
            "content": "json",
            "transform": NAMED,
        },
        "content": {
            "open_pattern": GPT_TURN + r"<\|channel\|>(?:final|commentary)\s{0,8}(?:<\|constrain\|>\w{1,64})?<\|message\|>",
            "close_pattern": GPT_END,
        },
        "text": {},  # outside of messages
    },
}
COMMAND = {
    "start_anchor": "<|CHATBOT_TOKEN|>",
    "fields": {
        REASONING[0]: {"open": "<|START_THINKING|>", "close_pattern": r"\s{0,8}<\|END_THINKING\|>"},
        CALLS: {
            "open_pattern": r"\s{0,8}<\|START_ACTION\|>",
            "close": "<|END_ACTION|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
            "transform_each": True,
        },
        "content": {
            "open_pattern": r"\s{0,8}(?:<\|START_RESPONSE\|>|<\|START_TEXT\|>)",
            "close_pattern": r"<\|END_RESPONSE\|>|<\|END_TEXT\|>",
        },
        "text": {},  # outside of markers
    },
}
# Calls of these forms may end reasoning, because models leave out its end and do not quote their opening markers.
END_REASONING = [form["fields"][CALLS]["open_pattern"] for form in (QWEN_XML, KIMI)]
THINKING: dict[str, Any] = {"start_anchor_pattern": BEGUN, "fields": {REASONING[0]: THINK, "content": {}}}  # unknown calls


class Preamble(NamedTuple):
    """Markers of the reasoning that may precede grammar-constrained JSON."""

    opening: str  # empty: the prompt ends within reasoning
    closing: str  # empty: no reasoning
    resumed: str = ""  # after reasoning
    heading: str = ""  # before the JSON, with and without reasoning
    calls: tuple[str, ...] = ()  # openings of tool calls, one of which may come instead of the heading and the JSON

    @property
    def markers(self) -> tuple[str, str, str, str]:
        """The markers around reasoning and before the JSON."""
        return self.opening, self.closing, self.resumed, self.heading


PREAMBLES = (
    Preamble("<think>", "</think>"),
    Preamble("<seed:think>", "</seed:think>"),
    Preamble("[THINK]", "[/THINK]"),
    Preamble("<|channel>thought\n", "<channel|>"),
    Preamble("<|START_THINKING|>", "<|END_THINKING|>", heading="<|START_RESPONSE|>"),
    Preamble("<|START_THINKING|>", "<|END_THINKING|>", heading="<|START_TEXT|>"),
    Preamble("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"),
)

# Texts that begin a tool call and never JSON. A reply may begin with those that a form's pattern of calls begins with.
OPENINGS = (
    *("<tool_call>", "<tool_calls>", "<TOOLCALL>", "<|tool_call|>", "<|tool_call>", "[TOOL_CALLS]", "<|START_ACTION|>"),
    *("<|tool_call_start|>", "<function_calls>"),
    *("<function=", "<seed:tool_call>", "<minimax:tool_call>", '<invoke name="'),
    *(
        "<｜DSML｜function_calls>",
        "<｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="',
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|channel|>commentary to=functions.", "to=functions."),
)

# A model's replies are read in the first form whose markers are all in its chat template. Reasoning at the beginning is read
# in the others, too: templates need not mention it.
FORMATS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("<seed:tool_call>",), SEED),
    (("<minimax:tool_call>",), MINIMAX),
    (("｜DSML｜",), DEEPSEEK_TAGS),
    (("<｜tool▁call▁begin｜>",), DEEPSEEK),
    (("<|tool_call_argument_begin|>",), KIMI),
    (("<|channel|>commentary", "functions."), GPT_OSS),
    (("<|START_ACTION|>",), COMMAND),
    (("<tool_call>", "<function="), QWEN_XML),
    (("<tool_call>", "<arg_key>"), GLM),
    *(((marker,), HERMES) for marker in ("<tool_call>", "<tool_calls>", "<TOOLCALL>", "<|tool_call|>")),
    (("<|tool_call>",), GEMMA),
    (("<|start_header_id|>", '"parameters": '), LLAMA),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<function_calls>",), OLMO),
    (("List of tools: ",), LFM),
    ((), THINKING),
)

ENCLOSING = "answer", "response"  # tags around the content: Hunyuan's, Granite 3.3's


def form_of(template: str) -> dict[str, Any]:
    """Return the form of a model's replies by its chat template."""
    form = next(form for markers, form in FORMATS if all(marker in template for marker in markers))
    tag = next((tag for tag in ENCLOSING if f"<{tag}>" in template), None)
    return form if tag is None or form["fields"].get("content") else _enclosed(form, tag)


def _enclosed(form: dict[str, Any], tag: str) -> dict[str, Any]:
    """Return a form whose content may be between tags, at the beginning of the reply or after reasoning."""
    begins = rf"(?:\A|(?<=</think>\s{{0,8}}))\s{{0,8}}<{tag}>"
    content = {"open_pattern": begins, "close_pattern": rf"\s{{0,8}}</{tag}>"}
    return {**form, "fields": {**form["fields"], "content": content, "text": {}}}
