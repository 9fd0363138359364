"""Structured output is valid for every method and follows the target's distribution restricted to the grammar."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from toy import outputs_of

from outrider import LLM, SamplingParams
from outrider.proposers.base import ScriptedProposer
from outrider.sampling.grammar_masks import path_to
from outrider.server import grammar, schemas
from outrider.server.config import ServerConfig
from outrider.server.grammar import GrammarCompiler
from outrider.server.prompts import tokenizer_data
from outrider.types import OutriderError, Proposal

from .served import Served, serving

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "born": {"type": "integer", "minimum": 0, "maximum": 2000},
        "kind": {"enum": ["ship", "quay", "dawn"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "born", "kind", "tags"],
    "additionalProperties": False,
}
SCRIPTED = ("tree", "certain")  # handwritten proposals
SMALL: dict[str, Any] = {"type": "array", "items": {"enum": ["ab", "a", 17]}, "minItems": 1, "maxItems": 2}


def compiler(llm: LLM) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_data(llm))


def tree_of(context: Any, k: int) -> Proposal:
    """Return a tree for every request: half of its drafts violate the grammar, some chains do not."""
    text = [request.token_ids for request in context.requests]
    batch = len(text)
    token_ids = torch.tensor([[(7 * len(ids) + 31 * node) % 320 for node in range(6)] for ids in text])
    allowed = [
        request.matcher.allowed(ids[request.num_prompt_tokens :], [])
        for request, ids in zip(context.requests, text, strict=True)
    ]
    for b, mask in enumerate(allowed):
        if mask is not None:
            token_ids[b, 1] = int(mask.nonzero()[0])
            token_ids[b, 2] = int(mask.nonzero()[-1])
    parents = torch.tensor([[-1, -1, -1, 0, 1, 2]] * batch)
    return Proposal(token_ids, torch.full((batch,), 6), None, parents)


def chains_of(context: Any, k: int) -> Proposal:
    """Return tokens of that tree as chains with probability 1 each, as point masses have in a batch with drafts of a model."""
    token_ids = tree_of(context, k).token_ids[:, [1, 0, 2]]
    vocab_size = context.sampler.vocab_size
    return Proposal(token_ids, torch.full((len(token_ids),), 3), torch.nn.functional.one_hot(token_ids, vocab_size).float())


def scripted(method: str, target: Any, **options: Any) -> LLM:
    proposer = ScriptedProposer(tree_of if method == "tree" else chains_of)
    return LLM(target, proposer=proposer, num_draft_tokens=2, max_batch=8, compile="never", **options)


@pytest.mark.parametrize("same_text", [True, False])
@pytest.mark.parametrize("method", ["plain", "ngram", "draft", *SCRIPTED])
def test_every_answer_matches_its_schema(method: str, same_text: bool, load: Callable[..., LLM], target: Any) -> None:
    if method in SCRIPTED:
        llm = scripted(method, target, same_text=same_text)
    else:
        llm = load(method, 3, max_batch=8, same_text=same_text)
    score = llm.runner.score

    def watched(context: Any, proposal: Proposal, hidden: tuple[int, ...] = ()) -> Any:
        for b, request in enumerate(context.requests):
            drafts = proposal.token_ids[b, : int(proposal.lens[b])].tolist()
            parents = None if proposal.parents is None else proposal.parents[b].tolist()
            output = request.token_ids[request.num_prompt_tokens :]
            for node, draft in enumerate(drafts):
                allowed = request.matcher.allowed(
                    output, path_to(node - 1 if parents is None else parents[node], drafts, parents)
                )
                assert allowed is not None and allowed[draft]  # so no draft follows the end of an answer either
        return score(context, proposal, hidden)

    llm.runner.score = watched  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=120, temperature=0.9, seed=1, n=8, grammar=compiler(llm).json(SCHEMA))
    prompts = ['{"name": "Ada", "born": 1815}\n', "The ship left the harbour"]
    for completion in outputs_of(llm.generate(prompts, params)):
        assert completion.finish_reason == "stop"
        jsonschema.validate(json.loads(completion.text), SCHEMA)
    assert llm.engine.stats.faults == 0
    if method != "plain":
        assert llm.engine.stats.num_drafts > 0


@pytest.mark.parametrize("method", ["ngram", "draft", *SCRIPTED])
def test_drafts_do_not_change_constrained_answers(method: str, load: Callable[..., LLM], target: Any, plain: LLM) -> None:
    llm = scripted(method, target, same_text=True) if method in SCRIPTED else load(method, 3)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=80, temperature=temperature, seed=4, n=3, grammar=compiler(llm).json(SCHEMA))
        found = [completion.token_ids for completion in outputs_of(llm.generate("The ship", params))]
        assert found == [completion.token_ids for completion in outputs_of(plain.generate("The ship", params))]


@pytest.mark.parametrize("stop", [('born"',), (", ",), ('"ki', "tags"), ("ship", "quay", "dawn"), ("}",)])
@pytest.mark.parametrize("method", ["plain", "ngram", "draft"])
def test_a_stop_string_in_forced_tokens_ends_the_answer(method: str, stop: tuple[str, ...], load: Callable[..., LLM]) -> None:
    """Text, tokens and log-probabilities equal those without grammar drafts."""
    found = []
    for grammar_drafts in (False, True):
        llm = load(method, 0 if not grammar_drafts else "auto" if method == "plain" else 3, grammar_drafts=grammar_drafts)
        form = compiler(llm).json(SCHEMA)
        params = SamplingParams(max_tokens=90, seed=3, grammar=form, stop=stop, logprobs=2, presence_penalty=0.4)
        found.append(outputs_of(llm.generate(["The ship", '{"name": "Ada", "born": 1815}\n'], params)))
        assert (llm.stats.num_grammar_tokens > 5) == grammar_drafts
    for without, completion in zip(*found, strict=True):
        assert completion.finish_reason == without.finish_reason == "stop" and not any(each in completion.text for each in stop)
        assert (completion.text, completion.token_ids) == (without.text, without.token_ids)
        assert completion.logprobs is not None and without.logprobs is not None
        pairs = zip(completion.logprobs, without.logprobs, strict=True)
        assert all(ours.logprob == pytest.approx(theirs.logprob, abs=1e-3) for ours, theirs in pairs)
        assert len(completion.origins) == len(completion.token_ids)


def test_forced_tokens_are_reported_separately_from_drafts(load: Callable[..., LLM]) -> None:
    llm = load("ngram", 3, max_batch=4)
    params = [SamplingParams(max_tokens=90, grammar=compiler(llm).json(SCHEMA)), SamplingParams(max_tokens=30)]
    constrained, free = outputs_of(llm.generate(["The ship", "The ship"], params))
    assert constrained.origins.count("grammar") == constrained.stats.num_grammar_tokens == llm.stats.num_grammar_tokens > 10
    assert "grammar" not in free.origins and free.stats.num_grammar_tokens == 0
    stats = constrained.stats
    assert stats.num_accepted <= stats.num_reached <= stats.num_drafts and max(stats.acceptance_histogram) <= 3
    assert len(constrained.token_ids) <= stats.num_rounds + stats.num_accepted + stats.num_grammar_tokens
    assert stats.tokens_per_round > stats.mean_acceptance_length


def test_answers_consist_of_allowed_tokens(plain: LLM) -> None:
    """All answers of a small language are generated, and no others."""
    params = SamplingParams(max_tokens=40, temperature=3.0, seed=0, n=60, grammar=compiler(plain).json(SMALL))
    answers = {json.dumps(json.loads(completion.text)) for completion in outputs_of(plain.generate("x", params))}
    for answer in answers:
        jsonschema.validate(json.loads(answer), SMALL)
    assert len(answers) >= 6


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}])
def test_an_unsupported_schema_is_refused(plain: LLM, schema: dict[str, Any]) -> None:
    with pytest.raises(OutriderError, match="schema"):
        compiler(plain).json(schema)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"enum": list(range(5000))}, "the JSON schema has more than 5000 values: give a smaller one"),
        (nested(65), "the JSON schema is nested more than 64 levels deep: give a flatter one"),
        ({"allOf": [{}] * 257}, "the JSON schema has 257 alternatives in one allOf: give at most 256"),
    ],
)
def test_a_schema_that_exceeds_a_size_limit_is_refused(schema: dict[str, Any], told: str) -> None:
    with pytest.raises(OutriderError, match=told):
        grammar.schema_text(schema, ServerConfig())


@pytest.mark.parametrize("schema", [{"enum": list(range(4999))}, nested(64), {"anyOf": [{}] * 256}])
def test_a_schema_at_a_size_limit_is_accepted(schema: dict[str, Any]) -> None:
    assert json.loads(grammar.schema_text(schema, ServerConfig())) == schema


def test_schemas_are_enforced_over_http_and_bad_ones_refused(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA, "strict": True}}
    messages = [{"role": "user", "content": "Who?"}]
    answer = served.post("/v1/chat/completions", messages=messages, max_tokens=120, n=3, seed=2, response_format=form)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert float(httpx.get(served.url + "/metrics").text.split("outrider:grammar_tokens_total{")[1].split()[1]) > 10
    form["json_schema"]["schema"] = {"type": "nonsense"}  # type: ignore[index]
    refused = served.post("/v1/chat/completions", messages=messages, response_format=form)
    assert refused.status_code == 400 and "schema" in refused.json()["error"]["message"]
    for name, value in (("ignore_eos", True), ("min_tokens", 2)):
        refused = served.post("/v1/completions", prompt="a", response_format={"type": "json_object"}, **{name: value})
        assert refused.status_code == 400 and name in refused.json()["error"]["message"]


def test_a_grammar_that_exceeds_a_limit_fails_only_its_answer(
    load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance's masks then allow only the end of the text, so a truncated value would look complete."""
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "a.{100}b"}}}
    with serving(load()) as server:
        for limit, value in ((schemas, "MAX_LEXER_STATES"), (grammar, "MASKS_SECONDS")):
            monkeypatch.setattr(limit, value, 30 if limit is schemas else 0.0)
            monkeypatch.setattr(grammar, "SECONDS_A_MASK", 0.01 if limit is schemas else 0.0)
            form["json_schema"]["schema"]["description"] = value  # type: ignore[index]
            with ThreadPoolExecutor() as callers:
                honest = callers.submit(server.text, "The ship", max_tokens=100)
                for _ in range(2):  # the second time before generation
                    refused = server.post("/v1/completions", prompt="x", max_tokens=200, response_format=form)
                    assert refused.status_code == 400 and "unsupported JSON schema" in refused.text
            monkeypatch.undo()
            assert honest.result() == server.text("The ship", max_tokens=100)


def test_a_limit_exceeded_after_drafts_refuses_no_schema(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target may reject these drafts, and the output may succeed."""
    form = compiler(plain).json(SMALL)
    matcher = form.matcher()
    first = matcher.allowed([], [])
    assert first is not None
    (token, *_) = first.nonzero().flatten().tolist()
    monkeypatch.setattr(grammar, "SECONDS_A_MASK", -1.0)
    with pytest.raises(OutriderError, match="unsupported JSON schema"):
        matcher.allowed([], [token])
    assert form.refusal is None
    with pytest.raises(OutriderError, match="unsupported JSON schema"):
        matcher.allowed([token], [])
    assert form.refusal is not None


def test_a_mask_that_exceeds_a_limit_is_not_kept_for_the_target(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target asks for the masks that the drafts' sampler asked for; the matcher then allows only the end of the text."""
    matcher = compiler(plain).json(SMALL).matcher()
    first = matcher.allowed([], [])
    assert first is not None
    (token, *_) = first.nonzero().flatten().tolist()

    def exceeded(_: object) -> None:
        raise OutriderError("too many states")

    monkeypatch.setattr(grammar.schemas, "check", exceeded)
    for _ in range(2):
        with pytest.raises(OutriderError, match="too many states"):
            matcher.allowed([], [token])


def test_drafts_without_a_mask_add_no_time_for_masks(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = compiler(plain).json(SMALL).matcher()
    first = matcher.allowed([], [])
    assert first is not None
    forbidden = int((~first).nonzero()[0])
    monkeypatch.setattr(grammar, "SECONDS_A_MASK", 1000.0)
    before = matcher._seconds_left
    assert matcher.allowed([], [forbidden]) is None and matcher._seconds_left < before


def test_an_output_that_exceeds_a_limit_does_not_refuse_json_objects_to_others(
    load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 20, "response_format": {"type": "json_object"}}
    with serving(load()) as server:
        monkeypatch.setattr(grammar, "MASKS_SECONDS", 0.0)
        monkeypatch.setattr(grammar, "SECONDS_A_MASK", 0.0)
        assert server.post("/v1/completions", **asked).status_code == 400
        monkeypatch.undo()
        assert server.post("/v1/completions", **asked).status_code == 200


def test_a_path_ends_whatever_the_parents_of_a_row_without_drafts_are():
    """They were 0, and the path of the first draft was followed for ever."""
    assert path_to(2, [7, 8, 9], [0, 0, 0]) == [7, 9]
    assert path_to(2, [7, 8, 9], [0, 1, 2]) == [7, 8, 9]
