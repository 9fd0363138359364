"""Server limits and API keys."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from outrider.types import OutriderError

KEYS_VARIABLE = "OUTRIDER_API_KEYS"


@dataclass(frozen=True)
class ServerConfig:
    """Address and limits of the server."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = "outrider"  # model name in /v1/models and in every answer
    max_queue: int = 256  # waiting sequences; beyond them the answer is 429
    max_choices: int = 64  # sequences of one call: prompts times n
    max_body: int = 4 << 20  # bytes
    header_timeout: float = 10.0  # seconds for a call's headers to arrive
    body_timeout: float = 30.0  # seconds for a body to arrive
    idle_timeout: float = 30.0  # seconds that a connection may lie still between two calls, or with an answer that is not read
    request_timeout: float = 600.0  # seconds from a call's first byte to its last token
    stream_interval: float = 0.02  # minimum seconds between two chunks of a stream; 0: every round's tokens are sent at once
    shutdown_grace: float = 60.0  # seconds that running streams get to finish
    workers: int = 2  # processes that tokenise, and as many that try schemas out once there are some
    worker_memory: float = 1.0  # GiB that each of them may take beside what it starts with
    text_timeout: float = 10.0  # seconds of processor time for the tokenization of one call's prompts
    schema_timeout: float = 2.0  # seconds of processor time for a JSON schema's compilation
    max_schema_values: int = 5000  # objects, lists, strings and numbers in a JSON schema
    max_schema_depth: int = 64  # levels of them
    max_schema_choices: int = 256  # alternatives in one anyOf, oneOf or allOf of it
    stall_timeout: float = 60.0  # seconds without a step of the engine, or of the workers, after which /ready is 503
    record: Path | None = None  # file to which requests are appended, text included

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "int" and each.name != "port" and value < 1:
                raise OutriderError(f"invalid {each.name} {value}: expected at least 1")
            if each.type == "float" and each.name != "stream_interval" and not 0 < value < math.inf:
                raise OutriderError(f"invalid {each.name} {value}: expected a number above 0")
        if not 0 <= self.stream_interval < float("inf"):
            raise OutriderError(f"invalid stream_interval {self.stream_interval}: expected 0 seconds or more")
        if not 0 <= self.port < 1 << 16:
            raise OutriderError(f"invalid port {self.port}: expected 0 to 65535")


@dataclass(frozen=True)
class Client:
    """A client: scheduling is fair between clients, and higher priorities go first."""

    name: str = "anonymous"
    priority: int = 0


ANYONE = Client()


class KeyRing:
    """API keys, stored as digests; without keys, everyone has access."""

    def __init__(self, keys: Sequence[tuple[str, Client]] = ()) -> None:
        self._clients = [(_digest(key), client) for key, client in keys]

    def __len__(self) -> int:
        return len(self._clients)

    def client(self, key: str | None) -> Client | None:
        """Return the key's client, or None. Takes the same time for every key, known or not."""
        if not self._clients:
            return ANYONE
        digest, found = _digest(key or ""), None
        for known, client in self._clients:
            if hmac.compare_digest(known, digest):
                found = client
        return found

    @classmethod
    def load(cls, file: Path | None) -> KeyRing:
        """Read lines ``KEY [NAME [PRIORITY]]`` from a file, or comma-separated entries from ``OUTRIDER_API_KEYS``.

        Keys with one name are one client; a key without a name is a client of its own. Raises ``OutriderError`` for a
        malformed line, and for a file without keys.
        """
        if file is None:
            entries = os.environ.get(KEYS_VARIABLE, "").split(",")
            return cls([_entry(entry, number, KEYS_VARIABLE) for number, entry in enumerate(entries, 1) if entry.strip()])
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OutriderError(f"cannot read the API keys: {error}") from error
        numbered = [
            (number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")
        ]
        if not numbered:
            raise OutriderError(f"{file} contains no API key: expected one KEY [NAME [PRIORITY]] per line")
        return cls([_entry(line, number, str(file)) for number, line in numbered])


def _entry(line: str, number: int, source: str) -> tuple[str, Client]:
    found = re.fullmatch(r"(\S+)(?:\s+(\S+)(?:\s+([+-]?\d+))?)?", line.strip())
    if found is None:
        raise OutriderError(f"invalid entry in {source}: expected KEY [NAME [PRIORITY]] with an integer priority")
    key, name, priority = found.groups()
    return key, Client(name or f"client-{number}", int(priority or 0))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
