"""Incremental detokenization: never emits an incomplete character or text that a stop string removes."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from outrider.runner.tokenizers import BROKEN, ByteTable, byte_table, special_ids, strips_first_space

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT_TOKENS = 6  # prompt tokens decoded before the output: otherwise some tokenizers strip its leading space
MAX_HELD_TOKENS = 16  # tokens held back for an incomplete character, which has up to 4 byte tokens (a joined emoji more)


class Detokenizer(Protocol):
    """One request's incremental decoder."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text completed by these tokens."""
        ...

    def flush(self) -> str:
        """Return the text still held back, as a full decode does. Must be the last call."""
        ...


class BytesDetokenizer:
    """A table of token bytes and an incremental UTF-8 decoder. O(1) per token; the tokenizer is asked once for each."""

    def __init__(self, table: Mapping[int, bytes], strips_space: bool = False) -> None:
        """``strips_space``: whether the text loses a space with which it begins."""
        self._table, self._strips_space = table, strips_space
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._table
        text = self._decode(b"".join([table[token] for token in token_ids]))
        if self._strips_space and text:
            text, self._strips_space = text.removeprefix(" "), False
        return text

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """Any tokenizer: decode a window with and without new tokens and emit the difference, unless a character is incomplete."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        dropped: Collection[int] = (),
    ) -> None:
        """``dropped``: tokens that are not part of the text."""
        self._tokenizer, self._skips_special, self._dropped = tokenizer, skip_special_tokens, dropped
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])  # context tokens, then tokens not emitted yet
        self._shown = len(self._window)
        self._shown_text = self._text(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        # One token at a time: the result must not depend on how tokens were grouped into rounds.
        return "".join([self._feed_one(token) for token in token_ids])

    def _feed_one(self, token: int) -> str:
        window = self._window
        window.append(token)
        text = self._text(window)
        if text.endswith(BROKEN) and len(window) - self._shown < MAX_HELD_TOKENS:
            return ""
        new = text[len(self._shown_text) :]
        if new or len(window) - self._shown >= MAX_HELD_TOKENS:
            # The emitted tokens become the context of the next ones; earlier context is dropped.
            del window[: self._shown]
            self._shown = len(window)
            self._shown_text = self._text(window)
        return new

    def flush(self) -> str:
        return self._text(self._window)[len(self._shown_text) :]

    def _text(self, token_ids: list[int]) -> str:
        shown = [token for token in token_ids if token not in self._dropped]
        text = self._tokenizer.decode(shown, skip_special_tokens=self._skips_special, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)


class DetokenizerFactory:
    """Creates each request's detokenizer; shared tables are computed once. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._special = tokenizer, frozenset(special_ids(tokenizer))
        self._table, self._strips_space = byte_table(tokenizer), strips_first_space(tokenizer)
        self._tables: dict[frozenset[int], ByteTable] = {}  # with the names of these special tokens

    def __call__(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool = True, delimiters: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """``delimiters``: special tokens that are never skipped."""
        shown = delimiters if skip_special_tokens else self._special
        if self._table is None:
            return WindowDetokenizer(self._tokenizer, prompt_ids, not shown, self._special - shown if shown else ())
        table = self._tables.get(shown)
        if table is None:
            table = byte_table(self._tokenizer)  # not a copy: another thread may add tokens to the common one
            assert table is not None
            table.update({token: str(self._tokenizer.convert_ids_to_tokens(token)).encode() for token in shown})
            self._tables[shown] = table  # once it is complete: another thread may read it
        begins = self._strips_space and not BytesDetokenizer(self._table).feed(prompt_ids[-CONTEXT_TOKENS:])
        return BytesDetokenizer(table, strips_space=begins)


class StopScanner:
    """Finds stop strings across chunks. Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str], keeps_stop: bool = False) -> None:
        """``keeps_stop``: whether the stop string is part of the text that it ends."""
        self._stops, self._keeps_stop = tuple(stops), keeps_stop
        self.held = ""  # text that may be the beginning of a stop string
        self.stopped_by: str | None = None

    def feed(self, text: str, may_stop: bool = True) -> str:
        """Return the text that is safe to emit; ``stopped_by`` is set when ``text`` completes a stop string and may stop."""
        old, text = len(self.held), self.held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop, max(old + 1 - len(stop), 0))) >= 0]
        if found and may_stop:
            at, self.stopped_by = min(found)
            self.held = ""
            return text[: at + len(self.stopped_by) if self._keeps_stop else at]
        keep = max(self._overlap(text, stop) for stop in self._stops)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Return the length of the longest suffix of the text that is a prefix of the stop string."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
