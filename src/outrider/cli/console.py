"""Terminal output shared by the commands: generated text goes to stdout, everything else to stderr."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING

from rich.color import ColorSystem
from rich.style import Style
from rich.text import Text

from outrider.cli.options import in_flags
from outrider.progress import PERIOD, console, reported_every

if TYPE_CHECKING:
    from outrider.engine.detokenizer import Detokenizer
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import Chunk, Emission
    from outrider.engine.stats import GenerationStats

STYLES = {"accepted": "green", "corrected": "bold yellow", "bonus": "cyan", "grammar": "magenta", "plain": ""}
err = console()


def say_error(what: str) -> None:
    """Print a non-fatal error as one line, without interpreting markup."""
    err.print(Text.assemble(("error:", "red"), " ", in_flags(what)), soft_wrap=True)


# The terminal on stderr: the spinner, its first text, and the time of the last line.
_screen = SimpleNamespace(spinner=None, waits_for=Text(), changed=0.0)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Show that ``what`` is running: a spinner on a terminal, a line every few seconds elsewhere.

    Yields a function that changes the spinner's text.
    """
    started, begun = monotonic(), Text(f"{what} ...")
    if err.is_terminal:
        with err.status(begun) as status:
            _screen.spinner, _screen.waits_for = status, begun
            try:
                yield lambda text: status.update(Text(text))
            finally:
                _screen.spinner = None
        if monotonic() - started > 2:
            say(f"{what}: {monotonic() - started:.1f} s")
    else:
        say(begun.plain)

        def tick(elapsed: float) -> None:
            if monotonic() - _screen.changed >= PERIOD + 0.5:  # otherwise other progress messages appear
                say(f"{what} ... {elapsed:.0f} s ...")

        with reported_every(0.5, tick):
            yield lambda text: None


def say(line: str) -> None:
    """Print a note as a dim line, without interpreting markup."""
    err.print(Text(line, style="dim"), soft_wrap=True)
    _screen.changed = monotonic()


class _Notices(logging.Handler):
    """Logging handler that prints each message as a dim line, with its traceback, and progress as the spinner's text."""

    def emit(self, record: logging.LogRecord) -> None:
        spinner, message = _screen.spinner, in_flags(record.getMessage())
        if record.exc_info:
            message += "\n" + logging.Formatter().formatException(record.exc_info)
        if spinner is None:
            say(message)
        elif getattr(record, "is_progress", False):
            spinner.update(Text(message))
        else:
            say(message)
            spinner.update(_screen.waits_for)


def show_notices() -> None:
    """Show Outrider's log messages, such as compilation or a failed proposer, on stderr."""
    logger = logging.getLogger("outrider")
    if not any(isinstance(handler, _Notices) for handler in logger.handlers):
        logger.addHandler(_Notices())
        logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))  # --debug sets a lower one
        logger.propagate = False


def legend() -> Text:
    """Return the legend of ``--show``."""
    return Text.assemble(
        ("accepted draft", STYLES["accepted"]), " · ", ("corrected", STYLES["corrected"]), " · ", ("bonus", STYLES["bonus"]),
        " · ", ("grammar", STYLES["grammar"]), " · plain", style="dim",
    )  # fmt: skip


class TokenPainter:
    """Split streamed text into pieces by the origin of their tokens, for chunks of any size."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._pieces: list[tuple[str, str]] = []  # text that was not returned yet, with its origin

    def pieces(self, chunk: Chunk | Emission) -> list[tuple[str, str]]:
        """Return the chunk's text as (text, origin) pieces; origins are keys of ``STYLES``."""
        for token, origin in zip(chunk.token_ids, chunk.origins, strict=True):
            piece = self._detokenizer.feed([token])
            if piece:
                self._pieces.append((piece, origin))
        found, left = [], chunk.text
        while left:
            piece, origin = self._pieces.pop(0) if self._pieces else (left, "plain")
            shown, rest = left[: len(piece)], piece[len(left) :]
            found.append((shown, origin))
            left = left[len(shown) :]
            if rest:
                self._pieces.insert(0, (rest, origin))
        return found

    def paint(self, chunk: Chunk) -> str:
        """Return the chunk's text with terminal colours; the text itself is unchanged, control characters included."""
        styled = ((piece, Style.parse(STYLES[origin])) for piece, origin in self.pieces(chunk))
        return "".join(style.render(piece, color_system=ColorSystem.STANDARD) for piece, style in styled)


def painter_for(llm: LLM) -> TokenPainter | None:
    """Return a painter for one stream, or None without a tokenizer."""
    from outrider.engine.detokenizer import DetokenizerFactory

    return TokenPainter(DetokenizerFactory(llm.tokenizer)(())) if llm.tokenizer is not None else None


def summary(stats: GenerationStats, seconds: float) -> Text:
    """Return the summary: speed, acceptance, time by phase, and predicted speed of plain decoding."""
    lines = [f"{stats.num_tokens} tokens in {seconds:.2f} s, {stats.tok_s:.1f} tok/s"]
    plain = stats.plain_tok_s
    if stats.num_drafts or stats.num_grammar_tokens:
        if plain is not None:
            lines[0] += f"; plain decoding: about {plain:.1f} tok/s (x{stats.tok_s / plain:.2f})"
        parts = [f"{stats.tokens_per_round:.2f} tokens per target pass"]
        if stats.acceptance_rate is not None:
            parts.append(f"{stats.acceptance_rate:.0%} of the drafts reached were accepted")
        if stats.num_grammar_tokens:
            parts.append(f"{stats.num_grammar_tokens} tokens drafted by the grammar")
        lines.append("; ".join([*parts, f"{stats.num_rounds} rounds"]))
    total = stats.times.total
    if total:
        shares = stats.times.by_phase()
        shares["other"] = shares.pop("host")
        shares["draft"] += shares.pop("draft_prefill")
        if not stats.times.prefill:  # the first score includes the prefill of a short prompt
            del shares["prefill"]
        lines.append("time: " + ", ".join(f"{name} {part:.2f} s ({part / total:.0%})" for name, part in shares.items()))
    if stats.faults:
        lines.append(f"drafting failed {stats.faults} time(s); plain decoding continued (use --debug for details)")
    return Text("\n".join(lines), style="dim")
