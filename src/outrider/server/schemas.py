"""JSON schemas as llguidance's grammars. Runs in a worker, which tries a schema out, and in the server, which uses it then.

Imports neither torch nor transformers: a worker starts in a tenth of a second.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from time import thread_time
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# A blank, or a new line and how far it is indented: endless blanks would be JSON too.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"(\n {0,16}| )?"}
MAX_LEXER_STATES = 20_000  # of one answer: 2 kB each. Ordinary schemas need some hundreds.
NUM_TRIED = 16  # tokens of an answer that a schema is tried out with
MAX_MASK_SECONDS = 0.1  # of processor time for one of their masks: every request of the batch would wait for it


class SchemaError(ValueError):
    """A schema that cannot be followed; the message is one line for the client."""


def token_table(tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's view of a fast tokenizer, given as the JSON of ``tokenizers``. Takes a second for a large vocabulary."""
    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def compiled(table: LLTokenizer, schema: str) -> LLMatcher:
    """Compiles a schema, given as JSON text. Raises ``SchemaError``.

    Time and memory are not bounded by llguidance: whether an intersection of patterns is empty takes exponentially long.
    """
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
    except ValueError as error:
        raise SchemaError(_in_short(str(error))) from None
    matcher = LLMatcher(table, grammar, log_level=0, limits=limits)
    check(matcher)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raises ``SchemaError`` where a matcher has run into a limit: from then on its masks allow the end of the text only."""
    if matcher.is_error():
        raise SchemaError(_in_short(matcher.get_error()))


def try_out(table: LLTokenizer, schema: str) -> None:
    """Compiles a schema and takes the first steps of an answer. Raises ``SchemaError`` where that fails or is slow."""
    matcher = compiled(table, schema)
    for _ in range(NUM_TRIED):
        started = thread_time()
        mask = matcher.compute_logit_bias()
        check(matcher)
        if thread_time() - started > MAX_MASK_SECONDS:
            raise SchemaError("it takes too long to say which tokens may follow")
        token = mask.find(b"\xc8")  # the first token allowed
        if token < 0 or matcher.is_stopped() or not matcher.try_consume_tokens([token]):
            return
        check(matcher)


def _in_short(error: str) -> str:
    """The first line of a message, without the regular expressions that llguidance shows in it."""
    line = (error.strip().splitlines() or ["it is not valid"])[0]
    return re.split(r":\s+\(", line)[0][:200]
