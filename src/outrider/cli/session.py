"""Build an ``LLM`` from options, show progress while loading, and report errors in one line."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider import hub
from outrider.cli.console import show_notices, waiting
from outrider.cli.options import MethodOptions, ModelOptions, values_given
from outrider.engine.options import Speculation
from outrider.errors import OutriderError, check_text, errors_as
from outrider.family import TARGET, drafts
from outrider.files import expanded, not_a_model_folder
from outrider.method_text import is_draft_option, split_method, split_methods
from outrider.registry import AUTO, PLAIN, PROPOSERS, VERIFIERS
from outrider.runner.config import torch_device
from outrider.weight_files import weight_files

if TYPE_CHECKING:
    from outrider.engine.finding import MethodChoice
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import Chunk
    from outrider.proposers.base import Proposer
    from outrider.types import SamplingParams


def start() -> None:
    """Import torch, which takes seconds, with a progress message."""
    if "torch" not in sys.modules:
        with waiting("starting"):
            import torch  # noqa: F401


def read_prompt(argument: str | None) -> str:
    """Return the given prompt, or standard input for ``-`` or a pipe."""
    if argument is None and sys.stdin.isatty():
        raise OutriderError('no prompt: give one as an argument, such as outrider generate "Once upon a time", or pipe it in')
    if argument is None or argument == "-":
        with errors_as("standard input is not UTF-8 text", UnicodeError, detail=str):
            argument = sys.stdin.read()
            argument.encode(errors="surrogateescape").decode()  # in some locales Python reads invalid bytes as surrogates
    if not argument:
        raise OutriderError("the prompt is empty")
    check_text(argument)
    return argument


def resolve(models: ModelOptions, methods: MethodOptions, drafts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the keyword arguments of ``LLM`` except ``target``, for options that were given.

    ``drafts``: those that belong to the target, by name (default: ``declared_drafts``).

    Raises ``OutriderError`` for all errors that can be found without loading a model.
    """
    values = {**values_given(models), **values_given(methods)}
    if models.verifier is not None:
        VERIFIERS.get(models.verifier)
    if models.device is not None:
        from outrider.runner.loading import check_device

        check_device(torch_device(models.device))
    check_source(models.target)
    check_draft(models.draft)
    values.pop("target", None)
    drafts = declared_drafts(models) if drafts is None else drafts
    if methods.method not in (None, AUTO):
        check_methods([methods.method], models, drafts)
    return values | {"drafts": drafts}


def declared_drafts(models: ModelOptions) -> dict[str, Path]:
    """Return the drafts that belong to the target, by name: only the embedded one has any."""
    return drafts() if models.target is None else {}


def check_methods(methods: Iterable[str], models: ModelOptions, drafts: Mapping[str, Any]) -> None:
    """Raise ``OutriderError`` for methods whose options or drafts are invalid. ``drafts``: as in ``resolve``."""
    from outrider.engine.config import check_method

    for method in methods:
        for source in check_method(Speculation(method=method, draft=models.draft, drafts=drafts)):
            check_draft(str(source))


def auto_method(models: ModelOptions) -> MethodChoice:
    """Return the choice of method ``auto`` for these options."""
    from outrider.engine.methods import auto_choice

    drafts = declared_drafts(models)
    return auto_choice(models.target, models.draft, drafts, models.download_draft, models.trust_remote_code)


def named_methods(text: str, models: ModelOptions) -> tuple[list[str], list[str]]:
    """Return the methods that a list names, checked, and those that it stands for: ``all`` adds every other one.

    The target's file is needed, and downloaded if it is a GGUF file, only for ``auto``, after all checks.
    """
    from outrider.engine.methods import ALL, chosen_methods, methods_in

    resolve(models, MethodOptions())
    given = split_methods(text)
    chosen_methods([name for name in given if name != AUTO])
    check_methods([name for name in given if name != ALL], models, declared_drafts(models))
    names = methods_in(text, lambda: auto_method(models))
    return [name for name in names if name != ALL], chosen_methods(names)


def fitting(
    llm: LLM, models: ModelOptions, methods: Sequence[str], required: Collection[str]
) -> tuple[dict[str, Proposer], dict[str, str]]:
    """Return proposers by method, and the reason for each method that does not fit the target.

    Raises ``OutriderError`` if a ``required`` method does not fit.
    """
    from outrider.engine.methods import fitting_proposers

    speculation = replace(llm.speculation, draft=models.draft)
    proposers, reasons = fitting_proposers(speculation, llm.runner, llm.tokenizer, methods)
    for method, reason in reasons.items():
        if method in required:
            raise OutriderError(f"{method}: {reason}")
    return proposers, reasons


def check_lengths(prompts: Iterable[Sequence[int]], llm: LLM, more: int, reserved: str, where: str = "") -> None:
    """Raise ``OutriderError`` for a prompt that exceeds the context with ``more`` tokens, which ``reserved`` describes."""
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) + more > llm.runner.max_len:
            what, context = f"prompt {number}{where} has {len(prompt)} tokens", f"the context of {llm.runner.max_len}"
            raise OutriderError(f"{what}; with {reserved} it exceeds {context}")


def check_source(model: str | None, is_loaded_here: bool = True) -> None:
    """Raise ``OutriderError`` unless ``model`` is a folder, a GGUF file, or a hub id of a model that can be loaded.

    ``is_loaded_here``: as in ``hub.check_repository``.
    """
    if model is None:
        return
    if not hub.is_gguf_id(model):
        hub.refuse_missing(model)
    path = expanded(model)
    if os.path.isdir(path) and not (path / "config.json").is_file() and not list(path.glob("*.gguf")):
        raise OutriderError(not_a_model_folder(model))
    show_notices()
    hub.check_repository(model, is_loaded_here)
    if hub.is_offline(model):
        hub.disable()  # otherwise huggingface_hub, also of another engine that serves the model, retries each file six times


def check_draft(draft: str | None) -> None:
    """Raise ``OutriderError`` unless ``draft`` is a folder, a hub id, or a file of Medusa heads."""
    from outrider.heads.checkpoint import SUFFIXES

    if draft is None or not (os.path.isfile(expanded(draft)) and expanded(draft).suffix in SUFFIXES):
        check_source(draft)


def load(models: ModelOptions, methods: MethodOptions, **more: Any) -> LLM:
    """Load target and draft. ``more`` is passed to ``LLM``."""
    arguments = resolve(models, methods, more.get("drafts")) | more
    _stay_offline(models, [methods.method or ""], arguments["drafts"])
    return _loaded(models.target, arguments)


def load_plain(models: ModelOptions, methods: Iterable[str], **more: Any) -> LLM:
    """Load the target alone, to measure several methods. ``more`` is passed to ``LLM``.

    Passes are compiled by default. Repeated prompts are processed again. ``methods``: those that are loaded later, with the
    draft of ``models``.
    """
    arguments = resolve(replace(models, draft=None), MethodOptions()) | more
    arguments |= {"compile": models.compile or "always", "prefix_cache": False}
    _stay_offline(models, methods, arguments["drafts"])
    return _loaded(models.target, arguments | {"method": PLAIN})


def _loaded(target: str | None, arguments: dict[str, Any]) -> LLM:
    show_notices()
    with loading(f"loading {target or 'the embedded models'}"):
        from outrider.engine.llm import LLM

        return LLM(target, **arguments)


def _stay_offline(models: ModelOptions, methods: Iterable[str], drafts: Mapping[str, Any]) -> None:
    """Disable hub access if the target, the draft and all drafts that the methods name are local folders.

    ``drafts``: sources by name; a head that is already loaded needs no files.
    """
    options = [option for method in methods for option in split_method(method)[1].items()]
    named = [drafts.get(value, value) for name, value in options if is_draft_option(name)]
    sources = [source for source in (models.target, models.draft, *named) if isinstance(source, (str, Path))]
    is_set = "HF_HUB_OFFLINE" in os.environ
    needs_hub = models.download_draft or models.trust_remote_code  # a folder may name another repository for its code
    if not is_set and not needs_hub and all(expanded(source).is_dir() for source in sources):
        hub.disable()


def inflatable(models: ModelOptions) -> Path:
    """Return the target's folder. Raises ``OutriderError`` if it is none on this machine, or its weights are a GGUF file."""
    source = expanded(models.target or TARGET)
    files = weight_files(source)
    if hub.is_gguf_id(models.target) or (files and files[0].suffix == ".gguf"):
        raise OutriderError("--inflate needs a folder with config.json and 16- or 32-bit weights, not a GGUF file")
    if not source.is_dir():
        raise OutriderError("--inflate requires a target in a local folder: download it first and give its folder")
    return source


def inflated_draft(source: str, target: str) -> str:
    """Return a head inflated like the inflated target; other drafts are unchanged."""
    from outrider.bench.inflate_heads import inflated_head
    from outrider.heads.checkpoint import MODEL, kind_of

    source = hub.local_gguf(source)
    return source if kind_of(Path(source)) in (None, MODEL) else str(inflated_head(source, Path(target)))


def inflate_with_heads(
    models: ModelOptions, methods: Iterable[str], arguments: Mapping[str, Any], size: str | None
) -> tuple[ModelOptions, dict[str, Any], dict[str, Any]]:
    """Return options with the target inflated, the arguments of ``LLM`` that name drafts, and the fields for the results.

    Heads of these methods are inflated like the target; draft models are unchanged.
    """
    if size is None:
        return models, {}, {}
    from outrider.bench.inflate import inflated

    source = inflatable(models)
    show_notices()
    target = inflated(source, size)
    note = {"size": size} | json.loads((target / "config.json").read_text())["outrider_inflated"]
    draft, drafts = arguments.get("draft"), arguments["drafts"]
    used: list[object] = []
    for method in methods:
        name, options = split_method(method)
        used += PROPOSERS.get(name).drafts_in(options, draft, drafts)
    large = {source: inflated_draft(source, str(target)) for source in set(map(str, used))}
    shipped = {name: large.get(str(source), source) for name, source in drafts.items()}
    found: dict[str, Any] = {"drafts": large | shipped}
    found |= {} if draft is None else {"draft": large.get(str(draft), draft)}
    return replace(models, target=str(target)), found, {"inflated": note}


@contextmanager
def loading(what: str) -> Iterator[Callable[[str], None]]:
    """Show progress while loading, without transformers' progress bars.

    Afterwards the loaded objects are frozen and garbage collection, which ``cli.app`` disabled, is enabled again.
    """
    with waiting(what) as tell:
        from transformers.utils import logging

        logging.disable_progress_bar()
        yield tell
    gc.freeze()
    gc.enable()


def prepare(llm: LLM, models: ModelOptions) -> None:
    """Compile if requested, and measure a plain pass for the summary if K is fixed; both before timing starts."""
    if models.compile == "always":
        with waiting("compiling"):
            llm.warmup()
    llm.measure_plain_pass()


def streamed(llm: LLM, prompt: str | list[int], params: SamplingParams) -> Generator[Chunk, None, None]:
    """Run ``llm.stream``, with a progress message until the first chunk. Close the iterator to end generation early."""
    stream = llm.stream(prompt, params)
    with waiting("processing the prompt"):
        first = next(stream)
    yield first
    yield from stream
