"""Request body of OpenAI's completions."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from outrider.engine.prompts import as_prompts
from outrider.options import INT32
from outrider.server.mistakes import refused
from outrider.server.protocol import MAX_LOGPROBS, SamplingFields, Text, TokenIds

MIDDLE = refused("fill-in-the-middle is not supported: write the model's own markers into the prompt", allowed="")


class CompletionBody(SamplingFields):
    echo: bool = False
    prompt: Text | TokenIds | Annotated[list[Text], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: int = Field(16, ge=1, le=INT32)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: Annotated[Text, MIDDLE] = ""
    best_of: int | None = None  # accepted with the only value that changes nothing: n, which is also its default

    @model_validator(mode="after")
    def _can_be_answered(self) -> Self:
        if self.echo and self.stream:
            raise ValueError("echo cannot be combined with stream")
        if self.best_of not in (None, self.n):
            raise ValueError(f"invalid best_of {self.best_of}: expected n={self.n}, because all samples are returned")
        return self

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts as a list of strings or token ids."""
        return as_prompts(self.prompt)
