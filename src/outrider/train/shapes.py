"""Initialise heads for a target: sizes from its config, and good initial weights."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from outrider.heads.block import BlockHead, BlockShape
from outrider.heads.eagle import EagleHead, EagleShape
from outrider.heads.feature_head import FeatureHead
from outrider.heads.medusa import MedusaHeads, MedusaShape
from outrider.heads.mtp import LayerTemplate, MtpHead
from outrider.heads.postprocessing import Postprocess, postprocess_of
from outrider.memory import require_memory
from outrider.memory import size as in_bytes
from outrider.runner import ModelRunner, loading
from outrider.runner.linear import weight_of
from outrider.train import rollout_attention
from outrider.train.trainer import WEIGHT_COPIES_PER_CHECKPOINT
from outrider.types import OutriderError

logger = logging.getLogger(__name__)

Config = TypeVar("Config", LlamaConfig, Qwen3Config)
Head = TypeVar("Head", bound=nn.Module)

FLOAT32 = 4  # bytes of a weight
COPIES = 3  # of the weights in float32 in training: themselves, gradients, and at least one state of the optimizer
ROPE_SCALINGS = ("linear", "llama3", "yarn")  # types of scaling that Llama and Qwen3 layers take over from a target


class OutputLayer(nn.Linear):
    """A target's output head as a frozen float32 layer that passes gradients.

    Includes the target's logit post-processing (cap, scale): features [..., H] -> logits [..., V].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, postprocess: Postprocess | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        self.postprocess = postprocess

    def forward(self, features: Tensor) -> Tensor:
        values = super().forward(features)
        return values if self.postprocess is None else self.postprocess(values)

    def plain_weight(self) -> Tensor:
        """Return [V, H] of a nearly equivalent layer without post-processing: a scale is included, a cap omitted."""
        if self.postprocess is None:
            return self.weight
        small = torch.full((1,), 1e-3, device=self.weight.device)
        return self.weight * (self.postprocess(small) / small)


def output_layer(runner: ModelRunner) -> OutputLayer:
    """Return the target's output weight, packed or not."""
    module = runner.model.get_output_embeddings()
    bias = getattr(module, "bias", None)
    return OutputLayer(weight_of(module).float(), None if bias is None else bias.float(), postprocess_of(runner.model))


def final_scale(runner: ModelRunner) -> Tensor:
    """Return the final norm's scale per feature [H]; ones if it is not an RMS norm or has another name."""
    ones = torch.ones(runner.hidden_size, device=runner.device)
    norm = getattr(runner.model.get_decoder(), "norm", None)
    if norm is None or getattr(norm, "bias", None) is not None or "RMS" not in type(norm).__name__:
        return ones
    scale: Tensor = norm(ones[None])[0]  # apply it instead of reading the weight: some norms store weight - 1
    return scale.float()


def _check_fits(head: Head, runner: ModelRunner) -> Head:
    """Return the head, which may be without weights. Raises ``OutriderError`` if its training takes more than the memory."""
    size = sum(parameter.numel() for parameter in head.parameters())
    if runner.device.type == "cpu":
        what = "the head in float32, with gradients and optimizer state, takes at least"
        require_memory(FLOAT32 * COPIES * size, what, "train a smaller one (without --start)")
    logger.info(
        "head with %.1fM parameters: training takes at least %s of memory, and up to %s on disk for checkpoints",
        size / 1e6,
        in_bytes(FLOAT32 * COPIES * size),
        in_bytes(2 * FLOAT32 * WEIGHT_COPIES_PER_CHECKPOINT * size),
    )
    return head


def medusa_shape(runner: ModelRunner, num_heads: int, num_layers: int, size: int | None) -> MedusaShape:
    return MedusaShape(num_heads, num_layers, runner.hidden_size, size or runner.vocab_size, mapped=size is not None)


def check_new(kind: type[Head], shape: Any, runner: ModelRunner) -> Head:
    """Return a new head of this shape, without weights. Raises ``OutriderError`` if its training takes more than the memory."""
    with torch.device("meta"):
        return _check_fits(kind(shape), runner)


def new_medusa(runner: ModelRunner, num_heads: int, num_layers: int, draft_ids: Tensor | None = None) -> MedusaHeads:
    """Return heads initialised as the target's output head, with zero blocks (Cai et al. 2024, section 2.1).

    ``draft_ids``: a reduced vocabulary, ascending.
    """
    heads = MedusaHeads(medusa_shape(runner, num_heads, num_layers, None if draft_ids is None else len(draft_ids)))
    weight = output_layer(runner).plain_weight()[: runner.vocab_size]
    if draft_ids is not None and heads.token_map is not None:
        heads.token_map.copy_(draft_ids)
        weight = weight[draft_ids.to(weight.device)]
    blocks: list[Any] = list(heads.blocks)
    for block, head in zip(blocks, heads.lm_heads, strict=True):
        for layer in block.layers:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        head.weight.data.copy_(weight)  # type: ignore[operator]
    return heads


def head_config(runner: ModelRunner, kind: type[Config], num_layers: int = 1) -> Config:
    """Return a config of Llama-like layers with the target's widths and the RoPE of its layers with full attention.

    RoPE scalings other than ``ROPE_SCALINGS`` are omitted, and the theta is kept.
    """
    text = loading.text_config(runner.model)
    hidden, heads = runner.hidden_size, int(text.num_attention_heads)
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope) or {}  # Gemma has one for each kind of layer
    scaling = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}  # a head rotates all features
    if rope.get("rope_type") not in ROPE_SCALINGS:
        scaling = {"rope_type": "default"}
    return kind(
        vocab_size=runner.vocab_size,
        hidden_size=hidden,
        intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * hidden),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or hidden // heads),
        max_position_embeddings=loading.context_length(text) or runner.max_len,
        rms_norm_eps=float(getattr(text, "rms_norm_eps", None) or 1e-5),
        rope_parameters=scaling | {"rope_theta": float(rope.get("rope_theta") or 10000.0)},
    )


def eagle_shape(runner: ModelRunner, generation: int, hidden_states: tuple[int, ...], size: int | None) -> EagleShape:
    config, hidden = head_config(runner, LlamaConfig), runner.hidden_size
    if generation == 1:
        return EagleShape(1, config, hidden, (runner.num_layers,), runner.vocab_size)
    return EagleShape(3, config, hidden, hidden_states, size or runner.vocab_size, reduced=size is not None)


def new_eagle(runner: ModelRunner, generation: int, hidden_states: tuple[int, ...], draft_ids: Tensor | None) -> EagleHead:
    """Return a head that initially repeats its input feature. ``draft_ids``: generation 3's reduced vocabulary, ascending."""
    shape = eagle_shape(runner, generation, hidden_states, None if draft_ids is None else len(draft_ids))
    head, output, size = EagleHead(shape), output_layer(runner), shape.draft_vocab_size
    with torch.no_grad():
        _repeat_feature(head)
        if generation == 3:
            chosen = torch.arange(size) if draft_ids is None else draft_ids
            head.lm_head.weight.copy_(output.plain_weight()[chosen.to(output.weight.device)])
            head.norm.weight.copy_(final_scale(runner))
            if head.draft_ids is not None:
                head.draft_ids.copy_(chosen)
    return trainable(head, runner)


def new_mtp(runner: ModelRunner) -> MtpHead:
    """Return an MTP head that initially repeats its input feature, up to its scale.

    Its layer is a copy of the target's last kind of layer, or a Llama layer if the target's cannot run separately.
    """
    try:
        template = LayerTemplate.of(runner.model.config, type(runner.model), runner.cache.shape)
    except OutriderError as error:
        logger.info("%s: a Llama layer is trained", error)
        template = LayerTemplate.of(head_config(runner, LlamaConfig, runner.num_layers), LlamaForCausalLM)
    fc = nn.Linear(2 * runner.hidden_size, runner.hidden_size, bias=False, device="meta")
    _check_fits(nn.ModuleList([loading.decoder_layers(template.model)[max(template.layers)], fc]), runner)  # all but norms
    head = MtpHead(template, max(template.layers))
    with torch.no_grad():
        _repeat_feature(head)
        # The feature's norm removes its scale. Some norms store their scale minus one.
        head.norm.weight += final_scale(runner).square().mean().sqrt().cpu() - 1
    return trainable(head, runner)


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a new block drafter."""

    hidden_states: tuple[int, ...]
    num_layers: int
    block_size: int
    markov_rank: int = 0  # above 0: DSpark's
    selector_rank: int = 0  # above 0: DFlash 2's


def new_block(runner: ModelRunner, sizes: BlockSizes, mask_token_id: int) -> BlockHead:
    """Return a block drafter whose layers initially add nothing."""
    head = BlockHead(block_shape(runner, sizes, mask_token_id))
    with torch.no_grad():
        _add_nothing(head)
        head.norm.weight.copy_(final_scale(runner))
    return trainable(head, runner)


def block_shape(runner: ModelRunner, sizes: BlockSizes, mask_token_id: int) -> BlockShape:
    config, hidden = head_config(runner, Qwen3Config, sizes.num_layers), runner.hidden_size
    is_second = sizes.selector_rank > 0  # DFlash 2, with the sizes of z-lab's heads as far as the target allows
    return BlockShape(
        config,
        hidden,
        sizes.hidden_states,
        sizes.block_size,
        mask_token_id,
        runner.vocab_size,
        (0,) * sizes.num_layers,
        predicts_next=sizes.markov_rank > 0,
        markov_rank=sizes.markov_rank,
        conv_taps=2 if is_second else 0,
        conv_group=math.gcd(16, hidden) if is_second else 1,
        selector_rank=sizes.selector_rank,
        num_candidates=min(16, runner.vocab_size) if is_second else 0,
    )


def _repeat_feature(head: EagleHead | MtpHead) -> None:
    """Let a head repeat the last part of its input: the feature, or that of the highest layer."""
    hidden = head.fc.out_features
    nn.init.normal_(head.fc.weight, std=0.02 / hidden**0.5)
    head.fc.weight[:, -hidden:] += torch.eye(hidden)
    _add_nothing(head.layers)


def _add_nothing(layers: nn.Module) -> None:
    """Set the weights to zero through which layers add to their input."""
    for name, weight in layers.named_parameters():
        if re.search(r"\b(o_proj|down_proj|markov_w2|kernel_projection|successor_codebook)\b", name):
            nn.init.zeros_(weight)


def mask_token(rows: Tensor, runner: ModelRunner) -> int:
    """Return the mask token of a new block drafter: the last one of the least frequent tokens in rows [R, S].

    Tokens with a nearly zero embedding, often padding, are excluded, because a mask's query depends only on its embedding.
    """
    ids = torch.arange(runner.vocab_size, device=runner.device)
    size = runner.model.get_input_embeddings()(ids).float().norm(dim=-1).cpu()
    counts = torch.bincount(rows.flatten().long(), minlength=runner.vocab_size)[: runner.vocab_size]
    counts = counts.masked_fill(size < size.mean() / 2, counts.max() + 1)
    return int((counts == counts.min()).nonzero()[-1])


def trainable(head: Head, runner: ModelRunner) -> Head:
    """Return the head in training on this target."""
    if isinstance(head, (EagleHead, MtpHead)):
        head.set_attention(rollout_attention.NAME)
    if isinstance(head, FeatureHead):
        output = output_layer(runner)
        postprocess, output.postprocess = output.postprocess, None  # separate: a block drafter may have its own instead
        head.share_target_modules(runner.model.get_input_embeddings(), output, postprocess)
    return head.to(runner.device).requires_grad_(True)


def continued(head: Head, runner: ModelRunner) -> Head:
    """Return a loaded head in training on this target. Raises ``OutriderError`` if its training takes more than the memory."""
    return trainable(_check_fits(head, runner), runner)


def frequent_tokens(rows: Tensor, vocab_size: int, size: int) -> Tensor:
    """Return the ``size`` most frequent ids of rows [R, S], ascending, for a reduced vocabulary."""
    counts = torch.bincount(rows.flatten().long(), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values
