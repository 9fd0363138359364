"""Replace this process by another engine's server, so that signals, terminal and exit code are the server's."""

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
from outrider.errors import errors_as, without_path
from outrider.export.deployment import Deployment
from outrider.export.engine import Engine, Export
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
NAMELESS = 3  # exit code of CHECK: the module is installed by a package of another name


def working_folder(engine: Engine, deployment: Deployment, own_code: bool) -> Path:
    """Return the cache folder for a plan's export. Different plans have different folders, so servers can run concurrently."""
    return cache_dir("exports", hashlib.sha256(f"{engine.name}\n{deployment}\n{own_code}".encode()).hexdigest()[:16])


def find_command(engine: Engine, python: str | None) -> list[str]:
    """Return the engine's start command. ``python``: Python of its environment; None searches the program on PATH.

    Raises ``OutriderError`` if it is not installed or has no server.
    """
    if engine.program is None:
        raise OutriderError(f"`outrider serve` cannot run {engine.name}: use outrider export")
    if python is not None:
        found_there = _asked(python, engine.module)
        if found_there not in (0, NAMELESS):
            raise OutriderError(
                f"{engine.name} is not installed for {python}: give the Python of its environment with --engine-python"
            )
        entry = engine.nameless_entry if found_there else engine.entry
        return [os.path.abspath(shutil.which(python) or python), "-m", *entry]
    found = shutil.which(engine.program) or shutil.which(engine.program, path=str(Path(sys.executable).parent))
    if found is None:
        raise OutriderError(
            f"{engine.name} is not installed here: install {engine.module} in its own environment and give its Python "
            "with --engine-python"
        )
    return [os.path.abspath(found), *engine.entry[1:]]


def _asked(python: str, module: str) -> int | None:
    """Run ``CHECK`` in another Python and return its exit code, or None if that Python does not exist."""
    program = CHECK.format(module=module, nameless=NAMELESS)
    try:
        return subprocess.run([python, "-c", program], timeout=60, check=False, capture_output=True).returncode
    except (OSError, subprocess.TimeoutExpired):
        return None


def become(command: Sequence[str], folder: Path, export: Export) -> NoReturn:
    """Replace this process by the engine's, in the current folder. Raises ``OutriderError`` if it cannot be started."""
    environment = {**os.environ, **export.environment}
    if export.needs_outrider:
        paths = [str(_alone(folder)), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    sys.stdout.flush()
    sys.stderr.flush()
    with errors_as(f"cannot start {command[0]}", OSError, detail=without_path):
        os.execvpe(command[0], list(command), environment)


def _alone(folder: Path) -> Path:
    """Return a folder that contains only this package, so that the engine's environment keeps its own torch."""
    link = folder / "python" / "outrider"
    link.parent.mkdir(exist_ok=True)
    package = Path(__file__).parent.parent
    if link.is_symlink() and link.resolve() == package.resolve():
        return link.parent
    link.unlink(missing_ok=True)
    link.symlink_to(package, target_is_directory=True)
    return link.parent
