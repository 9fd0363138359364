"""Token ids -> text, as they come: never a broken character, never text that a stop string takes back.

Knows a tokenizer and nothing of models, requests or rounds.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from outrider.runner.tokenizers import BROKEN, byte_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT_TOKENS = 6  # of the prompt, so that a leading space is not lost where a tokenizer strips it at the start of a text
MAX_HELD_TOKENS = 16  # held back for an incomplete character; the longest real one takes 4 byte tokens (a joined emoji more)


class Detokenizer(Protocol):
    """One request's incremental decoder."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        ...

    def flush(self) -> str:
        """What is still held back, as a full decode would show it. The last call."""
        ...


class BytesDetokenizer:
    """Byte-level BPE: a table of each token's bytes and UTF-8's own incremental decoder. O(1) a token, no tokenizer calls."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._table
        return self._decode(b"".join([table[token] if token < len(table) else b"" for token in token_ids]))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """Any tokenizer: decodes a short window twice and emits the difference, holding back while the window ends broken."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])  # decoded text, then tokens not yet shown
        self._shown = len(self._window)
        self._shown_text = self._text(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        # One at a time: where a character ends must not depend on how the tokens were grouped into rounds.
        return "".join([self._feed_one(token) for token in token_ids])

    def _feed_one(self, token: int) -> str:
        window = self._window
        window.append(token)
        text = self._text(window)
        if text.endswith(BROKEN) and len(window) - self._shown < MAX_HELD_TOKENS:
            return ""
        new = text[len(self._shown_text) :]
        if new or len(window) - self._shown >= MAX_HELD_TOKENS:
            # The tokens just shown become the context of the next ones, and what stood before them is dropped.
            del window[: self._shown]
            self._shown = len(window)
            self._shown_text = self._text(window)
        return new

    def flush(self) -> str:
        return self._text(self._window)[len(self._shown_text) :]

    def _text(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)


class DetokenizerFactory:
    """Makes each request's detokenizer; what all of them share is computed once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._table = byte_table(tokenizer)

    def __call__(self, prompt_ids: Sequence[int]) -> Detokenizer:
        if self._table is not None:
            return BytesDetokenizer(self._table)
        return WindowDetokenizer(self._tokenizer, prompt_ids)


class StopScanner:
    """Finds stop strings across chunks: shows only text that no stop string can take back any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped_by: str | None = None

    def feed(self, text: str) -> str:
        """The part of the text so far that is safe to show; ``stopped_by`` is set once a stop string is complete."""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        keep = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of the text with which the stop string begins."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
