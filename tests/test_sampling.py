"""The sampler compared with a slow reference and transformers' processors; random numbers, coupled noise, and errors."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from toy import make_request, reference_probs
from toy_grammar import RuleGrammar
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider import native
from outrider.engine.logprobs import TokenLogprobs, token_logprobs
from outrider.sampling import InvalidLogits, Sampler, penalties
from outrider.sampling.grammar_masks import token_mask
from outrider.sampling.min_tokens import check_masks
from outrider.sampling.penalties import Penalties, path_mask
from outrider.sampling.randomness import GOLDEN, gumbel, mix, sample_inverse_cdf
from outrider.sampling.shaping import Shaping
from outrider.types import OutriderError, Request, SamplingParams

VOCAB = 40
PROMPT, OUTPUT = [3, 5, 5, 9], [7, 3, 7, 7]
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.0, top_k=400),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=1.4, min_p=0.2),
    SamplingParams(temperature=1.2, top_k=12, top_p=0.7, min_p=0.1),
    SamplingParams(temperature=1.0, repetition_penalty=1.5),
    SamplingParams(temperature=1.0, presence_penalty=1.0),
    SamplingParams(temperature=1.0, frequency_penalty=-0.7),
    SamplingParams(repetition_penalty=0.5, presence_penalty=-2.0),
    SamplingParams(temperature=1.0, logit_bias={4: 3.0, 7: -100.0}),
    SamplingParams(temperature=1.0, allowed_token_ids=(1, 7, 9), banned_token_ids=(9,), logit_bias={1: 1.0}),
    SamplingParams(temperature=1.0, stop_token_ids=(3, 9, VOCAB), min_tokens=6),
    SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2
    ),
]


def request_of(params: SamplingParams, seed: int = 0, output: list[int] | None = None) -> Request:
    text = PROMPT + (OUTPUT if output is None else output)
    return make_request(text, params, num_prompt=len(PROMPT), seed=seed, name=f"request-{seed}")


def random_logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return 2.5 * torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("params", SETTINGS)
def test_probs_follow_the_documented_order(params: SamplingParams) -> None:
    logits, ends = random_logits(1, 1), (0, 11)
    expected = reference_probs(logits[0, 0].tolist(), PROMPT, OUTPUT, params, ends)
    sampler = Sampler([request_of(params)], VOCAB, eos_token_ids=ends)
    assert sampler.probs(logits)[0, 0].tolist() == pytest.approx(expected, abs=1e-12)
    in_float32 = Sampler([request_of(params)], VOCAB, eos_token_ids=ends).probs(logits.float())
    assert in_float32.dtype == torch.float32
    assert in_float32[0, 0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("parents", [None, torch.tensor([[-1, -1, 0, 2, 3]] * len(SETTINGS))])
def test_the_distribution_is_the_same_without_the_native_library(
    parents: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random_logits(len(SETTINGS), 6)
    drafts = torch.tensor([[7, 8, 8, 3, 7]] * len(SETTINGS))
    requests = [request_of(params) for params in SETTINGS]
    native = Sampler(requests, VOCAB).probs(logits, drafts, parents)
    monkeypatch.setattr("outrider.native.load", lambda: False)
    torch.testing.assert_close(Sampler(requests, VOCAB).probs(logits, drafts, parents), native, rtol=1e-12, atol=1e-14)


def test_a_row_is_the_same_in_any_batch() -> None:
    """With all settings in one batch and padded drafts, each row has the same bits as alone."""
    logits = random_logits(len(SETTINGS), 4, dtype=torch.float32)
    drafts = torch.randint(VOCAB, (len(SETTINGS), 3), generator=torch.Generator().manual_seed(1))
    together = Sampler([request_of(params) for params in SETTINGS], VOCAB).probs(logits, drafts)
    for b, params in enumerate(SETTINGS):
        alone = Sampler([request_of(params)], VOCAB).probs(logits[b : b + 1], drafts[b : b + 1])
        assert torch.equal(alone[0], together[b])


def test_transformers_processors_agree() -> None:
    bias, ends = {4: 2.0, 7: -1.5}, (0, 11)
    params = SamplingParams(
        temperature=0.8,
        top_k=15,
        top_p=0.85,
        min_p=0.04,
        repetition_penalty=1.3,
        logit_bias=bias,
        min_tokens=len(OUTPUT) + 1,
        stop_token_ids=ends[1:],
    )
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), len(OUTPUT) + 1, list(ends)),
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(15),
            TopPLogitsWarper(0.85),
            MinPLogitsWarper(0.04),
        ]
    )
    for seed in range(20):
        logits = random_logits(1, 1, seed=seed, dtype=torch.float32)
        theirs = torch.softmax(processors(torch.tensor([PROMPT + OUTPUT]), logits[0].clone()), dim=-1)
        ours = Sampler([request_of(params)], VOCAB, eos_token_ids=ends[:1]).probs(logits)[0]
        assert torch.equal(theirs > 0, ours > 0) and not ours[0, list(ends)].any()
        assert torch.allclose(theirs, ours, atol=1e-6)


@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("start", [0, 2])
def test_a_draft_is_scored_as_if_earlier_drafts_were_committed(params: SamplingParams, start: int) -> None:
    drafts, logits = torch.tensor([[7, 8, 8, 3]]), random_logits(1, 5)
    probs = Sampler([request_of(params)], VOCAB).probs(logits[:, start:], drafts, start=start)
    for j in range(start, 5):
        committed = request_of(params, output=OUTPUT + drafts[0, :j].tolist())
        assert torch.allclose(Sampler([committed], VOCAB).probs(logits[:, j : j + 1])[0, 0], probs[0, j - start], atol=1e-14)


@pytest.mark.parametrize("params", [SETTINGS[11], SETTINGS[-1]])
def test_a_tree_node_is_scored_with_its_ancestors_only(params: SamplingParams) -> None:
    drafts, parents = torch.tensor([[7, 8, 8, 3, 3]]), torch.tensor([[-1, -1, 0, 1, 2]])
    paths = [[], [7], [8], [7, 8], [8, 3], [7, 8, 3]]
    logits = random_logits(1, 6)
    mixed = [request_of(SamplingParams()), request_of(params)]
    probs = Sampler(mixed, VOCAB).probs(logits.expand(2, -1, -1), drafts.expand(2, -1), parents.expand(2, -1))
    for j, path in enumerate(paths):
        committed = request_of(params, output=OUTPUT + path)
        assert torch.allclose(Sampler([committed], VOCAB).probs(logits[:, j : j + 1])[0, 0], probs[1, j], atol=1e-14)


def test_counts_follow_the_committed_tokens() -> None:
    """One sampler over a growing request equals a new one each time, whatever drafts were scored in between."""
    params = replace(SETTINGS[-1], temperature=1.0)
    request, logits = request_of(params, output=[]), random_logits(1, 2)
    kept = Sampler([request], VOCAB)
    for token in (7, 7, 3, 12, 7):
        drafts = torch.tensor([[token]])
        fresh = Sampler([request_of(params, output=request.token_ids[len(PROMPT) :])], VOCAB)
        assert torch.equal(kept.probs(logits, drafts), fresh.probs(logits, drafts))
        request.token_ids.append(token)


def test_a_continued_sampler_equals_a_new_one() -> None:
    """Of the requests of a batch some have more tokens, such as drafts that a grammar forces."""
    params = [replace(SETTINGS[-1], temperature=1.0), SETTINGS[-2], SETTINGS[12], replace(SETTINGS[-1], seed=1)]
    requests, logits = [request_of(each, seed) for seed, each in enumerate(params)], random_logits(len(params), 3)
    drafts, kept = torch.tensor([[7, 8]] * len(params)), Sampler(requests, VOCAB)
    others = torch.tensor([[12, 8]] * len(params))
    before, before_others = kept.probs(logits, drafts), kept.probs(logits, others)
    ahead = {b: replace(requests[b], token_ids=[*requests[b].token_ids, 12, 9]) for b in (0, 1)}
    continued, fresh = kept.continued(ahead), Sampler([ahead.get(b, each) for b, each in enumerate(requests)], VOCAB)
    assert torch.equal(continued.probs(logits, drafts), fresh.probs(logits, drafts))
    flat = torch.full((len(params), VOCAB), 1 / VOCAB)
    assert torch.equal(continued.draw(flat, 0), fresh.draw(flat, 0))
    assert torch.equal(continued.take([1, 2]).probs(logits[:2], drafts[:2]), fresh.take([1, 2]).probs(logits[:2], drafts[:2]))
    assert torch.equal(kept.probs(logits, drafts), before) and torch.equal(kept.probs(logits, others), before_others)
    alone, halves = Sampler(requests, VOCAB), torch.full((len(params), 40), 0.5)
    for _ in range(2):
        assert torch.equal(kept.bernoulli(halves), alone.bernoulli(halves))
        assert torch.equal(continued.bernoulli(halves), fresh.bernoulli(halves))


def test_another_batch_and_parts_of_one_count_no_text_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    update = penalties._Counted.update

    def noting(state: Any) -> None:
        counted.append(len(state.request.token_ids) - state.num_tokens)
        update(state)

    monkeypatch.setattr(penalties._Counted, "update", noting)
    params = replace(SETTINGS[-1], temperature=1.0)
    requests, logits = [request_of(params, seed) for seed in range(3)], random_logits(3, 1)
    kept = Sampler(requests, VOCAB)
    kept.probs(logits)
    assert counted == [8, 8, 8]
    fewer = kept.for_batch([requests[2], requests[0]])
    for sampler, rows in ((fewer, [2, 0]), (kept.take([1, 2]), [1, 2])):
        requests[2].token_ids.append(7)
        probs = sampler.probs(logits[rows])
        assert torch.equal(probs, Sampler(sampler.requests, VOCAB).probs(logits[rows]))
    assert counted[3:] == [1, 0, 9, 8, 0, 1, 8, 10]


def test_parts_of_a_continued_sampler_have_the_settings_of_its_sources_part() -> None:
    requests = [request_of(params, seed) for seed, params in enumerate(SETTINGS[-4:])]
    kept = Sampler(requests, VOCAB)
    for output in ([*OUTPUT, 12], [*OUTPUT, 12, 9]):  # one continued sampler per round
        ahead = {b: replace(requests[b], token_ids=PROMPT + output) for b in (0, 3)}
        part = kept.continued(ahead).take([3, 1])
        assert part._shaping is kept.take([3, 1])._shaping
        assert [len(request.token_ids) for request in part.requests] == [len(PROMPT + output), 8]


def test_a_sampler_stores_a_limited_number_of_parts() -> None:
    """A batch may last long, and any of its requests may draft; each part has tensors of the vocabulary's size."""
    kept = Sampler([request_of(SamplingParams(), seed) for seed in range(6)], VOCAB)
    parts: list[weakref.ref[Sampler]] = []
    for rows in itertools.combinations(range(6), 3):
        parts.append(weakref.ref(kept.take(rows)))
        assert kept.take(rows) is parts[-1]()
        assert sum(part() is not None for part in parts) <= 16


def test_a_bias_changes_the_logits_of_its_request_only() -> None:
    requests = [request_of(SamplingParams()), request_of(SamplingParams(logit_bias={3: 2.0}))]
    logits = torch.full((2, 1, VOCAB), -0.0)
    scores = Sampler(requests, VOCAB)._scores(logits, None, None, 0, [1, 1])
    assert bool(scores[0].signbit().all()) and scores[1, 0, 3] == 2.0


@pytest.mark.parametrize("ignores", [False, True])
def test_end_of_text_tokens_are_masked_before_min_tokens_with_ignore_eos_too(ignores: bool) -> None:
    params = SamplingParams(temperature=1.0, min_tokens=2, stop_token_ids=(4,), ignore_eos=ignores)
    request = request_of(params, output=[])
    sampler, logits = Sampler([request, request_of(SamplingParams())], VOCAB, eos_token_ids=(0, VOCAB)), random_logits(2, 3)
    before = logits.clone()
    for each in (sampler, sampler.take([0])):
        probs = each.probs(logits[: len(each.requests)])
        assert (probs[0, :, [0, 4]] > 0).tolist() == [[False, False], [False, False], [True, True]]
        assert (probs[0] > 0).sum().item() == 3 * VOCAB - 4
    request.token_ids += [7, 7]
    assert bool((sampler.probs(logits)[0] > 0).all()) and torch.equal(logits, before)


def test_penalties_without_the_drafts_they_need_are_an_error() -> None:
    with pytest.raises(ValueError, match="drafts"):
        Sampler([request_of(SETTINGS[-1])], VOCAB).probs(random_logits(1, 2))


def test_path_mask_contains_ancestors_and_the_node() -> None:
    mask = path_mask(torch.tensor([[-1, 0, 0, 2, 3, -1]]), 0, 7)
    expected = [[], [0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 3, 4], [5]]
    assert [row.nonzero().flatten().tolist() for row in mask[0]] == expected
    assert torch.equal(path_mask(torch.tensor([[-1, 0, 0, 2, 3, -1]]), 2, 3), mask[:, 2:5])


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    logits = torch.zeros(1, 1, VOCAB)
    logits[..., [6, 4]] = 1.0
    sampler = Sampler([request_of(SamplingParams())], VOCAB)
    assert sampler.tokens(logits).tolist() == [[4]]
    assert sampler.probs(logits)[0, 0].nonzero().tolist() == [[4]]


def test_inputs_are_not_modified() -> None:
    logits = random_logits(len(SETTINGS), 2, dtype=torch.float32)
    before = logits.clone()
    sampler = Sampler([request_of(params) for params in SETTINGS], VOCAB, coupled=True)
    drafts = torch.ones(len(SETTINGS), 1, dtype=torch.long)
    sampler.probs(logits, drafts)
    sampler.tokens(logits, drafts)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("settings", [SETTINGS, [SamplingParams(), SamplingParams(repetition_penalty=1.5)]])
def test_padding_after_a_requests_drafts_has_no_effect(
    settings: list[SamplingParams], is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setattr("outrider.native.load", lambda: False)
    requests = [request_of(params) for params in settings]
    logits, lens = random_logits(len(settings), 4, dtype=torch.float32), torch.arange(len(settings)) % 4
    drafts = torch.randint(VOCAB, (len(settings), 3), generator=torch.Generator().manual_seed(1))
    poisoned = logits.where((torch.arange(4) <= lens[:, None])[..., None], math.nan)
    for coupled in (False, True):
        sampler = Sampler(requests, VOCAB, coupled=coupled)
        for judge in (sampler.probs, sampler.tokens) if sampler.is_deterministic else (sampler.probs,):
            whole, part = judge(logits, drafts), judge(poisoned, drafts, lens=lens)
            for b, length in enumerate(lens.tolist()):
                assert torch.equal(part[b, : length + 1], whole[b, : length + 1])


def test_a_grammar_is_not_called_for_padding() -> None:
    asked: list[list[int]] = []

    class Listening:
        def allowed(self, output: Sequence[int], path: Sequence[int]) -> Tensor | None:
            asked.append(list(path))
            return torch.ones(VOCAB, dtype=torch.bool)

    requests = [request_of(SamplingParams(), seed) for seed in range(2)]
    requests[1].matcher = Listening()
    drafts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    Sampler(requests, VOCAB).tokens(random_logits(2, 4), drafts, lens=torch.tensor([3, 1]))
    assert asked == [[], [4]]


def test_the_masks_of_a_request_are_applied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of them would be copied from the CPU separately."""
    calls, fill = [], Tensor.masked_fill_

    def noting(scores: Tensor, mask: Tensor, value: float) -> Tensor:
        calls.append(tuple(mask.shape))
        return fill(scores, mask, value)

    monkeypatch.setattr(Tensor, "masked_fill_", noting)
    request = request_of(SamplingParams())
    request.matcher = RuleGrammar(lambda output: [1 + len(output)], VOCAB, 0).matcher()
    tokens = Sampler([request], VOCAB).tokens(random_logits(1, 4), torch.tensor([[5, 6, 20]]), lens=torch.tensor([2]))
    assert calls == [(3, VOCAB)] and tokens[0, :3].tolist() == [5, 6, 7]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("coupled", [False, True])
def test_invalid_logits_name_the_request(poison: float, temperature: float, coupled: bool) -> None:
    requests = [request_of(SamplingParams(temperature=temperature), seed=seed) for seed in range(3)]
    sampler, logits = Sampler(requests, VOCAB, coupled=coupled), random_logits(3, 3, dtype=torch.float32)
    logits[1, 2, slice(None) if poison == -math.inf else 4] = poison
    for judge in (sampler.tokens, sampler.probs):
        with pytest.raises(InvalidLogits, match="'request-1'") as caught:
            judge(logits)
        assert caught.value.request_ids == ("request-1",)
        assert "\n" not in str(caught.value)
        with pytest.raises(InvalidLogits):
            judge(logits, lens=torch.tensor([2, 2, 2]))
        judge(logits, lens=torch.tensor([2, 1, 2]))  # the row is after the drafts of its request


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "invalid max_tokens 0: expected a whole number, at least 1"),
        ({"temperature": math.nan}, "invalid temperature nan: expected a finite number, at least 0"),
        ({"banned_token_ids": (-1,)}, r"invalid banned_token_ids \(-1,\): expected a list of token ids from 0 on"),
        ({"min_p": 1.1}, "invalid min_p 1.1: expected a finite number, at least 0, at most 1"),
        ({"logit_bias": {3: math.nan}}, "invalid logit_bias {3: nan}: expected .* numbers from -1e30"),
        ({"logit_bias": {3: math.inf}}, "invalid logit_bias {3: inf}: expected .* numbers from -1e30"),
    ],
)
def test_values_out_of_range_are_rejected_in_one_line(params: dict[str, Any], message: str) -> None:
    with pytest.raises(OutriderError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(logit_bias={VOCAB: 1.0}), f"token id {VOCAB} "),
        (SamplingParams(banned_token_ids=(VOCAB + 1,)), f"token id {VOCAB + 1} "),
        (SamplingParams(allowed_token_ids=(VOCAB,)), f"token id {VOCAB} "),
        (SamplingParams(allowed_token_ids=(3,), banned_token_ids=(3,)), "leave no token"),
        (SamplingParams(allowed_token_ids=(3, 4), banned_token_ids=(3,), logit_bias={4: -math.inf}), "leave no token"),
        (SamplingParams(banned_token_ids=range(VOCAB)), "leave no token"),
    ],
)
def test_invalid_masks_are_rejected(params: SamplingParams, message: str) -> None:
    with pytest.raises(OutriderError, match=message):
        check_masks(params, VOCAB, ())


@pytest.mark.parametrize("masks", [{"stop_token_ids": range(VOCAB)}, {"allowed_token_ids": (3, 5), "stop_token_ids": (3,)}])
def test_min_tokens_is_checked_once_and_not_for_every_batch(masks: dict[str, Any]) -> None:
    params = SamplingParams(**masks, min_tokens=1)
    with pytest.raises(OutriderError, match="min_tokens and the token masks leave no token"):
        check_masks(params, VOCAB, (5, VOCAB + 1))
    check_masks(replace(params, min_tokens=0), VOCAB, (5,))
    check_masks(replace(params, stop_token_ids=range(4)), VOCAB, ())
    Sampler([request_of(params)], VOCAB, eos_token_ids=(5,))  # a batch does not fail because of one request


def test_logits_of_another_vocabulary_size_are_rejected() -> None:
    with pytest.raises(ValueError, match="41"):
        Sampler([request_of(SamplingParams())], VOCAB + 1).tokens(random_logits(1, 1))


def test_logprobs_are_those_of_the_model() -> None:
    logits, rows, token_ids = random_logits(1, 3)[0], [0, 2], [5, 6]
    expected = torch.log_softmax(logits[rows], dim=-1)
    found = token_logprobs(logits, rows, token_ids, 4)
    assert [each.logprob for each in found] == pytest.approx(expected[[0, 1], token_ids].tolist(), abs=1e-5)
    values, ids = expected.topk(4)
    assert [[token for token, _ in each.top] for each in found] == ids.tolist()
    assert torch.allclose(torch.tensor([[value for _, value in each.top] for each in found]).double(), values, atol=1e-5)
    assert token_logprobs(logits, rows, token_ids, 0) == [TokenLogprobs(each.logprob) for each in found]
    assert len(token_logprobs(logits, rows, token_ids, 1000)[0].top) == VOCAB


# randomness


def many(params: SamplingParams, count: int, length: int = 0) -> list[Request]:
    return [make_request(PROMPT + [1] * length, params, len(PROMPT), seed=seed) for seed in range(count)]


def chi_square(token_ids: Tensor, probs: Tensor) -> float:
    observed = torch.bincount(token_ids, minlength=len(probs)).double()
    expected = probs.double() * len(token_ids)
    assert (observed[expected == 0] == 0).all()
    kept = expected > 0
    return float(((observed - expected)[kept] ** 2 / expected[kept]).sum())


LAW = torch.tensor([0.0, 0.3, 0.0, 0.25, 0.2, 0.15, 0.07, 0.03, 0.0])
LIMIT = 25.7  # chi-square, 5 degrees of freedom: exceeded with probability 1e-4


def test_draws_follow_the_probabilities_and_never_take_an_impossible_token() -> None:
    sampler = Sampler(many(SamplingParams(temperature=1.0), 20_000), 9)
    probs = LAW.expand(20_000, -1)
    for draws in (sampler.categorical(probs), sampler.draw(probs, 0), sampler.draw(probs, 1)):
        assert chi_square(draws, LAW) < LIMIT


@pytest.fixture(params=[True, False])
def with_and_without_cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with the operators in C++ and without."""
    if not request.param:
        monkeypatch.setattr(native, "serves", lambda device: False)


@pytest.mark.usefixtures("with_and_without_cpp")
@pytest.mark.parametrize("probs", [LAW, LAW.double() * 0.7, torch.cat([LAW.expand(40, -1).flatten(), torch.zeros(70)]) / 40])
def test_extreme_uniform_numbers_never_select_impossible_tokens(probs: Tensor) -> None:
    possible = probs.nonzero().flatten().tolist()
    for height, expected in ((0.0, possible[0]), (1 - 2.0**-53, possible[-1])):
        assert sample_inverse_cdf(probs[None], [height]).tolist() == [expected]


@pytest.mark.usefixtures("with_and_without_cpp")
def test_sample_inverse_cdf_matches_the_cumulative_sum() -> None:
    """Compared with one float64 sum, except at heights where rounding decides."""
    generator = torch.Generator().manual_seed(0)
    for vocab in (1, 63, 64, 65, 500, 4096):
        probs = torch.softmax(4 * torch.randn(50, vocab, generator=generator), dim=-1)
        probs[:, ::3] *= vocab == 1
        heights = torch.rand(50, 1, dtype=torch.float64, generator=generator)
        cumulative = probs.double().cumsum(-1) / probs.double().sum(-1, keepdim=True)
        sure = ((cumulative - heights).abs() > 1e-9).all(-1)
        assert sure.sum() > 40
        given = heights.flatten().tolist()
        assert torch.equal(sample_inverse_cdf(probs, given)[sure], (cumulative <= heights).sum(-1)[sure])


def test_bernoulli_follows_its_probabilities_including_0_and_1() -> None:
    sampler = Sampler(many(SamplingParams(temperature=1.0), 20_000), 9)
    falls = sampler.bernoulli(torch.tensor([0.0, 0.2, 0.9, 1.0]).expand(20_000, -1)).double().mean(dim=0)
    assert falls[0] == 0 and falls[3] == 1
    assert abs(falls[1] - 0.2) < 4 * math.sqrt(0.2 * 0.8 / 20_000)
    assert abs(falls[2] - 0.9) < 4 * math.sqrt(0.9 * 0.1 / 20_000)


def test_purposes_calls_rounds_and_columns_are_independent() -> None:
    """Any two random numbers of a request are uncorrelated: within 5 sigma of 0."""
    count = 20_000
    sampler = Sampler(many(SamplingParams(temperature=1.0), count), 9)
    later = Sampler(many(SamplingParams(temperature=1.0), count, length=1), 9)
    halves = torch.full((count, 2), 0.5)
    samples = [sampler.bernoulli(halves), sampler.bernoulli(halves), later.bernoulli(halves)]
    columns = torch.cat(samples, dim=1).double()
    two = torch.tensor([0.5, 0.5]).expand(count, -1)
    finals = [
        sampler.categorical(two),
        sampler.categorical(two),
        sampler.draw(two, 1),
        sampler.draw(two, 2),
        later.draw(two, 1),
    ]
    columns = torch.cat((columns, torch.stack(finals, dim=1).double()), dim=1)
    correlation = torch.corrcoef(columns.T) - torch.eye(columns.shape[1], dtype=torch.float64)
    assert correlation.abs().max() < 5 / math.sqrt(count)


def test_random_numbers_do_not_depend_on_the_batch_the_padding_or_the_sampler() -> None:
    together = Sampler(many(SamplingParams(temperature=1.0), 5), 9)
    alone = Sampler(many(SamplingParams(temperature=1.0), 5)[3:4], 9)
    halves = torch.full((5, 7), 0.5)
    assert torch.equal(together.bernoulli(halves)[3, :4], alone.bernoulli(halves[3:4, :4])[0])
    flat = torch.full((5, 9), 1 / 9)
    for index in range(3):  # the others draft longer
        together.draw(flat, index)
    assert together.draw(flat, 1)[3] == alone.draw(flat[3:4], 1)[0]
    assert together.categorical(flat)[3] == alone.categorical(flat[3:4])[0]


@pytest.mark.parametrize("other", [2**32, 2**40, 2**63, 2**64 - 1])
def test_all_bits_of_a_seed_count(other: int) -> None:
    uniform = torch.full((1, 10_000), 1e-4)
    samplers = [Sampler(many(SamplingParams(temperature=1.0), 1), 10_000) for _ in range(2)]
    for sampler, seed in zip(samplers, (0, other), strict=True):
        sampler.requests[0].seed = seed
    drawn = [(int(sampler.categorical(uniform)), int(sampler.draw(uniform, 0))) for sampler in samplers]
    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]


def test_a_new_round_uses_new_random_numbers() -> None:
    request = many(SamplingParams(temperature=1.0), 1)[0]
    sampler, flat = Sampler([request], 10_000), torch.full((1, 10_000), 1e-4)
    first = sampler.draw(flat, 0)
    request.token_ids.append(1)
    second = sampler.draw(flat, 0)
    assert first != second
    assert Sampler([request], 10_000).draw(flat, 0) == second


def test_uncoupled_tokens_are_draws_from_the_probs() -> None:
    requests = many(SamplingParams(temperature=1.0), 5000)
    logits = LAW.log().expand(5000, 2, -1)
    token_ids = Sampler(requests, 9).tokens(logits)
    assert chi_square(token_ids[:, 0], LAW) < LIMIT
    assert chi_square(token_ids[:, 1], LAW) < LIMIT
    assert torch.equal(Sampler(requests, 9).tokens(logits[:, 1:], start=1)[:, 0], token_ids[:, 1])


def test_mix_is_splitmix64_and_the_noise_is_its_vectorised_form() -> None:
    assert mix(GOLDEN) == 0xE220A8397B1DCDAF  # first output of splitmix64 with seed 0
    keys, size = [12345, -6], 40
    words = [[mix(key + (token + 1) * GOLDEN) >> 12 for token in range(size)] for key in keys]
    expected = [[-math.log(-math.log((word + 0.5) * 2.0**-52)) for word in row] for row in words]
    torch.testing.assert_close(gumbel(keys, size, torch.device("cpu")), torch.tensor(expected), rtol=1e-6, atol=1e-7)


# coupled noise


def test_coupled_tokens_are_the_same_for_any_split_batch_and_tree() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.5)
    requests = [request_of(params, seed=seed) for seed in range(3)]
    logits = random_logits(3, 5, dtype=torch.float32)
    drafts = torch.randint(VOCAB, (3, 4), generator=torch.Generator().manual_seed(5))
    whole = Sampler(requests, VOCAB, coupled=True).tokens(logits, drafts)
    for b in range(3):
        sampler = Sampler(requests[b : b + 1], VOCAB, coupled=True)
        for j in range(5):
            one = sampler.tokens(logits[b : b + 1, j : j + 1], drafts[b : b + 1], start=j)
            assert one.item() == whole[b, j]
    chain = torch.arange(-1, 3).expand(3, -1)
    assert torch.equal(Sampler(requests, VOCAB, coupled=True).tokens(logits, drafts, chain), whole)


def test_coupled_noise_of_a_tree_depends_on_depth() -> None:
    request, logits = request_of(SamplingParams(temperature=1.0)), random_logits(1, 1, dtype=torch.float32).expand(1, 4, -1)
    sampler, parents = Sampler([request], VOCAB, coupled=True), torch.tensor([[-1, -1, 0]])
    by_depth = sampler.tokens(logits[:, :3])[0]
    assert sampler.tokens(logits, torch.tensor([[1, 2, 3]]), parents)[0].tolist() == by_depth[[0, 1, 1, 2]].tolist()


def test_coupled_noise_depends_on_the_absolute_position() -> None:
    """The token sampled at a position does not depend on the number of drafts before it."""
    request, logits = request_of(SamplingParams(temperature=1.0)), random_logits(1, 4, dtype=torch.float32)
    sampler = Sampler([request], VOCAB, coupled=True)
    ahead = sampler.tokens(logits)
    request.token_ids += [1, 2]
    assert torch.equal(sampler.tokens(logits[:, 2:]), ahead[:, 2:])


def test_coupled_sampling_has_the_right_marginal() -> None:
    requests = many(SamplingParams(temperature=1.0), 5000)
    token_ids = Sampler(requests, 9, coupled=True).tokens(LAW.log().expand(5000, 2, -1))
    assert chi_square(token_ids[:, 0], LAW) < LIMIT
    assert chi_square(token_ids[:, 1], LAW) < LIMIT
    joint = torch.outer(LAW, LAW).flatten()
    assert chi_square(token_ids[:, 0] * 9 + token_ids[:, 1], joint) < 77.1  # 35 degrees of freedom, p = 5e-5


def test_coupled_draft_and_target_agree_at_least_as_often_as_the_bound() -> None:
    """At least (1 - TV) / (1 + TV): Daliri, Musco, Suresh, arXiv 2408.07978."""
    requests = many(SamplingParams(temperature=1.0), 4000)
    other = torch.tensor([0.05, 0.15, 0.0, 0.3, 0.3, 0.1, 0.05, 0.05, 0.0])
    target = Sampler(requests, 9, coupled=True).tokens(LAW.log().expand(4000, 1, -1))
    draft = Sampler(requests, 9, coupled=True).tokens(other.log().expand(4000, 1, -1))
    distance = float((LAW - other).abs().sum()) / 2
    bound = (1 - distance) / (1 + distance)
    assert float((target == draft).double().mean()) > bound - 4 * math.sqrt(bound * (1 - bound) / 4000)


def test_greedy_rows_have_no_noise() -> None:
    requests = [request_of(SamplingParams()), request_of(SamplingParams(temperature=1.0))]
    logits = random_logits(2, 6, dtype=torch.float32)
    token_ids = Sampler(requests, VOCAB, coupled=True).tokens(logits)
    assert torch.equal(token_ids[0], logits[0].argmax(dim=-1))
    assert not torch.equal(token_ids[1], logits[1].argmax(dim=-1))


TRUNCATIONS: list[dict[str, Any]] = [{}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 50, "top_p": 0.5}]
SPREADS = [(0.0, 1.0), (3.0, 0.05), (3.0, 0.8), (3.0, 5.0)]  # of the logits, and temperatures


def settings_and_logits(
    spread: float, temperature: float, vocab: int, dtype: torch.dtype
) -> tuple[list[SamplingParams], Tensor]:
    """Return every truncation at this temperature and one greedy request, and logits [B, 40, V]."""
    params = [SamplingParams(temperature=temperature, **each) for each in TRUNCATIONS] + [SamplingParams(temperature=0.0)]
    logits = spread * torch.randn(len(params), 40, vocab, generator=torch.Generator().manual_seed(vocab), dtype=dtype)
    logits[:, :, 1::7] = -math.inf
    return params, logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 63, 5000])
@pytest.mark.parametrize(("spread", "temperature"), SPREADS)
def test_the_operator_chooses_the_token_of_the_reference(
    spread: float, temperature: float, vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds of the noise exclude no token that wins: with equal logits the noise alone decides."""
    params, logits = settings_and_logits(spread, temperature, vocab, dtype)
    device, keys, counts = torch.device("cpu"), list(range(-7, 40 * len(params) - 7)), [40] * len(params)
    chosen, invalid = Shaping(params, vocab, device).choose(logits, keys, counts)
    monkeypatch.setattr(native, "serves", lambda device: False)
    expected, _ = Shaping(params, vocab, device).choose(logits, keys, counts)
    assert torch.equal(chosen, expected)
    assert not invalid


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("vocab", "top_k"), [(1, 1), (63, 1), (63, 40), (5000, 1), (5000, 6), (5000, 40)])
@pytest.mark.parametrize(("spread", "temperature"), SPREADS)
@pytest.mark.parametrize("has_noise", [False, True])
def test_the_operator_finds_the_likeliest_tokens_of_the_reference(
    has_noise: bool,
    spread: float,
    temperature: float,
    vocab: int,
    top_k: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first is the token that is chosen, and tokens that truncation removes have probability 0."""
    params, logits = settings_and_logits(spread, temperature if has_noise else 0.0, vocab, dtype)
    device, keys, counts = torch.device("cpu"), list(range(240)) if has_noise else [], [40] * len(params)
    shaping = Shaping(params, vocab, device)
    tokens, probs = shaping.likeliest(logits, keys, top_k)
    assert torch.equal(tokens[..., 0], shaping.choose(logits, keys, counts)[0])
    assert all(len(set(row)) == top_k for row in tokens.flatten(0, 1).tolist())
    monkeypatch.setattr(native, "serves", lambda device: False)
    reference = Shaping(params, vocab, device)
    expected_tokens, expected = reference.likeliest(logits, keys, top_k)
    torch.testing.assert_close(probs, expected, rtol=1e-4, atol=1e-7)
    values, kept = reference.noisy(logits, keys), probs > 1e-30  # any of equal values, and of 0, may be taken
    found, others = values.gather(-1, tokens), values.gather(-1, expected_tokens)
    torch.testing.assert_close(found[kept], others[kept], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("in_cpp", [False, True])
@pytest.mark.parametrize("top_k", [1, 3])
def test_the_likeliest_tokens_of_an_invalid_row_have_no_probability(
    top_k: int, in_cpp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shaping = Shaping([SamplingParams(), SamplingParams(temperature=1.0)], 8, torch.device("cpu"))
    monkeypatch.setattr(shaping, "_native", in_cpp and shaping._native)
    scores = torch.randn(2, 2, 8)
    scores[:, 1, 3] = math.nan
    _, probs = shaping.likeliest(scores, [1, 2, 3, 4], top_k)
    assert torch.equal(probs.isnan().all(-1), torch.tensor([[False, True], [False, True]]))


def test_a_row_that_overflows_at_its_temperature_is_invalid() -> None:
    shaping = Shaping([SamplingParams(temperature=1e-6, top_p=0.9)], 40, torch.device("cpu"))
    logits = torch.zeros(1, 1, 40)
    logits[0, 0, 3] = 1e34
    assert shaping.choose(logits, [1], [1])[1] == [0]
    assert shaping.likeliest(logits, [1], 2)[1].isnan().all()


def test_a_token_that_truncation_removes_is_not_chosen() -> None:
    """Of two probabilities that are equal after rounding top-p keeps the first, although the second has the higher logit."""
    logits = torch.full((1, 1, 40), -20.0)
    logits[0, 0, 3] = 0.1
    logits[0, 0, 7] = torch.nextafter(logits[0, 0, 3], torch.tensor(1.0))
    shaping = Shaping([SamplingParams(temperature=1.0, top_p=1e-6)], 40, torch.device("cpu"))
    assert shaping.probs(logits, [1])[0][0, 0].nonzero().tolist() == [[3]]
    assert {int(shaping.choose(logits, [key], [1])[0]) for key in range(20)} == {3}


@pytest.mark.parametrize("vocab", [20, 63, 151_936])
@pytest.mark.parametrize(("temperature", "top_k"), [(2.0, 0), (2.0, 1), (2.0, 5), (1e6, 20_000)])
def test_the_smallest_top_p_keeps_the_likeliest_token(temperature: float, top_k: int, vocab: int) -> None:
    """Multiplied by the mass that top-k keeps it would be 0."""
    params = SamplingParams(temperature=temperature, top_k=min(top_k, vocab), top_p=5e-324)
    shaping, logits = Shaping([params], vocab, torch.device("cpu")), torch.randn(1, 1, vocab)
    probs, _ = shaping.probs(logits, [1])
    assert probs.sum() == 1 == probs.max() and int(probs.argmax()) == int(shaping.choose(logits, [3], [1])[0])


def test_only_greedy_or_coupled_batches_are_deterministic() -> None:
    greedy, warm = request_of(SamplingParams()), request_of(SamplingParams(temperature=1.0))
    assert Sampler([greedy, greedy], VOCAB).is_deterministic
    assert not Sampler([greedy, warm], VOCAB).is_deterministic
    assert Sampler([greedy, warm], VOCAB, coupled=True).is_deterministic


def test_a_bias_of_minus_infinity_is_a_ban_for_grammars_too():
    """Else a draft after which the grammar allows only such a token would make its row of logits empty."""
    biased = token_mask(SamplingParams(logit_bias={3: -math.inf, 4: -9.0}), 6)
    assert torch.equal(biased, token_mask(SamplingParams(banned_token_ids=(3,)), 6))
    assert token_mask(SamplingParams(logit_bias={4: -9.0}), 6) is None


@pytest.mark.parametrize("parents", [None, torch.tensor([[-1, 0]])])
def test_penalties_move_drafts_made_on_the_cpu_to_the_logits(parents, monkeypatch):
    """On a GPU: torch without CUDA has no tensors there, so the meta device stands in, and only the call is checked."""
    devices = []
    monkeypatch.setattr(penalties._Counted, "penalise_", lambda _, *inputs: devices.extend(each.device.type for each in inputs))
    request = make_request([1, 2, 3], SamplingParams(repetition_penalty=1.5), num_prompt=2)
    counted = Penalties([request], 20, torch.device("meta"))
    monkeypatch.setattr(penalties._Counted, "update", lambda _: None)
    counted.apply_(torch.zeros(1, 3, 20, device="meta"), torch.tensor([[4, 5]]), parents, 0, [3])
    assert devices == ["meta"] * 3
