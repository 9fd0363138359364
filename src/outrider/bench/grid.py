"""Run every contender on every workload in turn with plain decoding, and record each repeat."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product

from outrider.bench.contenders import PLAIN_CONTENDER, Contender, Contenders
from outrider.bench.measure import Run, generate
from outrider.progress import Report
from outrider.types import SamplingParams

WARMUP_TOKENS = 24  # tokens of the untimed warm-up before a contender's first run
# Program that keeps a core busy for as long as the process with this id is its parent. It prints a line when it starts.
BUSY = "import os\nprint(flush=True)\nwhile os.getppid() == {}: sum(range(10_000))"


@dataclass(frozen=True)
class GridPlan:
    """Contenders x temperatures x batches x workloads x busy processes, ``repeat`` times each.

    Only whole batches run: a last one with fewer prompts is left out.
    """

    contenders: tuple[Contender, ...]
    workloads: Mapping[str, Sequence[list[int]]]  # name -> prompts as token ids
    temperatures: tuple[float, ...] = (0.0,)
    batches: tuple[int, ...] = (1,)
    max_tokens: int = 64
    repeat: int = 3
    seed: int = 0
    busy: tuple[int, ...] = (0,)  # numbers of other busy processes

    @property
    def num_runs(self) -> int:
        """Return the number of timed runs, including plain decoding: a run is one batch of prompts with one contender."""
        parts = sum(len(prompts) // batch for batch in self.batches for prompts in self.workloads.values())
        return len(self.temperatures) * len(self.busy) * parts * self.repeat * (1 + len(self.contenders))

    def params(self, temperature: float, repeat: int) -> SamplingParams:
        """Return sampling settings with which every contender generates the same number of tokens."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=self.seed + repeat, ignore_eos=True)


@dataclass
class Group:
    """Repeats of one condition. Each has one run per contender, plain decoding first."""

    temperature: float
    batch: int
    workload: str
    repeats: list[dict[Contender, Run]] = field(default_factory=list)
    busy: int = 0  # number of other busy processes


def run_grid(contenders: Contenders, plan: GridPlan, report: Report = lambda *_: None) -> Iterator[Group]:
    """Yield each group after its last repeat. Closing the iterator or an interrupt loses only the running repeat.

    Plain decoding and the contenders take turns at each batch of prompts in rotating order, so that changes in the machine's
    speed affect all of them equally.
    """
    warm: set[tuple[Contender, int]] = set()
    done = 0
    for temperature, batch, workload, busy in product(plan.temperatures, plan.batches, plan.workloads, plan.busy):
        group = Group(temperature, batch, workload, busy=busy)
        prompts = plan.workloads[workload]
        order = [PLAIN_CONTENDER, *plan.contenders]
        for contender in order:
            if (contender, batch) not in warm:
                report(done, plan.num_runs, f"{contender.label}, batch {batch}: warming up")
                warm_up(contenders, contender, prompts, batch)
                warm.add((contender, batch))
        try:
            for repeat in range(plan.repeat):
                params = plan.params(temperature, repeat)
                runs: dict[Contender, Run] = {}
                contenders.forget()
                for number in range(len(prompts) // batch):
                    start = (repeat + number) % len(order)
                    for contender in order[start:] + order[:start]:
                        what = f"{workload}, {contender.label}, batch {batch}, temperature {temperature:g}"
                        what += f", {busy} busy" if busy else ""
                        report(done, plan.num_runs, what)
                        part = prompts[number * batch :][:batch]
                        with busy_processes(busy):
                            runs[contender] = generate(contenders, contender, part, params, batch, runs.get(contender))
                        done += 1
                group.repeats.append(runs)
        except (KeyboardInterrupt, Exception):  # not GeneratorExit: nobody takes the group then
            if group.repeats:
                yield group
            raise
        yield group


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Context manager: keep ``count`` other processes busy, as on a shared machine."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            running.append(subprocess.Popen([sys.executable, "-S", "-c", BUSY.format(os.getpid())], stdout=subprocess.PIPE))
        for process in running:
            if process.stdout is not None:
                process.stdout.readline()  # the start of an interpreter is not the load that was asked for
        yield
    finally:
        for process in running:
            with process:
                process.kill()


def warm_up(contenders: Contenders, contender: Contender, prompts: Sequence[list[int]], batch: int) -> None:
    """Generate without timing, so that compilation and measurements precede the contender's first timed rounds."""
    contenders.prepare(contender)
    params = SamplingParams(max_tokens=WARMUP_TOKENS, ignore_eos=True, seed=0)
    with contenders.active(contender):
        if isinstance(contender.k, int):
            contenders.llm.warmup(contender.k, batch)
    generate(contenders, contender, prompts[:batch], params, batch)
