"""Base class of heads that draft one token after another, starting from the target's features.

Entry j of a sequence combines token j + 1 and feature j at position j; its output predicts the token after token j + 1.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from outrider.heads.feature_head import FeatureHead, Rotation


class RolloutHead(FeatureHead):
    """A head whose output replaces the target's next feature."""

    imitates_features: bool = False  # whether outputs are trained to equal the target's features

    @abstractmethod
    def forward(self, token_ids: Tensor, hidden: Tensor, position_ids: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Map tokens [B, W] and the features before them [B, W, H] to [B, W, H], the input of ``logits`` and ``feedback``.

        ``rotation``: cosines and sines at these positions [B, W, D], if available.
        """

    @abstractmethod
    def feedback(self, out: Tensor) -> Tensor:
        """Return the input of the next step that replaces the target's feature."""
