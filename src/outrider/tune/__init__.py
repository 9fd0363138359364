"""Cost and gain of speculation, and the adaptive number of drafts per round."""

from outrider.tune.policy import DraftLengthPolicy

__all__ = ["DraftLengthPolicy"]
