"""Sampler settings of a batch of requests, and their random numbers.

A request's random numbers do not depend on its batch or on padding: those for acceptance and drafts are hashes of (seed,
committed length, purpose, index), and the last token of a round uses one number of the request's generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.sampling.grammar_masks import GrammarMasks, token_mask
from outrider.sampling.penalties import Penalties, path_mask
from outrider.sampling.randomness import GOLDEN, first_above, gumbel, key_of, signed, uniforms
from outrider.sampling.shaping import Shaping
from outrider.types import OutriderError, Request, RequestFault

_ACCEPT, _DRAFT, _NOISE = range(3)  # purposes of random numbers
_MAX_PARTS = 16  # cached samplers of parts of the batch


class InvalidLogits(RequestFault):
    """Logits of the requests ``request_ids`` that are NaN, +inf or all -inf."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        named = ", ".join(map(repr, request_ids))
        message = f"NaN, infinite or fully masked logits for request {named}: check the model's weights and dtype"
        super().__init__(request_ids, message)


class Sampler:
    """Sampler of B requests, built once per batch composition; implements ``types.BatchSampler``, which explains the arguments.

    Order: logit bias and token masks, grammars, repetition penalty (prompt and output), presence and frequency penalties
    (output), temperature, top-k, top-p, min-p. Padding of ``drafts`` must be valid ids.
    Raises ``OutriderError`` for a token id outside the vocabulary.
    """

    def __init__(
        self, requests: Sequence[Request], vocab_size: int, device: torch.device | str = "cpu", coupled: bool = False
    ) -> None:
        self.requests, self.vocab_size, self.device, self.coupled = tuple(requests), vocab_size, torch.device(device), coupled
        params = [request.params for request in self.requests]
        self._shaping = Shaping(params, vocab_size, self.device)
        self._all_greedy = all(self._shaping.is_greedy)
        self._bias = _bias_of(self.requests, vocab_size, self.device)
        self._grammars = GrammarMasks(self.requests)
        self._penalties = Penalties(self.requests, vocab_size, self.device)
        self._lens: list[int] = []
        self._num_calls = 0  # calls of bernoulli() in the round
        self._prefixes: dict[int, list[int]] = {}  # purpose -> common part of each request's keys in the round
        self._noise: dict[tuple[int, int], Tensor] = {}  # (row, position) -> Gumbel noise [V]
        self._steps: Tensor | None = None  # [V] counter of the noise
        self._parts: dict[tuple[int, ...], Sampler] = {}  # rows -> their sampler

    def take(self, rows: Sequence[int]) -> Sampler:
        """Return the sampler of these requests, in this order."""
        key = tuple(rows)
        if key not in self._parts:
            if len(self._parts) == _MAX_PARTS:
                self._parts.clear()
            self._parts[key] = Sampler([self.requests[b] for b in key], self.vocab_size, self.device, self.coupled)
        return self._parts[key]

    @property
    def is_deterministic(self) -> bool:
        """Return whether the round is deterministic: every row is greedy, or noise is coupled to (seed, position)."""
        return self._all_greedy or self.coupled

    def tokens(
        self,
        logits: Tensor,
        drafts: Tensor | None = None,
        parents: Tensor | None = None,
        start: int = 0,
        lens: Tensor | None = None,
    ) -> Tensor:
        """Return tokens int64 [B, M] from [B, M, V]: argmax, coupled, or sampled. Raises ``InvalidLogits``.

        Coupled noise is Gumbel-max sampling with noise keyed by (seed, position): Daliri, Musco, Suresh, arXiv 2408.07978.
        """
        if not self.is_deterministic:
            probs = self.probs(logits, drafts, parents, start, lens)
            return torch.stack([self.draw(probs[:, j], start + j) for j in range(probs.shape[1])], dim=1)
        counts = _counts(logits, lens)
        best, token_ids = _max(self._argmax_scores(logits, drafts, parents, start, counts), counts)
        self._check(best, counts)
        return token_ids

    def probs(
        self,
        logits: Tensor,
        drafts: Tensor | None = None,
        parents: Tensor | None = None,
        start: int = 0,
        lens: Tensor | None = None,
    ) -> Tensor:
        """Return probabilities float32 [B, M, V] (float64 stays float64); greedy rows are one-hot. Raises ``InvalidLogits``."""
        counts = _counts(logits, lens)
        scores = self._scores(logits, drafts, parents, start, counts)
        if self._all_greedy:
            best, token_ids = _max(scores, counts)
            self._check(best, counts)
            return torch.zeros_like(scores).scatter_(-1, token_ids.unsqueeze(-1), 1.0)
        probs, witness = self._shaping.probs(scores, counts)
        self._check(witness, counts)
        return probs

    def confidences(
        self, logits: Tensor, drafts: Tensor | None = None, parents: Tensor | None = None, start: int = 0
    ) -> Tensor:
        """Estimate the probability [B, M, V] that ``tokens`` returns each token in a deterministic round, to grow trees.

        It is the softmax of the scores whose argmax is the token: for greedy rows at temperature 1, with noise if coupled.
        """
        return torch.softmax(self._argmax_scores(logits, drafts, parents, start, _counts(logits, None)), dim=-1)

    def _argmax_scores(
        self, logits: Tensor, drafts: Tensor | None, parents: Tensor | None, start: int, counts: list[int]
    ) -> Tensor:
        """Return scores [B, M, V] whose argmax is the token of a deterministic round."""
        scores = self._scores(logits, drafts, parents, start, counts)
        if self._all_greedy:
            return scores
        kept = self._shaping.probs(scores, counts)[0] > 0 if self._shaping.truncates else None
        scores = scores / self._shaping.temperatures.to(scores.dtype) + self._coupled_noise(scores, parents, start)
        return scores if kept is None else scores.masked_fill(~kept, -math.inf)

    def bernoulli(self, probs: Tensor) -> Tensor:
        """Draw Bernoulli variables: float [B, N] in [0, 1] -> bool [B, N]; entry (b, i) does not depend on B and N."""
        self._sync_round()
        self._num_calls += 1
        uniform = torch.tensor(self._uniforms(_ACCEPT, self._num_calls, probs.shape[1]), dtype=torch.float64)
        return uniform.view(probs.shape).to(probs.device) < probs

    def categorical(self, probs: Tensor) -> Tensor:
        """Sample one token per row with each request's generator: float [B, V] -> int64 [B]; never one with probability 0."""
        uniform = [torch.rand((), dtype=torch.float64, generator=request.generator).item() for request in self.requests]
        return first_above(probs, uniform)

    def draw(self, probs: Tensor, index: int) -> Tensor:
        """Sample draft ``index`` of the round, keyed by (seed, sequence length, index): float [B, V] -> int64 [B].

        For proposers: unlike ``categorical``, independent of how many drafts other requests have.
        """
        self._sync_round()
        return first_above(probs, [uniform for (uniform,) in self._uniforms(_DRAFT, index, 1)])

    def _scores(self, logits: Tensor, drafts: Tensor | None, parents: Tensor | None, start: int, counts: list[int]) -> Tensor:
        """Return logits [B, M, V] with bias, grammars and penalties; the same tensor if nothing applies."""
        if logits.shape[-1] != self.vocab_size:
            raise ValueError(f"logits have {logits.shape[-1]} columns: expected the vocabulary's {self.vocab_size}")
        scores = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        if self._bias is not None:
            self._bias = self._bias.to(scores.dtype)  # converted once, as all scores have the same dtype
            scores = scores + self._bias
        for rules in (self._grammars, self._penalties):
            if not rules.is_empty:
                scores = scores.clone() if scores is logits else scores
                rules.apply_(scores, drafts, parents, start, counts)
        return scores

    def _check(self, witness: Tensor, counts: list[int]) -> None:
        """Raise ``InvalidLogits`` unless the first ``counts[b]`` entries of each row of ``witness`` [B, M] are finite."""
        if math.isfinite(witness.sum().item()):
            return
        invalid = ~witness.isfinite().cpu() & (torch.arange(witness.shape[1]) < torch.tensor(counts).unsqueeze(-1))
        rows = invalid.any(dim=-1).nonzero().flatten().tolist()
        if rows:
            raise InvalidLogits([self.requests[b].request_id for b in rows])

    def _sync_round(self) -> None:
        """Start a round when committed tokens were added: reset trial counters and drop old noise."""
        lens = [len(request.token_ids) for request in self.requests]
        if lens != self._lens:
            self._lens, self._num_calls = lens, 0
            self._prefixes.clear()
            self._noise = {key: noise for key, noise in self._noise.items() if key[1] >= lens[key[0]]}

    def _uniforms(self, purpose: int, call: int, count: int) -> list[list[float]]:
        """Return ``count`` uniform numbers in [0, 1) for each of the B requests."""
        prefixes = self._prefixes.get(purpose)
        if prefixes is None:
            numbered = zip(self.requests, self._lens, strict=True)
            prefixes = self._prefixes[purpose] = [key_of(request.seed, purpose, length) for request, length in numbered]
        return [uniforms(key_of(call, prefix=prefix), count) for prefix in prefixes]

    def _coupled_noise(self, scores: Tensor, parents: Tensor | None, start: int) -> Tensor:
        """Return Gumbel noise [B, M, V] for the positions of the logits rows; 0 for greedy rows."""
        self._sync_round()
        width = scores.shape[1]
        if parents is None:
            depths = [list(range(start, start + width))] * len(self._lens)
        else:
            depths = path_mask(parents, start, width).sum(dim=-1).tolist()
        rows = [self._noise_at(b, length + depth) for b, length in enumerate(self._lens) for depth in depths[b]]
        return torch.stack(rows).view(scores.shape).to(scores.dtype)

    def _noise_at(self, row: int, position: int) -> Tensor:
        """Return noise [V], the same for drafts and target, cached until the position is committed."""
        noise = self._noise.get((row, position))
        if noise is None:
            if self._steps is None:
                self._steps = torch.arange(1, self.vocab_size + 1, device=self.device) * signed(GOLDEN)
            if self._shaping.is_greedy[row]:
                noise = torch.zeros(self.vocab_size, device=self.device)
            else:
                noise = gumbel(key_of(self.requests[row].seed, _NOISE, position), self._steps)
            self._noise[row, position] = noise
        return noise


def _counts(logits: Tensor, lens: Tensor | None) -> list[int]:
    """Return the number of valid rows of logits [B, M, V] per request: the root's and its drafts'."""
    batch, width = logits.shape[:2]
    return [width] * batch if lens is None else [min(1 + n, width) for n in lens.tolist()]


def _max(scores: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Return maximum and first argmax along the vocabulary: [B, M, V] -> [B, M] each; 0 in invalid rows."""
    if scores.device.type != "cpu":
        best, token_ids = scores.max(dim=-1)
        return best, token_ids
    # torch's CPU argmax is not vectorised; numpy's is ten times faster
    rows = scores.detach().numpy()
    if min(counts) == rows.shape[1]:
        return torch.from_numpy(rows.max(axis=-1)), torch.from_numpy(rows.argmax(axis=-1))
    highest, places = np.zeros(rows.shape[:2], rows.dtype), np.zeros(rows.shape[:2], np.int64)
    for b, count in enumerate(counts):
        rows[b, :count].max(axis=-1, out=highest[b, :count])
        rows[b, :count].argmax(axis=-1, out=places[b, :count])
    return torch.from_numpy(highest), torch.from_numpy(places)


def _bias_of(requests: Sequence[Request], vocab_size: int, device: torch.device) -> Tensor | None:
    """Return logit bias and token masks as one addend [B, 1, V]; None without any."""
    if not any(r.params.logit_bias or r.params.banned_token_ids or r.params.allowed_token_ids is not None for r in requests):
        return None
    bias = torch.zeros(len(requests), 1, vocab_size, dtype=torch.float64)
    for row, request in zip(bias[:, 0], requests, strict=True):
        params = request.params
        for ids in filter(None, (params.logit_bias, params.banned_token_ids, params.allowed_token_ids)):
            least, most = min(ids), max(ids)
            if least < 0 or most >= vocab_size:
                raise OutriderError(
                    f"invalid token id {least if least < 0 else most} in a bias or mask: expected an id of the vocabulary,"
                    f" 0 to {vocab_size - 1}"
                )
        if params.logit_bias:
            row[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()), dtype=row.dtype)
        mask = token_mask(params, vocab_size)
        if mask is not None:
            row.masked_fill_(~mask, -math.inf)
        if not bool((row > -math.inf).any()):
            raise OutriderError("allowed_token_ids and banned_token_ids leave no token: expected at least one")
    return bias.to(device)
