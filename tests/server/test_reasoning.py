"""JSON that a grammar forces comes after the model's reasoning, not inside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tiny_folder import make_folder, make_tokenizer

from outrider import LLM
from outrider.server.formats import Preamble
from outrider.server.grammar import GrammarCompiler
from outrider.server.prompts import tokenizer_data
from outrider.server.protocol import ChatBody
from outrider.server.replies import Part, Replies

from .served import Served, serving

MARKERS = ["<think>", "</think>", "<|channel|>", "<|message|>", "<|fin|>", "<|start|>"]
PROMPT = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
MAY_THINK = PROMPT + "{% if enable_thinking is false %}<think></think>{% endif %}{# <think> #}"
THINKS = PROMPT + "{% if enable_thinking is false %}<think></think>{% else %}<think>\n{% endif %}"
COMMAND = PROMPT + "{# <|START_THINKING|><|END_THINKING|><|START_RESPONSE|><|START_ACTION|> #}"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
USER = [{"role": "user", "content": "Hi"}]
HARMONY = Preamble("<|channel|>analysis<|message|>", "<|fin|>", "<|start|>assistant", "<|channel|>final<|message|>")
ANSWER = '{"a": 1}'


def tokenizer_of(template: str, markers: Sequence[str] = MARKERS) -> Any:
    tokenizer = make_tokenizer(chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(markers)})
    return tokenizer


def load(folder: Path, template: str, method: str = "plain", markers: Sequence[str] = MARKERS) -> LLM:
    options: dict[str, Any] = {"tokenizer": tokenizer_of(template, markers), "max_position_embeddings": 512}
    target, draft = make_folder(folder / "target", **options), make_folder(folder / "draft", num_hidden_layers=1, **options)
    kind = {"draft": draft} if method == "draft" else {}
    return LLM(target, method=method, num_draft_tokens=3, max_batch=4, compile="never", same_text=True, **kind)


def reads(llm: LLM, preamble: Preamble | None, text: str) -> bool:
    """Return whether a grammar accepts a text as a whole."""
    assert llm.tokenizer is not None
    matcher, ids = GrammarCompiler(tokenizer_data(llm)).compiled(json.dumps(SCHEMA), preamble).matcher(), []
    for token in [*llm.tokenizer.encode(text, add_special_tokens=False), 0]:  # 0 ends the text
        allowed = matcher.allowed(ids, [])
        if allowed is not None and not allowed[token]:
            return False
        ids.append(token)
    return True


@pytest.mark.parametrize(
    "preamble, right, wrong",
    [
        (
            Preamble("<think>", "</think>"),
            [ANSWER, f"\n{ANSWER}", f"<think>A {{ b.</think>{ANSWER}", f"<think></think>\n\n{ANSWER}"],
            ["", f"So: {ANSWER}", f"<think>{ANSWER}", f"{ANSWER} so", f"<think>A</think>So: {ANSWER}", f"</think>{ANSWER}"],
        ),
        (
            Preamble("", "</think>"),
            [f"A.</think>{ANSWER}", f"\n</think>\n\n{ANSWER}", f'{{"a": 9}}</think>{ANSWER}'],
            [ANSWER, "A.", "A.</think>", f"A.</think>So: {ANSWER}"],
        ),
        (
            HARMONY,
            [
                f"<|channel|>final<|message|>{ANSWER}",
                f"<|channel|>analysis<|message|>A.<|fin|><|start|>assistant<|channel|>final<|message|>{ANSWER}",
            ],
            [ANSWER, f"<|channel|>analysis<|message|>{ANSWER}", f"<|channel|>analysis<|message|>A.<|fin|>{ANSWER}"],
        ),
        (Preamble("", "", "", "<|start|>"), [f"<|start|>{ANSWER}"], [ANSWER]),
        (
            Preamble("<think>", "</think>", calls=("<tool_call>", "de")),
            [ANSWER, "<tool_call>", "<think>A</think>\n\n<tool_call>def<think>", "def add(<tool_call>"],
            ["", f"{ANSWER}<tool_call>", "So: def", "<think>A</think>So: <tool_call>", "<think>def"],
        ),
        (
            HARMONY._replace(calls=("<|channel|>commentary to=",)),
            [
                f"<|channel|>final<|message|>{ANSWER}",
                "<|channel|>analysis<|message|>A.<|fin|><|start|>assistant<|channel|>commentary to=f",
            ],
            [ANSWER, "<|channel|>commentary<|message|>", f"<|channel|>final<|message|><|channel|>commentary to={ANSWER}"],
        ),
        (None, [ANSWER], [f"<think>A</think>{ANSWER}", f"\n{ANSWER}"]),
    ],
)
@pytest.mark.parametrize("markers", [MARKERS, []])  # special tokens, and text
def test_a_grammar_allows_reasoning_only_before_json(
    tmp_path: Path, preamble: Preamble | None, right: list[str], wrong: list[str], markers: list[str]
) -> None:
    llm = load(tmp_path, PROMPT, markers=markers)
    assert [text for text in right if not reads(llm, preamble, text)] == []
    assert [text for text in wrong if reads(llm, preamble, text)] == []


def test_only_the_token_of_the_end_marker_ends_reasoning(tmp_path: Path) -> None:
    llm = load(tmp_path, PROMPT)
    assert llm.tokenizer is not None
    matcher = GrammarCompiler(tokenizer_data(llm)).compiled(json.dumps(SCHEMA), Preamble("", "</think>")).matcher()
    *begun, last = llm.tokenizer.encode("A </think>", add_special_tokens=False, split_special_tokens=True)
    allowed = matcher.allowed(begun, [])
    assert allowed is not None and not allowed[last]
    assert allowed[begun[-1]] and allowed[llm.tokenizer.convert_tokens_to_ids("</think>")]


@pytest.mark.parametrize(
    "prompt_end, text, expected",
    [
        ("Hi", "\n<thi", ("", "")),  # cut within a marker, which may be text
        ("Hi", "<think>A</seed:think></think>{", ("A</seed:think>", "{")),  # another model's marker
        ("Hi<think>", "A</seed:think>", ("A</seed:think>", "")),
        ("<|start|>assistant", "<|channel|>analysis", ("", "")),
        ("<|start|>assistant", "<|channel|>analysis<|message|>A<|return|>B", ("A<|return|>B", "")),
        ("<|start|>assistant", "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>fin", ("A", "")),
        ("<|start|>assistant", "<|channel|>final<|message|>[", ("", "[")),
    ],
)
def test_only_json_is_content(prompt_end: str, text: str, expected: tuple[str, str]) -> None:
    harmony = "{# <|channel|>commentary<|channel|>analysis<|message|><|channel|>final<|message|> functions. #}"
    tokenizer = tokenizer_of(PROMPT + harmony if "<|" in prompt_end else MAY_THINK)
    body = ChatBody(messages=USER, response_format=FORM)  # type: ignore[arg-type]
    for size in (1, len(text)):
        (reply,) = Replies(tokenizer).readers(body, tokenizer.encode(prompt_end, add_special_tokens=False))
        whole = Part()
        for start in range(0, len(text), size):
            whole.add(reply.feed(text[start : start + size]))
        whole.add(reply.finish())
        assert (whole.reasoning, whole.content) == expected


@pytest.mark.parametrize(
    "template, prompt_end, variables, opening",
    [
        (MAY_THINK, "Hi\n", {}, "<think>"),
        (THINKS, "Hi\n<think>\n", {}, ""),  # within reasoning
        (MAY_THINK, "Hi\n<think></think>", {"enable_thinking": False}, None),
        (MAY_THINK, "Hi\n", {"enable_thinking": False}, None),
        (MAY_THINK, "Hi\n<think></think>", {}, None),  # of a template that says so by itself
        (PROMPT, "Hi\n", {}, None),
        (COMMAND, "Hi<|CHATBOT_TOKEN|>", {}, "<|START_THINKING|>"),
        (COMMAND, "Hi<|CHATBOT_TOKEN|><|START_RESPONSE|>", {}, None),  # within the content
    ],
)
def test_the_lead_follows_from_template_prompt_and_variables(
    template: str, prompt_end: str, variables: dict[str, Any], opening: str | None
) -> None:
    tokenizer = tokenizer_of(template)
    body = ChatBody(messages=USER, response_format=FORM, chat_template_kwargs=variables)  # type: ignore[arg-type]
    (reply,) = Replies(tokenizer).readers(body, tokenizer.encode(prompt_end, add_special_tokens=False))
    assert (None if reply.preamble is None else reply.preamble.opening) == opening


def asked(server: Served, streamed: bool = False, **more: Any) -> list[tuple[str, str]]:
    """Return reasoning and content of four samples."""
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    often = {str(tokenizer.convert_tokens_to_ids(marker)): 6.0 for marker in ("<think>", "</think>")}
    body = {"messages": USER, "response_format": FORM, "max_tokens": 200, "temperature": 1.5, "seed": 5, "n": 4}
    body |= {"logit_bias": often, **more}
    if not streamed:
        answer = server.post("/v1/chat/completions", **body)
        assert answer.status_code == 200, answer.text
        messages = [choice["message"] for choice in answer.json()["choices"]]
        return [(message.get("reasoning_content") or "", message["content"] or "") for message in messages]
    found = [["", ""] for _ in range(4)]
    lines = server.post("/v1/chat/completions", stream=True, **body).text.splitlines()
    for line in [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]:
        for choice in json.loads(line)["choices"]:
            found[choice["index"]][0] += choice["delta"].get("reasoning_content") or ""
            found[choice["index"]][1] += choice["delta"].get("content") or ""
    return [(reasoning, content) for reasoning, content in found]


@pytest.mark.parametrize("template", [MAY_THINK, THINKS])
def test_reasoning_and_json_are_the_same_with_every_method_and_streamed(tmp_path: Path, template: str) -> None:
    found = {}
    for method in ("plain", "draft", "suffix", "ngram"):
        with serving(load(tmp_path / method, template, method)) as server:
            found[method] = asked(server)
            assert asked(server, streamed=True) == found[method]
            assert not any(reasoning for reasoning, _ in asked(server, chat_template_kwargs={"enable_thinking": False}))
    assert all(each == found["plain"] for each in found.values())
    for _, content in found["plain"]:
        jsonschema.validate(json.loads(content), SCHEMA)
    reasoned = [reasoning for reasoning, _ in found["plain"] if reasoning]
    assert len(reasoned) == 4 if template == THINKS else reasoned
    assert len(set(reasoned)) > 1


def test_an_answer_that_ends_within_reasoning_has_no_content(tmp_path: Path) -> None:
    with serving(load(tmp_path, THINKS)) as server:
        for reasoning, content in asked(server, max_tokens=3, logit_bias={}):
            assert reasoning and not content


def test_forced_calls_come_after_reasoning(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    template = THINKS + "{% if tools %}{% endif %}{# {{ tools }} #}"
    with serving(load(tmp_path, template)) as server:
        tokenizer = server.llm.tokenizer
        assert tokenizer is not None
        body = {"messages": USER, "tools": [tool], "tool_choice": "required", "max_tokens": 200, "temperature": 1.5, "seed": 1}
        body["logit_bias"] = {str(tokenizer.convert_tokens_to_ids("</think>")): 6.0}
        answer = server.post("/v1/chat/completions", **body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
    assert choice["message"]["reasoning_content"] and choice["finish_reason"] == "tool_calls"
    for call in choice["message"]["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
