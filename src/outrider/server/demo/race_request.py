"""Visitors' requests, and the type of the events sent back. Independent of engine and HTTP."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from outrider.server.protocol import Body

Event = dict[str, Any]  # one message to the page, with its kind under "type"
MAX_PROMPT, MAX_TOKENS = 4000, 256  # characters; tokens to generate
MAX_DRAFTS = 16  # maximum of the page's slider


class RaceRequest(Body):
    """The request of one race. Read it from JSON: pydantic's parser refuses unpaired surrogates."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True)

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
    method: str
    k: Annotated[int, Field(ge=0, le=MAX_DRAFTS)] | Literal["auto"] = 4  # drafts per round
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    accuracy: Annotated[float, Field(ge=0, le=1)] = 1.0  # share of drafts that are not replaced by wrong tokens
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 128
    seed: Annotated[int, Field(ge=0, le=2**53)] = 0
