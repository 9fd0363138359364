"""The running engine with real models: samples follow the target's distribution, and greedy output equals plain decoding.

The distribution of three tokens over a vocabulary of eight is enumerated with the target's plain forward pass and the slow
reference sampler. 4096 samples at a time are compared with it by Pearson's chi-square at p = 1e-4, with fixed seeds. A
deviation of total variation 0.07, evenly spread, is detected with a power of 99% at 30 cells, and one of 0.12 at the full 512
(noncentral chi-square, Sankaran's approximation). The wrong verifiers at the end must be detected by the same test.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from tiny_folder import letter_tokenizer
from tiny_hybrids import hybrid
from toy import outputs_of, reference_probs
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider import LLM, SamplingParams
from outrider.audit.wrong import WithoutResidual
from outrider.engine.policy import FixedLength, LengthPolicy
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.tree_sizes import TreeProposer
from outrider.registry import PROPOSERS
from outrider.types import Context, DraftPrices, Proposal, Round

from .drafts import block_head, draft_for

VOCAB, LENGTH, SAMPLES = 8, 3, 4096
PROMPT = [1, 5, 2, 5]


def tiny_model(seed: int, vocab_size: int = VOCAB, sharpness: float = 12.0, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=vocab_size,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= sharpness
    return model


TARGET, DRAFT = tiny_model(1), tiny_model(2, layers=1)
PARALLEL = tiny_model(3, vocab_size=VOCAB + 1, layers=1)  # drafts in one pass, with a mask token
PARALLEL.config.pard_token = VOCAB


@torch.no_grad()
def exact_law(params: SamplingParams, target: PreTrainedModel = TARGET) -> torch.Tensor:
    """Return the probability of each sequence of three tokens, float64 [V, V, V], from plain forward passes."""
    law = torch.ones((VOCAB,) * LENGTH, dtype=torch.float64)
    for length in range(LENGTH):
        outputs = list(itertools.product(range(VOCAB), repeat=length))
        logits = target(torch.tensor([[*PROMPT, *output] for output in outputs])).logits[:, -1].double()
        for output, row in zip(outputs, logits.tolist(), strict=True):
            probs = torch.tensor(reference_probs(row, PROMPT, list(output), params), dtype=torch.float64)
            shape = [VOCAB] + [1] * (LENGTH - length - 1)
            law[output] = law[output] * probs.view(shape)
    return law


def excess(token_ids: list[list[int]], law: torch.Tensor) -> float:
    """Return Pearson's chi-square of samples / its critical value at p = 1e-4; rare cells are pooled."""
    flat = law.flatten()
    places = torch.tensor(token_ids) @ torch.tensor([VOCAB**2, VOCAB, 1])
    return excess_of(torch.bincount(places, minlength=flat.numel()).double(), flat * len(token_ids))


def excess_of(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the same for counts [cells] and their expectation."""
    rare = expected < 5
    seen = torch.cat([counts[~rare], counts[rare].sum().view(1)])
    due = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    if due[-1] < 1e-9:
        assert seen[-1] == 0, "a token of probability 0 was emitted"
        seen, due = seen[:-1], due[:-1]
    return float(((seen - due) ** 2 / due).sum() / chi2.isf(1e-4, len(due) - 1))


METHODS = [*PROPOSERS, "suffix+draft", "suffix+eagle"]
FOREIGN = "cross-tokenizer"


def tokenizers(vocab_size: int, method: str) -> dict[str, Any]:
    """Return options of ``LLM``: one tokenizer for both models, or two for methods that translate."""
    return {
        "tokenizer": letter_tokenizer(vocab_size, 1),
        "draft_tokenizer": letter_tokenizer(vocab_size, 1 + (method == FOREIGN)),
    }


class Uneven(FixedLength):
    """A policy whose K, 0 to 4, differs between requests and rounds."""

    def __init__(self) -> None:
        super().__init__(4)
        self._round = 0

    def next_lengths(self, context: Context) -> list[int]:
        self._round += 1
        return [(3 * self._round + 2 * b) % (self.k + 1) for b in range(len(context.requests))]


class Priced(FixedLength):
    """A policy whose prices end chains, as those of ``auto`` do."""

    prices = DraftPrices(0.0, 0.3)  # for each row: each chain ends by its own confidence


class Some(FixedLength):
    """A policy that leaves every second request out of drafting, from its first round."""

    def next_lengths(self, context: Context) -> list[int]:
        for request in context.requests:
            request.may_draft = int(request.request_id[1:]) % 2 == 0
        return [self.k if request.may_draft else 0 for request in context.requests]


def sample(params: SamplingParams, target: PreTrainedModel = TARGET, **options: object) -> list[list[int]]:
    options = {"method": "draft", "draft": DRAFT, "num_draft_tokens": 3, **options}
    llm = LLM(target, max_batch=256, compile="never", **options)
    completions = outputs_of(llm.generate([PROMPT], replace(params, n=SAMPLES, max_tokens=LENGTH, seed=7, ignore_eos=True)))
    assert llm.stats.faults == 0
    return [completion.token_ids for completion in completions]


SETTINGS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top-k": SamplingParams(temperature=1.0, top_k=4),
    "top-p": SamplingParams(temperature=0.7, top_p=0.9),
    "min_tokens": SamplingParams(temperature=1.0, stop_token_ids=(2, 4), min_tokens=2),  # 2 is the end of the text
    "min-p": SamplingParams(temperature=1.0, min_p=0.15),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7),
}


@pytest.mark.parametrize("verifier", ["rejection", "block", "exact"])
@pytest.mark.parametrize("name", SETTINGS)
def test_samples_follow_the_targets_distribution(name: str, verifier: str) -> None:
    law = exact_law(SETTINGS[name])
    assert law.sum() == pytest.approx(1, abs=1e-9)
    assert excess(sample(SETTINGS[name], verifier=verifier), law) < 1


@pytest.mark.parametrize("verifier", ["block", "exact"])
def test_samples_of_requests_with_different_settings_in_one_batch_follow_the_target(verifier: str) -> None:
    settings = [SETTINGS[name] for name in ("penalties", "min_tokens", "top-k")]
    params = [replace(each, n=64, max_tokens=LENGTH, seed=turn, ignore_eos=True) for turn in range(64) for each in settings]
    options = {"method": "draft", "draft": DRAFT, "num_draft_tokens": 3, "verifier": verifier}
    llm = LLM(TARGET, max_batch=256, compile="never", **options)
    found = llm.generate([PROMPT] * len(params), params)
    assert llm.stats.faults == 0
    for index, each in enumerate(settings):
        samples = [completion.token_ids for completion in outputs_of(found[index :: len(settings)])]
        assert len(samples) == SAMPLES and excess(samples, exact_law(each)) < 1


def test_samples_of_point_masses_and_coupled_noise_follow_the_target() -> None:
    law = exact_law(SETTINGS["temperature 1"])
    assert excess(sample(SETTINGS["temperature 1"], method="ngram", draft=None), law) < 1
    assert excess(sample(SETTINGS["temperature 1"], same_text=True), law) < 1


@pytest.mark.parametrize(
    ("method", "verifier"),
    [
        ("draft", "rejection"),
        ("draft", "block"),
        ("early-exit", "rejection"),
        ("eagle", "rejection"),
        ("dflash", "rejection"),
        ("dflash", "block"),
    ],
)
def test_samples_with_k_per_request_follow_the_target(method: str, verifier: str) -> None:
    options = {"method": method, "draft": draft_for(method, TARGET, DRAFT), "verifier": verifier, "num_draft_tokens": Uneven()}
    assert excess(sample(SETTINGS["penalties"], **options), exact_law(SETTINGS["penalties"])) < 1


@pytest.mark.parametrize("method", ["draft", "early-exit", "low-bit", "suffix+draft"])
def test_samples_of_chains_that_end_early_follow_the_target(method: str) -> None:
    options = {"draft": draft_for(method, TARGET, DRAFT), **tokenizers(VOCAB, method)}
    early = []

    class Watched(Priced):
        def observe(self, context: Context, round_: Round) -> None:
            early.extend([0 < count < limit for count, limit in zip(round_.lens, context.limits, strict=True)])

    samples = sample(SETTINGS["temperature 1"], method=method, num_draft_tokens=Watched(4), **options)
    assert excess(samples, exact_law(SETTINGS["temperature 1"])) < 1
    assert any(early) and not all(early)


@pytest.mark.parametrize("name", ["temperature 1", "temperature 0.7", "penalties"])
@pytest.mark.parametrize("method", ["suffix", "suffix+draft", FOREIGN])
def test_samples_of_every_method_follow_the_target(method: str, name: str) -> None:
    options = {"method_options": {"min_first": 1}} if "+" in method else {}
    samples = sample(SETTINGS[name], method=method, **tokenizers(VOCAB, method), **options)
    assert excess(samples, exact_law(SETTINGS[name])) < 1


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("name", SETTINGS)
def test_samples_of_a_parallel_draft_model_follow_the_target(name: str, verifier: str) -> None:
    assert excess(sample(SETTINGS[name], draft=PARALLEL, verifier=verifier), exact_law(SETTINGS[name])) < 1


@pytest.mark.parametrize("options", [{"method": "suffix+draft", "method_options": {"min_first": 1}}, {"same_text": True}])
def test_samples_of_combined_methods_coupled_noise_and_uneven_k_follow_the_target(options: dict[str, Any]) -> None:
    law = exact_law(SETTINGS["penalties"])
    assert excess(sample(SETTINGS["penalties"], draft=PARALLEL, num_draft_tokens=Uneven(), **options), law) < 1


@pytest.mark.parametrize("markov_rank", [0, 3])
@pytest.mark.parametrize("name", ["temperature 1", "top-p"])
def test_samples_of_a_block_drafter_follow_the_target(name: str, markov_rank: int) -> None:
    """With and without dependence of drafts on the previous draft."""
    samples = sample(SETTINGS[name], method="dflash", draft=block_head(TARGET, markov_rank))
    assert excess(samples, exact_law(SETTINGS[name])) < 1


@pytest.mark.parametrize("method", ["early-exit", "low-bit"])
@pytest.mark.parametrize("name", ["temperature 1", "temperature 0.7"])
def test_samples_of_self_drafting_targets_follow_the_target(name: str, method: str) -> None:
    assert excess(sample(SETTINGS[name], method=method), exact_law(SETTINGS[name])) < 1


@pytest.mark.parametrize("method", ["early-exit", "low-bit"])
def test_self_drafting_targets_emit_the_same_text_with_coupled_noise(method: str) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True, n=3)
    texts = [
        [
            completion.token_ids
            for completion in outputs_of(LLM(TARGET, method=name, same_text=True, compile="never").generate([PROMPT], params))
        ]
        for name in ("plain", method)
    ]
    assert texts[0] == texts[1]


class Untempered(DraftModelProposer):
    """A wrong proposer: its probabilities are flatter than the distribution of its drafts."""

    def propose(self, context: Context, k: int) -> Proposal:
        proposal = super().propose(context, k)
        if proposal.probs is None:
            return proposal
        flat = proposal.probs.sqrt()
        return replace(proposal, probs=flat / flat.sum(-1, keepdim=True))


def test_harness_detects_a_verifier_without_the_residual() -> None:
    samples = sample(SETTINGS["temperature 1"], verifier=WithoutResidual())
    assert excess(samples, exact_law(SETTINGS["temperature 1"])) > 2


def test_harness_detects_draft_probabilities_without_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.proposers.draft_model.DraftModelProposer", Untempered)
    samples = sample(SETTINGS["temperature 1"])
    assert excess(samples, exact_law(SETTINGS["temperature 1"])) > 2


TREES = [
    method for method in METHODS if any(issubclass(PROPOSERS.get(part).proposer, TreeProposer) for part in method.split("+"))
]


@pytest.mark.parametrize(("temperature", "verifier"), [(0.7, "block"), (1.0, "block"), (1.0, "exact")])
@pytest.mark.parametrize("method", TREES)
def test_samples_of_trees_follow_the_target(method: str, temperature: float, verifier: str) -> None:
    params = SamplingParams(temperature=temperature)
    samples = sample(params, method=method, draft=draft_for(method, TARGET), verifier=verifier)
    assert excess(samples, exact_law(params)) < 1


@pytest.mark.parametrize("method", ["eagle", "mtp", "dflash"])
def test_samples_of_a_recurrent_target_follow_its_distribution(method: str) -> None:
    """A hybrid target scores chains only."""
    target = hybrid("qwen3_5_text", vocab_size=VOCAB)
    samples = sample(SETTINGS["penalties"], target, method=method, draft=draft_for(method, target))
    assert excess(samples, exact_law(SETTINGS["penalties"], target)) < 1


@pytest.mark.parametrize("method", TREES)
def test_trees_respect_truncation_and_penalties(method: str) -> None:
    for name in ("top-k", "penalties"):
        samples = sample(SETTINGS[name], method=method, draft=draft_for(method, TARGET))
        assert excess(samples, exact_law(SETTINGS[name])) < 1


@pytest.mark.parametrize("method", METHODS)
def test_coupled_noise_gives_the_same_text_with_every_method(method: str) -> None:
    target, draft = tiny_model(3, 40, 20.0), tiny_model(4, 40, 20.0, layers=1)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1, 8, 2, 8]]

    def texts(name: str, batch: int, k: int | LengthPolicy = 3) -> list[list[int]]:
        options = {"method": name, "draft": draft_for(name, target, draft), "max_batch": batch, **tokenizers(40, name)}
        llm = LLM(target, **options, num_draft_tokens=k, same_text=True, compile="never")
        params = SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True)
        completions = outputs_of(llm.generate(prompts, params))
        assert llm.stats.faults == 0
        return [completion.token_ids for completion in completions]

    wanted = texts("plain", 1)
    assert texts(method, 1) == wanted
    assert texts(method, 3) == wanted
    assert texts(method, 3, Uneven()) == wanted
    assert texts(method, 2, Some(3)) == wanted


@pytest.mark.parametrize("method", TREES)
def test_sampled_requests_in_the_batch_do_not_change_greedy_output(method: str) -> None:
    target = tiny_model(3, 40, 40.0)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8]]
    params = [SamplingParams(max_tokens=20, ignore_eos=True), SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)]
    llm = LLM(target, method=method, draft=draft_for(method, target), num_draft_tokens=3, compile="never")
    first, second = outputs_of(llm.generate(prompts, params))
    assert first.token_ids == greedy_text(target, prompts[0], 20)
    assert len(second.token_ids) == 20 and llm.stats.faults == 0


@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_equals_plain_forward_passes(method: str) -> None:
    target, draft = tiny_model(3, 40, 40.0), tiny_model(4, 40, 40.0, layers=1)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1, 8, 2, 8]]
    expected = [greedy_text(target, prompt, 20) for prompt in prompts]
    options = {"draft": draft_for(method, target, draft), "max_batch": 3, **tokenizers(40, method)}
    for k in range(9):
        llm = LLM(target, method=method, **options, num_draft_tokens=k, compile="never")
        for batch in (1, 3):
            completions = outputs_of(llm.generate(prompts[:batch], SamplingParams(max_tokens=20, ignore_eos=True)))
            assert [completion.token_ids for completion in completions] == expected[:batch], (k, batch)
        assert llm.stats.faults == 0


@pytest.mark.parametrize("method", METHODS)
def test_same_text_equals_plain_decoding(method: str) -> None:
    target, draft = tiny_model(3, 40, 3.0), tiny_model(3, 40, 3.1)
    params = [SamplingParams(max_tokens=24, ignore_eos=True, seed=5, temperature=t) for t in (0.0, 0.8, 1.0)]
    params += [replace(each, stop_token_ids=range(1, 40, 2), min_tokens=9 + i) for i, each in enumerate(params)]
    texts = []
    for name in ("plain", method):
        options = tokenizers(40, name) | {"draft": None if name == "plain" else draft_for(name, target, draft)}
        llm = LLM(target, method=name, num_draft_tokens=3, same_text=True, compile="never", **options)
        completions = outputs_of(llm.generate([[3, 1, 4, 1, 5]] * len(params), params))
        texts.append([completion.token_ids for completion in completions])
        assert llm.stats.faults == 0
    assert texts[0] == texts[1]
    ended = [len(tokens) for tokens in texts[0][3:]]
    assert all(9 + i < count < 24 for i, count in enumerate(ended)), ended
    assert llm.stats.num_accepted > 0 or "draft" not in method.split("+")


@torch.no_grad()
def greedy_text(model: LlamaForCausalLM, prompt: list[int], length: int) -> list[int]:
    text = list(prompt)
    for _ in range(length):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]
