"""Structured output: any JSON object, or JSON that matches a schema, with llguidance's grammars.

A grammar gives the set of allowed next tokens. The sampler masks all others in the distributions of draft and target, so
outputs match the schema and follow the target's distribution restricted to allowed tokens.

Schemas come from untrusted clients and can be expensive. Their size is limited; a worker process compiles each one first,
with time and memory limits; and the total time for the masks of one output is limited.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from time import thread_time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.engine.queue import exceeds_share
from outrider.server import schemas
from outrider.server.bridge import Busy, Stopping
from outrider.server.formats import Preamble
from outrider.server.parameters import levels
from outrider.server.pool import WorkerPool
from outrider.types import OutriderError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from outrider.server.config import Client, ServerConfig
    from outrider.server.prompts import InThread

ANY_OBJECT = '{"type": "object"}'
MAX_KEPT = 1 << 19  # total characters of cached schemas; an ordinary grammar takes some hundred bytes per character
MAX_GRAMMARS = 64  # in memory, cached or in use: combinations of alternatives take up to 30 MB for 1000 characters
MAX_CACHED = MAX_GRAMMARS // 2
MAX_NEW = 8  # of these, not requested again yet: a stream of schemas that all differ must not evict those in use
# Outputs of one grammar share the lexer's states, whose number is limited: after so many it is compiled again, and a limit that
# an output exceeds is the schema's own fault only among the first few.
MAX_OUTPUTS, FEW_OUTPUTS = 128, 8
CHOICES = ("anyOf", "oneOf", "allOf")
# Seconds for the masks of one output: a budget plus an allowance per mask. Most take 0.1 ms, the first ones several ms.
MASKS_SECONDS, SECONDS_A_MASK = 0.5, 0.001


def schema_text(schema: dict[str, Any], config: ServerConfig) -> str:
    """Return the schema as JSON text. Raises ``OutriderError`` if it exceeds the server's limits."""
    num_values, deepest = -1, config.max_schema_depth  # without the schema itself
    for depth, level in enumerate(levels(schema)):
        num_values += len(level)
        if num_values > config.max_schema_values:
            raise OutriderError(f"the JSON schema has more than {config.max_schema_values} values: give a smaller one")
        if depth > deepest and any(isinstance(value, (dict, list)) for value in level):
            raise OutriderError(f"the JSON schema is nested more than {deepest} levels deep: give a flatter one")
        pairs = [pair for value in level if isinstance(value, dict) for pair in value.items()]
        for key, choices in pairs:
            if key in CHOICES and isinstance(choices, list) and len(choices) > config.max_schema_choices:
                most = config.max_schema_choices
                raise OutriderError(f"the JSON schema has {len(choices)} alternatives in one {key}: give at most {most}")
    return json.dumps(schema)


class GrammarCompiler:
    """Compile grammars for one tokenizer, without time or memory limits. For schemas of clients use ``Grammars``."""

    def __init__(self, data: Mapping[str, Any] | None) -> None:
        """``data``: of ``server.prompts.tokenizer_data``."""
        self._data = data
        self._table: LLTokenizer | None = None

    def json(self, schema: dict[str, Any] | None = None) -> TokenGrammar:
        """Return the grammar of JSON objects, or of a JSON schema. Raises ``OutriderError`` for an unsupported schema."""
        return self.compiled(ANY_OBJECT if schema is None else json.dumps(schema))

    def compiled(self, schema: str, preamble: Preamble | None = None) -> TokenGrammar:
        """Return the grammar of a schema in JSON text, after a preamble. Raises ``OutriderError`` if it is unsupported."""
        data = self.checked()
        matcher = schemas.compiled(self.table(), schema, preamble)
        return TokenGrammar(matcher, data["mask_size"], frozenset(data["eos_token_ids"]))

    def table(self) -> LLTokenizer:
        """Return the table of the tokens, which takes a second to build for a large vocabulary."""
        if self._table is None:
            self._table = schemas.token_table(self.checked())
        return self._table

    def checked(self) -> Mapping[str, Any]:
        """Return the tokenizer data. Raises ``OutriderError`` if the tokenizer does not support grammars."""
        if self._data is None or not self._data["eos_token_ids"]:
            raise OutriderError(
                "structured output is not available for this model: it requires a fast tokenizer with an end-of-sequence token"
            )
        return self._data


class NoRoom(Busy):
    """There is no room for a compiled grammar, in memory or in its client's share."""


class Grammars:
    """Cache of compiled grammars. Each new schema is tested in a worker process first. For one event loop's thread."""

    def __init__(self, data: Mapping[str, Any] | None, config: ServerConfig, in_compiler_thread: InThread) -> None:
        """``in_compiler_thread`` runs a function in a thread for nothing else: compiling may take as long as the worker may."""
        self._compiler, self._config = GrammarCompiler(data), config
        self._in_compiler_thread = in_compiler_thread
        self._kept: OrderedDict[str, TokenGrammar] = OrderedDict()  # by preamble and schema, as all that follow
        self._in_memory: WeakKeyDictionary[TokenGrammar, str] = WeakKeyDictionary()  # -> queue key of its first client
        self._refused: OrderedDict[str, str] = OrderedDict()  # -> reason
        self._under_way: dict[str, tuple[asyncio.Task[TokenGrammar], str]] = {}  # -> task, queue key of its first client
        self._max_bytes = int(config.worker_memory * 2**30)  # of all grammars, as of one in a worker
        self._compiling = asyncio.Lock()  # between the check of the memory and the entry in ``_in_memory``
        limits = {"seconds": config.schema_timeout, "memory": self._max_bytes, "nice": 10, "for_texts": False}
        self.pool = WorkerPool("compile a JSON schema", {**(data or {}), **limits}, config.workers, eager=False)

    async def get(self, schema: dict[str, Any] | None, client: Client, preamble: Preamble | None = None) -> TokenGrammar:
        """Return the grammar of a schema, or of JSON objects for None, after a preamble.

        Raises ``OutriderError`` for an unsupported schema, and ``Busy`` if the grammar is not in memory and there is no
        room for it: memory holds too many, of all clients or of this one.
        """
        self._compiler.checked()
        text = ANY_OBJECT if schema is None else schema_text(schema, self._config)
        key = f"{preamble or ''}{text}"
        known, is_renewed = self._kept.get(key), text == ANY_OBJECT
        if known is not None:
            if known.refusal is None and known.num_outputs < MAX_OUTPUTS:
                self._kept.move_to_end(key)
                known.is_reused = True
                return known
            del self._kept[key]
            is_renewed |= known.num_outputs > FEW_OUTPUTS
            if known.refusal is not None and not is_renewed:
                self._remember_refusal(key, known.refusal)
        if key in self._refused:
            raise OutriderError(self._refused[key])
        while key in self._under_way:
            others, queue_key = self._under_way[key]
            try:
                return await asyncio.shield(others)
            except NoRoom:  # in the other client's share
                if queue_key == client.queue_key:
                    raise
        if not is_renewed:
            self._check_room(client)
        making = asyncio.create_task(self._made(key, text, preamble, client, is_renewed))
        self._under_way[key] = making, client.queue_key
        making.add_done_callback(lambda _: self._under_way.pop(key))
        # mark as retrieved: all callers may be gone
        making.add_done_callback(lambda _: making.cancelled() or making.exception())
        return await asyncio.shield(making)  # other calls may await the same task

    def _check_room(self, client: Client) -> None:
        """Raise ``Busy`` if no place is free, or if this client already holds its share."""
        holders = [*self._in_memory.values(), *(queue_key for _, queue_key in self._under_way.values())]
        num_free = MAX_GRAMMARS - len(holders)
        if num_free <= 0 or exceeds_share(client.queue_key, holders.count(client.queue_key), num_free):
            raise Busy(1)

    def _make_room(self, client: Client, num_bytes: int) -> None:
        """Drop cached grammars until a new one fits, those first that were requested once.

        Raises ``Busy`` if it does not fit yet, or ``OutriderError`` if it never would.
        """
        if not self._fits(client, num_bytes, {}):
            raise schemas.unsupported("its grammar takes too much memory: simplify it")
        cached = sorted(self._kept, key=lambda key: self._kept[key].is_reused)
        while not self._fits(client, num_bytes, self._in_memory):
            if not cached:
                raise NoRoom(1)
            del self._kept[cached.pop(0)]

    def _fits(self, client: Client, num_bytes: int, in_memory: Mapping[TokenGrammar, str]) -> bool:
        """Return whether a grammar fits in memory together with these, and in this client's share."""
        held = Counter({client.queue_key: num_bytes})
        for grammar, queue_key in in_memory.items():
            held[queue_key] += grammar.num_bytes
        num_free = self._max_bytes - held.total()
        return num_free >= 0 and not exceeds_share(client.queue_key, held[client.queue_key], num_free)

    async def _made(self, key: str, text: str, preamble: Preamble | None, client: Client, is_renewed: bool) -> TokenGrammar:
        try:
            # The first grammar waits for a worker and for the table, both at once; if both fail, the worker's error says why.
            table = asyncio.gather(self._in_compiler_thread(self._compiler.table), return_exceptions=True)
            num_bytes = (await self.pool.do({"schema": text}, len(text), client))["bytes"]
            await table
            async with self._compiling:
                if not is_renewed:
                    self._make_room(client, num_bytes)
                grammar: TokenGrammar = await self._in_compiler_thread(lambda: self._compiler.compiled(text, preamble))
                grammar.num_bytes = num_bytes
                self._in_memory[grammar] = client.queue_key
        except (Busy, Stopping):
            raise
        except OutriderError as error:
            self._remember_refusal(key, str(error))
            raise
        self._kept[key] = grammar
        new = [each for each, kept in self._kept.items() if not kept.is_reused]
        for each in new[:-MAX_NEW]:
            del self._kept[each]
        while len(self._kept) > MAX_CACHED or (len(self._kept) > 1 and self._kept_too_much()):
            self._kept.popitem(last=False)
        return grammar

    def _kept_too_much(self) -> bool:
        num_bytes = sum(grammar.num_bytes for grammar in self._kept.values())
        return sum(map(len, self._kept)) > MAX_KEPT or num_bytes > self._max_bytes // 2

    def _remember_refusal(self, key: str, why: str) -> None:
        self._refused[key] = why
        while sum(map(len, self._refused)) > MAX_KEPT:
            self._refused.popitem(last=False)


class TokenGrammar:
    """One grammar, shared by any number of requests."""

    def __init__(self, initial: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.initial, self.vocab_size, self.eos_token_ids = initial, vocab_size, eos_token_ids
        self.refusal: str | None = None  # reason why an output failed; later requests with this grammar are refused
        self.is_reused = False  # requested more than once
        self.num_outputs = 0
        self.num_bytes = 0  # of memory, as a worker measured

    def __deepcopy__(self, memo: object) -> TokenGrammar:
        return self  # shared anyway, and llguidance's matcher cannot be pickled

    def matcher(self) -> TokenMatcher:
        """Return a matcher in the initial state, for a new output."""
        self.num_outputs += 1
        return TokenMatcher(self)


class TokenMatcher:
    """Grammar state of one output."""

    def __init__(self, grammar: TokenGrammar) -> None:
        self._grammar, self._matcher = grammar, grammar.initial.deep_copy()
        self._num_consumed = 0
        self._masks: dict[tuple[int, ...], Tensor | None] = {}  # masks of this round, shared by draft and target
        self._seconds_left = MASKS_SECONDS

    def allowed(self, output: Sequence[int], path: Sequence[int]) -> Tensor | None:
        """Return the mask of allowed tokens (see ``types.Matcher``).

        Raises ``OutriderError`` if a limit is exceeded, or if masks take too long. A limit on states ends all answers of this
        grammar: copies of llguidance's matcher share the states of its lexer.
        """
        started = thread_time()
        key = tuple(path)
        try:
            if len(output) != self._num_consumed:
                self._matcher.consume_tokens(list(output[self._num_consumed :]))
                schemas.check(self._matcher)
                self._num_consumed = len(output)
                self._masks.clear()
            if key not in self._masks:
                mask = self._after(key)
                schemas.check(self._matcher)
                self._masks[key] = mask
                allowance = 0.0 if mask is None else SECONDS_A_MASK
                self._seconds_left += allowance - (thread_time() - started)
            if self._seconds_left < 0:
                raise schemas.unsupported(schemas.SLOW)
        except OutriderError as error:
            if not path:  # drafts may be rejected: a failure after them ends no output
                self._grammar.refusal = str(error)
            raise
        return self._masks[key]

    def _after(self, path: tuple[int, ...]) -> Tensor | None:
        if path and path[-1] in self._grammar.eos_token_ids:
            return None
        num_taken = self._matcher.try_consume_tokens(list(path)) if path else 0
        try:
            if num_taken < len(path):
                return None
            mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
            return mask[: self._grammar.vocab_size] > 0
        finally:
            if num_taken:
                self._matcher.rollback(num_taken)
