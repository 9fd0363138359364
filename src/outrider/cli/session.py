"""From options to a loaded ``LLM``, with every wait announced and every mistake in one line."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from outrider.cli.console import show_notices, waiting
from outrider.cli.options import MethodOptions, ModelOptions, read_option
from outrider.engine.options import Speculation
from outrider.options import declared
from outrider.registry import AUTO, PROPOSERS, VERIFIERS
from outrider.runner.config import RunnerConfig

if TYPE_CHECKING:
    from rich.status import Status

    from outrider.engine import LLM, Chunk
    from outrider.types import SamplingParams


def start() -> None:
    """Import torch, which takes seconds, where the user sees what is waited for."""
    if "torch" not in sys.modules:
        with waiting("starting"):
            import torch  # noqa: F401


def read_prompt(argument: str | None) -> str:
    """The prompt given, or standard input for ``-`` or where something is piped in."""
    from outrider.types import OutriderError

    if argument in (None, "-"):
        if argument is None and sys.stdin.isatty():
            raise OutriderError('no prompt: outrider generate "Once upon a time", or pipe one in')
        try:
            argument = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise OutriderError(f"standard input is not UTF-8 text: {error}") from None
    assert argument is not None
    if not argument:
        raise OutriderError("the prompt is empty")
    return argument


def resolve(models: ModelOptions, methods: MethodOptions) -> dict[str, Any]:
    """Keyword options of ``LLM``, all but ``target``, holding only what the user gave.

    Raises ``OutriderError`` for a mistake that needs no model to be found, before the seconds that loading takes.
    """
    from outrider.method_text import split_method

    given = {**asdict(models), **asdict(methods)}
    values = {
        name: read_option(Speculation if name in declared(Speculation) else RunnerConfig, name, value)
        for name, value in given.items()
        if value is not None and value is not False  # a flag left out
    }
    if models.verifier is not None:
        VERIFIERS.get(models.verifier)
    check_machine(models)
    for model in (models.target, models.draft):
        check_source(model)
    drafts = None
    if models.target is None:
        from outrider.family import drafts as embedded

        drafts = embedded()
    if methods.method not in (None, AUTO):
        name, options = split_method(methods.method)
        for source in PROPOSERS.get(name).drafts_in(options, models.draft, drafts or {}):
            check_source(str(source))
    values.pop("target", None)
    return values if drafts is None else values | {"drafts": drafts}


def check_machine(models: ModelOptions) -> None:
    """Refuses a device that is not there."""
    import torch

    from outrider.types import OutriderError

    if models.device in (None, "auto"):
        return
    try:
        torch.empty(0, device=models.device)
    except (RuntimeError, AssertionError, NotImplementedError):
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise OutriderError(f"there is no device {models.device!r} here; there is {', '.join(there)}") from None


def check_source(model: str | None) -> None:
    """Refuses what can be neither a folder nor a hub id; keeps quiet folders off the network."""
    from outrider.types import OutriderError

    if model is None:
        return
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise OutriderError(f"{model} is not a model folder: it has no config.json")
        return
    if path.exists():
        raise OutriderError(f"{model} is a file; give the folder that holds config.json and the weights")
    if not model or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise OutriderError(f"there is no model folder {model!r}; a model of the Hugging Face hub is written owner/name")
    if not _hub_reachable():
        os.environ["HF_HUB_OFFLINE"] = "1"  # without it every file is asked for six times, with pauses
        from huggingface_hub import try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(model, "config.json"), str):
            raise OutriderError(
                f"{model!r} is neither a local folder nor downloaded before, and the Hugging Face hub cannot be reached"
            )


@cache
def _hub_reachable(seconds: float = 5.0) -> bool:
    """Whether the hub's host answers. With a proxy only the real request can tell, so that counts as yes."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    if any(name.lower() in ("https_proxy", "all_proxy") for name in os.environ):
        return True
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        with socket.create_connection((url.hostname or "", url.port or 443), timeout=seconds):
            return True
    except OSError:
        return False


def load(models: ModelOptions, methods: MethodOptions, **more: Any) -> LLM:
    """Loads target and draft. ``more`` goes to ``LLM`` as it is."""
    from outrider.method_text import split_method

    show_notices()
    arguments = resolve(models, methods) | more
    named = [value for value in split_method(methods.method or "")[1].values() if "/" in value]
    if all(source is None or Path(source).expanduser().is_dir() for source in (models.target, models.draft, *named)):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing to look up: local folders must not wait for a network
    with loading(f"loading {models.target or 'the embedded models'}"):
        from outrider.engine import LLM

        llm = LLM(models.target, **arguments)
    return llm


@contextmanager
def loading(what: str) -> Iterator[Status | None]:
    """``waiting`` for what is loaded within, without transformers' own progress bars.

    Behind it garbage is looked for again (``cli.app`` had that stopped), but not among what was loaded.
    """
    with waiting(what) as status:
        from transformers.utils import logging

        logging.disable_progress_bar()
        yield status
    gc.freeze()
    gc.enable()


def prepare(llm: LLM, models: ModelOptions) -> None:
    """Before the clock runs: compiles where that was asked for, and learns what a plain pass takes, for the summary."""
    if models.compile == "always":
        with waiting("compiling"):
            llm.warmup()
    llm.price_plain()


def streamed(llm: LLM, prompt: str | list[int], params: SamplingParams) -> Generator[Chunk, None, None]:
    """``llm.stream`` that says what it waits for until the first chunk. Close it to end the generation early."""
    stream = llm.stream(prompt, params)
    with waiting("reading the prompt"):
        first = next(stream)
    yield first
    yield from stream
