"""Multi-token-prediction heads: one decoder layer of the target's own kind over the next token's embedding and the target's
last feature (DeepSeek-V3, arXiv 2412.19437, section 2.2).

The feature is the target's hidden state after its final norm. Both halves have a norm before ``fc`` joins them, embedding
first; the output passes a final norm and is both the input of the output head and the feature of the next step. A checkpoint
with modules for several depths is used as most engines use it: its first module, again and again.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.errors import errors_as
from outrider.heads.checkpoint import HeadFiles, TargetSizes
from outrider.heads.copied_tables import drop_copied_table
from outrider.heads.feature_head import RolloutHead, Rotation
from outrider.runner import ModelRunner, attention
from outrider.runner.kv_cache import CacheShape, LayerShape
from outrider.runner.loading import decoder_layers, num_layers, text_config
from outrider.runner.survey import survey_without_weights, without_weights
from outrider.types import OutriderError


@dataclass(frozen=True)
class LayerTemplate:
    """A model without weights that provides the parts of a head."""

    model: PreTrainedModel  # on the meta device
    layers: dict[int, LayerShape]  # decoder layers that attend to the whole sequence, and what they store

    @classmethod
    def of(cls, config: PreTrainedConfig, kind: Any, stored: CacheShape | None = None) -> LayerTemplate:
        """Return the template of a model class. ``stored``: what its layers store, if known.

        Raises ``OutriderError`` if no layer of the model can run alone.
        """
        found = stored or survey_without_weights(config, kind)
        model = without_weights(config, kind)
        kinds = getattr(text_config(model), "layer_types", None)
        whole: dict[int, LayerShape] = {}
        for layer, place in enumerate(() if found is None or found.by_request else found.layer_places):
            if place is not None and (not kinds or kinds[layer] == "full_attention"):
                whole[layer] = found.kinds[place[0]][0]  # type: ignore[union-attr]
        template = cls(model, whole)
        if not whole:
            raise OutriderError(f"{model.config.model_type} has no layer with full attention for a head")
        template._check_layer_runs_alone(max(whole))
        return template

    def _check_layer_runs_alone(self, layer: int) -> None:
        """Run one layer alone. Raises ``OutriderError`` if it needs more than hidden states and positions."""
        text = text_config(self.model)
        hidden = torch.zeros(1, 2, int(text.hidden_size), device="meta")
        positions = torch.zeros(1, 2, dtype=torch.long, device="meta")
        self.model.set_experts_implementation("batched_mm")  # shapes must not depend on the selected experts
        problem = f"the layers of {self.model.config.model_type} cannot be used in a head"
        with errors_as(problem, Exception):  # model code raises many kinds of exceptions
            decoder: Any = self.model.get_decoder()
            rotation = decoder.rotary_emb(hidden, positions)
            out = run_layer(decoder_layers(self.model)[layer], hidden, positions, rotation)
            assert out.shape == decoder.norm(hidden).shape

    def layer_for(self, with_experts: bool) -> int:
        """Return the last layer with (or without) experts, or the last layer if there is none."""
        own = decoder_layers(self.model)
        like = [layer for layer in self.layers if any("experts" in name for name in own[layer].state_dict()) == with_experts]
        return max(like or self.layers)

    def new(self, module: nn.Module) -> Any:
        """Return a copy of one of the model's modules with memory and initial weights."""
        found = copy.deepcopy(module).to_empty(device="cpu").train(False)
        with torch.no_grad():
            found.apply(self.model._init_weights)
        return found


def run_layer(layer: nn.Module, hidden: Tensor, position_ids: Tensor, rotation: Rotation) -> Tensor:
    """Apply a decoder layer of transformers to [B, T, H]."""
    out = layer(hidden, attention_mask=None, position_ids=position_ids, position_embeddings=rotation)
    return out[0] if isinstance(out, tuple) else out


class MtpHead(RolloutHead):
    """The head's modules, under Outrider's names."""

    def __init__(self, template: LayerTemplate, layer: int, own_embedding: bool = False, own_output: bool = False) -> None:
        """``layer``: the template's layer that is copied."""
        super().__init__()
        self.model_config, self.text, self.layer = template.model.config, text_config(template.model), layer
        self.settings = self.text
        self.cache_shape = CacheShape.of({layer: template.layers[layer]})
        self.hidden_states, self.uses_targets_output = (num_layers(self.text),), not own_output
        self.target_hidden_size = hidden = int(self.text.hidden_size)
        decoder: Any = template.model.get_decoder()
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.embed_norm, self.hidden_norm, self.norm = (template.new(decoder.norm) for _ in range(3))
        self.layers = nn.ModuleList([template.new(decoder_layers(template.model)[layer])])
        self.rotary_emb = type(decoder.rotary_emb)(self.text)
        if own_embedding:
            self.embed_tokens = nn.Embedding(int(self.text.vocab_size), hidden)
        if own_output:
            self.lm_head = nn.Linear(hidden, int(self.text.vocab_size), bias=False)
        self.register_buffer("draft_ids", None)
        self.set_attention(attention.NAME)

    def set_attention(self, name: str) -> None:
        """Set the attention function of its layer; experts are computed one after another."""
        for module in self.layers.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                config._attn_implementation, config._experts_implementation = name, "eager"

    def check_fit(self, target: TargetSizes) -> None:
        super().check_fit(target)
        self.check_vocabulary(int(self.text.vocab_size), target)
        if self.hidden_states != (target.num_layers,):
            raise OutriderError(
                f"the head was made for {self.hidden_states[0]} layers, but {target.name} has {target.num_layers}"
            )

    def forward(self, token_ids: Tensor, hidden: Tensor, position_ids: Tensor, rotation: Rotation | None = None) -> Tensor:
        joined = torch.cat((self.embed_norm(self.embed(token_ids, hidden)), self.hidden_norm(hidden)), -1)
        rotation = rotation or self.rotary_emb(hidden, position_ids)
        return self.norm(run_layer(self.layers[0], self.fc(joined), position_ids, rotation))

    def logits(self, out: Tensor) -> Tensor:
        return self.target_logits(out) if self.uses_targets_output else self.lm_head(out)


def built_head(files: HeadFiles, template: LayerTemplate, layer: int, target: ModelRunner) -> MtpHead:
    """Return a head for this target, with initial weights. Copies of the target's tables are removed from the files' tensors.

    ``layer``: the template's layer that is copied. Raises ``OutriderError`` if the head does not fit the target.
    """
    tensors = files.tensors
    drop_copied_table(tensors, "embed_tokens.weight", target.model.get_input_embeddings())
    drop_copied_table(tensors, "lm_head.weight", target.model.get_output_embeddings())
    head = files.build(lambda: MtpHead(template, layer, "embed_tokens.weight" in tensors, "lm_head.weight" in tensors))
    head.check_fit(target)
    return head
