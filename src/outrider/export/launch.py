"""Becoming another engine's server: it gets this process, and with it every signal, the terminal and the exit code."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from outrider.disk_cache import cache_dir
from outrider.export.engine import Engine, Export
from outrider.export.wanted import Wanted
from outrider.types import OutriderError

CHECK = """
import importlib.metadata, importlib.util, sys
if importlib.util.find_spec({module!r}) is None:
    sys.exit(1)
try:
    importlib.metadata.version({module!r})
except importlib.metadata.PackageNotFoundError:
    sys.exit({nameless})
"""
NAMELESS = 3  # the module is there, in a package of another name


def working_folder(engine: Engine, wanted: Wanted, own_code: bool) -> Path:
    """Where the export of such a plan is kept: servers that run at once and differ in anything have one each."""
    return cache_dir("exports", hashlib.sha256(f"{engine.name}\n{wanted}\n{own_code}".encode()).hexdigest()[:16])


def find_command(engine: Engine, python: str | None) -> list[str]:
    """How the engine's program is started. ``python``: of its environment; None: the program is looked for on PATH.

    Raises ``OutriderError`` where it is not installed, or has no server that could be started.
    """
    if engine.program is None:
        raise OutriderError(f"{engine.name} is not run by `outrider serve`: write its command with outrider export")
    if python is not None:
        found_there = _asked(python, engine.module)
        if found_there not in (0, NAMELESS):
            raise OutriderError(f"{engine.name} is not installed for {python}: give the Python of the environment that has it")
        return [os.path.abspath(python), "-m", *(engine.nameless_entry if found_there else engine.entry)]
    found = shutil.which(engine.program) or shutil.which(engine.program, path=str(Path(sys.executable).parent))
    if found is None:
        raise OutriderError(
            f"{engine.name} is not installed here: install {engine.module} in an environment of its own, and name its Python "
            "with --engine-python"
        )
    return [os.path.abspath(found), *engine.entry[1:]]


def _asked(python: str, module: str) -> int | None:
    """What ``CHECK`` says in another Python: the module is found, but not run. None where there is no such Python."""
    program = CHECK.format(module=module, nameless=NAMELESS)
    try:
        return subprocess.run([python, "-c", program], timeout=60, check=False, capture_output=True).returncode
    except (OSError, subprocess.TimeoutExpired):
        return None


def become(command: Sequence[str], folder: Path, export: Export) -> NoReturn:
    """Replaces this process by the engine's, in the export's folder. Raises ``OutriderError`` where it cannot be started."""
    environment = {**os.environ, **export.environment}
    if export.needs_outrider:
        paths = [str(_alone(folder)), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(folder)
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        raise OutriderError(f"cannot start {command[0]}: {error.strerror}") from error


def _alone(folder: Path) -> Path:
    """A folder in which this package lies and no other: the engine's environment has its own torch."""
    link = folder / "python" / "outrider"
    link.parent.mkdir(exist_ok=True)
    package = Path(__file__).parent.parent
    if link.is_symlink() and link.resolve() == package.resolve():
        return link.parent
    link.unlink(missing_ok=True)
    link.symlink_to(package, target_is_directory=True)
    return link.parent
