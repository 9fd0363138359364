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
from typing import Any, ClassVar, Protocol

from outrider.errors import OutriderError, one_line
from outrider.files import expanded

OPTION = "option"  # key of an Option in a field's metadata
MODELS, METHOD, SAMPLING, LISTEN, LIMITS = "Models", "Drafts", "Sampling", "Listening", "Limits"  # headings of the help
INT32 = 2**31 - 1
MAX_BIAS = 1e30  # of a logit: finite in 32 bits at any temperature and penalty


class Kind(Protocol):
    """The valid values of an option."""

    @property
    def expected(self) -> str:
        """Description of the values for errors and documentation, such as "a whole number, at least 1"."""
        ...

    def read(self, value: Any) -> Any:
        """Validate and normalise a value: numpy scalars become Python numbers. Raises TypeError or ValueError."""
        ...


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
        kind = self.kind.kind if isinstance(self.kind, Objects) else None
        return replace(self, kind=kind or self.kind, optional=False)

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


@dataclass(frozen=True)
class Number:
    """Finite numbers from ``at_least`` (or above ``above``) to ``at_most``."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    noun: ClassVar[str] = "a finite number"

    @property
    def expected(self) -> str:
        most = None if self.at_most == INT32 else self.at_most
        bounds = {"above": self.above, "at least": self.at_least, "at most": most}
        return self.noun + "".join(f", {words} {_figure(bound)}" for words, bound in bounds.items() if bound is not None)

    def read(self, value: Any) -> float:
        number = self._number(value)
        if self.at_most == INT32 and number > INT32:
            raise _AboveInt32("out of bounds")
        is_low = (self.at_least is not None and number < self.at_least) or (self.above is not None and number <= self.above)
        if is_low or (self.at_most is not None and number > self.at_most):
            raise ValueError("out of bounds")
        return number

    def _number(self, value: Any) -> float:
        value = scalar(value)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError("not a number")
        number = float(value)
        if not math.isfinite(number):
            raise ValueError("not finite")
        return number


class Whole(Number):
    """Integers within the bounds, including numpy integers and 0-d tensors, but not booleans."""

    noun = "a whole number"

    def _number(self, value: Any) -> int:
        return whole_number(value)


@dataclass(frozen=True)
class IntChoice:
    """One of a few integers."""

    numbers: tuple[int, ...]

    @property
    def expected(self) -> str:
        return " or ".join(map(str, self.numbers))

    def read(self, value: Any) -> int:
        number = whole_number(value)
        if number not in self.numbers:
            raise ValueError("not one of them")
        return number


@dataclass(frozen=True)
class Several:
    """A list of values of ``kind``, at least one. In a method's text ``separator`` stands between them."""

    kind: Kind
    expected: str
    separator: str = ","

    def read(self, values: Any) -> tuple[Any, ...]:
        found = tuple(self.kind.read(value) for value in as_sequence(values))
        if not found:
            raise ValueError("empty")
        return found


@dataclass(frozen=True)
class Flag:
    """True or False. Text is invalid, because ``"false"`` would be true."""

    expected: str = "True or False"

    def read(self, value: Any) -> bool:
        value = scalar(value)
        if not isinstance(value, bool):
            raise TypeError("not a boolean")
        return value


@dataclass(frozen=True)
class Choice:
    """One of a few names; ``spelled`` converts other spellings to these."""

    names: tuple[str, ...]
    spelled: Callable[[Any], Any] | None = None

    @property
    def expected(self) -> str:
        return f"{', '.join(self.names[:-1])} or {self.names[-1]}"

    def read(self, value: Any) -> str:
        if self.spelled is not None:
            value = self.spelled(value)
        if not isinstance(value, str) or value not in self.names:
            raise ValueError("not one of them")
        return value


@dataclass(frozen=True)
class Text:
    """Text that is not empty."""

    expected: str = "text that is not empty"

    def read(self, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise TypeError("not text")
        return value


@dataclass(frozen=True)
class Texts:
    """One text, or several; none of them empty. One text is one, not its letters."""

    expected: str = "text or a list of texts, none of them empty"

    def read(self, value: Any) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, (Sequence, AbstractSet)) or isinstance(texts, (bytes, bytearray)):
            raise TypeError("not texts")
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError("not texts, or an empty one")
        return tuple(str(text) for text in texts)


@dataclass(frozen=True)
class TokenIds:
    """Token ids: a list, tuple, set, 1-d array or 1-d tensor of integers, at least 0."""

    at_least_one: bool = False

    @property
    def expected(self) -> str:
        return "a list of token ids from 0 on" + (", at least one" if self.at_least_one else "")

    def read(self, value: Any) -> tuple[int, ...]:
        token_ids = tuple(whole_numbers(value))
        if (self.at_least_one and not token_ids) or any(not 0 <= token <= INT32 for token in token_ids):
            raise ValueError("out of bounds")
        return token_ids


@dataclass(frozen=True)
class Biases:
    """Mapping from token ids to numbers added to their logits; minus infinity bans a token."""

    expected: str = "a mapping from token ids to numbers from -1e30 to 1e30, or minus infinity"

    def read(self, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise TypeError("not a mapping")
        return {TokenIds().read([token])[0]: self._bias(bias) for token, bias in value.items()}

    def _bias(self, value: Any) -> float:
        value = scalar(value)
        return -math.inf if value == -math.inf else Number(-MAX_BIAS, MAX_BIAS).read(value)


@dataclass(frozen=True)
class Source:
    """A folder, a file or a hub id."""

    expected: str = "a folder or a hub id"

    def read(self, value: Any) -> str | Path:
        source: str | Path = path_or_text(value)
        if not str(source).strip() or not str(source).isprintable():
            raise ValueError("empty, or with line breaks")
        return source


@dataclass(frozen=True)
class File:
    """A path."""

    expected: str = "a path"

    def read(self, value: Any) -> Path:
        path = Path(path_or_text(value))
        if not str(value).strip() or "\0" in str(value):
            raise ValueError("not a path")
        return path


@dataclass(frozen=True)
class Keyed:
    """A mapping from text to ``values``; None allows any values."""

    expected: str
    values: Kind | None = None

    def read(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise TypeError("not a mapping")
        return {key: each if self.values is None else self.values.read(each) for key, each in value.items()}


@dataclass(frozen=True)
class Objects:
    """Objects for which ``is_one`` is true, or values of ``kind``. Flags and plan files accept only the latter."""

    expected: str
    is_one: Callable[[Any], bool]
    kind: Kind | None = None

    def read(self, value: Any) -> Any:
        if not isinstance(value, type) and self.is_one(value):
            return value
        if self.kind is None:
            raise TypeError("not one of these objects")
        return self.kind.read(value)


def has(*names: str) -> Callable[[Any], bool]:
    """Return a predicate for ``Objects``: whether an object has all of these attributes."""
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
    if isinstance(kind, Several):
        return [_converted(kind.kind, each) for each in text.split(kind.separator)]
    if isinstance(kind, Flag):
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return int(text) if isinstance(kind, (Whole, IntChoice)) else float(text) if isinstance(kind, Number) else text
    except ValueError:
        return text


def _figure(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.15g}"


def flag_name(name: str) -> str:
    """Return the flag of an option: ``max_tokens`` -> ``--max-tokens``."""
    return "--" + name.replace("_", "-")
