"""A server on this machine that answers the hub client as huggingface.co does, as far as downloads of models need it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0" * 20


@dataclass
class Hub:
    """Files by repository and name, and what the server was asked."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)  # that the server states, of files that are larger than here
    failure: int = 0  # status of all answers, if not 0
    asked: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)  # names of the files that were downloaded
    url: str = ""

    def answer(self, path: str, is_head: bool) -> tuple[int, dict[str, str], bytes]:
        """Return the status, headers and body for a path."""
        self.asked.append(path)
        if self.failure:
            return self.failure, {}, b""
        found = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/]+)(?:/(resolve|tree|revision)/[^/]+(?:/(.+))?)?", path)
        files = None if found is None else self.repositories.get(found[1])
        if found is None or files is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if not path.startswith("/api/"):
            return self._file(found[1], found[3], is_head)
        sizes = {name: self.sizes.get(name, len(content)) for name, content in files.items()}
        if found[2] == "tree":
            body: object = [{"type": "file", "oid": _etag(files[name]), "size": sizes[name], "path": name} for name in files]
        else:
            siblings: list[dict[str, object]] = [{"rfilename": name, "size": size} for name, size in sizes.items()]
            for each in siblings:
                if str(each["rfilename"]).endswith(".safetensors"):
                    etag = _etag(files[str(each["rfilename"])])
                    each["lfs"] = {"sha256": etag, "size": each["size"], "pointerSize": 1}
            body = {"id": found[1], "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
        return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()

    def _file(self, repository: str, name: str, is_head: bool) -> tuple[int, dict[str, str], bytes]:
        headers = {"X-Repo-Commit": COMMIT}
        if repository in self.gated:
            return 401, headers | {"X-Error-Code": "GatedRepo"}, b""
        if name not in self.repositories[repository]:
            return 404, headers | {"X-Error-Code": "EntryNotFound"}, b""
        if not is_head:
            self.sent.append(name)
        content = self.repositories[repository][name]
        return 200, headers | {"ETag": f'"{_etag(content)}"'}, content


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serve a hub on a free port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            status, headers, body = hub.answer(unquote(urlsplit(self.path).path), self.command == "HEAD")
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = answer

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
