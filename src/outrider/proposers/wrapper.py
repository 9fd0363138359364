"""Base class of proposers that wrap another one."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.proposers.base import Proposer
from outrider.types import Context, Request, Verdict


class ProposerWrapper(Proposer):
    """Delegates every call except ``propose`` to the inner proposer."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.name, self.needs_hidden = inner.name, inner.needs_hidden
        self.max_drafts, self.auto_drafts, self.is_model_free = inner.max_drafts, inner.auto_drafts, inner.is_model_free
        self.drafts_ahead = inner.drafts_ahead

    @property
    def memory(self) -> object:
        """What the inner proposer learned from finished requests."""
        return self.inner.memory

    @memory.setter
    def memory(self, known: object) -> None:
        self.inner.memory = known

    def start(self, request: Request) -> int:
        return self.inner.start(request)

    def prefill(self, requests: Sequence[Request]) -> list[bool]:
        return self.inner.prefill(requests)

    def fork(self, source_id: str, request: Request) -> None:
        self.inner.fork(source_id, request)

    def commit(self, context: Context, verdict: Verdict) -> None:
        self.inner.commit(context, verdict)

    def release(self, request_ids: Sequence[str]) -> None:
        self.inner.release(request_ids)

    def retire(self, request_ids: Sequence[str]) -> None:
        self.inner.retire(request_ids)

    def num_nodes(self, k: int) -> int:
        return self.inner.num_nodes(k)

    def prepare(self) -> None:
        self.inner.prepare()
