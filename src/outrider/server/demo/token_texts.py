"""Decode token ids one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.engine.detokenizer import Detokenizer, DetokenizerFactory
from outrider.runner.tokenizers import BROKEN


class TokenTexts:
    """Decode tokens within a lane, where a character may span several tokens, or alone as a name."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer, self._prompt = tokenizer, list(prompt)
        self._factory = DetokenizerFactory(tokenizer)
        self._lanes: dict[str, Detokenizer] = {}
        self._names: dict[int, str] = {}

    def next(self, lane: str, token_id: int) -> tuple[str, str]:
        """Return the text that the token adds to the lane (empty for an incomplete character), and the token's name."""
        if lane not in self._lanes:
            self._lanes[lane] = self._factory(self._prompt)
        return self._lanes[lane].feed([token_id]), self.name(token_id)

    def name(self, token_id: int) -> str:
        """Return the token's own text, or its vocabulary entry if the text is empty or an incomplete character."""
        if token_id not in self._names:
            alone = self._factory(self._prompt)
            text = alone.feed([token_id]) + alone.flush()
            is_text = text and BROKEN not in text
            self._names[token_id] = text if is_text else str(self._tokenizer.convert_ids_to_tokens(token_id) or "")
        return self._names[token_id]
