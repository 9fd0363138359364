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
from pathlib import Path
from time import sleep

from outrider.server.config import KEYS_VARIABLE
from outrider.types import OutriderError

GRACE = 20.0  # seconds until a stopping server is killed


@contextmanager
def own_server(arguments: Sequence[str]) -> Iterator[str]:
    """Start ``outrider serve`` with these arguments, yield its address, and stop it.

    Raises ``OutriderError`` with the server's message if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        log = Path(folder) / "server.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "outrider", "serve", *arguments, "--port", "0"],
                stderr=errors,
                env={name: value for name, value in os.environ.items() if name != KEYS_VARIABLE},  # no API key
                start_new_session=True,  # Ctrl-C must not reach the server, which is stopped below
            )
        try:
            yield _address(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    while True:
        lines = log.read_text(errors="replace").splitlines()
        for line in lines:
            if line.startswith("{"):
                record = json.loads(line)
                if record.get("event") == "ready":
                    return str(record["url"])
        if process.poll() is not None:
            last = next((line for line in reversed(lines) if line.strip()), f"exit code {process.returncode}")
            raise OutriderError(f"the server did not start: {last.removeprefix('error: ')}")
        sleep(0.1)
