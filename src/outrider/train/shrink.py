"""Initialise a draft from its target: a better start than random weights for short distillation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.runner.loading import decoder_layers, text_config

NORMS = ("input_layernorm", "post_attention_layernorm")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def can_shrink(model: PreTrainedModel) -> bool:
    """Return whether the model has Llama-like layers: two norms, four projections, a gated feed-forward part.

    Norms that store their scale minus one (Gemma) are not: those models scale their embeddings by the width, too.
    """
    for layer in decoder_layers(model):
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        parts = [hasattr(layer, norm) for norm in NORMS] + [hasattr(attention, each) for each in PROJECTIONS]
        parts += [hasattr(mlp, each) for each in ("gate_proj", "up_proj", "down_proj")]
        if not all(parts) or hasattr(layer, "pre_feedforward_layernorm"):
            return False
    decoder = model.get_decoder()
    norm = getattr(decoder, "norm", None)
    if norm is None or not hasattr(decoder, "embed_tokens"):
        return False
    scale = norm(torch.ones_like(norm.weight)[None])[0]
    return torch.allclose(scale, norm.weight, atol=0.01, rtol=0.01)


def principal_basis(embeddings: Tensor, width: int) -> Tensor:
    """Return the principal directions of the embeddings [V, H] as an orthonormal basis [H, width]."""
    _, vectors = torch.linalg.eigh((embeddings.mT @ embeddings).double())
    return vectors[:, -width:].to(embeddings.dtype)


def strongest_neurons(gate: Tensor, down: Tensor, count: int) -> Tensor:
    """Return the indices of the feed-forward neurons with the largest effect on the residual stream."""
    return (gate.norm(dim=1) * down.norm(dim=0)).topk(count).indices.sort().values


@torch.no_grad()
def shrink(target: PreTrainedModel, draft: PreTrainedModel, layers: Sequence[int], pieces: Tensor | None = None) -> None:
    """Fill ``draft`` with ``target`` projected to its embeddings' principal directions; both have Llama-like layers.

    Draft layer i is target layer ``layers[i]``: its first heads, its strongest neurons, the norms' gains folded in. ``pieces``
    [Vd, V]: which target tokens form each draft token, if the draft has its own vocabulary.
    """
    large: Any = target
    small: Any = draft
    embeddings, norm = large.get_input_embeddings().weight, large.get_decoder().norm.weight
    basis = principal_basis(embeddings, small.config.hidden_size)  # [H, width]
    kept = (embeddings @ basis).square().sum() / embeddings.square().sum()
    gain = float((kept * basis.shape[0] / basis.shape[1]).sqrt())  # RMSNorm averages over fewer, larger entries

    def put(module: Any, table: Tensor) -> None:
        module.weight.copy_(table if pieces is None else pieces @ table)

    put(small.get_input_embeddings(), embeddings @ basis)
    if small.config.tie_word_embeddings:
        small.get_decoder().norm.weight.fill_(gain * float(norm.mean()))
    else:
        put(small.get_output_embeddings(), large.get_output_embeddings().weight * norm @ basis)
        small.get_decoder().norm.weight.fill_(gain)
    for layer, index in zip(decoder_layers(draft), layers, strict=True):
        _cut(decoder_layers(target)[index], layer, basis, gain, text_config(draft))


def _cut(large: Any, small: Any, basis: Tensor, gain: float, config: Any) -> None:
    """Project one layer of width H into a narrower one. Tensors of equal shape (norms within a head) are copied."""
    own = small.state_dict()
    for name, tensor in large.state_dict().items():
        if name in own and own[name].shape == tensor.shape:
            own[name].copy_(tensor)
    small.input_layernorm.weight.fill_(gain)
    small.post_attention_layernorm.weight.fill_(gain)
    attention, mlp = large.self_attn, large.mlp
    before = large.input_layernorm.weight[:, None] * basis
    for name in ("q_proj", "k_proj", "v_proj"):
        _copy(
            getattr(small.self_attn, name), getattr(attention, name), slice(getattr(small.self_attn, name).out_features), before
        )
    queries = small.self_attn.o_proj.in_features
    small.self_attn.o_proj.weight.copy_(basis.mT @ attention.o_proj.weight[:, :queries])
    chosen = strongest_neurons(mlp.gate_proj.weight, mlp.down_proj.weight, config.intermediate_size)
    before = large.post_attention_layernorm.weight[:, None] * basis
    for name in ("gate_proj", "up_proj"):
        _copy(getattr(small.mlp, name), getattr(mlp, name), chosen, before)
    small.mlp.down_proj.weight.copy_(basis.mT @ mlp.down_proj.weight[:, chosen])
    for narrow, wide in ((small.self_attn.o_proj, attention.o_proj), (small.mlp.down_proj, mlp.down_proj)):
        if wide.bias is not None:
            narrow.bias.copy_(basis.mT @ wide.bias)


def _copy(small: Any, large: Any, outputs: slice | Tensor, before: Tensor) -> None:
    """Project a layer that reads the residual stream: some of its outputs, inputs projected by ``before`` [H, width]."""
    small.weight.copy_(large.weight[outputs] @ before)
    if large.bias is not None:
        small.bias.copy_(large.bias[outputs])
