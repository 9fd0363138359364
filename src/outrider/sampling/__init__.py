"""Logits -> probabilities -> token: one place, for draft and target alike. Knows requests, and no model, verifier or loop."""

from outrider.sampling.logprobs import raw_logprobs, top_logprobs
from outrider.sampling.sampler import InvalidLogits, Sampler

__all__ = ["InvalidLogits", "Sampler", "raw_logprobs", "top_logprobs"]
