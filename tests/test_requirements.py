"""Packages installed by ``make``: every file has a hash, and every package is on the page of licences."""

from __future__ import annotations

import re
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = ("requirements", "requirements-dev")


def packages(name: str) -> dict[str, str]:
    """Return package -> its entries in the lock file."""
    parts = re.split(r"^(?=[a-z0-9])", (ROOT / f"{name}.txt").read_text(), flags=re.MULTILINE)[1:]
    return {part.partition("==")[0]: part for part in parts}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_is_pinned_by_version_and_hash(name: str) -> None:
    found = packages(name)
    assert len(found) > 30
    for package, entry in found.items():
        assert re.match(r"[a-z0-9][\w.-]*==\S+", entry), package
        assert "--hash=sha256:" in entry, package


@pytest.mark.parametrize("name", LOCKS)
def test_the_lock_contains_the_requested_packages(name: str) -> None:
    found = packages(name)
    for line in (ROOT / f"{name}.in").read_text().splitlines():
        if line and not line.startswith("#"):
            package, _, version = line.partition("==")
            package = re.split("[<>]", package)[0].replace("_", "-")
            assert found[package].startswith(f"{package}=={version}"), f"run scripts/lock: {line}"


def test_both_locks_agree() -> None:
    run, dev = (packages(name) for name in LOCKS)
    for package in run.keys() & dev.keys():
        assert run[package].split()[0] == dev[package].split()[0], package


@pytest.mark.parametrize("name", LOCKS)
def test_licences_are_listed(name: str) -> None:
    page = (ROOT / "docs" / "licences.md").read_text()
    elsewhere = ("win32", "emscripten", "python_full_version", "darwin")  # installed only on other systems or Pythons
    for package, entry in packages(name).items():
        assert f"| {package} |" in page or any(marker in entry.splitlines()[0] for marker in elsewhere), package
    assert "not named" not in page


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_announce_ends_with_all_processes_that_it_started(sent: signal.Signals) -> None:
    """Ctrl-C in ``make run`` left pip running. All of them keep standard error open, so its end shows theirs."""
    command = ["sh", "-c", "echo started; sleep 60 & sleep 60; wait"]
    handler = signal.signal(sent, signal.SIG_DFL)  # the shell cannot trap a signal that is ignored when it starts
    try:
        process = subprocess.Popen([ROOT / "scripts" / "announce", "waiting", *command], stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(sent, handler)
    assert process.stderr is not None
    while process.stderr.readline() != "started\n":
        pass
    process.send_signal(sent)
    process.communicate(timeout=20)
    assert process.returncode == 130


def test_the_server_gets_pydantic_2() -> None:
    """With ``pydantic<2`` in an environment, pip chooses a FastAPI that takes it, and the server cannot be imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "pydantic>=2" in project["optional-dependencies"]["serve"]


def test_installing_is_never_silent() -> None:
    """Importing PyTorch for the first time, without bytecode, takes seconds on a slow machine."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", "")
    recipe = re.search(r"^\$\(VENV\)/\.installed:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    assert recipe is not None
    silent = [line for line in recipe[1].splitlines() if not line.startswith("\t@scripts/announce ")]
    assert [line.split()[0] for line in silent] == ["@$(PYTHON)", "@touch"]  # the version of Python, and the end
