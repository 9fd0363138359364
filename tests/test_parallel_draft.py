"""Drafts of one pass over mask tokens equal the model's plain forward pass after any earlier rounds."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from draft_rounds import DraftRounds
from runner.rounds import OPERATORS, contents, force, make_model, make_request, make_text, plain_logits, untouched
from runner.test_architectures import small_config
from tiny_folder import letter_tokenizer, make_folder, make_tokenizer
from tiny_hybrids import hybrid, noisy
from toy import outputs_of

from outrider import LLM
from outrider.cli import main
from outrider.proposers.draft_model import METHOD, DraftModelProposer
from outrider.proposers.method import Recognised, Setting, TargetFiles
from outrider.runner import ModelRunner, RunnerConfig
from outrider.runner.parallel_draft import ParallelDraft, mask_token_of
from outrider.types import OutriderError, SamplingParams

VOCAB, MASK = 67, 61
EAGER = RunnerConfig(compile="never")
GREEDY = SamplingParams()
SIZES = {"hidden_size": 32, "num_hidden_layers": 2}


class Drafting(DraftRounds):
    """A parallel draft with running requests. Every proposal is compared with plain forward passes over masks."""

    def __init__(self, lengths=(3, 20, 37), params=GREEDY, coupled=False, config=EAGER, **shape):
        self.model = make_model(small_config("llama", pard_token=MASK, **shape))
        self.draft = ParallelDraft.load(untouched(self.model), config)
        super().__init__(DraftModelProposer(self.draft, VOCAB), lengths, VOCAB, params, coupled)

    def logits(self, b, k):
        """Return logits [k, V] after the committed tokens and after each of k - 1 masks, computed without a cache."""
        return plain_logits(self.model, [*self.requests[b].token_ids, *[MASK] * (k - 1)])[-k:]

    def check(self):
        drafts = self.proposal.token_ids
        for b in (b for b, count in enumerate(self.proposal.lens.tolist()) if count):
            logits = torch.zeros(len(self.requests), drafts.shape[1], VOCAB)
            logits[b] = self.logits(b, drafts.shape[1])
            if self.proposal.probs is None:
                assert torch.equal(drafts[b], self.sampler().tokens(logits, drafts)[b])
                continue
            wanted = self.sampler().probs(logits, drafts)[b]  # penalties count the drafts before each position
            torch.testing.assert_close(self.proposal.probs[b], wanted, rtol=1e-3, atol=1e-5)
            assert (self.proposal.probs[b].gather(1, drafts[b][:, None]) > 0).all()


SETTINGS = {
    "greedy": (SamplingParams(), False),
    "warm": (SamplingParams(temperature=0.8), False),
    "truncated": (SamplingParams(temperature=1.2, top_k=9, top_p=0.9, min_p=0.02), False),
    "penalised": (SamplingParams(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.9, presence_penalty=0.3), False),
    "greedy, penalised": (SamplingParams(repetition_penalty=1.8, frequency_penalty=2.0), False),
    "same text": (SamplingParams(temperature=0.8), True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_equal_the_plain_forward_after_full_partial_and_no_acceptance(name):
    params, coupled = SETTINGS[name]
    drafting = Drafting(params=params, coupled=coupled)
    for k, accepted in ((4, [4, 4, 4]), (1, [0, 1, 0]), (6, [6, 0, 2]), (16, [1, 16, 4]), (2, [0, 0, 0])):
        proposal = drafting.propose(k)
        assert proposal.lens.tolist() == [k] * 3
        assert (proposal.probs is None) == (params.is_greedy or coupled)
        drafting.check()
        drafting.commit(accepted, [50, 51, 52])


@pytest.mark.parametrize("operators", OPERATORS)
def test_drafts_are_the_same_with_every_kernel_and_padding(operators, monkeypatch):
    force(operators, monkeypatch)
    drafting = Drafting(params=SamplingParams(temperature=0.8), config=RunnerConfig(compile="never", prefill_chunk=8))
    for k, accepted in ((5, [5, 0, 3]), (3, [3, 3, 0]), (7, [0, 7, 1])):
        drafting.propose(k)
        drafting.check()
        drafting.commit(accepted, [50, 51, 52])


def test_mask_tokens_do_not_remain_in_the_cache():
    """Of two proposals in one round, the first has more masks. The second equals that of a fresh draft."""
    often, once = Drafting(params=SamplingParams(temperature=0.9)), Drafting(params=SamplingParams(temperature=0.9))
    for k in (12, 3, 7):
        often.propose(k)
        assert [often.draft.cache.cached_len(request.request_id) for request in often.requests] == [3, 20, 37]
    found, wanted = often.propose(5), once.propose(5)
    assert torch.equal(found.token_ids, wanted.token_ids)
    torch.testing.assert_close(found.probs, wanted.probs, rtol=1e-4, atol=1e-6)
    for request in often.requests:
        for mine, theirs in zip(*(contents(each.draft.cache, request.request_id) for each in (often, once)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    # slots of masks are overwritten before they are read
    often.commit([5, 2, 0], [1, 2, 3])
    once.requests = [make_request(f"new{b}", request.token_ids) for b, request in enumerate(often.requests)]
    for request in once.requests:
        request.params = SamplingParams(temperature=0.9)
    found, wanted = often.propose(4), once.propose(4)
    torch.testing.assert_close(found.probs, wanted.probs, rtol=1e-4, atol=1e-6)


def test_limits_context_and_pauses_are_respected():
    drafting = Drafting(lengths=(5, 50, 20), max_position_embeddings=52)
    assert drafting.propose(3).lens.tolist() == [3, 0, 3]
    drafting.check()
    drafting.commit([2, 0, 3], [1, 2, 3])
    assert drafting.propose(4, [4, 1, 0]).lens.tolist() == [4, 0, 0]
    drafting.check()
    drafting.commit([0, 0, 0], [1, 2, 3])
    assert drafting.propose(5, [0, 0, 0]).lens.tolist() == [0, 0, 0]
    drafting.commit([0, 0, 0], [4, 5, 6])
    for request in drafting.requests:
        request.token_ids += make_text(9, 9, 60)  # rounds in which it did not draft
    assert drafting.propose(2, [2, 2, 1]).lens.tolist() == [2, 0, 1]
    drafting.check()


# -- recognition -------------------------------------------------------------------------------------------------------------


def parallel_folder(folder: Path, token: object = MASK, key: str = "pard_token", **sizes) -> Path:
    """Write a published kind of draft: an ordinary folder whose config has a mask token."""
    make_folder(folder, seed=2, **{"num_hidden_layers": 1, **sizes})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: token, "spd_type": "pard"}))
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "target", seed=1, **SIZES, num_attention_heads=4)


def build(target, draft, tokenizer=None, **options):
    return METHOD.build(Setting(ModelRunner.load(target, EAGER), tokenizer, draft, options=options))


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id"])
def test_a_config_that_names_a_mask_token_drafts_in_parallel(key, target, tmp_path):
    folder = parallel_folder(tmp_path / "draft", key=key)
    draft = build(target, folder, make_tokenizer()).draft
    assert isinstance(draft, ParallelDraft) and draft.mask_token == MASK
    assert type(build(target, folder, parallel="false").draft) is ModelRunner
    assert type(build(target, make_folder(tmp_path / "plain")).draft) is ModelRunner
    loaded = make_model(small_config("llama", vocab_size=320, **{key: 7}))
    assert build(target, loaded).draft.mask_token == 7


def test_an_added_mask_token_does_not_count_as_another_vocabulary(target, tmp_path):
    vocab = len(make_tokenizer())
    added = parallel_folder(tmp_path / "added", vocab, vocab_size=vocab + 1)
    assert build(target, added, make_tokenizer()).draft.mask_token == vocab
    bare = make_model(small_config("llama", vocab_size=vocab + 1, pard_token=vocab))
    assert build(target, bare).draft.mask_token == vocab
    with pytest.raises(OutriderError, match="320 in the target, 321 in the draft"):
        build(target, make_model(small_config("llama", vocab_size=vocab + 1, pard_token=7)))


@pytest.mark.parametrize("token", [-1, 320, 2**40, "151665", 1.5, True, [7]])
def test_a_mask_token_without_an_embedding_is_rejected_in_one_line(token, target, tmp_path, capsys):
    folder = parallel_folder(tmp_path / "draft", token)
    with pytest.raises(OutriderError, match=r"invalid pard_token .* expected a token id, 0 to 319") as error:
        build(target, folder)
    assert "\n" not in str(error.value)
    assert main(["generate", "--target", str(target), "--draft", str(folder), "--max-tokens", "2", "x"]) == 2
    said = capsys.readouterr().err
    assert "invalid pard_token" in said and "Traceback" not in said


def test_an_ordinary_draft_has_no_masks_and_a_truncated_one_names_its_tensor(target, tmp_path):
    plain = make_folder(tmp_path / "plain", num_hidden_layers=1)
    with pytest.raises(OutriderError, match=r"names no mask token \(pard_token\): leave out parallel=true") as error:
        build(target, plain, parallel="true")
    assert "\n" not in str(error.value) and str(plain) in str(error.value)
    with pytest.raises(OutriderError, match="invalid parallel 3: expected true or false"):
        build(target, plain, parallel=3)
    cut = parallel_folder(tmp_path / "cut")
    config = json.loads((cut / "config.json").read_text())
    (cut / "config.json").write_text(json.dumps(config | {"vocab_size": 321, "pard_token": 320}))  # without its row
    with pytest.raises(OutriderError, match=r"model.embed_tokens.weight is \[320, 16\], expected \[321, 16\]"):
        build(target, cut)


def test_a_parallel_draft_is_recognised_by_its_config_and_examined(target, tmp_path):
    folder = parallel_folder(tmp_path / "draft")
    files = TargetFiles.read(str(target), target)
    found = METHOD.recognise(folder, files)
    assert isinstance(found, Recognised) and found.what == "parallel draft model"
    with pytest.raises(OutriderError, match="invalid pard_token"):
        METHOD.recognise(parallel_folder(tmp_path / "wrong", 320), files)
    runner = ModelRunner.load(target, EAGER)
    setting = Setting(runner, make_tokenizer(), folder)
    said = {finding.topic: finding for finding in METHOD.examine(setting)}
    assert said["mask token"].level == "ok" and f"mask token {MASK}" in said["mask token"].text
    assert "mask token" not in {each.topic for each in METHOD.examine(copy_of(setting, parallel="false"))}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"spd_type": "pard2", "pard2_target_layers": [2]}))
    (folder / "warp_model.bin").write_bytes(b"its projection of the target's hidden states")
    said = {finding.topic: finding for finding in METHOD.examine(setting)}
    assert said["mask token"].level == "note" and "PARD-2" in said["mask token"].text
    assert isinstance(build(target, folder, make_tokenizer()).draft, ParallelDraft)


def copy_of(setting, **options):
    return Setting(setting.target, setting.tokenizer, setting.draft, options=options)


# -- the engine ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models():
    """Return a target and a parallel draft whose drafts are partly accepted."""
    target = make_model(small_config("llama"))
    draft = noisy(target)
    draft.config.pard_token = MASK
    return target, draft


PROMPTS = [make_text(length, 5 + length, 60) for length in (1, 7, 30, 12)]


def texts(models, params, prompts=PROMPTS, **options):
    llm = LLM(copy.deepcopy(models[0]), **{"compile": "never", "draft": copy.deepcopy(models[1]), "method": "draft", **options})
    found = [output.token_ids for output in outputs_of(llm.generate(prompts, params))]
    assert llm.stats.faults == 0
    return found, llm.stats


@pytest.mark.parametrize("max_batch", [1, 3])
def test_greedy_output_equals_plain_decoding_for_every_k(models, max_batch):
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    plain, _ = texts(models, params, draft=None, method="plain")
    for k in (1, 2, 5, 16, "auto"):
        found, stats = texts(models, params, num_draft_tokens=k, max_batch=max_batch)
        assert found == plain
        assert stats.num_accepted > 0 or k == "auto"  # auto may find that drafting is not worthwhile
    found, _ = texts(models, params, method="suffix+draft", num_draft_tokens=4)
    assert found == plain


def test_the_same_text_is_sampled_with_and_without_drafts(models):
    params = SamplingParams(temperature=0.9, max_tokens=20, seed=3, ignore_eos=True)
    plain, _ = texts(models, params, draft=None, method="plain", same_text=True)
    found, stats = texts(models, params, num_draft_tokens=4, same_text=True)
    assert found == plain and stats.num_accepted > 0


class Alternating:
    """A grammar of alternating even and odd tokens, the first one even. It is its own matcher."""

    def matcher(self):
        return self

    def allowed(self, output, path):
        allowed = torch.zeros(VOCAB, dtype=torch.bool)
        allowed[(len(output) + len(path)) % 2 :: 2] = True
        return allowed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constrained_and_free_requests_share_a_batch(models, temperature):
    free = SamplingParams(max_tokens=18, ignore_eos=True, temperature=temperature, seed=4)
    bound = SamplingParams(max_tokens=18, temperature=temperature, seed=4, grammar=Alternating(), banned_token_ids=(0, 1, 2))
    params = [bound, free, bound, free]
    plain, _ = texts(models, params, draft=None, method="plain", same_text=True)
    found, stats = texts(models, params, num_draft_tokens=5, same_text=True)
    assert found == plain and stats.num_accepted > 0
    found, _ = texts(models, params, num_draft_tokens=5)  # drafts sampled under the grammar
    for text in (found[0], found[2]):
        assert [token % 2 for token in text] == [place % 2 for place in range(len(text))]
    drafting = Drafting(lengths=(5, 9), params=free)
    drafting.requests[0].params = bound
    drafting.requests[0].matcher = bound.grammar.matcher()
    drafting.propose(6)
    drafting.check()
    assert temperature == 0 or (drafting.proposal.probs[0, ::2, 1::2] == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_parallel_draft_with_another_tokenizer(temperature, tmp_path):
    folder = make_folder(tmp_path / "target", seed=1, tokenizer=letter_tokenizer(60, 1))
    draft = parallel_folder(tmp_path / "draft", 61, tokenizer=letter_tokenizer(60, 2), vocab_size=62)
    prompts, texts = ["aBcDeFgH", "xYz" * 9], []
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=2)
    for method in ("plain", "cross-tokenizer", "cross-tokenizer:parallel=false"):
        llm = LLM(str(folder), draft=None if method == "plain" else str(draft), method=method, compile="never", same_text=True)
        texts.append([output.token_ids for output in outputs_of(llm.generate(prompts, params))])
        assert method == "plain" or isinstance(llm.proposer.draft, ParallelDraft) == (method == "cross-tokenizer")
        assert llm.stats.faults == 0 and (method == "plain" or llm.stats.num_drafts > 0)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "mamba2"])
def test_masks_do_not_change_the_states_of_recurrent_layers(kind):
    target = hybrid(kind)
    draft = noisy(target)
    draft.config.pard_token = 5
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain, _ = texts((target, draft), params, draft=None, method="plain")
    for k in (3, 16):
        found, stats = texts((target, draft), params, num_draft_tokens=k)
        assert found == plain and stats.num_accepted > 0
    runner = ParallelDraft.load(untouched(draft), EAGER)
    text = make_text(20, 3, 60)
    picked: list[torch.Tensor] = []
    for steps, length in ((9, 12), (4, 15), (6, 20)):
        picked.clear()
        runner.rollout(["a"], [text[:length]], steps, lambda logits, step: picked.append(logits[0, 0]) or torch.zeros(1, 1))
        wanted = plain_logits(draft, [*text[:length], *[5] * (steps - 1)])[-steps:]
        torch.testing.assert_close(torch.stack(picked), wanted, rtol=2e-3, atol=2e-3)


def test_mask_tokens_of_configs():
    config = small_config("llama")
    assert mask_token_of(config) is None
    config.pard_token = None
    assert mask_token_of(config) is None
    config.ptd_token_id = 3
    assert mask_token_of(config) == 3
