"""Plans: models, method and limits in a readable TOML file.

The keys are the options declared with ``in_plan``, under their Python names; missing keys have their defaults.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.engine.options import Speculation
from outrider.errors import OutriderError, printable, without_path
from outrider.files import expanded, is_path, write_whole
from outrider.method_text import split_method, with_drafts
from outrider.options import Option, declared
from outrider.registry import AUTO, PROPOSERS
from outrider.runner.config import RunnerConfig

KEYS: dict[str, Option] = {
    name: option.in_text()
    for config in (Speculation, RunnerConfig)
    for name, option in declared(config).items()
    if option.in_plan
}
FOLDERS = frozenset(("target", "draft"))  # keys that may name a folder
HEAD = "# A plan for outrider serve. Every line is optional.\n"


@dataclass(frozen=True)
class Plan:
    """Values of a plan file by key."""

    values: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()  # base of relative paths
    file: Path | None = None  # for errors

    @classmethod
    def read(cls, file: Path) -> Plan:
        """Read a plan. Raises ``OutriderError`` for an unreadable file, an unknown key or an invalid value."""
        if file.is_char_device() or file.is_block_device():  # /dev/null would read as an empty plan
            raise OutriderError(f"{file} is a device: give a plan file")
        if file.is_dir():
            raise OutriderError(f"{file} is a folder, not a plan file: give a model's folder with --target")
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        except FileNotFoundError as error:
            raise OutriderError(
                f"cannot read the plan: {file} does not exist; outrider tune writes one, or give --target and --method instead"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise OutriderError(f"cannot read the plan: {file}: {without_path(error)}") from error
        except tomllib.TOMLDecodeError as error:
            raise OutriderError(f"{file} is not valid TOML: {error}") from error
        for key, value in values.items():
            if key not in KEYS:
                raise OutriderError(f"{file}: unknown key {key!r}; known: {', '.join(KEYS)}")
            try:
                values[key] = KEYS[key].read(key, value)
            except OutriderError as error:
                raise OutriderError(f"{file}: {str(error).replace('True or False', 'true or false')}") from None
        return cls(values, file.parent, file)

    def write(self, file: Path, notes: Sequence[str] = ()) -> None:
        """Write one commented line per value, below ``notes`` as comments; an earlier plan stays until this one is complete."""
        given = {key: json.dumps(self.values[key], ensure_ascii=False) for key in KEYS if key in self.values}
        # JSON and TOML agree on these types, except that TOML escapes DEL.
        lines = [f"{key} = {value}  # {KEYS[key].help}".replace("\x7f", "\\u007f") for key, value in given.items()]
        comments = "".join(f"# {printable(line)}\n" for note in notes for line in note.splitlines())
        write_whole(file, HEAD + comments + "\n" + "\n".join(lines) + "\n")

    def given(self, key: str) -> Any:
        """Return the value of a key or None; folders and GGUF files are resolved relative to the plan.

        Raises ``OutriderError`` for an unknown method, and for a path in a plan file where there is nothing.
        """
        value = self.values.get(key)
        try:
            if key in FOLDERS and value is not None:
                return self._resolved(value)
            if key == "method" and value not in (None, AUTO):
                PROPOSERS.get(split_method(value)[0])
                return with_drafts(value, self._resolved)
        except OutriderError as error:
            raise OutriderError(f"{self.file}, {key}: {error}" if self.file else str(error)) from None
        return value

    def _resolved(self, source: str) -> str:
        if (self.folder / source).exists():
            return str(self.folder / source)
        if self.file and is_path(source) and not expanded(source).exists():
            raise OutriderError(f"{source} does not exist")
        return source


def served_name(target: str | None) -> str:
    """Return the model name for clients: the last part of a local path, the hub id, or outrider for the embedded model."""
    if target is None:
        return "outrider"
    return Path(located(target)).name if expanded(target).exists() else target


def located(source: str) -> str:
    """Return the absolute path of a local model, so that a plan or an export works from any directory; a hub id as it is.

    Links are not followed: in the download cache only the links have the files' names.
    """
    path = expanded(source)
    return os.path.abspath(path) if path.exists() else source
