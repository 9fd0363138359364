"""Requests inside and outside the schema of the OpenAPI document never break the server."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from referencing.exceptions import Unresolvable
from schemathesis.generation import GenerationMode

from outrider import LLM, SamplingParams

from .served import Served, serving

NUM_SCHEMAS = int(os.environ.get("OUTRIDER_FUZZ_EXAMPLES", "60"))  # an hour runs about ten thousand
KINDS = ("integer", "string")
SHORT = {
    "max_tokens": 8,
    "max_completion_tokens": 8,
    "max_output_tokens": 8,
    "n": 3,
}  # limits, so that generation takes little time


@pytest.fixture(scope="module")
def fuzzed(load: Callable[..., LLM]) -> Iterator[Served]:
    with serving(load(max_batch=8), max_body=100_000, schema_timeout=1.0) as server:
        yield server


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_call_breaks_the_server(fuzzed: Served, mode: GenerationMode) -> None:
    asked = set()
    for found in schemathesis.openapi.from_url(fuzzed.url + "/openapi.json").get_all_operations():
        operation = found.ok()
        if mode == GenerationMode.NEGATIVE and operation.method.upper() == "GET":
            continue  # there is nothing to violate

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
        def ask(case: Any) -> None:
            if isinstance(case.body, dict):
                limit = "max_output_tokens" if case.path == "/v1/responses" else "max_tokens"
                case.body.setdefault(limit, SHORT[limit])
                for name, most in SHORT.items():
                    if isinstance(case.body.get(name), int):
                        case.body[name] = min(case.body[name], most)
            answer = case.call(timeout=120)
            assert answer.status_code < 500, answer.content

        ask()
        asked.add(operation.path)
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"} <= asked


NAMES = st.sampled_from(["a", "b", "ä", "", "$ref", "type"])
LEAVES = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "number", "boolean", "null", "nonsense"])}),
    st.fixed_dictionaries({"type": st.just("string"), "pattern": st.text("ab.*+?|()[]{}^$\\\\d19,", max_size=12)}),
    st.fixed_dictionaries({"type": st.just("string"), "minLength": st.integers(-1, 9), "maxLength": st.integers(-1, 10**6)}),
    st.fixed_dictionaries({"type": st.just("integer"), "minimum": st.integers(), "maximum": st.integers()}),
    st.fixed_dictionaries({"type": st.just("string"), "format": st.sampled_from(["date", "uuid", "uri", "nonsense"])}),
    st.fixed_dictionaries({"enum": st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=4)}),
    st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/$defs/a", "#/properties/a", "http://x/y", "#/%"])}),
    st.dictionaries(NAMES, st.one_of(st.none(), st.booleans(), st.floats(allow_nan=False), st.text(max_size=3)), max_size=3),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=3)}),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.integers(0, 3)}),
        st.fixed_dictionaries({"$defs": st.dictionaries(NAMES, inner, max_size=2), "$ref": st.just("#/$defs/a")}),
        st.builds(lambda key, items: {key: items}, st.sampled_from(["allOf", "anyOf", "oneOf"]), st.lists(inner, max_size=3)),
        st.fixed_dictionaries({"type": st.just("object"), "patternProperties": st.dictionaries(NAMES, inner, max_size=2)}),
    ),
    max_leaves=8,
)


@given(schema=SCHEMAS)
@example(schema={})
@example(schema={"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopq"]})
@example(schema={"allOf": [{"anyOf": [{"properties": {f"{i}": {"type": kind}}} for kind in KINDS]} for i in range(12)]})
@example(schema={"type": "array", "items": {"$ref": "#"}, "minItems": 10**9})
@example(schema={"type": "string", "pattern": "((a{1000}){1000}){1000}"})
@example(schema={"type": "string", "minLength": 10**9})
@example(schema={"type": "integer", "multipleOf": 99999999977})
@example(schema={"type": "number", "multipleOf": 1e-300})
@example(schema={"x-guidance": {"whitespace_pattern": "("}, "type": "object"})
@settings(max_examples=NUM_SCHEMAS, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_no_schema_breaks_the_server_and_answers_match_their_schemas(fuzzed: Served, schema: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = fuzzed.post("/v1/completions", prompt="x", max_tokens=24, seed=1, response_format=form)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert len(answer.json()["error"]["message"]) < 400
        return
    (choice,) = answer.json()["choices"]
    if choice["finish_reason"] == "stop":
        value = json.loads(choice["text"])
        if is_known_to_the_validator(schema):
            jsonschema.validate(value, schema)


def is_known_to_the_validator(schema: Any) -> bool:
    """Return whether jsonschema can validate with a schema: it is valid, and so are its references and patterns."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.Draft202012Validator(schema).is_valid({"a": "a"})
    except (jsonschema.SchemaError, Unresolvable, re.error, RecursionError):
        return False
    return True


def test_the_server_still_gives_the_same_answers(fuzzed: Served, plain: LLM) -> None:
    assert fuzzed.text("def add(") == plain.generate("def add(", SamplingParams(max_tokens=24))[0].outputs[0].text
    assert not fuzzed.llm.engine.has_work
