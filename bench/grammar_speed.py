"""Measure the speedup of grammar drafts: every method with and without them, in turns per prompt, on one loaded target.

Each prompt is answered once, because engines remember what grammars left a choice about; the warm-up has prompts of its own.

    python bench/grammar_speed.py --inflate 1b --prompts WikiQuestions.json --out results/grammar-1b.json

``--prompts`` is a JSON list of objects with "context" and "question" (ArcticInference's json_mode). Each is answered in two
forms: "question", a Boolean and a text, and "record", many keys with short values. Exit code 1 if an answer is invalid. The
last line of output is the result as JSON; ``gain`` is the speed of the best method with grammar drafts divided by that of the
best method without.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema
from outcome import count, finish, parsed, parser_of

from outrider import LLM, SamplingParams, family
from outrider.bench.inflate import inflated
from outrider.bench.provenance import device_name, origin
from outrider.bench.statistics import Timings, speedup_interval
from outrider.engine.config import build_engine, build_policy, build_proposer
from outrider.engine.engine import Engine
from outrider.engine.outputs import Completion
from outrider.server.grammar import GrammarCompiler
from outrider.server.prompts import tokenizer_data
from outrider.types import OutriderError

TEXT = {"type": "string", "maxLength": 80}
DAY = {"type": "string", "pattern": "^(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])$"}
FORMS: dict[str, dict[str, Any]] = {
    "question": {
        "type": "object",
        "properties": {"answerable": {"type": "boolean"}, "answer": TEXT},
        "required": ["answerable", "answer"],
        "additionalProperties": False,
    },
    "record": {
        "type": "object",
        "properties": {
            "subject_category": {"enum": ["person", "organisation", "location", "event", "artefact"]},
            "first_mentioned": DAY,
            "confidence_percent": {"type": "integer", "minimum": 0, "maximum": 100},
            "requires_human_review": {"type": "boolean"},
            "summary": {"type": "string", "maxLength": 40},
            "source_reliability": {"enum": ["primary_source", "secondary_source", "unknown_source"]},
        },
        "required": [
            "subject_category",
            "first_mentioned",
            "confidence_percent",
            "requires_human_review",
            "summary",
            "source_reliability",
        ],
        "additionalProperties": False,
    },
}
PROMPT = "{context}\n\nQuestion: {question}\nAnswer as JSON:\n"
MAX_TOKENS, MAX_CONTEXT = 256, 1200  # tokens of an answer; characters of a context


@dataclass
class Lane:
    """Results of one method, with or without grammar drafts, for one form."""

    name: str
    engine: Engine
    answers: list[Completion] = field(default_factory=list)  # [prompts]
    seconds: list[float] = field(default_factory=list)  # [prompts]

    @property
    def texts(self) -> list[list[int]]:
        return [answer.token_ids for answer in self.answers]

    def total(self, count: str) -> int:
        """Return the sum of one count of the statistics over all answers."""
        return sum(getattr(answer.stats, count) for answer in self.answers)

    @property
    def timings(self) -> Timings:
        return Timings.of([[len(answer.token_ids) for answer in self.answers]], [self.seconds])

    @property
    def tok_s(self) -> float:
        return sum(map(len, self.texts)) / sum(self.seconds)


def lanes(llm: LLM, methods: Sequence[str], k: int | str) -> Iterator[Lane]:
    """Yield two engines for each method that share one proposer; no request runs in both.

    Raises ``OutriderError`` for a wrong method.
    """
    for method in methods:
        speculation = replace(llm.speculation, method=method, num_draft_tokens=k)
        proposer = build_proposer(speculation, llm.runner, llm.tokenizer)
        for name, grammar_drafts in ((method, False), (f"grammar+{method}", True)):
            policy = build_policy(speculation, llm.runner, proposer)
            chosen = replace(speculation, grammar_drafts=grammar_drafts)
            yield Lane(name, build_engine(chosen, llm.runner, proposer, policy, llm.engine.scheduler))


def measure(llm: LLM, form: str, prompts: Sequence[str], args: argparse.Namespace) -> tuple[list[Lane], list[str]]:
    """Run every lane on every prompt, in a rotating order; the last prompts are a warm-up. Return lanes, invalid answers."""
    grammar, invalid = GrammarCompiler(tokenizer_data(llm)).json(FORMS[form]), []
    found = list(lanes(llm, args.methods, args.k))
    for at in [*range(args.num_prompts, len(prompts)), *range(args.num_prompts)]:
        params = SamplingParams(MAX_TOKENS, args.temperature, seed=at, grammar=grammar)
        first = at % len(found)
        for lane in found[first:] + found[:first]:
            llm.engine, llm.proposer = lane.engine, lane.engine.proposer
            started = time.perf_counter()
            answer = llm.generate(prompts[at], params)[0].outputs[0]
            seconds = time.perf_counter() - started
            if at >= args.num_prompts:
                continue
            lane.answers.append(answer)
            lane.seconds.append(seconds)
            try:
                jsonschema.validate(json.loads(answer.text), FORMS[form])
            except (ValueError, jsonschema.ValidationError) as error:
                invalid.append(f"{lane.name}: {answer.finish_reason}: {answer.text!r}: {str(error).splitlines()[0]}")
        print(f"{form}: prompt {at + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    return found, invalid


def report(found: Sequence[Lane]) -> dict[str, Any]:
    """Return rounds and speeds of each lane, and the ratio of each lane with grammar drafts to the one without."""
    rows: dict[str, Any] = {}
    for at, lane in enumerate(found):
        texts, num_rounds, num_drafts = lane.texts, lane.total("num_rounds"), lane.total("num_drafts")
        num_answers, num_tokens = len(texts), sum(map(len, texts))
        without = found[at - at % 2]
        rows[lane.name] = {
            "answers": num_answers,
            "tokens_per_answer": round(num_tokens / num_answers, 2),
            "rounds_per_answer": round(num_rounds / num_answers, 2),
            "tokens_per_round": round(num_tokens / num_rounds, 3),
            "forced_share": round(lane.total("num_grammar_tokens") / num_tokens, 3),
            "draft_acceptance_rate": round(lane.total("num_accepted") / num_drafts, 3) if num_drafts else None,
            "same_answers_as_first": sum(a == b for a, b in zip(texts, found[0].texts, strict=True)),
            "tok_s": round(lane.tok_s, 2),
            "speedup": round(lane.tok_s / found[0].tok_s, 3),
            "gain": round(lane.tok_s / without.tok_s, 3),
            "gain_interval": None if lane is without else speedup_interval(lane.timings, without.timings),
        }
    best = [max(found[start::2], key=lambda lane: lane.tok_s) for start in (0, 1)]
    return {
        "lanes": rows,
        "best_without": best[0].name,
        "best_with": best[1].name,
        "gain": round(best[1].tok_s / best[0].tok_s, 3),
        "gain_interval": speedup_interval(best[1].timings, best[0].timings),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON list of objects with context and question")
    parser.add_argument("--num-prompts", type=count, default=10)
    parser.add_argument("--warmup", type=count, default=2, help="further prompts, answered before the others")
    parser.add_argument("--forms", default=",".join(FORMS), help="forms of answers, separated by commas")
    parser.add_argument("--methods", default="plain,suffix,draft", help="comma-separated methods; the first is the baseline")
    parser.add_argument("--k", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--target", type=Path, help="folder (default: the embedded target)")
    parser.add_argument("--draft")
    parser.add_argument("--inflate", help="inflate the target to the cost of this size, such as 1b")
    parser.add_argument("--compile", default="auto")
    args = parsed(parser)
    args.methods, args.forms = args.methods.split(","), args.forms.split(",")
    args.k = args.k if args.k == "auto" else int(args.k)
    rows = json.loads(args.prompts.read_text())
    if len(rows) < args.num_prompts + args.warmup:
        parser.error(f"{args.prompts} has {len(rows)} prompts, expected {args.num_prompts} and {args.warmup} for the warm-up")
    rows = rows[: args.num_prompts + args.warmup]
    prompts = [PROMPT.format(context=row["context"][:MAX_CONTEXT], question=row["question"]) for row in rows]
    target = args.target or family.TARGET
    drafts = family.drafts() if args.target is None else {}
    try:
        folder = inflated(Path(target), args.inflate) if args.inflate else target
        options = {"max_batch": 1, "max_len": 2048, "prefix_cache": False, "compile": args.compile}
        llm = LLM(str(folder), draft=args.draft, drafts=drafts, method="plain", num_draft_tokens="auto", **options)
        if args.compile != "never":
            llm.warmup()
        forms, invalid = {}, []
        for form in args.forms:
            found, wrong = measure(llm, form, prompts, args)
            forms[form] = report(found)
            invalid += wrong
    except OutriderError as error:
        raise SystemExit(f"error: {error}") from None
    setting = {"k": args.k, "temperature": args.temperature, "inflate": args.inflate, "device": device_name(llm.runner.device)}
    result = {**origin(), **setting, "forms": forms, "invalid": invalid[:5], "holds": not invalid}
    return finish(result, args.out)


if __name__ == "__main__":
    sys.exit(main())
