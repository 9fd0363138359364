"""``outrider serve``: OpenAI-compatible server for one target and its drafting method."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, TypeVar

import typer

from outrider.cli.bench_documents import check_outputs
from outrider.cli.console import waiting
from outrider.cli.options import MethodOptions, ModelOptions, flag, given, values_given, with_groups
from outrider.engine.plan import KEYS, Plan, served_name
from outrider.errors import OutriderError, requires
from outrider.export import ENGINES
from outrider.options import LISTEN, flag_name
from outrider.runner.config import RunnerConfig
from outrider.server.config import KEYS_VARIABLE, KeyRing, ServerConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from outrider.engine.llm import LLM

Options = TypeVar("Options", bound="DataclassInstance")

EXAMPLES = """Examples:

outrider serve

outrider serve --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --port 9000

outrider serve plan.toml --api-keys keys.txt --host 0.0.0.0

outrider serve --engine vllm plan.toml -- --tensor-parallel-size 4 --pipeline-parallel-size 2

curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "def quicksort(", "max_tokens": 64}'
"""
MAX_BATCH = 32  # default limit of concurrent sequences; the cache grows with them


@dataclass(frozen=True)
class LimitOptions:
    """API keys and limits besides those of ``ServerConfig``."""

    api_keys: Path | None = flag(
        f"File of lines KEY [NAME [PRIORITY]] (default: {KEYS_VARIABLE}; without keys, everyone has access).", panel=LISTEN
    )
    max_batch: int | None = given(RunnerConfig, more=f"(default: {MAX_BATCH}).")
    kv_memory: float | None = given(RunnerConfig)


@dataclass(frozen=True)
class EngineOptions:
    """Run another engine instead of Outrider's."""

    panel: ClassVar[str] = "Another engine"
    engine: str | None = flag("vllm: run the plan on vLLM; its own options follow --.")
    engine_python: str | None = flag("Python of that engine's environment (default: searched on PATH).")
    own_code: bool = flag("Use Outrider's proposer even if the engine has its own.", False, "--own-code")


@with_groups
def command(
    *,
    plan: Annotated[Path | None, typer.Argument(help="TOML file with options; command-line options take precedence.")] = None,
    engine_options: Annotated[
        list[str] | None, typer.Argument(help="With --engine, after --: options of that engine.", show_default=False)
    ] = None,
    elsewhere: EngineOptions,
    limits: LimitOptions,
    server: Annotated[dict[str, Any], ServerConfig],
    models: ModelOptions,
    methods: MethodOptions,
) -> None:
    """Run an OpenAI-compatible server with lossless speculative decoding."""
    passed = list(engine_options or ())
    if plan is not None and str(plan).startswith("-"):  # these are arguments after --, and there is no plan
        plan, passed = None, [str(plan), *passed]
    if elsewhere.engine is not None:
        serve_elsewhere(plan, passed, elsewhere, server, limits, (models, methods))
    alone = {"options after --": passed, "--engine-python": elsewhere.engine_python, "--own-code": elsewhere.own_code}
    what = next((name for name, value in alone.items() if value), None)
    if what is not None:
        raise OutriderError(f"{what}: requires --engine, as in outrider serve --engine vllm plan.toml -- ...")
    with requires("serve", "serve"):
        from outrider.server.run import listen, log_json, serve
    known = Plan() if plan is None else Plan.read(plan)
    models, methods, limits = filled(models, known), filled(methods, known), filled(limits, known)
    config = ServerConfig(**{"name": served_name(models.target), **server})
    keys = KeyRing.load(limits.api_keys)
    check_outputs({"--record": config.record}, [plan, limits.api_keys])
    more = {"max_batch": limits.max_batch or MAX_BATCH, "kv_memory": limits.kv_memory}

    with listen(config.host, config.port) as listener:  # reports a port in use before the model is loaded
        llm = prepared(models, methods, **more)
        log_json()
        serve(llm, config, keys, listener)


def prepared(models: ModelOptions, methods: MethodOptions, **more: Any) -> LLM:
    """Load the model and compile its passes, unless disabled, so that no request waits for it or changes because of it."""
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
    server: dict[str, Any],
    limits: LimitOptions,
    drafting: tuple[ModelOptions, MethodOptions],
) -> NoReturn:
    """Replace this process by another engine's server. Raises ``OutriderError`` if it is missing or lacks an option."""
    from outrider.cli.session import check_source
    from outrider.export.deployment import read_deployment
    from outrider.export.engine import write
    from outrider.export.launch import become, find_command, working_folder

    shared = {"host", "port", "name", "max_batch", "kv_memory"}
    for name in {**server, **values_given(limits)}:
        if name not in shared:
            raise OutriderError(
                f"{flag_name(name)} is an option of Outrider's own server: give the engine's own options after --"
            )
    if os.environ.get(KEYS_VARIABLE):  # otherwise the engine's server would be open
        raise OutriderError(
            f"{KEYS_VARIABLE} is an option of Outrider's own server: unset it, and give the engine's own options after --"
        )
    refuse_own_code(drafting[0])
    engine = ENGINES.get(elsewhere.engine or "")(in_place=True)
    known = joined(Plan() if plan is None else Plan.read(plan), *drafting, limits)
    engine.check(known, elsewhere.own_code)
    command = find_command(engine, elsewhere.engine_python)
    deployment = read_deployment(known, partial(check_source, is_loaded_here=False))
    folder = working_folder(engine, deployment, elsewhere.own_code)
    export = write(engine, deployment, folder, elsewhere.own_code)
    flags = {"host": "--host", "port": "--port", "name": "--served-model-name"}
    more = [part for name, value in server.items() for part in (flags[name], str(value))]
    become([*command, *export.options, *more, *passed], folder, export)


def refuse_own_code(models: ModelOptions) -> None:
    """Raise ``OutriderError`` if the model's own code is to run: a plan for another engine cannot say so."""
    if models.trust_remote_code:
        raise OutriderError("--trust-remote-code is not passed on to other engines: give them their own option instead")


def filled(options: Options, plan: Plan) -> Options:
    """Return the options, with the plan's values for those not given."""
    left = KEYS.keys() & {each.name for each in fields(options)} - values_given(options).keys()
    return replace(options, **{name: plan.given(name) for name in left if plan.given(name) is not None})


def joined(plan: Plan, *groups: Any) -> Plan:
    """Return the plan, with the command line's values replacing its own."""
    own = {name: value for group in groups for name, value in values_given(group).items() if name in KEYS}
    return Plan({name: plan.given(name) for name in plan.values if name not in own} | own)
