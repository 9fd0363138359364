"""Which drafts survive: pure tensor functions of probabilities or tokens, blind to models, caches and sampler settings."""

from outrider.verifiers.base import Verifier

__all__ = ["Verifier"]
