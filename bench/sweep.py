"""Test every architecture of the installed transformers, and write docs/models.md with one row for each.

    python bench/sweep.py                  # all without a result yet; make sweep does this
    python bench/sweep.py llama gpt_oss    # run these again

Each tiny random model runs in its own process with a limit of ``--timeout`` seconds. Results are appended to ``--results``, one
JSON object per line, and the page is written from them. Exit code 1 if any output differs or any model fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import transformers
from architectures import compare, page, tiny

POLL_SECONDS = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested architectures; write the page if every architecture has a result. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures by transformers' name, or variants (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="number of models in parallel")
    parser.add_argument("--timeout", type=float, default=300.0, help="maximum seconds per model")
    parser.add_argument("--results", type=Path, default=Path(f".sweep/transformers-{transformers.__version__}.jsonl"))
    parser.add_argument("--page", type=Path, default=Path("docs/models.md"))
    parser.add_argument("--anew", action="store_true", help="discard results of earlier runs")
    options = parser.parse_args(arguments)
    known = [*tiny.architectures(), *tiny.VARIANTS]
    unknown = set(options.names) - set(known)
    if unknown:
        raise SystemExit(f"error: unknown architecture {sorted(unknown)[0]!r}: expected transformers' name or a variant")
    options.results.parent.mkdir(parents=True, exist_ok=True)
    if options.anew:
        options.results.unlink(missing_ok=True)
    done = read(options.results)
    names = options.names or [name for name in known if name not in done]
    with options.results.open("a") as file:
        for result in run(names, options.jobs, options.timeout):
            done[result.name] = result
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            print(f"{len(done):3}/{len(known)} {result.name}: {result.verdict} {result.reason}"[:200], flush=True)
    results = [done[name] for name in known if name in done]
    if len(results) == len(known):
        options.page.write_text(page.page(results))
        print(f"written: {options.page}")
    return 1 if any(result.verdict in ("wrong", "fails") for result in results) else 0


def read(path: Path) -> dict[str, compare.Result]:
    """Return name -> last result of a file."""
    lines = path.read_text().splitlines() if path.exists() else []
    results = [compare.Result(**json.loads(line)) for line in lines]
    return {result.name: result for result in results}


@dataclass
class _Job:
    name: str
    process: multiprocessing.process.BaseProcess
    answer: Connection
    deadline: float


def run(names: Sequence[str], jobs: int, timeout: float) -> Iterator[compare.Result]:
    """Yield results as they arrive. Each model has its own process, so that a crash or hang affects no other."""
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    waiting, running = list(names), list[_Job]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            answer, child = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(name, child), daemon=True)
            process.start()
            child.close()
            running.append(_Job(name, process, answer, time.monotonic() + timeout))
        for job in list(running):
            result = _result_of(job, timeout)
            if result is not None:
                running.remove(job)
                yield result
        time.sleep(POLL_SECONDS)


def _result_of(job: _Job, timeout: float) -> compare.Result | None:
    """Return the result of a job, or None while it is running."""
    result = None
    if job.answer.poll():
        try:
            result = job.answer.recv()
        except EOFError:
            job.process.join()
            result = compare.Result(job.name, "fails", f"the process ended with code {job.process.exitcode}")
    elif time.monotonic() > job.deadline:
        job.process.kill()
        result = compare.Result(job.name, "fails", f"no result after {timeout:.0f} s")
    if result is not None:
        job.process.join()
        job.answer.close()
    return result


def _work(name: str, answer: Connection) -> None:
    transformers.utils.logging.disable_progress_bar()
    logging.disable()  # e.g. warnings that early exit of a random model gains nothing
    answer.send(compare.compare(name))
    answer.close()


if __name__ == "__main__":
    sys.exit(main())
