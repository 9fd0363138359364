"""The search for a plan, stage by stage: record, replay, price, predict, confirm, choose. Knows the name of no method.

Each finding goes into the journal before the next is looked for, so that an interrupted search loses only what was under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import geometric_mean
from time import perf_counter
from typing import TYPE_CHECKING, Any

from outrider.bench.contenders import Contender, Contenders
from outrider.bench.grid import PLAIN_CONTENDER
from outrider.bench.progress import Progress
from outrider.engine.methods import in_one_line
from outrider.proposers.base import Proposer
from outrider.registry import PROPOSERS, in_turn, parts_of, split_method
from outrider.search import choice, confirming, prices
from outrider.search.choice import Choice, Prediction
from outrider.search.confirming import Heat, Measured
from outrider.search.journal import Journal
from outrider.search.leading import lead
from outrider.search.prediction import Played, Studied, predict
from outrider.search.prices import Prices
from outrider.search.traces import Replay, Trace, replay_text
from outrider.search.traffic import Text, spread
from outrider.types import OutriderError

if TYPE_CHECKING:
    from outrider.engine import LLM

AUTO = "auto"
TOGETHER = 8  # texts recorded and replayed at a time
LED = 6  # drafts a round where a chain is led: what is not seen from one place is seen from the next
LED_TOKENS = 512  # of recorded text along which a proposer is led that the target has to be run for
JOINED_FROM = 1.05  # times plain decoding that each of two methods must promise for them to be joined


@dataclass(frozen=True)
class Question:
    """What is looked for."""

    lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 12, 15)  # numbers of drafts; the length that adapts is always tried too
    batches: tuple[int, ...] = (1,)  # texts at a time that the plan is for
    repeat: int = 3  # of the last confirming run

    def lengths_of(self, proposer: Proposer) -> list[int | str]:
        """Those that the proposer can draft, and the one that adapts."""
        fixed = sorted({min(k, proposer.max_drafts) for k in self.lengths})
        return [*fixed, AUTO]

    def longest(self, proposer: Proposer) -> int:
        return min(max(*self.lengths, proposer.auto_drafts), proposer.max_drafts)


@dataclass
class Search:
    """One target, its possible proposers, the traffic and what is known of them."""

    llm: LLM
    proposers: dict[str, Proposer]
    texts: list[Text]  # without outputs, until they are recorded
    question: Question
    journal: Journal
    report: Callable[[Progress], None] = lambda progress: None
    reasons: dict[str, str] = field(default_factory=dict)  # method -> why it is not among the candidates

    def __post_init__(self) -> None:
        self._made = dict(self.proposers)  # and the parts of those that take turns, which are no candidates
        self.contenders = Contenders(self.llm, proposers=self._made)
        self.measured: dict[str, list[Measured]] = {}  # label -> the last heat it ran in, at each batch size
        self._predicted: dict[str, list[Prediction]] = {}  # by method
        self._studied: dict[str, tuple[Replay, dict[int, Prices]]] = {}  # by method that takes no turns
        self._warm: set[tuple[Contender, int]] = set()  # contenders that ran at that batch size
        self._stage, self._done, self._total, self._started = "", 0, 0, 0.0

    @property
    def predictions(self) -> list[Prediction]:
        """Of every method at every length, so far."""
        return [prediction for predictions in self._predicted.values() for prediction in predictions]

    def run(self) -> Choice:
        """All stages. Raises ``OutriderError`` where the target fails."""
        self.texts = self.record()
        for method in list(self.proposers):
            self.study(method)
        self._join()
        return self.confirm()

    # --- stages -------------------------------------------------------------------------------------------------------------

    def record(self) -> list[Text]:
        """What the target says to the traffic, without drafts."""
        together = min(TOGETHER, self.llm.runner.max_batch)
        groups = range(0, len(self.texts), together)
        self._begin("1/5 recording the target's answers", len(groups))
        texts: list[Text] = []
        with self.contenders.active(PLAIN_CONTENDER):
            for start in groups:
                group = self.texts[start : start + together]
                self._tick(f"{start} of {len(self.texts)} prompts", 0)
                outputs = self.journal.once("recorded", str(start), lambda group=group: self._answers(group))  # type: ignore[misc]
                texts += [replace(text, output=output) for text, output in zip(group, outputs, strict=True)]
                self._tick("", 1)
        if not any(len(text.output) > 1 for text in texts):
            raise OutriderError("the target ends every answer of this traffic at once: there is nothing to draft")
        return texts

    def study(self, method: str) -> None:
        """Replay, prices and predictions of one method; of one that takes turns those of its parts. One that fails on the way
        is no candidate, and the reason is kept."""
        turns = self.proposers[method].turns
        parts = [method] if len(turns) == 1 else parts_of(method)
        try:
            for part, turn in zip(parts, turns, strict=True):
                self._made.setdefault(part, turn.proposer)
                if part not in self._studied:
                    self._studied[part] = self.replay(part), self.price(part)
        except Exception as failure:
            self.reasons[method] = in_one_line(failure)
        else:
            self._predicted[method] = self.predict(method, parts)

    def replay(self, method: str) -> Replay:
        """How good its drafts are along the recorded answers."""
        proposer = self._made[method]
        led = led_lengths(proposer, self.question.longest(proposer))
        texts = [self.texts[index] for index in self._replayed(method)]
        self._begin(f"2/5 replaying {method}", len(led) * sum(len(text.output) for text in texts))

        def found() -> Any:
            traces = {k: self._traces(proposer, texts, k) for k in led}
            return Replay(traces).as_json()

        return Replay.from_json(self.journal.once("replays", method, found))

    def price(self, method: str) -> dict[int, Prices]:
        """What its rounds take, at each batch size."""
        proposer = self._made[method]
        longest = self.question.longest(proposer)
        self._begin(f"3/5 pricing {method}", len(self.question.batches))
        found = {}
        for batch in self.question.batches:
            self._tick(f"batch {batch}", 0)
            texts = [text for text in self.texts if len(text.output) > 2]
            if not texts:
                raise OutriderError("the answers of the traffic are too short to measure a round: raise --max-tokens")

            def measured(batch: int = batch, texts: Sequence[Text] = texts) -> Any:
                return prices.measure(self.contenders, method, texts, batch, longest).as_json()

            found[batch] = Prices.from_json(self.journal.once("prices", f"{method} batch {batch}", measured))
            self._tick(f"batch {batch}", 1)
        return found

    def predict(self, method: str, parts: Sequence[str]) -> list[Prediction]:
        """Every length of one method. ``parts``: those that it takes turns between, which were studied."""
        proposer = self.proposers[method]
        lengths = self.question.lengths_of(proposer)
        self._begin(f"4/5 predicting {method}", len(lengths))
        replays = [self._along_the_same(part, parts) for part in parts]
        studied = {
            batch: [Studied(replay, self._studied[part][1][batch]) for part, replay in zip(parts, replays, strict=True)]
            for batch in self.question.batches
        }
        plain = {batch: predict(proposer, 0, known, batch) for batch, known in studied.items()}
        found = []
        for k in lengths:
            played = {batch: predict(proposer, k, known, batch) for batch, known in studied.items()}
            found.append(_prediction(method, k, plain, played))
            self._tick(f"k={k}", 1)
        return found

    def confirm(self) -> Choice:
        """Runs the best few in turn with plain decoding, and chooses."""
        candidates, reasons = choice.shortlist(self.predictions)
        plan = confirming.heats(candidates, self.texts, self.question.repeat)
        batches = self.question.batches
        self._begin("5/5 confirming", sum(self._heat(candidates, each).num_runs(b) for each in plan for b in batches))
        measured: list[Measured] = []
        for number, each in enumerate(plan):
            if not candidates:
                break
            heat = self._heat(candidates, each)
            measured = [self._measured(number, heat, batch) for batch in batches]
            self.measured |= {contender.label: measured for contender in heat.contenders}
            if number + 1 < len(plan):
                candidates, left = choice.survivors(candidates, measured, plan[number + 1][0])
                reasons |= left
        chosen = choice.choose(candidates, partial(confirming.ratio, measured), self.proposers)
        return replace(chosen, others=reasons | chosen.others)

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _answers(self, group: Sequence[Text]) -> list[list[int]]:
        completions = self.llm.generate([text.prompt for text in group], [text.params for text in group])
        failed = [completion.error for completion in completions if completion.finish_reason == "error"]
        if failed:
            raise OutriderError(failed[0] or "the target failed")
        return [completion.token_ids for completion in completions]

    def _traces(self, proposer: Proposer, texts: Sequence[Text], k: int) -> list[Trace]:
        runner = self.llm.runner
        proposer.memory = None  # of these very texts, from another replay or from pricing
        if proposer.reads_text_only:
            return [replay_text(proposer, text, k, runner.vocab_size) for text in texts]
        coupled, traces = self.llm.speculation.same_text, list[Trace]()
        # A tree may be as large as pays at its batch size; a chain's drafts are the same at any.
        together = min(self.question.batches[0] if proposer.drafts_trees else TOGETHER, runner.max_batch)
        for start in range(0, len(texts), together):
            group = texts[start : start + together]
            traces += lead(runner, proposer, group, k, together, coupled)
            self._tick(f"{k} drafts a round", sum(len(text.output) for text in group))
        return traces

    def _replayed(self, method: str) -> list[int]:
        """The texts along which a method is replayed: all where that is free, else some."""
        every = range(len(self.texts))
        if self._made[method].reads_text_only:
            return list(every)
        return spread(every, share_of(self.texts, LED_TOKENS))

    def _along_the_same(self, part: str, parts: Sequence[str]) -> Replay:
        """A part's replay along those texts that all parts were replayed along."""
        common = min((self._replayed(each) for each in parts), key=len)
        mine = self._replayed(part)
        return self._studied[part][0].only([mine.index(index) for index in common])

    def _join(self) -> None:
        """The best method that reads the text alone before the best that runs a model, where each promises a gain."""
        best: dict[bool, Prediction] = {}
        for method, predictions in self._predicted.items():
            if "+" in split_method(method)[0]:
                return  # the user names pairs
            top = max(predictions, key=lambda each: each.speedup)
            kind = self.proposers[method].reads_text_only
            if kind not in best or top.speedup > best[kind].speedup:
                best[kind] = top
        if len(best) < 2 or min(each.speedup for each in best.values()) < JOINED_FROM:
            return
        parts = best[True].method, best[False].method
        method = in_turn(*parts)
        pair = PROPOSERS.get(split_method(method)[0]).join(*[self.proposers[part] for part in parts])
        self.proposers[method] = self._made[method] = pair
        self.study(method)

    def _heat(self, candidates: Sequence[Contender], each: tuple[int, int, int]) -> Heat:
        count, num_texts, repeat = each
        return Heat(tuple(candidates[:count]), spread(self.texts, num_texts), repeat)

    def _measured(self, number: int, heat: Heat, batch: int) -> Measured:
        """One heat at one batch size; repeats that the journal holds are not run again."""
        who = ", ".join(contender.label for contender in heat.contenders)
        names = [f"heat {number}, batch {batch}, repeat {repeat}: {who}" for repeat in range(heat.repeat)]
        known = [name for name in names if self.journal.has("confirmed", name)]
        left = confirming.run(self.contenders, replace(heat, repeat=heat.repeat - len(known)), batch, self._warm, self._tick)
        stored = [self.journal.once("confirmed", name, lambda: next(left)) for name in names]
        return confirming.added(stored)

    # --- progress -----------------------------------------------------------------------------------------------------------

    def _begin(self, stage: str, total: int) -> None:
        self._stage, self._total, self._done, self._started = stage, total, 0, perf_counter()
        self._tick("", 0)

    def _tick(self, what: str, advance: int) -> None:
        self._done = min(self._done + advance, self._total)
        left = (perf_counter() - self._started) / self._done * (self._total - self._done) if self._done else None
        self.report(Progress(self._done, self._total, left, f"{self._stage}: {what}" if what else self._stage))


def led_lengths(proposer: Proposer, longest: int) -> list[int]:
    """Numbers of drafts to replay with. Longer chains begin as shorter ones do; a tree has another shape at each depth."""
    if proposer.reads_text_only:
        return [longest]
    if not proposer.drafts_trees:
        return [min(longest, LED)]
    return sorted({longest, max(1, longest // 2)})


def share_of(texts: Sequence[Text], num_tokens: int) -> int:
    """How many of the texts come to about so many tokens of output: at least one."""
    total = sum(len(text.output) for text in texts)
    return max(1, round(len(texts) * num_tokens / max(total, 1)))


def _prediction(method: str, k: int | str, plain: dict[int, Played], played: dict[int, Played]) -> Prediction:
    by_batch = {str(batch): plain[batch].seconds / played[batch].seconds for batch in played}
    tau = next(iter(played.values())).tau
    return Prediction(method, k, geometric_mean(by_batch.values()), tau, by_batch)
