"""The interface of every engine that a plan can be written for."""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from outrider.export.wanted import Wanted
from outrider.proposers.portable import Portable
from outrider.types import OutriderError

SCRIPT = "run.sh"


@dataclass(frozen=True)
class Export:
    """What an engine is told."""

    command: Sequence[str]  # the program
    options: Sequence[str] = ()  # and what it is told, in the folder
    files: Mapping[str, str] = field(default_factory=dict)  # name -> text
    environment: Mapping[str, str] = field(default_factory=dict)
    needs_outrider: bool = False  # in the engine's own Python environment
    notes: Sequence[str] = ()  # what will be different there


class Engine(ABC):
    """One engine: what it can do of a plan, and how it is told."""

    name: ClassVar[str]  # as its makers write it
    module: ClassVar[str]  # what its Python must be able to import
    program: ClassVar[str | None] = None  # its server's command; None: it has none that `outrider serve` could become
    entry: ClassVar[Sequence[str]] = ()  # the same as a module and its arguments
    nameless_entry: ClassVar[Sequence[str]] = ()  # of builds that are installed under another name than the module's
    instead: ClassVar[Mapping[type[Portable], str]]  # way of drafting that it lacks -> what to use
    rules: ClassVar[Sequence[str]] = ("rejection", "exact")  # its acceptance rules, under our names
    takes_code: ClassVar[bool] = False  # whether proposers of others can be brought along

    def check(self, wanted: Wanted, own_code: bool) -> None:
        """Raises ``OutriderError``, in one line, for what the engine lacks whatever drafts."""
        if own_code and not self.takes_code:
            raise OutriderError(f"{self.name} takes no proposers of others: leave out --own-code, or export to vLLM")
        if wanted.same_text:
            raise OutriderError(f"{self.name} has no same-text mode: leave same_text out of the plan, or use `outrider serve`")
        if wanted.verifier not in self.rules:
            raise OutriderError(f"{self.name} has no acceptance rule like {wanted.verifier!r}: use {', '.join(self.rules)}")

    @abstractmethod
    def export(self, wanted: Wanted, folder: Path, own_code: bool) -> Export:
        """Writes converted heads, if any, into the folder, and says the rest of a plan that passed ``check``.

        ``own_code``: Outrider's proposer rather than the engine's own of the same kind. Raises ``OutriderError``, in one line,
        for a way of drafting that the engine lacks, with what to use instead.
        """

    def refuse(self, kind: Portable, wanted: Wanted) -> OutriderError:
        """The error for a way of drafting that the engine lacks."""
        advice = self.instead.get(type(kind), "serve the plan with `outrider serve`")
        return OutriderError(f"{self.name} cannot draft with {kind.what} (method {wanted.method!r}): {advice}")


def gpu_environment(device: str | None) -> dict[str, str]:
    """What lets a process see the one GPU that ``device`` names by its number, if it does."""
    gpu = re.fullmatch(r"cuda:(\d+)", device or "")
    return {"CUDA_VISIBLE_DEVICES": gpu[1]} if gpu else {}


def write(engine: Engine, wanted: Wanted, folder: Path, own_code: bool = False) -> Export:
    """Writes everything into the folder: the engine's files and a script that starts it. Raises ``OutriderError``."""
    if own_code and not wanted.reads_text_only:
        raise OutriderError(f"method {wanted.method!r} needs more than the text, so its own code cannot be brought along")
    engine.check(wanted, own_code)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        export = engine.export(wanted, folder, own_code)
        for name, text in export.files.items():
            (folder / name).write_text(text)
        script = folder / SCRIPT
        script.write_text(_script(engine, wanted, export))
        script.chmod(0o755)
    except OSError as error:
        raise OutriderError(f"cannot write {folder}: {error.strerror or error}") from error
    return export


def _comment(text: str) -> str:
    """A line of a script. A line break in it, as in the name of a folder, would begin a command."""
    return "# " + "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _script(engine: Engine, wanted: Wanted, export: Export) -> str:
    remarks = [f"{engine.name} for {wanted.name}: method {wanted.method}, {wanted.k} drafts a round."]
    remarks += ["Written by outrider export; arguments are added to the command.", *export.notes]
    lines = ["#!/bin/sh", *map(_comment, remarks), "set -e", 'cd "$(dirname "$0")"']
    lines += [f"export {name}={shlex.quote(value)}" for name, value in export.environment.items()]
    if export.needs_outrider:
        lines.append("# What drafts is Outrider's: pip install --no-deps outrider, into the environment of this command.")
    return "\n".join([*lines, f'exec {shlex.join([*export.command, *export.options])} "$@"']) + "\n"
