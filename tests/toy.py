"""Reference models small enough to enumerate, and a slow reference sampler in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.outputs import Completion, Generation
from outrider.types import Request, SamplingParams


class TableLM:
    """Language model given by a table: the logits depend on the last ``order`` tokens."""

    def __init__(self, vocab_size: int = 3, seed: int = 0, order: int = 2, spread: float = 1.2) -> None:
        self.vocab_size, self.seed, self.order, self.spread = vocab_size, seed, order, spread
        self._table: dict[tuple[int, ...], Tensor] = {}

    def logits(self, text: Sequence[int]) -> Tensor:
        """Return the logits after a sequence: float64 [V]."""
        context = tuple(text[-self.order :])
        if context not in self._table:
            number = self.seed
            for token in context:
                number = number * (self.vocab_size + 1) + token + 1
            generator = torch.Generator().manual_seed(number)
            self._table[context] = self.spread * torch.randn(self.vocab_size, dtype=torch.float64, generator=generator)
        return self._table[context]

    def batch(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits after each sequence: float64 [B, V]."""
        return torch.stack([self.logits(text) for text in texts])


def make_request(
    token_ids: Sequence[int],
    params: SamplingParams | None = None,
    num_prompt: int | None = None,
    seed: int = 0,
    name: str = "r",
) -> Request:
    """Return a request whose first ``num_prompt`` tokens (default: all) are its prompt."""
    num_prompt = len(token_ids) if num_prompt is None else num_prompt
    return Request(name, list(token_ids), num_prompt, params or SamplingParams(), seed)


def reference_probs(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Sequence[int] = (),
) -> list[float]:
    """Return the next token's distribution: the sampler's documented steps, token by token in Python floats."""
    scores = [float(score) for score in logits]
    for token in range(len(scores)):
        scores[token] += params.logit_bias.get(token, 0.0)
        if token in params.banned_token_ids or (params.allowed_token_ids is not None and token not in params.allowed_token_ids):
            scores[token] = -math.inf
        if token in (*params.stop_token_ids, *eos_token_ids) and len(output) < params.min_tokens:
            scores[token] = -math.inf
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    best = max(scores)
    if params.temperature == 0:
        return [float(token == scores.index(best)) for token in range(len(scores))]
    scores = [score / params.temperature for score in scores]
    if params.top_k:
        border = sorted(scores, reverse=True)[min(params.top_k, len(scores)) - 1]
        scores = [score if score >= border else -math.inf for score in scores]
    probs = _softmax(scores)
    kept, mass = set(), 0.0
    for token in sorted(range(len(probs)), key=lambda token: (-probs[token], token)):
        if mass < params.top_p:
            kept.add(token)
        mass += probs[token]
    least = params.min_p * max(probs)
    kept = {token for token in kept if probs[token] >= least}
    return _softmax([score if token in kept else -math.inf for token, score in enumerate(scores)])


def _softmax(scores: Sequence[float]) -> list[float]:
    best = max(scores)
    weights = [math.exp(score - best) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def outputs_of(generations: Sequence[Generation]) -> list[Completion]:
    """Return all samples of all prompts, in order."""
    return [completion for generation in generations for completion in generation.outputs]
