"""Converts logits to probabilities and tokens, for draft and target. Independent of models, verifiers and the loop."""

from outrider.sampling.logprobs import raw_logprobs, top_logprobs
from outrider.sampling.sampler import InvalidLogits, Sampler

__all__ = ["InvalidLogits", "Sampler", "raw_logprobs", "top_logprobs"]
