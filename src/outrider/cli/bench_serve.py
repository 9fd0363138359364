"""``outrider bench serve``: measure a server under load, plain and speculative in turn."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from outrider.cli.app import EXIT_INTERNAL
from outrider.cli.bench_documents import check_outputs, keeping, write_or_say
from outrider.cli.console import err, say_error, waiting
from outrider.cli.options import (
    INFLATABLE,
    MethodOptions,
    ModelOptions,
    flag,
    given,
    parse_list,
    with_groups,
    workload_names,
)
from outrider.cli.serve import MAX_BATCH, joined
from outrider.engine.plan import Plan
from outrider.errors import OutriderError, errors_as, requires
from outrider.method_text import split_method, with_drafts
from outrider.options import INT32, number, option, whole
from outrider.progress import shown
from outrider.registry import AUTO, PROPOSERS
from outrider.runner.config import RunnerConfig
from outrider.sampling_params import SamplingParams

if TYPE_CHECKING:
    from outrider.bench.load.arrivals import Load
    from outrider.bench.load.sweep import Mode, Sweep, Traffic


@dataclass(frozen=True)
class LoadOptions:
    """The load. Several values are separated by commas."""

    panel: ClassVar[str] = "Load"
    concurrency: str = flag("Numbers of concurrent clients.", "1,2,4,8,16,32,64")
    rate: str | None = flag("Conversations that begin per second, at random times.")
    turns: int = option(whole(1), 1, "Requests of a conversation; each prompt continues the answer to the one before.")
    requests: int = option(whole(1), 4, "Conversations per client.")
    arrivals: int = option(whole(1), 32, "Conversations per run with a rate.")
    max_tokens: int = option(whole(2, INT32), 64, "Tokens per answer.")
    temperature: float = given(SamplingParams, 0.0)
    workloads: str | None = flag("Built-in prompts, mixed (default: code,edit,json,summary,math,chat,story).")
    prompts: Path | None = flag("Your own prompts, as JSONL (.gz).")
    num_prompts: int = option(whole(1), 8, "Prompts of each workload.")
    shared_prefix: int = option(whole(0), 0, "Characters of a common prefix of all prompts of a run.")
    repeat: int = option(whole(1), 3, "Repeats; medians are shown.")
    rest: float = option(number(0), 0.0, "Seconds without requests before each run, for servers that spin after a request.")
    seed: int = option(whole(0), 0, "Seed of arrivals and sampling.")


@dataclass(frozen=True)
class ServerOptions:
    """The server to measure."""

    panel: ClassVar[str] = "Server"
    url: str | None = flag("A running server (default: start one with these models).")
    plain_url: str | None = flag("A server of the same model without drafts, if drafts cannot be disabled per request.")
    api_key: str | None = flag("API key for --url and --plain-url (default: that in OPENAI_API_KEY).", envvar="OPENAI_API_KEY")
    max_batch: int | None = given(RunnerConfig, more=f"(default: {MAX_BATCH}).")
    inflate: str | None = flag(f"Inflate the started server's target to a larger model's cost, such as 1b; {INFLATABLE}")


@dataclass(frozen=True)
class ResultOptions:
    """Latency targets and output files."""

    panel: ClassVar[str] = "Output"
    slo_first_token: float = option(number(0), 2000.0, "Target for the first token, in milliseconds.")
    slo_token: float = option(number(0), 200.0, "Target for the mean time per later token, in milliseconds.")
    out: Path | None = flag("Write the JSON document to this file too.")


@with_groups
def command(
    *,
    plan: Annotated[Path | None, typer.Argument(help="Plan for the started server.")] = None,
    load: LoadOptions,
    server: ServerOptions,
    result: ResultOptions,
    models: ModelOptions,
    methods: MethodOptions,
) -> int:
    """Measure a server under load, plain and speculative in turn: speed, latencies, goodput and acceptance."""
    with requires("serve", "bench serve"):
        from outrider.bench.load.sweep import Sweep
    check_outputs({"--out": result.out}, [plan, load.prompts])
    traffic, loads = read_traffic(load), read_loads(load)
    check_seeds(load.seed, max(map(traffic.count, loads)))
    with address(server, plan, models, methods) as url:
        headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        sweep = Sweep(modes(url, server.plain_url, headers), loads, traffic, headers)
        with keeping(lambda: finish(sweep, result, {"interrupted": True})):
            measure(sweep)
    return finish(sweep, result, {})


def read_traffic(load: LoadOptions) -> Traffic:
    """Return the mixed prompts and their requests. Raises ``OutriderError`` for a file without prompts or an invalid value."""
    from outrider.bench import workloads
    from outrider.bench.load.sweep import Traffic

    names = workload_names(load.prompts, load.workloads)
    kinds = list(workloads.grouped(load.prompts, names, load.num_prompts).values())
    mixed = list(map(workloads.as_text, workloads.interleaved(kinds)))
    story = "\n".join(workloads.as_text(prompt) for prompt in workloads.builtin("story"))
    prefix = (story * (load.shared_prefix // len(story) + 1))[: load.shared_prefix]
    return Traffic(
        mixed,
        turns=load.turns,
        requests_per_client=load.requests,
        num_requests=load.arrivals,
        max_tokens=load.max_tokens,
        temperature=load.temperature,
        shared_prefix=prefix,
        repeat=load.repeat,
        rest=load.rest,
        seed=load.seed,
    )


def check_seeds(seed: int, count: int) -> None:
    """Raise ``OutriderError`` if the seed of the last of ``count`` conversations is too large: seeds are consecutive."""
    last = seed + count - 1
    if last >= 2**64:
        raise OutriderError(
            f"invalid --seed {seed}: {count} conversations have the seeds {seed} to {last}, expected at most 2^64 - 1"
        )


def read_loads(load: LoadOptions) -> list[Load]:
    """Return numbers of clients, then rates. Raises ``OutriderError`` for an invalid number."""
    from outrider.bench.load.arrivals import Load

    loads = (
        [Load(concurrency=count) for count in parse_list("--concurrency", load.concurrency, int)] if load.concurrency else []
    )
    loads += [Load(rate=rate) for rate in parse_list("--rate", load.rate, float)] if load.rate else []
    if not loads:
        raise OutriderError("no load: give --concurrency or --rate")
    return loads


@contextmanager
def address(server: ServerOptions, plan: Path | None, models: ModelOptions, methods: MethodOptions) -> Iterator[str]:
    """Yield the server's address: the given one, or a server started for the measurement."""
    from outrider.bench.load.own_server import own_server

    if server.url is not None:
        own = (plan, server.inflate, server.max_batch)
        if own != (None, None, None) or models != ModelOptions() or methods != MethodOptions():
            raise OutriderError(
                "--url measures a running server: omit the plan, options of models and methods, --max-batch and --inflate"
            )
        yield root(server.url)
        return
    if server.plain_url is not None:
        raise OutriderError("--plain-url requires --url: a server started here runs both modes")
    known = joined(Plan() if plan is None else Plan.read(plan), models, methods, server)
    known = Plan({"compile": "always", **known.values})  # compile before the measurement
    if server.inflate is not None:
        known = inflated_plan(known, server.inflate)
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder, ExitStack() as stack:
        file = Path(folder) / "plan.toml"
        known.write(file)
        with waiting("starting the server"):
            # plans have no such keys
            flags = ["--no-self-check"] * (not models.self_check) + ["--trust-remote-code"] * models.trust_remote_code
            url = stack.enter_context(own_server([str(file), *flags])).url
        yield url


def inflated_plan(plan: Plan, size: str) -> Plan:
    """Return the plan for its target inflated to this size, with the heads of its method inflated like it.

    Raises ``OutriderError`` if the target is not a folder, or if the two parts of the method use different unnamed drafts.
    """
    from outrider.cli.session import auto_method, inflate_with_heads, resolve
    from outrider.engine.methods import methods_in

    models = ModelOptions(
        target=plan.given("target"), draft=plan.given("draft"), download_draft=bool(plan.given("download_draft"))
    )
    arguments = resolve(models, MethodOptions())
    (method,) = methods_in(plan.given("method") or AUTO, lambda: auto_method(models))
    large, found, _ = inflate_with_heads(models, [method], arguments, size)
    name, options = split_method(method)
    used = PROPOSERS.get(name).drafts_in(options, models.draft, arguments["drafts"])
    own = {str(found["drafts"].get(str(draft), draft)) for draft in used if str(draft) not in options.values()}
    if len(own) > 1:
        raise OutriderError(
            f"--inflate: the parts of {name} have different drafts: name them, such as {name}:eagle.draft=FOLDER"
        )
    values = {
        **plan.values,
        "target": large.target,
        "method": with_drafts(method, lambda draft: found["drafts"].get(draft, draft)),
    }
    values.pop("draft", None)
    return Plan(values | ({"draft": own.pop()} if own else {}))


def root(url: str) -> str:
    """Return a server's address without the /v1 path of OpenAI's clients."""
    return url.rstrip("/").removesuffix("/v1")


def modes(url: str, plain_url: str | None, headers: dict[str, str]) -> list[Mode]:
    """Return the modes to measure: plain and speculative for an Outrider server, one mode for others.

    Raises ``OutriderError`` if the server does not answer.
    """
    from outrider.bench.load.sweep import Mode
    from outrider.registry import PLAIN, SPECULATIVE

    owner = owner_of(url, headers)
    if plain_url is not None:
        owner_of(root(plain_url), headers)
        return [Mode(PLAIN, root(plain_url)), Mode(SPECULATIVE, url)]
    if owner == "outrider":
        return [Mode(PLAIN, url, {"speculative": {"num_draft_tokens": 0}}), Mode(SPECULATIVE, url)]
    return [Mode("as served", url)]


def owner_of(url: str, headers: dict[str, str]) -> object:
    """Return the server's owner from its list of models. Raises ``OutriderError`` if it is not OpenAI-compatible."""
    import httpx

    wrong = (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, AttributeError)
    with errors_as(f"{url} does not answer as an OpenAI-compatible server", *wrong, detail=str):
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=30)
        answer.raise_for_status()
        return answer.json()["data"][0].get("owned_by")


def measure(sweep: Sweep) -> None:
    """Run the sweep and show progress. Raises ``OutriderError`` if the server does not answer."""
    import httpx

    try:
        with shown() as report:
            asyncio.run(sweep.run(report))
    except httpx.HTTPError as error:
        raise OutriderError(f"the server does not answer: {type(error).__name__} {error}") from error


def finish(sweep: Sweep, options: ResultOptions, extra: dict[str, Any]) -> int:
    """Write the document to its file and stdout, and the table to stderr. Does nothing without measurements.

    Returns the exit code, which is not 0 if all requests of a cell failed.
    """
    from outrider.bench.load.cells import Objective
    from outrider.bench.load.report import document, table, verdict

    if not sweep.groups:
        return 0
    result = document(sweep, Objective(options.slo_first_token / 1000, options.slo_token / 1000), extra)
    write_or_say(options.out, lambda: json.dumps(result, indent=1) + "\n", "; the document follows on standard output")
    err.print(table(result))
    err.print(verdict(result))
    for cell in result["cells"]:
        if cell["failed"]:
            count, why = f"{cell['failed']} of {cell['requests']} requests", "; ".join(cell["errors"])
            say_error(f"{cell['load']}, {cell['mode']}: {count} failed: {why}")
    print(json.dumps(result), flush=True)
    return EXIT_INTERNAL if any(cell["failed"] == cell["requests"] for cell in result["cells"]) else 0
