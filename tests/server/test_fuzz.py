"""Whatever is sent, in or out of the shape that the OpenAPI document describes, the server never breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from outrider import LLM, SamplingParams

from .served import Served, serving

MODES = schemathesis.Config.from_dict({"generation": {"mode": "all"}})


@pytest.fixture(scope="module")
def fuzzed(load: Callable[..., LLM]) -> Iterator[Served]:
    with serving(load(max_batch=8), max_body=100_000, request_timeout=20.0) as server:
        yield server


@pytest.fixture(scope="module")
def document(fuzzed: Served) -> object:
    return schemathesis.openapi.from_url(fuzzed.url + "/openapi.json", config=MODES)


schema = schemathesis.pytest.from_fixture("document")


@schema.parametrize()
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_call_breaks_the_server(case: schemathesis.Case) -> None:
    if isinstance(case.body, dict):  # what is generated must stay short
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(case.body.get(name), int) and case.body[name] > 8:
                case.body[name] = 8
        if isinstance(case.body.get("n"), int) and case.body["n"] > 3:
            case.body["n"] = 3
    case.call_and_validate(checks=[not_a_server_error], timeout=60)


def test_after_all_that_the_server_answers_as_before(fuzzed: Served, plain: LLM) -> None:
    assert fuzzed.text("def add(") == plain.generate("def add(", SamplingParams(max_tokens=24))[0].text
    assert not fuzzed.llm.engine.has_work
