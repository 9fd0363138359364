"""Mutate the inputs of Outrider and check that invalid ones are rejected with a one-line error.

    python bench/fuzz.py --minutes 60                             # all targets, in turn
    python bench/fuzz.py --targets head,plan --minutes 5 --seed 7
    python bench/fuzz.py --targets head --seed 7 --case 1234      # repeat one case in this process
    python bench/fuzz.py --targets plan --guided --minutes 5      # guided by coverage: pip install atheris

A case is (seed, target, number), which determines its bytes. Each target runs in a separate process with a memory limit. A
finding is a crash, an exception other than ``OutriderError``, an error of several lines, an HTTP 500, a case that takes more
than 20 s of processor time, or memory that grows with the number of cases. Its bytes are written to ``fuzz-findings/``; after
the fix, move them to ``tests/fuzz_seeds/TARGET/``, from which later runs and the tests start. Exit code 1 if there are
findings. The last line of output is the result as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import multiprocessing
import os
import random
import re
import resource
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fuzz_targets import TARGETS, Finding, Target
from outcome import finish, parsed, parser_of

from outrider.bench.provenance import origin

CASE_SECONDS = 20.0  # of processor time
SLOWDOWN = 15.0  # maximum ratio of wall-clock to processor time, because other processes use the processor too
MEMORY = 6 << 30  # bytes that a target's process may allocate after its start
WARM_CASES, MAX_GROWTH = 100, 96 << 20  # cases during which libraries fill their caches; bytes of growth after them
TURN_SECONDS = 600.0  # maximum turn of one target: long enough to detect growing memory


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--targets", type=names, default=list(TARGETS), help=f"comma-separated targets of {', '.join(TARGETS)}; default: all"
    )
    parser.add_argument("--case", type=int, help="run only this case and print its exception")
    parser.add_argument("--guided", action="store_true", help="fuzz one target, guided by coverage")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    return parsed(parser)


def names(text: str) -> list[str]:
    """Parse the value of ``--targets``."""
    unknown = [name for name in text.split(",") if name not in TARGETS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown target {unknown[0]!r}: expected {', '.join(TARGETS)}")
    return text.split(",")


def case(target: Target, seed: int, number: int) -> bytes:
    """Return the bytes of a case."""
    choose = random.Random(f"{seed}-{target.name}-{number}")
    return target.mutate(choose.choice(target.seeds()), choose)


def attempt(target: Target, data: bytes) -> str | None:
    """Run a case. Returns the fault as one line, or None."""
    try:
        target.run(data)
    except Finding as error:
        return str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {' '.join(str(error).split())[:200]}"
    return None


def work(name: str, seed: int, first: int, pipe: Connection) -> None:
    """Main function of a target's process: run cases from ``first`` on, report before and after each, until killed."""
    silence()
    target = TARGETS[name]()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    with contextlib.closing(target):
        for number in range(first, sys.maxsize):
            data = case(target, seed, number)
            pipe.send((number, data, None, 0))
            wrong = attempt(target, data)
            pipe.send((number, data, wrong, target.memory()))
            if pipe.poll():
                return


def silence() -> None:
    """Discard output of libraries."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)


class Run:
    """Cases and findings of one target, over any number of processes."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        self.name, self._seed, self._folder = name, seed, folder
        self.next = 0  # number of the next case
        self.findings: dict[str, str] = {}  # what is wrong -> file
        self.growth: int | None = None  # maximum bytes; None until a process has run ``WARM_CASES``
        self._kinds: set[str] = set()

    def run_for(self, seconds: float) -> None:
        """Run cases for some seconds, in which the starts of processes do not count."""
        while seconds > 0:
            started = self._one_process(seconds)
            seconds -= time.monotonic() - started

    def _one_process(self, seconds: float) -> float:
        """Run cases in one process until the time is over or it cannot continue. Returns when its first case began.

        Ends the program if the process ends before its first case: another one would end, too.
        """
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=work, args=(self.name, self._seed, self.next, there), daemon=False)
        process.start()
        there.close()
        first, before, data, memory = self.next, 0, b"", 0
        try:
            message, ready = self._message(here, process.pid or 0), time.monotonic()
            if isinstance(message, str):
                raise SystemExit(f"error: the target {self.name} does not start: {message}")
            while time.monotonic() - ready < seconds:
                if isinstance(message, str):
                    self.found(message if process.is_alive() else f"the process ended with code {exit_code(process)}", data)
                    self.next += 1
                    break
                number, data, wrong, memory = message
                if memory:  # the case has ended
                    self.next = number + 1
                    if wrong is not None:
                        self.found(wrong, data)
                    if number == first + WARM_CASES:
                        before = memory
                    if before and memory - before > MAX_GROWTH:
                        self.found(f"memory grew by {(memory - before) >> 20} MiB in {number - first - WARM_CASES} cases", data)
                        break
                    if before:
                        self.growth = max(self.growth or 0, memory - before)
                message = self._message(here, process.pid or 0)
            return ready
        finally:
            with contextlib.suppress(OSError):
                here.send("stop")
            process.join(CASE_SECONDS)
            process.kill()
            process.join()

    @staticmethod
    def _message(pipe: Connection, pid: int) -> Any:
        """Return the next message of the process, or why there is none."""
        started, used = time.monotonic(), processor_seconds(pid)
        while not pipe.poll(0.2):
            if time.monotonic() - started > SLOWDOWN * CASE_SECONDS:
                return f"a case takes more than {SLOWDOWN * CASE_SECONDS:g} s"
            if processor_seconds(pid) - used > CASE_SECONDS and used > 0:
                return f"a case takes more than {CASE_SECONDS:g} s of processor time"
        try:
            return pipe.recv()
        except (EOFError, OSError):
            return "the process has ended"

    def found(self, wrong: str, data: bytes) -> None:
        """Save a finding if it is the first of its kind."""
        place = re.match(r"\w+ in [\w.]+:\d+", wrong)  # of an exception; else the words without values and paths
        kind = place[0] if place else re.sub(r"'[^']*'|[^\W\d_]*\d[\w.+-]*|/\S*", "", wrong)
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        file = self._folder / self.name / hashlib.sha256(data).hexdigest()[:16]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        self.findings[wrong] = str(file)
        print(f"{self.name}, case {self.next}: {wrong} ({file})", flush=True)


def exit_code(process: Any) -> int | None:
    process.join(5)
    return process.exitcode


def processor_seconds(pid: int) -> float:
    """Return the processor time used by a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def again(name: str, seed: int, number: int) -> int:
    """Run one case in this process and print its exception."""
    with contextlib.closing(TARGETS[name]()) as target:
        data = case(target, seed, number)
        print(data[:2000])
        try:
            target.run(data)
        except Exception:
            traceback.print_exc()
            return 1
    return 0


def guided(name: str, seed: int, minutes: float, folder: Path) -> int:
    """Fuzz one target in this process with libFuzzer, guided by the coverage of Outrider's Python code.

    ``folder``: for the corpus, which grows with each run.
    """
    try:
        import atheris
    except ImportError:
        raise SystemExit("error: --guided needs atheris: pip install atheris") from None
    with atheris.instrument_imports(include=["outrider"]), contextlib.closing(TARGETS[name]()) as target:
        corpus = folder / f"{name}-corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        for data in target.seeds():
            (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)

        def one(data: bytes) -> None:
            wrong = attempt(target, data)
            if wrong is not None:
                raise Finding(wrong)

        options = [f"-max_total_time={int(60 * minutes)}", f"-seed={seed}", f"-timeout={CASE_SECONDS:g}", str(corpus)]
        atheris.Setup([sys.argv[0], *options], one)
        atheris.Fuzz()
    return 0


def main() -> int:
    args = arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.case is not None or args.guided:
        if len(args.targets) != 1:
            raise SystemExit("error: --case and --guided need one of --targets")
        (name,) = args.targets
        return guided(name, args.seed, args.minutes, args.findings) if args.guided else again(name, args.seed, args.case)
    runs, seconds = [Run(name, args.seed, args.findings) for name in args.targets], 60 * args.minutes / len(args.targets)
    num_turns = math.ceil(seconds / TURN_SECONDS)
    for _ in range(num_turns):
        for run in runs:
            run.run_for(seconds / num_turns)
    result = {
        **origin(),
        "minutes": args.minutes,
        "seed": args.seed,
        "cases": {run.name: run.next for run in runs},
        "growth_mib": {run.name: None if run.growth is None else run.growth >> 20 for run in runs},
        "findings": {run.name: run.findings for run in runs if run.findings},
        "holds": not any(run.findings or not run.next for run in runs),
    }
    return finish(result, args.out)


if __name__ == "__main__":
    sys.exit(main())
