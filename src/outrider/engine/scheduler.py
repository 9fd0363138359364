"""Who runs, and when a request is finished: admission, the limits of a round, and every finish rule in one place.

Knows requests and text; knows no model, no method and no probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.engine.detokenizer import Detokenizer, DetokenizerFactory, StopScanner
from outrider.engine.queue import FairQueue
from outrider.engine.stats import GenerationStats
from outrider.sampling import Sampler
from outrider.types import Context, OutriderError, Request


@dataclass(slots=True, eq=False)
class Entry:
    """A request with what the engine keeps beside it."""

    request: Request
    max_tokens: int  # of output, clipped to the context
    stop_ids: frozenset[int]
    detokenizer: Detokenizer | None
    scanner: StopScanner | None  # only where stop strings were asked for
    fork_of: str | None = None  # the request whose prompt is the same, to copy its cache
    stats: GenerationStats = field(default_factory=GenerationStats)
    is_cached: bool = False  # its prompt is in the runner's cache
    is_reading: bool = False  # a long text of it is being read, a part a step: it takes no part in rounds yet
    is_followed: bool = False  # the proposer has read its text
    is_speculating: bool = True  # False after the proposer failed for it
    pause: int = 0  # rounds until it is tried again
    finish_reason: str | None = None


class Scheduler:
    """Up to ``max_batch`` requests at once, in a fair order. The only writer of ``Request.token_ids``."""

    def __init__(
        self,
        max_batch: int,
        max_len: int,
        eos_token_ids: Sequence[int] = (),
        make_detokenizer: DetokenizerFactory | None = None,
    ) -> None:
        self.max_batch = max_batch
        self.max_len = max_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.running: list[Entry] = []
        self.waiting: FairQueue[Entry] = FairQueue()
        self._make_detokenizer = make_detokenizer
        self._batch: tuple[Entry, ...] = ()
        self._requests: tuple[Request, ...] = ()
        self._sampler: Sampler | None = None

    def check(self, request: Request) -> None:
        """Raises ``OutriderError`` if the request can never run."""
        self.check_prompt_len(request.num_prompt_tokens)
        if request.params.stop and self._make_detokenizer is None:
            raise OutriderError("stop strings need a tokenizer: pass one, or use stop_token_ids")

    def check_prompt_len(self, num_tokens: int) -> None:
        """Raises ``OutriderError`` if no prompt of this length can run."""
        if num_tokens < 1:
            raise OutriderError("the prompt is empty: give at least one token")
        if num_tokens >= self.max_len:
            raise OutriderError(
                f"the prompt has {num_tokens} tokens, which leaves no room in the context of {self.max_len}: "
                "shorten the prompt or raise max_len"
            )

    def add(self, request: Request, fork_of: str | None = None, client: str = "", priority: int = 0) -> Entry:
        """Queues a request that ``check`` has let pass."""
        params = request.params
        entry = Entry(
            request=request,
            max_tokens=min(params.max_tokens, self.max_len - request.num_prompt_tokens),
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids),
            detokenizer=self._make_detokenizer(request.token_ids) if self._make_detokenizer else None,
            scanner=StopScanner(params.stop) if params.stop else None,
            fork_of=fork_of,
        )
        self.waiting.push(entry, request.num_prompt_tokens + entry.max_tokens, client, priority)
        return entry

    def admit(self, fits: Callable[[Entry], bool]) -> list[Entry]:
        """Moves waiting requests into free places, as long as they fit."""
        admitted: list[Entry] = []
        if len(self.running) == self.max_batch:
            return admitted
        for entry in list(self.waiting):
            source = self.find(entry.fork_of) if entry.fork_of else None
            if source is not None and not source.is_cached:
                continue  # a sample waits until the prompt it shares is cached; meanwhile others need not
            if len(self.running) == self.max_batch or not fits(entry):
                break  # nobody overtakes it, or it might wait for ever
            if source is None:
                entry.fork_of = None
            self.waiting.serve(entry)
            self.running.append(entry)
            self._sampler = None
            admitted.append(entry)
        return admitted

    def find(self, request_id: str | None) -> Entry | None:
        """The running request of that id."""
        return next((entry for entry in self.running if entry.request.request_id == request_id), None)

    def next_batch(self, make_sampler: Callable[[Sequence[Request]], Sampler]) -> tuple[tuple[Entry, ...], Context]:
        """The requests of this round and its context; what depends on the composition alone is kept while it stays."""
        if self._sampler is None:
            self._batch = tuple(entry for entry in self.running if not entry.is_reading)
            self._requests = tuple(entry.request for entry in self._batch)
            self._sampler = make_sampler(self._requests)
        # The round itself emits one token beyond the drafts, hence one draft less than the tokens still wanted.
        limits = tuple([entry.max_tokens - entry.request.num_output_tokens - 1 for entry in self._batch])
        return self._batch, Context(self._requests, limits, self._sampler)

    def read(self, entry: Entry, is_reading: bool) -> None:
        """Takes a running request out of the rounds while its text is read, or back in."""
        if entry.is_reading != is_reading:
            entry.is_reading = is_reading
            self._sampler = None

    def slots(self, request: Request) -> int:
        """Tokens that a request may come to."""
        return min(request.num_prompt_tokens + request.params.max_tokens, self.max_len)

    def remove(self, request_id: str) -> Entry | None:
        """Takes a request out, wherever it is."""
        places: tuple[list[Entry] | FairQueue[Entry], ...] = (self.running, self.waiting)
        for entries in places:
            for entry in entries:
                if entry.request.request_id == request_id:
                    entries.remove(entry)
                    self._sampler = None
                    return entry
        return None

    def commit(self, entry: Entry, token_ids: list[int]) -> tuple[list[int], str]:
        """Appends a round's tokens up to where plain decoding would have stopped. Returns them and the text they complete."""
        if entry.scanner is None:
            kept, text = self._commit_ids(entry, token_ids)
        else:
            kept, text = self._commit_text(entry, entry.scanner, token_ids)
        entry.request.token_ids.extend(kept)
        if entry.finish_reason is not None:
            text += self.finish(entry, entry.finish_reason)
        return kept, text

    def finish(self, entry: Entry, reason: str) -> str:
        """Ends a running request for a reason of "stop", "length", "abort" or "error". Returns the text still held back."""
        entry.finish_reason = reason
        self.remove(entry.request.request_id)
        scanner = entry.scanner
        if entry.detokenizer is None or (scanner is not None and scanner.stopped_by is not None):
            return ""
        text = entry.detokenizer.flush()
        if scanner is None:
            return text
        text = scanner.feed(text)
        return text if scanner.stopped_by is not None else text + scanner.flush()

    def _commit_ids(self, entry: Entry, token_ids: list[int]) -> tuple[list[int], str]:
        """Without stop strings a whole round is looked at by ids, and decoded at once."""
        room = entry.max_tokens - entry.request.num_output_tokens
        kept = token_ids if len(token_ids) <= room else token_ids[:room]
        shown = kept
        if not entry.stop_ids.isdisjoint(kept):
            at = next(i for i, token in enumerate(kept) if token in entry.stop_ids)
            kept, shown = kept[: at + 1], kept[:at]
            entry.finish_reason = "stop"
        elif len(kept) >= room:
            entry.finish_reason = "length"
        return kept, entry.detokenizer.feed(shown) if entry.detokenizer is not None else ""

    def _commit_text(self, entry: Entry, scanner: StopScanner, token_ids: list[int]) -> tuple[list[int], str]:
        """With stop strings each token is decoded alone, so that a draft ends at the very token where plain decoding would."""
        detokenizer = entry.detokenizer
        assert detokenizer is not None  # add() refuses stop strings without a tokenizer
        room = entry.max_tokens - entry.request.num_output_tokens
        text = ""
        for at, token in enumerate(token_ids):
            if token in entry.stop_ids:
                entry.finish_reason = "stop"
            else:
                text += scanner.feed(detokenizer.feed((token,)))
                if scanner.stopped_by is not None:
                    entry.finish_reason = "stop"
                elif at + 1 >= room:
                    entry.finish_reason = "length"
            if entry.finish_reason is not None:
                return token_ids[: at + 1], text
        return token_ids, text
