"""EAGLE: a head trained on the target's features drafts a tree (Li et al.: EAGLE-1 arXiv 2401.15077, EAGLE-2 2406.16858,
EAGLE-3 2503.01840).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.heads import eagle_formats, findings
from outrider.heads.checkpoint import EAGLE, HeadFiles, stored_rates
from outrider.heads.eagle import EagleHead, check_hidden_states
from outrider.options import option, several, whole
from outrider.proposers.head_method import HeadMethod, Loaded, folder_of
from outrider.proposers.head_trees import HeadProposer, TreeConfig
from outrider.proposers.method import Setting, TargetFiles
from outrider.proposers.portable import Form
from outrider.runner import ModelRunner


@dataclass(frozen=True)
class EagleConfig(TreeConfig):
    """Shape of the trees, precision of the head, and the hidden states that it reads."""

    hidden_states: tuple[int, ...] | None = option(
        several(whole(0), "a list of whole numbers from 0 on (2,4,6)"),
        None,
        "Hidden states of the target that the head reads (default: those in the head's config).",
    )


class EagleProposer(HeadProposer):
    """Drafts with an EAGLE head."""

    name = "eagle"

    def __init__(self, head: EagleHead, target: ModelRunner, config: EagleConfig = EagleConfig()) -> None:
        """Raise ``OutriderError`` for a head that does not fit the target."""
        if config.hidden_states:
            check_hidden_states(config.hidden_states, head, target.num_layers)
        super().__init__(head, target, config, hidden_states=config.hidden_states)


class EagleMethod(HeadMethod):
    proposer = EagleProposer
    options = EagleConfig
    exported = Form.FEATURE_HEAD
    heads = EagleHead
    drafts_with = EAGLE
    own_draft = "eagle3"
    precedence = 2
    check_files = staticmethod(findings.of_eagle)

    def load(self, folder: Path, target: ModelRunner | TargetFiles) -> Loaded:
        files = HeadFiles.read(folder)
        head = eagle_formats.load(files, target, getattr(target, "model", None))
        rates = stored_rates(files.config, "acceptance_by_rank", 1, folder)
        return Loaded(head, f"EAGLE-{head.shape.generation} head", {"acceptance": rates})

    def alternatives(self, setting: Setting) -> list[str]:
        """Return the hidden states shifted by one in each direction, because numbering conventions of EAGLE-3 differ by one."""
        setting = setting.with_draft_of(self)
        target, head = setting.target, setting.draft
        if not isinstance(head, EagleHead):
            with torch.device("meta"):  # headers only
                head = eagle_formats.load(folder_of(setting), target)
        states = setting.config(EagleConfig).hidden_states or head.shape.hidden_states
        if head.shape.generation != 3:
            return []
        shifted = [[index + by for index in states] for by in (-1, 1)]
        fitting = [each for each in shifted if min(each) >= 0 and max(each) <= target.num_layers]
        return [f"hidden_states={','.join(map(str, each))}" for each in fitting]


METHOD = EagleMethod()
