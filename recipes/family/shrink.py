"""A draft's first weights, cut out of its target: a better start than noise when there is little time to distil."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaForCausalLM


def principal_basis(embeddings: Tensor, width: int) -> Tensor:
    """Orthonormal directions that hold most of the embeddings [V, H]: [H, width]."""
    _, vectors = torch.linalg.eigh((embeddings.mT @ embeddings).double())
    return vectors[:, -width:].to(embeddings.dtype)


def strongest_neurons(gate: Tensor, down: Tensor, count: int) -> Tensor:
    """Indices of the feed-forward neurons that can move the residual stream most."""
    return (gate.norm(dim=1) * down.norm(dim=0)).topk(count).indices.sort().values


@torch.no_grad()
def shrink(target: LlamaForCausalLM, draft: LlamaForCausalLM, layers: Sequence[int]) -> None:
    """Fill `draft` with `target` seen through its embeddings' principal directions.

    Draft layer i is target layer `layers[i]`: its first heads, its strongest neurons, the norms' gains folded in.
    """
    embeddings = target.model.embed_tokens.weight
    width, head = draft.config.hidden_size, draft.config.head_dim
    queries, keys = draft.config.num_attention_heads * head, draft.config.num_key_value_heads * head
    basis = principal_basis(embeddings, width)  # [H, width]
    draft.model.embed_tokens.weight.copy_(embeddings @ basis)
    kept = (embeddings @ basis).square().sum() / embeddings.square().sum()
    gain = float((kept * basis.shape[0] / width).sqrt())  # RMSNorm now averages over fewer, larger entries
    draft.model.norm.weight.fill_(gain * float(target.model.norm.weight.mean()))
    for small, index in zip(draft.model.layers, layers, strict=True):
        large = target.model.layers[index]
        small.input_layernorm.weight.fill_(gain)
        small.post_attention_layernorm.weight.fill_(gain)
        before = large.input_layernorm.weight[:, None] * basis
        attention = large.self_attn
        small.self_attn.q_proj.weight.copy_(attention.q_proj.weight[:queries] @ before)
        small.self_attn.k_proj.weight.copy_(attention.k_proj.weight[:keys] @ before)
        small.self_attn.v_proj.weight.copy_(attention.v_proj.weight[:keys] @ before)
        small.self_attn.o_proj.weight.copy_(basis.mT @ attention.o_proj.weight[:, :queries])
        mlp = large.mlp
        chosen = strongest_neurons(mlp.gate_proj.weight, mlp.down_proj.weight, draft.config.intermediate_size)
        before = large.post_attention_layernorm.weight[:, None] * basis
        small.mlp.gate_proj.weight.copy_(mlp.gate_proj.weight[chosen] @ before)
        small.mlp.up_proj.weight.copy_(mlp.up_proj.weight[chosen] @ before)
        small.mlp.down_proj.weight.copy_(basis.mT @ mlp.down_proj.weight[:, chosen])
