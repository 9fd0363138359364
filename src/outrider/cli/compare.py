"""``outrider compare``: the same prompt plain and speculative, and whether the words are the same."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import MethodOptions, ModelOptions, SamplingOptions, with_groups

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.bench.contenders import Contender, Contenders
    from outrider.bench.measure import Run
    from outrider.types import SamplingParams

EXAMPLES = """Examples:

outrider compare

outrider compare --k 5 --max-tokens 100 "The ship left the harbour"

outrider compare --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --same-text --temperature 0.8 "Dear Sir,"
"""
DEFAULT_PROMPT = "def quicksort(numbers):\n"


@with_groups
def command(
    *,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; - reads standard input.")] = None,
    models: ModelOptions,
    methods: MethodOptions,
    sampling: SamplingOptions,
) -> None:
    """Generate plain and speculative, show both texts, both speeds and whether the words are the same."""
    from outrider.bench.contenders import PLAIN, Contender, Contenders
    from outrider.bench.grid import warm_up
    from outrider.bench.workloads import Prompt, encode
    from outrider.cli.console import err, waiting
    from outrider.cli.options import parse_k
    from outrider.cli.session import load, read_prompt, resolve

    text = DEFAULT_PROMPT if prompt is None else read_prompt(prompt)
    params = sampling.params(seed=sampling.seed if sampling.seed is not None else 0)
    llm = load(models, methods, max_batch=1, compile=models.compile or "always")
    contenders = Contenders(llm, resolve(models, methods).get("draft"))
    pair = [Contender(PLAIN, 0), Contender(llm.proposer.name, parse_k(methods.k))]
    prompt_ids = encode(llm.tokenizer, Prompt("", text))
    for contender in pair:
        with waiting(f"warming up: {contender.label}"):
            warm_up(contenders, contender, [prompt_ids], batch=1)
    runs = []
    for contender in pair:
        err.rule(f"[bold]{'plain decoding' if contender.is_plain else 'speculative: ' + contender.label}")
        runs.append(_stream(contenders, contender, text, prompt_ids, params))
    err.rule()
    err.print(_table(pair, runs))
    err.print("[dim]tok/pass: tokens per pass of the target; ms of a round: draft + score + other[/]")
    said = verdict(llm.tokenizer, runs[0].token_ids[0], runs[1].token_ids[0], params.is_greedy, models.same_text)
    err.print(said, markup=False)  # it quotes tokens


def _stream(contenders: Contenders, contender: Contender, text: str, prompt_ids: list[int], params: SamplingParams) -> Run:
    from outrider.bench.measure import generate

    sys.stdout.write(text)

    def show(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    run = generate(contenders, contender, [prompt_ids], params, batch=1, show=show)
    print(flush=True)
    return run


def _table(pair: list[Contender], runs: list[Run]) -> Table:
    from rich import box
    from rich.table import Table

    view = Table(box=box.SIMPLE, pad_edge=False, padding=0)
    for name in ("", "tokens", "seconds", "tok/s", "speedup", "tok/pass", "accepted", "ms"):
        view.add_column(name, justify="right" if name else "left", no_wrap=True)
    for contender, run in zip(pair, runs, strict=True):
        ms = run.ms
        view.add_row(
            contender.label,
            str(run.num_tokens),
            f"{run.seconds:.2f}",
            f"{run.tok_s:.1f}",
            f"{run.tok_s / runs[0].tok_s:.2f}" if runs[0].tok_s else "",
            f"{run.mean_acceptance_length:.2f}",
            "" if contender.is_plain else f"{run.acceptance_rate:.0%}",
            f"{ms['draft']:.1f}+{ms['score']:.1f}+{ms['verify'] + ms['host']:.1f}",
        )
    return view


def verdict(tokenizer: Any, plain: list[int], speculative: list[int], is_greedy: bool, same_text: bool) -> str:
    """Whether two token sequences are equal; if not, where they part and what that means."""
    if plain == speculative:
        return f"Same text: yes, all {len(plain)} tokens are equal."
    if not is_greedy and not same_text:
        return "Same text: no, and not meant to be: both are samples of the same distribution (--same-text makes them equal)."
    at = next(
        (i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), min(len(plain), len(speculative))
    )

    def word(ids: list[int]) -> str:
        return repr(tokenizer.decode(ids[at : at + 1])) if tokenizer is not None and at < len(ids) else "the end"

    line = f"Same text: no. The first {at} tokens are equal, then plain has {word(plain)} and speculative {word(speculative)}."
    if same_text:
        return line + " This should not happen with --same-text: please report it."
    return (
        line + " Passes of different widths round differently, and here two tokens were almost equally likely; see --same-text."
    )
