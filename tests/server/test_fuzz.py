"""Whatever is sent, in or out of the shape that the OpenAPI document describes, the server never breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode

from outrider import LLM, SamplingParams

from .served import Served, serving

SHORT = {"max_tokens": 8, "max_completion_tokens": 8, "n": 3}  # at most: what is generated must not take long


@pytest.fixture(scope="module")
def fuzzed(load: Callable[..., LLM]) -> Iterator[Served]:
    with serving(load(max_batch=8), max_body=100_000) as server:
        yield server


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_call_breaks_the_server(fuzzed: Served, mode: GenerationMode) -> None:
    asked = set()
    for found in schemathesis.openapi.from_url(fuzzed.url + "/openapi.json").get_all_operations():
        operation = found.ok()
        if mode == GenerationMode.NEGATIVE and operation.method.upper() == "GET":
            continue  # there is nothing to get wrong

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
        def ask(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body.setdefault("max_tokens", SHORT["max_tokens"])
                for name, most in SHORT.items():
                    if isinstance(case.body.get(name), int):
                        case.body[name] = min(case.body[name], most)
            answer = case.call(timeout=120)
            assert answer.status_code < 500, answer.content

        ask()
        asked.add(operation.path)
    assert {"/v1/completions", "/v1/chat/completions"} <= asked


def test_after_all_that_the_server_answers_as_before(fuzzed: Served, plain: LLM) -> None:
    assert fuzzed.text("def add(") == plain.generate("def add(", SamplingParams(max_tokens=24))[0].outputs[0].text
    assert not fuzzed.llm.engine.has_work
