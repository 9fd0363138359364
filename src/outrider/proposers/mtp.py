"""MTP: the multi-token-prediction head that comes with a checkpoint drafts a tree (DeepSeek-V3, arXiv 2412.19437, section 2.2).

The head is that of the target's own folder unless another one is named. Targets whose layers have a state score chains: then
the first path of each tree is all that is drafted.
"""

from __future__ import annotations

from pathlib import Path

from outrider.heads import findings, mtp_formats
from outrider.heads.assistant import AssistantHead, AssistantRunner
from outrider.heads.checkpoint import MTP, read_config, stored_rates
from outrider.heads.head_runner import RolloutRunner
from outrider.heads.mtp import MtpHead
from outrider.proposers.head_method import HeadMethod, Loaded
from outrider.proposers.head_trees import HeadProposer, TreeConfig
from outrider.proposers.method import Recognised, TargetFiles
from outrider.proposers.portable import Form
from outrider.runner import ModelRunner, gguf


class MtpProposer(HeadProposer):
    """Drafts with an MTP head, or with Gemma 4's assistant over the target's own KV cache."""

    name = "mtp"

    def __init__(self, head: MtpHead | AssistantHead, target: ModelRunner, config: TreeConfig) -> None:
        super().__init__(head, target, config, AssistantRunner if isinstance(head, AssistantHead) else RolloutRunner)


class MtpMethod(HeadMethod):
    proposer = MtpProposer
    options = TreeConfig
    exported = Form.OWN_HEAD
    heads = (MtpHead, AssistantHead)
    drafts_with = MTP
    comes_with_target = True
    own_draft = "mtp"
    precedence = 2
    check_files = staticmethod(findings.of_mtp)

    def load(self, folder: Path, target: ModelRunner | TargetFiles) -> Loaded:
        assert isinstance(target, ModelRunner)  # its layers are those of the target's class
        is_gguf = gguf.find(folder) is not None
        # GGUF files state no acceptance rates, and read_config would refuse a target's
        rates = None if is_gguf else stored_rates(read_config(folder), "acceptance_by_rank", 1, folder)
        return Loaded(mtp_formats.load_any(folder, target), "MTP head", {"acceptance": rates})

    def recognise(self, folder: Path, target: TargetFiles) -> Recognised | None:
        """Recognise an MTP head of the target's width by its tensors, because a config may still name a head that quantisation
        removed.
        """
        num_bytes = mtp_formats.head_bytes(folder, target)
        return None if num_bytes is None else Recognised("MTP head", num_bytes=num_bytes)


METHOD = MtpMethod()
