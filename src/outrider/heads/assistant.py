"""Gemma 4's assistants: a few layers that attend to the target's keys and values (ai.google.dev/gemma/docs/mtp/overview,
transformers' ``gemma4_assistant``).

The input is the embedding of a token and the target's last feature before it. The layers compute only queries. Keys and values
of committed tokens are read from the target's last layer of the same kind, so an assistant has no KV cache, and drafts do not
attend to each other. All drafts have the position of the last committed token. A projection of the output replaces the target's
next feature. With ordered embeddings, logits are computed only for the tokens of the most likely clusters.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from outrider.heads import gguf_heads
from outrider.heads.checkpoint import ASSISTANT_TENSOR, HeadFiles, TargetSizes, tensor_names
from outrider.heads.feature_head import RolloutHead, Rotation
from outrider.heads.head_runner import RolloutRunner, Step
from outrider.runner import ModelRunner, attention, gguf
from outrider.runner.attention import active_pass
from outrider.runner.kv_cache import CacheShape, LayerShape
from outrider.runner.loading import load_config, text_config
from outrider.runner.survey import without_weights
from outrider.types import IMPOSSIBLE_LOGIT, OutriderError

IGNORED = (r"rotary_emb\.", r"^copy$")  # the output head is the embedding
TABLE = "model.embed_tokens.weight"
ORDERING = ("masked_embedding.token_ordering",)


class AssistantHead(RolloutHead):
    """The assistant's modules, with new weights. ``stored``: kind of layer -> keys and values stored by the target."""

    def __init__(self, config: Any, decoder: Any, stored: dict[str, LayerShape]) -> None:
        """``config``: the assistant's; ``decoder``: its layers on the meta device, which become the head's."""
        super().__init__()
        self.text, self._stored = decoder.config, stored
        self.uses_targets_output, self.cache_shape = False, CacheShape.of({})
        hidden, self.target_hidden_size = int(self.text.hidden_size), int(config.backbone_hidden_size)
        self.pre_projection = nn.Linear(2 * self.target_hidden_size, hidden, bias=False)
        self.post_projection = nn.Linear(hidden, self.target_hidden_size, bias=False)
        self.layers, self.norm = (each.to_empty(device="cpu") for each in (decoder.layers, decoder.norm))
        self.rotary_emb: nn.Module = type(decoder.rotary_emb)(self.text)
        self.num_clusters = int(config.centroid_intermediate_top_k) if config.use_ordered_embeddings else 0
        if self.num_clusters:
            self.centroids = nn.Linear(hidden, int(config.num_centroids), bias=False)
            self.register_buffer("token_ordering", torch.arange(int(self.text.vocab_size)))  # tokens by cluster
            self.table = nn.Parameter(torch.empty(int(self.text.vocab_size), hidden))
        else:
            self.lm_head = nn.Linear(hidden, int(self.text.vocab_size), bias=False)
        self.register_buffer("draft_ids", None)
        self.text._attn_implementation = attention.NAME
        for layer in self.layers:
            own: Any = layer.self_attn
            if own.sliding_window is not None:  # transformers' mask counts from the position before the last stored one
                own.sliding_window += 2

    def check_fit(self, target: TargetSizes) -> None:
        self.hidden_states = (target.num_layers,)
        super().check_fit(target)
        self.check_vocabulary(int(self.text.vocab_size), target)
        for index, layer in enumerate(self.layers):
            own: Any = layer.self_attn
            shape = self._stored.get(own.layer_type)
            if shape is None:
                raise OutriderError(f"layer {index} of the head reads {own.layer_type}, which {target.name} does not have")
            heads = own.q_proj.out_features // own.head_dim
            if own.head_dim != shape.key_dim or own.head_dim != shape.value_dim or heads % shape.num_kv_heads:
                raise OutriderError(
                    f"model.layers.{index}.self_attn.q_proj.weight has {heads} heads of {own.head_dim}, but the keys of"
                    f" {target.name} in {own.layer_type} have {shape.num_kv_heads} of {shape.key_dim}"
                )

    def forward(self, token_ids: Tensor, hidden: Tensor, position_ids: Tensor, rotation: Rotation | None = None) -> Tensor:
        out: Tensor = self.pre_projection(torch.cat((self.embed(token_ids, hidden), hidden), -1))
        rotations = {kind: self.rotary_emb(out, position_ids, kind) for kind in self._stored}
        # Tokens of this pass have no keys and values: no token attends to the zeros in their slots.
        none = {
            kind: (out.new_zeros(1, shape.num_kv_heads, out.shape[1], shape.key_dim),) * 2
            for kind, shape in self._stored.items()
        }
        for layer in self.layers:
            kind = _kind_of(layer)
            out = layer(out, shared_kv_states=none, position_embeddings=rotations[kind], position_ids=position_ids)
        return self.norm(out)

    def feedback(self, out: Tensor) -> Tensor:
        return self.post_projection(out)

    def logits(self, out: Tensor) -> Tensor:
        if not self.num_clusters:
            return self.lm_head(out)
        clusters = self.centroids(out).topk(self.num_clusters, -1).indices
        order: Any = self.token_ordering
        tokens = order.view(self.centroids.out_features, -1)[clusters].flatten(-2)  # [..., clusters x tokens of each]
        chosen = (self.table[tokens].to(out.dtype) @ out[..., None]).squeeze(-1).float()  # float16 cannot hold IMPOSSIBLE_LOGIT
        return chosen.new_full((*out.shape[:-1], len(order)), IMPOSSIBLE_LOGIT).scatter(-1, tokens, chosen)


class AssistantRunner(RolloutRunner):
    """Runs an assistant over the KV cache of its target. Its own cache only counts the tokens whose features it has seen."""

    def __init__(self, head: AssistantHead, target: ModelRunner, bits: int | None = None) -> None:
        super().__init__(head, target, bits)
        sources, self._target_cache = sources_of(target), target.cache
        self._places = tuple(target.cache.shape.layer_places[sources[_kind_of(layer)]] for layer in head.layers)

    @torch.inference_mode()
    def extend(self, request_ids: Sequence[str], tokens: Sequence[Sequence[int]], features: Sequence[Sequence[Tensor]]) -> Step:
        rows = [self.cache.row(request_id) for request_id in request_ids]
        ends = [self.cache.cached_lens[row] + len(new) for row, new in zip(rows, tokens, strict=True)]
        if ends != [self._target_cache.cached_len(request_id) for request_id in request_ids]:
            raise RuntimeError("the features are of other tokens than those in the target's KV cache")
        for row, end in zip(rows, ends, strict=True):
            self.cache.cached_lens[row] = end
        last = torch.tensor([[new[-1]] for new in tokens], device=self.device)
        hidden = torch.stack([self.head.fuse([each[-1:].to(self.device, self.dtype) for each in own]) for own in features])
        return self._queried(request_ids, last, hidden)

    @torch.inference_mode()
    def level(self, request_ids: Sequence[str], token_ids: Tensor, hidden: Tensor, depth: int, sees: Tensor) -> Step:
        return self._queried(request_ids, token_ids, hidden).view(*token_ids.shape)

    def _queried(self, request_ids: Sequence[str], token_ids: Tensor, hidden: Tensor) -> Step:
        """Return the step after each of the tokens [B, W] and the features before them [B, W, Ht]: [B * W]."""
        cache, (batch, width) = self._target_cache, token_ids.shape
        rows = [cache.row(request_id) for request_id in request_ids]
        bases = [cache.cached_lens[row] for row in rows]
        cache.reserve(max(bases) + width)
        numbers = torch.tensor([*rows, *bases, *range(width, batch * width + 1, width)], device=self.device)
        row_ids, starts, ends = numbers.chunk(3)
        positions = starts.repeat_interleave(width)[None]
        unseen = torch.zeros(batch, width, width, dtype=torch.bool, device=self.device)
        layout = cache.pass_layout((positions, row_ids, starts, ends, unseen, *cache.tensors))
        with active_pass(replace(layout, layer_places=self._places)):
            out = self.head(token_ids.reshape(1, -1), hidden.flatten(0, 1)[None], positions)
        return Step(*self.head.step(out[0], self._vocab_size))

    def prepare(self) -> None:
        """Do nothing: an assistant runs eagerly, over another cache than its own."""


def is_assistant(folder: Path) -> bool:
    """Return whether a folder holds an assistant, by the names of its tensors."""
    return ASSISTANT_TENSOR in tensor_names(folder)


def check_files(folder: Path, target: TargetSizes) -> None:
    """Raise ``OutriderError`` for an assistant of another target, or a quantised one; only headers are read."""
    with torch.device("meta"):
        files = HeadFiles.read(folder)
    files.refuse_quantised(ORDERING)
    shape, inputs = files.tensors[ASSISTANT_TENSOR].shape, 2 * target.hidden_size
    if len(shape) != 2 or shape[1] != inputs:
        raise OutriderError(f"{ASSISTANT_TENSOR} has shape {list(shape)}, expected {inputs} inputs for this target")


def load(source: str | Path, target: ModelRunner) -> AssistantHead:
    """Read an assistant for this target, in float32. Raises ``OutriderError`` naming the tensor that does not fit."""
    files = HeadFiles.read(source)
    files.refuse_quantised(ORDERING)
    file = gguf.find(files.folder)
    config = load_config(files.folder) if file is None else gguf_heads.opened(file).config()
    own, other = text_config(config).model_type, text_config(target.model).model_type
    if not hasattr(config, "backbone_hidden_size") or own != other:
        raise OutriderError(f"{source} reads the KV cache of a {own} model, but {target.name} is a {other} model")
    if target.cache.shape.by_request:
        raise OutriderError(f"{target.name} has its own attention code, whose KV cache an assistant cannot read")
    places = {kind: target.cache.shape.layer_places[layer] for kind, layer in sources_of(target).items()}
    stored = {kind: target.cache.shape.kinds[place[0]][0] for kind, place in places.items() if place is not None}
    head = files.build(lambda: AssistantHead(config, _decoder(config), stored))
    head.check_fit(target)
    files.rename(lambda name: _own_name(name, head))
    files.fill(head, IGNORED, _stored_name)
    if head.num_clusters:
        order: Any = head.token_ordering
        if not torch.equal(order.sort().values, torch.arange(len(order))):
            raise OutriderError(f"{source}: masked_embedding.token_ordering must hold each of the {len(order)} tokens once")
    return head


def _decoder(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the assistant's layers without weights.

    Until 5.24 transformers cannot make them: its config refuses models all of whose layers read keys and values of others.
    """
    text = copy.deepcopy(text_config(config))
    kind = MODEL_MAPPING[type(text)]
    reading = property(lambda own: ["reuse"] * own.num_hidden_layers)
    text.__class__ = type(type(text).__name__, (type(text),), {"kv_sharing_modes": reading})
    return without_weights(text, kind)


def sources_of(target: ModelRunner) -> dict[str, int]:
    """Return the last layer of each kind that stores its own keys and values."""
    text: Any = text_config(target.model)
    kinds: list[str] = list(getattr(text, "layer_types", None) or ())
    num_own = target.num_layers - int(getattr(text, "num_kv_shared_layers", None) or 0)
    return {kind: layer for layer, kind in enumerate(kinds[:num_own])}


def _kind_of(layer: Any) -> str:
    return layer.self_attn.layer_type


def _own_name(name: str, head: AssistantHead) -> str:
    if name == TABLE:
        return "table" if head.num_clusters else "lm_head.weight"
    return "copy" if name == "lm_head.weight" else re.sub(r"^(model|masked_embedding)\.", "", name)


def _stored_name(name: str) -> str:
    if name in ("table", "lm_head.weight"):
        return TABLE
    for prefix, pattern in (("masked_embedding.", r"centroids|token_ordering"), ("model.", r"layers\.|norm\.")):
        if re.match(pattern, name):
            return prefix + name
    return name
