"""``outrider chat``: hold a conversation through the tokenizer's chat template."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.app import Terminated
from outrider.cli.console import say, say_error
from outrider.cli.generate import stream_to_screen
from outrider.cli.options import MethodOptions, ModelOptions, ReadableOptions, flag, with_groups
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.types import SamplingParams

KEYS = "Ctrl-C stops an answer, Ctrl-D or /exit ends the conversation, /new starts a new one, /help shows this line."
EXAMPLES = f"""Examples:

outrider chat --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B

outrider chat --system "Answer in one sentence." "Why is the sky blue?"

echo "Why is the sky blue?" | outrider chat --target ./my-model

{KEYS}
"""


@with_groups
def command(
    *,
    message: Annotated[str | None, typer.Argument(help="Send one message and exit; - reads standard input.")] = None,
    system: str | None = flag("System message."),
    show: bool = flag("Colour each token: accepted draft, corrected, bonus.", False, "--show"),
    models: ModelOptions,
    methods: MethodOptions,
    sampling: ReadableOptions,
) -> None:
    """Chat with a model. When the context is full, the oldest turns are dropped."""
    from outrider.cli.session import load, prepare, read_prompt, start

    start()
    question = None if _is_interactive(message) else read_prompt(message)
    params = sampling.params()
    llm = load(models, methods, max_batch=1)
    prepare(llm, models)
    history = [{"role": "system", "content": system}] if system else []
    llm.chat_prompt([*history, {"role": "user", "content": "Hello"}])  # fails early for a tokenizer without a chat template
    if question is not None:
        _answer(llm, history, question, params, show)
        return
    first = list(history)
    while (question := _ask()) is not None:
        if question == "/new":
            history = list(first)
        elif question == "/help":
            say(KEYS)
        elif question:
            try:
                _answer(llm, history, question, params, show)
            except OutriderError as error:  # a failed answer must not end the conversation
                say_error(str(error))
            except Terminated:
                raise
            except KeyboardInterrupt:  # ends the answer only
                continue


def _is_interactive(message: str | None) -> bool:
    return message is None and sys.stdin.isatty()


def _ask() -> str | None:
    """Return the next line; None at the end of the conversation, "" after Ctrl-C."""
    with suppress(ImportError):  # readline gives input() line editing and a history; not available everywhere
        import readline  # noqa: F401

    try:
        line = input("> ").strip()
    except EOFError:
        print()
        return None
    except Terminated:
        raise
    except KeyboardInterrupt:
        print()
        return ""
    return None if line in ("/exit", "/quit") else line


def _answer(llm: LLM, history: list[dict[str, str]], question: str, params: SamplingParams, show: bool) -> None:
    """Answer a question and append both to the history. Raises the interrupt that ended the answer early, if any.

    An error leaves the history unchanged: a question that alone exceeds the context must not erase the conversation.
    """
    turns = [*history, {"role": "user", "content": question}]
    prompt = _fitting_prompt(llm, turns, params.max_tokens)
    text, interrupt = stream_to_screen(llm, prompt, params, show)
    history[:] = [*turns, {"role": "assistant", "content": text}]
    if interrupt is not None:
        raise interrupt


def _fitting_prompt(llm: LLM, history: list[dict[str, str]], max_tokens: int) -> list[int]:
    """Return the prompt of the conversation. Deletes the oldest turns, except system messages, until it fits."""
    room = llm.runner.max_len - min(max_tokens, llm.runner.max_len // 2)
    while len(prompt := llm.chat_prompt(history)) > room:
        first = 1 if history[0]["role"] == "system" else 0
        if len(history) <= first + 1:
            break  # a single question that does not fit is refused by the engine
        del history[first : first + 2]
    return prompt
