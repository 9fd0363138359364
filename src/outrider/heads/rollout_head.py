"""What every head that drafts one token after another has in common: it continues from the target's features.

Entry j of a sequence combines token j + 1 and feature j at position j; its output predicts the token after token j + 1.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from outrider.heads.feature_head import FeatureHead, Rotation


class RolloutHead(FeatureHead):
    """A head whose output stands for the target's next feature."""

    @property
    def imitates_features(self) -> bool:
        """Whether its outputs stand for the target's features, and are trained to equal them."""
        return False

    @abstractmethod
    def forward(self, token_ids: Tensor, hidden: Tensor, position_ids: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Map tokens [B, W] and the features before them [B, W, H] to [B, W, H], the input of ``logits`` and ``feedback``.

        ``rotation``: cosines and sines at these positions [B, W, D], if available.
        """

    @abstractmethod
    def feedback(self, out: Tensor) -> Tensor:
        """Return the stand-in for a target feature in the next step."""
