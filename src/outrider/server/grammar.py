"""Answers of a given form: JSON, or JSON of a schema, by llguidance's grammars.

The grammar says which tokens may follow a text. The sampler masks the others, for drafts and target alike, so whatever is
drafted the answer is of that form, and drawn from what the target says of such answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.types import OutriderError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions
    from transformers import PreTrainedTokenizerBase

# A blank, or a new line and how far it is indented: endless blanks would be JSON too.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"(\n {0,16}| )?"}
NUM_CACHED = 64  # grammars kept compiled


class GrammarCompiler:
    """Makes grammars for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, tuple(eos_token_ids)
        self._known: LLTokenizer | None = None
        self._cached = lru_cache(NUM_CACHED)(self._compiled)

    def json(self, schema: dict[str, Any] | None = None) -> TokenGrammar:
        """Objects, or what a JSON schema allows. Raises ``OutriderError`` for a schema that cannot be followed."""
        return self._cached(json.dumps({"type": "object"} if schema is None else schema))

    def _compiled(self, schema: str) -> TokenGrammar:
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
        matcher = LLMatcher(self._tokens(), grammar, log_level=0)
        if matcher.is_error():
            raise OutriderError(f"the JSON schema cannot be followed: {matcher.get_error().strip().splitlines()[0]}")
        return TokenGrammar(matcher, self._vocab_size, frozenset(self._eos_token_ids))

    def _tokens(self) -> LLTokenizer:
        """The tokenizer as llguidance has it, which takes a second to make."""
        if self._known is None:
            from llguidance.hf import from_tokenizer
            from transformers import PreTrainedTokenizerFast

            if not isinstance(self._tokenizer, PreTrainedTokenizerFast) or not self._eos_token_ids:
                raise OutriderError("answers of a given form need a fast tokenizer with an end-of-text token")
            size = max(self._vocab_size, len(self._tokenizer))
            self._known = from_tokenizer(self._tokenizer, n_vocab=size, eos_token=list(self._eos_token_ids))
        return self._known


class TokenGrammar:
    """One form of answers, for any number of requests."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher, self._vocab_size, self._eos_token_ids = matcher, vocab_size, eos_token_ids

    def matcher(self) -> TokenMatcher:
        """For one more answer."""
        return TokenMatcher(self._matcher.deep_copy(), self._vocab_size, self._eos_token_ids)


class TokenMatcher:
    """How far one answer has come."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher, self._vocab_size, self._eos_token_ids = matcher, vocab_size, eos_token_ids
        self._num_consumed = 0
        self._masks: dict[tuple[int, ...], Tensor | None] = {}  # of this round: draft and target ask for the same ones

    def allowed(self, output: Sequence[int], path: Sequence[int]) -> Tensor | None:
        """See ``types.Matcher``."""
        if len(output) != self._num_consumed:
            if not self._matcher.consume_tokens(list(output[self._num_consumed :])):
                raise OutriderError(f"the grammar cannot go on: {self._matcher.get_error()}")
            self._num_consumed = len(output)
            self._masks.clear()
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._after(key)
        return self._masks[key]

    def _after(self, path: tuple[int, ...]) -> Tensor | None:
        if path and path[-1] in self._eos_token_ids:
            return None
        num_taken = self._matcher.try_consume_tokens(list(path)) if path else 0
        try:
            if num_taken < len(path):
                return None
            mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
            return mask[: self._vocab_size] > 0
        finally:
            if num_taken:
                self._matcher.rollback(num_taken)
