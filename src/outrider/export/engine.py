"""Interface of the engines that plans can be exported to."""

from __future__ import annotations

import os
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from outrider.engine.plan import Plan
from outrider.errors import errors_as, printable, without_path
from outrider.export.deployment import VERIFIER, Deployment
from outrider.files import write_whole
from outrider.method_text import split_method
from outrider.proposers.portable import Form
from outrider.registry import PROPOSERS, VERIFIERS
from outrider.types import OutriderError

SCRIPT, WRITTEN_BY = "run.sh", "Written by outrider export"
TEMPERATURE_NOTE = "Outrider's server decodes greedily without a temperature; here it is 1.0: set it in your requests."
ONE_BY_ONE = "let it make one draft in a pass, with the method's option parallel=false, or export to vLLM"
ALTERNATIVES: Mapping[Form, str] = {  # of methods that an engine does not support, unless it says otherwise
    Form.TEXT: "use n-grams, or export to vLLM, which takes Outrider's own proposer",
    Form.PARALLEL_MODEL: ONE_BY_ONE,
    Form.FOREIGN_PARALLEL_MODEL: ONE_BY_ONE,
    Form.PAIR: "name one of the two",
}


@dataclass(frozen=True)
class Export:
    """Command, options and files that run a plan on an engine."""

    command: Sequence[str]  # the program
    options: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # name -> text
    environment: Mapping[str, str] = field(default_factory=dict)
    needs_outrider: bool = False  # whether the engine's Python environment needs Outrider
    notes: Sequence[str] = ()  # differences from Outrider
    num_drafts: int = 0  # per round, in the engine's config


class Engine(ABC):
    """Base class of engines: which plans an engine supports, and how to write them."""

    name: ClassVar[str]  # official spelling
    program: ClassVar[Sequence[str]] = ()  # its server command; empty: `outrider serve` cannot run it
    server: ClassVar[str]  # the server as a module of its Python; unused without ``program``
    instead: ClassVar[Mapping[Form, str]]  # unsupported method -> what to use instead, besides ALTERNATIVES
    rules: ClassVar[Sequence[str]] = ("rejection", "exact")  # supported verifiers, by Outrider's names
    takes_code: ClassVar[bool] = False  # whether it supports custom proposers

    def __init__(self, in_place: bool = False) -> None:
        """``in_place``: write absolute paths, because the engine runs in another folder than the export's."""
        self.in_place = in_place

    def path(self, folder: Path, name: str) -> str:
        """Return the path of a file or folder of the export in ``folder``, as the engine must be given it."""
        return str(folder.absolute() / name) if self.in_place else name

    def check(self, plan: Plan, own_code: bool) -> None:
        """Raise ``OutriderError`` for settings that the engine lacks, independent of the models and the method."""
        if own_code and not self.takes_code:
            raise OutriderError(f"{self.name} does not support custom proposers: omit --own-code, or export to vLLM")
        if plan.given("same_text"):
            raise OutriderError(f"{self.name} has no same-text mode: remove same_text from the plan, or use `outrider serve`")
        if plan.given("weights") is not None:
            raise OutriderError(f"{self.name} reads weights as in the checkpoint: remove weights from the plan")
        verifier = plan.given("verifier") or VERIFIER
        VERIFIERS.get(verifier)
        if verifier not in self.rules:
            raise OutriderError(f"{self.name} does not support the verifier {verifier!r}: use {', '.join(self.rules)}")

    @abstractmethod
    def export(self, deployment: Deployment, folder: Path, own_code: bool) -> Export:
        """Write converted heads, if any, into the folder, and return the export of a plan that passed ``check``.

        ``own_code``: use Outrider's proposer instead of the engine's. Raises ``OutriderError`` for an unsupported method,
        with what to use instead.
        """

    def refuse(self, deployment: Deployment) -> OutriderError:
        """Return the error for an unsupported method."""
        advice = {**ALTERNATIVES, **self.instead}.get(deployment.kind.form, "serve the plan with `outrider serve`")
        what = f"{deployment.kind.form.what} (method {deployment.method!r})"
        return OutriderError(f"{self.name} cannot draft with {what}: {advice}")


def typical(num_drafts: int) -> str:
    """Return the note on a number of drafts that the plan does not set."""
    return f"{num_drafts} drafts per round is a typical number: measure yours."


def gpu_environment(device: str | None) -> dict[str, str]:
    """Return the environment that selects the GPU named by ``device``, if any.

    Like torch, it counts only the GPUs that ``CUDA_VISIBLE_DEVICES`` shows to this process.
    """
    gpu = re.fullmatch(r"cuda:(\d+)", device or "")
    if gpu is None:
        return {}
    shown, index = os.environ.get("CUDA_VISIBLE_DEVICES"), int(gpu[1])
    if shown is None:
        return {"CUDA_VISIBLE_DEVICES": gpu[1]}
    visible = [name.strip() for name in shown.split(",") if name.strip()]  # empty: no GPU at all
    if index >= len(visible):
        raise OutriderError(f"invalid device {device}: CUDA_VISIBLE_DEVICES={shown} shows {len(visible)} GPUs to this process")
    return {"CUDA_VISIBLE_DEVICES": visible[index]}


def check_folder(engine: Engine, folder: Path) -> None:
    """Raise ``OutriderError`` for a folder whose files an export must not replace or mix with its own.

    It may be empty, or hold an earlier export to the same engine.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    script = folder / SCRIPT
    text = script.read_text(encoding="utf-8", errors="replace") if script.is_file() else ""
    if not (text.startswith(f"#!/bin/sh\n# {engine.name} for ") and f"\n# {WRITTEN_BY}" in text):
        raise OutriderError(f"{folder} contains files other than an export to {engine.name}: give another folder with --out")


def write(engine: Engine, deployment: Deployment, folder: Path, own_code: bool = False) -> Export:
    """Write the files and the start script for a plan that passed ``Engine.check``. Raises ``OutriderError``."""
    if own_code and not PROPOSERS.get(split_method(deployment.method)[0]).is_model_free:
        raise OutriderError(f"method {deployment.method!r} is not text-based: --own-code does not apply")
    with errors_as(f"cannot write {folder}", OSError, detail=without_path):
        export = engine.export(deployment, folder, own_code)
        if (lost := deployment.lost_options) and not export.needs_outrider:
            note = f"These options of the method are Outrider's and are not exported: {', '.join(lost)}."
            export = replace(export, notes=[*export.notes, note])
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in export.files.items():
            write_whole(folder / name, text)
        script = folder / SCRIPT
        write_whole(script, _script(engine, deployment, export))
        script.chmod(0o755)
    return export


def _comment(text: str) -> str:
    """Return a comment line of a shell script, without line breaks, which would start a command."""
    return "# " + printable(text)


def _script(engine: Engine, deployment: Deployment, export: Export) -> str:
    remarks = [f"{engine.name} for {deployment.name}: method {deployment.method}, {export.num_drafts} drafts per round."]
    remarks += [f"{WRITTEN_BY}; arguments are appended to the command.", *export.notes]
    lines = ["#!/bin/sh", *map(_comment, remarks), "set -e", 'cd "$(dirname "$0")"']
    lines += [f"export {name}={shlex.quote(value)}" for name, value in export.environment.items()]
    if export.needs_outrider:
        lines.append("# The proposer is Outrider's: run pip install --no-deps . in its folder, for this command.")
    return "\n".join([*lines, f'exec {shlex.join([*export.command, *export.options])} "$@"']) + "\n"
