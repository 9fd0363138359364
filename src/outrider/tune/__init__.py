"""What speculation costs and gains, and how many drafts a round should therefore ask for."""

from outrider.tune.policy import DraftLengthPolicy

__all__ = ["DraftLengthPolicy"]
