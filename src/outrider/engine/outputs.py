"""Results of generation: the engine's ``Emission``, and its extensions for streams and completions."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from outrider.engine.logprobs import TokenLogprobs
from outrider.engine.stats import GenerationStats


@dataclass(slots=True)
class Emission:
    """Output of one request in one step, or in several consecutive steps."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)  # including a stop token, whose text is not in ``text``
    origins: list[str] = field(default_factory=list)  # of each token: "accepted", "corrected", "bonus", "grammar" or "plain"
    text: str = ""  # empty while text is held back for an incomplete character or a possible stop string
    logprobs: list[TokenLogprobs] | None = None  # one per token, if SamplingParams.logprobs is set
    finish_reason: str | None = None  # None while it runs, then "stop", "length", "error" or "abort"
    stop_reason: int | str | None = None  # stop string or stop token that ended it; None for the end-of-text token
    error: str | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)  # of the request, updated while it runs
    # Of the prompt's tokens after the first, in the first emission of a request with ``scores_prompt``.
    prompt_logprobs: list[TokenLogprobs] | None = None

    def append(self, later: Emission) -> None:
        """Append the next emission of the same request."""
        self.token_ids += later.token_ids
        self.origins += later.origins
        self.text += later.text
        if later.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.error = later.error
        if later.stats.num_steps:  # an error of a request that the engine does not know has no statistics
            self.stats = later.stats


EMISSION_FIELDS = tuple([each.name for each in fields(Emission)])


@dataclass(slots=True)
class Chunk(Emission):
    """Output of one step for one completion."""

    prompt_index: int = 0
    sample_index: int = 0


@dataclass(slots=True)
class Completion(Chunk):
    """One sample of one prompt: the sum of its chunks."""

    num_prompt_tokens: int = 0

    def add(self, emission: Emission) -> Chunk:
        """Append an emission and return it as a chunk."""
        self.append(emission)
        shared = {name: getattr(emission, name) for name in EMISSION_FIELDS}
        return Chunk(**shared, prompt_index=self.prompt_index, sample_index=self.sample_index)


@dataclass(slots=True)
class Generation:
    """All samples of one prompt, ``SamplingParams.n`` of them."""

    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    outputs: list[Completion] = field(default_factory=list)


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during ``LLM.generate``. ``generations`` hold the output so far."""

    def __init__(self, generations: list[Generation]) -> None:
        super().__init__("generation was interrupted")
        self.generations = generations
