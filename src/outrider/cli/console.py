"""What the commands share on the screen: text goes to stdout, everything about it to stderr."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.text import Text

if TYPE_CHECKING:
    from rich.status import Status

    from outrider.engine import LLM, Chunk, GenerationStats
    from outrider.engine.detokenizer import Detokenizer

STYLES = {"accepted": "green", "corrected": "bold yellow", "bonus": "cyan", "plain": ""}
CODES = {"accepted": "32", "corrected": "1;33", "bonus": "36", "plain": "0"}  # the same for a terminal
err = Console(stderr=True, highlight=False)


def say_error(what: str) -> None:
    """One line for what went wrong and ends nothing. Names of files and words of others are no markup."""
    err.print(Text.assemble(("error:", "red"), " ", what), soft_wrap=True)


@contextmanager
def waiting(what: str) -> Iterator[Status | None]:
    """Says what is being waited for: a spinner on a terminal, one line elsewhere."""
    if err.is_terminal:
        started = monotonic()
        with err.status(Text(f"{what} ...")) as status:
            yield status
        if monotonic() - started > 2:
            err.print(Text(f"{what}: {monotonic() - started:.1f} s", style="dim"))
    else:
        err.print(Text(f"{what} ..."), soft_wrap=True)
        yield None


class _Notices(logging.Handler):
    """Puts what the package logs on the screen as one dim line: it says what is being waited for."""

    def emit(self, record: logging.LogRecord) -> None:
        err.print(f"[dim]{escape(record.getMessage())}[/]")


def show_notices() -> None:
    """Shows what Outrider logs while it works: compiling, a proposer that failed."""
    logger = logging.getLogger("outrider")
    if not any(isinstance(handler, _Notices) for handler in logger.handlers):
        logger.addHandler(_Notices())
        logger.setLevel(logging.INFO)
        logger.propagate = False


def legend() -> Text:
    """What the colours of ``--show`` mean."""
    return Text.assemble(
        ("accepted draft", STYLES["accepted"]), " · ", ("corrected", STYLES["corrected"]), " · ", ("bonus", STYLES["bonus"]),
        " · plain", style="dim",
    )  # fmt: skip


class TokenPainter:
    """Colours streamed text by where each token came from, whatever the size of the chunks it comes in."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._pieces: list[tuple[str, str]] = []  # text not yet shown, and its colour

    def paint(self, chunk: Chunk) -> str:
        """The chunk's text with terminal colours; the text itself is left as it is, tabs and control characters too."""
        for token, origin in zip(chunk.token_ids, chunk.origins, strict=True):
            piece = self._detokenizer.feed([token])
            if piece:
                self._pieces.append((piece, CODES[origin]))
        painted, left = "", chunk.text
        while left:
            piece, code = self._pieces.pop(0) if self._pieces else (left, CODES["plain"])
            shown, rest = left[: len(piece)], piece[len(left) :]
            painted += f"\x1b[{code}m{shown}\x1b[0m"
            left = left[len(shown) :]
            if rest:
                self._pieces.insert(0, (rest, code))
        return painted


def painter_for(llm: LLM) -> TokenPainter | None:
    """A painter for the next stream; None where there is no tokenizer."""
    from outrider.engine.detokenizer import DetokenizerFactory

    return TokenPainter(DetokenizerFactory(llm.tokenizer)(())) if llm.tokenizer is not None else None


def summary(stats: GenerationStats, seconds: float) -> Text:
    """What a user wants to know at the end: speed, acceptance, where the time went, what plain decoding would have done."""
    lines = [f"{stats.num_tokens} tokens in {seconds:.2f} s, {stats.tok_s:.1f} tok/s"]
    plain = stats.plain_tok_s
    if stats.num_drafts:
        if plain is not None:
            lines[0] += f"; plain decoding: about {plain:.1f} tok/s (x{stats.tok_s / plain:.2f})"
        lines.append(
            f"{stats.mean_acceptance_length:.2f} tokens per target pass; {stats.acceptance_rate:.0%} of the drafts looked at "
            f"were accepted; {stats.num_rounds} rounds"
        )
    total = stats.times.total
    if total:
        shares = stats.times.by_phase()
        shares["other"] = shares.pop("host")
        shares["draft"] += shares.pop("draft_prefill")
        if not stats.times.read:  # a short prompt is read with the first score
            del shares["read"]
        lines.append("time: " + ", ".join(f"{name} {part:.2f} s ({part / total:.0%})" for name, part in shares.items()))
    if stats.faults:
        lines.append(f"the proposer failed {stats.faults} time(s); plain decoding went on (--debug tells more)")
    return Text("\n".join(lines), style="dim")
