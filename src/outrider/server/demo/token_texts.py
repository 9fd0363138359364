"""Token ids as text, one token at a time. Knows a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.engine.detokenizer import Detokenizer, DetokenizerFactory
from outrider.runner.tokenizers import BROKEN


class TokenTexts:
    """Tokens as text, one by one: within a lane, where a character may need several, and by name."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer, self._prompt = tokenizer, list(prompt)
        self._factory = DetokenizerFactory(tokenizer)
        self._lanes: dict[str, Detokenizer] = {}
        self._names: dict[int, str] = {}

    def next(self, lane: str, token_id: int) -> tuple[str, str]:
        """What the token adds to the lane's text (nothing while a character is incomplete), and its name."""
        if lane not in self._lanes:
            self._lanes[lane] = self._factory(self._prompt)
        return self._lanes[lane].feed([token_id]), self.name(token_id)

    def name(self, token_id: int) -> str:
        """The token on its own: its text, or what the vocabulary calls it where that is none or half a character."""
        if token_id not in self._names:
            alone = self._factory(self._prompt)
            text = alone.feed([token_id]) + alone.flush()
            is_text = text and BROKEN not in text
            self._names[token_id] = text if is_text else str(self._tokenizer.convert_ids_to_tokens(token_id) or "")
        return self._names[token_id]
