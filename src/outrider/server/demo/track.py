"""The demo's request, and the engines that run it: one for plain decoding and one per method, which share one target."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from outrider.bench.race import Race, engine_for
from outrider.engine.config import build_policy, build_proposer, build_verifier
from outrider.engine.detokenizer import DetokenizerFactory
from outrider.engine.engine import Engine
from outrider.engine.methods import fitting_proposers
from outrider.engine.policy import FixedLength
from outrider.proposers.degraded import Degraded
from outrider.registry import PLAIN, SPECULATIVE
from outrider.server.answers import TokenTexts
from outrider.server.demo.race import Event, ShownRace
from outrider.server.protocol import Body
from outrider.types import OutriderError, SamplingParams
from outrider.verifiers.rejection import RejectionVerifier

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.engine.options import ModelSource
    from outrider.proposers.base import Proposer

logger = logging.getLogger(__name__)

MAX_PROMPT, MAX_TOKENS = 4000, 256  # characters; tokens to generate
MAX_DRAFTS = 16  # maximum of the page's slider
WARMUP_TOKENS = 12


class RaceRequest(Body):
    """The request of one race. Read it from JSON: pydantic's parser refuses unpaired surrogates."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True)

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
    method: str
    num_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFTS)] | Literal["auto"] = 4
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    accuracy: Annotated[float, Field(ge=0, le=1)] = 1.0  # share of drafts that are not replaced by wrong tokens
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 128
    seed: Annotated[int, Field(ge=0, le=2**53)] = 0


class Track:
    """Engines that share one loaded target: plain decoding, and one per available method. For one thread, like an engine."""

    def __init__(self, llm: LLM, methods: Sequence[str], draft: ModelSource | None = None, must_fit: bool = False) -> None:
        """``llm`` must allow a batch of two; ``draft`` is the default draft of methods that take one.

        Raises ``OutriderError`` without a tokenizer, if no method fits the target, or with ``must_fit`` if any does not.
        """
        if llm.tokenizer is None:
            raise OutriderError("the demo requires a tokenizer, but this target has none")
        self.llm, self._names, self._detokenizers = llm, TokenTexts(llm.tokenizer), DetokenizerFactory(llm.tokenizer)
        self._names.load()
        verifier = build_verifier(llm.speculation)
        self.is_lossless = verifier.lossless
        self.is_same_text = llm.speculation.same_text
        self._has_chances = type(verifier) is RejectionVerifier and not self.is_same_text
        self._plain = self._engine(build_proposer(replace(llm.speculation, method=PLAIN, proposer=None), llm.runner, None))
        speculation = replace(llm.speculation, draft=draft)
        proposers, reasons = fitting_proposers(speculation, llm.runner, llm.tokenizer, methods)
        for method, misfit in reasons.items():
            if must_fit:
                raise OutriderError(misfit)
            logger.info("not offered: %s (%s)", method, misfit)
        self._engines = {method: self._engine(proposer) for method, proposer in proposers.items()}
        if not self._engines:
            raise OutriderError(f"none of the methods {', '.join(methods)} fits this target")

    @property
    def methods(self) -> dict[str, int]:
        """Return the available methods with their maximum K, limited to the page's maximum."""
        return {name: min(engine.proposer.max_drafts, MAX_DRAFTS) for name, engine in self._engines.items()}

    def warm_up(self) -> float:
        """Generate a few tokens with every method, so that no race includes compilation. Return plain decoding's tokens/s."""
        speed = 0.0
        for method in self._engines:
            for temperature in (0.0, 1.0):
                wanted = RaceRequest(prompt="def f(x):\n", method=method, temperature=temperature, max_tokens=WARMUP_TOKENS)
                for events in self.race(wanted, self.encode(wanted)):
                    if events[-1]["type"] == "finished":
                        speed = events[-1]["plain_tok_s"] or speed
        return speed

    def encode(self, wanted: RaceRequest) -> list[int]:
        """Return the prompt's token ids. Raises ``OutriderError`` for an invalid request."""
        if wanted.method not in self._engines:
            raise OutriderError(f"unknown method {wanted.method[:40]!r}: available are {', '.join(self._engines)}")
        prompt = self.llm.encode(wanted.prompt)
        room = self.llm.runner.max_len - wanted.max_tokens
        if not 0 < len(prompt) <= room:
            raise OutriderError(
                f"the prompt has {len(prompt)} tokens; the limit is {max(room, 0)} with max_tokens={wanted.max_tokens}"
            )
        return prompt

    def race(self, wanted: RaceRequest, prompt: Sequence[int]) -> Generator[list[Event], None, None]:
        """Run a race. Close the iterator to end it early."""
        engine = self._engines[wanted.method]
        proposer = engine.proposer
        assert isinstance(proposer, Degraded)
        proposer.accuracy = wanted.accuracy
        speculation = replace(self.llm.speculation, num_draft_tokens=wanted.num_draft_tokens)
        engine.policy = build_policy(speculation, self.llm.runner, proposer)  # each race starts with an untrained policy
        params = SamplingParams(max_tokens=wanted.max_tokens, temperature=wanted.temperature, seed=wanted.seed, ignore_eos=True)
        race = Race({PLAIN: self._plain, SPECULATIVE: engine}, prompt, params)
        faults = engine.stats.faults
        for events in ShownRace(race, self._names, self._detokenizers, self._has_chances).run():
            if events[-1]["type"] == "finished":
                events[-1]["faults"] = engine.stats.faults - faults
            yield events

    def _engine(self, proposer: Proposer) -> Engine:
        """Return an engine for a method over the shared target."""
        return engine_for(self.llm, Degraded(proposer) if proposer.max_drafts else proposer, FixedLength(0))
