"""EAGLE: a head trained on the target's features drafts a tree (Li et al.: EAGLE-1 arXiv 2401.15077, EAGLE-2 2406.16858,
EAGLE-3 2503.01840).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.heads import eagle_formats, findings
from outrider.heads.checkpoint import EAGLE, folder_of, kind_of, measured_acceptance
from outrider.heads.eagle import EagleHead
from outrider.proposers.head_trees import HeadProposer, TreeConfig, tree_options
from outrider.proposers.method import MethodSpec, Setting
from outrider.proposers.portable import FeatureHead
from outrider.proposers.recognition import Recognised, TargetFiles
from outrider.proposers.sample_text import TEXT
from outrider.runner import ModelRunner
from outrider.types import Finding, OutriderError


@dataclass(frozen=True)
class EagleConfig(TreeConfig):
    """Shape of the trees, precision of the head, and the hidden states that it reads."""

    hidden_states: tuple[int, ...] | None = None  # target hidden states, instead of those in the head's config


class EagleProposer(HeadProposer):
    """Drafts with an EAGLE head."""

    name = "eagle"

    def __init__(self, head: EagleHead, target: ModelRunner, config: EagleConfig = EagleConfig()) -> None:
        """Raise ``OutriderError`` for a head that does not fit the target."""
        states = config.hidden_states or head.hidden_states
        is_there = 0 <= min(states) <= max(states) <= target.num_layers
        if config.hidden_states and (len(states) != len(head.hidden_states) or not is_there):
            expected = f"expected {len(head.hidden_states)} numbers from 0 to {target.num_layers}"
            raise OutriderError(f"invalid hidden_states {states}: {expected}")
        super().__init__(head, target, config)
        self.needs_hidden = states


class EagleMethod(MethodSpec):
    proposer = EagleProposer
    options = EagleConfig
    takes_draft = True
    drafts_with = EAGLE
    own_draft = "eagle3"
    precedence = 2

    def build(self, setting: Setting) -> EagleProposer:
        """Load the head. Raises ``OutriderError`` if there is none or it does not fit."""
        setting = setting.of(self)
        target, source = setting.target, setting.draft
        if isinstance(source, EagleHead):
            return EagleProposer(source, target, setting.config(EagleConfig))
        folder = folder_of(source)
        head = eagle_formats.load(folder, target.num_layers, target.vocab_size, target.hidden_size, target.model)
        return EagleProposer(head, target, setting.config(EagleConfig, acceptance=measured_acceptance(folder)))

    def recognise(self, folder: Path, target: TargetFiles) -> Recognised | None:
        """Recognise a head that fits this target."""
        if kind_of(folder) is not EAGLE:
            return None
        with torch.device("meta"):
            head = eagle_formats.load(folder, target.num_layers, target.vocab_size, target.hidden_size)
        head.check_fit(target)
        return Recognised(f"EAGLE-{head.shape.generation} head")

    def portable(self, setting: Setting) -> FeatureHead:
        setting = setting.of(self)
        config = setting.config(EagleConfig)
        return FeatureHead(str(setting.draft), hidden_states=config.hidden_states, **tree_options(config, setting.options))

    def examine(self, setting: Setting) -> Iterator[Finding]:
        """Check sizes, vocabulary, layers, norms, RoPE, dtype and embedding from the head's files."""
        setting = setting.of(self)
        if not isinstance(setting.draft, EagleHead):
            sample = setting.tokenizer.encode(TEXT) if setting.tokenizer is not None else []
            yield from findings.of_eagle(folder_of(setting.draft), setting.target, sample)

    def alternatives(self, setting: Setting) -> list[str]:
        """Return the hidden states shifted by one in each direction, because numbering conventions of EAGLE-3 differ by one."""
        setting = setting.of(self)
        target, head = setting.target, setting.draft
        if not isinstance(head, EagleHead):
            head = eagle_formats.load(folder_of(head), target.num_layers, target.vocab_size, target.hidden_size)
        states = setting.config(EagleConfig).hidden_states or head.shape.hidden_states
        if head.shape.generation != 3:
            return []
        shifted = [[index + by for index in states] for by in (-1, 1)]
        fitting = [each for each in shifted if min(each) >= 0 and max(each) <= target.num_layers]
        return [f"hidden_states={','.join(map(str, each))}" for each in fitting]


METHOD = EagleMethod()
