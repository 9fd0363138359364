"""``outrider tune``: find the fastest plan for given traffic by successive halving over measured runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from outrider.cli.bench_documents import check_inputs, check_outputs, write_or_say
from outrider.cli.console import say
from outrider.cli.options import (
    ModelOptions,
    SamplingOptions,
    check_counts,
    flag,
    given,
    parse_k,
    parse_list,
    values_given,
    with_groups,
    workload_names,
)
from outrider.engine.options import Speculation
from outrider.engine.plan import Plan, located
from outrider.errors import OutriderError
from outrider.files import is_device
from outrider.hub import id_of_cached
from outrider.method_text import split_method, split_methods, with_drafts
from outrider.options import INT32, SAMPLING, option, whole
from outrider.progress import shown
from outrider.registry import PROPOSERS
from outrider.search.space import SearchSpace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.runner import ModelRunner
    from outrider.sampling_params import SamplingParams
    from outrider.search.choice import Decision
    from outrider.search.search import Search
    from outrider.search.traffic import RecordedPrompt, TrafficRequest

PLAN = "plan.toml"
MAX_TOKENS = 96  # default limit per answer
NUM_PROMPTS, NUM_GROUPS = 16, 4  # Default: 16 prompts, but at least 4 batches, to estimate the noise.
EXAMPLES = """Examples:

outrider tune --traffic requests.jsonl

outrider tune --target ./my-model --draft ./my-draft --traffic requests.jsonl --temperature 0.7 --report tune.html

outrider tune --workloads code --method suffix,draft,eagle:draft=./head --batch 1,4 --out code.toml

outrider tune --traffic requests.jsonl --resume
"""


@dataclass(frozen=True)
class TrafficOptions:
    """Options of the traffic."""

    panel: ClassVar[str] = "The traffic"
    traffic: Path | None = flag("JSONL (.gz) of prompts, or of OpenAI request bodies with their sampling settings.")
    workloads: str | None = flag("Built-in prompts instead: code,edit,json,summary,math,chat,story.")
    num_prompts: int | None = option(
        whole(1),
        None,
        f"Prompts to use, spread over the traffic (default: {NUM_PROMPTS}, or {NUM_GROUPS} times the largest --batch if more).",
    )

    def workload_names(self) -> tuple[str, ...]:
        """Return the built-in workloads; none if the prompts come from a file.

        Raises ``OutriderError`` for an unknown workload, a missing file, and unless exactly one of them is given.
        """
        if (self.traffic is None) == (self.workloads is None):
            mistake = "no traffic" if self.traffic is None else "--traffic and --workloads exclude each other"
            raise OutriderError(f"{mistake}: give either --traffic FILE, or --workloads code,edit,... for built-in prompts")
        check_inputs([self.traffic])
        return workload_names(self.traffic, self.workloads)


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search space."""

    panel: ClassVar[str] = "The search"
    method: str = given(Speculation, "auto,all", several=True, more="all adds every other method.")
    num_draft_tokens: str | None = given(Speculation, several=True, more="auto is always included (default: 1,2,4,8,15).")
    batch: str = flag("Batch sizes that the plan is for.", "1")
    repeat: int = option(whole(1), 3, "Maximum number of runs of the finalists on all prompts.")


@dataclass(frozen=True)
class OutputOptions:
    """Output files."""

    panel: ClassVar[str] = "Output"
    out: Path | None = flag(f"File for the plan, replaced if it exists (default: {PLAN}, which is not replaced).")
    report: Path | None = flag("Write a report as one HTML file, with a name that ends in .html; needs .[report].")
    json: Path | None = flag("File for intermediate results (default: the plan's name with .json).")
    resume: bool = flag("Continue an interrupted search.", False, "--resume")

    @property
    def plan(self) -> Path:
        return self.out or Path(PLAN)

    @property
    def journal(self) -> Path:
        own = Path(PLAN) if is_device(self.plan) else self.plan  # a device has no folder for the journal
        return self.json or own.with_suffix(".json")

    def check(self, traffic: Path | None) -> None:
        """Check output files before measuring. By default a plan is not replaced, and the traffic never.

        Raises ``OutriderError``.
        """
        from outrider.search.journal import is_finished

        if self.out is None and self.plan.exists():
            raise OutriderError(f"{self.plan} already exists: give --out {self.plan} to replace it, or another name")
        is_replaced = self.plan.is_file() and is_finished(self.journal)
        if self.json is None and not self.resume and self.journal.exists() and not is_replaced:
            raise OutriderError(
                f"{self.journal} already exists: give --resume to continue its search, --json {self.journal} to replace it, or"
                " another --out"
            )
        if self.report is not None and self.report.suffix.lower() not in (".html", ".htm"):
            raise OutriderError(f"invalid --report {self.report}: expected a name that ends in .html")
        check_outputs({"--out": self.plan, "--json": self.journal, "--report": self.report}, [traffic], report=self.report)


@dataclass(frozen=True)
class AnswerOptions(SamplingOptions):
    """Sampling settings of the built-in prompts, and of requests that state none."""

    max_tokens: int = option(whole(2, INT32), MAX_TOKENS, "Maximum number of tokens to generate.", panel=SAMPLING)


@with_groups
def command(
    *,
    traffic: TrafficOptions,
    options: SearchOptions,
    output: OutputOptions,
    models: ModelOptions,
    sampling: AnswerOptions,
) -> None:
    """Find the fastest plan for your traffic, plain decoding included, and write it for outrider serve.

    All methods and draft lengths run in turn with plain decoding on a few prompts. The slower half is dropped, and the rest run
    on more prompts, until one is left or the remaining ones are equally fast.
    """
    from outrider.cli.session import fitting, load_plain, named_methods, start

    space, defaults = read_space(options), sampling.params()
    workloads = traffic.workload_names()
    output.check(traffic.traffic)
    start()
    from outrider.search.journal import Journal, exclusive
    from outrider.search.search import Search
    from outrider.search.traffic import encoded

    prompts = read_traffic(traffic, workloads, defaults, max(space.batches))
    with exclusive(output.journal):
        _, methods = named_methods(options.method, models)
        llm = load_plain(models, methods, max_batch=max(*space.batches, 8))
        texts = encoded(llm.tokenizer, prompts, llm.runner.max_len)
        journal = Journal(output.journal, fingerprint(models, options, space, texts, llm.runner), output.resume)
        proposers, reasons = fitting(llm, models, methods, required=split_methods(options.method))
        try:
            with shown() as report:
                search = Search(llm, proposers, texts, space, journal, report, reasons)
                chosen = search.run()
        except KeyboardInterrupt:
            if any(journal.document["found"].values()):
                say(f"intermediate results are in {output.journal}; repeat the command with --resume to continue")
            raise
        except OutriderError:
            found = journal.document["found"]
            if list(found) == ["recorded"] and found["recorded"]:  # written, and of no use to another search
                output.journal.unlink()
            raise
        finish(search, chosen, models, output)


def finish(search: Search, chosen: Decision, models: ModelOptions, output: OutputOptions) -> None:
    """Write plan, document and report to their files and the table to the screen."""
    from rich.console import Console

    from outrider.search import report

    found = report.result(search, chosen, models.target or "embedded")
    search.journal.document["result"] = found
    search.journal.write()
    Plan(plan_values(models, chosen, search), output.plan.parent).write(output.plan, report.notes(found))
    write_or_say(output.report, lambda: report.page(found))
    out = Console(highlight=False)
    if found["candidates"]:
        out.print(report.table(found))
    notes = [f"not chosen: {reason}" for reason in report.not_chosen(found)]
    notes += [f"not available: {method}: {why}" for method, why in found["not_possible"].items()]
    written = [str(path) for path in (output.plan, output.journal, output.report) if path is not None]
    notes += report.oracle(found)
    seconds = ", ".join(f"{name} {each:.0f} s" for name, each in found["seconds"].items())
    for line in (*notes, seconds, report.verdict(found), f"written: {', '.join(written)}"):
        out.print(line, markup=False, soft_wrap=True)


def plan_values(models: ModelOptions, chosen: Decision, search: Search) -> dict[str, Any]:
    """Return the plan's values: the chosen method, and the options of the models."""
    contender, known = chosen.chosen, search.llm.speculation.drafts
    takes_draft = not contender.is_plain and PROPOSERS.get(split_method(contender.method)[0]).takes_draft
    values = values_given(models) | {
        "target": models.target and movable(models.target),
        "draft": movable(models.draft) if takes_draft and models.draft else None,
        "method": with_drafts(contender.method, lambda draft: draft if draft in known else movable(draft)),
        "num_draft_tokens": contender.k,
    }
    return {name: value for name, value in values.items() if value is not None}


def movable(source: str) -> str:
    """Return a model's name in a plan, valid from any directory: a hub id, also of a downloaded file, or an absolute path."""
    return id_of_cached(located(source))


def read_space(options: SearchOptions) -> SearchSpace:
    """Return the search space. Raises ``OutriderError`` for invalid lengths and batch sizes."""
    batches = parse_list("--batch", options.batch, int)
    lengths = (
        SearchSpace.lengths
        if options.num_draft_tokens is None
        else tuple(k for k in parse_list("--num-draft-tokens", options.num_draft_tokens, parse_k) if isinstance(k, int))
    )
    check_counts(batch=min(batches), num_draft_tokens=min(lengths, default=1))
    return SearchSpace(lengths, batches, options.repeat)


def read_traffic(
    traffic: TrafficOptions, workloads: Sequence[str], defaults: SamplingParams, batch: int
) -> list[TrafficRequest]:
    """Read the prompts before a model is loaded, so that errors are reported early. ``workloads``: without a file.

    Raises ``OutriderError`` for fewer than two batches of the largest size, ``batch``: an interval needs two.
    """
    from outrider.search.traffic import read_builtin, read_file

    most = traffic.num_prompts or max(NUM_PROMPTS, NUM_GROUPS * batch)
    if traffic.traffic is not None:
        found = read_file(traffic.traffic, most, defaults)
    else:
        found = read_builtin(workloads, most, defaults)
    if len(found) < 2 * batch:
        raise OutriderError(
            f"--batch {batch} needs at least {2 * batch} prompts (two batches), got {len(found)}: raise --num-prompts or lower"
            " --batch"
        )
    return found


def fingerprint(
    models: ModelOptions, options: SearchOptions, space: SearchSpace, texts: Sequence[RecordedPrompt], runner: ModelRunner
) -> dict[str, Any]:
    """Return all inputs that the results depend on."""
    from outrider.bench.provenance import digest, same_program

    return {
        "models": asdict(models),
        "methods": options.method,
        "k": list(space.lengths),
        "batch": list(space.batches),
        "repeat": space.repeat,
        "traffic": digest([text.prompt for text in texts]),
        "sampling_settings": digest([text.params for text in texts]),
        **same_program(runner),
    }
