"""Verifiers: pure tensor functions of probabilities or tokens, independent of models, caches and sampler settings."""

from outrider.verifiers.base import Verifier

__all__ = ["Verifier"]
