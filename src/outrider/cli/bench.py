"""``outrider bench``: compare methods, draft lengths and workloads with plain decoding in the same run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from outrider.cli import bench_documents, bench_serve
from outrider.cli.bench_documents import check_inputs, check_outputs, keeping, write_or_say
from outrider.cli.console import err, say, waiting
from outrider.cli.options import (
    INFLATABLE,
    MethodOptions,
    ModelOptions,
    check_counts,
    flag,
    given,
    parse_k,
    parse_list,
    read_option,
    with_groups,
    workload_names,
)
from outrider.engine.options import Speculation
from outrider.errors import OutriderError, errors_as
from outrider.method_text import split_methods
from outrider.options import INT32, option, whole
from outrider.progress import shown
from outrider.registry import AUTO, DEFAULT_METHOD
from outrider.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bench.contenders import Contender, Contenders
    from outrider.bench.grid import GridPlan, Group
    from outrider.bench.workloads import Prompt
    from outrider.engine.llm import LLM

MAX_BUSY = 1024
NUM_PROMPTS = 4  # Default, raised to the largest batch.
EXAMPLES = """Examples:

outrider bench

outrider bench --method draft,ngram -k 2,4,8,auto --temperature 0,0.8 --workloads code,edit

outrider bench --inflate 1b --method draft -k 5 --prompts HumanEval.jsonl.gz --num-prompts 10 --out results/1b.json

outrider bench --target ./my-model --draft ./my-draft --batch 1,4,8 --repeat 5 --out new.json --html new.html

outrider bench compare old.json new.json

outrider bench serve --concurrency 1,4,16 --out load.json
"""
COMMANDS = {**bench_documents.COMMANDS, "serve": bench_serve.command}


@dataclass(frozen=True)
class GridOptions:
    """Axes of the measurement; values are separated by commas."""

    panel: ClassVar[str] = "Measurement"
    method: str | None = given(Speculation, several=True, more="(default: auto and suffix).")
    num_draft_tokens: str = given(Speculation, "4,auto", several=True)
    temperature: str = given(SamplingParams, "0", several=True)
    batch: str = flag("Batch sizes.", "1")
    workloads: str | None = flag("Built-in prompts: code,edit,json,summary,math,chat,story (default: all).")
    prompts: Path | None = flag(
        "HumanEval, GSM8K, MATH-500, MBPP, MT-bench, Spec-Bench, SPEED-Bench or your own, as JSONL (.gz)."
    )
    num_prompts: int | None = option(
        whole(1), None, f"Prompts per workload (default: {NUM_PROMPTS}, or the largest --batch if larger)."
    )
    max_tokens: int = option(whole(2, INT32), 64, "Tokens per prompt.")
    repeat: int = option(whole(1), 3, "Repeats; medians are shown.")
    seed: int = option(whole(), 0, "Sampling seed; repeat r uses seed + r.")
    busy: str = flag("Number of other busy processes during the measurement.", "0")
    inflate: str | None = flag(f"Measure the same function at the cost of a larger model, such as 350m, 1b or 8b; {INFLATABLE}")


@dataclass(frozen=True)
class OutputOptions:
    """Output files."""

    panel: ClassVar[str] = "Output"
    out: Path | None = flag("Also write the JSON document to this file.")
    html: Path | None = flag("Write a report with plots as one HTML file.")


@with_groups
def command(
    *,
    context: typer.Context,
    grid: GridOptions,
    outputs: OutputOptions,
    models: ModelOptions,
) -> None:
    """Measure methods x draft lengths, each in turn with plain decoding; the last line printed is one JSON document."""
    if context.invoked_subcommand is not None:
        return
    from outrider.cli.session import check_lengths, inflatable, inflate_with_heads, load_plain, resolve, start

    check_outputs({"--out": outputs.out, "--html": outputs.html}, [grid.prompts], report=outputs.html)
    temperatures = parse_list("--temperature", grid.temperature, float)
    batches = parse_list("--batch", grid.batch, int)
    busy = parse_list("--busy", grid.busy, int)
    check_axes(temperatures, batches, busy, (grid.seed, grid.seed + grid.repeat - 1))
    lengths = parse_list("--num-draft-tokens", grid.num_draft_tokens, parse_k)
    workloads = workload_names(grid.prompts, grid.workloads)
    check_inputs([grid.prompts])
    if grid.inflate is not None:
        inflatable(models)
    start()
    from outrider.bench.contenders import Contenders
    from outrider.bench.grid import GridPlan, run_grid
    from outrider.bench.workloads import encode_all

    arguments = resolve(models, MethodOptions())
    prompts = read_workloads(grid, workloads, batches)
    chosen = parse_contenders(grid.method, lengths, models)
    methods = [contender.method for contender in chosen]
    models, drafts, extra = inflate_with_heads(models, methods, arguments, grid.inflate)
    arguments |= drafts
    width = max([contender.k for contender in chosen if isinstance(contender.k, int)], default=0)
    llm = load_plain(models, methods, max_batch=max(batches), num_draft_tokens=width, drafts=arguments["drafts"])
    encoded = {name: encode_all(llm.tokenizer, group) for name, group in prompts.items()}
    for workload, token_ids in encoded.items():
        check_lengths(token_ids, llm, grid.max_tokens, f"--max-tokens {grid.max_tokens}", f" of {workload!r}")
    name = Path(models.target).name if models.target and grid.inflate else models.target or "embedded"  # no cache path
    extra |= {"same_text_mode": models.same_text, "verifier": llm.speculation.verifier, "name": name}
    contenders = Contenders(llm, arguments.get("draft"))
    chosen = prepare(contenders, chosen)
    plan = GridPlan(chosen, encoded, temperatures, batches, grid.max_tokens, grid.repeat, grid.seed, busy=busy)
    groups: list[Group] = []
    with keeping(lambda: finish(plan, groups, llm, extra | {"interrupted": True}, outputs)), shown() as report:
        for group in run_grid(contenders, plan, report):
            groups.append(group)
    finish(plan, groups, llm, extra, outputs)


def prepare(contenders: Contenders, chosen: Sequence[Contender]) -> tuple[Contender, ...]:
    """Load every method before any is warmed up. Return the distinct contenders, with K up to the maximum of each method.

    Raises ``OutriderError`` for a method that does not fit the target.
    """
    found = []
    with waiting("preparing the methods"):
        for contender in chosen:
            with errors_as(contender.method, OutriderError, detail=str):
                found.append(contenders.prepare(contender))
    for contender, possible in zip(chosen, found, strict=True):
        if possible != contender:
            say(f"{contender.label} is reduced to k={possible.k}, the maximum of the method")
    return tuple(dict.fromkeys(found))


def finish(plan: GridPlan, groups: Sequence[Group], llm: LLM, extra: dict[str, Any], outputs: OutputOptions) -> None:
    """Write the document to its file, the tables to stderr, the document to stdout on one line, and the report.

    Does nothing without measurements.
    """
    from rich.text import Text

    from outrider.bench.cells import document
    from outrider.bench.documents import loop_warnings
    from outrider.bench.html import page
    from outrider.bench.tables import tables

    if not groups:
        return
    result = document(plan, groups, llm.runner, extra.pop("name"), extra)
    write_or_say(outputs.out, lambda: json.dumps(result, indent=1) + "\n", "; the document follows on standard output")
    for table in tables(result):
        err.print(table)
    for warning in loop_warnings(result["cells"]):
        err.print(Text.assemble(("warning:", "yellow"), " ", warning), soft_wrap=True)
    print(json.dumps(result), flush=True)
    write_or_say(outputs.html, lambda: page(result))


def parse_contenders(text: str | None, lengths: Sequence[int | str], models: ModelOptions) -> tuple[Contender, ...]:
    """Return methods x draft lengths, without plain decoding, which always runs.

    Raises ``OutriderError`` for a method that lacks its draft.
    """
    from outrider.bench.contenders import Contender
    from outrider.cli.session import auto_method, check_methods, declared_drafts
    from outrider.engine.methods import methods_in

    text = f"{AUTO},{DEFAULT_METHOD}" if text is None else text
    check_methods(split_methods(text), models, declared_drafts(models))
    methods = methods_in(text, lambda: auto_method(models))
    found = (Contender(method, k) for method in methods for k in lengths)
    return tuple(contender for contender in found if not contender.is_plain)


def read_workloads(grid: GridOptions, names: Sequence[str], batches: Sequence[int]) -> dict[str, list[Prompt]]:
    """Return workload -> prompts. They are read before a model is loaded, so that errors are reported early.

    Only whole batches run. Raises ``OutriderError`` for a workload without one of the largest size.
    """
    from outrider.bench import workloads

    batch = max(batches)
    found = workloads.grouped(grid.prompts, names, grid.num_prompts or max(NUM_PROMPTS, batch))
    for name, group in found.items():
        if len(group) < batch:
            raise OutriderError(
                f"--batch {batch} needs at least {batch} prompts per workload, got {len(group)} of {name!r}: raise"
                " --num-prompts or lower --batch"
            )
        for size in batches:
            if left := len(group) % size:
                say(f"batch {size}: the last {left} of {len(group)} prompts of {name!r} are left out: they do not fill a batch")
    return found


def check_axes(temperatures: Sequence[float], batches: Sequence[int], busy: Sequence[int], seeds: Sequence[int]) -> None:
    """Check ranges before a model is loaded or inflated."""
    for name, values in {"temperature": temperatures, "seed": seeds}.items():
        for value in values:
            read_option(SamplingParams, name, value)
    check_counts(batch=min(batches))
    if min(busy) < 0 or max(busy) > MAX_BUSY:
        shown = ",".join(map(str, busy))
        raise OutriderError(f"invalid --busy {shown}: expected numbers of processes from 0 to {MAX_BUSY}")
