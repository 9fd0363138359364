"""Logits -> probabilities -> token: one place, for draft and target alike. Knows requests, and no model, verifier or loop.

A request's draws depend neither on its batch nor on padding: coins and drafts are hashes of (seed, committed length, purpose,
index), of which nothing is consumed, and a round's last token takes one number from the request's generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.types import OutriderError, Request

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_COIN, _DRAFT, _NOISE = range(3)  # purposes of a random number
_COLDEST = 1e-30  # a temperature below it would overflow float32 logits


class InvalidLogits(OutriderError):
    """Logits with NaN, +inf or nothing but -inf: ``rows`` of the batch, whose requests are ``request_ids``, cannot go on."""

    def __init__(self, rows: Sequence[int], request_ids: Sequence[str]) -> None:
        self.rows, self.request_ids = tuple(rows), tuple(request_ids)
        named = ", ".join(map(repr, self.request_ids))
        super().__init__(f"the model gave NaN, infinite or all-masked logits for request {named}; check its weights and dtype")


class Sampler:
    """The sampler set of B requests, built once per batch composition; also their ``types.Randomness``.

    Order: logit bias and token masks, repetition penalty (prompt and output), presence and frequency penalties (output),
    temperature, top-k, top-p, min-p. ``logits[:, j]`` follows draft ``start + j - 1`` (-1: the last committed token);
    ``drafts`` [B, >= start + M - 1] are the round's so far, a chain or, with ``parents``, a tree; padding must be valid ids.
    ``lens`` [B] says how many drafts of a row count: what is wrong beyond them is no error.
    Raises ``OutriderError`` for a token id outside the vocabulary.
    """

    def __init__(
        self, requests: Sequence[Request], vocab_size: int, device: torch.device | str = "cpu", coupled: bool = False
    ) -> None:
        self.requests, self.vocab_size, self.device, self.coupled = tuple(requests), vocab_size, torch.device(device), coupled
        params = [request.params for request in self.requests]
        self._greedy = [param.is_greedy for param in params]
        self._all_greedy = all(self._greedy)
        self._greedy_rows = torch.tensor([b for b, greedy in enumerate(self._greedy) if greedy], device=self.device)
        self._bias = _bias_of(self.requests, vocab_size, self.device)
        penalised = [b for b, param in enumerate(params) if param.has_penalties]
        self._penalties = _Penalties(self.requests, penalised, vocab_size, self.device) if penalised else None
        sampled = [None if param.is_greedy else param for param in params]
        self._temperature = self._column([1.0 if param is None else max(param.temperature, _COLDEST) for param in sampled], 1.0)
        top_k = [param.top_k if param and param.top_k < vocab_size else 0 for param in sampled]
        self._top_k = self._column([float(k) for k in top_k], 0.0)
        self._top_p = self._column([param.top_p if param else 1.0 for param in sampled], 1.0)
        self._min_p = self._column([param.min_p if param else 0.0 for param in sampled], 0.0)
        self._lens: list[int] = []
        self._num_tosses = 0  # calls of bernoulli() in the round
        self._noise: dict[tuple[int, int], Tensor] = {}  # (row, position) -> Gumbel noise [V]
        self._steps: Tensor | None = None  # [V] counter of the noise

    @property
    def is_deterministic(self) -> bool:
        """Every row is greedy, or noise is coupled to (seed, position): ``tokens()`` says it all, no coin is needed."""
        return self._all_greedy or self.coupled

    def tokens(
        self,
        logits: Tensor,
        drafts: Tensor | None = None,
        parents: Tensor | None = None,
        start: int = 0,
        lens: Tensor | None = None,
    ) -> Tensor:
        """[B, M, V] -> int64 [B, M]: the argmax (greedy), with coupled noise, or a draw. Raises ``InvalidLogits``.

        Coupled noise is Gumbel-max sampling with noise keyed by (seed, position): Daliri, Musco, Suresh, arXiv 2408.07978.
        """
        if not self.is_deterministic:
            probs = self.probs(logits, drafts, parents, start, lens)
            return torch.stack([self.draw(probs[:, j], start + j) for j in range(probs.shape[1])], dim=1)
        scores = self._scores(logits, drafts, parents, start)
        if not self._all_greedy:
            scores = scores + self._coupled_noise(scores, parents, start)
        best, token_ids = _max(scores)
        self._check(best, lens)
        return token_ids

    def probs(
        self,
        logits: Tensor,
        drafts: Tensor | None = None,
        parents: Tensor | None = None,
        start: int = 0,
        lens: Tensor | None = None,
    ) -> Tensor:
        """[B, M, V] -> float32 [B, M, V] (float64 stays so); greedy rows are one-hots. Raises ``InvalidLogits``."""
        scores = self._scores(logits, drafts, parents, start)
        if self._all_greedy:
            best, token_ids = _max(scores)
            self._check(best, lens)
            return torch.zeros_like(scores).scatter_(-1, token_ids.unsqueeze(-1), 1.0)
        probs = torch.softmax(scores, dim=-1)
        self._check(probs[..., 0], lens)  # softmax spreads a NaN over its row
        if self._greedy_rows.numel():
            best = scores[self._greedy_rows].argmax(dim=-1, keepdim=True)
            probs[self._greedy_rows] = torch.zeros_like(probs[self._greedy_rows]).scatter_(-1, best, 1.0)
        return probs

    def bernoulli(self, probs: Tensor) -> Tensor:
        """Independent coins: float [B, N] in [0, 1] -> bool [B, N]; coin (b, i) is the same whatever B and N."""
        self._sync_round()
        self._num_tosses += 1
        return self._uniforms(_COIN, self._num_tosses, probs.shape[1]) < probs

    def categorical(self, probs: Tensor) -> Tensor:
        """One draw a row, by each request's generator: float [B, V] -> int64 [B]; never a token of probability 0."""
        numbers = [[torch.rand((), dtype=torch.float64, generator=request.generator).item()] for request in self.requests]
        return self._invert(probs, torch.tensor(numbers, dtype=torch.float64, device=self.device))

    def draw(self, probs: Tensor, index: int) -> Tensor:
        """Draft ``index`` of the round: float [B, V] -> int64 [B], by a number that belongs to (seed, text length, index).

        What proposers draw with: how far the other requests are drafted does not matter, as it does with ``categorical``.
        """
        self._sync_round()
        return self._invert(probs, self._uniforms(_DRAFT, index, 1))

    def _column(self, values: list[float], neutral: float) -> float | Tensor | None:
        """Neutral everywhere: None; one value for all: a number; else [B, 1, 1]."""
        if all(value == neutral for value in values):
            return None
        if all(value == values[0] for value in values):
            return values[0]
        return torch.tensor(values, dtype=torch.float64, device=self.device).view(-1, 1, 1)

    def _scores(self, logits: Tensor, drafts: Tensor | None, parents: Tensor | None, start: int) -> Tensor:
        """The logits of the final distribution, -inf where it is 0: [B, M, V]."""
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        if logits.shape[-1] != self.vocab_size:
            raise ValueError(f"logits have {logits.shape[-1]} columns, the vocabulary has {self.vocab_size} tokens")
        if self._bias is not None:
            logits = logits + self._bias.to(logits.dtype)
        if self._penalties is not None:
            logits = self._penalties.apply(logits, drafts, parents, start)
        if self._temperature is not None:
            logits = logits / _like(self._temperature, logits)
        if self._top_k is not None:
            logits = keep_top_k(logits, self._top_k)
        if self._top_p is not None or self._min_p is not None:
            probs = torch.softmax(logits, dim=-1)
            if self._top_p is not None:
                logits = logits.masked_fill(~top_p_mask(probs, _like(self._top_p, probs)), -math.inf)
            if self._min_p is not None:
                logits = logits.masked_fill(probs < _like(self._min_p, probs) * probs.amax(dim=-1, keepdim=True), -math.inf)
        return logits

    def _check(self, witness: Tensor, lens: Tensor | None) -> None:
        """Raises ``InvalidLogits`` unless all of ``witness`` [B, M], within ``lens``, is finite."""
        if math.isfinite(witness.sum().item()):
            return
        invalid = ~witness.isfinite().cpu()
        if lens is not None:
            invalid &= torch.arange(witness.shape[1]) <= lens.cpu().unsqueeze(-1)
        rows = invalid.any(dim=-1).nonzero().flatten().tolist()
        if rows:
            raise InvalidLogits(rows, [self.requests[b].request_id for b in rows])

    def _sync_round(self) -> None:
        """A round begins when the committed text has grown: tosses count anew and noise of the past is forgotten."""
        lens = [len(request.token_ids) for request in self.requests]
        if lens != self._lens:
            self._lens, self._num_tosses = lens, 0
            self._noise = {key: noise for key, noise in self._noise.items() if key[1] >= lens[key[0]]}

    def _uniforms(self, purpose: int, call: int, count: int) -> Tensor:
        """float64 [B, count] in [0, 1)."""
        rows = []
        for request, length in zip(self.requests, self._lens, strict=True):
            key = _key(request.seed, purpose, length, call)
            rows.append([(_mix(key + i * _GOLDEN) >> 11) * 2.0**-53 for i in range(1, count + 1)])
        return torch.tensor(rows, dtype=torch.float64, device=self.device)

    @staticmethod
    def _invert(probs: Tensor, uniforms: Tensor) -> Tensor:
        """Inverse CDF in float64: the first token whose cumulative probability exceeds the uniform."""
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        height = uniforms * cumulative[:, -1:]
        return torch.searchsorted(cumulative, height, right=True).squeeze(-1)

    def _coupled_noise(self, scores: Tensor, parents: Tensor | None, start: int) -> Tensor:
        """Gumbel noise [B, M, V] of the positions that the logits rows draw; 0 for greedy rows."""
        self._sync_round()
        width = scores.shape[1]
        if parents is None:
            depths = [list(range(start, start + width))] * len(self._lens)
        else:
            depths = path_mask(parents, start, width).sum(dim=-1).tolist()
        rows = [self._noise_at(b, length + depth) for b, length in enumerate(self._lens) for depth in depths[b]]
        return torch.stack(rows).view(scores.shape).to(scores.dtype)

    def _noise_at(self, row: int, position: int) -> Tensor:
        """[V], kept until the position is committed: drafts and target read the same numbers, computed once."""
        noise = self._noise.get((row, position))
        if noise is None:
            if self._steps is None:
                self._steps = torch.arange(1, self.vocab_size + 1, device=self.device) * _signed(_GOLDEN)
            if self._greedy[row]:
                noise = torch.zeros(self.vocab_size, device=self.device)
            else:
                noise = _gumbel(_key(self.requests[row].seed, _NOISE, position), self._steps)
            self._noise[row, position] = noise
        return noise


class _Penalties:
    """Token counts of the rows that have penalties, kept up with the committed text at O(new tokens) a call."""

    def __init__(self, requests: Sequence[Request], rows: list[int], vocab_size: int, device: torch.device) -> None:
        self._requests = [requests[b] for b in rows]
        self._rows = None if len(rows) == len(requests) else torch.tensor(rows, device=device)
        self._num_counted = [0] * len(rows)
        self._seen = torch.zeros(len(rows), vocab_size, device=device)  # 1 where in prompt or output
        self._counts = torch.zeros(len(rows), vocab_size, device=device)  # in the output
        params = [request.params for request in self._requests]
        factors = [(param.repetition_penalty, param.presence_penalty, param.frequency_penalty) for param in params]
        table = torch.tensor(factors, dtype=torch.float64, device=device).view(-1, 3, 1, 1)
        self._repetition, self._presence, self._frequency = table.unbind(1)  # [R, 1, 1]

    def apply(self, logits: Tensor, drafts: Tensor | None, parents: Tensor | None, start: int) -> Tensor:
        """[B, M, V] -> [B, M, V] with the penalties that the tokens before each row, committed or drafted, cause."""
        self._count()
        part = logits if self._rows is None else logits[self._rows]
        counts, seen = self._counts.unsqueeze(1), self._seen.unsqueeze(1)  # [R, 1, V]
        if start + part.shape[1] > 1:
            if drafts is None:
                raise ValueError("penalties need the drafts that come before a row of logits")
            drafted = self._drafted(part, drafts, parents, start)
            counts, seen = counts + drafted, seen + drafted
        repetition = self._repetition.to(part.dtype)
        part = torch.where(seen > 0, torch.where(part > 0, part / repetition, part * repetition), part)
        part = part - self._presence.to(part.dtype) * (counts > 0) - self._frequency.to(part.dtype) * counts
        return part if self._rows is None else logits.index_copy(0, self._rows, part)

    def _count(self) -> None:
        for row, request in enumerate(self._requests):
            first, text = self._num_counted[row], request.token_ids
            if first == len(text):
                continue
            fresh = torch.tensor(text[first:], device=self._seen.device)
            self._seen[row, fresh] = 1.0
            output = fresh[max(request.num_prompt_tokens - first, 0) :]
            self._counts[row].index_add_(0, output, torch.ones_like(output, dtype=self._counts.dtype))
            self._num_counted[row] = len(text)

    def _drafted(self, part: Tensor, drafts: Tensor, parents: Tensor | None, start: int) -> Tensor:
        """How often each token stands on the path to each row: [R, M, V]."""
        if self._rows is not None:
            drafts = drafts[self._rows]
            parents = None if parents is None else parents[self._rows]
        batch, width = part.shape[:2]
        if parents is None:
            num_before = torch.arange(start, start + width, device=drafts.device).unsqueeze(-1)
            mask = (torch.arange(drafts.shape[1], device=drafts.device) < num_before).expand(batch, -1, -1)
        else:
            mask = path_mask(parents, start, width)
        where = drafts.unsqueeze(1).expand(-1, width, -1)
        return torch.zeros_like(part).scatter_add_(-1, where, mask.to(part.dtype))


def path_mask(parents: Tensor, start: int, width: int) -> Tensor:
    """[B, N] parents -> bool [B, width, N]: whether node n lies on the path from the root to node ``start + j - 1``."""
    batch, num_nodes = parents.shape
    reach = torch.zeros(batch, num_nodes, num_nodes + 1, device=parents.device)
    reach.scatter_(-1, (parents + 1).unsqueeze(-1), 1.0)  # column 0 is the root
    reach = reach[..., 1:] + torch.eye(num_nodes, device=parents.device)
    for _ in range(max(num_nodes - 1, 0).bit_length()):
        reach = (reach @ reach).clamp(max=1.0)
    reach = torch.cat((reach.new_zeros(batch, 1, num_nodes), reach), dim=1)
    return reach[:, start : start + width] > 0


def keep_top_k(scores: Tensor, top_k: float | Tensor) -> Tensor:
    """-inf below the k-th highest score of each row, ties with it kept, 0 keeping all: [B, M, V] -> [B, M, V]."""
    if not isinstance(top_k, Tensor):
        return scores.masked_fill(scores < _kth_highest(scores, int(top_k)), -math.inf)
    last = (top_k.long() - 1).clamp_min(0).expand(-1, scores.shape[1], 1)
    threshold = _descending(scores).gather(-1, last)
    return scores.masked_fill((scores < threshold) & (top_k > 0), -math.inf)


def top_p_mask(probs: Tensor, top_p: float | Tensor) -> Tensor:
    """The smallest set of likeliest tokens that reaches top_p, the token crossing it included: bool [B, M, V].

    Of equally likely tokens at the border the lowest ids are kept; top_p = 1 keeps all.
    """
    ordered = _descending(probs)
    num_kept = (ordered.cumsum(dim=-1) < top_p).sum(dim=-1, keepdim=True).clamp_max(probs.shape[-1] - 1) + 1
    border = ordered.gather(-1, num_kept - 1)
    mask = probs >= border
    if bool((mask.sum(dim=-1, keepdim=True) > num_kept).any()):
        above, level = probs > border, probs == border
        mask = above | (level & (level.cumsum(dim=-1) <= num_kept - above.sum(dim=-1, keepdim=True)))
    return mask | (top_p >= 1) if isinstance(top_p, Tensor) else mask


def raw_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probability of each token under the model itself, before any sampler setting: [..., V], [...] -> float32 [...]."""
    logits = logits.float()
    return logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` highest raw log-probabilities and their token ids: [..., V] -> float32 [..., count], int64 [..., count]."""
    highest, token_ids = logits.float().topk(min(count, logits.shape[-1]), dim=-1)
    return highest - logits.float().logsumexp(dim=-1, keepdim=True), token_ids


def _max(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and its first index along the vocabulary."""
    if scores.device.type != "cpu":
        best, token_ids = scores.max(dim=-1)
        return best, token_ids
    # torch's CPU argmax is not vectorised: numpy's is 10 times as fast
    token_ids = torch.from_numpy(scores.detach().numpy().argmax(axis=-1))
    return scores.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1), token_ids


def _descending(values: Tensor) -> Tensor:
    """Sorted along the vocabulary, highest first."""
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    # numpy sorts values with vector instructions, about 15 times as fast as torch's CPU sort
    return torch.from_numpy(np.sort(values.detach().numpy(), axis=-1)).flip(-1)


def _kth_highest(values: Tensor, k: int) -> Tensor:
    """[B, M, V] -> [B, M, 1]."""
    if values.device.type != "cpu":
        return values.topk(k, dim=-1).values[..., -1:]
    place = values.shape[-1] - k
    return torch.from_numpy(np.partition(values.detach().numpy(), place, axis=-1)[..., place : place + 1])


def _like(value: float | Tensor, other: Tensor) -> float | Tensor:
    return value.to(other.dtype) if isinstance(value, Tensor) else value


def _bias_of(requests: Sequence[Request], vocab_size: int, device: torch.device) -> Tensor | None:
    """Logit bias and token masks as one addend [B, 1, V]; None where there are none."""
    if not any(r.params.logit_bias or r.params.banned_token_ids or r.params.allowed_token_ids is not None for r in requests):
        return None
    bias = torch.zeros(len(requests), 1, vocab_size, dtype=torch.float64)
    for row, request in zip(bias[:, 0], requests, strict=True):
        params = request.params
        for token_id in (*params.logit_bias, *params.banned_token_ids, *(params.allowed_token_ids or ())):
            if not 0 <= token_id < vocab_size:
                raise OutriderError(f"token id {token_id} in the bias or mask is outside the vocabulary of {vocab_size}")
        if params.allowed_token_ids is not None:
            row.fill_(-math.inf)
            row[list(params.allowed_token_ids)] = 0.0
        for token_id, value in params.logit_bias.items():
            row[token_id] += value
        row[list(params.banned_token_ids)] = -math.inf
        if not bool((row > -math.inf).any()):
            raise OutriderError("the allowed and banned token ids leave no token to choose")
    return bias.to(device)


def _mix(word: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def _key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = _mix((key ^ part) + _GOLDEN)
    return key


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _gumbel(key: int, steps: Tensor) -> Tensor:
    """Gumbel noise float32 [V]: ``_mix(key + step)`` in wrapping int64 arithmetic, so the same on every device."""
    word = steps + _signed(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        word = (word ^ ((word >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    uniform = (((word >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52  # strictly inside (0, 1)
    return uniform.log_().neg_().log_().neg_().float()
