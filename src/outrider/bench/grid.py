"""Runs every contender on every workload, taking turns with plain decoding, and keeps what each repeat measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from outrider.bench.contenders import PLAIN, Contender, Contenders
from outrider.bench.measure import Run, generate
from outrider.bench.progress import Progress
from outrider.types import SamplingParams

WARMUP_TOKENS = 24  # of an untimed generation before a contender's first timed one
PLAIN_CONTENDER = Contender(PLAIN, 0)


@dataclass(frozen=True)
class Plan:
    """What is to be measured: contenders x temperatures x batches x workloads, ``repeat`` times each."""

    contenders: tuple[Contender, ...]
    workloads: Mapping[str, Sequence[list[int]]]  # name -> prompts as token ids
    temperatures: tuple[float, ...] = (0.0,)
    batches: tuple[int, ...] = (1,)
    max_tokens: int = 64
    repeat: int = 3
    seed: int = 0
    ignore_eos: bool = True  # so that every contender generates equally many tokens

    def groups(self) -> Iterator[tuple[float, int, str]]:
        """The conditions within which contenders are compared: temperature, batch, workload."""
        for temperature in self.temperatures:
            for batch in self.batches:
                for workload in self.workloads:
                    yield temperature, batch, workload

    @property
    def num_runs(self) -> int:
        """Timed generations of one prompt list, plain ones included."""
        conditions = len(self.temperatures) * len(self.batches) * len(self.workloads)
        return conditions * self.repeat * (1 + len(self.contenders))

    def params(self, temperature: float, repeat: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=temperature, seed=self.seed + repeat, ignore_eos=self.ignore_eos
        )


@dataclass
class Group:
    """The repeats of one condition: each holds every contender's run, plain first."""

    temperature: float
    batch: int
    workload: str
    repeats: list[dict[Contender, Run]] = field(default_factory=list)


def run_grid(contenders: Contenders, plan: Plan, report: Callable[[Progress], None] = lambda progress: None) -> Iterator[Group]:
    """Yields each group as its last repeat ends; closing the iterator or an interrupt loses the repeat under way only.

    Within a repeat plain decoding and the contenders follow each other, beginning with another one each time, so that a machine
    that slows down or speeds up does so for all of them.
    """
    warm: set[tuple[Contender, int]] = set()
    done, started = 0, perf_counter()
    spent_warming = 0.0
    for temperature, batch, workload in plan.groups():
        group = Group(temperature, batch, workload)
        prompts = plan.workloads[workload]
        order = [PLAIN_CONTENDER, *plan.contenders]
        for contender in order:
            if (contender, batch) not in warm:
                report(Progress(done, plan.num_runs, None, f"{contender.label}, batch {batch}: warming up"))
                before = perf_counter()
                warm_up(contenders, contender, prompts, batch)
                spent_warming += perf_counter() - before
                warm.add((contender, batch))
        try:
            for repeat in range(plan.repeat):
                params = plan.params(temperature, repeat)
                runs: dict[Contender, Run] = {}
                contenders.forget()
                start = repeat % len(order)
                for contender in order[start:] + order[:start]:
                    elapsed = perf_counter() - started - spent_warming
                    left = elapsed / done * (plan.num_runs - done) if done else None
                    what = f"{workload}, {contender.label}, batch {batch}, temperature {temperature:g}"
                    report(Progress(done, plan.num_runs, left, what))
                    runs[contender] = generate(contenders, contender, prompts, params, batch)
                    done += 1
                group.repeats.append(runs)
        except KeyboardInterrupt:
            if group.repeats:
                yield group
            raise
        yield group


def warm_up(contenders: Contenders, contender: Contender, prompts: Sequence[list[int]], batch: int) -> None:
    """Compiles and measures what the contender's first rounds would otherwise wait for."""
    contenders.prepare(contender)
    params = SamplingParams(max_tokens=WARMUP_TOKENS, ignore_eos=True, seed=0)
    with contenders.active(contender):
        if isinstance(contender.k, int):
            contenders.llm.warmup(contender.k, batch)
    generate(contenders, contender, prompts[:batch], params, batch)
