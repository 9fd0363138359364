"""Prompts of benchmarks: built-in workloads or the user's file.

The built-in prompts were written for Outrider. They are texts to continue, so that base models can be measured too. Those of
``chat`` are messages and use the tokenizer's chat template, if any.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from outrider.bench.workload_names import known_workload
from outrider.chat import for_template
from outrider.engine.prompts import chat_ids, takes_tools, template_of
from outrider.engine.templates import OWN_VARIABLES, requested_variables
from outrider.errors import check_text, errors_as, without_path
from outrider.files import READ_ERRORS, open_text
from outrider.types import OutriderError

Item = TypeVar("Item")
logger = logging.getLogger(__name__)

SEPARATOR = "\n%%\n"
ONE_PER_LINE = "expected one JSON object per line"
CHAT = "chat"
SPEC_BENCH_TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")  # besides MT-bench's questions
# Begins the turns of SPEED-Bench that its published rows omit, because a licence forbids copies: TURNS_PLACEHOLDER of
# NVIDIA/Model-Optimizer, examples/specdec_bench/specdec_bench/datasets/speed.py at 12d434e (read on 2026-12-01).
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
Message = Mapping[str, Any]  # {"role", "content"}, and "tool_calls" of an assistant
# Fields of a message that its prompt keeps.
MESSAGE_FIELDS = ("role", "content", "name", "reasoning_content", "reasoning", "tool_calls", "tool_call_id")
Read = Callable[[Mapping[str, Any], str], "Prompt"]  # (object of a line, workload) -> prompt


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a conversation to answer."""

    workload: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()  # that the answer may call, in OpenAI's format
    variables: Mapping[str, Any] = field(default_factory=dict)  # for the chat template

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)


def builtin(workload: str, num_prompts: int | None = None) -> list[Prompt]:
    """Return the first ``num_prompts`` (default: all) built-in prompts. Raises ``OutriderError`` for an unknown workload."""
    folder = files("outrider.bench").joinpath("prompts")
    if known_workload(workload) == CHAT:
        lines = folder.joinpath(f"{CHAT}.jsonl").read_text(encoding="utf-8").splitlines()
        return [Prompt(CHAT, messages=tuple(json.loads(line)["messages"])) for line in lines][:num_prompts]
    text = folder.joinpath(f"{workload}.txt").read_text(encoding="utf-8")
    return [Prompt(workload, item.rstrip("\n")) for item in text.split(SEPARATOR)][:num_prompts]


def grouped(path: Path | None, names: Sequence[str], most: int) -> dict[str, list[Prompt]]:
    """Return workload -> its first ``most`` prompts: of a JSONL file, or without one of the built-in workloads ``names``."""
    prompts = [each for name in names for each in builtin(name)] if path is None else from_file(path)
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        group = found.setdefault(prompt.workload, [])
        if len(group) < most:
            group.append(prompt)
    return found


def interleaved(kinds: Sequence[Sequence[Item]]) -> list[Item]:
    """Return the items in turn from each kind that has more."""
    return [kind[turn] for turn in range(max(map(len, kinds))) for kind in kinds if turn < len(kind)]


def from_file(path: str | Path, num_prompts: int | None = None) -> list[Prompt]:
    """Read prompts of a JSONL file, plain or gzipped; the fields of a line determine its format.

    - ``task_id`` and ``prompt``: HumanEval, code to continue
    - ``question`` and ``answer``: GSM8K, a question to answer
    - ``problem`` and ``answer``: MATH-500, a problem to solve
    - ``test_list`` with ``text`` or ``prompt``: MBPP, a function to write
    - ``category``, ``src_id`` and ``turns`` or ``messages``: SPEED-Bench (arXiv 2604.09557), whose categories are the workloads
    - ``category`` and ``turns``: MT-bench, or one of Spec-Bench's tasks; with ``prompt_id`` and ``prompt``: MT-bench
    - ``messages``, ``turns`` or ``question``: a conversation, the first of the turns, a question
    - ``prompt``: a text to continue

    Of several turns the first is used. The workload is the benchmark's name, or else the file's; ``workload`` in a line
    overrides it. Raises ``OutriderError`` with the line number for lines of other formats.
    """
    return [prompt for prompt, _ in entries(Path(path), num_prompts)]


def entries(
    path: Path,
    most: int | None = None,
    unwrap: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    may_skip: Callable[[dict[str, Any]], bool] = lambda line: False,
) -> list[tuple[Prompt, dict[str, Any]]]:
    """Read prompts like ``from_file``, each with all fields of its line.

    ``unwrap`` extracts them from a line's object, or raises ``Refused``. Where ``may_skip`` is true for the object, a refused
    line is skipped with a warning, unless no other line contains a prompt.
    """
    name = path.name.split(".")[0]
    found: list[tuple[Prompt, dict[str, Any]]] = []
    skipped: list[str] = []
    for number, line in _lines(path):
        if len(found) == most:
            break
        if not line.strip():
            continue
        given: dict[str, Any] | None = None
        try:
            given = _object(line.strip())
            item = unwrap(given)
            found.append((_prompt(item, name), item))
        except Refused as refused:
            skipped.append(f"line {number}: {refused}")
            if given is None or not may_skip(given):
                raise OutriderError(f"{path}, {skipped[-1]}") from None
    if not found:
        raise OutriderError(f"{path}, {skipped[0]}" if skipped else f"{path} contains no prompts")
    if skipped:
        logger.warning(
            "%s: skipped %d of %d requests; the first is %s", path, len(skipped), len(skipped) + len(found), skipped[0]
        )
    return found


class Refused(Exception):
    """Reason why a line is not a prompt."""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with errors_as(f"cannot read {path}", *READ_ERRORS, detail=without_path), open_text(path) as file:
        yield from enumerate(file, start=1)


def _object(line: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise Refused(f"invalid JSON: {error.msg} at character {error.pos + 1}: {ONE_PER_LINE}") from None
    except (ValueError, RecursionError):
        raise Refused("unreadable JSON: a number is too long or nesting too deep") from None
    if not isinstance(item, dict):
        raise Refused(f"not a JSON object: {ONE_PER_LINE}")
    return item


def _prompt(item: Mapping[str, Any], file_name: str) -> Prompt:
    for needed, workload_of, read in FORMATS:
        if needed <= item.keys():
            workload = item.get("workload", workload_of(item) or file_name)
            if not isinstance(workload, str):
                raise Refused('"workload" must be a string')
            return read(item, workload)
    fields = ", ".join(map(json.dumps, item)) or "nothing"
    raise Refused(f'expected "prompt", "turns", "messages" or "question", got {fields}')


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise Refused(f"{name} must be a non-empty string")
    try:
        check_text(value)
    except OutriderError as error:
        raise Refused(f"{name}: {error}") from None
    return value


def _continued(item: Mapping[str, Any], workload: str) -> Prompt:
    return Prompt(workload, _text(item["prompt"], '"prompt"'))


def _asked(field: str) -> Read:
    """Return the reader of a format in which ``field`` is a question."""

    def read(item: Mapping[str, Any], workload: str) -> Prompt:
        return Prompt(workload, messages=({"role": "user", "content": _text(item[field], f'"{field}"')},))

    return read


def _first_of(field: str) -> Read:
    """Return the reader of a format in which ``field`` lists the turns of a user."""

    def read(item: Mapping[str, Any], workload: str) -> Prompt:
        turns = item[field]
        if not isinstance(turns, list) or not turns:
            raise Refused(f'"{field}" must be a non-empty list of strings')
        text = _text(turns[0], f'the first of "{field}"')
        return Prompt(workload, messages=({"role": "user", "content": text},))

    return read


def _speed_bench(item: Mapping[str, Any], workload: str) -> Prompt:
    """Read a line of SPEED-Bench: with turns, as published, or one message per turn, as NeMo-Skills writes it.

    See nemo_skills/dataset/speed-bench/prepare.py of NVIDIA-NeMo/Skills at aeda1da (read on 2026-12-01): every message is the
    user's.
    """
    if "turns" in item:
        found = _first_of("turns")(item, workload)
    else:
        found = _conversation({"messages": item["messages"]}, workload)
        first = next((i for i, message in enumerate(found.messages) if message["role"] == "user"), len(found.messages) - 1)
        found = replace(found, messages=found.messages[: first + 1])
    if PLACEHOLDER in str(found.messages[-1].get("content")):
        raise Refused("the published file lacks this prompt: prepare it with NeMo-Skills' speed-bench/prepare.py")
    return found


def _conversation(item: Mapping[str, Any], workload: str) -> Prompt:
    messages = item["messages"]
    if not isinstance(messages, list) or not messages:
        raise Refused('"messages" must be a non-empty list of messages')
    tools = [] if item.get("tool_choice") == "none" else item.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused('"tools" must be a list of tools as in OpenAI\'s API')
    given = item.get("chat_template_kwargs") or {}
    if not isinstance(given, dict) or not given.keys().isdisjoint(OWN_VARIABLES):
        raise Refused(f'"chat_template_kwargs" must be an object without {", ".join(OWN_VARIABLES)}')
    variables = requested_variables(item.get("reasoning_effort"), item.get("verbosity"), given)
    found = Prompt(workload, messages=tuple(map(_message, messages)), tools=tuple(tools), variables=variables)
    for name, value in (('"messages"', found.messages), ('"tools"', tools), ("a variable of the template", variables)):
        _text(json.dumps(value, ensure_ascii=False), name)
    return found


def _message(message: Any) -> Message:
    """Return a message for a chat template."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused('every message needs "role" and "content"')
    try:
        return for_template({name: message[name] for name in MESSAGE_FIELDS if message.get(name) is not None})
    except OutriderError as error:
        raise Refused(str(error)) from None


def _task(item: Mapping[str, Any]) -> str:
    """Map MT-bench's eight categories to one task, as in Spec-Bench's evaluation."""
    category = item["category"]
    return category if category in SPEC_BENCH_TASKS else "mt-bench"


def _name_of_list(item: Mapping[str, Any]) -> str:
    return "" if isinstance(item["prompt"], str) else "mt-bench"


def _listed_or_text(item: Mapping[str, Any], workload: str) -> Prompt:
    """Read a line of the hub's MT-bench, whose prompts are lists of turns, or of other files with the same fields."""
    return (_continued if isinstance(item["prompt"], str) else _first_of("prompt"))(item, workload)


# Identifying fields, workload name ("": the file's) and reader of each format; the first match is used.
Format = tuple[frozenset[str], Callable[[Mapping[str, Any]], str], Read]
FORMATS: tuple[Format, ...] = (
    (frozenset({"test_list", "text"}), lambda item: "mbpp", _asked("text")),
    (frozenset({"test_list", "prompt"}), lambda item: "mbpp", _asked("prompt")),
    (frozenset({"task_id", "prompt"}), lambda item: "humaneval", _continued),
    (frozenset({"question", "answer"}), lambda item: "gsm8k", _asked("question")),
    (frozenset({"problem", "answer"}), lambda item: "math-500", _asked("problem")),
    (frozenset({"turns", "category", "src_id"}), lambda item: item["category"], _speed_bench),
    (frozenset({"messages", "category", "src_id"}), lambda item: item["category"], _speed_bench),
    (frozenset({"turns", "category"}), _task, _first_of("turns")),
    (frozenset({"messages"}), lambda item: "", _conversation),
    (frozenset({"prompt", "category", "prompt_id"}), _name_of_list, _listed_or_text),
    (frozenset({"turns"}), lambda item: "", _first_of("turns")),
    (frozenset({"prompt"}), lambda item: "", _continued),
    (frozenset({"question"}), lambda item: "", _asked("question")),
)


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the prompt's token ids; a chat without a template becomes a plain dialogue, without tools.

    Raises ``OutriderError`` without a tokenizer, and if its template rejects the conversation.
    """
    if tokenizer is None:
        raise OutriderError("the target has no tokenizer, so prompts cannot be encoded: use a target with one")
    if not prompt.is_chat:
        return list(tokenizer(prompt.text)["input_ids"])
    if getattr(tokenizer, "chat_template", None):
        tools = prompt.tools if takes_tools(template_of(tokenizer, with_tools=True)) else ()
        return chat_ids(tokenizer, [dict(message) for message in prompt.messages], tools, prompt.variables)
    return list(tokenizer(as_text(prompt))["input_ids"])


def encode_all(tokenizer: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the prompts' token ids (see ``encode``). Raises ``OutriderError`` for a prompt without tokens."""
    found = [encode(tokenizer, prompt) for prompt in prompts]
    if [] in found:
        raise OutriderError(f"prompt {found.index([]) + 1} is empty after tokenization")
    return found


def as_text(prompt: Prompt) -> str:
    """Return the prompt as a text to continue; a chat becomes a plain dialogue."""
    if not prompt.is_chat:
        return prompt.text
    prefixes = {"user": "Question: ", "assistant": "Answer: "}
    turns = [prefixes.get(message["role"], "") + message["content"] for message in prompt.messages]
    return "\n\n".join([*turns, "Answer:"])
