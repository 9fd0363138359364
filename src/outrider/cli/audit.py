"""``outrider audit``: certify that the running system is statistically indistinguishable from plain decoding."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from outrider.cli.app import EXIT_CHECK_FAILED
from outrider.cli.bench_documents import check_inputs, check_outputs, keeping, write_or_say
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
)
from outrider.engine.options import Speculation
from outrider.errors import OutriderError
from outrider.options import number, option, whole
from outrider.progress import Report, shown
from outrider.registry import AUTO
from outrider.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from outrider.audit.run import Audited
    from outrider.audit.same_text import Grid
    from outrider.audit.sampling import AuditSettings
    from outrider.engine.llm import LLM


EXAMPLES = """Examples:

outrider audit

outrider audit --method draft,suffix,medusa:draft=./heads --temperature 0.8 --top-p 0.95 --out audit.json --html audit.html

outrider audit --target ./my-model --draft ./my-draft --prompts mine.jsonl

outrider audit --same-text --method all -k 1,3,5,8 --batch 1,4 --prompts HumanEval.jsonl.gz --out same-text.json
"""
MAX_BATCH = 256  # sequences per batch by default
TEMPERATURE, COUPLED_TEMPERATURE = 1.0, 0.8  # defaults; the second with --same-text
UNUSED_SETTINGS = ("max_tokens", "logit_bias")  # the first is reported separately, the second has no option
MEMORY = 1 << 30  # bytes of KV cache for the sequences of a batch
PROMPTS = (  # short, and each repeats a phrase, so that text-based methods draft too
    "one two three, one two three, one two",
    "def area(w, h):\n    return w * h\n\ndef area(",
    "The rain fell on the roof, and the rain fell on the",
    '{"id": 1, "name": "Ann"}, {"id": 2, "name": "',
    "for i in range(5):\n    print(i)\nfor i in range(",
    "She opened the door. He opened the door. They opened the",
)


@dataclass(frozen=True)
class AuditOptions:
    """Methods, prompts and error probabilities of an audit."""

    panel: ClassVar[str] = "Audit"
    method: str | None = given(Speculation, several=True, more="all adds every other method.")
    num_draft_tokens: str | None = given(
        Speculation, several=True, more="Fixed numbers only (default: 4; with --same-text: 1,3,5,8)."
    )
    batch: str | None = flag("Batch size (default: as fits into 1 GiB of cache, at most 256; with --same-text: 1,4).")
    prompts: list[Path] | None = flag("JSONL file (or .gz) of prompts instead of the built-in ones; repeatable.")
    num_prompts: int | None = option(whole(1), None, "Prompts per file (default: 6; with --same-text: all).")
    power: float = option(number(0.5, 0.9999), 0.99, "Probability of detecting a deviation of --tv.")
    tv: float = option(number(0.002, 0.5), 0.05, "Total variation distance to detect.")
    alpha: float = option(number(1e-9, 0.2), 0.01, "Probability of any false alarm in the audit.")
    max_samples: int = option(whole(1), 100_000, "Refuse audits that need more samples for a part of a method's tests.")


@dataclass(frozen=True)
class OutputOptions:
    """Output files."""

    panel: ClassVar[str] = "Output"
    out: Path | None = flag("Write the JSON document to this file.")
    html: Path | None = flag("Write a self-contained HTML page.")
    resume: bool = flag("With --same-text: continue the run stored in --out.", False, "--resume")


@dataclass(frozen=True)
class SampleOptions(SamplingOptions):
    """Sampling settings of an audit."""

    defaults: ClassVar[dict[str, Any]] = {"max_tokens": 64, "seed": 0}
    temperature: float | None = given(
        SamplingParams, more=f"(default: {TEMPERATURE:g}; with --same-text: {COUPLED_TEMPERATURE})."
    )
    # Hidden: an audit has no stop conditions.
    stop: list[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None


@with_groups
def command(*, options: AuditOptions, output: OutputOptions, models: ModelOptions, sampling: SampleOptions) -> int:
    """Certify that output is statistically indistinguishable from plain decoding's; exit code 0 if so, else 3.

    Deliberately wrong verifiers run in the same way and must be caught, otherwise the certificate is void. --same-text tests
    that every method, draft length and batch size emits the same tokens.
    """
    from outrider.cli.session import fitting, load_plain, named_methods, start

    check_outputs({"--out": output.out, "--html": output.html}, options.prompts or [])
    lengths = parse_list(
        "--num-draft-tokens", options.num_draft_tokens or ("1,3,5,8" if models.same_text else "4"), _parse_length
    )
    batches = parse_list("--batch", options.batch or ("1,4" if models.same_text else str(MAX_BATCH)), int)
    check_counts(batch=min(batches))
    if not models.same_text and (len(lengths) > 1 or len(batches) > 1 or output.resume):
        raise OutriderError("--resume, and several values of --num-draft-tokens or --batch, require --same-text")
    temperature = COUPLED_TEMPERATURE if models.same_text else TEMPERATURE
    params = sampling.params(temperature=temperature)
    check_inputs(options.prompts or [])
    start()
    texts = read_prompts(options, models.same_text)
    named, methods = named_methods(AUTO if options.method is None else options.method, models)
    llm = load_plain(models, methods, max_batch=max(batches))
    prompts = encode_prompts(llm, texts, params.max_tokens, max(lengths))
    proposers, reasons = fitting(llm, models, methods, required=named)

    from outrider.audit.run import Audited
    from outrider.audit.same_text import Grid
    from outrider.audit.sampling import AuditSettings

    given_models = {name: value for name, value in asdict(models).items() if value is not None}
    audited = Audited(llm, proposers, reasons, given_models, settings_of(params))
    if models.same_text:
        most = {name: proposer.max_drafts for name, proposer in proposers.items()}
        grid = Grid(most, lengths, batches, tuple(sorted({0.0, params.temperature})), prompts, params)
        return write_grid(audited, grid, output)
    if options.batch is None:
        batches = (min(MAX_BATCH, texts_in_memory(llm, max(map(len, prompts)) + params.max_tokens)),)
    seed, errors = params.seed or 0, (options.alpha, options.power, options.tv)
    settings = AuditSettings(prompts, params, lengths[0], *errors, seed, options.max_samples)
    return write_certificates(audited, settings, batches[0], output)


def write_certificates(audited: Audited, settings: AuditSettings, batch: int, output: OutputOptions) -> int:
    """Write one certificate per method; finished ones are written even if the rest is interrupted."""
    from outrider.audit import tables
    from outrider.audit.run import certificates

    result: dict[str, Any] = {}
    with keeping(lambda: write(output, result, tables.certificates)), shown() as report:
        for each in certificates(audited, settings, batch, lambda name: stages(report, name)):
            result = each
    return write(output, result, tables.certificates)


def write_grid(audited: Audited, grid: Grid, output: OutputOptions) -> int:
    """Run the grid cell by cell; ``--out`` is rewritten after each cell."""
    from outrider.audit import tables
    from outrider.audit.run import plan_of, same_text
    from outrider.files import earlier, write_whole

    known = None
    if output.resume:
        if output.out is None or not output.out.exists():
            raise OutriderError("--resume requires the file of an interrupted run: give it with --out")
        known = earlier(output.out, plan_of(audited, grid), "grid", "outrider audit --same-text")
        if not {"cells", "seconds"} <= known.keys():
            raise OutriderError(f"--resume: {output.out} was not written by outrider audit --same-text")
    result: dict[str, Any] = {}
    with keeping(lambda: write(output, result, tables.grid_table)):
        try:
            with shown() as report:
                for result in same_text(audited, grid, known, stages(report, "same text")):
                    if output.out is not None:
                        write_whole(output.out, json.dumps(result, indent=1) + "\n")
        except KeyboardInterrupt:
            if output.out is not None and result:
                have = f"{len(result['cells'])} of {len(grid.cells())} comparisons are in {output.out}"
                say(f"{have}; repeat the command with --resume to continue")
            raise
    return write(output, result, tables.grid_table)


def write(output: OutputOptions, result: dict[str, Any], view: Callable[[dict[str, Any]], RenderableType]) -> int:
    """Write the files, then print: standard output may be closed. Does nothing without a result. Returns the exit code."""
    from rich.console import Console

    from outrider.audit.tables import page

    if not result:
        return EXIT_CHECK_FAILED
    write_or_say(output.out, lambda: json.dumps(result, indent=1) + "\n")
    write_or_say(output.html, lambda: page(result))
    Console(soft_wrap=True).print(view(result))
    return 0 if result["certified"] else EXIT_CHECK_FAILED


def read_prompts(options: AuditOptions, is_grid: bool) -> list[Any]:
    """Read the prompts before a model is loaded, so that errors are reported early."""
    from outrider.bench.workloads import Prompt, from_file

    num_prompts = options.num_prompts or (None if is_grid else len(PROMPTS))
    if options.prompts:
        return [prompt for path in options.prompts for prompt in from_file(path, num_prompts)]
    return [Prompt("audit", text) for text in PROMPTS][:num_prompts]


def encode_prompts(llm: LLM, prompts: Sequence[Any], max_tokens: int, longest: int) -> list[list[int]]:
    """Return prompts as token ids. Raises ``OutriderError`` for a prompt that is empty or does not fit the context."""
    from outrider.bench.workloads import encode_all
    from outrider.cli.session import check_lengths

    found = encode_all(llm.tokenizer, prompts)
    more = max(max_tokens, 2 * longest + 4)
    check_lengths(found, llm, more, f"the {more} tokens of --max-tokens and --num-draft-tokens")
    return found


def texts_in_memory(llm: LLM, num_tokens: int) -> int:
    """Return how many sequences of that length fit into ``MEMORY``, at least 2. Cache rows start at 256 slots and double."""
    return max(2, MEMORY // llm.runner.cache.row_bytes(max(256, 2 * num_tokens)))


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """Return the temperature and all non-default sampler settings."""
    kept = {name: value for name, value in values_given(params).items() if name not in UNUSED_SETTINGS}
    return {"temperature": params.temperature} | kept


def stages(report: Report, name: str) -> Callable[[str, int, float], None]:
    """Return a function that reports a method's progress: description, steps since the last call, total (0, inf: unknown)."""
    done = 0

    def advance(what: str, steps: int, total: float) -> None:
        nonlocal done
        done += steps
        known = max(round(total), done) if total and math.isfinite(total) else 0
        report(done, known, f"{name}: {what}" if what else name)

    return advance


def _parse_length(text: str) -> int:
    k = parse_k(text)
    if not isinstance(k, int) or k < 1:
        raise OutriderError(f"invalid --num-draft-tokens {text}: expected a whole number, at least 1")
    return k
