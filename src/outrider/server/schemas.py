"""Compile JSON schemas to llguidance's grammars. Used by workers, which test a schema, and by the server afterwards.

This module imports neither torch nor transformers, so that a worker starts within 0.1 s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from time import thread_time
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.errors import OutriderError
from outrider.server.formats import Preamble

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# One space, or a newline with an indentation: JSON allows whitespace without end.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"(\n {0,16}| )?"}
TERMINALS = r"""
ANY: /(?s:.*)/
SPACE: /[ \n]{1,8}/
"""
NAMES = re.compile(r"(｜DSML｜|(?!<｜DSML)<[^<>]+>|\[[^\[\]]+\])")  # what may be a special token
MAX_LEXER_STATES = 20_000  # of all outputs of a compiled grammar, 2 kB each; an ordinary schema's outputs need some hundreds
NUM_TRIED = 16  # tokens generated to test a schema
MAX_MASK_SECONDS = 0.1  # processor time per mask in this test; the whole batch waits for a mask
SLOW = "computing the allowed tokens takes too long: simplify the schema"


def unsupported(why: str) -> OutriderError:
    """Return the error for a schema, for the client."""
    return OutriderError(f"unsupported JSON schema: {why}")


def token_table(data: Mapping[str, Any]) -> LLTokenizer:
    """Return llguidance's tokenizer for ``server.prompts.tokenizer_data``. Takes about a second for a large vocabulary."""
    return LLTokenizer(data["tokenizer"], n_vocab=data["vocab_size"], eos_token=list(data["eos_token_ids"]))


def compiled(table: LLTokenizer, schema: str, preamble: Preamble | None = None) -> LLMatcher:
    """Compile a schema given as JSON text, after a preamble. Raises ``OutriderError`` if it is invalid or unsupported.

    llguidance limits neither time nor memory here: testing an intersection of patterns for emptiness takes exponential time.
    """
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
    except ValueError as error:
        raise unsupported(_in_short(str(error))) from None
    if preamble is not None:
        answer = json.loads(grammar)["grammars"][0] | {"name": "answer"}
        grammar = json.dumps({"grammars": [{"lark_grammar": _lark(table, preamble)}, answer]})
    matcher = LLMatcher(table, grammar, log_level=0, limits=limits)
    check(matcher)
    return matcher


def _lark(table: LLTokenizer, preamble: Preamble) -> str:
    """Return a grammar in llguidance's Lark of a preamble and the grammar ``answer``, or a call of a tool."""
    markers = (" ".join(_symbols(table, marker)) for marker in (*preamble.markers, *preamble.calls))
    opening, closing, resumed, heading, *calls = markers
    # The last token of a call's opening may be longer; the tokens that follow it are not restricted.
    answer = f"({' | '.join([f'{heading} @answer', *(f'{call} ANY <[*]>*' for call in calls)])})"
    if not preamble.closing:
        return f"start: SPACE? {answer}{TERMINALS}"
    start = f"reasoning {resumed} SPACE?" if not preamble.opening else f"SPACE? ({opening} reasoning {resumed} SPACE?)?"
    written = json.dumps(preamble.closing)
    if closing == written:  # no token of its own
        reasoning = f"reasoning[suffix={closing}]: ANY"
    else:  # only the token ends it: the reader, who sees text, must not find the marker earlier
        reasoning = f"reasoning: THOUGHTS? {closing}\nTHOUGHTS: /(?s:.+)/ & ~(ANY {written} ANY)"
    return f"start: {start} {answer}\n{reasoning}{TERMINALS}"


def _symbols(table: LLTokenizer, marker: str) -> Iterator[str]:
    """Yield the special tokens and texts of a marker in Lark."""
    for part in filter(None, NAMES.split(marker)):
        special = [token for token in table.tokenize_str(part, parse_special=True) if table.is_special_token(token)]
        yield f"<[{special[0]}]>" if special else json.dumps(part)


def check(matcher: LLMatcher) -> None:
    """Raise ``OutriderError`` if a matcher has exceeded a limit; its masks would allow only the end of the output."""
    if matcher.is_error():
        raise unsupported(_in_short(matcher.get_error()))


def try_out(table: LLTokenizer, schema: str) -> LLMatcher:
    """Compile a schema and generate the first tokens of an output. Raises ``OutriderError`` if that fails or is too slow."""
    matcher = compiled(table, schema)
    for _ in range(NUM_TRIED):
        started = thread_time()
        mask = matcher.compute_logit_bias()
        check(matcher)
        if thread_time() - started > MAX_MASK_SECONDS:
            raise unsupported(SLOW)
        token = mask.find(b"\xc8")  # first allowed token
        if token < 0 or matcher.is_stopped() or not matcher.try_consume_tokens([token]):
            break
        check(matcher)
    return matcher


def _in_short(error: str) -> str:
    """Return the first line of llguidance's message, without the regular expressions in it, or what the lines after it say."""
    first, *rest = error.strip().splitlines() or ["invalid schema"]
    if first.endswith(":") and rest:  # an error in a pattern: the pattern, a marker below it, the reason
        first = f"{first} {rest[-1].strip().removeprefix('error: ')}"
    return re.split(r":\s+\(", first)[0][:200]
