"""``outrider doctor``: check whether a draft fits a target before it is served."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from outrider.cli.app import EXIT_CHECK_FAILED
from outrider.cli.console import show_notices
from outrider.cli.options import MethodOptions, ModelOptions, SamplingOptions, flag, given, in_flags, with_groups
from outrider.engine.options import Speculation
from outrider.family import TARGET
from outrider.hub import local_gguf
from outrider.options import INT32, SAMPLING, option, whole
from outrider.registry import AUTO, DEFAULT_METHOD_WITH_DRAFT, DEFAULT_METHOD_WITH_FOREIGN_DRAFT

if TYPE_CHECKING:
    from outrider.doctor import Report

EXAMPLES = """Examples:

outrider doctor

outrider doctor --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B

outrider doctor --target ./my-model --method early-exit:layers=6
"""
MAX_TOKENS = 48  # per prompt
MARKS = {"ok": "[green]ok[/]", "note": "[dim]note[/]", "suspicious": "[yellow]suspicious[/]", "wrong": "[red]WRONG[/]"}


@dataclass(frozen=True)
class SampleOptions(SamplingOptions):
    """Sampling settings of a check."""

    max_tokens: int = option(whole(2, INT32), MAX_TOKENS, "Maximum number of tokens to generate.", panel=SAMPLING)


@with_groups
def command(
    *,
    as_json: bool = flag("Print one JSON document instead of the report.", False, "--json"),
    models: ModelOptions,
    method: str | None = given(Speculation),
    sampling: SampleOptions,
) -> int:
    """Check whether a draft fits its target: vocabulary, context, memory, then acceptance and speed on a few prompts."""
    from outrider.cli.session import auto_method, loading, resolve, start

    start()
    from outrider.doctor import DoctorOptions, all_candidates, check_draft

    show_notices()
    params = sampling.params()
    options = resolve(models, MethodOptions(method))
    named = options.pop("method", AUTO)
    method = auto_method(models).text if named == AUTO else named
    searches = named == AUTO and not models.draft
    found = all_candidates(models.target, models.trust_remote_code) if searches else []
    target = local_gguf(models.target) or TARGET
    with loading("looking") as tell:
        report = check_draft(DoctorOptions(target, method, options, params), tell)
        is_foreign = any((each.level, each.topic) == ("wrong", "vocabulary") for each in report.findings)
        if named == AUTO and method == DEFAULT_METHOD_WITH_DRAFT and is_foreign:  # other commands translate its drafts, too
            method = DEFAULT_METHOD_WITH_FOREIGN_DRAFT
            report = check_draft(DoctorOptions(target, method, options, params), tell)
    report.findings[:0] = found
    if as_json:
        print(json.dumps(asdict(report) | {"fits": report.fits, "verdict": report.verdict}))
    else:
        _show(report, method)
    return 0 if report.fits else EXIT_CHECK_FAILED


def _show(report: Report, method: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    out, view = Console(soft_wrap=True), Table.grid(padding=(0, 2))
    for finding in report.findings:
        view.add_row(MARKS[finding.level], finding.topic, escape(in_flags(finding.text)))
    out.print(view)
    found = report.acceptance
    if found is not None:
        places = ", ".join(f"{rate:.0%}" for rate in found.by_position) or "none"
        tau, prompts = found.mean_acceptance_length, found.num_prompts
        out.print(f"acceptance   of draft 1, 2, ... where reached: {places}; {tau:.2f} tokens per pass")
        out.print(
            f"speed        plain {found.plain_tok_s:.1f} tok/s, {method} {found.tok_s:.1f}, over {prompts} prompts",
            markup=False,
        )
    out.print(f"verdict      [bold]{escape(report.verdict)}[/]")
