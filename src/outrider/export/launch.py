"""Replace this process by another engine's server, so that signals, terminal and exit code are the server's."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from outrider.disk_cache import cache_dir
from outrider.errors import errors_as, without_path
from outrider.export.deployment import Deployment
from outrider.export.engine import Engine, Export
from outrider.types import OutriderError


def working_folder(engine: Engine, deployment: Deployment, own_code: bool) -> Path:
    """Return the cache folder for a plan's export. Different plans have different folders, so servers can run concurrently."""
    return cache_dir("exports", hashlib.sha256(f"{engine.name}\n{deployment}\n{own_code}".encode()).hexdigest()[:16])


def find_command(engine: Engine, python: str | None) -> list[str]:
    """Return the engine's start command. ``python``: Python of its environment; None searches the program on PATH.

    Raises ``OutriderError`` if it has no server, or the program or that Python does not exist.
    """
    if not engine.program:
        raise OutriderError(f"`outrider serve` cannot run {engine.name}: use outrider export")
    name, *arguments = [python, "-m", engine.server] if python is not None else engine.program
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise OutriderError(
            f"there is no program {name} here: install {engine.name} in its own environment and give its Python with"
            " --engine-python"
        )
    return [os.path.abspath(found), *arguments]


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
