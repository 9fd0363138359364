"""A few worker processes that share out jobs: clients take turns, and a job that takes too long or too much memory is ended.

A thread cannot be ended, and one that loops in a library's native code holds up all others that need it. A process can.
Knows jobs and clients, neither what the jobs are nor HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from outrider.engine.queue import FairQueue
from outrider.server.bridge import Stopping
from outrider.server.config import Client
from outrider.server.worker import SLOWDOWN, Job, frame
from outrider.types import OutriderError

logger = logging.getLogger(__name__)

# -I: neither the working folder nor the environment decides what is imported, but the server's own path does.
COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from outrider.server.worker import main; main()"
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
START_SECONDS = 60.0  # for a process to be ready, on a machine however busy
PAUSE = 1.0  # seconds before another is started after one that did not start


class WorkerLost(Exception):
    """A process that ended without an answer, with its exit code."""

    def __init__(self, code: int | None) -> None:
        self.code = code
        super().__init__(f"a worker ended with code {code}")


@dataclass(eq=False)
class _Task:
    """A job that waits or is worked on."""

    job: Job
    pushed: float
    result: asyncio.Future[Job]
    is_repeated: bool = False

    def end(self, answer: Job | Exception) -> None:
        if self.result.done():  # its caller waits no longer
            return
        if isinstance(answer, Exception):
            self.result.set_exception(answer)
        else:
            self.result.set_result(answer)


class Worker:
    """One process, which does one job at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, setup: Mapping[str, Any]) -> Worker:
        """Starts a process. Raises ``OSError`` or ``WorkerLost`` where there is none to be had."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", COMMAND, *sys.path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,  # Ctrl-C is for the server
        )
        worker = cls(process)
        try:
            failed = (await asyncio.wait_for(worker.answer(setup), START_SECONDS)).get("failed")
            if failed is not None:
                raise OSError(failed)
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def answer(self, job: Mapping[str, Any]) -> Job:
        """What the process says to a job. Raises ``WorkerLost`` where it ends instead."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(frame(job))
            await stdin.drain()
            size = int.from_bytes(await stdout.readexactly(4), "big")
            found: Job = json.loads(await stdout.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            raise WorkerLost(await self._process.wait()) from None
        return found

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class WorkerPool:
    """Jobs of one kind and the processes that do them. All methods are for one event loop's thread."""

    def __init__(self, what: str, setup: Mapping[str, Any], size: int, eager: bool) -> None:
        """``what``: what a job does, for messages; ``eager``: processes start with the pool instead of with its first job.

        ``setup`` is what ``Workbench`` takes, with the limits ``seconds`` (of processor time for a job), ``memory`` (bytes) and
        ``nice`` (how far processes stand back for others).
        """
        self._what, self._setup, self._size, self._eager = what, setup, size, eager
        self._waiting: FairQueue[_Task] = FairQueue()
        self._pushed = asyncio.Event()
        self._runners: list[asyncio.Task[None]] = []
        self._last_move = 0.0  # when a process was last given a job, or started
        self._trouble: str | None = None  # why there is no process

    def start(self) -> None:
        self._runners = [asyncio.create_task(self._run()) for _ in range(self._size)]

    async def stop(self) -> None:
        """Ends the processes; jobs that wait are cancelled."""
        for runner in self._runners:
            runner.cancel()
        await asyncio.gather(*self._runners, return_exceptions=True)
        for task in list(self._waiting):
            task.result.cancel()

    @property
    def trouble(self) -> str | None:
        """Why no job can be done, in one line; None while they can."""
        return self._trouble and f"no process to {self._what} starts: {self._trouble}"

    @property
    def stalled_seconds(self) -> float:
        """How long nothing has moved although jobs wait."""
        oldest = min((task.pushed for task in self._waiting), default=monotonic())
        return monotonic() - max(self._last_move, oldest)

    async def do(self, job: Job, cost: float, client: Client) -> Job:
        """The answer to a job. ``cost`` measures the work: by it clients take turns.

        Raises ``OutriderError`` where the job is refused, or takes more time or memory than it may, and ``Stopping`` where no
        process starts.
        """
        if self.trouble is not None:
            raise Stopping(self.trouble)
        task = _Task(job, monotonic(), asyncio.get_running_loop().create_future())
        self._waiting.push(task, client.turn, client.priority, cost=cost)
        self._pushed.set()
        try:
            answer = await task.result
        finally:
            self._waiting.remove(task)  # where the caller was cancelled
        if "refused" in answer:
            raise OutriderError(answer["refused"])
        return answer

    async def _run(self) -> None:
        """One process after the other, one job after the other."""
        task = None
        try:
            while True:
                if not self._eager and task is None:
                    await self._pushed_any()
                worker = await self._started(task)
                try:
                    while True:
                        task = task or await self._next()
                        task.end(await asyncio.wait_for(worker.answer(task.job), SLOWDOWN * self._setup["seconds"]))
                        task = None
                except (TimeoutError, WorkerLost) as error:
                    assert task is not None
                    task = self._again(task, error)
                finally:
                    await worker.kill()
        finally:
            if task is not None:
                task.result.cancel()

    async def _pushed_any(self) -> None:
        while not len(self._waiting):
            self._pushed.clear()
            await self._pushed.wait()

    async def _next(self) -> _Task:
        await self._pushed_any()
        task = next(iter(self._waiting))
        self._waiting.serve(task)
        self._last_move = monotonic()
        return task

    async def _started(self, task: _Task | None) -> Worker:
        """A process, as soon as one starts. Where the first try fails ``task`` and all that wait end."""
        while True:
            try:
                worker = await Worker.start(self._setup)
            except (TimeoutError, OSError, WorkerLost) as error:
                if self._trouble is None:
                    logger.error("no process to %s starts: %s", self._what, error)
                self._trouble = str(error) or "it is not ready in time"
                for each in [*self._waiting, *([] if task is None else [task])]:
                    each.end(Stopping(self.trouble or ""))
                await asyncio.sleep(PAUSE)
            else:
                self._trouble, self._last_move = None, monotonic()
                return worker

    def _again(self, task: _Task, error: WorkerLost | asyncio.TimeoutError) -> _Task | None:
        """The job, if it is to be done once more after its process has ended; else it ends with an error."""
        if isinstance(error, WorkerLost) and error.code == -signal.SIGKILL and not task.is_repeated:
            logger.warning("a process to %s was killed: another does its job", self._what)
            task.is_repeated = True
            return task
        if isinstance(error, WorkerLost) and error.code not in (-signal.SIGPROF, -signal.SIGALRM):
            taken = f"more than {self._setup['memory'] >> 20} MiB of memory"
        else:
            taken = f"longer than {self._setup['seconds']:g} s"
        logger.warning("a process to %s was ended: a job took %s", self._what, taken)
        task.end(OutriderError(f"to {self._what} takes {taken}: send less"))
        return None
