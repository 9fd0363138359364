"""Run an Outrider server in a separate process during a measurement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from outrider.server.config import KEYS_VARIABLE
from outrider.types import OutriderError

GRACE = 20.0  # seconds until a stopping server is killed
SERVE = (sys.executable, "-m", "outrider", "serve")


@dataclass(frozen=True)
class OwnServer:
    """A running server. ``log``: its standard error, JSON lines once it is ready."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path


@contextmanager
def own_server(arguments: Sequence[str], command: Sequence[str] = SERVE, **environment: str) -> Iterator[OwnServer]:
    """Start a server with these arguments on a free port, and stop it at the end.

    ``environment``: additional variables. Raises ``OutriderError`` with the server's message if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        log = Path(folder) / "server.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*command, *arguments, "--port", "0"],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={name: value for name, value in os.environ.items() if name != KEYS_VARIABLE} | environment,  # no API key
                start_new_session=True,  # Ctrl-C must not reach the server, which is stopped below
            )
        try:
            yield OwnServer(process, _address(process, log), log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server logs its address."""
    while True:
        has_ended = process.poll() is not None  # before the log is read: it is complete then
        lines = log.read_text(errors="replace").splitlines(keepends=True)
        for line in lines:
            if line.startswith("{") and line.endswith("\n"):  # the server may be writing the last line
                record = json.loads(line)
                if record.get("event") == "ready":
                    return str(record["url"])
        if has_ended:
            last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {process.returncode}")
            raise OutriderError(f"the server did not start: {last.removeprefix('error: ')}")
        sleep(0.1)
