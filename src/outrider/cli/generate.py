"""``outrider generate``: stream the output for one prompt, then print a summary."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.app import Terminated
from outrider.cli.console import err, legend, painter_for, say, summary, waiting
from outrider.cli.options import MethodOptions, ModelOptions, SamplingOptions, flag, with_groups
from outrider.errors import OutriderError, errors_as, requires, without_path
from outrider.options import SAMPLING

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import Chunk
    from outrider.engine.stats import GenerationStats
    from outrider.types import Grammar, SamplingParams

EXAMPLES = """Examples:

outrider generate "def quicksort("

outrider generate --show -k 4 "Once upon a time"

outrider generate --target Qwen/Qwen3-8B --download-draft "Dear Sir,"

outrider generate --json-schema person.json "Ada Lovelace, born in 1815, as JSON: "

outrider generate --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --temperature 0.7 --seed 1 "Dear Sir,"

cat notes.txt | outrider generate --target ./my-model --method ngram --max-tokens 200 --json -
"""


@with_groups
def command(
    *,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - or no argument reads standard input.")] = None,
    show: bool = flag("Colour each token: accepted draft, corrected, bonus, grammar.", False, "--show"),
    as_json: bool = flag("Print one JSON document instead of the text.", False, "--json"),
    json_schema: Path | None = flag(
        "File with a JSON schema: the answer is JSON that matches it. Needs .[serve], excludes --min-tokens and --ignore-eos.",
        panel=SAMPLING,
    ),
    models: ModelOptions,
    methods: MethodOptions,
    sampling: SamplingOptions,
) -> None:
    """Stream the output for a prompt, then print a summary."""
    from outrider.cli.session import load, prepare, read_prompt, start

    if as_json and show:
        raise OutriderError("--json and --show exclude each other: give one of them")
    start()
    text, params = read_prompt(prompt), sampling.params()
    schema = None if json_schema is None else read_schema(json_schema)
    llm = load(models, methods, max_batch=1)
    if schema is not None:
        params = replace(params, grammar=grammar_of(schema, llm))
    prepare(llm, models)
    if as_json:
        document = _document(llm, text, params)
        print(json.dumps(document, ensure_ascii=False))
        if document["finish_reason"] == "abort":
            raise KeyboardInterrupt
    else:
        _, interrupt = stream_to_screen(llm, text, params, show)
        if interrupt is not None:
            raise interrupt


def read_schema(file: Path) -> dict[str, Any]:
    """Read a JSON schema. Raises ``OutriderError`` if the file is not a JSON object."""
    with errors_as(f"cannot read the JSON schema: {file}", OSError, ValueError, RecursionError, detail=without_path):
        schema = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(schema, dict):
        raise OutriderError(f"{file} is not a JSON schema: expected an object, got a {type(schema).__name__}")
    return schema


def grammar_of(schema: dict[str, Any], llm: LLM) -> Grammar:
    """Compile a JSON schema for the tokenizer. Raises ``OutriderError`` for an unsupported schema."""
    with requires("serve", "a JSON schema"):
        from outrider.server.grammar import GrammarCompiler
        from outrider.server.prompts import tokenizer_data
    return GrammarCompiler(tokenizer_data(llm)).json(schema)


def stream_to_screen(
    llm: LLM, prompt: str | list[int], params: SamplingParams, show: bool
) -> tuple[str, KeyboardInterrupt | None]:
    """Stream to stdout, then print a summary to stderr. Returns the text, and the interrupt that ended it."""
    from outrider.cli.session import streamed

    painter = painter_for(llm) if show else None
    text, started = "", perf_counter()
    last: Chunk | None = None
    interrupt: KeyboardInterrupt | None = None
    try:
        with closing(streamed(llm, prompt, params)) as stream:
            for last in stream:
                text += last.text
                sys.stdout.write(last.text if painter is None else painter.paint(last))
                sys.stdout.flush()
    except KeyboardInterrupt as error:
        interrupt = error
    except OutriderError:  # of the target, which failed in the middle
        if text:
            print(flush=True)
        raise
    try:
        if interrupt is not None:
            err.print("\n[dim]stopped[/]")
        print(flush=True)
        if painter is not None:
            err.print(legend())
        if last is not None:
            _summarize(llm, last, params, perf_counter() - started)
    except KeyboardInterrupt as error:  # the text is complete: chat keeps it
        interrupt = interrupt if isinstance(interrupt, Terminated) else error
    return text, interrupt


def _summarize(llm: LLM, last: Chunk, params: SamplingParams, elapsed: float) -> None:
    """Print the statistics after the text, and what the user could change. ``elapsed``: in seconds."""
    if last.finish_reason == "length" and last.stats.num_tokens < params.max_tokens:
        say(f"the text ends because the context of {llm.runner.max_len} tokens is full: --max-len sets it")
    err.print(summary(last.stats, elapsed), soft_wrap=True)
    if llm.runner.passes.could_compile:
        say("passes were not compiled: --compile always compiles them once for all later runs, which are then faster")


def _document(llm: LLM, prompt: str, params: SamplingParams) -> dict[str, Any]:
    """Return one completion as JSON-ready data; after Ctrl-C a partial one with ``finish_reason`` "abort"."""
    from outrider.engine.outputs import GenerationInterrupted

    with waiting("generating"):
        try:
            outputs = llm.generate(prompt, params)[0].outputs
        except GenerationInterrupted as interrupt:
            outputs = interrupt.generations[0].outputs
            if not outputs:  # interrupted before the first round, such as while compiling
                raise
    completion = outputs[0]
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "origins": completion.origins,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": completion.num_prompt_tokens,
        "drafter": llm.drafter,
        "stats": stats_document(completion.stats),
    }


def stats_document(stats: GenerationStats) -> dict[str, Any]:
    """Return statistics under the names of docs/glossary.md."""
    return {
        "tok_s": stats.tok_s,
        "plain_tok_s": stats.plain_tok_s,
        "num_tokens": stats.num_tokens,
        "num_rounds": stats.num_rounds,
        "num_grammar_tokens": stats.num_grammar_tokens,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": {str(n): stats.acceptance_histogram[n] for n in sorted(stats.acceptance_histogram)},
        "ms": stats.ms_per_round,
        "seconds": asdict(stats.times),
        "cost_ratio": stats.cost_ratio,
        "expected_speedup": stats.expected_speedup,
        "faults": stats.faults,
    }
