"""The ``LLM`` facade with a tiny random model: prompts, completions, streams and errors."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
import signal
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from lossless.drafts import draft_for
from runner.rounds import make_model
from runner.test_architectures import small_config
from tiny_folder import make_folder
from tiny_hybrids import hybrid
from toy import outputs_of
from toy_grammar import RuleGrammar
from transformers import LlamaConfig, LlamaForCausalLM

from outrider import LLM, GenerationInterrupted, OutriderError, SamplingParams, native
from outrider.engine.config import eos_token_ids, load_tokenizer
from outrider.engine.logprobs import token_logprobs
from outrider.proposers.base import ScriptedProposer
from outrider.runner import ModelRunner, RunnerConfig

from .test_detokenizer import byte_level
from .toy import run

PROMPTS = ["def add(a, b):", "naïve café", "你好"]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def plain(model, tokenizer):
    return LLM(model, tokenizer=tokenizer, method="plain", compile="never")


@pytest.fixture(scope="module")
def looking_up(model, tokenizer):
    return LLM(model, tokenizer=tokenizer, method="ngram", num_draft_tokens=4, compile="never")


@pytest.mark.parametrize("kernels", ["own", "torch's", "torch's for experts"])
def test_a_machine_or_model_without_same_text_is_reported(model, tokenizer, monkeypatch, caplog, kernels):
    if kernels == "torch's":
        monkeypatch.setattr(native, "load", lambda: False)
    elif not native.load():
        pytest.skip("no C++ compiler")
    target = make_model(small_config("mixtral")) if kernels == "torch's for experts" else model
    LLM(target, tokenizer=None if target is not model else tokenizer, method="plain", same_text=True, compile="never")
    assert ("rounding depends on the number of rows" in caplog.text) == (kernels != "own")


def seen(completions):
    return [(c.text, c.token_ids, c.finish_reason) for c in completions]


def test_greedy_text_is_the_same_with_and_without_drafts(plain, looking_up, tokenizer):
    params = SamplingParams(max_tokens=40)
    completions = outputs_of(looking_up.generate(PROMPTS, params))
    assert seen(completions) == seen(outputs_of(plain.generate(PROMPTS, params)))
    assert looking_up.stats.num_accepted > 0
    for completion in completions:
        shown = [token for token in completion.token_ids if token != tokenizer.eos_token_id]
        assert completion.text == tokenizer.decode(shown)
        assert len(completion.origins) == len(completion.token_ids)


def test_chunks_join_to_the_completion(looking_up):
    params = SamplingParams(max_tokens=30, n=2, temperature=0.8, seed=7)
    completions = outputs_of(looking_up.generate(PROMPTS, params))
    texts, tokens, last = {}, {}, {}
    for chunk in looking_up.stream(PROMPTS, params):
        key = chunk.prompt_index, chunk.sample_index
        texts[key] = texts.get(key, "") + chunk.text
        tokens.setdefault(key, []).extend(chunk.token_ids)
        last[key] = chunk
    for completion in completions:
        key = completion.prompt_index, completion.sample_index
        assert (texts[key], tokens[key]) == (completion.text, completion.token_ids)
        assert last[key].finish_reason == completion.finish_reason
        assert last[key].stats.num_tokens == len(tokens[key])


def test_a_stop_string_that_spans_tokens_cuts_the_text_as_plain_decoding_does(plain, looking_up):
    whole = plain.generate(PROMPTS[0], SamplingParams(max_tokens=40))[0].outputs[0].text
    stop = whole[11:15]
    params = SamplingParams(max_tokens=40, stop=(stop,))
    found = outputs_of(looking_up.generate(PROMPTS[0], params))
    assert seen(found) == seen(outputs_of(plain.generate(PROMPTS[0], params)))
    assert found[0].finish_reason == "stop" and found[0].text == whole[: whole.find(stop)]
    assert "".join(chunk.text for chunk in looking_up.stream(PROMPTS[0], params)) == found[0].text


@pytest.mark.parametrize("k", [0, 5])
def test_samples_share_a_prompt_and_differ_in_seed(model, tokenizer, k):
    llm = LLM(model, tokenizer=tokenizer, method="ngram", num_draft_tokens=k, compile="never", max_batch=3)
    params = SamplingParams(max_tokens=12, n=5, temperature=1.0, seed=3)
    samples = outputs_of(llm.generate(PROMPTS[0], params))
    assert [c.sample_index for c in samples] == list(range(5))
    assert len({tuple(c.token_ids) for c in samples}) == 5
    assert seen(outputs_of(llm.generate(PROMPTS[0], params))) == seen(samples)
    # Sample 0 is the output of the seed alone, and copying the prompt's cache changes nothing.
    alone = LLM(model, tokenizer=tokenizer, method="ngram", num_draft_tokens=k, compile="never", max_batch=1)
    assert seen(outputs_of(alone.generate(PROMPTS[0], params))) == seen(samples)


def test_the_draft_reads_the_prompt_of_all_samples_once(model, tokenizer, monkeypatch):
    """One chunk per round, while the first sample continues without drafts and the others wait for it."""
    llm = LLM(model, tokenizer=tokenizer, draft=model, num_draft_tokens=3, prefill_chunk=16, compile="never")
    draft, read = llm.proposer.draft, []
    read_on = draft._prefill_pass
    monkeypatch.setattr(draft, "_prefill_pass", lambda *given: (read.append(sum(given[3])), read_on(*given)))
    samples = outputs_of(llm.generate(PROMPTS[0] * 6, SamplingParams(max_tokens=12, n=4, temperature=1.0, seed=3)))
    assert 2 * 16 <= sum(read) <= len(tokenizer.encode(PROMPTS[0] * 6))
    assert "plain" in samples[0].origins
    assert all(sample.origins.count("plain") < 4 and "accepted" in sample.origins for sample in samples[1:])


def test_same_text_gives_the_same_samples_with_and_without_drafts(model, tokenizer):
    def samples(method):
        llm = LLM(model, tokenizer=tokenizer, method=method, num_draft_tokens=3, same_text=True, compile="never")
        return seen(outputs_of(llm.generate(PROMPTS, SamplingParams(max_tokens=30, temperature=0.9, seed=1))))

    assert samples("ngram") == samples("plain")


def test_auto_lengths_keep_greedy_text(model, tokenizer, plain):
    llm = LLM(model, tokenizer=tokenizer, method="ngram", compile="never")
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    assert seen(outputs_of(llm.generate(PROMPTS, params))) == seen(outputs_of(plain.generate(PROMPTS, params)))


def test_logprobs_are_returned_for_accepted_drafts(looking_up, model):
    completion = looking_up.generate([5, 6, 7], SamplingParams(max_tokens=20, logprobs=1, ignore_eos=True))[0].outputs[0]
    assert len(completion.logprobs) == 20
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([[5, 6, 7, *completion.token_ids]])).logits[0, 2:-1], -1)
    for row, token, found in zip(rows, completion.token_ids, completion.logprobs, strict=True):
        assert found.logprob == pytest.approx(float(row[token]), abs=1e-2)


def scored(llm, prompt, num_top):
    """Return a request for 12 tokens that reports the log-probabilities of its prompt."""
    (request,) = llm.requests_for(prompt, SamplingParams(max_tokens=12, ignore_eos=True, logprobs=num_top))
    request.scores_prompt = True
    return request


def assert_prompt_logprobs(target, request, emissions):
    emission, *later = emissions
    prompt = request.token_ids[: request.num_prompt_tokens]
    with torch.no_grad():
        rows = torch.log_softmax(target(torch.tensor([prompt])).logits[0, :-1], -1)
    for row, token, found in zip(rows, prompt[1:], emission.prompt_logprobs, strict=True):
        assert found.logprob == pytest.approx(float(row[token]), abs=1e-2)
        assert found.top[0][1] == pytest.approx(float(row.max()), abs=1e-2)
    assert emission.token_ids and later and all(each.prompt_logprobs is None for each in later)
    assert emissions[-1].stats.num_cached == 0 and emissions[-1].finish_reason == "length"


@pytest.mark.parametrize("kind", ["llama", "padded", "eagle", "qwen3_5_text"])
def test_prompts_are_scored_in_chunks_while_another_request_goes_on(kind, model):
    target = hybrid(kind) if kind == "qwen3_5_text" else model
    options = {"method": "eagle", "draft": draft_for("eagle", target)} if kind == "eagle" else {"method": "plain"}
    llm = LLM(target, prefill_chunk=20, compile="never", **options)
    llm.runner.layouts.is_padded = kind == "padded"  # as on a GPU
    prompt = [5 + 7 * place % 53 for place in range(60)]
    llm.generate(prompt, SamplingParams(max_tokens=2))  # cached, but without log-probabilities
    other = llm.requests_for([5, 6], SamplingParams(max_tokens=30, ignore_eos=True, seed=0))[0]
    long, short = scored(llm, prompt, 2), scored(llm, prompt[:30], 1)
    for request in (other, long, short):
        llm.engine.add(request)
    found, num_alone = {request.request_id: [] for request in (other, long, short)}, 0
    while llm.engine.has_work:
        emissions = llm.engine.step()
        for emission in emissions:
            found[emission.request_id].append(emission)
        num_alone += [emission.request_id for emission in emissions] == [other.request_id] and not found[long.request_id]
    assert 2 <= num_alone <= 5 and llm.stats.faults == 0  # 88 tokens in chunks of 20
    for request in (long, short):
        assert_prompt_logprobs(target, request, found[request.request_id])


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
def test_a_prompt_whose_log_probabilities_fail_ends_no_other_request(kind, model, monkeypatch):
    def failing(logits, rows, token_ids, num_top):
        if num_top == 3 and token_ids[-1] == 56:
            raise RuntimeError("out of memory")
        return token_logprobs(logits, rows, token_ids, num_top)

    monkeypatch.setattr("outrider.engine.engine.token_logprobs", failing)
    target = model if kind == "llama" else hybrid(kind)
    llm = LLM(target, method="plain", prefill_chunk=60, compile="never")
    good, bad = scored(llm, [5 + place % 50 for place in range(90)], 2), scored(llm, [*range(5, 57)], 3)
    found = run(llm.engine, [good, bad])
    (lost,) = found[bad.request_id]
    assert lost.finish_reason == "error" and "out of memory" in lost.error
    assert_prompt_logprobs(target, good, found[good.request_id])


def test_statistics_add_up(looking_up):
    completion = looking_up.generate(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))[0].outputs[0]
    stats = completion.stats
    assert stats.num_tokens == 40
    assert stats.num_rounds <= stats.num_tokens <= stats.num_accepted + stats.num_rounds
    assert stats.mean_acceptance_length == 1 + stats.num_accepted / stats.num_rounds
    assert 0 <= stats.draft_acceptance_rate <= (stats.acceptance_rate or 0.0) <= 1  # None if nothing was drafted
    in_rounds = stats.times.total - stats.times.prefill - stats.times.draft_prefill
    assert sum(stats.ms_per_round.values()) == pytest.approx(1e3 * in_rounds / stats.num_rounds)
    assert stats.plain_tok_s is None or math.isfinite(stats.plain_tok_s)


def test_a_stop_string_that_the_end_completes_is_the_reason(plain, monkeypatch):
    """Text that the detokenizer held back comes only when the request is finished."""
    prompt, params = PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True, stop=("held",))
    stream = plain.stream(prompt, params)
    chunks = [next(stream)]
    (entry,) = plain.engine.scheduler.running
    monkeypatch.setattr(entry.detokenizer, "feed", lambda token_ids: "")
    monkeypatch.setattr(entry.detokenizer, "flush", lambda: " held back")
    chunks += list(stream)
    assert (chunks[-1].text, chunks[-1].finish_reason, chunks[-1].stop_reason) == (" ", "stop", "held")


def test_measuring_needs_a_free_place(model, tokenizer):
    llm = LLM(model, tokenizer=tokenizer, method="ngram", num_draft_tokens=2, max_batch=1, compile="never")
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=5, ignore_eos=True))
    next(stream)
    for measure in (llm.warmup, llm.measure_plain_pass):
        with pytest.raises(OutriderError, match="while no request runs"):
            measure()
    list(stream)
    llm.warmup()
    llm.measure_plain_pass()


@pytest.mark.parametrize(
    ("name", "value"), [("batch", 9), ("batch", 0), ("batch", 1.5), ("num_draft_tokens", -5), ("num_draft_tokens", "4")]
)
def test_invalid_arguments_of_warmup_are_named(plain, name, value):
    with pytest.raises(OutriderError, match=f"invalid {name} .*: expected a whole number"):
        plain.warmup(**{name: value})


def test_the_last_chunk_may_close_the_llm(model, tokenizer):
    llm = LLM(model, tokenizer=tokenizer, method="plain", compile="never")
    chunks = []
    for chunk in llm.stream(PROMPTS[0], SamplingParams(max_tokens=5, ignore_eos=True)):
        chunks.append(chunk)
        if chunk.finish_reason is not None:
            llm.close()
    assert sum(len(chunk.token_ids) for chunk in chunks) == 5


def test_two_streams_can_be_read_alternately(looking_up, plain):
    params = SamplingParams(max_tokens=15, ignore_eos=True)
    streams = [looking_up.stream(prompt, params) for prompt in PROMPTS[:2]]
    texts = ["", ""]
    for _ in range(15):
        for i, stream in enumerate(streams):
            chunk = next(stream, None)
            texts[i] += chunk.text if chunk else ""
    assert texts == [c.text for c in outputs_of(plain.generate(PROMPTS[:2], params))]


def test_an_llm_cannot_be_pickled_or_copied(plain):
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(OutriderError, match="create it in the process that uses it"):
            copied(plain)


def test_a_dropped_stream_aborts_its_requests(looking_up, plain):
    stream = looking_up.stream(PROMPTS, SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    assert not looking_up.engine.has_work
    params = SamplingParams(max_tokens=9)
    assert seen(outputs_of(looking_up.generate(PROMPTS, params))) == seen(outputs_of(plain.generate(PROMPTS, params)))


def test_an_interrupt_keeps_what_was_generated_and_the_engine_usable(model, tokenizer, plain):
    calls = []

    def script(context, k):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return ScriptedProposer.of_chains(lambda c, k: [[1]] * len(c.requests)).propose(context, k)

    llm = LLM(model, tokenizer=tokenizer, proposer=ScriptedProposer(script), num_draft_tokens=1, compile="never")
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with pytest.raises(GenerationInterrupted) as caught:
        llm.generate(PROMPTS, params)
    whole = outputs_of(plain.generate(PROMPTS, params))
    for partial, full in zip(outputs_of(caught.value.generations), whole, strict=True):
        assert partial.finish_reason == "abort"
        assert 5 <= len(partial.token_ids) < 30
        assert partial.token_ids == full.token_ids[: len(partial.token_ids)]
    assert seen(outputs_of(llm.generate(PROMPTS, params))) == seen(whole)


def interrupt_pass(llm, number):
    """Press Ctrl-C in the target's pass with this number."""
    score, calls = llm.runner.score, []

    def interrupted(*given, **options):
        calls.append(1)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return score(*given, **options)

    llm.runner.score = interrupted


def test_a_signal_during_a_step_loses_none_of_its_tokens(model, tokenizer, plain):
    llm = LLM(model, tokenizer=tokenizer, method="plain", compile="never")
    interrupt_pass(llm, 6)
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop=("\0never\0",))
    with pytest.raises(GenerationInterrupted) as caught:
        llm.generate(PROMPTS, params)
    whole = outputs_of(plain.generate(PROMPTS, params))
    for partial, full in zip(outputs_of(caught.value.generations), whole, strict=True):
        assert partial.finish_reason == "abort" and len(partial.token_ids) == 6
        assert partial.token_ids == full.token_ids[:6] and full.text.startswith(partial.text)
        assert partial.text == tokenizer.decode(partial.token_ids)


def test_a_request_that_ends_in_the_interrupted_step_has_ended(model, tokenizer):
    llm = LLM(model, tokenizer=tokenizer, method="plain", compile="never")
    interrupt_pass(llm, 3)
    with pytest.raises(GenerationInterrupted) as caught:
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True))
    (output,) = outputs_of(caught.value.generations)
    assert output.finish_reason == "length" and len(output.token_ids) == 3


def test_nan_weights_are_a_one_line_error(model, tokenizer):
    broken = LlamaForCausalLM(model.config).eval()
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    with pytest.raises(OutriderError, match="NaN") as caught:
        LLM(broken, tokenizer=tokenizer, method="plain", compile="never")
    assert "\n" not in str(caught.value)
    llm = LLM(broken, tokenizer=tokenizer, method="plain", compile="never", self_check=False)
    with pytest.raises(OutriderError, match="NaN") as caught:
        llm.generate(PROMPTS)
    assert "\n" not in str(caught.value)
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "nonsense"}, "unknown method 'nonsense'; known: .*ngram"),
        ({"verifier": "nonsense"}, "unknown verifier"),
        ({"num_draft_tokens": -1}, "invalid num_draft_tokens -1: expected a whole number, at least 0, or auto"),
        ({"num_draft_tokens": "many"}, "invalid num_draft_tokens 'many'"),
        ({"num_draft_tokens": 1.5}, "invalid num_draft_tokens 1.5"),
        ({"method": "draft"}, "needs a draft"),
        ({"method": "ngram", "proposer": ScriptedProposer(lambda c, k: None)}, "not both"),
    ],
)
def test_a_wrong_option_is_a_clear_error(model, tokenizer, options, message):
    with pytest.raises(OutriderError, match=message) as caught:
        LLM(model, tokenizer=tokenizer, **({"method": "ngram"} if "verifier" in options else {}), **options)
    assert "\n" not in str(caught.value)


def test_invalid_prompts_are_rejected_before_any_token(looking_up, model, tokenizer):
    rounds = looking_up.stats.num_rounds
    for prompts, message in [
        ([[1, 2], [1] * 128], "128 tokens"),
        ([10**6], "invalid token id"),
        ([[]], "empty"),
    ]:
        with pytest.raises(OutriderError, match=message):
            looking_up.generate(prompts)
    with pytest.raises(OutriderError, match="2 prompts, but 1"):
        looking_up.generate(PROMPTS[:2], [SamplingParams()])
    with pytest.raises(OutriderError, match="chat template"):
        looking_up.chat([{"role": "user", "content": "hi"}])
    without = LLM(model, method="plain", compile="never")
    with pytest.raises(OutriderError, match="needs a tokenizer"):
        without.generate("text")
    with pytest.raises(OutriderError, match="stop strings"):
        without.generate([1], SamplingParams(stop=("x",)))
    assert looking_up.stats.num_rounds == rounds and not looking_up.engine.has_work


def test_chat_uses_the_template_of_the_tokenizer(model):
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    llm = LLM(model, tokenizer=tokenizer, method="plain", compile="never")
    messages = [{"role": "user", "content": "add"}]
    params = SamplingParams(max_tokens=8)
    assert llm.chat_prompt(messages) == tokenizer.encode("user: add\n", add_special_tokens=False)
    assert llm.chat(messages, params).outputs[0].text == llm.generate("user: add\n", params)[0].outputs[0].text


def test_a_dropped_llm_frees_its_models_at_once(model):
    gc.collect()
    gc.disable()  # models are large: they must be freed without the garbage collector
    try:
        llm = LLM(model, draft=model, compile="never")
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5))
        kept = [weakref.ref(part) for part in (llm.runner.model, llm.runner.cache, llm.proposer.draft.model, llm.engine)]
        del llm
        assert [part() for part in kept] == [None] * 4
    finally:
        gc.enable()


def test_the_end_of_text_of_a_config_class_ends_no_text(tmp_path):
    def ends(source, **options):
        return eos_token_ids(ModelRunner.load(source, RunnerConfig(compile="never", **options)), None)

    folder = make_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "eos_token_id"}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 9]}')
    assert ends(folder) == {0, 9}
    model = LlamaForCausalLM.from_pretrained(folder)
    model.config.eos_token_id = 7  # set by the user
    assert ends(model) == {0, 7, 9}
    (folder / "generation_config.json").unlink()
    assert ends(folder) == set()
    if native.load():
        assert ends(folder, weights="int8") == ends(folder, weights="int8") == set()  # rounded, and from the cache
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    assert ends(folder) == {2}
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 9]}')
    assert ends(folder) == {0, 2, 9}


def test_custom_tokenizer_code_runs_only_if_trusted_and_never_prompts(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks on the terminal"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "own"}))
    with pytest.raises(OutriderError, match=r"is a model with its own code .*: read it, then pass trust_remote_code=True"):
        load_tokenizer(folder)
    assert type(load_tokenizer(folder, trust_remote_code=True)).__name__ == "Own"


@pytest.mark.parametrize("place", ["scheduler.commit", "policy.observe", "runner.score", "scheduler.move"])
@pytest.mark.parametrize("options", [{}, {"stop": ("zzz",)}])
def test_ctrl_c_in_another_call_never_shortens_a_stream(place, options, model, tokenizer, monkeypatch):
    """Its text is complete, or it ends with an error, wherever the interrupt arrives."""
    llm = LLM(model, tokenizer=tokenizer, method="ngram", num_draft_tokens=3, compile="never")
    params = SamplingParams(max_tokens=30, ignore_eos=True, **options)
    whole = llm.generate(PROMPTS[0], params)[0].outputs[0]
    holder, name = place.split(".")
    owner = llm.runner if holder == "runner" else getattr(llm.engine, holder)
    for after in (False, True):
        stream = llm.stream(PROMPTS[0], params)
        chunks = [next(stream)]
        with monkeypatch.context() as patch, pytest.raises(GenerationInterrupted) as interrupted:
            original = getattr(owner, name)

            def interrupt(*args, is_late=after, original=original, **options):
                result = original(*args, **options) if is_late else None
                raise KeyboardInterrupt(result is None)

            patch.setattr(owner, name, interrupt)
            llm.generate(PROMPTS[1], params)
        (part,) = interrupted.value.generations[0].outputs
        assert tokenizer.decode(part.token_ids).startswith(part.text)
        try:
            chunks += list(stream)
        except OutriderError as error:
            assert "ended by a step that failed" in str(error) and (holder != "runner" or after)
        assert whole.token_ids[: len(chunks[0].token_ids)] == chunks[0].token_ids
        if chunks[-1].finish_reason == "length":
            assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
            assert "".join(chunk.text for chunk in chunks) == whole.text
        assert not llm.engine.has_work and not llm._inbox


@pytest.mark.parametrize(
    "place", ["scheduler.commit", "policy.observe", "runner.score", "scheduler.move", "scheduler.add", "runner.start"]
)
def test_a_signal_waits_for_the_end_of_the_step(place, model, tokenizer, monkeypatch):
    """No stream of another call ends, whatever the signal arrives at, and nothing of the interrupted requests is left."""
    llm = LLM(model, tokenizer=tokenizer, method="ngram", num_draft_tokens=3, compile="never")
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    whole = llm.generate(PROMPTS[0], params)[0].outputs[0]
    holder, name = place.split(".")
    owner = getattr(llm.engine, holder)
    stream = llm.stream(PROMPTS[0], params)
    chunks = [next(stream)]
    with monkeypatch.context() as patch, pytest.raises(GenerationInterrupted):
        original = getattr(owner, name)

        def signalled(*args, **options):
            patch.setattr(owner, name, original)  # a second signal would not wait
            signal.raise_signal(signal.SIGINT)
            return original(*args, **options)

        patch.setattr(owner, name, signalled)
        llm.generate(PROMPTS[1], params)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    chunks += list(stream)
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert not llm.engine.has_work and not llm._inbox
    assert not llm.engine._ledger._requests and len(llm.runner.cache._row_of) == 0


def test_a_second_signal_ends_the_step_at_once(model, tokenizer, monkeypatch):
    llm = LLM(model, tokenizer=tokenizer, compile="never", method="plain")

    def hanging(*_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    with monkeypatch.context() as patch, pytest.raises(GenerationInterrupted):
        patch.setattr(llm.runner, "score", hanging)
        llm.generate(PROMPTS[0])
    assert llm.generate(PROMPTS[0])[0].outputs[0].token_ids and not llm.engine.has_work


def test_an_abandoned_stream_may_be_collected_during_a_step(looking_up, monkeypatch):
    whole = looking_up.generate(PROMPTS[0], SamplingParams(max_tokens=12))[0].outputs[0].text
    abandoned = [looking_up.stream(PROMPTS[1], SamplingParams(max_tokens=90, ignore_eos=True))]
    next(abandoned[0])
    score, num_running = looking_up.runner.score, []

    def collecting(*args, **options):
        if abandoned:
            abandoned.pop().close()
            num_running.append(len(looking_up.engine.scheduler.running))
        return score(*args, **options)

    monkeypatch.setattr(looking_up.runner, "score", collecting)
    assert looking_up.generate(PROMPTS[0], SamplingParams(max_tokens=12))[0].outputs[0].text == whole
    assert num_running == [2]  # its request left after the round
    assert looking_up.stats.faults == 0 and not looking_up.engine.has_work


def test_a_step_reads_the_inboxes_of_its_emissions_only(plain, monkeypatch):
    class Counting(dict):
        num_read = 0

        def __getitem__(self, name):
            self.num_read += 1
            return super().__getitem__(name)

    inboxes = Counting()
    monkeypatch.setattr(plain, "_inbox", inboxes)
    chunks = list(plain.stream([[5, 6, 7]] * 40, SamplingParams(max_tokens=4, ignore_eos=True)))
    assert len(chunks) == 160 and inboxes.num_read <= 160


def test_statistics_can_be_read_while_the_llm_is_closed(model, tokenizer):
    """A thread may read them between two steps of ``close`` in another."""
    llm = LLM(model, tokenizer=tokenizer, method="plain", compile="never")
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    engine = vars(llm).pop("engine")
    assert llm.stats.num_tokens == 4
    llm.engine = engine
    llm.close()
    assert llm.stats.num_tokens == 4


@pytest.mark.parametrize("options", [{"draft": "model"}, {"method": "ngram"}, {"method": "suffix", "num_draft_tokens": 3}])
def test_an_idle_llm_keeps_no_request(options, model, tokenizer):
    """Requests hold grammars, of which a server has a limited number, and samplers hold tensors of the vocabulary's size."""
    llm = LLM(
        model,
        tokenizer=tokenizer,
        compile="never",
        **{name: model if value == "model" else value for name, value in options.items()},
    )
    rule = RuleGrammar(lambda output: [7] if len(output) % 3 else range(4, 30), llm.runner.vocab_size, tokenizer.eos_token_id)
    kept = []

    class Noting:
        def matcher(self):
            matcher = rule.matcher()
            kept.append(weakref.ref(matcher))
            return matcher

    params = [SamplingParams(max_tokens=length, ignore_eos=False, grammar=Noting()) for length in (4, 8)]
    llm.generate([[5, 6, 7]] * 2, params)
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))[0].outputs[0].token_ids


def test_a_stream_whose_requests_were_lost_ends_with_an_error(looking_up):
    """A step that fails while another stream drives the engine may end them without an emission."""
    stream = looking_up.stream(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    for entry in list(looking_up.engine.scheduler.running):
        looking_up.engine.abort(entry.request.request_id)
    with pytest.raises(OutriderError, match="ended by a step that failed"):
        list(stream)
    assert looking_up.generate(PROMPTS[0], SamplingParams(max_tokens=3))[0].outputs[0].token_ids


@pytest.mark.parametrize("name", ["plain", "looking_up"])
def test_threads_share_one_llm(request, name):
    llm, params = request.getfixturevalue(name), SamplingParams(max_tokens=12)
    prompts = [[5 + i, 6, 7 + i, 5 + i, 6] for i in range(24)]
    expected = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    calls = [prompts[start : start + 3] for start in range(0, 24, 3)] * 4
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda call: llm.generate(call, params), calls))
    for call, generations in zip(calls, found, strict=True):
        assert [each.outputs[0].token_ids for each in generations] == [expected[prompts.index(prompt)] for prompt in call]
    assert not llm.engine.has_work and not llm._inbox


def test_llms_in_several_threads_do_not_interfere(model, tokenizer):
    hybrid_llm = LLM(hybrid("qwen3_5_text"), method="plain", compile="never")
    jobs = [
        (hybrid_llm, [[5, 6, 7]]),
        *((LLM(model, tokenizer=tokenizer, method="plain", compile="never"), [[5]]) for _ in "ab"),
    ]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    expected = [llm.generate(prompts, params)[0].outputs[0].token_ids for llm, prompts in jobs]
    with ThreadPoolExecutor(4) as pool:
        loading = pool.submit(lambda: [LLM(model, method="plain", compile="never").close() for _ in range(4)])
        found = [pool.submit(lambda llm, prompts: llm.generate(prompts, params), *job) for job in jobs * 3]
        loading.result()
        assert [each.result()[0].outputs[0].token_ids for each in found] == expected * 3


def test_closing_in_one_thread_ends_the_streams_of_another(model, tokenizer):
    llm = LLM(model, tokenizer=tokenizer, method="plain", compile="never")
    stream = llm.stream([[5, 6, 7]], SamplingParams(max_tokens=40, ignore_eos=True))
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(llm.close).result()
    with pytest.raises(OutriderError, match="closed"):
        next(stream)


def test_an_llm_is_closed_even_if_a_request_cannot_be_aborted(model, tokenizer, monkeypatch):
    llm = LLM(model, tokenizer=tokenizer, method="plain", compile="never")
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
    next(stream)
    monkeypatch.setattr(llm.engine, "abort", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.close()
    assert llm.stats.num_tokens == 1 and not hasattr(llm, "engine") and not hasattr(llm, "runner")
    llm.close()  # a second time does nothing
    with pytest.raises(OutriderError, match="closed"):
        next(stream)


def test_a_signal_waits_until_the_llm_is_closed(model, tokenizer, monkeypatch):
    llm = LLM(model, tokenizer=tokenizer, method="plain", compile="never")
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
    next(stream)
    engine, abort, aborted = llm.engine, llm.engine.abort, []

    def signalled(request_id):
        signal.raise_signal(signal.SIGINT)
        aborted.append(abort(request_id))

    monkeypatch.setattr(engine, "abort", signalled)
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    assert len(aborted) == 1 and not engine.has_work and not hasattr(llm, "engine")


def test_requests_end_in_the_next_step_if_a_signal_arrives_before_the_lock_is_free(looking_up, monkeypatch):
    class Held:
        def __enter__(self):
            raise KeyboardInterrupt

        def __exit__(self, *_): ...

    stream = looking_up.stream(PROMPTS[0], SamplingParams(max_tokens=90, ignore_eos=True))
    next(stream)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(looking_up, "_lock", Held())
        stream.close()
    assert not looking_up._inbox and looking_up.engine.has_work
    looking_up.generate(PROMPTS[1], SamplingParams(max_tokens=3))
    assert not looking_up.engine.has_work and not looking_up._to_abort
