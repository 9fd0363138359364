"""Sampler settings of a batch of requests, and their random numbers.

A request's random numbers are hashes of (seed, committed length, purpose, index), independent of its batch and of padding.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from outrider.sampling.grammar_masks import GrammarMasks, token_mask
from outrider.sampling.min_tokens import MinTokens
from outrider.sampling.penalties import Penalties, drafts_before_rows
from outrider.sampling.randomness import key_of, sample_inverse_cdf, signed, uniforms
from outrider.sampling.shaping import Shaping
from outrider.types import Request, RequestFault, SamplingParams

_ACCEPT, _DRAFT, _NOISE, _NEXT_TOKEN = range(4)  # purposes of random numbers
_MAX_PARTS = 16  # cached samplers of parts of the batch


class InvalidLogits(RequestFault):
    """Logits of the requests ``request_ids`` that are NaN, +inf or all -inf."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        named = ", ".join(map(repr, request_ids))
        cause = "check the model's weights and dtype, or the grammar together with the allowed and banned tokens"
        message = f"NaN, infinite or fully masked logits for request {named}: {cause}"
        super().__init__(request_ids, message)


class Sampler:
    """Sampler of B requests, built once per batch composition; implements ``types.BatchSampler``, which describes the methods.

    Order: logit bias and token masks, ``min_tokens``, grammars, repetition penalty (prompt and output), presence and frequency
    penalties (output), temperature, top-k, top-p, min-p. Padding of ``drafts`` must be valid ids.
    The requests must have passed ``check_masks``.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        vocab_size: int,
        device: torch.device | str = "cpu",
        coupled: bool = False,
        eos_token_ids: Collection[int] = (),
        earlier: Sampler | None = None,
    ) -> None:
        """``eos_token_ids``: end-of-text tokens, which ``min_tokens`` masks; ``earlier``: see ``for_batch``."""
        self.requests, self.vocab_size, self.device, self.coupled = tuple(requests), vocab_size, torch.device(device), coupled
        self.eos_token_ids = eos_token_ids
        params = [request.params for request in self.requests]
        self._shaping = Shaping(params, vocab_size, self.device)
        self._all_greedy = all(self._shaping.is_greedy)
        biases, penalties = (None, None) if earlier is None else (earlier._biases, earlier._penalties)
        self._biases: _Biases = _Biases(self.requests, vocab_size, self.device, biases)
        self._min_tokens = MinTokens(self.requests, eos_token_ids, vocab_size, self.device)
        self._grammars = GrammarMasks(self.requests)
        self._penalties: Penalties = Penalties(self.requests, vocab_size, self.device, penalties)
        self._lens: list[int] = []
        self._num_calls: Counter[int] = Counter()  # of the round, by purpose
        self._prefixes: dict[int, list[int]] = {}  # purpose -> common part of each request's keys in the round
        self._noise_prefixes = [key_of(request.seed, _NOISE) for request in self.requests]
        self._parts: dict[tuple[int, ...], Sampler] = {}  # rows -> their sampler
        self._source: Sampler | None = None  # sampler that this one continues

    def for_batch(self, requests: Sequence[Request]) -> Sampler:
        return Sampler(requests, self.vocab_size, self.device, self.coupled, self.eos_token_ids, earlier=self)

    def take(self, rows: Sequence[int]) -> Sampler:
        key = tuple(rows)
        if key not in self._parts:
            if len(self._parts) == _MAX_PARTS:
                self._parts.clear()
            self._parts[key] = self._part([self.requests[b] for b in key], key)
        return self._parts[key]

    def _part(self, requests: Sequence[Request], rows: Sequence[int]) -> Sampler:
        """Create the sampler of some rows. A continued sampler lasts one round; its parts continue the parts of its source."""
        if self._source is None:
            return self.for_batch(requests)
        part = self._source.take(rows)
        pairs = enumerate(zip(requests, part.requests, strict=True))
        return part.continued({at: request for at, (request, before) in pairs if request is not before})

    def continued(self, requests: Mapping[int, Request]) -> Sampler:
        other = copy.copy(self)
        other.requests = tuple([requests.get(b, request) for b, request in enumerate(self.requests)])
        other._min_tokens = MinTokens(other.requests, self.eos_token_ids, self.vocab_size, self.device)
        other._grammars = GrammarMasks(other.requests)
        other._penalties = self._penalties.continued(requests)
        other._num_calls, other._prefixes, other._parts = Counter(), {}, {}
        other._source = self
        return other

    @property
    def is_deterministic(self) -> bool:
        return self._all_greedy or self.coupled

    def tokens(
        self,
        logits: Tensor,
        drafts: Tensor | None = None,
        parents: Tensor | None = None,
        start: int = 0,
        lens: Tensor | None = None,
    ) -> Tensor:
        # Coupled noise is Gumbel-max sampling with noise keyed by (seed, position): Daliri, Musco, Suresh, arXiv 2408.07978.
        if not self.is_deterministic:
            probs = self.probs(logits, drafts, parents, start, lens)
            return torch.stack([self.draw(probs[:, j], start + j) for j in range(probs.shape[1])], dim=1)
        widths = _widths(logits, lens)
        scores = self._scores(logits, drafts, parents, start, widths)
        width = scores.shape[1]
        token_ids, invalid = self._shaping.choose(scores, self._noise_keys(width, parents, start), widths)
        self._check(invalid, width)
        return token_ids

    def probs(
        self,
        logits: Tensor,
        drafts: Tensor | None = None,
        parents: Tensor | None = None,
        start: int = 0,
        lens: Tensor | None = None,
    ) -> Tensor:
        widths = _widths(logits, lens)
        scores = self._scores(logits, drafts, parents, start, widths)
        probs, invalid = self._shaping.probs(scores, widths)
        self._check(invalid, scores.shape[1])
        return probs

    def likeliest(
        self, logits: Tensor, top_k: int, drafts: Tensor | None = None, parents: Tensor | None = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        scores = self._scores(logits, drafts, parents, start, _widths(logits, None))
        return self._shaping.likeliest(scores, self._noise_keys(scores.shape[1], parents, start), top_k)

    def bernoulli(self, probs: Tensor) -> Tensor:
        uniform = torch.tensor(self._uniforms(_ACCEPT, self._next_call(_ACCEPT), probs.shape[1]), dtype=torch.float64)
        return uniform.view(probs.shape).to(probs.device) < probs

    def categorical(self, probs: Tensor) -> Tensor:
        call = self._next_call(_NEXT_TOKEN)
        return sample_inverse_cdf(probs, [uniform for (uniform,) in self._uniforms(_NEXT_TOKEN, call, 1)])

    def draw(self, probs: Tensor, index: int) -> Tensor:
        self._sync_round()
        return sample_inverse_cdf(probs, [uniform for (uniform,) in self._uniforms(_DRAFT, index, 1)])

    def _scores(self, logits: Tensor, drafts: Tensor | None, parents: Tensor | None, start: int, widths: list[int]) -> Tensor:
        """Return logits [B, M, V] with bias, masks and penalties; the same tensor if nothing applies."""
        if logits.shape[-1] != self.vocab_size:
            raise ValueError(f"logits have {logits.shape[-1]} columns: expected the vocabulary's {self.vocab_size}")
        scores = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        for rules in (self._biases, self._min_tokens, self._grammars, self._penalties):
            if not rules.is_empty:
                scores = scores.clone() if scores is logits else scores
                rules.apply_(scores, drafts, parents, start, widths)
        return scores

    def _check(self, invalid: Sequence[int], width: int) -> None:
        """Raise ``InvalidLogits`` if there are ``invalid`` rows, of ``width`` per request."""
        if invalid:
            raise InvalidLogits([self.requests[b].request_id for b in sorted({row // width for row in invalid})])

    def _sync_round(self) -> None:
        """Start a round when committed tokens were added: reset counters."""
        lens = [len(request.token_ids) for request in self.requests]
        if lens != self._lens:
            self._lens = lens
            self._num_calls.clear()
            self._prefixes.clear()

    def _next_call(self, purpose: int) -> int:
        """Return the number of this call for the purpose in this round."""
        self._sync_round()
        self._num_calls[purpose] += 1
        return self._num_calls[purpose]

    def _uniforms(self, purpose: int, call: int, count: int) -> list[list[float]]:
        """Return ``count`` uniform numbers in [0, 1) for each of the B requests."""
        prefixes = self._prefixes.get(purpose)
        if prefixes is None:
            numbered = zip(self.requests, self._lens, strict=True)
            prefixes = self._prefixes[purpose] = [key_of(request.seed, purpose, length) for request, length in numbered]
        return [uniforms(key_of(call, prefix=prefix), count) for prefix in prefixes]

    def _noise_keys(self, width: int, parents: Tensor | None, start: int) -> list[int]:
        """Return keys of the noise of B * M rows of logits, by seed and position; none if all rows are greedy."""
        if self._all_greedy:
            return []
        num_drafts = drafts_before_rows(parents, start, width, len(self.requests))
        return [
            signed(key_of(len(request.token_ids) + num_before, prefix=prefix))
            for request, prefix, of_rows in zip(self.requests, self._noise_prefixes, num_drafts, strict=True)
            for num_before in of_rows
        ]


def _widths(logits: Tensor, lens: Tensor | None) -> list[int]:
    """Return the number of valid rows of logits [B, M, V] per request: the root's and its drafts'."""
    batch, width = logits.shape[:2]
    return [width] * batch if lens is None else [min(1 + n, width) for n in lens.tolist()]


class _Biases:
    """Logit bias and token masks of the requests that have any."""

    def __init__(
        self, requests: Sequence[Request], vocab_size: int, device: torch.device, earlier: _Biases | None = None
    ) -> None:
        """``earlier``: of another batch, whose biases of the same requests are shared."""
        known = {} if earlier is None else {request: bias for _, request, bias in earlier._rows}
        self._rows: list[tuple[int, Request, Tensor]] = []
        for b, request in enumerate(requests):
            bias = known[request] if request in known else _bias_of(request.params, vocab_size)
            if bias is not None:
                self._rows.append((b, request, bias.to(device)))
        self.is_empty = not self._rows

    def apply_(self, scores: Tensor, drafts: Tensor | None, parents: Tensor | None, start: int, widths: Sequence[int]) -> None:
        """Add to the first ``widths[b]`` rows of scores [B, M, V]. ``drafts``, ``parents`` and ``start`` are not read."""
        # once, as all scores have the same dtype
        self._rows = [(b, request, bias.to(scores.dtype)) for b, request, bias in self._rows]
        for b, _, bias in self._rows:
            scores[b, : widths[b]] += bias


def _bias_of(params: SamplingParams, vocab_size: int) -> Tensor | None:
    """Return logit bias and token masks of a request as one addend float64 [V]; None without any."""
    mask = token_mask(params, vocab_size)
    if mask is None and not params.logit_bias:
        return None
    bias = torch.zeros(vocab_size, dtype=torch.float64)
    if params.logit_bias:
        bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()), dtype=bias.dtype)
    return bias if mask is None else bias.masked_fill_(~mask, -math.inf)
