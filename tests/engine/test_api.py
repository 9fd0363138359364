"""The public API: exported names, signatures, and validation of values of any type, with one-line errors."""

from __future__ import annotations

import inspect
import shutil
import sys
from contextlib import closing
from dataclasses import MISSING, fields

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from tiny_folder import make_folder, make_tokenizer
from transformers import AutoModelForCausalLM
from wild import WILD

import outrider
from outrider import LLM, OutriderError, Proposal, SamplingParams, ScriptedProposer
from outrider.engine.options import Speculation
from outrider.options import declared
from outrider.runner import ModelRunner, RunnerConfig
from outrider.server.completions import CompletionBody

SHORT = SamplingParams(max_tokens=4)
OPTIONS = [*declared(Speculation), *declared(RunnerConfig)]
EAGLE = {"method": "eagle"}
ANY = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("api") / "model")


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, method="ngram", compile="never")


def test_a_loaded_draft_keeps_its_dtype(folder):
    draft = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    llm = LLM(folder, draft=draft, dtype="bfloat16", device="cpu", compile="never")
    assert llm.proposer.draft.dtype == torch.float32 and llm.runner.dtype == torch.bfloat16
    llm.close()


def test_same_text_warns_if_the_rounding_depends_on_the_number_of_rows(folder, monkeypatch, caplog):
    monkeypatch.setattr(ModelRunner, "is_row_invariant", False)
    LLM(folder, method="ngram", same_text=True, compile="never")
    assert "near ties outputs may differ (docs/lossless.md)" in caplog.text


def one_line(error):
    text = str(error)
    assert "\n" not in text and len(text) < 500
    return text


def ids(generations):
    return [[completion.token_ids for completion in generation.outputs] for generation in generations]


# --- exported names ---------------------------------------------------------------------------------------------------------


def test_exported_names_are_pinned():
    assert outrider.__all__ == [
        "LLM", "Chunk", "Completion", "Context", "Generation", "GenerationInterrupted", "GenerationStats", "OutriderError",
        "PlainProposer", "Proposal", "Proposer", "SamplingParams", "ScriptedProposer", "Verdict", "chain_proposal",
    ]  # fmt: skip


def test_the_signature_writes_out_every_declared_option():
    parameters = dict(inspect.signature(LLM).parameters)
    model = parameters.pop("model")
    assert model.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and model.default is None
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters.values())
    options = {each.name: each for config in (Speculation, RunnerConfig) for each in fields(config)}
    assert options.pop("target").default is None  # the model
    assert list(parameters) == list(options)
    for name, each in options.items():
        default = each.default if each.default_factory is MISSING else None
        assert parameters[name].default == default, name
        written = parameters[name].annotation.replace(" | None", "")
        assert written == each.type.replace(" | None", ""), name


def test_greedy_is_the_default_in_python_and_in_the_server():
    assert SamplingParams().temperature == 0
    assert CompletionBody(prompt="x").temperature == 0


# --- options of LLM ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
@given(value=WILD)
@example(value=10**5000)  # cannot be logged
@settings(ANY, max_examples=25)
def test_option_values_of_any_type_are_accepted_or_rejected_in_one_line(folder, name, value):
    name, model = ("model", ()) if name == "target" else (name, (folder,))
    assume(name not in ("model", "draft", "tokenizer", "draft_tokenizer") or not isinstance(value, str) or "/" not in value)
    assume(not (name == "max_batch" and isinstance(value, int) and value > 64))
    more = {} if name in ("method", "draft", "proposer", "compile") else {"method": "ngram"}
    try:
        with LLM(*model, **{"compile": "never", **more, name: value}) as llm:
            assert len(llm.generate([5, 6, 7], SHORT)[0].outputs[0].token_ids) <= 4
    except OutriderError as error:
        one_line(error)


def test_a_model_is_rejected_as_tokenizer(folder):
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments"):
        LLM(folder, folder)
    with pytest.raises(OutriderError, match="invalid tokenizer LlamaForCausalLM"):
        LLM(folder, tokenizer=AutoModelForCausalLM.from_pretrained(folder))


def test_a_tokenizer_is_taken_by_path(folder, tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for tokenizer in (tmp_path, str(tmp_path), make_tokenizer()):
        llm = LLM(model, tokenizer=tokenizer, method="ngram", compile="never")
        assert llm.encode("def add(") == make_tokenizer().encode("def add(")
    with pytest.raises(OutriderError, match="no model 'nowhere'"):
        LLM(model, tokenizer="nowhere")
    with pytest.raises(
        OutriderError, match=r"invalid tokenizer Tokenizer.*expected a folder, a hub id or a transformers tokenizer"
    ):
        LLM(model, tokenizer=make_tokenizer().backend_tokenizer)


def test_auto_is_the_default_method(folder):
    assert LLM(folder, method="auto", compile="never").proposer.name == "suffix"
    assert LLM(folder, draft=folder, method="auto", compile="never").proposer.name == "draft"
    assert LLM(folder, draft=folder, compile="never").proposer.name == "draft"


def test_a_class_is_rejected_where_an_instance_is_expected(folder):
    with pytest.raises(OutriderError, match=r"invalid proposer <class .*expected a Proposer, made from a subclass"):
        LLM(folder, proposer=ScriptedProposer)


@pytest.mark.parametrize("name", ["a prompt " * 40, "/" + "x" * 300, "owner/" + "x" * 300, "x" * 300 + ".gguf"])
def test_a_source_too_long_for_a_path_is_rejected_in_one_line(folder, name):
    for model, more in (
        (name, {}),
        (folder, {"tokenizer": name}),
        (folder, {"draft": name}),
        (folder, {"draft": name, **EAGLE}),
    ):
        with pytest.raises(OutriderError) as error:
            LLM(model, **more, compile="never")
        assert one_line(error.value)


# --- prompts and parameters -------------------------------------------------------------------------------------------------


@given(prompts=WILD)
@example(prompts=[["a", 1]])
@example(prompts=["a", [1, 2]])
@example(prompts=[[True, False]])
@example(prompts=[[10**5000]])
@ANY
def test_prompts_of_any_type_are_accepted_or_rejected_in_one_line(llm, prompts):
    try:
        for generation in llm.generate(prompts, SHORT):
            assert all(type(token) is int for token in generation.prompt_token_ids)
            assert generation.prompt is None or generation.prompt_token_ids == llm.encode(generation.prompt)
    except OutriderError as error:
        one_line(error)
    assert not llm.engine.has_work


@pytest.mark.parametrize("name", [name for name in declared(SamplingParams) if name != "grammar"])
@given(value=WILD)
@example(value=10**9)
@example(value=[5000])
@example(value={5000: 1.0})
@ANY
def test_every_accepted_sampling_parameter_works_in_generation(llm, name, value):
    assume(not (name == "n" and isinstance(value, int) and value > 8))
    try:
        params = SamplingParams(**{"max_tokens": 4, "temperature": 0.7, "seed": 1, name: value})
        (generation,) = llm.generate([5, 6, 7], params)
    except OutriderError as error:
        one_line(error)
        return
    assert len(generation.outputs) == params.n
    assert {completion.finish_reason for completion in generation.outputs} <= {"length", "stop"}


@given(params=WILD)
@ANY
def test_sampling_parameters_of_another_type_are_rejected_in_one_line(llm, params):
    assume(params is not None)
    with pytest.raises(OutriderError, match="sampling parameters") as caught:
        llm.generate([5, 6, 7], params)
    one_line(caught.value)


@given(messages=WILD)
@ANY
def test_messages_of_any_type_are_accepted_or_rejected_in_one_line(llm, messages):
    try:
        assert llm.chat_prompt(messages)
    except OutriderError as error:
        one_line(error)


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple, lambda ids: [np.int64(token) for token in ids]])
def test_token_ids_may_be_arrays_tensors_or_tuples(llm, make):
    wanted = ids(llm.generate([5, 6, 7], SHORT))
    assert ids(llm.generate(make([5, 6, 7]), SHORT)) == wanted
    assert ids(llm.generate([make([5, 6, 7])] * 2, SHORT)) == wanted * 2


@pytest.mark.parametrize("tensors", [None, "pt", "np"])
def test_a_tokenizers_output_is_a_prompt_without_its_padding(llm, tensors):
    tokenizer, texts = make_tokenizer(), ["a", "text that is longer"]
    tokenizer.pad_token = tokenizer.eos_token
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    padded = tokenizer(texts, padding=True, return_tensors=tensors)
    assert len(padded["input_ids"][0]) > len(prompts[0])
    assert [each.prompt_token_ids for each in llm.generate(padded, SHORT)] == prompts
    assert llm.generate(tokenizer("text"), SHORT)[0].prompt_token_ids == tokenizer("text")["input_ids"]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_rows_of_a_matrix_are_prompts(llm, make):
    assert ids(llm.generate(make([[5, 6], [7, 8]]), SHORT)) == ids(llm.generate([[5, 6], [7, 8]], SHORT))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            b"text",
            r"invalid prompt b'text': expected text, token ids \(a list, 1-d array or 1-d tensor of integers\), or a list",
        ),
        ([b"text"], "invalid prompt b'text': expected text"),
        ({"prompt": "x"}, "invalid prompt {'prompt': 'x'}: expected text"),
        ({"input_ids": [[5, 6], [7]], "attention_mask": [[1, 1]]}, "expected an attention_mask with the shape of input_ids"),
        ({"input_ids": [[5, 6]], "attention_mask": [[1]]}, "expected an attention_mask with the shape of input_ids"),
        ({"input_ids": [[0, 0]], "attention_mask": [[0, 0]]}, "empty prompt"),
        ([[5, 6.0]], r"invalid prompt \[5, 6.0\]: expected text"),
        ([5, True], r"invalid prompt \[5, True\]: expected text"),
        ([5, 320], "invalid token id 320 at index 1 of the prompt: expected 0 to 319"),
        ([5, -1], "invalid token id -1 at index 1 of the prompt: expected 0 to 319"),
        ("a\ud800b", "invalid Unicode: unpaired surrogate at index 1"),
    ],
)
def test_an_invalid_prompt_is_rejected_with_its_reason(llm, prompt, message):
    for ask in (llm.generate, llm.stream):  # a stream raises before its first chunk is requested
        with pytest.raises(OutriderError, match=message) as caught:
            ask(prompt)
        one_line(caught.value)


# --- outputs ----------------------------------------------------------------------------------------------------------------


def test_samples_are_nested_in_their_prompt(llm):
    params = SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=5)
    generations = llm.generate(["def add(", [5, 6, 7]], params)
    assert [generation.prompt for generation in generations] == ["def add(", None]
    assert generations[0].prompt_token_ids == llm.encode("def add(") and generations[1].prompt_token_ids == [5, 6, 7]
    for index, generation in enumerate(generations):
        assert [each.sample_index for each in generation.outputs] == [0, 1, 2]
        assert {each.prompt_index for each in generation.outputs} == {index}
    assert len(llm.chat([{"role": "user", "content": "hi"}], params).outputs) == 3


def test_emission_chunk_and_completion_share_one_record(llm):
    from outrider.engine.outputs import Chunk, Completion, Emission

    assert issubclass(Chunk, Emission) and issubclass(Completion, Chunk)
    joined = Emission("r")
    with closing(llm.stream([5, 6, 7], SamplingParams(max_tokens=9, logprobs=1))) as chunks:
        for chunk in chunks:
            joined.append(chunk)
    (completion,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=9, logprobs=1))[0].outputs
    for name in ("token_ids", "origins", "text", "logprobs", "finish_reason", "error"):
        assert getattr(joined, name) == getattr(completion, name), name
    assert joined.stats.num_tokens == 9


def test_an_error_after_merged_emissions_keeps_their_statistics():
    from outrider.engine.engine import error_emission
    from outrider.engine.outputs import Emission
    from outrider.engine.stats import GenerationStats

    stats = GenerationStats(num_tokens=1, num_steps=1)
    joined = Emission("r", [5], ["plain"], "a", stats=stats)
    joined.append(error_emission("r", OutriderError("lost")))
    assert (joined.token_ids, joined.text, joined.finish_reason, joined.error) == ([5], "a", "error", "lost")
    assert joined.stats is stats


def test_a_chunk_costs_the_same_however_long_the_completion_is(monkeypatch):
    from outrider.engine import outputs
    from outrider.engine.logprobs import TokenLogprobs

    monkeypatch.setattr(outputs, "fields", None)  # which inspects the class
    held = outputs.Emission("r", [5], logprobs=[TokenLogprobs(-1.0)])
    completion = outputs.Completion("r", prompt_index=2)
    chunk, own = completion.add(held), completion.logprobs
    assert (chunk.prompt_index, chunk.token_ids, chunk.logprobs) == (2, [5], held.logprobs)
    completion.add(held)
    assert completion.logprobs is own and own == 2 * held.logprobs and len(held.logprobs) == 1  # extended, not copied


def test_the_stop_reason_is_the_string_or_token_that_ended_the_output(llm):
    def end(**params):
        (output,) = llm.generate("def add(", SamplingParams(max_tokens=12, **params))[0].outputs
        return output.finish_reason, output.stop_reason

    (whole,) = llm.generate("def add(", SamplingParams(max_tokens=12, ignore_eos=True))[0].outputs
    token, text = whole.token_ids[5], whole.text[4:7]
    assert end(ignore_eos=True) == ("length", None)
    assert end(ignore_eos=True, stop_token_ids=[token]) == ("stop", token)
    assert end(ignore_eos=True, stop=[text, "never there"]) == ("stop", text)
    eos = llm.tokenizer.eos_token_id
    assert end(allowed_token_ids=[eos]) == end(allowed_token_ids=[eos], stop_token_ids=[eos]) == ("stop", None)
    assert end(allowed_token_ids=[eos], stop_token_ids=[eos], ignore_eos=True) == ("stop", eos)


def test_a_stop_string_or_token_stays_in_the_text_if_asked_for(llm):
    def text(**params):
        (output,) = llm.generate("def add(", SamplingParams(max_tokens=12, ignore_eos=True, **params))[0].outputs
        return output.text

    (whole,) = llm.generate("def add(", SamplingParams(max_tokens=12, ignore_eos=True))[0].outputs
    decoded, stop, token = whole.text, whole.text[4:6], whole.token_ids[5]
    before = decoded[: decoded.index(stop)]
    assert text(stop=[stop]) == before
    assert text(stop=[stop], include_stop_str_in_output=True) == before + stop
    first = whole.token_ids.index(token)
    for more in ({}, {"stop": "never there"}):
        ended = [text(stop_token_ids=[token], include_stop_str_in_output=keeps, **more) for keeps in (False, True)]
        assert ended == [llm.tokenizer.decode(whole.token_ids[:end]) for end in (first, first + 1)]


def test_a_stop_string_ends_the_text_only_after_min_tokens(llm):
    def generated(**params):
        (output,) = llm.generate("def add(", SamplingParams(max_tokens=12, **params))[0].outputs
        return output.text, output.finish_reason, len(output.token_ids)

    text, reason, length = generated(min_tokens=12)
    assert (reason, length) == ("length", 12)
    letters = sorted({letter for letter in text if letter.strip()})
    ended = generated(stop=letters, min_tokens=7)
    assert ended[1] == "stop" and ended[2] > 7 and text.startswith(ended[0]) and len(ended[0]) > 0
    assert generated(stop=letters)[2] < 7
    assert generated(stop=letters, min_tokens=12) == (text, "length", 12)


def test_none_stands_for_defaults(llm):
    """vLLM's own defaults, or what wrappers pass where nothing was given."""
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None, banned_token_ids=None, temperature=None, seed=None)
    assert params == SamplingParams()
    (output,) = llm.generate([5] * 200, SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs
    assert len(output.token_ids) == llm.runner.max_len - 200 and output.finish_reason == "length"


def test_text_parts_of_a_message_are_lines(llm):
    parts = [{"type": "text", "text": "Write a"}, {"type": "text", "text": "function"}]
    one = llm.chat_prompt([{"role": "user", "content": "Write a\nfunction"}])
    assert llm.chat_prompt([{"role": "user", "content": parts}]) == one


# --- lifetime ---------------------------------------------------------------------------------------------------------------


def test_close_ends_requests_frees_models_and_rejects_further_use(folder):
    with LLM(folder, method="ngram", compile="never") as llm:
        stream = llm.stream("def add(", SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
        engine, generated = llm.engine, llm.stats.num_tokens
    assert not engine.has_work and sys.getrefcount(engine) <= 3
    llm.close()  # a second time does nothing
    assert llm.stats.num_tokens == generated > 0
    for use in (lambda: next(stream), lambda: llm.generate("x"), lambda: llm.stream("x"), lambda: llm.warmup()):
        with pytest.raises(OutriderError, match="this LLM is closed"):
            use()


@pytest.mark.parametrize(("given", "most"), [({"num_draft_tokens": 3}, 3), ({"num_draft_tokens": 0}, 0), ({}, 15)])
def test_warmup_prepares_the_requested_number_of_drafts(folder, monkeypatch, given, most):
    llm = LLM(folder, draft=folder, compile="never", **given)
    asked = []
    monkeypatch.setattr(llm.proposer, "prepare", lambda: asked.append("prepared"))
    monkeypatch.setattr(llm.proposer, "num_nodes", lambda k: asked.append(k) or k)
    llm.warmup()
    assert asked == ["prepared", most]
    llm.warmup(100, batch=2)
    assert asked[2:] == ["prepared", llm.proposer.max_drafts]
    assert Proposal.empty(1).num_nodes == 0


@pytest.mark.parametrize("method", ["draft", "draft:draft=~/models/target"])
def test_paths_may_begin_with_the_home_folder(folder, tmp_path, monkeypatch, method):
    """Shells expand ~ only at the beginning of a word, and Python and plans not at all."""
    copied = shutil.copytree(folder, tmp_path / "models" / "target")
    monkeypatch.setenv("HOME", str(tmp_path))
    draft = "~/models/target" if method == "draft" else None
    llm = LLM("~/models/target", draft=draft, method=method, tokenizer="~/models/target", compile="never")
    assert llm.runner.name == str(copied) and llm.proposer.name == "draft"
    with pytest.raises(OutriderError, match="~nobody-of-this-name"):
        LLM("~nobody-of-this-name/model")
