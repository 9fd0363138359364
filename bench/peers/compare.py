"""Compare Outrider with its peers, alternating in one run: `python bench/peers/compare.py --help`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from bandwidth import add_shares, bandwidth, weights_read
from client import Job
from engines import BITS, ENGINES, HERE, OURS
from prompts import BadInput, read_prompts, windows
from protocol import DTYPES, METHODS
from report import tables
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rounds import Group, Screen, Workers, alternate, cell, compare_texts, deal, digest

from outrider import OutriderError
from outrider.bench.grid import busy_processes
from outrider.bench.provenance import origin
from outrider.files import write_whole
from outrider.runner.gguf import GgufFile
from outrider.runner.loading import load_config

EXAMPLES = """Examples:

  compare.py --target family/target --draft family/draft --prompts HumanEval.jsonl.gz

  compare.py --target big --draft small --prompts HumanEval.jsonl.gz --bits 16,8,4 --peers openvino,llamacpp

  compare.py --target big --prompts HumanEval.jsonl.gz --bits 16,8,4 --peers openvino,llamacpp --first-token 128,512
"""
RATES = {"total": "tok_s", "decode": "decode_tok_s"}
LONG_PROMPT = 1000  # tokens; longer prompts are measured in one round, because each takes seconds


@dataclass(frozen=True)
class Plan:
    """Validated settings of a comparison."""

    engines: list[str]
    groups: list[Group]
    ks: list[int]
    dtypes: dict[str, str]
    prompts: dict[int | None, list[list[int]]]  # by the group's prompt length
    per_round: int
    screen_prompts: int
    repeat: int
    rate: str
    busy: int = 0  # number of other busy processes

    def rounds(self, group: Group) -> list[list[int]]:
        """Return the prompt indices of each round."""
        if group.prompt_tokens is None:
            return deal(len(self.prompts[None]), self.per_round, self.repeat)
        return [[number] for number in range(1 if group.prompt_tokens > LONG_PROMPT else self.repeat)]


def main(  # noqa: PLR0913 - one argument per command line option
    target: Annotated[Path, typer.Option(help="Target model folder or GGUF file.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines (.gz too) with token_ids, prompt, text, question or turns.")],
    draft: Annotated[Path | None, typer.Option(help="Draft model folder or GGUF file.")] = None,
    peers: Annotated[str, typer.Option(help="Comma-separated.")] = "transformers,vllm,openvino",
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = "plain,draft,ngram",
    k: Annotated[str, typer.Option(help="Draft lengths to try, comma-separated.")] = "1,2,3,5,8,12",
    dtypes: Annotated[str, typer.Option(help="Fix number formats, as in vllm=float32,openvino=float16.")] = "",
    bits: Annotated[str, typer.Option(help="Compare at these bits per weight (16,8,4) instead of screening formats.")] = "",
    first_token: Annotated[str, typer.Option(help="Measure first-token times at these prompt lengths instead.")] = "",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts.")] = 8,
    prompts_per_round: Annotated[int, typer.Option(min=0, help="Prompts per round, in order; 0: all.")] = 0,
    screen_prompts: Annotated[int, typer.Option(min=1, help="Prompts per screened setting.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per prompt; every engine emits exactly this number.")] = 64,
    max_len: Annotated[int, typer.Option(help="Context length to reserve; 0: as long as the prompts need.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    repeat: Annotated[int, typer.Option(min=1, help="Alternating rounds.")] = 5,
    rate: Annotated[str, typer.Option(help="Rate that selects the best setting: total or decode.")] = "total",
    busy: Annotated[int, typer.Option(min=0, help="Other processes that compute during the measurement.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of every engine.")] = os.cpu_count() or 1,
    seed: Annotated[int, typer.Option(help="Sampling seed; round i uses seed + i.")] = 0,
    ours: Annotated[bool, typer.Option(help="Include Outrider itself.")] = True,
    venvs: Annotated[Path, typer.Option(help="Folder of the environments made by install.py.")] = HERE / ".venvs",
    cache_dir: Annotated[Path, typer.Option(help="Converted models and workers' logs.")] = HERE / ".cache",
    timeout: Annotated[float, typer.Option(min=1, help="Time limit of one answer, seconds.")] = 1800.0,
    out: Annotated[Path | None, typer.Option(help="Write the JSON document here too, after every group.")] = None,
    resume: Annotated[bool, typer.Option(help="Keep the cells of --out without an error.")] = False,
) -> None:
    """Measure Outrider against its peers: screen the settings of each engine, then alternate the best ones."""
    try:
        if rate not in RATES:
            raise BadInput(f"invalid --rate {rate}: expected total or decode")
        names = [OURS] * ours + _choices(peers, set(ENGINES) - {OURS}, "peer")
        lengths = _numbers("--first-token", first_token)
        max_tokens = 1 if lengths else max_tokens
        ks = sorted(_numbers("--k", k))
        groups = _groups(_choices(methods, set(METHODS), "method"), _bits(bits, target, draft), lengths)
        if "draft" in {group.method for group in groups} and draft is None:
            raise BadInput("method draft needs --draft")
        if not ks:
            raise BadInput("empty --k: expected at least one draft length")
        limit = max_len or _context(target, draft, [group.method for group in groups])
        read = _prompts(prompts, target, num_prompts, limit - max_tokens - max(ks) - 1, lengths, repeat)
        plan = Plan(
            engines=names,
            groups=groups,
            ks=ks,
            dtypes=_fixed_dtypes(dtypes),
            prompts=read,
            per_round=min(prompts_per_round, len(read.get(None, []))) or len(read.get(None, [])),
            screen_prompts=screen_prompts,
            repeat=repeat,
            rate=RATES[rate],
            busy=busy,
        )
        if out is not None and not out.parent.is_dir():
            raise BadInput(f"{out.parent}: no such folder")
        if resume and out is None:
            raise BadInput("--resume needs --out")
    except (BadInput, OutriderError, ValueError) as error:
        _fail(str(error))
    needed = max(len(prompt) for group in read.values() for prompt in group) + max_tokens + max(ks) + 1
    job = Job(target, draft, venvs, cache_dir, threads, max_len or needed, max_tokens, temperature, seed, timeout)
    document = _document(plan, job)
    if resume and out is not None and out.exists():
        _resume(document, out)
    _run(plan, job, document, out)
    terminal = Console()
    shown = terminal if terminal.is_terminal else Console(width=130)
    for view in tables(document):
        shown.print(view)
    print(json.dumps(document))


def _document(plan: Plan, job: Job) -> dict[str, Any]:
    """Return the conditions of the measurement."""
    return {
        **origin(),
        "loadavg_at_start": round(os.getloadavg()[0], 2),
        "target": _describe(job.target),
        "draft": _describe(job.draft) if job.draft else None,
        "parameters_read": weights_read(job.target) if job.target.is_dir() else None,
        "threads": job.threads,
        "temperature": job.temperature,
        "max_tokens": job.max_tokens,
        "num_prompts": len(plan.prompts.get(None, [])),
        "prompt_tokens": [len(prompt) for prompt in plan.prompts.get(None, [])],
        "prompts": digest([token for group in plan.prompts.values() for prompt in group for token in prompt]),
        "prompts_per_round": plan.per_round,
        "repeat": plan.repeat,
        "best_by": plan.rate,
        "busy": plan.busy,
        "bandwidth": [],
        "cells": [],
    }


SAME_ON_RESUME = (
    *("commit", "cpu", "threads", "target", "draft"),
    *("temperature", "max_tokens", "prompts", "prompts_per_round", "repeat", "best_by", "busy"),
)


def _resume(document: dict[str, Any], out: Path) -> None:
    try:
        before = json.loads(out.read_text())
        document["cells"] = kept_cells(before, document)
        document["bandwidth"] = before["bandwidth"]
    except (BadInput, json.JSONDecodeError) as error:
        _fail(f"{out}: {error}")


def kept_cells(before: Any, now: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of an earlier result that need not be measured again.

    Raises ``BadInput`` if it was measured under other conditions.
    """
    if not isinstance(before, dict) or "bandwidth" not in before:
        raise BadInput("cannot resume: --out is not a result of this script")
    for name in SAME_ON_RESUME:
        if before.get(name) != now.get(name):
            raise BadInput(f"cannot resume: {name} was {before.get(name)!r} and is now {now.get(name)!r}")
    return [cell for cell in before.get("cells", []) if not cell["error"]]


def _run(plan: Plan, job: Job, document: dict[str, Any], out: Path | None) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    workers = Workers(job)
    with Progress(*columns, console=Console(stderr=True)) as bar:
        try:
            previous = None
            for group in plan.groups:
                if previous is not None and (previous.method, previous.bits) != (group.method, group.bits):
                    workers.close()  # so that peak memory is of one method
                previous = group
                _run_group(group, plan, workers, document, bar)
                if out is not None:
                    write_whole(out, json.dumps(document, indent=1) + "\n")
        finally:
            workers.close()


def _run_group(group: Group, plan: Plan, workers: Workers, document: dict[str, Any], bar: Progress) -> None:
    """Measure a group unless it is complete. Ratios are of alternating runs, so a group is measured as a whole."""
    offered = [name for name in plan.engines if ENGINES[name].formats(group.bits)]
    known = [each for each in document["cells"] if Group(each["method"], each["bits"], each["prompt_tokens"]) == group]
    if {each["engine"] for each in known} >= set(offered):
        return
    document["cells"] = [each for each in document["cells"] if each not in known]
    task, start = bar.add_task(group.label, total=None), bar.get_time()

    def progress(what: str) -> None:
        bar.update(task, advance=1, description=what)
        if not bar.console.is_terminal:  # logs do not show progress bars
            bar.console.print(f"{bar.get_time() - start:.0f} s: {group.label}: {what}", highlight=False)

    progress("memory bandwidth")
    document["bandwidth"].append({name: round(value, 2) for name, value in bandwidth(workers.job.threads).items()})
    prompts = plan.prompts[group.prompt_tokens]
    screen = Screen(workers, prompts[: plan.screen_prompts], plan.ks, plan.dtypes, plan.rate)
    rounds = plan.rounds(group)
    with busy_processes(plan.busy):
        contestants = [screen.best(ENGINES[name], group, progress) for name in offered]
        steps = sum(contestant.error is None for contestant in contestants) * (len(rounds) + 1)
        bar.reset(task, total=steps, description=group.label)
        alternate(contestants, workers, prompts, rounds, progress)
    for contestant in contestants:
        if contestant.error:
            bar.console.print(f"[yellow]left out:[/yellow] {escape(contestant.error)}", highlight=False)
    bar.update(task, description=f"{group.label}: done", completed=steps)
    reference = next((contestant for contestant in contestants if contestant.spec.name == OURS and contestant.rounds), None)
    document["cells"] += [cell(contestant, reference, group) for contestant in contestants]
    compare_texts(document["cells"])
    add_shares(document["cells"], document["parameters_read"], document["bandwidth"])


def _groups(methods: list[str], bits: list[int] | list[str], lengths: list[int]) -> list[Group]:
    if lengths and not bits:
        raise BadInput("--first-token needs --bits")
    if lengths:
        return [Group("plain", each, length) for each in bits for length in lengths]
    return [Group(method, each) for each in bits or [None] for method in methods]


def _prompts(
    path: Path, target: Path, count: int, longest: int, lengths: list[int], repeat: int
) -> dict[int | None, list[list[int]]]:
    """Return prompts by the length that their group needs; None: unchanged."""
    if not lengths:
        return {None: read_prompts(path, target, count, longest)}
    if max(lengths) > longest:
        raise BadInput(f"--first-token {max(lengths)}: the target's context allows at most {longest} prompt tokens")
    stream = [token for prompt in read_prompts(path, target, 1 << 20, 1 << 20) for token in prompt]
    return {length: windows(stream, length, repeat) for length in lengths}


def _choices(text: str, known: set[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise BadInput(f"unknown {what} {name!r}; known: {', '.join(sorted(known))}")
    return names


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise BadInput(f"invalid {option} {text}: expected positive integers, comma-separated")
    return list(dict.fromkeys(int(word) for word in words))


def _bits(text: str, target: Path, draft: Path | None) -> list[int] | list[str]:
    """Return the bits per weight to compare at; of a GGUF file its type, such as Q4_K_M."""
    bits = _numbers("--bits", text)
    if len({model.suffix == ".gguf" for model in (target, draft) if model}) > 1:
        raise BadInput("expected model folders or GGUF files for both --target and --draft")
    if target.suffix == ".gguf":
        if bits:
            raise BadInput("--bits needs model folders: weights of GGUF files are compared as they are")
        return [_file_type(target)]
    for value in bits:
        if value not in BITS:
            raise BadInput(f"invalid --bits {value}: expected some of {', '.join(map(str, BITS))}")
    return bits


def _file_type(model: Path) -> str:
    number = GgufFile.open(model).entry("general.file_type")
    from gguf import LlamaFileType  # an optional dependency, which opening the file requires

    return "GGUF" if number is None else LlamaFileType(number).name.removeprefix("MOSTLY_")


def _fixed_dtypes(text: str) -> dict[str, str]:
    fixed: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        engine, _, dtype = pair.partition("=")
        if engine not in ENGINES or dtype not in DTYPES:
            raise BadInput(f"invalid --dtypes {pair}: expected engine=dtype with a dtype of {', '.join(DTYPES)}")
        fixed[engine] = dtype
    return fixed


def _context(target: Path, draft: Path | None, methods: list[str]) -> int:
    """Return the longest context that every model of the comparison supports."""
    models = [target] + ([draft] if draft is not None and "draft" in methods else [])
    return min(int(getattr(load_config(model), "max_position_embeddings", 1 << 20)) for model in models)


def _describe(model: Path) -> dict[str, Any]:
    config = load_config(model)
    keys = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    return {"name": model.resolve().name, **{key: getattr(config, key, None) for key in keys}}


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(2)


if __name__ == "__main__":
    main.__doc__ = f"{main.__doc__}\n\n{EXAMPLES}"
    typer.run(main)
