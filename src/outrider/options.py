"""Declaration of options: each is declared once, as a dataclass field with its default, its kind of values and its help.

Validation, command-line flags, plan keys, server settings and documentation are derived from the declaration. Imports no torch,
so that ``outrider --help`` is fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from os import fspath
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError, one_line
from outrider.files import expanded

OPTION = "option"  # key of an Option in a field's metadata
MODELS, METHOD, SAMPLING, LISTEN, LIMITS = "Models", "Drafts", "Sampling", "Listening", "Limits"  # headings of the help
INT32 = 2**31 - 1
MAX_BIAS = 1e30  # of a logit: finite in 32 bits at any temperature and penalty


@dataclass(frozen=True)
class Kind:
    """The valid values of an option."""

    expected: str  # description for errors and documentation, such as "a whole number, at least 1"
    read: Callable[[Any], Any]  # validates and normalises: numpy scalars become numbers. Raises TypeError or ValueError
    flag: Any = str  # type of its flag on the command line
    in_text: Kind | None = None  # the values in flags and plan files, which cannot contain objects
    item: Kind | None = None  # of a list
    separator: str = ","  # between the items of a list, in a method's text
    bounds: Mapping[str, Any] = field(default_factory=dict)  # of a number, under pydantic's names


@dataclass(frozen=True)
class Option:
    """The declaration of one option, in the metadata of its field."""

    kind: Kind
    help: str
    panel: str = ""  # heading in the help of the command line
    letter: str = ""  # one-letter flag, such as "t" for -t
    in_plan: bool = False
    optional: bool = False  # None is valid and stands for the default that ``help`` describes

    def in_text(self) -> Option:
        """Return the option for flags and plan files, which cannot contain objects or None."""
        return replace(self, kind=self.kind.in_text or self.kind, optional=False)

    def from_text(self, text: str) -> Any:
        """Convert text, as in ``--method name:option=text``, to a value for ``read``, which rejects text of another type."""
        return None if self.optional and text.lower() in ("auto", "none") else _converted(self.kind, text)

    def read(self, name: str, value: Any) -> Any:
        """Validate and normalise a value. Raises ``OutriderError`` with the option, the value and what was expected."""
        if value is None and self.optional:
            return None
        try:
            return self.kind.read(value)
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            bound = f", at most {INT32}" if isinstance(error, _AboveInt32) else ""
            or_none = " or None" if self.optional else ""
            raise OutriderError(f"invalid {name} {shown(value)}: expected {self.kind.expected}{bound}{or_none}") from None


class _AboveInt32(ValueError):
    """The number exceeds a bound that ``expected`` leaves out."""


def option(
    kind: Kind,
    default: Any,
    help: str,
    *,
    panel: str = "",
    letter: str = "",
    in_plan: bool = False,
) -> Any:
    """Declare a dataclass field. ``default``: a value, or a type that is called to create it."""
    declared = {OPTION: Option(kind, help, panel, letter, in_plan, optional=default is None)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=declared)
    return field(default=default, metadata=declared)


def declared(config: Any) -> dict[str, Option]:
    """Return the declared options of a dataclass or its instance, by name, in order."""
    return {each.name: each.metadata[OPTION] for each in fields(config) if OPTION in each.metadata}


@dataclass(frozen=True)
class CheckedOptions:
    """Base class of frozen dataclasses of options, which are validated and normalised.

    Raises ``OutriderError`` for a value of the wrong type or out of bounds.
    """

    def __post_init__(self) -> None:
        for name, each in declared(self).items():
            object.__setattr__(self, name, each.read(name, getattr(self, name)))


def shown(value: object) -> str:
    """Format a value for an error message: its repr on one line, shortened."""
    try:
        text = one_line(repr(value))
    except Exception:  # repr fails for integers of more than 4300 digits and for partly initialised objects
        text = f"of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}... (type {type(value).__name__})"


def scalar(value: Any) -> Any:
    """Convert a numpy scalar, 0-d array or 0-d tensor to a Python number; return anything else unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)) else value


def whole_number(value: Any) -> int:
    """Convert an integer to int. Raises TypeError for anything else, including booleans."""
    if type(value) is int:
        return value
    value = scalar(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError("not a whole number")
    return int(value)


def whole_numbers(values: Any) -> list[int]:
    """Convert a list, tuple, set, 1-d array or 1-d tensor to Python integers. Raises TypeError for anything else."""
    return [whole_number(value) for value in (values if isinstance(values, AbstractSet) else as_sequence(values))]


def as_sequence(values: Any) -> Sequence[Any]:
    """Return a list or tuple unchanged, an array or tensor as lists. Raises TypeError for text, bytes and non-sequences."""
    if callable(getattr(values, "tolist", None)):
        values = values.tolist()
    if isinstance(values, (str, bytes, bytearray, memoryview)) or not isinstance(values, Sequence):
        raise TypeError("not a list")
    return values


def number(at_least: float | None = None, at_most: float | None = None, above: float | None = None) -> Kind:
    """Return the kind of finite numbers from ``at_least`` (or above ``above``) to ``at_most``."""
    return _bounded("a finite number", _finite, float, at_least, at_most, above)


def whole(at_least: int | None = None, at_most: int | None = None) -> Kind:
    """Return the kind of integers, including numpy integers and 0-d tensors, but not booleans."""
    return _bounded("a whole number", whole_number, int, at_least, at_most)


def _bounded(
    noun: str,
    convert: Callable[[Any], Any],
    flag: type,
    at_least: float | None,
    at_most: float | None,
    above: float | None = None,
) -> Kind:
    def read(value: Any) -> Any:
        number = convert(value)
        if at_most == INT32 and number > INT32:
            raise _AboveInt32("out of bounds")
        is_low = (at_least is not None and number < at_least) or (above is not None and number <= above)
        if is_low or (at_most is not None and number > at_most):
            raise ValueError("out of bounds")
        return number

    stated = {"above": above, "at least": at_least, "at most": None if at_most == INT32 else at_most}
    expected = noun + "".join(f", {words} {_figure(bound)}" for words, bound in stated.items() if bound is not None)
    return Kind(expected, read, flag, bounds={"ge": at_least, "le": at_most, "gt": above})


def _figure(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.15g}"


def _finite(value: Any) -> float:
    value = scalar(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError("not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def boolean(expected: str = "True or False") -> Kind:
    """Return the kind of booleans. Text is invalid, because ``"false"`` would be true."""

    def read(value: Any) -> bool:
        value = scalar(value)
        if not isinstance(value, bool):
            raise TypeError("not a boolean")
        return value

    return Kind(expected, read, bool)


def int_choice(*numbers: int) -> Kind:
    """Return the kind of one of a few integers."""
    return Kind(" or ".join(map(str, numbers)), lambda value: _one_of(whole_number(value), numbers), int)


def choice(*names: str, spelled: Callable[[Any], Any] = lambda value: value) -> Kind:
    """Return the kind of one of a few names; ``spelled`` converts other spellings to these."""
    return Kind(f"{', '.join(names[:-1])} or {names[-1]}", lambda value: _one_of(spelled(value), names))


def _one_of(value: Any, values: tuple[Any, ...]) -> Any:
    if value not in values:
        raise ValueError("not one of them")
    return value


def several(kind: Kind, expected: str, separator: str = ",") -> Kind:
    """Return the kind of lists of values of ``kind``, at least one. In a method's text ``separator`` stands between them."""

    def read(values: Any) -> tuple[Any, ...]:
        found = tuple(kind.read(value) for value in as_sequence(values))
        if not found:
            raise ValueError("empty")
        return found

    return Kind(expected, read, item=kind, separator=separator)


def text(expected: str = "text that is not empty") -> Kind:
    """Return the kind of text that is not empty."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise TypeError("not text")
        return value

    return Kind(expected, read)


def _texts(value: Any) -> tuple[str, ...]:
    """Read one text, or several; none of them empty. One text is one, not its letters."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (Sequence, AbstractSet)) or isinstance(texts, (bytes, bytearray)):
        raise TypeError("not texts")
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("not texts, or an empty one")
    return tuple(str(text) for text in texts)


TEXTS = Kind("text or a list of texts, none of them empty", _texts, list[str])


def token_ids(at_least_one: bool = False) -> Kind:
    """Return the kind of token ids: a list, tuple, set, 1-d array or 1-d tensor of integers, at least 0."""

    def read(value: Any) -> tuple[int, ...]:
        found = tuple(whole_numbers(value))
        if (at_least_one and not found) or any(not 0 <= token <= INT32 for token in found):
            raise ValueError("out of bounds")
        return found

    return Kind("a list of token ids from 0 on" + (", at least one" if at_least_one else ""), read)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError("not a mapping")
    return {token_ids().read([token])[0]: _bias(bias) for token, bias in value.items()}


def _bias(value: Any) -> float:
    value = scalar(value)
    return -math.inf if value == -math.inf else number(-MAX_BIAS, MAX_BIAS).read(value)


# Token ids and the numbers added to their logits; minus infinity bans a token.
BIASES = Kind("a mapping from token ids to numbers from -1e30 to 1e30, or minus infinity", _biases)


def _source(value: Any) -> str | Path:
    source: str | Path = path_or_text(value)
    if not str(source).strip() or not str(source).isprintable():
        raise ValueError("empty, or with line breaks")
    return source


SOURCE = Kind("a folder or a hub id", _source)  # or a file


def _path(value: Any) -> Path:
    path = Path(path_or_text(value))
    if not str(value).strip() or "\0" in str(value):
        raise ValueError("not a path")
    return path


PATH = Kind("a path", _path, Path)


def keyed(expected: str, values: Kind | None = None) -> Kind:
    """Return the kind of mappings from text to ``values``; None allows any values."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise TypeError("not a mapping")
        return {key: each if values is None else values.read(each) for key, each in value.items()}

    return Kind(expected, read)


def objects(expected: str, is_one: Callable[[Any], bool], kind: Kind | None = None) -> Kind:
    """Return the kind of objects for which ``is_one`` is true, or values of ``kind``, which alone can be given as text."""

    def read(value: Any) -> Any:
        if not isinstance(value, type) and is_one(value):
            return value
        if kind is None:
            raise TypeError("not one of these objects")
        return kind.read(value)

    return Kind(expected, read, in_text=kind)


def has(*names: str) -> Callable[[Any], bool]:
    """Return a predicate for ``objects``: whether an object has all of these attributes."""
    return lambda value: all(hasattr(value, name) for name in names)


def path_or_text(value: Any) -> Any:
    """Convert a path-like object to ``Path``, because libraries accept text and ``Path`` only; expand a leading ``~``.

    Raises TypeError for bytes.
    """
    text = value if isinstance(value, str) else fspath(value)
    if not isinstance(text, str):
        raise TypeError("a path of bytes")
    if text.startswith("~"):
        text = str(expanded(text))
    return text if isinstance(value, str) else Path(text)


def _converted(kind: Kind, text: str) -> Any:
    """Return the number, boolean or list that the text stands for; text of another type unchanged."""
    if kind.item is not None:
        return [_converted(kind.item, each) for each in text.split(kind.separator)]
    if kind.flag is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind.flag(text) if kind.flag in (int, float) else text
    except ValueError:
        return text


def flag_name(name: str) -> str:
    """Return the flag of an option: ``max_tokens`` -> ``--max-tokens``."""
    return "--" + name.replace("_", "-")
