"""``outrider serve``: an OpenAI-compatible server for one target and its drafting method."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from outrider.cli.options import MethodOptions, ModelOptions, parse_k, with_groups

if TYPE_CHECKING:
    from outrider.engine import LLM
    from outrider.engine.plan import Plan

EXAMPLES = """Examples:

outrider serve

outrider serve --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --port 9000

outrider serve plan.toml --api-keys keys.txt --host 0.0.0.0

outrider serve --engine vllm plan.toml -- --tensor-parallel-size 4 --pipeline-parallel-size 2

curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "def quicksort(", "max_tokens": 64}'
"""
LISTEN, LIMITS, ELSEWHERE = "Listening", "Limits", "Another engine"
MAX_BATCH = 32  # default limit of concurrent sequences; the cache grows with them


@dataclass(frozen=True)
class ListenOptions:
    """Address, keys and logging."""

    host: Annotated[
        str | None, typer.Option(help="Address to listen on (default: 127.0.0.1, this machine only).", rich_help_panel=LISTEN)
    ] = None
    port: Annotated[int | None, typer.Option(help="Default: 8000.", rich_help_panel=LISTEN)] = None
    name: Annotated[
        str | None, typer.Option(help="Model name for clients (default: the target's folder or id).", rich_help_panel=LISTEN)
    ] = None
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="File with one KEY [NAME [PRIORITY]] per line (default: OUTRIDER_API_KEYS; without either, no key is"
            " required).",
            rich_help_panel=LISTEN,
        ),
    ] = None
    record: Annotated[
        Path | None,
        typer.Option(help="Append requests, text included, to this file for outrider tune.", rich_help_panel=LISTEN),
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code from the model repository.", rich_help_panel=LISTEN)
    ] = False


@dataclass(frozen=True)
class LimitOptions:
    """Limits of the server."""

    max_batch: Annotated[int | None, typer.Option(help="Concurrent sequences (default: 32).", rich_help_panel=LIMITS)] = None
    max_queue: Annotated[
        int | None, typer.Option(help="Waiting sequences before 429 is returned (default: 256).", rich_help_panel=LIMITS)
    ] = None
    kv_memory: Annotated[
        float | None,
        typer.Option(help="GiB limit of the target's KV cache (default: no limit).", rich_help_panel=LIMITS),
    ] = None
    max_body: Annotated[
        int | None, typer.Option(help="Maximum bytes per request body (default: 4 MiB).", rich_help_panel=LIMITS)
    ] = None
    request_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds from a call's first byte to the end of its answer (default: 600).", rich_help_panel=LIMITS),
    ] = None
    stream_interval: Annotated[
        float | None,
        typer.Option(help="Minimum seconds between two chunks of a stream (default: 0.02).", rich_help_panel=LIMITS),
    ] = None
    shutdown_grace: Annotated[
        float | None,
        typer.Option(help="Seconds from a signal to the end of the process, at most (default: 60).", rich_help_panel=LIMITS),
    ] = None
    header_timeout: Annotated[
        float | None, typer.Option(help="Seconds for a call's headers (default: 10).", rich_help_panel=LIMITS)
    ] = None
    body_timeout: Annotated[
        float | None, typer.Option(help="Seconds for a call's body (default: 30).", rich_help_panel=LIMITS)
    ] = None
    idle_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds between two calls, or with an answer left unread (default: 30).", rich_help_panel=LIMITS),
    ] = None
    stall_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds without a step after which /ready is 503 (default: 60).", rich_help_panel=LIMITS),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(help="Processes that tokenise, and as many that try schemas out (default: 2).", rich_help_panel=LIMITS),
    ] = None
    worker_memory: Annotated[
        float | None, typer.Option(help="GiB that each of them may take (default: 1).", rich_help_panel=LIMITS)
    ] = None
    text_timeout: Annotated[
        float | None, typer.Option(help="Processor seconds to tokenise one call (default: 10).", rich_help_panel=LIMITS)
    ] = None
    schema_timeout: Annotated[
        float | None, typer.Option(help="Processor seconds to compile a JSON schema (default: 2).", rich_help_panel=LIMITS)
    ] = None
    max_schema_values: Annotated[
        int | None,
        typer.Option(help="Objects, lists, strings and numbers in a JSON schema (default: 5000).", rich_help_panel=LIMITS),
    ] = None
    max_schema_depth: Annotated[
        int | None, typer.Option(help="Levels of a JSON schema (default: 64).", rich_help_panel=LIMITS)
    ] = None
    max_schema_choices: Annotated[
        int | None,
        typer.Option(help="Alternatives in one anyOf, oneOf or allOf of it (default: 256).", rich_help_panel=LIMITS),
    ] = None


@dataclass(frozen=True)
class EngineOptions:
    """Another engine instead of Outrider's."""

    engine: Annotated[
        str | None, typer.Option(help="vllm: run the plan on vLLM; its own options follow --.", rich_help_panel=ELSEWHERE)
    ] = None
    engine_python: Annotated[
        str | None,
        typer.Option(help="Python of that engine's environment (default: searched on PATH).", rich_help_panel=ELSEWHERE),
    ] = None
    own_code: Annotated[
        bool,
        typer.Option(
            "--own-code", help="Use Outrider's proposer even where the engine has its own.", rich_help_panel=ELSEWHERE
        ),
    ] = False


@with_groups
def command(
    *,
    plan: Annotated[Path | None, typer.Argument(help="TOML file with options; command-line options take precedence.")] = None,
    engine_options: Annotated[
        list[str] | None, typer.Argument(help="With --engine, after --: options of that engine.", show_default=False)
    ] = None,
    elsewhere: EngineOptions,
    listening: ListenOptions,
    limits: LimitOptions,
    models: ModelOptions,
    methods: MethodOptions,
) -> None:
    """Run an OpenAI-compatible server with lossless speculative decoding."""
    from outrider.cli.bench_documents import check_writable
    from outrider.engine.plan import Plan, served_name
    from outrider.types import OutriderError

    passed = list(engine_options or ())
    if plan is not None and str(plan).startswith("-"):  # arguments after --, without a plan
        plan, passed = None, [str(plan), *passed]
    if elsewhere.engine is not None:
        serve_elsewhere(plan, passed, elsewhere, listening, limits, (models, methods))
    if passed or elsewhere.engine_python is not None or elsewhere.own_code:
        raise OutriderError("options after -- need --engine: outrider serve --engine vllm plan.toml -- ...")
    try:
        from outrider.server.bridge import load_aside
        from outrider.server.config import KeyRing, ServerConfig
        from outrider.server.run import listen, log_json, serve
    except ModuleNotFoundError as error:
        raise OutriderError(f"serving needs {error.name}: pip install 'outrider[serve]'") from error
    known = Plan() if plan is None else Plan.read(plan)
    models, methods = merged(known, models, methods)
    given = {
        name: value
        for group in (listening, limits)
        for name, value in asdict(group).items()
        if value is not None and name in ServerConfig.__dataclass_fields__
    }
    config = ServerConfig(**({"name": served_name(models.target)} | given))
    keys = KeyRing.load(listening.api_keys)
    check_writable("--record", listening.record)
    more = {
        "max_batch": first_given(limits.max_batch, known.given("max_batch"), MAX_BATCH),
        "kv_memory": first_given(limits.kv_memory, known.given("kv_memory")),
        "prefix_cache": True,
        "trust_remote_code": listening.trust_remote_code,
    }

    with listen(config.host, config.port) as listener:  # find a port in use before loading the model
        llm = load_aside(lambda: prepared(models, methods, **more))
        log_json()
        serve(llm, config, keys, listener)


def prepared(models: ModelOptions, methods: MethodOptions, **more: Any) -> LLM:
    """The model with all compiled, unless that is not wanted: no client waits for it, and no answer changes because of it."""
    from outrider.cli.console import waiting
    from outrider.cli.session import load

    llm = load(models, methods, **more)
    if models.compile != "never":
        with waiting("compiling"):
            llm.warmup()
    return llm


def serve_elsewhere(
    plan: Path | None,
    passed: list[str],
    elsewhere: EngineOptions,
    listening: ListenOptions,
    limits: LimitOptions,
    drafting: tuple[ModelOptions, MethodOptions],
) -> NoReturn:
    """Replace this process by the other engine's server. Raises ``OutriderError`` if it is missing or cannot take an option."""
    from outrider.cli.session import check_source
    from outrider.engine.plan import Plan
    from outrider.export.engine import write
    from outrider.export.engines import ENGINES
    from outrider.export.launch import become, find_command, working_folder
    from outrider.export.wanted import wanted
    from outrider.types import OutriderError

    shared = {"host", "port", "name", "max_batch", "kv_memory"}
    for name, value in {**asdict(listening), **asdict(limits)}.items():
        if name not in shared and is_given(value):
            raise OutriderError(
                f"--{name.replace('_', '-')} is an option of Outrider's own server: give the engine's own options after --"
            )
    engine = ENGINES.get(elsewhere.engine or "")()
    known = joined(
        Plan() if plan is None else Plan.read(plan), *drafting, max_batch=limits.max_batch, kv_memory=limits.kv_memory
    )
    command = find_command(engine, elsewhere.engine_python)
    asked = wanted(known, check_source)
    folder = working_folder(engine, asked, elsewhere.own_code)
    export = write(engine, asked, folder, elsewhere.own_code)
    given = {"host": listening.host, "port": listening.port, "served-model-name": listening.name}
    more = [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]
    become([*command, *export.options, *more, *passed], folder, export)


def merged(plan: Plan, models: ModelOptions, methods: MethodOptions) -> tuple[ModelOptions, MethodOptions]:
    """Return the options, completed by the plan's values."""
    own = {"target", "draft", "verifier", "same_text", "max_len", "dtype", "device", "compile"}
    for option in own:
        if not is_given(getattr(models, option)) and plan.given(option) is not None:
            models = replace(models, **{option: plan.given(option)})
    k = first_given(methods.k, plan.given("k"))
    return models, MethodOptions(first_given(methods.method, plan.given("method")), None if k is None else str(k))


def joined(plan: Plan, models: ModelOptions, methods: MethodOptions, **limits: float | None) -> Plan:
    """Return the plan with the command line's values. ``limits``: values of ``max_batch`` and ``kv_memory``."""
    from outrider.engine.plan import KEYS, Plan

    models, methods = merged(plan, models, methods)
    given = {**asdict(models), "method": methods.method, "k": None if methods.k is None else parse_k(methods.k)}
    given |= {name: first_given(limits.get(name), plan.given(name)) for name in ("max_batch", "kv_memory")}
    return Plan({name: value for name, value in given.items() if name in KEYS and is_given(value)})


def is_given(value: Any) -> bool:
    """Return whether an option was given. 0 is a value (``--k 0``); False is an absent flag."""
    return value is not None and value is not False


def first_given(*values: Any) -> Any:
    """Return the first value that is not None, or None."""
    return next((value for value in values if value is not None), None)
