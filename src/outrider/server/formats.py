"""Forms of chat replies, as response templates of transformers, for tokenizers that come without one."""

from __future__ import annotations

from typing import Any

CALLS = "tool_calls"  # name of the field of tool calls
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of fields of reasoning

CALL = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
# Repetitions are bounded, because patterns are searched whenever text arrives. Later in a reply, <think> is text.
THINK = {"open_pattern": r"\A\s{0,8}<think>", "close_pattern": r"\s{0,8}</think>"}


def _form(start_anchor: str | list[str], calls: dict[str, Any], reasoning: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a template of replies with tool calls in JSON, which repeat unless ``calls`` says otherwise."""
    fields = {} if reasoning is None else {REASONING[0]: reasoning}
    fields[CALLS] = {"repeats": True, "content": "json", **calls}
    return {"start_anchor": start_anchor, "fields": {**fields, "content": {}}}


CHATML, MISTRAL_TURN = "<|im_start|>assistant\n", ["[/INST]", "[/TOOL_RESULTS]"]
HERMES = _form(CHATML, {"open_pattern": r"\s{0,8}<tool_call>", "close": "</tool_call>", "transform": CALL}, THINK)
QWEN_XML = _form(
    CHATML,
    {
        # Qwen3-Coder often omits <tool_call> or </tool_call>, or encloses several functions in them. Values may contain
        # </function>, which ends a call only after the function's name or a parameter.
        "open_pattern": r"\s{0,8}(?:<tool_call>\s{0,8})?(?=<function=(?P<name>[^>\n]{1,64})>)",
        "close_pattern": r"(?:<function=[^>\n]{1,64}>|</parameter>)\s{0,8}</function>"
        r"(?:\s{0,8}(?:</tool_call>|\Z)|(?=\s{9}|\s{0,8}(?:[^\s<]|<[^/]|</[^t])))",
        "content": "xml-inline",
        # Anything else matches without a key, which is an error.
        "content_args": {
            "tag_pattern": r"(?:\A<function=[^>\n]+>\s*)?"
            r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?(?:</parameter>|\Z)|\S"
        },
        "transform": NAMED,
    },
    THINK,
)
GEMMA = _form(
    ["<|turn>model\n", "<tool_response|>"],
    {
        "open_pattern": r"\s{0,8}<\|tool_call>call:(?P<name>[\w.-]{1,64})",
        "close": "<tool_call|>",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": NAMED,
    },
    {"open": "<|channel>thought\n", "close_pattern": r"\s{0,8}<channel\|>"},
)
LLAMA = _form(
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    {
        "open_pattern": r"\A\s{0,8}(?:<\|python_tag\|>\s{0,8})?"
        r'(?=\{\s{0,8}"(?:name"\s{0,8}:|type"\s{0,8}:\s{0,8}"function"))',
        "transform": CALL,
    },
)
MISTRAL = _form(
    MISTRAL_TURN,
    {
        "open_pattern": r"\s{0,8}\[TOOL_CALLS\]\s{0,8}(?P<name>[\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
        "transform": NAMED,
    },
    {"open_pattern": r"\A\s{0,8}\[THINK\]", "close_pattern": r"\s{0,8}\[/THINK\]"},
)
MISTRAL_LIST = _form(
    MISTRAL_TURN,
    {
        "open_pattern": r"\s{0,8}\[TOOL_CALLS\]",
        "repeats": False,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        "transform_each": True,
    },
)
# Its calls are unknown. The anchor is an opening marker at the end of the prompt, which may be closed, too.
THINKING: dict[str, Any] = {
    "start_anchor_pattern": r"(?=<think>\s{0,8}(?:</think>\s{0,8})?\Z)",
    "fields": {REASONING[0]: THINK, "content": {}},
}

# A model's replies are read in the first form whose markers are all in its chat template.
FORMATS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("<tool_call>", "<function="), QWEN_XML),
    (("<tool_call>", "<|im_start|>"), HERMES),
    (("<|tool_call>",), GEMMA),
    (("<|start_header_id|>", '"parameters": '), LLAMA),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<think>",), THINKING),
)
