"""Several methods over one loaded target, measured in turn in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.engine.config import build_engine, build_policy, build_proposer
from outrider.engine.engine import Engine
from outrider.engine.round import RoundResult
from outrider.method_text import split_method
from outrider.proposers.base import Proposer
from outrider.registry import PLAIN, PROPOSERS
from outrider.types import Round

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.engine.options import ModelSource


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


PLAIN_CONTENDER = Contender(PLAIN, 0)


class Contenders:
    """Switch one ``LLM`` between methods and draft lengths; target, cache and compiled passes are shared."""

    def __init__(self, llm: LLM, draft: ModelSource | None = None, proposers: Mapping[str, Proposer] | None = None) -> None:
        """``draft``: default draft for methods that take one; ``proposers``: method -> existing proposer."""
        self.llm = llm
        self._draft, self._given = draft, proposers or {}
        self._proposers: dict[str, Proposer] = {llm.proposer.name: llm.proposer}  # one for all lengths of a method
        self._engines: dict[Contender, Engine] = {}
        self._memories: dict[Contender, object] = {}  # proposer memory of each contender's own runs

    def prepare(self, contender: Contender) -> Contender:
        """Load what the method needs. Return the contender with at most the method's maximum number of drafts.

        Raises ``OutriderError`` for an unknown method or a draft that does not fit.
        """
        llm, method = self.llm, PLAIN if contender.is_plain else contender.method
        if contender not in self._engines:
            draft = self._draft if PROPOSERS.get(split_method(method)[0]).takes_draft else None
            k = 0 if contender.is_plain else contender.k
            speculation = replace(llm.speculation, method=method, draft=draft, proposer=None, num_draft_tokens=k)
            if method not in self._proposers:
                found = self._given.get(method) or build_proposer(speculation, llm.runner, llm.tokenizer)
                self._proposers[method] = found
            proposer = self._proposers[method]
            policy = build_policy(speculation, llm.runner, proposer)
            self._engines[contender] = build_engine(speculation, llm.runner, proposer, policy, llm.engine.scheduler)
        most = self._proposers[method].max_drafts
        return replace(contender, k=min(contender.k, most)) if isinstance(contender.k, int) else contender

    def forget(self, contender: Contender | None = None) -> None:
        """Clear the memory of one contender, or of all: it would contain the output of a prompt that is repeated."""
        if contender is None:
            self._memories.clear()
        else:
            self._memories.pop(contender, None)

    @contextmanager
    def active(self, contender: Contender) -> Iterator[list[Round]]:
        """Context manager: make ``llm`` generate as the contender. Yields a list to which its decoding rounds are added."""
        self.prepare(contender)
        llm, rounds = self.llm, list[Round]()

        def record(_: RoundResult, round_: Round) -> None:
            if not round_.is_prefill:
                rounds.append(round_)

        before, engine = llm.engine, self._engines[contender]
        llm.engine, llm.proposer, engine.observer = engine, engine.proposer, record
        engine.proposer.memory = self._memories.get(contender)
        try:
            yield rounds
        finally:
            self._memories[contender] = engine.proposer.memory
            engine.observer = None
            llm.engine, llm.proposer = before, before.proposer
