"""Check structured output under every method: answers must validate, and no draft that violates the grammar may be scored.

    python bench/grammar_check.py --answers 500 --out results/grammar.json

Each method drafts for the embedded target, or for ``--target``: alone, and as ``grammar+METHOD`` together with the tokens that
the grammar determines. Every batch also has a request without a grammar. Methods that the target does not support are listed
with the reason. Exit code 1 if an answer is invalid, a forbidden draft was scored, or no method was tested. The last line of
output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import jsonschema
from outcome import count, finish, parsed, parser_of

from outrider import LLM, Completion, SamplingParams
from outrider.bench.provenance import origin
from outrider.registry import PROPOSERS
from outrider.sampling.grammar_masks import path_to
from outrider.server.grammar import GrammarCompiler
from outrider.server.prompts import tokenizer_data
from outrider.types import Context, OutriderError, Proposal, Scores

NAME = {"type": "string", "maxLength": 12}
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"name": NAME, "born": {"type": "integer", "minimum": 0, "maximum": 2100}},
        "required": ["name", "born"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue", 17]}, "minItems": 1, "maxItems": 4},
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["circle", "square"]},
            "at": {"type": "array", "items": {"type": "integer", "minimum": -99, "maximum": 99}, "minItems": 2, "maxItems": 2},
            "is_filled": {"type": "boolean"},
        },
        "required": ["kind", "at"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{2}-[0-9]{3}$"}]},
    {
        "type": "object",
        "properties": {"parent": {"$ref": "#/$defs/node"}},
        "required": ["parent"],
        "additionalProperties": False,
        "$defs": {"node": {"type": "object", "properties": {"id": NAME}, "required": ["id"], "additionalProperties": False}},
    },
]
PROMPTS = ['{"name": "Ada", "born": 1815}\n', "The ship left the harbour", '"""A circle."""\nshape = ', "ab-123\ncd-456\n"]
TEMPERATURES = (0.0, 0.8, 1.2)
MAX_TOKENS = 160
FREE_TOKENS = 20  # of a request without a grammar in each batch


class Watch:
    """Counts scored drafts, and those among them that the grammar forbids."""

    def __init__(self, llm: LLM) -> None:
        self.num_drafts = self.num_forbidden = 0
        self._score = llm.runner.score
        llm.runner.score = self  # type: ignore[method-assign]

    def __call__(self, context: Context, proposal: Proposal, hidden: tuple[int, ...] = ()) -> Scores:
        for b, request in enumerate(context.requests):
            if request.matcher is None:
                continue
            drafts = proposal.token_ids[b, : int(proposal.lens[b])].tolist()
            parents = None if proposal.parents is None else proposal.parents[b].tolist()
            output = request.token_ids[request.num_prompt_tokens :]
            for node, draft in enumerate(drafts):
                parent = node - 1 if parents is None else parents[node]
                allowed = request.matcher.allowed(output, path_to(parent, drafts, parents))
                self.num_drafts += 1
                self.num_forbidden += allowed is None or not bool(allowed[draft])
        return self._score(context, proposal, hidden)


def check(method: str, grammar_drafts: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Check one method. Raises ``OutriderError`` if the target does not support it."""
    options: dict[str, Any] = {"max_batch": 16, "max_len": 512, "grammar_drafts": grammar_drafts}
    llm = LLM(args.target, draft=args.draft, method=method, num_draft_tokens=args.k, **options)
    compiler = GrammarCompiler(tokenizer_data(llm))
    watch, invalid, answers, count = Watch(llm), [], [], 0
    while count < args.answers:
        schema, temperature = SCHEMAS[count % len(SCHEMAS)], TEMPERATURES[count % len(TEMPERATURES)]
        params = SamplingParams(MAX_TOKENS, temperature, seed=count, grammar=compiler.json(schema))
        free = SamplingParams(FREE_TOKENS, temperature, seed=count)
        generations = llm.generate([*PROMPTS, PROMPTS[0]], [*[params] * len(PROMPTS), free])
        for answer in (generation.outputs[0] for generation in generations[: len(PROMPTS)]):
            count += 1
            answers.append(answer)
            try:
                jsonschema.validate(json.loads(answer.text), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                invalid.append(f"{answer.finish_reason}: {answer.text!r}: {str(error).splitlines()[0]}")
    return {
        "answers": count,
        "invalid": len(invalid),
        "examples": invalid[:5],
        "drafts": watch.num_drafts,
        "forbidden_drafts": watch.num_forbidden,
        **figures(answers),
        "faults": llm.stats.faults,
    }


def figures(answers: Sequence[Completion]) -> dict[str, float]:
    """Return acceptance and means per answer. ``answers``: those with a grammar, without the others of their batches."""
    stats = [answer.stats for answer in answers]
    num_drafts = sum(each.num_drafts for each in stats)
    return {
        "draft_acceptance_rate": round(sum(each.num_accepted for each in stats) / max(1, num_drafts), 3),
        "tokens_per_answer": round(fmean(len(answer.token_ids) for answer in answers), 2),
        "rounds_per_answer": round(fmean(each.num_rounds for each in stats), 2),
        "forced_per_answer": round(fmean(each.num_grammar_tokens for each in stats), 2),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--answers", type=count, default=500, help="number of answers per method")
    parser.add_argument("--method", help="methods, separated by commas (default: all)")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--target", help="folder or hub id (default: the embedded target)")
    parser.add_argument("--draft")
    args = parsed(parser)
    found: dict[str, Any] = {}
    for method in args.method.split(",") if args.method else PROPOSERS:
        for name, grammar_drafts in ((method, False), (f"grammar+{method}", True)):
            try:
                found[name] = check(method, grammar_drafts, args)
            except OutriderError as error:
                found[name] = {"skipped": str(error)}
            print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    return finish({**origin(), "methods": found, "holds": holds(found)}, args.out)


def holds(found: dict[str, Any]) -> bool:
    """Return whether something was checked and nothing failed."""
    checked = [each for each in found.values() if "skipped" not in each]
    return bool(checked) and not any(each["invalid"] or each["forbidden_drafts"] for each in checked)


if __name__ == "__main__":
    sys.exit(main())
