"""Commands and servers under a system fault, for ``faults.py``: folders, disks, limits, and what is expected of the output."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

import outrider
from outrider.bench.load.own_server import own_server

PROMPT = "def add(a, b):"
GENERATE = ("generate", "-k", "4", "--max-tokens", "24", "--temperature", "0", PROMPT)
LIMIT = 300.0  # seconds, per command


class Broken(Exception):
    """A promise was not kept."""


def expect(holds: object, what: str) -> None:
    if not holds:
        raise Broken(what)


@dataclass(frozen=True)
class Ended:
    """Result of a command that ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Return the last line of standard error."""
        lines = [line for line in self.err.replace("\r", "\n").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""

    def expect_error(self, *codes: int) -> str:
        """Check that the command failed with a one-line error and one of these exit codes. Returns the line."""
        expect(self.code in codes, f"exit code {self.code}, expected {codes}: {self.err[-600:]}")
        expect("Traceback" not in self.err, f"unexpected traceback: {self.err[-600:]}")
        expect("rror" in self.err or self.code == 130, f"no error message: {self.err[-600:]}")
        return f"exit {self.code}: {self.said}"

    def expect_text(self, wanted: str) -> str:
        """Check that the output is the same as without the fault."""
        expect(self.code == 0, f"exit code {self.code}: {self.err[-600:]}")
        expect("Traceback" not in self.err, f"a traceback: {self.err[-600:]}")
        expect(self.out == wanted, f"different text: {self.out!r}")
        return "the same text"


class Place:
    """A working folder, and commands with and without a fault."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._wanted: str | None = None

    def start(self, *words: object, under: Callable[[], None] | None = None, **environment: object) -> subprocess.Popen[str]:
        """Start an Outrider command; ``under`` runs first in its process."""
        return subprocess.Popen(
            [sys.executable, "-m", "outrider", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(_begin, under),
            env={**os.environ, "COLUMNS": "300", **{name: str(value) for name, value in environment.items()}},
        )

    def run(self, *words: object, under: Callable[[], None] | None = None, **environment: object) -> Ended:
        """Run an Outrider command and wait for its end."""
        return ended(self.start(*words, under=under, **environment))

    def wanted(self) -> str:
        """Return the output of ``GENERATE`` without a fault."""
        if self._wanted is None:
            self._wanted = self.run(*GENERATE).out
            expect(self._wanted.strip(), "no text without a fault")
        return self._wanted

    def text(self) -> Path:
        """Write a training text."""
        path = self.folder / "text.txt"
        path.write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(800)))
        return path

    @contextlib.contextmanager
    def disk(self, size: str) -> Iterator[Path]:
        """Mount a disk of this size."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        folder.chmod(0o700)
        call("mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", folder)
        try:
            yield folder
        finally:
            call("umount", "-l", folder)

    @contextlib.contextmanager
    def mounted_image(self) -> Iterator[tuple[Path, Path]]:
        """Mount a disk image that contains the embedded target's folder. Yields the image file and the mount point."""
        image, mounted = self.folder / "image", self.folder / "mounted"
        mounted.mkdir()
        call("truncate", "-s", "96M", image)
        call("mkfs.ext4", "-q", "-E", "lazy_itable_init=0", image)
        call("mount", "-o", "loop", image, mounted)
        try:
            copied_target(mounted / "target")
            yield image, mounted
        finally:
            call("umount", "-l", mounted)

    @contextlib.contextmanager
    def serving(self, *words: object, **environment: object) -> Iterator[Server]:
        """Start a server and wait until it is ready."""
        with own_server([*map(str, words)], **{name: str(value) for name, value in environment.items()}) as server:
            yield Server(server.process.pid, server.url)


@dataclass(frozen=True)
class Server:
    pid: int
    url: str

    def ask(self, prompt: str = PROMPT, **more: Any) -> tuple[int, str]:
        """Request a completion. Returns the status, and the text or error."""
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, **more}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        found = answer.json()
        return answer.status_code, found["choices"][0]["text"] if answer.is_success else found["error"]["message"]

    def expect_text(self, wanted: str) -> None:
        status, text = self.ask()
        expect(status == 200 and text.strip() == wanted.strip(), f"{status}: {text!r}, expected {wanted!r}")


def _begin(under: Callable[[], None] | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if under is not None:
        under()


def ended(process: subprocess.Popen[str]) -> Ended:
    """Wait for a process and return its output. Raises ``Broken`` after ``LIMIT`` seconds."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise Broken(f"not finished after {LIMIT:.0f} s: {err[-600:]}") from None
    return Ended(process.returncode, out, err)


def until(holds: Callable[[], bool], what: str) -> None:
    """Poll until a condition holds. Raises ``Broken`` after ``LIMIT`` seconds."""
    end = time.monotonic() + LIMIT
    while not holds():
        expect(time.monotonic() < end, f"not within {LIMIT:.0f} s: {what}")
        time.sleep(0.02)


def call(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


def full(folder: Path) -> None:
    """Fill a disk."""
    with contextlib.suppress(OSError), (folder / "filling").open("wb", 0) as file:
        while True:
            file.write(bytes(1 << 12))


def copied_target(to: Path) -> Path:
    """Copy the embedded target's folder."""
    return Path(shutil.copytree(Path(outrider.__file__).parent / "family" / "target", to))
