"""Several methods over one loaded target, measured in turn in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outrider.engine import Engine, FixedLength, LengthPolicy, Speculation
from outrider.engine.config import build_engine, build_policy, build_proposer
from outrider.method_text import split_method
from outrider.proposers.base import Proposer
from outrider.proposers.plain import PlainProposer
from outrider.registry import PROPOSERS
from outrider.types import Context, Round

if TYPE_CHECKING:
    from outrider.engine import LLM
    from outrider.engine.options import ModelSource

PLAIN = PlainProposer.name


@dataclass(frozen=True)
class Contender:
    """A method with its draft length."""

    method: str
    k: int | str  # number of drafts, or "auto"

    @property
    def is_plain(self) -> bool:
        return self.method == PLAIN or self.k == 0

    @property
    def label(self) -> str:
        return PLAIN if self.is_plain else f"{self.method} k={self.k}"


@dataclass
class Recorder:
    """Wrap a draft-length policy and record every decoding round."""

    inner: LengthPolicy
    rounds: list[Round] = field(default_factory=list)

    def next_lengths(self, context: Context) -> list[int]:
        return self.inner.next_lengths(context)

    def observe(self, context: Context, round_: Round, is_prefill: bool) -> None:
        if not is_prefill:
            self.rounds.append(round_)
        self.inner.observe(context, round_, is_prefill)

    def release(self, request_ids: Sequence[str]) -> None:
        self.inner.release(request_ids)


class Contenders:
    """Switch one ``LLM`` between methods and draft lengths; target, cache and compiled passes are shared."""

    def __init__(self, llm: LLM, draft: ModelSource | None = None, proposers: Mapping[str, Proposer] | None = None) -> None:
        """``draft``: default draft for methods that take one; ``proposers``: method -> existing proposer."""
        self.llm = llm
        self._draft, self._proposers = draft, proposers or {}
        self._engines: dict[str, Engine] = {llm.proposer.name: llm.engine}
        self._policies: dict[Contender, LengthPolicy] = {}
        self._memories: dict[Contender, object] = {}  # proposer memory of each contender's own runs

    def prepare(self, contender: Contender) -> None:
        """Load what the method needs. Raises ``OutriderError`` for an unknown method or a draft that does not fit."""
        llm, method = self.llm, PLAIN if contender.is_plain else contender.method
        if method not in self._engines:
            speculation = self._speculation(method)
            proposer = self._proposers.get(method) or build_proposer(speculation, llm.runner, llm.tokenizer)
            self._engines[method] = build_engine(speculation, llm.runner, proposer, FixedLength(0), llm.engine.scheduler)
        if contender not in self._policies:
            proposer = self._engines[method].proposer
            speculation = replace(llm.speculation, num_draft_tokens=0 if contender.is_plain else contender.k)
            self._policies[contender] = build_policy(speculation, llm.runner, proposer)

    def forget(self, contender: Contender | None = None) -> None:
        """Clear the memory of one contender, or of all: it would contain the output of a prompt that is repeated."""
        if contender is None:
            self._memories.clear()
        else:
            self._memories.pop(contender, None)

    def _speculation(self, method: str) -> Speculation:
        draft = self._draft if PROPOSERS.get(split_method(method)[0]).takes_draft else None
        return replace(self.llm.speculation, method=method, draft=draft, proposer=None)

    @contextmanager
    def active(self, contender: Contender) -> Iterator[Recorder]:
        """Context manager: make ``llm`` generate as the contender. Yields the recorder of its decoding rounds."""
        self.prepare(contender)
        llm, recorder = self.llm, Recorder(self._policies[contender])
        engine = self._engines[PLAIN if contender.is_plain else contender.method]
        before, policy = llm.engine, engine.policy
        llm.engine, llm.proposer = engine, engine.proposer
        engine.policy, engine.proposer.memory = recorder, self._memories.get(contender)
        try:
            yield recorder
        finally:
            self._memories[contender] = engine.proposer.memory
            engine.policy = policy
            llm.engine, llm.proposer = before, before.proposer
