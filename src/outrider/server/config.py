"""Server limits and API keys."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from outrider.errors import OutriderError, errors_as, without_path
from outrider.options import INT32, LIMITS, LISTEN, PATH, CheckedOptions, number, option, shown, text, whole

KEYS_VARIABLE = "OUTRIDER_API_KEYS"
COUNT, POSITIVE = whole(1, INT32), number(above=0)
listening, limit = partial(option, panel=LISTEN), partial(option, panel=LIMITS)


@dataclass(frozen=True)
class ServerConfig(CheckedOptions):
    """Where the server listens and what it allows. Raises ``OutriderError`` for a value of the wrong type or out of bounds."""

    host: str = listening(text(), "127.0.0.1", "Address to listen on; 127.0.0.1 accepts only this machine.")
    port: int = listening(whole(0, 65535), 8000, "Port; 0 selects a free one.")
    name: str = listening(
        text(), "outrider", "Model name that clients see (default: the target's folder or id; in Python, outrider)."
    )
    max_queue: int = limit(COUNT, 256, "Maximum number of waiting sequences; beyond it the answer is 429.")
    max_choices: int = limit(COUNT, 64, "Maximum number of sequences per call: prompts times n.")
    max_body: int = limit(COUNT, 4 << 20, "Maximum bytes of a call's body.")
    header_timeout: float = limit(POSITIVE, 10.0, "Seconds to receive a call's headers.")
    body_timeout: float = limit(POSITIVE, 30.0, "Seconds to receive a call's body.")
    idle_timeout: float = limit(
        POSITIVE, 30.0, "Seconds that a connection may be idle between calls or leave an answer unread."
    )
    request_timeout: float = limit(POSITIVE, 600.0, "Seconds from a call's first byte to its last token.")
    stream_interval: float = limit(
        number(0), 0.02, "Minimum seconds between two chunks of a stream; 0 sends the tokens of every round."
    )
    shutdown_grace: float = limit(POSITIVE, 60.0, "Maximum seconds from SIGTERM to the end of the process.")
    workers: int = limit(COUNT, 2, "Worker processes for tokenisation, and as many for JSON schemas.")
    worker_memory: float = limit(POSITIVE, 1.0, "GiB that jobs may add to each worker, and all JSON schemas to the server.")
    text_timeout: float = limit(POSITIVE, 10.0, "Processor seconds to tokenise the prompts of one call.")
    schema_timeout: float = limit(POSITIVE, 2.0, "Processor seconds to compile a JSON schema.")
    max_schema_values: int = limit(COUNT, 5000, "Maximum number of values in a JSON schema.")
    max_schema_depth: int = limit(COUNT, 64, "Maximum depth of a JSON schema.")
    max_schema_choices: int = limit(COUNT, 256, "Maximum alternatives in one anyOf, oneOf or allOf of a JSON schema.")
    stall_timeout: float = limit(
        POSITIVE, 60.0, "Seconds without progress of the engine or of a worker until /ready answers 503."
    )
    record: Path | None = option(
        PATH, None, "Append the requests to this file, text included; outrider tune reads it.", panel=LISTEN
    )


@dataclass(frozen=True)
class Client:
    """A client of the server. Requests of a higher priority run first; within a priority clients take turns."""

    name: str = "anonymous"
    priority: int = 0
    connection: str = ""  # without API keys, each connection counts as a client
    is_only: bool = False  # whether this client has the only key

    @property
    def queue_key(self) -> str:
        """Key for fair scheduling: requests with different keys take turns. Empty if there is only one client."""
        return "" if self.is_only else f"{self.name} {self.connection}"


ANYONE = Client()


def host_error(header: str | None, address: str, own_name: str) -> str | None:
    """Return the reason to refuse a request without an API key because of its header ``Host``, or None.

    A web page whose name resolves to this machine (DNS rebinding) must not reach a server on a loopback address. Requests
    without the header are allowed: browsers always send it. ``address``: of the socket; ``own_name``: the value of ``--host``.
    """
    if not header or not is_loopback(address):
        return None
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:  # brackets without an address
        name = ""
    if is_loopback(name) or name == own_name.lower():
        return None
    return f"unknown host {shown(header)}: expected localhost or a loopback address; for other names set --host"


def is_loopback(host: str) -> bool:
    """Return whether a host is localhost or a loopback address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class KeyRing:
    """API keys, stored as digests; without keys, everyone has access."""

    def __init__(self, keys: Sequence[tuple[str, Client]] = ()) -> None:
        is_only = len({client.name for _, client in keys}) == 1
        self._clients = {_digest(key): replace(client, is_only=is_only) for key, client in keys}

    def __len__(self) -> int:
        return len(self._clients)

    def client(self, key: str) -> Client | None:
        """Return the client of an API key, or None. The key's digest is looked up: timing reveals nothing about the keys."""
        return self._clients.get(_digest(key)) if self._clients else ANYONE

    @classmethod
    def load(cls, file: Path | None) -> KeyRing:
        """Read lines ``KEY [NAME [PRIORITY]]`` from a file, or comma-separated entries from ``OUTRIDER_API_KEYS``.

        Keys with the same name are one client; a key without a name is a separate client. Raises ``OutriderError`` for a
        malformed entry, for a key that occurs twice, and for a file or a variable without keys.
        """
        if file is not None:
            source, separator = str(file), "line"
            with errors_as(f"cannot read the API keys: {file}", OSError, UnicodeDecodeError, detail=without_path):
                entries = ["" if line.lstrip().startswith("#") else line for line in file.read_text("utf-8-sig").splitlines()]
        elif given := os.environ.get(KEYS_VARIABLE):
            source, separator, entries = KEYS_VARIABLE, "comma-separated entry", given.split(",")
        else:
            return cls()
        keys = [_entry(entry, number, source) for number, entry in enumerate(entries, 1) if entry.strip()]
        if not keys:
            raise OutriderError(f"{source} contains no API key: expected one KEY [NAME [PRIORITY]] per {separator}")
        if len({key for key, _ in keys}) < len(keys):
            raise OutriderError(f"{source} contains an API key twice: expected each key in one {separator}")
        return cls(keys)


def _entry(line: str, number: int, source: str) -> tuple[str, Client]:
    found = re.fullmatch(r"(\S+)(?:\s+(\S+)(?:\s+([+-]?\d+))?)?", line.strip())
    if found is None:
        raise OutriderError(f"invalid entry in {source}: expected KEY [NAME [PRIORITY]] with an integer priority")
    key, name, priority = found.groups()
    return key, Client(name or f"client-{number}", int(priority or 0))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
