"""With tools and a response_format a reply is JSON or begins with a tool call: random walks through grammar and reader."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tiny_folder import make_folder, make_tokenizer
from tokenizers import AddedToken

from outrider import LLM, OutriderError
from outrider.engine.detokenizer import DetokenizerFactory
from outrider.server import schemas
from outrider.server.formats import OPENINGS
from outrider.server.protocol import ChatBody
from outrider.server.replies import Part, Replies, load_response_template, openings_of, response_template

from .served import Served, serving
from .test_replies import CASES, NOW, TEMPLATES, TOOLS, calls_of, read

PROMPT = "{% for message in messages %}{{ message.content }}\n{% endfor %}{{ tools }}"
SPELLED = [*OPENINGS, "<think>", "</think>", "[THINK]", "<|end|>", "<|channel|>final<|message|>", "<|END_RESPONSE|>"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "string", "maxLength": 40}},
    "required": ["a"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
USER: Any = {"role": "user", "content": "Hi"}
# (chat template, end of the prompt, what follows the reasoning and what precedes it)
MODELS: dict[str, tuple[str, str, str, str]] = {
    "Hermes": ("<|im_start|><tool_call>", "Hi\n", "", ""),
    "Hermes, may think": ("<|im_start|><tool_call><think></think>", "Hi\n", "<think>", "</think>"),
    "Hermes, thinks": ("<|im_start|><tool_call><think></think>", "Hi\n<think>\n", "", "</think>"),
    "Hermes, does not think": ("<|im_start|><tool_call><think></think>", "Hi\n<think></think>", "", ""),
    "Qwen3-Coder": (TEMPLATES["Qwen3-Coder"][0], "Hi\n", "", ""),
    "Seed": (TEMPLATES["Seed"][0] + "<seed:think></seed:think>", "Hi\n", "<seed:think>", "</seed:think>"),
    "MiniMax": (TEMPLATES["MiniMax"][0], "Hi\n<think>\n", "", "</think>"),
    "DeepSeek-V3.2": (TEMPLATES["DeepSeek-V3.2"][0], "Hi\n", "<think>", "</think>"),
    "DeepSeek-V3.1": (TEMPLATES["DeepSeek-V3.1"][0], "Hi\n<think>", "", "</think>"),
    "Kimi": (TEMPLATES["Kimi"][0], "Hi\n", "", ""),
    "GLM": (TEMPLATES["GLM"][0], "Hi\n", "<think>", "</think>"),
    "Gemma": ("<|tool_call><|channel>thought\n<channel|>", "<|turn>model\n", "<|channel>thought\n", "<channel|>"),
    "Mistral": ("[TOOL_CALLS][ARGS][THINK][/THINK]", "[/INST]", "[THINK]", "[/THINK]"),
    "older Mistral": ("[TOOL_CALLS]", "[/INST]", "", ""),
    "Command": (
        "<|START_ACTION|><|START_THINKING|><|START_RESPONSE|>",
        "<|CHATBOT_TOKEN|>",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
    ),
    "gpt-oss": (
        "<|channel|>commentary functions. <|channel|>analysis<|message|> <|channel|>final<|message|>",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
    ),
}
MARKERS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<seed:tool_call>", "<seed:think>", "</seed:think>", "｜DSML｜"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<minimax:tool_call>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    *("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>"),
    *("<|channel|>", "<|message|>", "<|start|>", "<|call|>", "<|constrain|>"),
]


@cache
def tokenizer_of(template: str, kind: str) -> Any:
    """Return a tokenizer whose markers are special tokens, other tokens, or texts. Its first special token, <|end|>, is one."""
    tokenizer = make_tokenizer(chat_template=PROMPT + "{#" + template + "#}")
    tokenizer.add_special_tokens({"eos_token": "<|return|>"})
    if kind != "text":
        tokenizer.add_tokens([AddedToken(marker, special=kind == "special", normalized=False) for marker in MARKERS])
    return tokenizer


def body_of(**fields: Any) -> ChatBody:
    return ChatBody(messages=[USER], tools=TOOLS, **fields)


def said(part: Part) -> tuple[str, str, list[tuple[str, Any]]]:
    return part.content.lstrip(), part.reasoning, calls_of(part)


def pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def a_call(form: Any, openings: Sequence[str], rng: random.Random) -> str:
    """Return the calls of a reply in a form."""
    text = rng.choice([text for each, text, *_, calls in CASES.values() if calls and load_response_template(each) == form])
    return text[min(at for opening in openings if (at := text.find(opening)) >= 0) :]


def valid(text: str) -> bool:
    """Return whether a text is JSON that matches the schema."""
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


def walk(matcher: Any, plan: list[int], size: int, end: int, rng: random.Random) -> list[int]:
    """Return the tokens of a text that a grammar allows and its end, or many. They follow ``plan`` for a while."""
    output: list[int] = []
    while len(output) < 300 and end not in output:
        mask = matcher.compute_logit_bias()
        allowed = [token for token, each in enumerate(mask[:size]) if each]
        assert allowed and not matcher.is_error()
        planned = plan.pop(0) if plan and rng.random() < 0.998 else end if rng.random() < 0.3 else -1
        if planned not in allowed:
            plan, planned = [], rng.choice(allowed)
        output.append(planned)
        assert planned == end or matcher.try_consume_tokens([planned]) == 1
    return output


@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize("name", MODELS)
def test_every_text_that_the_grammar_allows_is_calls_or_valid_json(name: str, kind: str) -> None:
    template, prompt, begins, ends = MODELS[name]
    tokenizer = tokenizer_of(template, kind)
    replies, form, rng = Replies(tokenizer), response_template(tokenizer), random.Random(f"{name} {kind}")
    asked, free, openings = body_of(response_format=FORM), body_of(), openings_of(form)
    replies.check(asked)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    prompt_ids = encode(prompt)
    (first,) = replies.readers(asked, prompt_ids)
    assert first.preamble is not None and first.preamble.calls == openings
    table = schemas.LLTokenizer(
        tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer), eos_token=[tokenizer.eos_token_id]
    )
    grammar, counts = schemas.compiled(table, json.dumps(SCHEMA), first.preamble), Counter[str]()
    for _ in range(40):
        thought = rng.choice([begins + rng.choice(["", "A.", '{"a": 1}']) + ends, "" if begins else ends]) if ends else ""
        answer = json.dumps({"a": 1, "b": rng.choice(SPELLED)})
        begun, spelled = rng.choice(
            [(first.preamble.heading, answer), (a_call(form, openings, rng), ""), (rng.choice(openings), "")]
        )
        plan = [token for text in (thought + rng.choice(["", "\n\n"]) + begun, *spelled) for token in encode(text)]
        output = walk(grammar.deep_copy(), plan, len(tokenizer), tokenizer.eos_token_id, rng)
        text_of = DetokenizerFactory(tokenizer)(prompt_ids, True, replies.delimiters(asked))
        chunks = [*(text_of.feed([token]) for token in output if token != tokenizer.eos_token_id), text_of.flush()]
        text = "".join(chunks)
        found, whole, cut, usual = (
            said(read(replies.readers(body, prompt_ids)[0], parts))
            for body, parts in ((asked, chunks), (asked, [text]), (asked, pieces(text, rng)), (free, chunks))
        )
        assert found == whole == cut, text
        content, _, calls = found
        is_led = ends and text.lstrip().startswith(begins)
        begun = (text.partition(ends)[2] if is_led else text).strip()
        if begun.startswith(openings):
            counts["calls" if calls else "text"] += 1
            assert found == usual, text
        elif output[-1] == tokenizer.eos_token_id:
            counts["json"] += 1
            assert valid(content), text
            assert not calls, text
    assert counts.keys() == {"calls", "text", "json"}, counts


def test_reasoning_after_a_call_ends_as_in_other_replies() -> None:
    template, prompt, *_ = MODELS["gpt-oss"]
    tokenizer = tokenizer_of(template, "special")
    call, thought = "to=functions.time.now<|message|>{}<|call|>", "<|channel|>analysis<|message|>A.<|call|>"
    text = f"<|start|>assistant{call}<|start|>assistant{thought}<|start|>assistant {call}"
    for body in (body_of(response_format=FORM), body_of()):
        (reply,) = Replies(tokenizer).readers(body, tokenizer.encode(prompt, add_special_tokens=False))
        assert said(read(reply, [text])) == ("", "A.", [NOW, NOW])


def test_calls_that_are_json_are_refused() -> None:
    for template in (TEMPLATES["Llama"][0], TEMPLATES["reasoning only"][0]):
        replies = Replies(tokenizer_of(template, "text"))
        with pytest.raises(OutriderError, match=r"force .*with tool_choice"):
            replies.check(body_of(response_format=FORM))
        replies.check(body_of(response_format=FORM, tool_choice="required"))
        replies.check(body_of(response_format=FORM, tool_choice="none"))


def load(folder: Path, method: str) -> LLM:
    tokenizer = tokenizer_of(MODELS["Hermes, may think"][0], "special")
    options: dict[str, Any] = {"tokenizer": tokenizer, "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 512}
    target, draft = make_folder(folder / "target", **options), make_folder(folder / "draft", num_hidden_layers=1, **options)
    kind: dict[str, Any] = {"draft": draft} if method == "draft" else {}
    return LLM(target, method=method, num_draft_tokens=3, max_batch=4, compile="never", same_text=True, **kind)


def asked(server: Served, is_streamed: bool = False) -> list[tuple[str, str, list[tuple[str, Any]], str]]:
    """Return content, reasoning, calls and finish reason of the samples of a request."""
    often = {"<think>": 2.0, "</think>": 6.0, "<tool_call>": 4.0, "</tool_call>": 2.0, "<|return|>": 2.0}
    assert server.llm.tokenizer is not None
    bias = {str(server.llm.tokenizer.convert_tokens_to_ids(token)): value for token, value in often.items()}
    body = {"messages": [USER], "tools": TOOLS, "response_format": FORM, "logit_bias": bias, "n": 8, "stream": is_streamed}
    answer = server.post("/v1/chat/completions", **body, max_tokens=200, temperature=1.3, seed=7)
    assert answer.status_code == 200, answer.text
    parts, reasons = [Part() for _ in range(8)], [""] * 8
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    for choice in [choice for each in lines or [answer.text] for choice in json.loads(each)["choices"]]:
        new = choice["delta" if is_streamed else "message"]
        part = Part(new.get("content") or "", new.get("reasoning_content") or "", new.get("tool_calls") or [])
        parts[choice["index"]].add(part)
        reasons[choice["index"]] = choice["finish_reason"]
    return [(*said(part), reason) for part, reason in zip(parts, reasons, strict=True)]


def test_replies_are_the_same_with_every_method_and_streamed(tmp_path: Path) -> None:
    found = {}
    for method in ("plain", "draft", "ngram"):
        with serving(load(tmp_path / method, method)) as server:
            found[method] = asked(server)
            assert asked(server, is_streamed=True) == found[method]
    assert found["draft"] == found["ngram"] == found["plain"]
    complete = [(content, reasoning) for content, reasoning, _, reason in found["plain"] if reason == "stop"]
    assert {valid(content) for content, _ in complete} == {True, False}
    assert all(valid(content) or content.startswith("<tool_call>") for content, _ in complete)
    assert len({reasoning for _, reasoning in complete}) > 1
