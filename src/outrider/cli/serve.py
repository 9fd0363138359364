"""``outrider serve``: an OpenAI-compatible server around one target and whatever drafts for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.options import MethodOptions, ModelOptions, with_groups

if TYPE_CHECKING:
    from outrider.engine.plan import Plan

EXAMPLES = """Examples:

outrider serve

outrider serve --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --port 9000

outrider serve plan.toml --api-keys keys.txt --host 0.0.0.0

curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "def quicksort(", "max_tokens": 64}'
"""
LISTEN, LIMITS = "Listening", "Limits"
MAX_BATCH = 32  # sequences at once, unless said: the cache grows with those that come


@dataclass(frozen=True)
class ListenOptions:
    """Where, and for whom."""

    host: Annotated[str | None, typer.Option(help="Default: 127.0.0.1, this machine only.", rich_help_panel=LISTEN)] = None
    port: Annotated[int | None, typer.Option(help="Default: 8000.", rich_help_panel=LISTEN)] = None
    name: Annotated[
        str | None, typer.Option(help="Of the model, for clients (default: the target's folder or id).", rich_help_panel=LISTEN)
    ] = None
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="File of lines: key, then a name and a priority if wanted (default: OUTRIDER_API_KEYS, else no key is asked"
            " for).",
            rich_help_panel=LISTEN,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.", rich_help_panel=LISTEN)
    ] = False


@dataclass(frozen=True)
class LimitOptions:
    """What the server puts up with."""

    max_batch: Annotated[int | None, typer.Option(help="Sequences at once (default: 32).", rich_help_panel=LIMITS)] = None
    max_queue: Annotated[
        int | None, typer.Option(help="Sequences that may wait; then 429 (default: 256).", rich_help_panel=LIMITS)
    ] = None
    kv_memory: Annotated[
        float | None,
        typer.Option(help="GiB that the target's cache may take (default: what comes).", rich_help_panel=LIMITS),
    ] = None
    max_body: Annotated[int | None, typer.Option(help="Bytes of one call (default: 4 MiB).", rich_help_panel=LIMITS)] = None
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds for one answer (default: 600).", rich_help_panel=LIMITS)
    ] = None
    shutdown_grace: Annotated[
        float | None, typer.Option(help="Seconds for running answers at the end (default: 60).", rich_help_panel=LIMITS)
    ] = None


@with_groups
def command(
    *,
    plan: Annotated[Path | None, typer.Argument(help="A TOML file with options; those given here go before it.")] = None,
    listening: ListenOptions,
    limits: LimitOptions,
    models: ModelOptions,
    methods: MethodOptions,
) -> None:
    """Serve a model to OpenAI's clients: completions and chat, streamed or whole, drafted for and unchanged by it."""
    from outrider.cli.session import load
    from outrider.engine.plan import Plan, served_name
    from outrider.types import OutriderError

    try:
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
    more = {
        "max_batch": limits.max_batch or known.given("max_batch") or MAX_BATCH,
        "kv_memory": limits.kv_memory or known.given("kv_memory"),
        "prefix_cache": True,
        "trust_remote_code": listening.trust_remote_code,
    }
    with listen(config) as listener:  # a port that is taken is found before the model is loaded
        llm = load(models, methods, **more)
        log_json()
        serve(llm, config, keys, listener)


def merged(plan: Plan, models: ModelOptions, methods: MethodOptions) -> tuple[ModelOptions, MethodOptions]:
    """Options with the plan's values where the command line gives none."""
    own = {"target", "draft", "verifier", "same_text", "max_len", "dtype", "device", "compile"}
    for option in own:
        if getattr(models, option) in (None, False) and plan.given(option) is not None:
            models = replace(models, **{option: plan.given(option)})
    method, k = methods.method or plan.given("method"), methods.k if methods.k is not None else plan.given("k")
    return models, MethodOptions(method, None if k is None else str(k))
