"""Top-k, top-p and min-p compared with the slow reference, in C++ and in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor
from toy import reference_probs

from outrider import native
from outrider.sampling import Sampler
from outrider.sampling.shaping import Shaping, reference_truncated
from outrider.types import Request, SamplingParams

CUTS = [(k, top_p, min_p) for k in (0, 1, 3, 40, 400) for top_p in (1e-6, 0.3, 0.95, 0.9999, 1.0) for min_p in (0.0, 0.1, 1.0)]


def native_truncated(probs: Tensor, cuts: Tensor) -> Tensor:
    """Apply the C++ implementation at temperature 1 to the logarithms of probabilities."""
    if not native.load():
        pytest.skip("no C++ compiler")
    settings = torch.cat((torch.ones(len(cuts), 1, dtype=torch.float64), cuts), dim=1)
    kept: Tensor = torch.ops.outrider.shape_probs(probs.log(), settings, [probs.shape[1]] * len(probs))[0]
    return kept


@pytest.fixture(params=[native_truncated, reference_truncated])
def truncate(request: pytest.FixtureRequest) -> Callable[[Tensor, Tensor], Tensor]:
    form: Callable[[Tensor, Tensor], Tensor] = request.param
    return lambda probs, cuts: form(probs.clone().unsqueeze(1), cuts).squeeze(1)


def cuts_of(*rows: tuple[float, float, float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def random_probs(rows: int, vocab: int, spread: float = 3.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return torch.softmax(spread * torch.randn(rows, vocab, generator=generator, dtype=torch.float64), dim=-1).to(dtype)


@pytest.mark.parametrize("vocab", [5, 1000])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_the_distribution_equals_the_reference(truncate: Callable[[Tensor, Tensor], Tensor], vocab: int, spread: float) -> None:
    """All settings in one batch, in which rows need few candidates, many, or all tokens."""
    cuts = [(k if k < vocab else 0, top_p, min_p) for k, top_p, min_p in CUTS]
    kept = truncate(random_probs(len(CUTS), vocab, spread), cuts_of(*cuts))
    torch.testing.assert_close(kept, reference_laws(vocab, spread), rtol=1e-11, atol=1e-13)


@cache
def reference_laws(vocab: int, spread: float) -> Tensor:
    """Return the slow reference's distribution for each setting: float64 [cuts, V]."""
    laws = []
    for row, (k, top_p, min_p) in zip(random_probs(len(CUTS), vocab, spread), CUTS, strict=True):
        params = SamplingParams(temperature=1.0, top_k=k if k < vocab else 0, top_p=top_p, min_p=min_p)
        laws.append(reference_probs(row.log().tolist(), [], [], params))
    return torch.tensor(laws, dtype=torch.float64)


def test_both_implementations_agree_in_float32_and_on_several_rows_per_request() -> None:
    probs = random_probs(len(CUTS), 4096, dtype=torch.float32)
    probs = probs.unsqueeze(1).repeat(1, 3, 1)
    native, reference = native_truncated(probs.clone(), cuts_of(*CUTS)), reference_truncated(probs.clone(), cuts_of(*CUTS))
    assert torch.equal(native > 0, reference > 0)
    torch.testing.assert_close(native, reference, rtol=3e-6, atol=1e-9)


def test_a_row_does_not_depend_on_other_rows() -> None:
    probs = random_probs(len(CUTS), 4096, dtype=torch.float32)
    together = native_truncated(probs.clone().unsqueeze(1), cuts_of(*CUTS))
    for row, cut in enumerate(CUTS):
        assert torch.equal(native_truncated(probs[row : row + 1].clone().unsqueeze(1), cuts_of(cut))[0], together[row])


def test_top_p_keeps_the_smallest_set_and_lowest_ids_of_a_tie(truncate: Callable[[Tensor, Tensor], Tensor]) -> None:
    probs = torch.tensor([[0.1, 0.2, 0.2, 0.3, 0.2]])

    def kept(top_p: float, top_k: int = 0, min_p: float = 0.0) -> list[int]:
        return truncate(probs, cuts_of((top_k, top_p, min_p)))[0].nonzero().flatten().tolist()

    assert kept(0.45) == [1, 3]
    assert kept(0.65) == [1, 2, 3]
    assert kept(1e-9) == [3]
    assert kept(1.0) == [0, 1, 2, 3, 4]
    assert kept(0.6, top_k=2) == [1, 2, 3]  # ties make top-k keep four with a total of 0.9: three reach 0.54


def test_top_k_and_min_p_keep_ties(truncate: Callable[[Tensor, Tensor], Tensor]) -> None:
    probs = torch.tensor([[0.1, 0.3, 0.2, 0.2, 0.1, 0.1]]).repeat(2, 1)
    kept = truncate(probs, cuts_of((2, 1.0, 0.0), (0, 1.0, 0.6)))
    assert [row.nonzero().flatten().tolist() for row in kept] == [[1, 2, 3], [1, 2, 3]]


def test_tokens_of_probability_zero_stay_at_zero(truncate: Callable[[Tensor, Tensor], Tensor]) -> None:
    probs = torch.zeros(2, 300)
    probs[:, [7, 200]] = 0.5
    kept = truncate(probs, cuts_of((20, 1.0, 0.0), (0, 0.999, 0.0)))
    torch.testing.assert_close(kept, probs)
    assert torch.equal(kept > 0, probs > 0)


def test_nan_rows_do_not_affect_other_rows(truncate: Callable[[Tensor, Tensor], Tensor]) -> None:
    probs = random_probs(3, 1000, dtype=torch.float32)
    cuts = cuts_of(*[(5, 0.9, 0.01)] * 3)
    expected = truncate(probs, cuts)
    probs[1] = math.nan
    assert torch.equal(truncate(probs, cuts)[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("in_cpp", [False, True])
def test_nan_scores_of_a_greedy_request_are_noticed_beside_sampled_ones(in_cpp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shaping = Shaping([SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)], 8, torch.device("cpu"))
    monkeypatch.setattr(shaping, "_native", in_cpp and shaping._native)
    scores = torch.randn(2, 1, 8)
    scores[0, 0, 3] = math.nan
    assert shaping.probs(scores, [1, 1])[1] == [0]


@pytest.mark.parametrize("coupled", [False, True])
def test_undefined_rows_after_a_requests_drafts_are_ignored(coupled: bool) -> None:
    params = SamplingParams(temperature=1.0, top_k=3, top_p=0.9, min_p=0.01)
    requests = [Request(f"r{seed}", [1], 1, params, seed) for seed in range(2)]
    sampler, logits = Sampler(requests, 40, coupled=coupled), torch.randn(2, 3, 40)
    logits[1, 2] = math.nan
    judge = sampler.tokens if coupled else sampler.probs
    assert torch.equal(judge(logits, lens=torch.tensor([2, 1]))[:, :2], judge(logits[:, :2]))


def test_only_rows_with_truncation_settings_are_truncated() -> None:
    wide, narrow, greedy = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=2), SamplingParams(top_k=2)
    requests = [Request("r", [1], 1, params, 0) for params in (wide, narrow, greedy)]
    kept = Sampler(requests, 40).probs(torch.randn(3, 1, 40)) > 0
    assert kept.sum(-1).flatten().tolist() == [40, 2, 1]
