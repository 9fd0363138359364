"""``outrider compare``: run plain and speculative decoding side by side from one prompt and compare the outputs."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from outrider.cli.console import err, painter_for, say, waiting
from outrider.cli.options import INFLATABLE, MethodOptions, ModelOptions, ReadableOptions, flag, with_groups
from outrider.cli.race_view import RaceView, shown_rounds
from outrider.registry import AUTO, PLAIN, SPECULATIVE, VERIFIERS
from outrider.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.bench.race import Lane, Race
    from outrider.engine.engine import Engine
    from outrider.engine.llm import LLM
    from outrider.engine.stats import GenerationStats

EXAMPLES = """Examples:

outrider compare

outrider compare --inflate 1b

outrider compare -k 5 --max-tokens 100 "The ship left the harbour"

outrider compare --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --temperature 0 "Dear Sir,"

Without --temperature, --same-text is the default, so that sampled outputs can be compared too.
"""
DEFAULT_PROMPT = "def read_lines(path: str) -> list[str]:\n"  # the embedded target writes functions better than tales
TURN = 0.1  # seconds per turn of a lane; long enough that CPU caches are warm for most rounds
WARMUP_TOKENS = 24
MEANING = "tok/s: after the first token; tok/pass: tokens per target pass; ms per round: draft + score + other"


@dataclass(frozen=True)
class RaceOptions(ReadableOptions):
    """Sampling settings of a race."""

    defaults: ClassVar[dict[str, Any]] = {**ReadableOptions.defaults, "max_tokens": 200, "seed": 0}


@with_groups
def command(
    *,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - reads standard input.")] = None,
    models: ModelOptions,
    methods: MethodOptions,
    sampling: RaceOptions,
    inflate: str | None = flag(f"Race at the cost of a larger model, such as 350m, 1b or 8b; {INFLATABLE}", panel="Race"),
) -> None:
    """Run plain and speculative decoding side by side: show both outputs and speeds, and whether the outputs are equal."""
    from outrider.cli.session import auto_method, inflatable, inflate_with_heads, load, read_prompt, resolve, start

    start()
    from outrider.engine.config import longest_draft
    from outrider.engine.methods import methods_in

    text = DEFAULT_PROMPT if prompt is None else read_prompt(prompt)
    params = sampling.params()
    is_lossless = models.verifier is None or VERIFIERS.get(models.verifier).lossless
    if sampling.temperature is None and is_lossless:  # equal outputs are easier to compare
        models = replace(models, same_text=True)
    drafts: dict[str, Any] = {}
    if inflate is not None:
        inflatable(models)
        arguments = resolve(models, methods)
        drafting = methods_in(methods.method or AUTO, lambda: auto_method(models))
        models, drafts, _ = inflate_with_heads(models, drafting, arguments, inflate)
    llm = load(models, methods, **drafts, max_batch=2, prefix_cache=False, compile=models.compile or "always")
    from outrider.bench.contenders import Contender
    from outrider.bench.race import Race
    from outrider.bench.workloads import Prompt, encode

    prompt_ids = encode(llm.tokenizer, Prompt("", text))
    with waiting("warming up"):
        warm_up(llm, prompt_ids, params)
    race = Race(engines(llm), prompt_ids, params, TURN)
    k = llm.speculation.num_draft_tokens
    plain, speculative = race.lanes
    label = Contender(llm.proposer.name, longest_draft(llm.speculation, llm.proposer) if isinstance(k, int) else AUTO).label
    titles = {plain.name: PLAIN, speculative.name: label}
    if sys.stdout.isatty():
        watch(llm, race, titles, text)
    else:
        write(race, text)
    err.print(table(race.lanes, titles))
    say(MEANING)
    if cause := why_slower(plain.stats, speculative.stats, is_auto=not isinstance(k, int)):
        say(cause)
    if inflate is not None:
        say(f"the target was padded to the cost of a {inflate.upper()} model, which changes no token")
    elif models.target is None:
        say("a larger target gains more; the same text at the cost of a 1B model: outrider compare --inflate 1b")
    sentence = verdict(llm, plain.output, speculative.output, params.is_greedy, is_lossless)
    err.print(sentence, markup=False, soft_wrap=True)  # tokens may contain markup


def engines(llm: LLM) -> dict[str, Engine]:
    """Return lane -> engine, plain decoding first, with an untrained policy."""
    from outrider.bench.race import engine_for
    from outrider.engine.config import build_policy
    from outrider.engine.policy import FixedLength
    from outrider.proposers.plain import PlainProposer

    policy = build_policy(llm.speculation, llm.runner, llm.proposer)
    return {PLAIN: engine_for(llm, PlainProposer(), FixedLength(0)), SPECULATIVE: engine_for(llm, llm.proposer, policy)}


def warm_up(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> None:
    """Compile and measure passes before the race, and discard the output."""
    from outrider.bench.race import Race

    k = llm.speculation.num_draft_tokens
    llm.warmup(k if isinstance(k, int) else 0)
    warming = replace(params, max_tokens=WARMUP_TOKENS, min_tokens=0, ignore_eos=True, stop=())
    for _ in Race(engines(llm), prompt_ids, warming).run():
        pass
    llm.proposer.memory = None


def watch(llm: LLM, race: Race, titles: dict[str, str], text: str) -> None:
    """Run the race and show it on the terminal."""
    from rich.console import Console

    painters = {lane.name: painter for lane in race.lanes if (painter := painter_for(llm))}
    with closing(race.run()) as steps:
        RaceView(Console(highlight=False), titles, text).show(shown_rounds(steps, painters))


def write(race: Race, text: str) -> None:
    """Run the race and print both outputs one after the other, for a file or a pipe."""
    texts = {lane.name: text for lane in race.lanes}
    with waiting("racing"), closing(race.run()) as steps:
        for step in steps:
            texts[step.lane.name] += step.emission.text
    for each in texts.values():
        print(each, flush=True)


def table(lanes: list[Lane], titles: dict[str, str]) -> Table:
    """Return a table of speed and acceptance of both lanes, excluding the first tokens."""
    from outrider.bench.tables import add_row, bare_table, percent, round_ms

    view = bare_table()
    for name in ("", "tokens", "first token", "tok/s", "speedup", "tok/pass", "accepted", "ms"):
        view.add_column(name, justify="right" if name else "left", no_wrap=True)
    plain = lanes[0]
    for lane in lanes:
        stats = lane.stats
        entries = [
            titles[lane.name],
            str(len(lane.output)),
            f"{1e3 * lane.first_seconds:.0f} ms",
            f"{stats.tok_s:.1f}",
            f"{stats.tok_s / plain.stats.tok_s:.2f}" if plain.stats.tok_s else "",
            f"{stats.mean_acceptance_length:.2f}",
            percent(stats.acceptance_rate),
            round_ms(stats.ms_per_round),
        ]
        add_row(view, entries)
    return view


def why_slower(plain: GenerationStats, speculative: GenerationStats, is_auto: bool) -> str | None:
    """Return what made speculative decoding slower than plain decoding, and what to do; None if it was not slower."""
    if speculative.tok_s >= plain.tok_s:
        return None
    rounds = [sum(stats.ms_per_round.values()) for stats in (speculative, plain)]
    advice = "outrider doctor checks whether the draft fits" if is_auto else "-k auto drafts only where that pays"
    return (
        f"Slower: a round takes {rounds[0]:.1f} ms for {speculative.mean_acceptance_length:.2f} tokens, a plain one"
        f" {rounds[1]:.1f} ms for one. {advice}."
    )


def verdict(llm: LLM, plain: list[int], speculative: list[int], is_greedy: bool, is_lossless: bool) -> str:
    """Return a sentence on whether two token sequences are equal and, if not, where they differ and why."""
    from outrider.bench.race import first_difference

    at = first_difference(plain, speculative)
    if at is None:
        kind = "" if is_greedy else "sampled "
        return f"Same text: yes, all {len(plain)} {kind}tokens are equal."
    if not is_lossless:
        return "Same text: no, as expected: the verifier is lossy, so the outputs follow different distributions."
    if not is_greedy and not llm.speculation.same_text:
        return "Same text: no, as expected: both are samples of the same distribution (--same-text makes them equal)."
    tokenizer: Any = llm.tokenizer  # a target without one was refused

    def word(ids: list[int]) -> str:
        return repr(tokenizer.decode(ids[at : at + 1])) if at < len(ids) else "the end"

    line = f"Same text: no. The first {at} tokens are equal, then plain has {word(plain)} and speculative {word(speculative)}."
    if llm.runner.is_row_invariant:
        return f"{line} This should not happen: please report it."
    return f"{line} Passes of different widths round differently here, and the two tokens are almost equally likely."
