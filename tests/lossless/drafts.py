"""Drafts for each method in the tests, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from outrider.heads.block import BlockHead, BlockShape
from outrider.heads.eagle import EagleHead, EagleShape
from outrider.heads.medusa import MedusaHeads, MedusaShape
from outrider.heads.mtp import LayerTemplate, MtpHead


def draft_for(method: str, target: PreTrainedModel, model: PreTrainedModel | None = None) -> Any:
    """Return the ``draft`` for a method: a head made for the target, or ``model`` for methods that use a draft model."""
    kind = method.split("+")[-1]
    return HEADS[kind](target) if kind in HEADS else model


def eagle_head(target: PreTrainedModel, generation: int = 3, draft_vocab: int | None = None, seed: int = 6) -> EagleHead:
    """Return a random EAGLE head; by default that of EAGLE-3 covers half of the vocabulary."""
    torch.manual_seed(seed)
    vocab, hidden, layers = target.config.vocab_size, target.config.hidden_size, target.config.num_hidden_layers
    llama = LlamaConfig(
        hidden_size=hidden, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=vocab,
        num_hidden_layers=1, max_position_embeddings=128,
    )  # fmt: skip
    llama._attn_implementation = "outrider"
    if generation == 1:
        return EagleHead(EagleShape(1, llama, hidden, (layers,), vocab)).eval().requires_grad_(False)
    size = draft_vocab or vocab // 2
    head = EagleHead(EagleShape(3, llama, hidden, (0, 1, layers), size, reduced=size < vocab)).eval().requires_grad_(False)
    if head.draft_ids is not None:
        head.draft_ids.copy_(torch.randperm(vocab)[:size].sort().values)
    head.lm_head.weight *= 12
    return head


def mtp_head(target: PreTrainedModel, seed: int = 7) -> MtpHead:
    torch.manual_seed(seed)
    body = LayerTemplate.of(target.config, type(target))
    head = MtpHead(body, body.layer_for(with_experts=False)).eval().requires_grad_(False)
    for weight in head.parameters():
        if weight.dim() > 1:
            weight.normal_(std=0.5)
    return head


def block_head(target: PreTrainedModel, markov_rank: int = 3, seed: int = 9) -> BlockHead:
    """Return a random block drafter, whose drafts depend on earlier ones unless ``markov_rank`` is 0."""
    torch.manual_seed(seed)
    vocab, hidden = target.config.vocab_size, target.config.hidden_size
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=vocab,
        num_hidden_layers=2, max_position_embeddings=128,
    )  # fmt: skip
    shape = BlockShape(
        config, hidden, (1, 2), 5, vocab - 1, vocab, (0, 4), markov_rank=markov_rank, predicts_next=markov_rank > 0
    )
    head = BlockHead(shape).eval().requires_grad_(False)
    for weight in head.parameters():
        if weight.dim() > 1:
            weight.normal_(std=0.5)
    return head


def medusa_heads(target: PreTrainedModel, num_heads: int = 4, seed: int = 8) -> MedusaHeads:
    torch.manual_seed(seed)
    return MedusaHeads(MedusaShape(num_heads, 1, target.config.hidden_size, target.config.vocab_size)).eval()


HEADS = {"eagle": eagle_head, "medusa": medusa_heads, "mtp": mtp_head, "dflash": block_head}
