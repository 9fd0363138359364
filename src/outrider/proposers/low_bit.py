"""Low-bit drafting: the target's weights in 4 or 8 bits draft over its own KV cache (compare QSpec: Zhao et al. 2024).

Cache entries of drafts come from the low-bit weights until scoring overwrites them in the same round. Committed entries are
therefore those of the full-precision target, and drafting continues from them. If passes are limited by memory bandwidth, a
draft pass costs a half (8 bits) or a quarter (4 bits) of one with 16-bit weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.options import CheckedOptions, int_choice, option
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.method import MethodSpec, Setting
from outrider.proposers.portable import Form
from outrider.runner.linear import is_packed
from outrider.runner.passes import PassRunner
from outrider.runner.quantized import gets_fewer_bits, quantized_bytes, quantized_copy
from outrider.runner.self_draft import SelfDraft
from outrider.types import Finding, OutriderError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LowBitConfig(CheckedOptions):
    """Precision of the drafting weights."""

    bits: int = option(int_choice(4, 8), 4, "Bits per weight of the drafting weights.")


class LowBitProposer(DraftModelProposer):
    """Draft model that is the target with fewer bits per weight and shares its cache."""

    name = "low-bit"


class LowBitMethod(MethodSpec):
    proposer = LowBitProposer
    options = LowBitConfig
    exported = Form.FEWER_BITS

    def examine(self, setting: Setting) -> Iterator[Finding]:
        """Report the memory that the weights add."""
        if is_packed(setting.target.model):
            bits = setting.config(LowBitConfig).bits
            added = quantized_bytes(setting.target.model, bits) / 1e6
            yield Finding("ok", "memory", f"the {bits}-bit weights add {added:.0f} MB; they share the target's cache")

    def build(self, setting: Setting) -> LowBitProposer:
        """Log the added memory, then quantise. Raises ``OutriderError`` if the target does not use the CPU kernels."""
        target, config = setting.target, setting.config(LowBitConfig)
        if not is_packed(target.model):
            device = target.device.type
            why = "without them, because it is quantised or there is no C++ compiler" if device == "cpu" else f"on {device}"
            raise OutriderError(f"low-bit needs a target on Outrider's CPU kernels: {target.name} runs {why}")
        if not gets_fewer_bits(target.model, config.bits):
            advice = "choose another method, or a target with more bits"
            raise OutriderError(f"invalid bits {config.bits}: expected fewer than the target's weights have; {advice}")
        added = quantized_bytes(target.model, config.bits)
        logger.info("the %d-bit drafting weights add %.0f MB of memory", config.bits, added / 1e6)
        passes = PassRunner(quantized_copy(target.model, config.bits), target.cache, target.config.compile)
        return LowBitProposer(SelfDraft(target, passes), target.vocab_size)


METHOD = LowBitMethod()
