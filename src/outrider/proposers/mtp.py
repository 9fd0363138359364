"""MTP: the multi-token-prediction head that comes with a checkpoint drafts a tree (DeepSeek-V3, arXiv 2412.19437, section 2.2).

The head is that of the target's own folder unless another one is named. Targets whose layers have a state score chains: then
the first path of each tree is all that is drafted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outrider.heads import findings, mtp_formats
from outrider.heads.assistant import AssistantHead, AssistantRunner
from outrider.heads.checkpoint import MTP, folder_of, measured_acceptance
from outrider.heads.mtp import MtpHead
from outrider.proposers.head_trees import HeadProposer, TreeConfig, tree_options
from outrider.proposers.method import MethodSpec, Setting
from outrider.proposers.portable import OwnHead
from outrider.proposers.recognition import Recognised, TargetFiles
from outrider.runner import ModelRunner
from outrider.types import Finding


class MtpProposer(HeadProposer):
    """Drafts with an MTP head."""

    name = "mtp"


class AssistantProposer(MtpProposer):
    """Drafts with Gemma 4's assistant, over the target's own KV cache."""

    runner = AssistantRunner


class MtpMethod(MethodSpec):
    proposer = MtpProposer
    options = TreeConfig
    takes_draft = True
    drafts_with = MTP
    comes_with_target = True
    own_draft = "mtp"
    precedence = 2

    def build(self, setting: Setting) -> MtpProposer:
        """Load the head. Raises ``OutriderError`` if there is none or it does not fit."""
        setting = setting.of(self)
        if isinstance(setting.draft, (MtpHead, AssistantHead)):
            return self._proposer(setting.draft, setting.target, setting.config(TreeConfig))
        folder = folder_of(setting.draft or setting.target.name)
        config = setting.config(TreeConfig, acceptance=measured_acceptance(folder))
        return self._proposer(mtp_formats.load_any(folder, setting.target), setting.target, config)

    def _proposer(self, head: MtpHead | AssistantHead, target: ModelRunner, config: TreeConfig) -> MtpProposer:
        kind = AssistantProposer if isinstance(head, AssistantHead) else MtpProposer
        return kind(head, target, config)

    def recognise(self, folder: Path, target: TargetFiles) -> Recognised | None:
        """A head of the target's width, recognised by its tensors: configs still name a head that a quantiser has dropped."""
        return Recognised("MTP head") if mtp_formats.is_head(folder, target) else None

    def portable(self, setting: Setting) -> OwnHead:
        setting = setting.of(self)
        source = None if setting.draft is None else str(setting.draft)
        return OwnHead(source, **tree_options(setting.config(TreeConfig), setting.options))

    def examine(self, setting: Setting) -> Iterator[Finding]:
        """Check the head's tensors, dtype and size from its files."""
        setting = setting.of(self)
        if not isinstance(setting.draft, (MtpHead, AssistantHead)):
            yield from findings.of_mtp(folder_of(setting.draft or setting.target.name), setting.target)


METHOD = MtpMethod()
