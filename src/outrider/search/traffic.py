"""Traffic: prompts with their sampling settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.bench.workloads import Prompt, Refused, builtin, encode_all, entries, interleaved
from outrider.options import INT32, SAMPLING, declared
from outrider.types import OutriderError, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")
# Sampling fields of a line, with OpenAI's alternative names. Other fields are ignored.
SETTINGS = [name for name, each in declared(SamplingParams).items() if each.panel == SAMPLING]
ALIASES = {"max_completion_tokens": "max_tokens"}
OPENAI_TEMPERATURE = 1.0  # default of requests without a temperature


@dataclass(frozen=True)
class TrafficRequest:
    """One prompt of the traffic with its sampling settings."""

    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class RecordedPrompt:
    """A prompt as token ids, and the target's output."""

    prompt: list[int]
    params: SamplingParams
    output: list[int]

    @property
    def replay_params(self) -> SamplingParams:
        """Return settings that generate exactly as many tokens as ``output`` has, so that times are comparable."""
        most = len(self.output)
        least = min(self.params.min_tokens, most)
        return replace(self.params, max_tokens=most, min_tokens=least, ignore_eos=True, stop=(), stop_token_ids=())


def read_file(path: Path, most: int, defaults: SamplingParams) -> list[TrafficRequest]:
    """Read ``most`` prompts of a JSONL file or of a request log, spread evenly over it.

    A line has a format of ``bench.workloads.from_file``, or is the body of an OpenAI request, alone or under ``"body"``. Its
    settings override ``defaults``, with at most ``defaults.max_tokens`` tokens. Raises ``OutriderError`` with the line number
    for other lines and invalid values; such requests of a log are skipped with a warning.
    """
    found = spread(entries(path, unwrap=_body, may_skip=_is_logged), most)
    seeded = [replace(defaults, seed=_seed(defaults, index)) for index in range(len(found))]
    return [TrafficRequest(prompt, settings(item, params)) for (prompt, item), params in zip(found, seeded, strict=True)]


def read_builtin(workloads: Sequence[str], most: int, defaults: SamplingParams) -> list[TrafficRequest]:
    """Return ``most`` built-in prompts, in turn from each workload. Raises ``OutriderError`` for an unknown workload."""
    turns = interleaved([builtin(workload) for workload in workloads])
    return [TrafficRequest(prompt, replace(defaults, seed=_seed(defaults, i))) for i, prompt in enumerate(turns[:most])]


def encoded(
    tokenizer: PreTrainedTokenizerBase | None, requests: Sequence[TrafficRequest], max_len: int
) -> list[RecordedPrompt]:
    """Tokenize prompts. A prompt that is too long for the context keeps its end.

    Raises ``OutriderError`` without a tokenizer, and for a prompt without tokens.
    """
    texts = []
    for each, token_ids in zip(requests, encode_all(tokenizer, [each.prompt for each in requests]), strict=True):
        room = max_len - each.params.max_tokens - 1
        if room < 1:
            raise OutriderError(
                f"max_tokens={each.params.max_tokens} leaves no room for a prompt in a context of {max_len} tokens: lower it"
            )
        texts.append(RecordedPrompt(token_ids[-room:], each.params, []))
    return texts


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most ``count`` items, spread evenly."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def settings(item: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """Return the defaults with a line's sampling settings. Raises ``OutriderError`` for an invalid value."""
    named = {ALIASES.get(name, name): value for name, value in item.items() if value is not None}
    given = {name: value for name, value in named.items() if name in SETTINGS}
    given |= {name: int(value) for name, value in given.items() if isinstance(value, float) and value.is_integer()}
    params = replace(defaults, **{"max_tokens": INT32, **given})  # without its own, a line has the command's limit
    most = min(params.max_tokens, defaults.max_tokens)
    return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))


def _body(line: dict[str, Any]) -> dict[str, Any]:
    """Return the request in a line of a log. Raises ``Refused`` for a log line without the request's text."""
    found = line.get("body", line)
    if not isinstance(found, dict):
        raise Refused('"body" must be a JSON object')
    if {"event", "request_id"} <= found.keys():
        raise Refused("a log of outrider serve, which contains no text: expected request bodies, one per line (see --record)")
    body: dict[str, Any] = dict(found)
    if _is_logged(line):
        body = {"temperature": OPENAI_TEMPERATURE} | {name: value for name, value in body.items() if value is not None}
    try:
        settings(body, SamplingParams())
    except OutriderError as wrong:
        raise Refused(str(wrong)) from None
    return body


def _is_logged(line: Mapping[str, Any]) -> bool:
    """Return whether a line is from a log of requests, not written for Outrider: it may contain what no engine of ours runs."""
    return "body" in line or "model" in line


def _seed(defaults: SamplingParams, index: int) -> int:
    return (defaults.seed or 0) + index
