"""The target's own first layers and its own head draft (LayerSkip: Elhoushi et al. 2024, section 4.3): same weights, same KV.

The score does not run those layers again for the drafts: it takes over their keys, values and hidden states and goes on behind
them. How often the drafts are right depends on the model: one trained with early-exit losses agrees with itself early, another
needs most of its layers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.method import MethodSpec, Setting
from outrider.proposers.portable import FirstLayers
from outrider.proposers.sample_text import TEXT
from outrider.runner import ModelRunner
from outrider.runner.layer_span import LayerSpan
from outrider.runner.passes import PassRunner
from outrider.runner.self_draft import SelfDraft, check_layers, exit_logits
from outrider.types import Finding, OutriderError

logger = logging.getLogger(__name__)

MAX_SHARE = 0.75  # of the layers: an exit behind them leaves nothing to win
LONGEST = 15  # drafts a round, for what an exit promises
NUM_TOKENS = 160  # of the text on which exits are compared: a few hundredths of acceptance are told apart


@dataclass(frozen=True)
class EarlyExitConfig:
    """Where the target is left."""

    layers: int | None = None  # that draft; None: picked from what passes cost and how often each exit agrees with the end


@dataclass(frozen=True)
class Exit:
    """What leaving the target behind so many layers promises."""

    layers: int
    agreement: float  # share of places at which the exit's likeliest token is the target's
    cost_ratio: float  # of a draft step to a plain pass

    @property
    def speedup(self) -> float:
        """Of the best draft length: Leviathan et al. 2023, theorem 3.8. The layers taken over make a round no dearer."""
        alpha = min(self.agreement, 0.99)
        return max((1 - alpha ** (k + 1)) / (1 - alpha) / (k * self.cost_ratio + 1) for k in range(LONGEST + 1))


class EarlyExitProposer(DraftModelProposer):
    """A draft model that is the target's first layers: it keeps nothing of its own."""

    name = "early-exit"


class EarlyExitMethod(MethodSpec):
    proposer = EarlyExitProposer
    options = EarlyExitConfig

    def portable(self, setting: Setting) -> FirstLayers:
        return FirstLayers(setting.config(EarlyExitConfig).layers)

    def examine(self, setting: Setting) -> Iterator[Finding]:
        """Whether any exit promises a gain, on a text of its own."""
        if setting.tokenizer is None or setting.target.num_layers < 2:
            return
        check_layers(setting.target, 1)
        found = measure_exits(setting.target, setting.tokenizer.encode(TEXT)[:NUM_TOKENS])
        best = max(found, key=lambda each: each.speedup)
        said = f"the best exit is behind layer {best.layers}, which agrees with the end at {best.agreement:.0%} of places"
        yield (
            Finding("ok", "exits", said)
            if best.speedup > 1
            else Finding("suspicious", "exits", f"{said}: none promises a gain")
        )

    def build(self, setting: Setting) -> EarlyExitProposer:
        """Raises ``OutriderError`` for a number of layers that the target lacks, and where its layers do not run in parts."""
        target, layers = setting.target, setting.config(EarlyExitConfig).layers
        if target.num_layers < 2:
            raise OutriderError("early exit needs a target of two layers or more")
        if layers is not None and not 0 < layers < target.num_layers:
            raise OutriderError(
                f"early exit behind {layers} layers: this target has {target.num_layers}, so give 1 to {target.num_layers - 1}"
            )
        check_layers(target, layers or 1)
        if layers is None:
            layers = pick_exit(target, setting.tokenizer)
        return EarlyExitProposer(SelfDraft(target, depth=layers), target.vocab_size)


METHOD = EarlyExitMethod()


def pick_exit(target: ModelRunner, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The number of layers that promises the most; a quarter of them where there is no tokenizer to measure with."""
    if tokenizer is None:
        return max(1, target.num_layers // 4)
    best = max(measure_exits(target, tokenizer.encode(TEXT)[:NUM_TOKENS]), key=lambda found: (found.speedup, -found.layers))
    said = f"behind {best.layers} of {target.num_layers} layers, agreeing at {best.agreement:.0%} of places"
    if best.speedup <= 1:
        logger.warning("no early exit of %s promises a gain; the best is %s: it was not trained for it", target.name, said)
    else:
        logger.info("early exit of %s %s", target.name, said)
    return best.layers


@torch.inference_mode()
def measure_exits(target: ModelRunner, text: Sequence[int]) -> list[Exit]:
    """Agreement on a text and cost of every exit that leaves layers to skip."""
    text = list(text)[: target.max_len]
    depths = range(1, max(1, min(target.num_layers - 1, int(MAX_SHARE * target.num_layers))) + 1)
    end, *exits = [logits.argmax(-1) for logits in exit_logits(target, text, depths)]
    step, layer, whole = _costs(target)
    return [
        Exit(depth, float((exit == end).float().mean()), (step + (depth - 1) * layer) / whole)
        for depth, exit in zip(depths, exits, strict=True)
    ]


def _costs(target: ModelRunner) -> tuple[float, float, float]:
    """Seconds of a draft step through one layer, of each further layer, and of a plain pass; all eager, for their ratios."""
    passes = PassRunner(target.model, target.cache, "never")
    whole = target.pass_cost(1, 1, NUM_TOKENS, passes=passes)
    step = min(target.pass_cost(1, 1, NUM_TOKENS, span=LayerSpan(0, 1), passes=passes), whole)
    return step, (whole - step) / (target.num_layers - 1), whole
