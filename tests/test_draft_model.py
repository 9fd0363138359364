"""A draft model's drafts are its own continuation, whatever happened to earlier drafts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from draft_rounds import DraftRounds
from runner.rounds import make_model, make_request, make_text, plain_logits, untouched
from runner.test_architectures import small_config
from tiny_folder import make_folder, make_tokenizer
from transformers import PreTrainedConfig

from outrider import native
from outrider.proposers import draft_model
from outrider.proposers.draft_model import METHOD, DraftModelProposer
from outrider.proposers.method import Setting
from outrider.runner import ModelRunner, RunnerConfig, blocks, model_runner, quantized
from outrider.runner.linear import packed_layers
from outrider.runner.tokenizers import load_tokenizer
from outrider.types import OutriderError, SamplingParams

VOCAB = 67
EAGER = RunnerConfig(compile="never")


class Drafting(DraftRounds):
    """A draft model with running requests. Every proposal is compared with the model's plain forward pass."""

    def __init__(self, lengths=(3, 20, 37), target_vocab=VOCAB, config=EAGER, temperature=0.0, coupled=False, **shape):
        self.model = make_model(small_config("llama", **shape))
        proposer = DraftModelProposer(ModelRunner.load(untouched(self.model), config), target_vocab)
        super().__init__(proposer, lengths, target_vocab, SamplingParams(temperature=temperature), coupled)

    def logits(self, text):
        """Return the draft model's logits in the target's vocabulary: [Vt]."""
        own = plain_logits(self.model, text)[-1]
        return torch.nn.functional.pad(own, (0, max(0, self.vocab - own.shape[0])), value=-torch.inf)[: self.vocab]

    def check(self):
        """Check that greedy drafts are the model's argmax, and the probabilities of sampled ones the model's."""
        for b, request in enumerate(self.requests):
            text = list(request.token_ids)
            for node in range(int(self.proposal.lens[b])):
                logits, token = self.logits(text), int(self.proposal.token_ids[b, node])
                temperature = request.params.temperature
                if self.proposal.probs is not None:
                    expected = (logits / temperature).softmax(-1)
                    torch.testing.assert_close(self.proposal.probs[b, node], expected, rtol=1e-3, atol=1e-5)
                    assert self.proposal.probs[b, node, token] > 0
                elif temperature == 0:
                    assert token == int(logits.argmax())
                text.append(token)


@pytest.mark.parametrize("temperature, coupled", [(0.0, False), (0.8, False), (0.8, True)])
def test_drafts_follow_the_model_after_full_partial_and_no_acceptance(temperature, coupled):
    drafting = Drafting(temperature=temperature, coupled=coupled)
    for accepted in ([4, 4, 4], [0, 0, 0], [4, 0, 2], [1, 3, 4]):
        proposal = drafting.propose(4)
        assert proposal.lens.tolist() == [4, 4, 4]
        assert (proposal.probs is None) == (temperature == 0 or coupled)
        drafting.check()
        drafting.commit(accepted, [50, 51, 52])


def test_the_draft_model_catches_up_after_rounds_without_drafts():
    drafting = Drafting()
    drafting.propose(3)
    drafting.commit([2, 0, 3], [1, 2, 3])
    for request, extra in zip(drafting.requests, (1, 5, 20), strict=True):
        request.token_ids += make_text(extra, extra, 60)
    drafting.propose(3)
    drafting.check()
    assert drafting.proposal.lens.tolist() == [3, 3, 3]


def test_commits_of_rounds_without_drafts_have_no_effect():
    drafting = Drafting()
    drafting.propose(3)
    drafting.commit([3, 1, 0], [1, 2, 3])
    drafting.propose(0)
    drafting.commit([0, 0, 0], [4, 5, 6])
    drafting.propose(3)
    drafting.check()


def test_proposing_again_after_an_abandoned_round_gives_the_same_drafts():
    drafting = Drafting(temperature=0.8)
    first = drafting.propose(3)
    second = drafting.propose(3)
    assert torch.equal(first.token_ids, second.token_ids)
    drafting.check()


def test_the_size_of_layers_of_different_widths_is_estimated():
    """Gemma 3n's config lists the width of each layer."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 10}
    one, two = (draft_model._num_weights(PreTrainedConfig(**sizes, intermediate_size=each)) for each in (24, [16, 32]))
    assert one == two == 2 * 8 * (4 * 8 + 3 * 24) + 10 * 8


def test_drafts_are_sampled_from_their_probabilities():
    drafting = Drafting(lengths=(5,), temperature=1.0)
    counts = torch.zeros(VOCAB)
    for seed in range(600):
        drafting.requests[0].seed = seed
        probs = drafting.propose(1).probs[0, 0]
        counts[drafting.proposal.token_ids[0, 0]] += 1
    expected = probs * 600
    likely = expected > 5
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 3 * likely.sum()


def test_limits_are_respected_per_request():
    drafting = Drafting()
    assert drafting.propose(5, [5, 0, 2]).lens.tolist() == [5, 0, 2]
    drafting.check()
    drafting.commit([5, 0, 1], [1, 2, 3])
    assert drafting.propose(5, [1, 1, 1]).token_ids.shape == (3, 1)
    drafting.check()
    assert drafting.propose(5, [0, 0, 0]).lens.tolist() == [0, 0, 0]


def test_only_requests_beyond_the_drafts_context_have_no_drafts():
    drafting = Drafting(lengths=(5, 50, 20), max_position_embeddings=52)
    for accepted, lens in (([3, 0, 0], [3, 0, 3]), ([0, 0, 2], [3, 0, 3]), ([3, 0, 3], [3, 0, 3])):
        assert drafting.propose(3).lens.tolist() == lens
        drafting.check()
        drafting.commit(accepted, [1, 2, 3])
    drafting.requests[1].token_ids += make_text(40, 1, 60)  # far beyond
    assert drafting.propose(3).lens.tolist() == [3, 0, 3]
    drafting.check()


def test_a_request_beyond_the_drafts_context_does_not_lengthen_the_drafts_of_others():
    drafting = Drafting(lengths=(5, 60, 20), temperature=0.8, max_position_embeddings=52)
    proposal = drafting.propose(8, [2, 8, 3])
    assert proposal.lens.tolist() == [2, 0, 3]
    assert proposal.token_ids.shape == (3, 3) and proposal.probs.shape == (3, 3, VOCAB)
    drafting.check()


@pytest.mark.parametrize("target_vocab", [64, 67, 96])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabularies_of_either_model_are_supported(target_vocab, temperature):
    drafting = Drafting(target_vocab=target_vocab, temperature=temperature)
    proposal = drafting.propose(4)
    assert proposal.token_ids.max() < min(target_vocab, VOCAB)
    if proposal.probs is not None:
        assert proposal.probs.shape == (3, 4, target_vocab)
    drafting.check()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_the_draft_lacks_is_its_last_one(temperature):
    drafting = Drafting(target_vocab=96, temperature=temperature)
    drafting.requests[1].token_ids[2] = 80  # a token that was added to the target
    assert drafting.proposer.prefill(drafting.requests) == [True, True, True]
    assert drafting.propose(3).lens.tolist() == [3, 3, 3]
    drafting.requests[1].token_ids[2] = VOCAB - 1
    drafting.check()


def test_a_mask_that_leaves_only_tokens_that_the_draft_lacks_stops_nobodys_drafts():
    drafting = Drafting(target_vocab=96)
    for request in drafting.requests:
        request.params = SamplingParams(temperature=0, allowed_token_ids=(80, 90))
    assert drafting.propose(4).lens.tolist() == [4, 4, 4]
    assert set(drafting.proposal.token_ids.flatten().tolist()) <= {80, 90}


def test_released_requests_free_their_rows():
    drafting = Drafting(lengths=(5, 9), config=RunnerConfig(compile="never", max_batch=2))
    for turn in range(3):
        drafting.propose(2)
        drafting.check()
        drafting.proposer.release([request.request_id for request in drafting.requests])
        drafting.requests = [make_request(f"n{turn}{b}", make_text(7 + b, turn)) for b in range(2)]
    drafting.proposer.release(["nobody"])


def test_a_prompt_is_read_once_for_all_its_samples():
    drafting = Drafting(lengths=(40, 40, 40))
    first, *samples = drafting.requests
    for request in samples:
        request.token_ids[:] = first.token_ids
    chain, read = drafting.proposer.draft.layouts.chain, []
    drafting.proposer.draft.layouts.chain = lambda tokens, *more, **named: (
        read.extend(map(len, tokens)) or chain(tokens, *more, **named)
    )
    drafting.proposer.prefill([first])
    for request in samples:
        drafting.proposer.fork(first.request_id, request)
    drafting.proposer.prefill(samples)
    for accepted in ([3, 3, 3], [0, 1, 2]):
        drafting.propose(3)
        drafting.check()
        drafting.commit(accepted, [50, 51, 52])
    assert sorted(read)[-2:] == [2, 39]


def test_a_sample_of_a_prompt_beyond_the_drafts_context_has_no_drafts():
    drafting = Drafting(lengths=(60, 60), max_position_embeddings=52)
    first, sample = drafting.requests
    assert drafting.proposer.prefill([first]) == [True]
    drafting.proposer.fork(first.request_id, sample)
    assert drafting.propose(3).lens.tolist() == [0, 0]


def build(tmp_path, draft, tokenizer=None, **setting):
    target = ModelRunner.load(make_folder(tmp_path / "target", seed=1), EAGER)
    return METHOD.build(Setting(target, tokenizer, draft, **setting))


def test_it_is_built_from_a_folder_with_the_targets_settings(tmp_path):
    """Without the memory limit of the target's own cache."""
    config = RunnerConfig(compile="never", max_len=40, max_batch=3, kv_memory=1.0)
    target = ModelRunner.load(make_folder(tmp_path / "target", seed=1), config)
    draft = METHOD.build(Setting(target, make_tokenizer(), make_folder(tmp_path / "draft"))).draft
    assert draft.vocab_size == len(make_tokenizer())
    assert draft.config == replace(config, kv_memory=None, device=target.device)


def test_it_is_built_from_a_loaded_model(tmp_path):
    model = make_model(small_config("llama", vocab_size=len(make_tokenizer())))
    assert build(tmp_path, model, make_tokenizer()).draft.vocab_size == len(make_tokenizer())


def test_a_draft_is_loaded_on_the_device_of_a_loaded_target(tmp_path, monkeypatch):
    target = ModelRunner.load(make_model(small_config("llama", vocab_size=len(make_tokenizer()))), EAGER)
    monkeypatch.setattr(model_runner, "torch_device", lambda named: torch.device("meta" if named == "auto" else named))
    draft = METHOD.build(Setting(target, make_tokenizer(), make_folder(tmp_path / "draft"))).draft
    assert draft.device == target.device


def test_a_loaded_draft_on_another_device_is_refused(tmp_path):
    model = make_model(small_config("llama", vocab_size=len(make_tokenizer()))).to("meta")
    with pytest.raises(OutriderError, match="the draft is on meta, and the target on cpu: move the draft there"):
        build(tmp_path, model, make_tokenizer())


@pytest.mark.skipif(not native.load(), reason="no C++ compiler")
@pytest.mark.parametrize("bits, limit, found", [(None, 0, 4), (None, 1 << 20, 16), (4, 0, 4), (8, 0, 8), (16, 0, 16)])
def test_a_draft_that_exceeds_the_caches_is_rounded(bits, limit, found, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "MAX_16_BIT_BYTES", limit)
    model = make_model(small_config("llama", vocab_size=len(make_tokenizer()))).bfloat16()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    draft = build(tmp_path, model, make_tokenizer(), options={} if bits is None else {"bits": bits}).draft
    assert {blocks.bits_of(layer.packed) for layer in packed_layers(draft.model)} == {found}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


def test_rounding_a_draft_needs_the_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "load", lambda: False)
    model = make_model(small_config("llama", vocab_size=len(make_tokenizer())))
    monkeypatch.setattr(quantized, "MAX_16_BIT_BYTES", 0)
    assert not packed_layers(build(tmp_path, model, make_tokenizer()).draft.model)
    with pytest.raises(OutriderError, match="bits=4 needs a draft that runs on Outrider's CPU kernels"):
        build(tmp_path, model, make_tokenizer(), options={"bits": 4})


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: None, "needs a draft model"),
        (lambda path: 7, "invalid draft 7: expected a folder, a hub id or a loaded model"),
        (lambda path: make_folder(path / "draft", tokenizer=make_tokenizer(300)), "different vocabularies"),
        (lambda path: make_model(small_config("llama")), "320 in the target, 67 in the draft"),
        (lambda path: path / "none", "no model folder"),
    ],
)
def test_a_draft_that_does_not_fit_is_rejected_in_one_line(make, message, tmp_path):
    with pytest.raises(OutriderError, match=message) as error:
        build(tmp_path, make(tmp_path), make_tokenizer())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "write, message",
    [
        (lambda text: "{", "cannot load a tokenizer from .*: tokenizer.json is not JSON"),
        (lambda text: "[" * 100_000, "cannot load a tokenizer from .*: tokenizer.json is not JSON"),
        (  # the tokenizers library would end the process
            lambda text: text.replace('"continuing_subword_prefix": null', '"continuing_subword_prefix": "x"'),
            "must continue with the continuing_subword_prefix 'x'",
        ),
    ],
)
def test_a_draft_whose_tokenizer_is_broken_is_refused(write, message, tmp_path):
    draft = make_folder(tmp_path / "draft")
    file = draft / "tokenizer.json"
    file.write_text(write(file.read_text()))
    with pytest.raises(OutriderError, match=message):
        build(tmp_path, draft, make_tokenizer())


def test_another_vocabulary_size_is_padding_only_if_both_tokenizers_are_known(tmp_path):
    draft = make_folder(tmp_path / "draft", vocab_size=400)
    assert build(tmp_path / "known", draft, make_tokenizer()).draft.vocab_size == 400
    with pytest.raises(OutriderError, match="320 in the target, 400 in the draft; if one is padded, pass tokenizer= and"):
        build(tmp_path / "unknown", draft)
    for file in draft.glob("*tokenizer*"):
        file.unlink()
    with pytest.raises(OutriderError, match="320 in the target, 400 in the draft"):
        build(tmp_path / "neither", draft, make_tokenizer())


def test_a_draft_with_its_own_code_is_examined_if_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    target, draft = make_folder(tmp_path / "target"), make_folder(tmp_path / "draft")
    (draft / "own.py").write_text("from transformers import LlamaConfig\nclass Own(LlamaConfig):\n    model_type = 'own'\n")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    runner = ModelRunner.load(target, RunnerConfig(compile="never", trust_remote_code=True))
    setting = Setting(runner, make_tokenizer(), draft, make_tokenizer())
    assert {finding.topic: finding.level for finding in METHOD.examine(setting)}["vocabulary"] == "ok"


def test_the_tokenizer_of_a_draft_with_the_targets_files_is_not_loaded(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(make_folder(tmp_path / "target"))
    monkeypatch.setattr(draft_model, "load_tokenizer", lambda *_: pytest.fail("another tokenizer was loaded"))
    assert build(tmp_path, make_folder(tmp_path / "draft"), tokenizer).draft.vocab_size == len(tokenizer)
