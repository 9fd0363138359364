"""Plain decoding: the method without drafts."""

from __future__ import annotations

from outrider.proposers.base import Proposer
from outrider.proposers.method import MethodSpec, Setting
from outrider.proposers.portable import Form
from outrider.types import Context, Proposal


class PlainProposer(Proposer):
    """Returns empty proposals: plain decoding is speculation with K = 0."""

    name = "plain"
    max_drafts = 0

    def propose(self, context: Context, k: int) -> Proposal:
        return Proposal.empty(len(context.requests))


class PlainMethod(MethodSpec):
    proposer = PlainProposer
    exported = Form.NO_DRAFTS

    def build(self, setting: Setting) -> PlainProposer:
        setting.config(self.options)
        return PlainProposer()


METHOD = PlainMethod()
