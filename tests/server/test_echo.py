"""Completions that begin with their prompt, as evaluation harnesses ask for log-likelihoods."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from .served import Served, Slow, until

PROMPTS = ["def add(first, second):\n    return", "The ship é ☃ sailed"]


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(target: Path) -> PreTrainedModel:
    """The target without Outrider."""
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


@torch.no_grad()
def after_each(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [T, V] of the tokens after each token."""
    return model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_has_the_log_probabilities_of_its_prompt(
    client: openai.OpenAI, served: Served, model: PreTrainedModel, as_ids: bool
) -> None:
    end = served.llm.tokenizer.eos_token_id  # type: ignore[union-attr]
    all_ids = [served.llm.encode(prompt) for prompt in PROMPTS] + [[end], [5, end, 9, end]]
    given: Any = all_ids if as_ids else PROMPTS
    asked: dict[str, Any] = {"model": "outrider", "prompt": given, "max_tokens": 3, "logprobs": 2, "n": 2, "temperature": 0}
    echoed, usual = (client.completions.create(**asked, echo=echo) for echo in (True, False))
    assert echoed.usage is not None and echoed.usage.completion_tokens == usual.usage.completion_tokens  # type: ignore[union-attr]
    for choice, after in zip(echoed.choices, usual.choices, strict=True):
        ids = all_ids[choice.index // 2]
        text = served.llm.tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[union-attr]
        assert choice.text == text + after.text and choice.finish_reason == after.finish_reason
        found, later = choice.logprobs, after.logprobs
        assert found is not None and later is not None and found.token_logprobs and found.top_logprobs and later.tokens
        assert found.token_logprobs[len(ids) :] == later.token_logprobs and found.tokens[len(ids) :] == later.tokens  # type: ignore[index]
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        expected = after_each(model, ids)
        for place, token in enumerate(ids[1:]):
            assert found.token_logprobs[place + 1] == pytest.approx(expected[place, token].item(), abs=1e-3)
            likeliest = max(found.top_logprobs[place + 1].values())
            assert likeliest == pytest.approx(expected[place].max().item(), abs=1e-3)
        assert found.text_offset and found.text_offset[len(ids)] == len(text)


def test_offsets_are_those_of_the_text_with_special_tokens(client: openai.OpenAI, served: Served) -> None:
    tokenizer = served.llm.tokenizer
    assert tokenizer is not None
    end, asked = tokenizer.eos_token, {"model": "outrider", "max_tokens": 3, "logprobs": 0, "temperature": 0, "echo": True}
    prompt = f"def{end}add"
    (choice,) = client.completions.create(prompt=prompt, **asked).choices  # type: ignore[call-overload]
    found = choice.logprobs
    assert choice.text.startswith(prompt) and found.text_offset[-3] == len(prompt)
    ids, shown = served.llm.encode(prompt), {"skip_special_tokens": False}
    (choice,) = client.completions.create(prompt=ids, **asked, extra_body=shown).choices  # type: ignore[call-overload]
    assert choice.text.startswith(prompt) and choice.logprobs.text_offset[: len(ids)] == [
        0,
        *(len(tokenizer.decode(ids[:place])) for place in range(1, len(ids))),
    ]


def test_an_echo_without_log_probabilities_is_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "outrider", "prompt": PROMPTS, "max_tokens": 4, "temperature": 0}
    echoed, usual = (client.completions.create(**asked, echo=echo) for echo in (True, False))
    assert [each.text for each in echoed.choices] == [
        prompt + each.text for prompt, each in zip(PROMPTS, usual.choices, strict=True)
    ]


def test_a_target_that_fails_is_not_the_clients_fault(
    client: openai.OpenAI, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.llm.runner, "score", lambda *_: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="the target failed"):
        client.completions.create(model="outrider", prompt="a b c d", echo=True, logprobs=1, max_tokens=1)


def test_an_echo_in_a_stream_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="echo cannot be combined with stream"):
        client.completions.create(model="outrider", prompt="a", echo=True, stream=True)


def test_a_prompt_is_scored_while_it_is_prefilled(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, stats, widths = served.llm.runner, served.llm.engine.stats, []
    run, before = runner.passes.run, (stats.num_tokens, stats.num_grammar_tokens)

    def watched(tokens: torch.Tensor, *rest: Any) -> Any:
        widths.append(tokens.shape[1])
        return run(tokens, *rest)

    monkeypatch.setattr(runner.passes, "run", watched)
    prompt = [7 + 3 * place for place in range(70)]
    answer = served.post("/v1/completions", prompt=prompt, echo=True, logprobs=0, max_tokens=1)
    assert len(answer.json()["choices"][0]["logprobs"]["token_logprobs"]) == 71
    assert (stats.num_tokens, stats.num_grammar_tokens) == (before[0] + 1, before[1])
    assert widths == [69, 1]


def test_an_echo_takes_one_place_in_the_queue_for_each_sequence(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, bridge = Slow(served, monkeypatch), served.service.bridge
    with ThreadPoolExecutor() as callers:
        asked = {"prompt": ["a b c d", "e f g h"], "echo": True, "logprobs": 1, "max_tokens": 20}
        answer = callers.submit(served.post, "/v1/completions", **asked)
        slow.rounds(1)
        until(lambda: served.llm.engine.scheduler.running)
        assert bridge.num_open == 2
        slow.go()
        assert answer.result().status_code == 200
    until(lambda: not bridge.num_open)
