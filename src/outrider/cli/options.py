"""Groups of command-line options, shared by the commands. Each dataclass field is an option.

Defaults here mean "not given"; the default values are declared once, in the dataclasses that use them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

if TYPE_CHECKING:
    from outrider.types import SamplingParams

Result = TypeVar("Result")
MODEL, METHOD, SAMPLING = "Models", "Drafts", "Sampling"
READABLE_TEMPERATURE, READABLE_TOP_P = 0.7, 0.9


@dataclass(frozen=True)
class ModelOptions:
    """Models and how to run them."""

    target: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of the target (default: the embedded model).", rich_help_panel=MODEL),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of a draft model or of heads.", rich_help_panel=MODEL),
    ] = None
    verifier: Annotated[
        str | None,
        typer.Option(
            help="Acceptance rule: block, rejection, exact, or typical, which is lossy (default: block).",
            rich_help_panel=MODEL,
        ),
    ] = None
    same_text: Annotated[
        bool,
        typer.Option(
            "--same-text", help="Emit the same tokens with and without drafts, at a small cost.", rich_help_panel=MODEL
        ),
    ] = False
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, float16 or auto (default: auto).", rich_help_panel=MODEL),
    ] = None
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1 (default: a GPU if there is one).", rich_help_panel=MODEL)
    ] = None
    max_len: Annotated[
        int | None,
        typer.Option(help="Context length in tokens, prompt included; determines the cache size.", rich_help_panel=MODEL),
    ] = None
    compile: Annotated[
        str | None,
        typer.Option(help="Compile the passes: auto, always or never (default: auto).", rich_help_panel=MODEL),
    ] = None


@dataclass(frozen=True)
class MethodOptions:
    """Source and number of drafts."""

    method: Annotated[
        str | None,
        typer.Option(
            help="Drafting method: plain, draft, cross-tokenizer, ngram, suffix, early-exit, low-bit, medusa, eagle, or"
            " two joined by a plus; append :option=value for options (default: draft if there is one, else"
            " ngram).",
            rich_help_panel=METHOD,
        ),
    ] = None
    k: Annotated[
        str | None,
        typer.Option("--k", help="Drafts per round: a number, or auto (default: auto).", rich_help_panel=METHOD),
    ] = None


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling settings."""

    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens to generate (default: 256).", rich_help_panel=SAMPLING)
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "-t", help="Temperature; 0 is greedy (default: 0).", rich_help_panel=SAMPLING),
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.", rich_help_panel=SAMPLING)] = (
        None
    )
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens up to this total probability.", rich_help_panel=SAMPLING)
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens less likely than this fraction of the likeliest.", rich_help_panel=SAMPLING),
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Penalty on tokens of prompt and output; 1 is off.", rich_help_panel=SAMPLING)
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="Over the output, -2 to 2; 0 is off.", rich_help_panel=SAMPLING)
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Over the output, -2 to 2; 0 is off.", rich_help_panel=SAMPLING)
    ] = None
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.", rich_help_panel=SAMPLING)] = None
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos", help="Continue after the end-of-text token.", rich_help_panel=SAMPLING)
    ] = None
    seed: Annotated[int | None, typer.Option(help="Random seed.", rich_help_panel=SAMPLING)] = None

    def or_readable(self) -> SamplingOptions:
        """These options; without a temperature those at which a model's text reads best: greedy text of small ones loops."""
        if self.temperature is not None:
            return self
        return replace(self, temperature=READABLE_TEMPERATURE, top_p=READABLE_TOP_P if self.top_p is None else self.top_p)

    def params(self, **more: Any) -> SamplingParams:
        """Return ``SamplingParams`` with the given values. Raises ``OutriderError`` for a value out of range."""
        from outrider.types import SamplingParams

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["stop"] = tuple(self.stop or ()) or None
        return SamplingParams(**{name: value for name, value in (given | more).items() if value is not None})


def with_groups(command: Callable[..., Result]) -> Callable[..., Result]:
    """Let a command take option groups: each dataclass parameter becomes one option per field."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=kind))
            continue
        groups[parameter.name] = kind
        options = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=options[field.name])
            for field in fields(kind)
        ]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]

    @functools.wraps(command)
    def flat(**values: Any) -> Result:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        return command(**values)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def parse_k(value: str | None) -> int | str:
    """Parse ``"auto"`` or a number of drafts. Raises ``OutriderError`` for anything else, negative numbers included."""
    from outrider.types import OutriderError

    if value is None or value.strip().lower() == "auto":
        return "auto"
    try:
        number = int(value)
    except ValueError:
        raise OutriderError(f"invalid --k {value!r}: expected a number of drafts, or auto") from None
    if number < 0:
        raise OutriderError(f"invalid --k {number}: expected 0 (plain decoding) or more")
    return number


def parse_list(option: str, text: str, parse: Callable[[str], Result]) -> tuple[Result, ...]:
    """Parse ``"1,4,8"`` into distinct items. Raises ``OutriderError`` for an item that ``parse`` refuses."""
    from outrider.types import OutriderError

    items: list[Result] = []
    for item in (part.strip() for part in text.split(",")):
        try:
            value = parse(item)
        except ValueError:
            raise OutriderError(f"invalid {option} {text!r}: cannot read {item!r}") from None
        if value not in items:
            items.append(value)
    return tuple(items)
