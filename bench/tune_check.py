"""Does `outrider tune` find what trying everything finds? Three kinds of traffic, and a draft that is useless on purpose.

    python bench/tune_check.py --num-prompts 12 --repeat 1 --out results/tune.json      # about 15 minutes
    python bench/tune_check.py --target ./my-model --draft ./my-draft --num-prompts 8

For each traffic the search runs, then the exhaustive one: every method at every length in turn with plain decoding on every
prompt, ``--repeat`` times. The two plans run in turn with each other afterwards. The search holds if each plan reaches 95% of
the exhaustive best's speed in at most a fifth of its time, and if the useless draft is answered with plain decoding.
Exit code 1 where it does not hold. The last line of output is the result as JSON.
Passes that have not been compiled on this machine before are compiled in the search's time: run it twice.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from outcome import check_out, count, told

from outrider import LLM, SamplingParams
from outrider.bench.contenders import PLAIN, Contender
from outrider.bench.grid import PLAIN_CONTENDER, warm_up
from outrider.bench.measure import generate
from outrider.bench.provenance import provenance
from outrider.engine.methods import ALL, chosen_methods, fitting_proposers
from outrider.family import DRAFT
from outrider.method_text import split_methods
from outrider.proposers.base import Proposer
from outrider.search import Question, Search
from outrider.search.choice import Choice
from outrider.search.journal import Journal
from outrider.search.measurements import Group, Measurements
from outrider.search.traffic import Text, encoded, read_builtin

CLOSE, SHARE = 0.95, 0.2  # of the exhaustive best's speed, and of its time
DUEL = 5  # repeats of the last comparison
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 15)  # that the exhaustive search tries, besides the adaptive length


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or hub id; left out: the embedded family")
    parser.add_argument("--draft")
    parser.add_argument("--method", default=ALL)
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

    def search(self, traffic: str, methods: str, draft: str | None) -> tuple[Search, Choice, list[tuple[float, str]]]:
        """Runs the search as the command does, loading of drafts included.

        Also gives the fastest contender after each rung and the plan at the end, with the seconds from the start.
        """
        started = perf_counter()
        speculation = replace(self.llm.speculation, draft=draft)
        names = chosen_methods(split_methods(methods))
        proposers, reasons = fitting_proposers(speculation, self.llm.runner, self.llm.tokenizer, names)
        loaded, question = perf_counter() - started, Question(batches=(self.args.batch,))
        search = Search(self.llm, proposers, self.texts(traffic), question, Journal(None, {}), reasons=reasons)
        choice = search.run()
        leaders = [(loaded + each.seconds, each.leader) for each in search.passed]
        return search, choice, [*leaders, (perf_counter() - started, choice.chosen.label)]

    def compare(self, traffic: str) -> dict[str, Any]:
        """Both searches, and their plans against each other."""
        search, choice, leaders = self.search(traffic, self.args.method, self.args.draft)
        seconds, label = leaders[-1]
        say(f"{traffic}: {label} after {seconds:.0f} s: {choice.reason}")
        proposers = {method: each for method, each in search.proposers.items() if method not in search.reasons}
        every = [Contender(method, k) for method, proposer in proposers.items() for k in lengths_of(proposer)]
        started = perf_counter()
        speeds = self.speedups(search, every, self.args.repeat)
        exhaustive = perf_counter() - started
        best = max(every, key=lambda contender: speeds(contender.label))
        say(f"{traffic}: {best.label} is the best of {len(every) + 1} after {exhaustive:.0f} s")
        duel = self.speedups(search, sorted({best, choice.chosen} - {PLAIN_CONTENDER}, key=str), DUEL)
        close = duel(label) / duel(best.label)
        return {
            "traffic": traffic,
            "chosen": label,
            "best": best.label,
            "close": round(close, 4),
            "chosen_speedup": round(duel(label), 4),
            "best_speedup": round(duel(best.label), 4),
            "seconds": round(seconds, 1),
            "exhaustive_seconds": round(exhaustive, 1),
            "share": round(seconds / exhaustive, 4),
            "close_after": first_close(leaders, lambda leader: speeds(leader) / speeds(best.label)),
            "leaders": [(round(after, 1), leader) for after, leader in leaders],
            "stages": search.journal.document["seconds"],
            "speedups": {each: round(speeds(each), 4) for each in (PLAIN, *(contender.label for contender in every))},
            "holds": close >= CLOSE and seconds <= SHARE * exhaustive,
        }

    def speedups(self, search: Search, every: Sequence[Contender], repeat: int) -> Callable[[str], float]:
        """Runs all contenders in turn on every prompt. Returns speeds over plain decoding's, by label."""
        contenders, texts, measured, batch = search.contenders, search.texts, Measurements(), self.args.batch
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

    def useless(self, traffic: str) -> dict[str, Any]:
        """A draft with random weights, and nothing else to choose from."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        source = self.args.draft or DRAFT
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(folder)
            AutoTokenizer.from_pretrained(source).save_pretrained(folder)
            _, choice, leaders = self.search(traffic, "draft", folder)
        seconds, label = leaders[-1]
        say(f"useless draft: {label} after {seconds:.0f} s: {choice.reason}")
        return {"chosen": label, "seconds": round(seconds, 1), "holds": choice.chosen.is_plain}


def lengths_of(proposer: Proposer) -> list[int | str]:
    return [*sorted({min(k, proposer.max_drafts) for k in LENGTHS}), "auto"]


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
    check, traffics = Check(args), args.traffics.split(",")
    found = [check.compare(traffic) for traffic in traffics]
    useless = check.useless(traffics[0])
    result = {"target": args.target or "embedded", **provenance(check.llm.runner), "traffics": found, "useless": useless}
    return told(result | {"holds": all(each["holds"] for each in (*found, useless))}, args.out)


if __name__ == "__main__":
    sys.exit(main())
