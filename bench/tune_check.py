"""Does `outrider tune` find what trying everything finds? Three kinds of traffic, and a draft that is useless on purpose.

    python bench/tune_check.py --num-prompts 12 --repeat 1 --out results/tune.json      # about 15 minutes
    python bench/tune_check.py --target ./my-model --draft ./my-draft --num-prompts 8

For each traffic each search runs, then the exhaustive one: every method at every length in turn with plain decoding on every
prompt, ``--repeat`` times. The plans that they found run in turn with each other afterwards. A search holds if each of its
plans reaches 95% of the exhaustive best's speed in at most a fifth of its time, and if it answers the useless draft with plain
decoding. Exit code 1 where one of them does not. The last line of output is the result as JSON.
Passes that have not been compiled on this machine before are compiled in the first search's time: run it twice.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from outcome import check_out, count, told

from outrider import LLM, SamplingParams
from outrider.bench.contenders import PLAIN, Contender, Contenders
from outrider.bench.grid import PLAIN_CONTENDER, warm_up
from outrider.bench.measure import generate
from outrider.bench.provenance import provenance
from outrider.engine.methods import ALL, chosen_methods, fitting_proposers
from outrider.family import DRAFT
from outrider.proposers.base import Proposer
from outrider.registry import split_methods
from outrider.search import halving_search
from outrider.search import search as replay_search
from outrider.search.choice import Choice
from outrider.search.journal import Journal
from outrider.search.measurements import Group, Measurements
from outrider.search.traffic import Text, encoded, read_builtin

CLOSE, SHARE = 0.95, 0.2  # of the exhaustive best's speed, and of its time
DUEL = 5  # repeats of the last comparison
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 15)  # that the exhaustive search tries, besides the adaptive length
SEARCHES = ("halving", "replay")


@dataclass
class Finding:
    """What one search came to."""

    choice: Choice
    proposers: dict[str, Proposer]  # those that it joined included
    texts: list[Text]  # with the target's answers
    seconds: float
    stages: dict[str, float]
    leaders: list[tuple[float, str]]  # seconds from the start, and the fastest contender by then


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or hub id; left out: the embedded family")
    parser.add_argument("--draft")
    parser.add_argument("--methods", default=ALL)
    parser.add_argument("--searches", default=",".join(SEARCHES))
    parser.add_argument("--traffics", default="code,chat,edit", help="built-in workloads")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-prompts", type=count, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch", type=count, default=1)
    parser.add_argument("--repeat", type=count, default=2, help="of the exhaustive search")
    parser.add_argument("--compile", default="always")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def say(*what: object) -> None:
    print(*what, file=sys.stderr, flush=True)


class Check:
    """One target, and what the searches find for each traffic."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.llm = LLM(args.target, method=PLAIN, max_batch=max(args.batch, 8), compile=args.compile)

    def texts(self, traffic: str) -> list[Text]:
        args = self.args
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=0)
        return encoded(self.llm.tokenizer, read_builtin([traffic], args.num_prompts, params), self.llm.runner.max_len)

    def search(self, kind: str, texts: list[Text], methods: str, draft: str | None) -> Finding:
        """Runs a search as the command does; its seconds include the loading of drafts."""
        started = perf_counter()
        speculation = replace(self.llm.speculation, draft=draft)
        names = chosen_methods(split_methods(methods))
        proposers, reasons = fitting_proposers(speculation, self.llm.runner, self.llm.tokenizer, names)
        loaded, journal = perf_counter() - started, Journal(None, {})
        found: halving_search.Search | replay_search.Search
        leaders: list[tuple[float, str]] = []
        if kind == "halving":
            asked = halving_search.Question(batches=(self.args.batch,))
            found = halving_search.Search(self.llm, proposers, texts, asked, journal, reasons=reasons)
            choice = found.run()
            leaders = [(loaded + each.seconds, each.leader) for each in found.passed]
        else:
            before = replay_search.Question(LENGTHS, (self.args.batch,))
            found = replay_search.Search(self.llm, proposers, texts, before, journal, reasons=reasons)
            choice = found.run()
        seconds = perf_counter() - started
        leaders.append((seconds, choice.chosen.label))
        possible = {method: each for method, each in found.proposers.items() if method not in found.reasons}
        return Finding(choice, possible, found.texts, seconds, journal.document["seconds"], leaders)

    def compare(self, traffic: str, kinds: Sequence[str]) -> dict[str, Any]:
        """All searches, and their plans against each other."""
        found: dict[str, Finding] = {}
        for kind in kinds:
            found[kind] = self.search(kind, self.texts(traffic), self.args.methods, self.args.draft)
            say(f"{traffic}, {kind}: {found[kind].choice.chosen.label} after {found[kind].seconds:.0f} s")
        proposers = {method: each for finding in found.values() for method, each in finding.proposers.items()}
        texts = found[kinds[0]].texts
        every = [Contender(method, k) for method, proposer in proposers.items() for k in lengths_of(proposer)]
        started = perf_counter()
        speeds = self.speedups(proposers, texts, every, self.args.repeat)
        exhaustive = perf_counter() - started
        best = max(every, key=lambda contender: speeds(contender.label))
        say(f"{traffic}: {best.label} is the best of {len(every) + 1} after {exhaustive:.0f} s")
        plans = {finding.choice.chosen for finding in found.values()} - {PLAIN_CONTENDER}
        duel = self.speedups(proposers, texts, sorted({best, *plans}, key=str), DUEL)
        return {
            "traffic": traffic,
            "best": best.label,
            "best_speedup": round(duel(best.label), 4),
            "exhaustive_seconds": round(exhaustive, 1),
            "speedups": {label: round(speeds(label), 4) for label in (PLAIN, *(each.label for each in every))},
            "searches": {kind: judged(each, duel, speeds, best.label, exhaustive) for kind, each in found.items()},
        }

    def speedups(
        self, proposers: dict[str, Proposer], texts: Sequence[Text], every: Sequence[Contender], repeat: int
    ) -> Callable[[str], float]:
        """Runs all in turn on every prompt. Gives speeds over plain decoding's, by label."""
        contenders, measured, batch = Contenders(self.llm, proposers=proposers), Measurements(), self.args.batch
        order = [PLAIN_CONTENDER, *every]
        for contender in order:
            warm_up(contenders, contender, [text.prompt for text in texts], batch)
        turn = 0
        for _ in range(repeat):
            contenders.forget()
            for index in range(0, len(texts), batch):
                part = texts[index : index + batch]
                prompts, params = [text.prompt for text in part], [text.again for text in part]
                first = turn % len(order)
                turn += 1
                runs = {
                    contender.label: generate(contenders, contender, prompts, params, batch).seconds
                    for contender in order[first:] + order[:first]
                }
                measured.add_turn(Group(batch, index), runs)
        return lambda label: measured.ratio(label).value

    def useless(self, kind: str, traffic: str) -> dict[str, Any]:
        """A draft with random weights, and nothing else to choose from."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        source = self.args.draft or DRAFT
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(folder)
            AutoTokenizer.from_pretrained(source).save_pretrained(folder)
            found = self.search(kind, self.texts(traffic), "draft", folder)
        say(f"useless draft, {kind}: {found.choice.chosen.label} after {found.seconds:.0f} s")
        return {
            "chosen": found.choice.chosen.label,
            "seconds": round(found.seconds, 1),
            "holds": found.choice.chosen.is_plain,
        }


def lengths_of(proposer: Proposer) -> list[int | str]:
    return [*sorted({min(k, proposer.max_drafts) for k in LENGTHS}), halving_search.AUTO]


def judged(
    found: Finding, duel: Callable[[str], float], speeds: Callable[[str], float], best: str, exhaustive: float
) -> dict[str, Any]:
    """How close a search came to the exhaustive best, in how much of its time, and when it first had a plan that close."""
    label = found.choice.chosen.label
    close = duel(label) / duel(best)
    return {
        "chosen": label,
        "speedup": round(duel(label), 4),
        "close": round(close, 4),
        "seconds": round(found.seconds, 1),
        "share": round(found.seconds / exhaustive, 4),
        "close_after": first_close(found.leaders, lambda each: speeds(each) / speeds(best)),
        "leaders": [(round(seconds, 1), leader) for seconds, leader in found.leaders],
        "stages": found.stages,
        "holds": close >= CLOSE and found.seconds <= SHARE * exhaustive,
    }


def first_close(leaders: Sequence[tuple[float, str]], close: Callable[[str], float]) -> float | None:
    """Seconds after which every leader was within 5% of the best, by the exhaustive search's speeds. None: never."""
    after = None
    for seconds, leader in reversed(leaders):
        if close(leader) < CLOSE:
            break
        after = round(seconds, 1)
    return after


def main() -> int:
    args = arguments()
    check_out(args.out)
    check, kinds, traffics = Check(args), args.searches.split(","), args.traffics.split(",")
    # Which search runs first alternates: the first one pays for whatever is cold.
    found = [check.compare(traffic, kinds if i % 2 == 0 else kinds[::-1]) for i, traffic in enumerate(traffics)]
    useless = {kind: check.useless(kind, traffics[0]) for kind in kinds}
    holds = {kind: useless[kind]["holds"] and all(each["searches"][kind]["holds"] for each in found) for kind in kinds}
    result = {"target": args.target or "embedded", **provenance(check.llm.runner), "traffics": found, "useless": useless}
    return told(result | {"searches_hold": holds, "holds": all(holds.values())}, args.out)


if __name__ == "__main__":
    sys.exit(main())
