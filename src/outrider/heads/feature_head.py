"""Base classes of heads with their own layers over the target's features.

A head may use the target's embedding, output head and logit post-processing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from outrider.heads.checkpoint import TargetSizes, check_ids
from outrider.heads.postprocessing import Postprocess
from outrider.runner.kv_cache import CacheShape
from outrider.types import OutriderError, over_vocabulary

Rotation = tuple[Tensor, Tensor]  # cosines and sines


class Norm(nn.RMSNorm):
    """transformers' RMS norm as one operation instead of six; in mixed precision it computes in the weight's type."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class FeatureHead(nn.Module):
    """A head with its own layers. ``share_target_modules`` provides the target's embedding and output head if it uses them."""

    target_hidden_size: int
    hidden_states: tuple[int, ...]  # target hidden states that it reads, numbered as in ``types.Scores``
    uses_targets_output: bool  # whether drafting uses (and so reads) the target's output head
    cache_shape: CacheShape  # of its layers
    settings: object  # what a compiled pass depends on besides weights and modules; ``str`` of it says so in full
    fc: nn.Linear
    layers: nn.ModuleList
    rotary_emb: nn.Module
    draft_ids: Tensor | None  # [Vd] target id of each draft id; None: identical

    def __init__(self) -> None:
        super().__init__()
        # Embedding and output head of the target, in a list, so that they are not registered as modules of the head.
        self.target_modules: list[nn.Module] = []
        self._postprocess: Postprocess | None = None

    def check_fit(self, target: TargetSizes) -> None:
        """Raise ``OutriderError`` for a head whose sizes do not fit this target."""
        if self.target_hidden_size != target.hidden_size:
            raise OutriderError(
                f"the head expects hidden size {self.target_hidden_size}, but {target.name} has {target.hidden_size}"
            )
        if not 0 <= min(self.hidden_states) <= max(self.hidden_states) <= target.num_layers:
            raise OutriderError(
                f"the head reads hidden states {self.hidden_states}, but {target.name} has {target.num_layers} layers"
            )
        check_ids(self.draft_ids, target.vocab_size, "the head's draft vocabulary", target.name)

    @abstractmethod
    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Combine target features, each [..., Ht], into one input [..., H]."""

    @abstractmethod
    def logits(self, out: Tensor) -> Tensor:
        """Map [..., H] to logits [..., Vd] over the head's vocabulary."""

    def share_target_modules(self, embedding: nn.Module, output: nn.Module, postprocess: Postprocess | None = None) -> None:
        """Set the target's embedding, output head and logit post-processing."""
        self.target_modules, self._postprocess = [embedding, output], postprocess

    def target_logits(self, features: Tensor) -> Tensor:
        """Return the target's logits of its last features: [..., H] -> [..., V]."""
        values: Tensor = self.target_modules[1](features)
        return values if self._postprocess is None else self._postprocess(values)

    def embed(self, token_ids: Tensor, like: Tensor) -> Tensor:
        """Return the embeddings [..., H] of tokens, the head's own or the target's, in the dtype of ``like``."""
        embedding = getattr(self, "embed_tokens", None) or self.target_modules[0]
        embeds: Tensor = embedding(token_ids)
        return embeds.to(like.dtype)

    def to_target_vocabulary(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Expand [..., Vd] to float32 [..., V] over the target's vocabulary, ``IMPOSSIBLE_LOGIT`` for tokens the head lacks."""
        return over_vocabulary(logits.float(), vocab_size, self.draft_ids)

    def check_vocabulary(self, vocab_size: int, target: TargetSizes) -> None:
        """Raise ``OutriderError`` if the head was made for a vocabulary of another size than the target's."""
        if vocab_size != target.vocab_size:
            raise OutriderError(f"the head was made for {vocab_size} tokens, but {target.name} has {target.vocab_size}")

    def check_shared_size(self, hidden_size: int, target: TargetSizes) -> None:
        """Raise ``OutriderError`` if a head of this size cannot use the target's embedding or output head."""
        if hidden_size != target.hidden_size:
            raise OutriderError(f"the head has hidden size {hidden_size} but no embedding or output head of that size")


class RolloutHead(FeatureHead):
    """A head that drafts one token after another: its output replaces the target's next feature.

    Entry j of a sequence combines token j + 1 and feature j at position j; its output predicts the token after token j + 1.
    """

    imitates_features: bool = False  # whether outputs are trained to equal the target's features

    @abstractmethod
    def forward(self, token_ids: Tensor, hidden: Tensor, position_ids: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Map tokens [B, W] and the features before them [B, W, H] to [B, W, H], the input of ``logits`` and ``feedback``.

        ``rotation``: cosines and sines at these positions [B, W, D], if available.
        """

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        return features[0]

    def feedback(self, out: Tensor) -> Tensor:
        """Return the input of the next step that replaces the target's feature."""
        return out

    def step(self, out: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return the feedback [..., H] of outputs, and their logits float32 [..., V] over the target's vocabulary."""
        return self.feedback(out), self.to_target_vocabulary(self.logits(out), vocab_size)
