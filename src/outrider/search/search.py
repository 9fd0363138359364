"""Search for a plan: record the target's outputs, then measure candidates by successive halving. Independent of methods.

Each run is written to the journal before the next one starts, so an interrupted search loses only the current run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING, Any

from outrider.bench.contenders import PLAIN_CONTENDER, Contender, Contenders
from outrider.bench.grid import warm_up
from outrider.bench.measure import generate
from outrider.engine.config import reason_of
from outrider.method_text import combined, split_method
from outrider.progress import Report
from outrider.proposers.base import Proposer
from outrider.registry import PLAIN, PROPOSERS
from outrider.search import choice, halving, oracle
from outrider.search.choice import Decision
from outrider.search.halving import Ranking, Rung
from outrider.search.journal import Journal, JournalError
from outrider.search.measurements import Group, Measurements
from outrider.search.space import SearchSpace
from outrider.search.traffic import RecordedPrompt
from outrider.types import OutriderError

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

RECORDING_BATCH = 8  # batch size while recording outputs
MIN_PAIR_SPEEDUP = 1.05  # minimum speedup of both methods for trying their combination


@dataclass(frozen=True)
class RungResult:
    """A finished rung and its results."""

    name: str
    groups: int  # groups of prompts, over all batch sizes
    ranking: Ranking
    seconds: float  # since this process started the search

    @property
    def leader(self) -> str:
        """Return the fastest contender, or plain decoding if none is faster."""
        best = next(iter(self.ranking.speedups), PLAIN)
        return best if self.ranking.speedups.get(best, 0.0) > 1 else PLAIN


@dataclass
class Search:
    """State of a search: the target, the methods that fit it, the traffic, and the measurements."""

    llm: LLM
    proposers: dict[str, Proposer]
    texts: list[RecordedPrompt]  # without outputs until they are recorded
    space: SearchSpace
    journal: Journal
    report: Report = lambda *_: None
    reasons: dict[str, str] = field(default_factory=dict)  # method -> why it is not a candidate

    def __post_init__(self) -> None:
        self.contenders = Contenders(self.llm, proposers=self.proposers)
        self.candidates: dict[str, Contender] = {}  # label -> contender, for all that ran
        self.measured = Measurements()
        self.taus: dict[str, list[float]] = {}  # label -> tokens per round of each run
        self.traces: dict[Group, dict[str, oracle.RoundTrace]] = {}  # by label, for greedy outputs at batch size 1
        self.rung_results: list[RungResult] = []
        self._warm: set[tuple[Contender, int]] = set()
        self._orders = random.Random(0)  # of contenders in a turn
        self._batch = self.space.batches[0]  # of the last run
        self._done, self._total = 0, 0  # number of runs
        self._started = perf_counter()

    def run(self) -> Decision:
        """Run all stages and return the choice. Raises ``OutriderError`` if the target fails."""
        num_used = max(len(self.texts) // batch * batch for batch in self.space.batches)  # only whole batches run
        self.texts = self.record()[:num_used]
        running = [contender for method in self.proposers for contender in self._contenders_of(method)]
        others: dict[str, str] = {}
        plan = halving.rungs(len(self.texts) // min(self.space.batches), self.space.repeat)
        for number, rung in enumerate(plan):
            name = f"rung {number + 1}"
            self._plan_runs(len(running), plan[number:])
            if rung.is_whole and rung.repeat:
                self.contenders.forget()
            running = self._measure(name, running, rung)
            if number == 0:
                pair = self._pair(halving.ranking(self.measured, _labels(running), self._groups(rung)))
                running += self._measure("pair", pair, rung)
            found = halving.ranking(self.measured, _labels(running), self._groups(rung), len(self.candidates))
            self.rung_results.append(RungResult(name, len(self._groups(rung)), found, perf_counter() - self._started))
            if rung is plan[-1] or halving.is_final(found, rung):
                break
            kept = halving.survivors(found, rung)
            others |= {label: why_dropped(found, label) for label in found.speedups if label not in kept}
            running = [self.candidates[label] for label in kept]
        chosen = choice.choose(running, found, self.proposers)
        return replace(chosen, others=others | chosen.others)

    def record(self) -> list[RecordedPrompt]:
        """Generate the target's outputs for the traffic with plain decoding."""
        together = min(RECORDING_BATCH, self.llm.runner.max_batch)
        texts: list[RecordedPrompt] = []
        with self.contenders.active(PLAIN_CONTENDER):
            for start in range(0, len(self.texts), together):
                group = self.texts[start : start + together]
                outputs = self.journal.once("recorded", str(start), partial(self._record, start, group))
                if len(outputs) != len(group):
                    raise OutriderError(f"{self.journal.path} does not hold the outputs of this traffic: omit --resume")
                texts += [replace(text, output=output) for text, output in zip(group, outputs, strict=True)]
        if not any(len(text.output) > 1 for text in texts):
            raise OutriderError("all outputs have fewer than 2 tokens: use other prompts, or other settings of them")
        random.Random(0).shuffle(texts)  # rungs use the first ones, so the order of the file must not matter
        return texts

    def oracle_gap(self) -> float | None:
        """Return the oracle gap over the groups that all candidates ran on (see ``oracle.gap``).

        None unless at least two candidates ran on greedy outputs at batch size 1.
        """
        ran = [traces for traces in self.traces.values() if len(traces) == max(map(len, self.traces.values()))]
        labels = list(ran[0]) if ran else []
        texts = [[traces[label] for label in labels] for traces in ran if traces.keys() == set(labels)]
        return oracle.gap(texts) if len(labels) > 1 else None

    def ranking_of(self, label: str) -> Ranking:
        """Return the last ranking that includes a candidate."""
        return next(each.ranking for each in reversed(self.rung_results) if label in each.ranking.speedups)

    def num_prompts(self, label: str) -> int:
        """Return the number of prompts that a contender ran on, the maximum over batch sizes."""
        counts = dict.fromkeys(self.space.batches, 0)
        for group in self.measured.groups(label):
            counts[group.batch] += len(self._texts(group))
        return max(counts.values())

    # --- runs ---------------------------------------------------------------------------------------------------------------

    def _measure(self, stage: str, contenders: Sequence[Contender], rung: Rung) -> list[Contender]:
        """Run contenders in turn with plain decoding on the groups of the rung that they have not run on in this repeat.

        Returns the remaining contenders. A method that fails is dropped, and the reason is recorded.
        """
        if not contenders:
            return []
        running = list(contenders)
        for group in self._groups(rung):
            if rung.repeat == 0 and self.measured.num_turns(running[0].label, group):
                continue
            if group.batch != self._batch:  # memories would contain the outputs of the same prompts at the other batch size
                self.contenders.forget()
                self._batch = group.batch
            running = self._warmed(stage, running, group)
            running = self._take_turns(stage, running, group)
            if not running:
                break
        return running

    def _take_turns(self, stage: str, contenders: Sequence[Contender], group: Group) -> list[Contender]:
        """Run one turn. The order is shuffled, so that no contender always runs first or after the same one."""
        order = [PLAIN_CONTENDER, *contenders]
        self._orders.shuffle(order)
        seconds: dict[str, float] = {}
        for contender in order:
            if self._failed(contender):
                continue
            try:
                found = self.journal.once(stage, _name(group, contender), partial(self._run, stage, contender, group))
            except JournalError:  # no fault of the method
                raise
            except Exception as failure:
                self._drop_method(contender, failure)
                continue
            seconds[contender.label] = found["seconds"]
            self.taus.setdefault(contender.label, []).append(found["tau"])
            if found.get("accepted"):
                trace = oracle.RoundTrace.of(found["first_tokens"], found["accepted"], found["decode_seconds"])
                self.traces.setdefault(group, {}).setdefault(contender.label, trace)
            self._done += 1
        left = [contender for contender in contenders if not self._failed(contender)]
        self.measured.add_turn(group, {label: seconds[label] for label in (PLAIN, *_labels(left))})
        return left

    def _run(self, stage: str, contender: Contender, group: Group) -> dict[str, Any]:
        """Generate and time the outputs of one group of prompts."""
        self._tick(stage, contender, group)
        texts = self._texts(group)
        prompts, params = [text.prompt for text in texts], [text.replay_params for text in texts]
        run = generate(self.contenders, contender, prompts, params, group.batch)
        if run.faults:
            raise OutriderError("drafting failed during a run (details with --debug)")
        found: dict[str, Any] = {"seconds": run.seconds, "tau": run.stats.mean_acceptance_length}
        if len(texts) == 1 and texts[0].params.is_greedy:
            found["decode_seconds"] = run.seconds - run.first_seconds
            found["first_tokens"] = run.batches[0].first_tokens
            found["accepted"] = [round_.num_accepted[0] for round_ in run.batches[0].rounds]
        return found

    def _warmed(self, stage: str, contenders: Sequence[Contender], group: Group) -> list[Contender]:
        """Warm up contenders that are new at this batch size and not in the journal. Returns those that did not fail."""
        prompts = [text.prompt for text in self.texts]
        for contender in (PLAIN_CONTENDER, *contenders):
            is_warm = (contender, group.batch) in self._warm or self.journal.has(stage, _name(group, contender))
            if is_warm or self._failed(contender):
                continue
            self._tick("warming up", contender, group)
            try:
                warm_up(self.contenders, contender, prompts, group.batch)
            except Exception as failure:
                self._drop_method(contender, failure)
                continue
            self.contenders.forget(contender)
            self._warm.add((contender, group.batch))
        return [contender for contender in contenders if not self._failed(contender)]

    def _drop_method(self, contender: Contender, failure: Exception) -> None:
        """Drop the method of a failed contender. Raises the error of plain decoding, because then the target failed."""
        if contender.is_plain:
            raise failure
        self.reasons[contender.method] = reason_of(failure)

    def _failed(self, contender: Contender) -> bool:
        return contender.method in self.reasons

    def _record(self, start: int, group: Sequence[RecordedPrompt]) -> list[list[int]]:
        self.report(start, len(self.texts), "recording the target's outputs")
        generations = self.llm.generate([text.prompt for text in group], [text.params for text in group])
        completions = [generation.outputs[0] for generation in generations]
        failed = [completion.error for completion in completions if completion.finish_reason == "error"]
        if failed:
            raise OutriderError(failed[0] or "the target failed")
        return [completion.token_ids for completion in completions]

    # --- contenders and prompts ---------------------------------------------------------------------------------------------

    def _contenders_of(self, method: str) -> list[Contender]:
        found = [Contender(method, k) for k in self.space.lengths_of(self.proposers[method])]
        self.candidates |= {contender.label: contender for contender in found}
        return found

    def _pair(self, found: Ranking) -> list[Contender]:
        """Return the combination of the best method without a model and the best with one, if both are fast enough."""
        best: dict[bool, str] = {}
        for label in found.speedups:
            method = self.candidates[label].method
            if "+" in split_method(method)[0]:
                return []  # the user chose the combinations
            best.setdefault(self.proposers[method].is_model_free, label)
        if len(best) < 2 or min(found.speedups[label] for label in best.values()) < MIN_PAIR_SPEEDUP:
            return []
        parts = [self.candidates[best[kind]].method for kind in (True, False)]
        method = combined(*parts)
        self.proposers[method] = PROPOSERS.get(split_method(method)[0]).join(*[self.proposers[part] for part in parts])
        return self._contenders_of(method)

    def _groups(self, rung: Rung) -> list[Group]:
        """Return the rung's groups of prompts, which are whole batches, for every batch size."""
        totals = {batch: len(self.texts) // batch for batch in self.space.batches}
        return [Group(batch, index) for batch, total in totals.items() for index in range(rung.num_groups(total))]

    def _texts(self, group: Group) -> list[RecordedPrompt]:
        return self.texts[group.index * group.batch :][: group.batch]

    # --- progress -----------------------------------------------------------------------------------------------------------

    def _plan_runs(self, count: int, plan: Sequence[Rung]) -> None:
        """Estimate the number of remaining runs, assuming that each rung drops half of the contenders."""
        self._total, before = self._done, 0 if plan[0].repeat or not self.rung_results else self.rung_results[-1].groups
        for rung in plan:
            groups = len(self._groups(rung))
            self._total += (1 + count) * (groups if rung.repeat else groups - before)
            count = min(ceil(count / 2), halving.FINALISTS if rung.is_whole else count)
            before = groups

    def _tick(self, stage: str, contender: Contender, group: Group) -> None:
        self.report(self._done, max(self._total, self._done), f"{stage}: {contender.label}, batch {group.batch}")


def why_dropped(found: Ranking, label: str) -> str:
    """Return why a contender was dropped after a rung."""
    best, fastest = next(iter(found.speedups.items()))
    reason = f"dropped at {found.speedups[label]:.2f} times plain decoding's speed"
    return reason if label == best else f"{reason}; {best} reached {fastest:.2f}"


def _name(group: Group, contender: Contender) -> str:
    """Return the name of a run in the journal."""
    return f"batch {group.batch}, prompts {group.index}: {contender.label}"


def _labels(contenders: Sequence[Contender]) -> list[str]:
    return [contender.label for contender in contenders]
