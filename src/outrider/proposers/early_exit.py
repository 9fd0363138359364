"""Early exit: the target's first layers and its head draft over the shared KV cache (LayerSkip: Elhoushi et al. 2024, 4.3).

Scoring does not run these layers again for the drafts: it reuses their keys, values and hidden states and runs the layers after
them. Acceptance depends on the model: with early-exit losses in training a few layers are enough, otherwise most are needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from outrider.options import CheckedOptions, option, whole
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.method import MethodSpec, Setting
from outrider.proposers.portable import Form
from outrider.proposers.sample_text import TEXT
from outrider.runner import ModelRunner
from outrider.runner.layer_span import LayerSpan
from outrider.runner.passes import PassRunner
from outrider.runner.self_draft import SelfDraft, check_layers, exit_logits
from outrider.types import Finding, OutriderError

logger = logging.getLogger(__name__)

MAX_SHARE = 0.75  # largest share of the layers for drafting: later exits cannot be faster than plain decoding
LONGEST = 15  # maximum drafts per round in the estimate
NUM_TOKENS = 160  # tokens of the text on which exits are compared: resolves agreement to a few percent


@dataclass(frozen=True)
class EarlyExitConfig(CheckedOptions):
    """The exit layer."""

    layers: int | None = option(
        whole(1), None, "Number of layers that draft (default: the fastest by measured cost and agreement)."
    )


@dataclass(frozen=True)
class Exit:
    """Estimated speedup of exiting after a number of layers."""

    layers: int
    agreement: float  # share of positions at which the likeliest token of the exit and of the target are equal
    cost_ratio: float  # draft step / plain pass

    @property
    def speedup(self) -> float:
        """Return the speedup at the best draft length (Leviathan et al. 2023, theorem 3.8); reused layers add no cost."""
        alpha = min(self.agreement, 0.99)
        return max((1 - alpha ** (k + 1)) / (1 - alpha) / (k * self.cost_ratio + 1) for k in range(LONGEST + 1))


class EarlyExitProposer(DraftModelProposer):
    """Draft model that consists of the target's first layers and shares its cache."""

    name = "early-exit"


class EarlyExitMethod(MethodSpec):
    proposer = EarlyExitProposer
    options = EarlyExitConfig
    exported = Form.FIRST_LAYERS

    def examine(self, setting: Setting) -> Iterator[Finding]:
        """Check on a built-in text whether any exit is expected to be faster than plain decoding."""
        if setting.tokenizer is None or setting.target.num_layers < 2:
            return
        given_exit(setting)
        best = best_exit(setting.target, setting.tokenizer)
        text = f"the best exit is after layer {best.layers}, which agrees with the target at {best.agreement:.0%} of positions"
        if best.speedup > 1:
            yield Finding("ok", "exits", text)
        else:
            yield Finding("suspicious", "exits", f"{text}: no exit is expected to be faster than plain decoding")

    def build(self, setting: Setting) -> EarlyExitProposer:
        """Build the proposer. Raises ``OutriderError`` for an invalid exit or a target that cannot run a part of its layers."""
        target, layers = setting.target, given_exit(setting)
        if layers is None:
            layers = pick_exit(target, setting.tokenizer)
        return EarlyExitProposer(SelfDraft(target, depth=layers), target.vocab_size)


METHOD = EarlyExitMethod()


def given_exit(setting: Setting) -> int | None:
    """Return the given number of layers, or None. Raises ``OutriderError`` as ``EarlyExitMethod.build`` does."""
    target, layers = setting.target, setting.config(EarlyExitConfig).layers
    if target.num_layers < 2:
        raise OutriderError("early exit needs a target with at least two layers")
    if layers is not None and layers >= target.num_layers:
        raise OutriderError(f"invalid number of layers {layers} for early exit: expected 1 to {target.num_layers - 1}")
    check_layers(target, layers or 1)
    return layers


def pick_exit(target: ModelRunner, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Return the exit with the highest estimated speedup; without a tokenizer, a quarter of the layers."""
    if tokenizer is None:
        return max(1, target.num_layers // 4)
    best = best_exit(target, tokenizer)
    text = f"after {best.layers} of {target.num_layers} layers, agreement {best.agreement:.0%}"
    if best.speedup <= 1:
        problem = "no early exit of %s is expected to be faster than plain decoding; the best is %s: %s"
        logger.warning(problem, target.name, text, "the model was not trained for early exit")
    else:
        logger.info("early exit of %s %s", target.name, text)
    return best.layers


def best_exit(target: ModelRunner, tokenizer: PreTrainedTokenizerBase) -> Exit:
    """Return the exit with the highest estimated speedup on a built-in text; on ties the first."""
    return max(measure_exits(target, tokenizer.encode(TEXT)[:NUM_TOKENS]), key=lambda found: found.speedup)


@torch.inference_mode()
def measure_exits(target: ModelRunner, text: Sequence[int]) -> list[Exit]:
    """Measure agreement on a text and cost for every exit."""
    text = list(text)[: target.max_len]
    depths = range(1, max(1, min(target.num_layers - 1, int(MAX_SHARE * target.num_layers))) + 1)
    end, *exits = [logits.argmax(-1) for logits in exit_logits(target, text, depths)]
    step, layer, whole = _costs(target)
    return [
        Exit(depth, float((exit == end).float().mean()), (step + (depth - 1) * layer) / whole)
        for depth, exit in zip(depths, exits, strict=True)
    ]


def _costs(target: ModelRunner) -> tuple[float, float, float]:
    """Measure seconds of a draft step through one layer, of each further layer, and of a plain pass, without compilation."""
    passes = PassRunner(target.model, target.cache, "never")
    whole = target.measure_pass(1, 1, NUM_TOKENS, passes=passes)
    step = min(target.measure_pass(1, 1, NUM_TOKENS, span=LayerSpan(0, 1), passes=passes), whole)
    return step, (whole - step) / (target.num_layers - 1), whole
