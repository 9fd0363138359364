"""A process that does what clients can make expensive: tokenises texts, applies the chat template, tries schemas out.

``server/pool.py`` starts it and talks to it: a frame is four bytes of length and then JSON. The first frame says what it works
with, each further one is a job, and each job has one answer. A job that takes longer than it may, or more memory, ends the
process; the pool starts another. It ends with its standard input too, so that nothing of it outlives the server.

Imports neither torch nor, as long as no chat comes, transformers.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Job = dict[str, Any]
SLOWDOWN = 5.0  # times the processor time that a job may take, where other processes want the processor too


def write_frame(stream: BinaryIO, content: Job) -> None:
    stream.write(frame(content))
    stream.flush()


def frame(content: Mapping[str, Any]) -> bytes:
    payload = json.dumps(content, ensure_ascii=False).encode()
    return len(payload).to_bytes(4, "big") + payload


def read_frame(stream: BinaryIO) -> Job | None:
    """The next frame; None at the end of the stream."""
    size = stream.read(4)
    if len(size) < 4:
        return None
    content: Job = json.loads(stream.read(int.from_bytes(size, "big")))
    return content


class Workbench:
    """What jobs are done with. ``setup`` is what ``tools`` in ``server/prompts.py`` gives."""

    def __init__(self, setup: Job) -> None:
        self._setup = setup
        self._tokenizer = Tokenizer.from_str(setup["tokenizer"])
        self._tokenizer.encode_special_tokens = setup["split_special_tokens"]
        if setup["template"] is not None and setup["for_texts"]:
            self._render([{"role": "user", "content": ""}])  # now, rather than in the first chat's time

    def do(self, job: Job) -> Job:
        """The answer to a job: its result, or why it is refused."""
        if "texts" in job:
            return self._encode(job["texts"], job["max_tokens"], add_special_tokens=True)
        if "messages" in job:
            try:
                text = self._render(job["messages"])
            except MemoryError:
                raise
            except Exception as error:  # the template's own objection, in whatever form it raises it
                return {"refused": f"the chat template does not take these messages: {str(error).strip()[:300]}"}
            return self._encode([text], job["max_tokens"], add_special_tokens=False)
        return self._try_out(job["schema"])

    def _encode(self, texts: list[str], max_tokens: int, add_special_tokens: bool) -> Job:
        ids = []
        for text in texts:
            found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            if len(found) > max_tokens:
                return {"too_long": len(found)}
            ids.append(found)
        return {"ids": ids}

    def _render(self, messages: list[Job]) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        names, template = self._setup["special_tokens"], self._setup["template"]
        rendered: Any = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **names)
        return str(rendered[0][0])

    def _try_out(self, schema: str) -> Job:
        from outrider.server.schemas import SchemaError, try_out

        try:
            try_out(self._table, schema)
        except SchemaError as error:
            return {"refused": f"the JSON schema cannot be followed: {error}"}
        return {}

    @cached_property
    def _table(self) -> LLTokenizer:
        from outrider.server.schemas import token_table

        setup = self._setup
        return token_table(setup["tokenizer"], setup["vocab_size"], setup["eos_token_ids"])


def limit_memory(num_bytes: int) -> None:
    """Lets this process take ``num_bytes`` beside what it holds. Does nothing where the system does not say what that is."""
    try:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (held + num_bytes, held + num_bytes))


def limit_time(seconds: float) -> None:
    """Ends this process after so many seconds of processor time, and somewhat after the pool should have; 0: not any more.

    Both signals end a process even where native code never comes back to Python. The second is for when the pool is gone.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds and SLOWDOWN * seconds + 1.0)


def main() -> None:
    """Works until standard input ends."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a terminal or service: the server ends this one
        signal.signal(ignored, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    setup = read_frame(sys.stdin.buffer)
    if setup is None:
        return
    try:
        workbench = Workbench(setup)
        if not setup["for_texts"]:
            workbench.do({"schema": "{}"})
        limit_memory(setup["memory"])
        os.nice(setup["nice"])
        write_frame(answers, {})
    except Exception as error:
        write_frame(answers, {"failed": f"{type(error).__name__}: {error}"})
        return
    while (job := read_frame(sys.stdin.buffer)) is not None:
        limit_time(setup["seconds"])
        try:
            answer = workbench.do(job)
        except MemoryError:
            os._exit(os.EX_UNAVAILABLE)
        limit_time(0)
        write_frame(answers, answer)
