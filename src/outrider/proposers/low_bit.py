"""The target's own weights in 4 or 8 bits draft for it, over its own KV cache (compare QSpec: Zhao et al. 2024).

Drafted tokens stand in the cache as the low-bit weights see them until the score of the same round overwrites them: what is
committed is the full-precision target's, and the draft always continues from it. A pass that waits for weights costs a half
(8 bits) or a quarter (4 bits).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.method import MethodSpec, Setting
from outrider.proposers.portable import FewerBits
from outrider.runner.linear import is_packed
from outrider.runner.passes import PassRunner
from outrider.runner.quantized import quantized_bytes, quantized_copy
from outrider.runner.self_draft import SelfDraft
from outrider.types import Finding, OutriderError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LowBitConfig:
    """How much of the weights is kept."""

    bits: int = 4  # 4 or 8

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise OutriderError(f"low-bit weights have 4 or 8 bits, not {self.bits}")


class LowBitProposer(DraftModelProposer):
    """A draft model that is the target in fewer bits: its cache is the target's."""

    name = "low-bit"


class LowBitMethod(MethodSpec):
    proposer = LowBitProposer
    options = LowBitConfig

    def portable(self, setting: Setting) -> FewerBits:
        return FewerBits(setting.config(LowBitConfig).bits)

    def examine(self, setting: Setting) -> Iterator[Finding]:
        """The memory that its weights add."""
        if is_packed(setting.target.model):
            bits = setting.config(LowBitConfig).bits
            added = quantized_bytes(setting.target.model, bits) / 1e6
            yield Finding(
                "ok", "memory", f"the {bits}-bit weights that draft add {added:.0f} MB; they share the target's cache"
            )

    def build(self, setting: Setting) -> LowBitProposer:
        """Tells the memory it adds, then quantises. Raises ``OutriderError`` where the target is not on the CPU kernels."""
        target, config = setting.target, setting.config(LowBitConfig)
        if not is_packed(target.model):
            raise OutriderError(
                f"low-bit drafts need a target whose own weights run on Outrider's CPU kernels; {target.name} is on"
                f" {target.device.type}"
                + (", without a C++ compiler or quantised already" if target.device.type == "cpu" else "")
            )
        added = quantized_bytes(target.model, config.bits)
        logger.info("the %d-bit weights that draft add %.0f MB of memory", config.bits, added / 1e6)
        passes = PassRunner(quantized_copy(target.model, config.bits), target.cache, target.config.compile)
        return LowBitProposer(SelfDraft(target, passes), target.vocab_size)


METHOD = LowBitMethod()
