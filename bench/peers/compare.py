"""Compare Outrider with its peers, alternating in one run: `python bench/peers/compare.py --help`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from client import Job
from engines import ENGINES, HERE, OURS
from prompts import BadInput, read_config, read_prompts
from protocol import DTYPES, METHODS
from report import table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rounds import Contestant, Screen, alternate, cell

from outrider.bench.provenance import origin

EXAMPLES = """Examples:

  compare.py --target family/target --draft family/draft --prompts HumanEval.jsonl.gz

  compare.py --target big --draft small --prompts repeat.jsonl --methods ngram --peers openvino --out results/x.json
"""


@dataclass(frozen=True)
class Plan:
    """What is compared, checked."""

    engines: list[str]
    methods: list[str]
    ks: list[int]
    dtypes: dict[str, str]
    prompts: list[list[int]]
    screen_prompts: int
    repeat: int
    rate: str


def main(  # noqa: PLR0913 - one argument per command line option
    target: Annotated[Path, typer.Option(help="Target model folder.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines (.gz too) with token_ids, prompt, text, question or turns.")],
    draft: Annotated[Path | None, typer.Option(help="Draft model folder.")] = None,
    peers: Annotated[str, typer.Option(help="Comma-separated.")] = "transformers,vllm,openvino",
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = "plain,draft,ngram",
    k: Annotated[str, typer.Option(help="Draft lengths to screen, comma-separated.")] = "1,2,3,5,8,12",
    dtypes: Annotated[str, typer.Option(help="Fix number formats, as in vllm=float32,openvino=float16.")] = "",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts per round.")] = 8,
    screen_prompts: Annotated[int, typer.Option(min=1, help="Prompts per screened setting.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per prompt; every engine emits exactly these.")] = 64,
    max_len: Annotated[int, typer.Option(help="Context length to reserve; 0 takes what the prompts need.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    repeat: Annotated[int, typer.Option(min=1, help="Alternating rounds.")] = 5,
    rate: Annotated[str, typer.Option(help="What picks the best setting: total or decode.")] = "total",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of every engine.")] = os.cpu_count() or 1,
    seed: Annotated[int, typer.Option(help="Of sampling; round i uses seed + i.")] = 0,
    ours: Annotated[bool, typer.Option(help="Include Outrider itself.")] = True,
    venvs: Annotated[Path, typer.Option(help="Where install.py put the environments.")] = HERE / ".venvs",
    cache_dir: Annotated[Path, typer.Option(help="Converted models and workers' logs.")] = HERE / ".cache",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds one answer may take.")] = 1800.0,
    out: Annotated[Path | None, typer.Option(help="Write the JSON document here too.")] = None,
) -> None:
    """Measure Outrider against its peers: screen each one's settings, then alternate the best ones."""
    try:
        names = [OURS] * ours + _choices(peers, set(ENGINES) - {OURS}, "peer")
        ks = _draft_lengths(k)
        longest = _context(target, draft, methods)
        read = read_prompts(prompts, target, num_prompts, (max_len or longest) - max_tokens - max(ks) - 1)
        plan = Plan(
            engines=names,
            methods=_choices(methods, set(METHODS), "method"),
            ks=ks,
            dtypes=_fixed_dtypes(dtypes),
            prompts=read,
            screen_prompts=screen_prompts,
            repeat=repeat,
            rate={"total": "tok_s", "decode": "decode_tok_s"}[rate],
        )
        if "draft" in plan.methods and draft is None:
            raise BadInput("method draft needs --draft")
        if out is not None and not out.parent.is_dir():
            raise BadInput(f"{out.parent}: no such folder")
    except KeyError:
        _fail(f"--rate {rate}: give total or decode")
    except (BadInput, ValueError) as error:
        _fail(str(error))
    needed = max(len(prompt) for prompt in read) + max_tokens + max(ks) + 1
    job = Job(target, draft, venvs, cache_dir, threads, max_len or needed, max_tokens, temperature, seed, timeout)
    document = _run(plan, job, out)
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=120)).print(table(document["cells"]))
    print(json.dumps(document))


def _run(plan: Plan, job: Job, out: Path | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        **origin(),
        "loadavg_at_start": round(os.getloadavg()[0], 2),
        "target": _describe(job.target),
        "draft": _describe(job.draft) if job.draft else None,
        "threads": job.threads,
        "temperature": job.temperature,
        "max_tokens": job.max_tokens,
        "num_prompts": len(plan.prompts),
        "prompt_tokens": [len(prompt) for prompt in plan.prompts],
        "repeat": plan.repeat,
        "best_by": plan.rate,
        "cells": [],
    }
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        for method in plan.methods:
            document["cells"] += _run_method(method, plan, job, bar)
            if out is not None:
                out.write_text(json.dumps(document, indent=1) + "\n")
    return document


def _run_method(method: str, plan: Plan, job: Job, bar: Progress) -> list[dict[str, Any]]:
    screen = Screen(job, plan.prompts[: plan.screen_prompts], plan.ks, plan.dtypes, plan.rate)
    task = bar.add_task(method, total=None)

    def progress(what: str) -> None:
        bar.update(task, advance=1, description=what)

    contestants = [screen.best(ENGINES[name], method, progress) for name in plan.engines]
    for contestant in contestants:
        if contestant.error:
            bar.console.print(f"[yellow]left out:[/yellow] {contestant.error}", highlight=False)
    steps = sum(contestant.error is None for contestant in contestants) * (plan.repeat + 1)
    bar.reset(task, total=steps, description=method)
    alternate(contestants, job, plan.prompts, plan.repeat, progress)
    bar.update(task, description=f"{method}: done", completed=steps)
    return [cell(contestant, _reference(contestants)) for contestant in contestants]


def _reference(contestants: list[Contestant]) -> Contestant | None:
    """Ours where it ran, else the first engine that did."""
    return next((contestant for contestant in contestants if contestant.rounds), None)


def _choices(text: str, known: set[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise BadInput(f"unknown {what} {name!r}; known: {', '.join(sorted(known))}")
    return names


def _draft_lengths(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise BadInput(f"--k {text}: give positive whole numbers, comma-separated")
    return sorted({int(word) for word in words})


def _fixed_dtypes(text: str) -> dict[str, str]:
    fixed: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        engine, _, dtype = pair.partition("=")
        if engine not in ENGINES or dtype not in DTYPES:
            raise BadInput(f"--dtypes {pair}: give engine=dtype with a dtype of {', '.join(DTYPES)}")
        fixed[engine] = dtype
    return fixed


def _context(target: Path, draft: Path | None, methods: str) -> int:
    """The longest context that every model of the comparison takes."""
    models = [target] + ([draft] if draft is not None and "draft" in methods else [])
    return min(int(read_config(model).get("max_position_embeddings", 1 << 20)) for model in models)


def _describe(model: Path) -> dict[str, Any]:
    config = read_config(model)
    keys = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    return {"name": model.resolve().name, **{key: config.get(key) for key in keys}}


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(2)


if __name__ == "__main__":
    main.__doc__ = f"{main.__doc__}\n\n{EXAMPLES}"
    typer.run(main)
