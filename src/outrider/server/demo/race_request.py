"""Validation of visitors' requests, and the type of the events sent back.

Independent of engine and HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from outrider.registry import AUTO
from outrider.types import OutriderError, check_text

Event = dict[str, Any]  # one message to the page, with its kind under "type"
MAX_DRAFTS = 16  # maximum of the page's slider


@dataclass(frozen=True)
class Limits:
    """Limits per visitor."""

    prompt_chars: int = 4000
    max_tokens: int = 256
    body_bytes: int = 32_768
    waiting: int = 32  # visitors in the queue, the racing one included
    seconds: float = 120.0  # maximum duration of a race, both lanes together


@dataclass(frozen=True)
class RaceRequest:
    """The request of one race."""

    prompt: str
    method: str
    k: int | str = 4  # drafts per round, or "auto"
    temperature: float = 0.0
    accuracy: float = 1.0  # share of drafts that are not replaced by wrong tokens
    max_tokens: int = 128
    seed: int = 0

    @classmethod
    def read(cls, data: object, limits: Limits) -> RaceRequest:
        """Parse a JSON body. Raises ``OutriderError`` with one line that names the problem."""
        if not isinstance(data, Mapping):
            raise OutriderError("the body must be a JSON object")
        known = {each.name for each in fields(cls)}
        unknown = [str(name) for name in data if name not in known]
        if unknown:
            raise OutriderError(f"unknown field {unknown[0][:40]!r}; known: {', '.join(sorted(known))}")
        for name in ("prompt", "method"):
            if not isinstance(data.get(name), str) or not data[name]:
                raise OutriderError(f"{name} must be a non-empty string")
        check_text(data["prompt"])
        if len(data["prompt"]) > limits.prompt_chars:
            raise OutriderError(f"the prompt has {len(data['prompt'])} characters; the limit is {limits.prompt_chars}")
        k = data.get("k", cls.k)
        return cls(
            data["prompt"],
            data["method"],
            AUTO if k == AUTO else int(_number("k", k, 0, MAX_DRAFTS, whole=True)),
            _number("temperature", data.get("temperature", cls.temperature), 0, 2),
            _number("accuracy", data.get("accuracy", cls.accuracy), 0, 1),
            int(_number("max_tokens", data.get("max_tokens", cls.max_tokens), 1, limits.max_tokens, whole=True)),
            int(_number("seed", data.get("seed", cls.seed), 0, 2**53, whole=True)),
        )


def _number(name: str, value: Any, low: float, high: float, whole: bool = False) -> float:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise OutriderError(f"{name} must be {'an integer' if whole else 'a number'} from {low} to {high}")
    return value
