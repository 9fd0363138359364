"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from outrider import LLM
from outrider.server.config import ANYONE, Client, KeyRing

from .served import Served, serving

MESSAGES = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "<|end|> naïve"}]


def test_a_prompt_has_the_tokens_of_a_completion(served: Served, plain: LLM) -> None:
    found = served.post("/tokenize", prompt="def add(naïve):", model="outrider").json()
    tokens = plain.encode("def add(naïve):")
    assert found == {"count": len(tokens), "max_model_len": plain.runner.max_len, "tokens": tokens, "token_strs": None}
    assert served.post("/detokenize", tokens=tokens).json() == {"prompt": "def add(naïve):"}
    named = served.post("/tokenize", prompt="def add(naïve):", return_token_strs=True).json()
    assert named["tokens"] == tokens and named["token_strs"] == plain.tokenizer.convert_ids_to_tokens(tokens)


def test_messages_have_the_tokens_of_a_chat(served: Served, plain: LLM) -> None:
    found = served.post("/tokenize", messages=MESSAGES).json()
    assert found["tokens"] == plain.chat_prompt(MESSAGES)
    usage = served.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens"] == found["count"] == len(found["tokens"])
    rendered = plain.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=False)
    closed = served.post("/tokenize", messages=MESSAGES, add_generation_prompt=False).json()["tokens"]
    assert served.post("/detokenize", tokens=closed).json() == {"prompt": rendered}
    assert closed == plain.chat_prompt(MESSAGES, variables={"add_generation_prompt": False}) != found["tokens"]


@pytest.mark.parametrize("in_worker", [True, False])
def test_special_tokens_are_added_unless_the_client_says_otherwise(
    load: Any, in_worker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load()
    assert llm.tokenizer is not None
    begin = llm.tokenizer.convert_ids_to_tokens(llm.tokenizer.eos_token_id)
    process = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, llm.tokenizer.eos_token_id)])
    monkeypatch.setattr(llm.tokenizer.backend_tokenizer, "post_processor", process)
    if not in_worker:
        monkeypatch.setattr("outrider.server.service.tokenizer_data", lambda llm: None)
    with serving(llm) as served:
        bare = served.post("/tokenize", prompt="a cat", add_special_tokens=False).json()["tokens"]
        assert served.post("/tokenize", prompt="a cat").json()["tokens"] == [llm.tokenizer.eos_token_id, *bare]
        assert served.post("/detokenize", tokens=[llm.tokenizer.eos_token_id, *bare]).json() == {"prompt": begin + "a cat"}
        assert served.post("/tokenize", prompt="", add_special_tokens=False).json()["tokens"] == []
        assert served.post("/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "expected either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "expected either prompt or messages"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools needs messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt needs messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens needs prompt"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": 1}}, "'tokenize' is set by the server"),
        ("/tokenize", {"messages": [*MESSAGES, {"role": "cat", "content": "a"}]}, "messages.2.role"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}, "no place for tools"),
        ("/tokenize", {"prompt": "x1 " * 400}, "shorten it, or run with a larger max_len (--max-len) if the model supports"),
        ("/detokenize", {"tokens": [1 << 20]}, "invalid token id 1048576 at index 0"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("/detokenize", {"tokens": [1] * 256}, "leaves no room in the context"),
        ("/detokenize", {"prompt": "a"}, "tokens: missing"),
    ],
)
def test_an_invalid_call_is_refused_with_the_reason(served: Served, path: str, body: dict[str, Any], says: str) -> None:
    answer = served.post(path, **body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text


def test_another_model_is_unknown(served: Served) -> None:
    assert served.post("/tokenize", prompt="a", model="gpt-9").status_code == 404
    assert served.post("/detokenize", tokens=[1], model="gpt-9").status_code == 404


def test_a_key_is_required(load: Any) -> None:
    with serving(load(), KeyRing([("secret", Client())])) as served:
        assert {served.post(path, prompt="a").status_code for path in ("/tokenize", "/detokenize")} == {401}


def test_a_call_takes_a_place_in_the_queue(load: Any) -> None:
    with serving(load(), max_queue=1) as served:
        with served.service.bridge.reserve_places(served.llm.engine.scheduler.max_batch + 1, ANYONE):
            answers = served.post("/tokenize", prompt="a"), served.post("/detokenize", tokens=[1])
        assert [answer.status_code for answer in answers] == [429, 429] and "retry-after" in answers[0].headers
        assert served.post("/tokenize", prompt="a").status_code == 200


def test_an_unknown_field_gets_no_hint_about_another_api(served: Served) -> None:
    answer = served.post("/tokenize", prompt="a", max_tokens=3)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "max_tokens: unknown field"
