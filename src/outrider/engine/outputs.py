"""What a user gets back: whole completions, chunks of a stream, and what was there when an interrupt came."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.engine.engine import Emission
from outrider.engine.logprobs import TokenLogprobs
from outrider.engine.stats import GenerationStats


@dataclass(slots=True)
class Completion:
    """One sample of one prompt."""

    request_id: str
    prompt_index: int
    sample_index: int
    num_prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # a stop token included, its text not
    origins: list[str] = field(default_factory=list)  # of each token: "accepted", "corrected", "bonus" or "plain"
    logprobs: list[TokenLogprobs] | None = None  # where SamplingParams.logprobs asked for them
    finish_reason: str | None = None  # "stop", "length", "error" or "abort"
    error: str | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)

    def add(self, emission: Emission) -> Chunk:
        """Appends what a step emitted, and gives it back as a chunk."""
        self.text += emission.text
        self.token_ids += emission.token_ids
        self.origins += emission.origins
        if emission.logprobs is not None:
            self.logprobs = (self.logprobs or []) + emission.logprobs
        self.finish_reason = emission.finish_reason
        self.error = emission.error
        self.stats = emission.stats
        return Chunk(
            self.request_id,
            self.prompt_index,
            self.sample_index,
            emission.text,
            emission.token_ids,
            emission.origins,
            emission.logprobs,
            emission.finish_reason,
            emission.error,
            emission.stats if emission.finish_reason is not None else None,
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added to one completion. ``text`` may be empty while a character or a stop string is undecided."""

    request_id: str
    prompt_index: int
    sample_index: int
    text: str
    token_ids: list[int]
    origins: list[str]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None  # set in the last chunk
    error: str | None
    stats: GenerationStats | None  # set in the last chunk


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during ``LLM.generate``: carries the completions as far as they had come."""

    def __init__(self, completions: list[Completion]) -> None:
        super().__init__("generation was interrupted")
        self.completions = completions
