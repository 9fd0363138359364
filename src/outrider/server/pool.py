"""Pool of worker processes: clients take turns, and a job that exceeds its time or memory limit is killed.

Processes are used because a thread cannot be killed: one stuck in a library's native code would block the server.
This module does not depend on what the jobs are, or on HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from outrider.engine.queue import FairQueue
from outrider.errors import first_line
from outrider.server.bridge import Busy, Stopping
from outrider.server.config import KEYS_VARIABLE, Client
from outrider.server.worker import SLOWDOWN, Job, in_line
from outrider.types import OutriderError

logger = logging.getLogger(__name__)

# -I: import from the server's own sys.path, whatever the working directory and the environment are.
COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from outrider.server.worker import main; main()"
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
SECRETS = (KEYS_VARIABLE, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # workers process texts of clients, and need none of these
START_SECONDS = 60.0  # until a process must be ready, even on a busy machine
MAX_ANSWER = 1 << 30  # bytes of an answer
RETRY_SECONDS = 1.0  # seconds before the next attempt after a process failed to start


class WorkerLost(Exception):
    """Worker process that exited without an answer."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"worker process exited with code {code}")


@dataclass(eq=False)
class _Task:
    """A waiting or running job."""

    job: Job
    client: Client
    pushed: float
    result: asyncio.Future[Job]
    num_killed: int = 0  # processes that were killed from outside while they had this job

    def end(self, answer: Job | Exception) -> None:
        if self.result.done():  # the caller was cancelled
            return
        if isinstance(answer, Exception):
            self.result.set_exception(answer)
        else:
            self.result.set_result(answer)


class Worker:
    """One worker process. It runs one job at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, setup: Mapping[str, Any]) -> Worker:
        """Start a process. Raises an exception if it does not become ready, such as ``OSError`` or ``WorkerLost``."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", COMMAND, *sys.path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name not in SECRETS} | ENVIRONMENT,
            limit=MAX_ANSWER,
            start_new_session=True,  # Ctrl-C must reach only the server
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(START_SECONDS):  # wait_for may lose a cancellation, which would delay the shutdown
                failed = (await worker.answer(setup)).get("failed")
            if failed is not None:
                raise OSError(failed)
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def answer(self, job: Mapping[str, Any]) -> Job:
        """Run a job and return its result. Raises ``WorkerLost`` if the process exits first."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(in_line(job))
            await stdin.drain()
            found: Job = json.loads(await stdout.readuntil())
        except (asyncio.IncompleteReadError, OSError):
            raise WorkerLost(await self._process.wait()) from None
        return found

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class WorkerPool:
    """Queue for one kind of job, and the processes that run them. Use it from one event loop's thread only."""

    def __init__(self, what: str, setup: Mapping[str, Any], size: int, eager: bool) -> None:
        """``what``: verb phrase that describes a job, for messages; ``eager``: start processes before the first job.

        ``setup``: setup of ``Workbench``, with the limits ``seconds`` (processor time per job), ``memory`` (bytes) and ``nice``
        (increment of the niceness).
        """
        self._what, self._setup, self._size, self._eager = what, setup, size, eager
        self._waiting: FairQueue[_Task] = FairQueue()
        self._job_added = asyncio.Event()
        self._runners: list[asyncio.Task[None]] = []
        self._last_progress = 0.0  # when a job or a process was last started
        self._num_ready = 0  # running processes
        self._start_error: str | None = None  # reason why the last process did not start

    def start(self) -> None:
        self._runners = [asyncio.create_task(self._run()) for _ in range(self._size)]

    async def stop(self) -> None:
        """Kill the processes and cancel waiting jobs."""
        for runner in self._runners:
            runner.cancel()
        await asyncio.gather(*self._runners, return_exceptions=True)
        for task in list(self._waiting):
            task.result.cancel()

    @property
    def start_error(self) -> str | None:
        """One-line reason why no job can run, or None."""
        if self._num_ready or self._start_error is None:
            return None
        return f"cannot start a process to {self._what}: {self._start_error}"

    @property
    def stalled_seconds(self) -> float:
        """Seconds without progress while jobs are waiting."""
        oldest = min((task.pushed for task in self._waiting), default=monotonic())
        return monotonic() - max(self._last_progress, oldest)

    async def do(self, job: Job, cost: float, client: Client) -> Job:
        """Run a job and return its result. ``cost``: estimated work, by which the scheduling is fair between clients.

        Raises ``OutriderError`` if the job is refused, exceeds its limit of processor time or memory or crashes its process,
        ``Busy`` if its process got too little processor time or was killed repeatedly, ``Stopping`` if no process starts.
        """
        if self.start_error is not None:
            raise Stopping(self.start_error)
        task = _Task(job, client, monotonic(), asyncio.get_running_loop().create_future())
        self._waiting.push(task, client.queue_key, client.priority, cost)
        self._job_added.set()
        try:
            answer = await task.result
        finally:
            self._waiting.remove(task)  # if the caller was cancelled
        if "refused" in answer:
            raise OutriderError(answer["refused"])
        return answer

    async def _run(self) -> None:
        """Run jobs in one process at a time; replace a process that is killed."""
        while True:
            if not self._eager:
                await self._wait_for_job()
            worker = await self._started()
            self._num_ready += 1
            try:
                while await self._do_next(worker):
                    pass
            finally:
                self._num_ready -= 1
                await worker.kill()

    async def _do_next(self, worker: Worker) -> bool:
        """Run the next job. Return whether the process can run another one."""
        task = await self._next()
        try:
            async with asyncio.timeout(SLOWDOWN * self._setup["seconds"]):
                answer = await worker.answer(task.job)
        except asyncio.CancelledError:
            task.result.cancel()
            raise
        except (TimeoutError, WorkerLost) as error:
            self._retry_or_end(task, error)
            return False
        except Exception as error:  # such as an answer that is not JSON: it must not end this runner
            logger.exception("a process to %s failed", self._what)
            task.end(error)
            return False
        task.end(answer)
        return True

    async def _wait_for_job(self) -> None:
        while not len(self._waiting):
            self._job_added.clear()
            await self._job_added.wait()

    async def _next(self) -> _Task:
        await self._wait_for_job()
        task = next(iter(self._waiting))
        self._waiting.serve(task)
        self._last_progress = monotonic()
        return task

    async def _started(self) -> Worker:
        """Start a process, with retries. After a failure, all waiting jobs end with ``Stopping`` if no other process runs."""
        while True:
            try:
                worker = await Worker.start(self._setup)
            except Exception as error:  # whatever it is, the next attempt may succeed
                reason = f"not ready after {START_SECONDS:g} s" if isinstance(error, TimeoutError) else first_line(error)
                if self._start_error is None:
                    logger.error("cannot start a process to %s: %s", self._what, reason)
                self._start_error = reason
                if self.start_error is not None:
                    for task in list(self._waiting):
                        self._waiting.remove(task)
                        task.end(Stopping(self.start_error))
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._start_error, self._last_progress = None, monotonic()
                return worker

    def _retry_or_end(self, task: _Task, error: WorkerLost | TimeoutError) -> None:
        """Queue a job again whose process was killed from outside, at most ``size`` times; otherwise end it with an error.

        All processes may have been killed while they were idle.
        """
        if isinstance(error, WorkerLost) and error.code == -signal.SIGKILL and task.num_killed < self._size:
            if task.result.done():  # its caller has left
                return
            logger.warning("a process to %s was killed: retrying its job", self._what)
            task.num_killed += 1
            self._waiting.put_back(task, task.client.queue_key, task.client.priority)
            self._job_added.set()
        else:
            task.end(self._failure(error))

    def _failure(self, error: WorkerLost | TimeoutError) -> OutriderError:
        """Return the error of a job whose process was lost."""
        code = error.code if isinstance(error, WorkerLost) else -signal.SIGALRM
        logger.warning("a process to %s ended with exit code %d", self._what, code)
        seconds, memory = f"{self._setup['seconds']:g} s", f"{self._setup['memory'] >> 20} MiB of memory"
        if code in (-signal.SIGALRM, -signal.SIGKILL):  # waited for the processor, or killed from outside: not the job's fault
            return Busy(math.ceil(self._setup["seconds"]))
        limit = {-signal.SIGPROF: seconds, -signal.SIGABRT: memory, os.EX_UNAVAILABLE: memory}.get(code)
        if limit is None:
            return OutriderError(f"cannot {self._what}: its process failed")
        return OutriderError(f"cannot {self._what} within {limit}: send a smaller one")
