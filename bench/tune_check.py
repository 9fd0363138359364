"""Is what `outrider tune` finds as good as trying everything? Three traffics, and a draft that is useless on purpose.

    python bench/tune_check.py --out results/tune.json
    python bench/tune_check.py --target ./my-model --draft ./my-draft --num-prompts 8

For each traffic the search runs, then the exhaustive one: every method at every length, each in turn with plain decoding on
every prompt, twice. What each has found runs against the other once more, in turn. It holds if
every plan is within 5% of the exhaustive best in at most a fifth of its time, if the plans differ, and if the useless draft is
answered with plain decoding. Exit code 1 where any of that does not hold. The last line of output is the result as JSON.
Passes that have not been compiled on this machine before are compiled on the search's time: run it twice.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from outcome import check_out, count, told

from outrider import LLM, SamplingParams
from outrider.bench.contenders import PLAIN, Contender
from outrider.bench.provenance import provenance
from outrider.engine.methods import ALL, chosen_methods, fitting_proposers
from outrider.family import DRAFT
from outrider.registry import split_methods
from outrider.search import Question, Search, confirming
from outrider.search.choice import Choice
from outrider.search.confirming import Heat
from outrider.search.journal import Journal
from outrider.search.traffic import Text, encoded, read_builtin

CLOSE, SHARE = 0.95, 0.2  # of the exhaustive best's speed, and of its time
DUEL = 5  # repeats of the last comparison


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or hub id; left out: the embedded family")
    parser.add_argument("--draft")
    parser.add_argument("--methods", default=ALL)
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
    """One target, and what the two searches find for each traffic."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.llm = LLM(args.target, method=PLAIN, max_batch=max(args.batch, 8), compile=args.compile)
        self.question = Question(batches=(args.batch,))

    def search(self, texts: list[Text], methods: str, draft: str | None) -> tuple[Search, Choice, float]:
        """The search as the command runs it, and its seconds, loading of drafts included."""
        started = perf_counter()
        speculation = replace(self.llm.speculation, draft=draft)
        names = chosen_methods(split_methods(methods))
        proposers, reasons = fitting_proposers(speculation, self.llm.runner, self.llm.tokenizer, names)
        search = Search(self.llm, proposers, texts, self.question, Journal(None, {}), reasons=reasons)
        chosen = search.run()
        return search, chosen, perf_counter() - started

    def texts(self, traffic: str) -> list[Text]:
        args = self.args
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=0)
        return encoded(self.llm.tokenizer, read_builtin([traffic], args.num_prompts, params), self.llm.runner.max_len)

    def compare(self, traffic: str) -> dict[str, Any]:
        """Both searches, and their winners against each other."""
        search, choice, seconds = self.search(self.texts(traffic), self.args.methods, self.args.draft)
        say(f"{traffic}: {choice.chosen.label} after {seconds:.0f} s: {choice.reason}")
        started = perf_counter()
        every = tuple(each.contender for each in search.predictions)
        speeds = self.speeds(search, every, self.args.repeat)
        exhaustive = perf_counter() - started
        best = max(speeds, key=lambda contender: speeds[contender])
        say(f"{traffic}: {best.label} is the best of {len(every) + 1} after {exhaustive:.0f} s")
        duel = self.speeds(search, tuple({choice.chosen, best} - {Contender(PLAIN, 0)}), DUEL)
        close = duel[choice.chosen] / duel[best]
        predicted = {each.contender: each.speedup for each in search.predictions}
        return {
            "traffic": traffic,
            "chosen": choice.chosen.label,
            "best": best.label,
            "close": round(close, 4),
            "chosen_speedup": round(duel[choice.chosen], 4),
            "best_speedup": round(duel[best], 4),
            "seconds": round(seconds, 1),
            "exhaustive_seconds": round(exhaustive, 1),
            "share": round(seconds / exhaustive, 4),
            "stages": search.journal.document["seconds"],
            "speedups": {each.label: round(value, 4) for each, value in speeds.items()},
            "predicted": {each.label: round(value, 4) for each, value in predicted.items()},
            "holds": close >= CLOSE and seconds <= SHARE * exhaustive,
        }

    def speeds(self, search: Search, contenders: tuple[Contender, ...], repeat: int) -> dict[Contender, float]:
        """Times plain decoding's speed, all in turn on every prompt."""
        heat = Heat(contenders, search.texts, repeat)
        measured = confirming.added(list(confirming.run(search.contenders, heat, self.args.batch, set())))
        plain = Contender(PLAIN, 0)
        return {each: confirming.ratio([measured], each.label, PLAIN).value for each in (plain, *contenders)}

    def useless(self, traffic: str) -> dict[str, Any]:
        """A draft with random weights, and nothing else to choose from."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        source = self.args.draft or DRAFT
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(folder)
            AutoTokenizer.from_pretrained(source).save_pretrained(folder)
            _, choice, seconds = self.search(self.texts(traffic), "draft", folder)
        say(f"useless draft: {choice.chosen.label} after {seconds:.0f} s: {choice.reason}")
        return {"chosen": choice.chosen.label, "seconds": round(seconds, 1), "holds": choice.chosen.is_plain}


def main() -> int:
    args = arguments()
    check_out(args.out)
    check = Check(args)
    found = [check.compare(traffic) for traffic in args.traffics.split(",")]
    useless = check.useless(args.traffics.split(",")[0])
    plans = {each["chosen"] for each in found}
    holds = all(each["holds"] for each in (*found, useless)) and len(plans) == len(found)
    result = {"target": args.target or "embedded", **provenance(check.llm.runner), "traffics": found, "useless": useless}
    result |= {"plans_differ": len(plans) == len(found), "holds": holds}
    return told(result, args.out)


if __name__ == "__main__":
    sys.exit(main())
