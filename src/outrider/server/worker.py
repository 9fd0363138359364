"""Worker process for potentially expensive input of clients: tokenize texts, apply the chat template, test JSON schemas.

``server/pool.py`` starts it and exchanges lines of JSON over standard input and output. The first line is the setup, each
further one is a job with one answer. A job that exceeds its time or memory limit ends the process, and the pool starts
another. The process also exits at the end of its standard input, so that it does not outlive the server.

This module does not import torch; it imports transformers only for chat templates.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tokenizers import Tokenizer

from outrider.errors import OutriderError
from outrider.memory import return_freed_memory

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Job = dict[str, Any]
SLOWDOWN = 5.0  # wall-clock limit / processor time limit of a job, for busy machines


def in_line(content: Mapping[str, Any]) -> bytes:
    """Return the line for a job or an answer."""
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def send(stream: BinaryIO, content: Job) -> None:
    stream.write(in_line(content))
    stream.flush()


class Workbench:
    """Run jobs with one tokenizer. ``setup``: tokenizer data from ``server.prompts.tokenizer_data``, and limits."""

    def __init__(self, setup: Job) -> None:
        self._setup = setup
        self._tokenizer = Tokenizer.from_str(setup["tokenizer"])
        self._tokenizer.encode_special_tokens = setup["split_special_tokens"]
        self._table: LLTokenizer | None = None
        # Warm up, because the first job is timed.
        if not setup["for_texts"]:
            from outrider.server.schemas import token_table

            self._table = token_table(setup)
            self.do({"schema": "{}"})
        elif setup["template"] is not None:
            self.do({"messages": [{"role": "user", "content": ""}], "max_tokens": 0})

    def do(self, job: Job) -> Job:
        """Run a job. Returns its result, or ``{"refused": reason}``: libraries may raise anything."""
        try:
            if "texts" in job:
                return self._encode(job["texts"], job["max_tokens"], job.get("add_special_tokens", True))
            if "messages" in job:
                text = self._render(job["messages"], job.get("tools"), job.get("variables", {}))
                return self._encode([text], job["max_tokens"], add_special_tokens=False)
            from outrider.server.schemas import try_out

            assert self._table is not None
            before = used_memory()
            matcher = try_out(self._table, job["schema"])
            num_bytes = max(used_memory() - before, 0)
            del matcher
            return {"bytes": num_bytes}
        except MemoryError:
            raise
        except OutriderError as error:
            return {"refused": str(error)}
        except BaseException as error:  # also a panic in a Rust library
            return {"refused": f"{type(error).__name__}: {error}"}

    def _encode(self, texts: list[str], max_tokens: int, add_special_tokens: bool) -> Job:
        ids = []
        for text in texts:
            found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            if len(found) > max_tokens:
                return {"too_long": len(found)}
            ids.append(found)
        return {"ids": ids}

    def _render(self, messages: list[Job], tools: list[Any] | None, variables: Job) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        from outrider.engine.templates import as_read_by, variables_for

        template = self._setup["tool_template" if tools else "template"]
        options = {"chat_template": template, **self._setup["special_tokens"], "add_generation_prompt": True}
        options |= variables_for(template, variables)
        try:
            rendered: Any = render_jinja_template([as_read_by(template, messages)], tools=tools or None, **options)
        except MemoryError:
            raise
        except Exception as error:
            raise OutriderError(f"the chat template rejects these messages: {str(error).strip()[:300]}") from error
        return str(rendered[0][0])


def used_memory() -> int:
    """Return the resident bytes of this process, with glibc without those that were freed; 0 if ``/proc`` is not available."""
    return_freed_memory()
    return _bytes_in_statm(1) or 0


def limit_memory(num_bytes: int) -> None:
    """Limit this process to ``num_bytes`` more memory than it uses now. Does nothing if ``/proc`` is not available."""
    held = _bytes_in_statm(0)
    if held is not None:
        resource.setrlimit(resource.RLIMIT_AS, (held + num_bytes, held + num_bytes))


def _bytes_in_statm(column: int) -> int | None:
    """Return a size of this process, in bytes: 0 all its memory, 1 the resident part. None if ``/proc`` is not available."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()
    except OSError:
        return None


def limit_time(seconds: float) -> None:
    """End this process after ``seconds`` of processor time, or of wall-clock time times ``SLOWDOWN``. 0 removes the limits.

    Both are signals with their default action, which work even if native code never returns to Python. The wall-clock limit
    applies if the pool itself is gone.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds and SLOWDOWN * seconds + 1.0)


def main() -> None:
    """Run jobs until standard input ends."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group; the server stops this process itself
        signal.signal(ignored, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep output of libraries out of the answers
    jobs = map(json.loads, sys.stdin.buffer)
    setup = next(jobs, None)
    if setup is None:
        return
    try:
        workbench = Workbench(setup)
        limit_memory(setup["memory"])
        os.nice(setup["nice"])
        send(answers, {})
    except Exception as error:
        send(answers, {"failed": f"{type(error).__name__}: {error}"})
        return
    for job in jobs:
        limit_time(setup["seconds"])
        try:
            answer = workbench.do(job)
        except MemoryError:
            os._exit(os.EX_UNAVAILABLE)
        limit_time(0)
        send(answers, answer)
