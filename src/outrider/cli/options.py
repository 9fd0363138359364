"""Groups of command-line options, shared by the commands. Each dataclass field is an option.

Name, values and help of an option are declared once, in ``SamplingParams``, ``Speculation``, ``RunnerConfig`` or
``ServerConfig``; a field here adds the option to a command. A default of None means "not given".
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_origin, get_type_hints

import typer

from outrider.bench.workload_names import WORKLOADS, known_workload
from outrider.engine.options import Speculation
from outrider.errors import OutriderError
from outrider.options import OPTION, declared, flag_name
from outrider.registry import PLAIN
from outrider.runner.config import RunnerConfig
from outrider.sampling_params import SamplingParams

Result = TypeVar("Result")
READABLE_TEMPERATURE, READABLE_TOP_P = 0.7, 0.9
ARGUMENT = re.compile(r"(?<![\w:./=+-])(\w+)=(\.{3}|[\w.:]*\w)")  # max_len=512; not an option of a method (draft:top_k=2)
FLAG = "flag"  # key of a Reference, or of typer's option, in a field's metadata
INFLATABLE = "needs a Llama, Mistral, Qwen2 or Qwen3 model in a local folder, in 16 or 32 bits."


@dataclass(frozen=True)
class Reference:
    """Reference from a command to an option that is declared elsewhere."""

    config: type  # dataclass with a field of the same name
    several: bool  # accepts several values, separated by commas
    more: str  # appended to the declared help


def given(config: type, default: Any = None, *, several: bool = False, more: str = "") -> Any:
    """Return a dataclass field for a command's option, declared by the field of the same name in ``config``."""
    return field(default=default, metadata={FLAG: Reference(config, several, more)})


def flag(help: str, default: Any = None, *names: str, panel: str | None = None, **more: Any) -> Any:
    """Declare an option of one command: a field of a group, or the default of a parameter.

    ``names``: flags, by default ``--`` and the name; ``panel``: heading in the help; ``more``: arguments of ``typer.Option``.
    """
    return field(default=default, metadata={FLAG: typer.Option(*names, help=help, rich_help_panel=panel, **more)})


@dataclass(frozen=True)
class ModelOptions:
    """Models and how to run them."""

    target: str | None = given(Speculation)
    draft: str | None = given(Speculation)
    download_draft: bool = given(Speculation, False)
    verifier: str | None = given(Speculation)
    same_text: bool = given(Speculation, False)
    dtype: str | None = given(RunnerConfig)
    weights: str | None = given(RunnerConfig)
    device: str | None = given(RunnerConfig)
    max_len: int | None = given(RunnerConfig)
    compile: str | None = given(RunnerConfig)
    self_check: bool = given(RunnerConfig, True)
    trust_remote_code: bool = given(RunnerConfig, False)


@dataclass(frozen=True)
class MethodOptions:
    """Method and number of drafts."""

    method: str | None = given(Speculation)
    num_draft_tokens: str | int | None = given(Speculation)
    grammar_drafts: bool | None = given(Speculation)


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling settings."""

    defaults: ClassVar[dict[str, Any]] = {}  # those that differ from the declared ones

    max_tokens: int | None = given(SamplingParams)
    temperature: float | None = given(SamplingParams)
    top_k: int | None = given(SamplingParams)
    top_p: float | None = given(SamplingParams)
    min_p: float | None = given(SamplingParams)
    repetition_penalty: float | None = given(SamplingParams)
    presence_penalty: float | None = given(SamplingParams)
    frequency_penalty: float | None = given(SamplingParams)
    stop: list[str] | None = given(SamplingParams)
    min_tokens: int | None = given(SamplingParams)
    ignore_eos: bool | None = given(SamplingParams)
    seed: int | None = given(SamplingParams)

    def params(self, **more: Any) -> SamplingParams:
        """Return ``SamplingParams`` of the given values, else ``more``, else ``defaults``.

        Raises ``OutriderError`` for an invalid value.
        """
        values = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}
        return SamplingParams(**self.defaults | more | values)


@dataclass(frozen=True)
class ReadableOptions(SamplingOptions):
    """Sampling settings whose defaults give readable text: greedy outputs often loop."""

    defaults: ClassVar[dict[str, Any]] = {"temperature": READABLE_TEMPERATURE}
    top_p: float | None = given(SamplingParams, more=f"(default: {READABLE_TOP_P}; with --temperature: 1).")

    def params(self, **more: Any) -> SamplingParams:
        return super().params(**more if self.temperature is not None else {"top_p": READABLE_TOP_P} | more)


def with_groups(command: Callable[..., Result], panel: str | None = None) -> Callable[..., Result]:
    """Let a command take option groups: each dataclass parameter becomes one option per field.

    A parameter ``Annotated[dict[str, Any], Config]`` has the options of ``Config`` and receives those that were given.
    Fields are declared by ``given``, ``flag`` or ``outrider.options.option``; other fields are not options. A class attribute
    ``panel`` of the dataclass is the heading of its options in the help; the argument ``panel`` is that of all other options.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, Any]] = {}  # parameter -> dataclass that declares the options, type of the value
    declarations: dict[str, Any] = {}  # option -> ``Reference`` or typer's option
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        group = kind.__metadata__[0] if get_origin(kind) is Annotated else kind
        if not isinstance(group, type) or not is_dataclass(group):
            if isinstance(own := parameter.default, Field):
                parameter = parameter.replace(default=own.default)
                shared = declarations[parameter.name] = own.metadata[FLAG]
                kind = _annotation(parameter.name, shared, own.default, kind, panel)
            parameters.append(parameter.replace(annotation=kind))
            continue
        groups[parameter.name] = group, dict if group is not kind else group
        types = get_type_hints(group, include_extras=True)
        for each in options_of(group):
            is_own = OPTION in each.metadata  # declared by the group itself
            shared = declarations[each.name] = Reference(group, several=False, more="") if is_own else each.metadata[FLAG]
            default = None if is_own else each.default
            if each.name in (defaults := getattr(group, "defaults", {})):
                shared = replace(shared, more=f"(default: {defaults[each.name]}).")
            annotation = _annotation(each.name, shared, default, types[each.name], getattr(group, "panel", panel))
            parameters.append(
                inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]

    @functools.wraps(command)
    def flat(**values: Any) -> Result:
        for name, shared in declarations.items():
            if isinstance(shared, Reference) and not shared.several:
                values[name] = read_option(shared.config, name, values[name])
        for name, (group, kind) in groups.items():
            own = {each.name: values.pop(each.name) for each in options_of(group)}
            values[name] = kind(**{key: value for key, value in own.items() if value is not None})
        return command(**values)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def options_of(group: Any) -> list[Field[Any]]:
    """Return the fields of a group that are options of the command line."""
    return [each for each in fields(group) if FLAG in each.metadata or OPTION in each.metadata]


def _annotation(name: str, shared: Any, own_default: Any, kind: Any, panel: str | None) -> Any:
    """Return typer's annotation of an option: its type, flags and help. ``panel``: its heading, if it declares none itself.

    ``shared``: a ``Reference`` or typer's option; ``own_default``: the command's default.
    """
    if not isinstance(shared, Reference):
        shared.rich_help_panel = shared.rich_help_panel or panel
        return Annotated[kind, shared]
    option = declared(shared.config)[name]
    flags = [flag_name(name), *([f"-{option.letter}"] if option.letter else [])]
    default = getattr(shared.config, name, None)
    if default is True:  # only to switch it off
        flags = [f" /--no-{flag_name(name)[2:]}"]
    kind = str if shared.several else option.kind.flag
    metavar = f"<{kind.__name__}>" if kind in (int, float) else None
    help = option.help if default is not True else f"Do not {option.help[0].lower()}{option.help[1:]}"
    if shared.several:
        help = help.replace(f"{PLAIN}, ", "")  # of several methods it is the baseline, which is always included
    about = [help, "Several are separated by commas." if shared.several else "", shared.more]
    is_said = "(default:" in "".join(about) or own_default is not None
    if not is_said and isinstance(default, (str, int, float)) and not isinstance(default, bool):
        about.append(f"(default: {default:g})." if isinstance(default, float) else f"(default: {default}).")
    text = " ".join(part for part in about if part).replace(". (default", " (default")
    panel = panel or option.panel
    shows = default is not True
    parsed = str if metavar else kind  # by typer; ``read_option`` parses numbers
    return Annotated[parsed | None, typer.Option(*flags, help=text, metavar=metavar, rich_help_panel=panel, show_default=shows)]


def read_option(config: type, name: str, value: Any) -> Any:
    """Return the parsed value of an option, or None if it was not given. Raises ``OutriderError`` for an invalid value."""
    if value is None:
        return None
    option = declared(config)[name].in_text()
    return option.read(flag_name(name), option.from_text(value) if isinstance(value, str) else value)


def in_flags(message: str) -> str:
    """Return a message in which options written as in Python (``max_len=512``, ``stop=...``) are flags: ``--max-len 512``."""
    known = {each.name for group in (ModelOptions, MethodOptions, SamplingOptions) for each in fields(group)} | {"kv_memory"}

    def flagged(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in known:
            return found[0]
        if value == "False":
            return f"--no-{flag_name(name)[2:]}"
        return flag_name(name) if value in ("True", "...") else f"{flag_name(name)} {value}"

    return ARGUMENT.sub(flagged, message)


def values_given(group: Any) -> dict[str, Any]:
    """Return name -> value of a group's options that differ from their defaults."""
    return {each.name: value for each in fields(group) if (value := getattr(group, each.name)) != each.default}


def parse_k(text: str) -> int | str:
    """Return the number of drafts, or "auto". Raises ``OutriderError`` for an invalid value."""
    return read_option(Speculation, "num_draft_tokens", text)


def check_counts(**counts: int | None) -> None:
    """Raise ``OutriderError`` if the number of one of these options is below 1. None passes."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise OutriderError(f"invalid {flag_name(name)} {count}: expected at least 1")


def workload_names(prompts: Path | None, workloads: str | None) -> tuple[str, ...]:
    """Return the built-in workloads that ``--workloads`` names, by default all; none if prompts come from a file.

    Raises ``OutriderError`` if both are given, and for an unknown name.
    """
    if prompts is None:
        return parse_list("--workloads", ",".join(WORKLOADS) if workloads is None else workloads, known_workload)
    if workloads is not None:
        raise OutriderError("--prompts and --workloads exclude each other: give one of them")
    return ()


def parse_list(option: str, text: str, parse: Callable[[str], Result]) -> tuple[Result, ...]:
    """Parse ``"1,4,8"`` into distinct items. Raises ``OutriderError`` for an item that ``parse`` refuses.

    A ``parse`` that raises ``ValueError`` is ``int`` or ``float``.
    """
    items: list[Result] = []
    for item in (part.strip() for part in text.split(",")):
        try:
            value = parse(item)
        except ValueError:
            expected = "whole numbers" if parse is int else "numbers"
            raise OutriderError(f"invalid {option} {text!r}: expected {expected} separated by commas, got {item!r}") from None
        if value not in items:
            items.append(value)
    return tuple(items)
