"""Scheduler: admission of requests, draft limits of a round, and all finish rules. Independent of models and methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from outrider.engine.detokenizer import Detokenizer, DetokenizerFactory, StopScanner
from outrider.engine.logprobs import TokenLogprobs
from outrider.engine.queue import FairQueue, exceeds_share
from outrider.errors import TARGET_FAILED, PromptTooLong, is_failure, one_line
from outrider.types import BatchSampler, Context, OutriderError, Request


class State(Enum):
    """State of a running request."""

    PREFILL = auto()  # its prompt is prefilled in chunks, outside of rounds
    FIRST_ROUND = auto()  # the next round prefills the rest of its prompt
    DECODE = auto()  # its prompt is in the target's cache


@dataclass(slots=True, eq=False)
class Entry:
    """A request and its place in the engine."""

    request: Request
    max_tokens: int  # output tokens, limited by the context
    eos_ids: frozenset[int]  # empty with ``ignore_eos``
    stop_ids: frozenset[int]  # ``eos_ids`` and ``stop_token_ids``
    detokenizer: Detokenizer | None
    scanner: StopScanner | None  # only with stop strings
    client: str = ""  # empty: not limited in favour of other clients
    fork_of: str | None = None  # id of a request with the same prompt, whose cache is copied
    state: State = State.PREFILL
    finish_reason: str | None = None
    error: str | None = None  # why the tokenizer could not decode its output
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens after the first, if wanted

    @property
    def is_prompt_unscored(self) -> bool:
        """Return whether log-probabilities of the prompt's tokens remain to be computed."""
        return self.request.scores_prompt and len(self.prompt_logprobs) < self.request.num_prompt_tokens - 1

    @property
    def stop_reason(self) -> int | str | None:
        """Return the stop string, or the token of ``stop_token_ids``, that ended the output; None for an end-of-text token."""
        if self.finish_reason != "stop":
            return None
        if self.scanner is not None and self.scanner.stopped_by is not None:
            return self.scanner.stopped_by
        last = self.request.token_ids[-1]
        return last if last in self.request.params.stop_token_ids and last not in self.eos_ids else None


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one round. Row b of its context is ``entries[b]``."""

    entries: tuple[Entry, ...]
    context: Context

    def take(self, rows: Sequence[int]) -> Batch:
        """Return the batch of these requests, in this order."""
        return Batch(tuple([self.entries[b] for b in rows]), self.context.take(rows))

    @property
    def is_prefill(self) -> bool:
        """Return whether the round prefills the rest of some prompt."""
        return any([entry.state is not State.DECODE for entry in self.entries])


class Scheduler:
    """Runs up to ``max_batch`` requests in fair order. The only writer of ``Request.token_ids``."""

    def __init__(
        self,
        max_batch: int,
        max_len: int,
        eos_token_ids: Sequence[int] = (),
        make_detokenizer: DetokenizerFactory | None = None,
        borders: Sequence[int] = (),
    ) -> None:
        """``borders``: sequence lengths that a round may reach but not cross."""
        self.max_batch = max_batch
        self.max_len = max_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.borders = tuple(borders)
        self.running: list[Entry] = []
        self.waiting: FairQueue[Entry] = FairQueue()
        self.make_detokenizer = make_detokenizer
        self._unfinished: dict[str, Entry] = {}  # running and waiting, by id
        self._entries: tuple[Entry, ...] = ()  # of the last batch; reused while the same requests run
        self._requests: tuple[Request, ...] = ()
        self._sampler: BatchSampler | None = None
        self._has_changed = False  # whether the next batch has other requests

    def check(self, request: Request) -> None:
        """Raise ``OutriderError`` if the request can never run."""
        self.check_prompt_len(request.num_prompt_tokens)
        if request.params.stop and self.make_detokenizer is None:
            raise OutriderError("stop strings need a tokenizer: pass tokenizer=..., or use stop_token_ids")

    def check_prompt_len(self, num_tokens: int) -> None:
        """Raise ``OutriderError`` if no prompt of this length can run."""
        if num_tokens < 1:
            raise OutriderError("empty prompt: expected at least one token")
        if num_tokens >= self.max_len:
            raise PromptTooLong(
                f"the prompt is too long: it has {num_tokens} tokens, which leaves no room in the context of {self.max_len}: "
                "shorten it, or run with a larger max_len (--max-len) if the model supports a longer context"
            )

    def add(self, request: Request, fork_of: str | None = None, client: str = "", priority: int = 0) -> Entry:
        """Queue a request that passed ``check``."""
        params = request.params
        eos_ids = frozenset() if params.ignore_eos else self.eos_token_ids
        entry = Entry(
            request=request,
            max_tokens=min(params.max_tokens, self.max_len - request.num_prompt_tokens),
            eos_ids=eos_ids,
            stop_ids=eos_ids | frozenset(params.stop_token_ids),
            detokenizer=(
                self.make_detokenizer(request.token_ids, params.skip_special_tokens, request.delimiters)
                if self.make_detokenizer
                else None
            ),
            scanner=StopScanner(params.stop, params.include_stop_str_in_output) if params.stop else None,
            client=client,
            fork_of=fork_of,
        )
        self._unfinished[request.request_id] = entry
        self.waiting.push(entry, client, priority, cost=request.num_prompt_tokens + entry.max_tokens)
        return entry

    def admit(self, reserve: Callable[[Entry], bool]) -> list[Entry]:
        """Move waiting requests to free places, in order, until one does not fit.

        A client with many requests leaves room for others (``exceeds_share``).
        """
        admitted: list[Entry] = []
        if len(self.running) == self.max_batch or not len(self.waiting):
            return admitted
        held = Counter([entry.client for entry in self.running])
        running = {entry.request.request_id: entry for entry in self.running}
        for entry in list(self.waiting):
            num_free = self.max_batch - len(self.running)
            if num_free and exceeds_share(entry.client, held[entry.client], num_free):
                continue  # keep the free places for clients that hold fewer
            source = running.get(entry.fork_of) if entry.fork_of else None
            if source is not None and source.state is not State.DECODE:
                continue  # a sample waits until its prompt is cached; other requests may be admitted before it
            if num_free == 0 or not reserve(entry):
                break  # strictly in order: otherwise small requests could delay a large one forever
            if source is None:
                entry.fork_of = None
            self.waiting.serve(entry)
            self.running.append(entry)
            running[entry.request.request_id] = entry
            held[entry.client] += 1
            admitted.append(entry)
        return admitted

    def find(self, request_id: str) -> Entry | None:
        """Return the running or waiting request with this id, or None."""
        return self._unfinished.get(request_id)

    def next_batch(self, make_sampler: Callable[[Sequence[Request]], BatchSampler]) -> Batch:
        """Return the requests of the next round. The sampler is reused while they are the same."""
        if self._has_changed or self._sampler is None:
            self._entries = tuple(entry for entry in self.running if entry.state is not State.PREFILL)
            self._requests = tuple(entry.request for entry in self._entries)
            earlier = self._sampler
            self._sampler = make_sampler(self._requests) if earlier is None else earlier.for_batch(self._requests)
            self._has_changed = False
        # A round emits one token more than its accepted drafts.
        limits = tuple([entry.max_tokens - entry.request.num_output_tokens - 1 for entry in self._entries])
        for border in self.borders:
            left = [border - len(request.token_ids) for request in self._requests]
            limits = tuple([min(limit, room) if room >= 0 else limit for limit, room in zip(limits, left, strict=True)])
        return Batch(self._entries, Context(self._requests, limits, self._sampler))

    def move(self, entry: Entry, state: State) -> None:
        """Change the state of a running request; requests in ``PREFILL`` take no part in rounds."""
        if (entry.state is State.PREFILL) != (state is State.PREFILL):
            self._has_changed = True
        entry.state = state

    def commit(self, entry: Entry, token_ids: list[int]) -> tuple[list[int], str]:
        """Append a round's tokens up to the one where plain decoding would stop. Return these and the text they complete.

        If the tokenizer fails to decode them, none is appended: the request ends with an error and the text held back before.
        """
        held = "" if entry.scanner is None else entry.scanner.held
        try:
            if entry.scanner is None:
                kept, text = self._commit_ids(entry, token_ids)
            else:
                kept, text = self._commit_text(entry, entry.scanner, token_ids)
        except BaseException as error:  # such as a padding id of the vocabulary, which some tokenizers cannot decode
            if not is_failure(error):
                raise
            problem = f"its tokenizer cannot decode tokens {token_ids}: {type(error).__name__}: {one_line(str(error))}"
            entry.error = f"{TARGET_FAILED}: {problem}"
            entry.detokenizer = None
            self.finish(entry, "error")
            return [], held
        entry.request.token_ids.extend(kept)
        if entry.finish_reason is not None:
            text += self.finish(entry, entry.finish_reason)
        return kept, text

    def finish(self, entry: Entry, reason: str) -> str:
        """Finish a request; ``reason`` is "stop", "length", "abort" or "error". Return the text that was held back."""
        entry.finish_reason = reason
        self._unfinished.pop(entry.request.request_id, None)
        if entry in self.running:
            self.running.remove(entry)
            self._has_changed = True
            if not self.running:  # keep nothing of requests that ended
                self._entries, self._requests, self._sampler = (), (), None
        else:
            self.waiting.remove(entry)
        scanner = entry.scanner
        if entry.detokenizer is None or (scanner is not None and scanner.stopped_by is not None):
            return ""
        text = entry.detokenizer.flush()
        if scanner is None:
            return text
        text = scanner.feed(text, may_stop=entry.request.num_output_tokens > entry.request.params.min_tokens)
        if scanner.stopped_by is None:
            return text + scanner.flush()
        entry.finish_reason = "stop"  # whatever the reason was: the last token completed a stop string
        return text

    def _commit_ids(self, entry: Entry, token_ids: list[int]) -> tuple[list[int], str]:
        """Without stop strings: check token ids only and decode the whole round at once."""
        room = entry.max_tokens - entry.request.num_output_tokens
        kept = shown = token_ids[:room]
        if not entry.stop_ids.isdisjoint(kept):
            at = next(i for i, token in enumerate(kept) if token in entry.stop_ids)
            kept = kept[: at + 1]
            shown = kept if entry.request.params.include_stop_str_in_output else kept[:at]
            entry.finish_reason = "stop"
        elif len(kept) >= room:
            entry.finish_reason = "length"
        return kept, entry.detokenizer.feed(shown) if entry.detokenizer is not None else ""

    def _commit_text(self, entry: Entry, scanner: StopScanner, token_ids: list[int]) -> tuple[list[int], str]:
        """With stop strings: decode token by token, so that the output ends at the same token as plain decoding."""
        detokenizer = entry.detokenizer
        assert detokenizer is not None  # check() rejects stop strings without a tokenizer
        params, num_output = entry.request.params, entry.request.num_output_tokens
        text = ""
        for at, token in enumerate(token_ids):
            num_output += 1
            is_stop = token in entry.stop_ids
            if not is_stop or params.include_stop_str_in_output:
                text += scanner.feed(detokenizer.feed((token,)), may_stop=num_output > params.min_tokens)
            if is_stop or scanner.stopped_by is not None:
                entry.finish_reason = "stop"
            elif num_output >= entry.max_tokens:
                entry.finish_reason = "length"
            if entry.finish_reason is not None:
                return token_ids[: at + 1], text
        return token_ids, text
