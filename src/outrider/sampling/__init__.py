"""Converts logits to probabilities and tokens, for draft and target. Independent of models, verifiers and the loop."""

from outrider.sampling.sampler import InvalidLogits, Sampler

__all__ = ["InvalidLogits", "Sampler"]
