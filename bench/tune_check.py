"""Compare `outrider tune` with exhaustive search, for three kinds of traffic and a deliberately useless draft.

    python bench/tune_check.py --out results/tune.json      # about 25 minutes
    python bench/tune_check.py --target ./my-model --draft ./my-draft --num-prompts 8

For each traffic, the search runs, then the exhaustive one: every method at every length, alternating with plain decoding on
every prompt, ``--repeat`` times. Then the two plans alternate. The check passes if each plan reaches 95% of the exhaustive
best's speed in at most a fifth of its time, and if the search chooses plain decoding for the useless draft. Otherwise the exit
code is 1. The last line of output is the result as JSON. Run the check twice: the first time, compilation counts as search
time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from outcome import count, finish, parsed, parser_of

from outrider import LLM, SamplingParams
from outrider.bench.contenders import PLAIN_CONTENDER, Contender
from outrider.bench.grid import warm_up
from outrider.bench.measure import generate
from outrider.bench.provenance import provenance
from outrider.engine.methods import ALL, chosen_methods, fitting_proposers
from outrider.family import DRAFT
from outrider.method_text import split_methods
from outrider.registry import PLAIN
from outrider.search import halving
from outrider.search.choice import Decision
from outrider.search.journal import Journal
from outrider.search.measurements import Group, Measurements
from outrider.search.search import Search
from outrider.search.space import SearchSpace
from outrider.search.traffic import RecordedPrompt, encoded, read_builtin

CLOSE, SHARE = 0.95, 0.2  # of the exhaustive best's speed, and of its time
DUEL = 5  # repeats of the final comparison
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 15)  # lengths of the exhaustive search, besides the adaptive length


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--target", help="folder or hub id (default: the embedded target)")
    parser.add_argument("--draft")
    parser.add_argument("--method", default=ALL)
    parser.add_argument("--traffics", default="code,chat,edit", help="built-in workloads")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-prompts", type=count, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch", type=count, default=1)
    parser.add_argument("--repeat", type=count, default=2, help="repeats of the exhaustive search")
    parser.add_argument("--compile", default="always")
    return parsed(parser)


def say(*what: object) -> None:
    print(*what, file=sys.stderr, flush=True)


class Check:
    """Searches for one target, by traffic."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.llm = LLM(args.target, method=PLAIN, max_batch=max(args.batch, 8), prefix_cache=False, compile=args.compile)

    def texts(self, traffic: str) -> list[RecordedPrompt]:
        args = self.args
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=0)
        return encoded(self.llm.tokenizer, read_builtin([traffic], args.num_prompts, params), self.llm.runner.max_len)

    def search(self, traffic: str, methods: str, draft: str | None) -> tuple[Search, Decision, list[tuple[float, str]]]:
        """Run the search as the command does, including the loading of drafts.

        Also returns, with seconds from the start, the fastest contender after each rung and the final plan.
        """
        started = perf_counter()
        speculation = replace(self.llm.speculation, draft=draft)
        names = chosen_methods(split_methods(methods))
        proposers, reasons = fitting_proposers(speculation, self.llm.runner, self.llm.tokenizer, names)
        loaded, space = perf_counter() - started, SearchSpace(batches=(self.args.batch,))
        search = Search(self.llm, proposers, self.texts(traffic), space, Journal(None, {}), reasons=reasons)
        choice = search.run()
        leaders = [(loaded + each.seconds, each.leader) for each in search.rung_results]
        return search, choice, [*leaders, (perf_counter() - started, choice.chosen.label)]

    def compare(self, traffic: str) -> dict[str, Any]:
        """Run both searches and compare their plans."""
        search, choice, leaders = self.search(traffic, self.args.method, self.args.draft)
        seconds, label = leaders[-1]
        say(f"{traffic}: {label} after {seconds:.0f} s: {choice.reason}")
        proposers = {method: each for method, each in search.proposers.items() if method not in search.reasons}
        wide = SearchSpace(LENGTHS)
        every = [Contender(method, k) for method, proposer in proposers.items() for k in wide.lengths_of(proposer)]
        started = perf_counter()
        speeds = self.speedups(search, every, self.args.repeat)
        exhaustive = perf_counter() - started
        best = max(every, key=lambda contender: speeds[contender.label])
        say(f"{traffic}: {best.label} is the best of {len(every) + 1} after {exhaustive:.0f} s")
        duel = self.speedups(search, sorted({best, choice.chosen} - {PLAIN_CONTENDER}, key=str), DUEL)
        close = duel[label] / duel[best.label]
        return {
            "traffic": traffic,
            "chosen": label,
            "best": best.label,
            "close": round(close, 4),
            "chosen_speedup": round(duel[label], 4),
            "best_speedup": round(duel[best.label], 4),
            "seconds": round(seconds, 1),
            "exhaustive_seconds": round(exhaustive, 1),
            "share": round(seconds / exhaustive, 4),
            "close_after": first_close(leaders, lambda leader: speeds[leader] / speeds[best.label]),
            "leaders": [(round(after, 1), leader) for after, leader in leaders],
            "stages": search.journal.document["seconds"],
            "speedups": {each: round(speeds[each], 4) for each in (PLAIN, *(contender.label for contender in every))},
            "holds": close >= CLOSE and seconds <= SHARE * exhaustive,
        }

    def speedups(self, search: Search, every: Sequence[Contender], repeat: int) -> dict[str, float]:
        """Run all contenders in turn on every prompt. Returns their speedups over plain decoding, by label."""
        contenders, texts, measured, batch = search.contenders, search.texts, Measurements(), self.args.batch
        order = [PLAIN_CONTENDER, *every]
        for contender in order:
            warm_up(contenders, contender, [text.prompt for text in texts], batch)
        turn = 0
        for _ in range(repeat):
            contenders.forget()
            for index in range(0, len(texts), batch):
                part = texts[index : index + batch]
                prompts, params = [text.prompt for text in part], [text.replay_params for text in part]
                first = turn % len(order)
                turn += 1
                runs = {
                    contender.label: generate(contenders, contender, prompts, params, batch).seconds
                    for contender in order[first:] + order[:first]
                }
                measured.add_turn(Group(batch, index), runs)
        ranking = halving.ranking(measured, [each.label for each in every], measured.groups(PLAIN))
        return {PLAIN: 1.0, **ranking.speedups}

    def useless(self, traffic: str) -> dict[str, Any]:
        """Search with a random draft as the only choice."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        source = self.args.draft or DRAFT
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(folder)
            AutoTokenizer.from_pretrained(source).save_pretrained(folder)
            _, choice, leaders = self.search(traffic, "draft", folder)
        seconds, label = leaders[-1]
        say(f"useless draft: {label} after {seconds:.0f} s: {choice.reason}")
        return {"chosen": label, "seconds": round(seconds, 1), "holds": choice.chosen.is_plain}


def first_close(leaders: Sequence[tuple[float, str]], close: Callable[[str], float]) -> float | None:
    """Return the seconds after which every leader was within 5% of the exhaustive best; None: never."""
    after = None
    for seconds, leader in reversed(leaders):
        if close(leader) < CLOSE:
            break
        after = round(seconds, 1)
    return after


def main() -> int:
    args = arguments()
    check, traffics = Check(args), args.traffics.split(",")
    found = [check.compare(traffic) for traffic in traffics]
    useless = check.useless(traffics[0])
    result = {"target": args.target or "embedded", **provenance(check.llm.runner), "traffics": found, "useless": useless}
    return finish(result | {"holds": all(each["holds"] for each in (*found, useless))}, args.out)


if __name__ == "__main__":
    sys.exit(main())
