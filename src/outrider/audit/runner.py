"""Run the engine for an audit: samples of one prompt, the target's distributions along them, and greedy output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from outrider.audit.evidence import Sample
from outrider.audit.watching import Replay, Watched
from outrider.engine.engine import Engine
from outrider.engine.outputs import Emission
from outrider.engine.policy import FixedLength
from outrider.engine.scheduler import Scheduler
from outrider.proposers.base import Proposer
from outrider.proposers.plain import PlainProposer
from outrider.runner import ModelRunner
from outrider.sampling.randomness import key_of
from outrider.types import OutriderError, Request, SamplingParams
from outrider.verifiers.base import Verifier
from outrider.verifiers.rejection import RejectionVerifier

WAVES = 12  # batches of samples per prefill of the prompt
SOURCE_ID = "prompt-source"  # id of the request whose cache the samples copy


@dataclass(frozen=True)
class RoundSetup:
    """How to generate: proposer, verifier and drafts per round."""

    proposer: Proposer = field(default_factory=PlainProposer)
    verifier: Verifier = field(default_factory=RejectionVerifier)
    k: int = 0
    coupled: bool = False  # same-text mode: noise keyed by seed and position


class AuditRunner:
    """Run audits on one target: engines that share its ``ModelRunner``."""

    def __init__(self, target: ModelRunner, batch: int | None = None) -> None:
        """``batch``: number of concurrent sequences; None for the target's maximum."""
        self.target, self.batch = target, batch or target.max_batch
        self.faults = 0  # proposer failures so far, once for each affected request

    def generate(self, setup: RoundSetup, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Emission]:
        """Generate one output per prompt, in batches."""
        engine, params = self._engine(setup), _endless(params)
        requests = [_request(f"text-{i}", prompt, params, params.seed or 0) for i, prompt in enumerate(prompts)]
        for request in requests:
            engine.add(request)
        return self._finish(engine, requests)

    def sample(
        self, setup: RoundSetup, prompt: Sequence[int], params: SamplingParams, num_samples: int, length: int, seed: int
    ) -> Iterator[list[Sample]]:
        """Yield ``num_samples`` continuations of one prompt in waves; the first ``length`` tokens of each are tested.

        One more token is generated, so that the last tested one can also come from a round with drafts.
        """
        params = replace(_endless(params), max_tokens=length + 1)
        watched = Watched(setup.verifier)
        setup = replace(setup, verifier=watched)
        for start in range(0, num_samples, self._wave):
            count = min(self._wave, num_samples - start)
            requests = [_request(f"sample-{start + i}", prompt, params, key_of(seed, start + i) >> 1) for i in range(count)]
            texts = self._run_from_one_prompt(self._engine(setup), requests)
            yield [_sample(text, watched.notes.get(text.request_id, {}), length) for text in texts]
            watched.notes.clear()

    def follow(
        self,
        prompt: Sequence[int],
        texts: Sequence[Sequence[int]],
        params: SamplingParams,
        show: Callable[[list[tuple[int, ...]], Tensor], None],
    ) -> None:
        """Replay plain decoding along given sequences and report the target's distributions [B, V] after each prefix."""
        params = _endless(params)
        for start in range(0, len(texts), self._wave):
            part = texts[start : start + self._wave]
            requests = [
                _request(f"replay-{i}", prompt, replace(params, max_tokens=len(text)), 0) for i, text in enumerate(part)
            ]
            tokens_of = {request.request_id: text for request, text in zip(requests, part, strict=True)}

            def shown(requests: Sequence[Request], probs: Tensor) -> None:
                show([tuple(request.token_ids[request.num_prompt_tokens :]) for request in requests], probs)

            self._run_from_one_prompt(self._engine(RoundSetup(verifier=Replay(tokens_of, shown))), requests)

    @property
    def _wave(self) -> int:
        return WAVES * max(self.batch - 1, 1)

    def _engine(self, setup: RoundSetup) -> Engine:
        scheduler = Scheduler(self.batch, self.target.max_len)
        return Engine(self.target, setup.proposer, setup.verifier, FixedLength(setup.k), scheduler, setup.coupled)

    def _run_from_one_prompt(self, engine: Engine, requests: Sequence[Request]) -> list[Emission]:
        """Run requests with one prompt: the first prefills it, the others copy its cache while it runs.

        If they do not fit into one batch, an additional request runs until they are done, as the source of the copies.
        """
        first = requests[0]
        if len(requests) > self.batch > 1:
            room = self.target.max_len - first.num_prompt_tokens
            first = _request(SOURCE_ID, first.token_ids, replace(first.params, max_tokens=room), first.seed)
            engine.add(first)
        for request in requests:
            engine.add(request, fork_of=None if request is first else first.request_id)
        return self._finish(engine, requests)

    def _finish(self, engine: Engine, requests: Sequence[Request]) -> list[Emission]:
        """Run the engine until the requests have ended, and return the whole output of each."""
        texts = {request.request_id: Emission(request.request_id) for request in requests}
        left = set(texts)
        try:
            while left:
                for emission in engine.step():
                    if emission.finish_reason == "error":
                        raise OutriderError(emission.error or "the target failed")
                    if emission.finish_reason is not None:
                        left.discard(emission.request_id)
                    if emission.request_id in texts:
                        texts[emission.request_id].append(emission)
        finally:
            for request_id in (SOURCE_ID, *left):
                engine.abort(request_id)
            self.faults += engine.stats.faults
        return list(texts.values())


def _endless(params: SamplingParams) -> SamplingParams:
    """Return settings that ignore end-of-sequence tokens, so that all outputs have the same length."""
    return replace(params, min_tokens=0, ignore_eos=True, n=1, stop=(), stop_token_ids=())


def _request(name: str, prompt: Sequence[int], params: SamplingParams, seed: int) -> Request:
    return Request(name, list(prompt), len(prompt), params, seed)


def _sample(text: Emission, notes: dict[int, float], length: int) -> Sample:
    return Sample(
        tuple(text.token_ids[:length]),
        tuple(text.origins[:length]),
        {place: prob for place, prob in notes.items() if place < length},
    )
