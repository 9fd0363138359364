"""The ``LLM`` facade: converts prompts to requests, runs the engine and collects completions."""

from __future__ import annotations

import itertools
import random
import signal
import threading
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from outrider import family
from outrider.engine.config import (
    build_engine,
    build_policy,
    build_scheduler,
    check_method,
    choose_proposer,
    configurations,
    load_tokenizer,
    longest_draft,
    warn_of_limits,
)
from outrider.engine.engine import error_emission
from outrider.engine.outputs import Chunk, Completion, Emission, Generation, GenerationInterrupted
from outrider.engine.prompts import as_messages, as_params, as_prompts, as_token_ids, chat_ids
from outrider.engine.stats import GenerationStats
from outrider.errors import TARGET_FAILED, check_text
from outrider.hub import check_repository, local_gguf
from outrider.options import INT32, Option, whole
from outrider.registry import AUTO
from outrider.runner import ModelRunner
from outrider.types import OutriderError, Request, SamplingParams

if TYPE_CHECKING:
    from outrider.engine.options import ModelSource, TokenizerSource
    from outrider.engine.policy import LengthPolicy
    from outrider.engine.prompts import Prompt, Prompts
    from outrider.proposers.base import Proposer
    from outrider.verifiers.base import Verifier

    Params = SamplingParams | Sequence[SamplingParams] | None

SEED_STRIDE = 0x9E3779B97F4A7C15  # separates the seeds of a prompt's samples
STEP_FAILED = "this request was ended by a step that failed: generate again"
LONG_RUN = 8192  # rounds of a full batch after which compiled passes have saved more time than compilation takes


class LLM:
    """A target model and its proposer. Calls of several threads share its batch.

    >>> with LLM("Qwen/Qwen3-8B", draft="Qwen/Qwen3-0.6B") as llm:
    ...     for chunk in llm.stream("def quicksort(", SamplingParams(max_tokens=256)):
    ...         print(chunk.text, end="")
    """

    def __init__(  # noqa: PLR0913 - every option is written out, for editors and type checkers
        self,
        model: ModelSource | None = None,
        *,
        tokenizer: TokenizerSource | None = None,
        draft: ModelSource | None = None,
        download_draft: bool = False,
        drafts: Mapping[str, ModelSource] | None = None,
        method: str = AUTO,
        num_draft_tokens: int | str | LengthPolicy = AUTO,
        verifier: str | Verifier = "block",
        proposer: Proposer | None = None,
        draft_tokenizer: TokenizerSource | None = None,
        method_options: Mapping[str, Any] | None = None,
        same_text: bool = False,
        grammar_drafts: bool = True,
        dtype: str | torch.dtype = "auto",
        weights: str | None = None,
        device: str | torch.device = "auto",
        max_len: int | None = None,
        max_batch: int = 8,
        compile: str = "auto",
        prefill_chunk: int = 256,
        kv_memory: float | None = None,
        prefix_cache: bool = True,
        trust_remote_code: bool = False,
        max_drafts: int = 16,
        self_check: bool = True,
    ) -> None:
        """Load ``model``, a folder, hub id or GGUF file, or use a loaded transformers model; None is the embedded model.

        All options are described in docs/options.md. ``method="auto"`` uses the given draft, otherwise a drafter found for the
        target on this machine (docs/methods.md), otherwise repetitions in the text; the attribute ``drafter`` says which one
        and why. Raises ``OutriderError`` for an invalid option, a target that cannot be loaded or whose cache cannot be rolled
        back, and a draft that does not fit.
        """
        options = {name: value for name, value in locals().items() if name not in ("self", "model")}
        self.speculation, config = configurations({"target": model, **options})
        target = self.speculation.target
        for each in (*check_method(self.speculation), target):  # before anything large is downloaded
            check_repository(each, is_loaded_here=True)
        source = family.TARGET if target is None else local_gguf(target)
        self.tokenizer = load_tokenizer(self.speculation.tokenizer or source, trust_remote_code)
        self.runner = ModelRunner.load(source, config)
        self.proposer, self.drafter = choose_proposer(self.speculation, self.runner, self.tokenizer)
        warn_of_limits(self.speculation, config, self.runner, self.proposer)
        self.policy = build_policy(self.speculation, self.runner, self.proposer)
        scheduler = build_scheduler(self.runner, self.tokenizer, self.runner.max_batch)
        self.engine = build_engine(self.speculation, self.runner, self.proposer, self.policy, scheduler)
        self._stats = self.engine.stats  # updated by the engine; they remain after ``close``
        self._is_closed = False
        self._ids = itertools.count()
        self._inbox: dict[str, _Inbox] = {}
        self._lock = threading.RLock()  # of the engine and the tokenizer
        self._is_stepping = False
        self._to_abort: list[str] = []  # requests to abort after the step

    @property
    def stats(self) -> GenerationStats:
        """Return the totals over all requests."""
        return self._stats

    def warmup(self, num_draft_tokens: int | None = None, batch: int = 1) -> None:
        """Compile passes and measure them with and without drafts, which would otherwise slow down the first rounds.

        ``num_draft_tokens``: K of the rounds to prepare for; None: the largest K that this ``LLM`` may request.
        ``batch``: their batch size. Raises ``OutriderError`` for an invalid value and if running requests leave no room.
        """
        with self._open():
            batch = Option(whole(1, self.runner.max_batch), "").read("batch", batch)
            k = Option(whole(0, INT32), "", optional=True).read("num_draft_tokens", num_draft_tokens)
            self._check_has_room(batch)
            k = longest_draft(self.speculation, self.proposer) if k is None else min(k, self.proposer.max_drafts)
            hidden = self.proposer.needs_hidden
            self.runner.prepare(hidden)
            self.proposer.prepare()
            for width in sorted({1, 1 + self.proposer.num_nodes(k)}):
                self.runner.costs.record_pass(width, batch, 0, self.runner.measure_pass(width, batch, 0, hidden=hidden))

    def measure_plain_pass(self) -> None:
        """Measure one plain pass if K is fixed, because then no plain round runs from which statistics could predict speed."""
        k = self.speculation.num_draft_tokens
        with self._open():
            if not isinstance(k, int) or k == 0:
                return
            self._check_has_room(1)
            self.runner.costs.record_pass(
                1, 1, 0, self.runner.measure_pass(1, 1, 0, repeat=1, hidden=self.proposer.needs_hidden)
            )

    def generate(self, prompts: Prompts, params: Params = None) -> list[Generation]:
        """Generate ``params.n`` completions of each prompt: ``generate(...)[i].outputs[j]`` is sample j of prompt i.

        ``prompts``: text or token ids (a list, 1-d array or 1-d tensor), or a list of either. ``params``: one for all prompts,
        or a list with one per prompt. If the target fails for a request, it ends with ``finish_reason="error"``. Raises
        ``OutriderError`` for invalid prompts and parameters, and if all requests fail; Ctrl-C raises
        ``GenerationInterrupted``, which holds the output so far.
        """
        jobs = self._jobs(prompts, params)
        generations = [job.generation for job in jobs]
        try:
            for _ in self._run(jobs):
                pass
        except KeyboardInterrupt as interrupt:
            raise GenerationInterrupted(generations) from interrupt
        return generations

    def stream(self, prompts: Prompts, params: Params = None) -> Generator[Chunk, None, None]:
        """Generate as ``generate`` does and yield each step's output with its ``prompt_index`` and ``sample_index``.

        Invalid prompts and parameters raise ``OutriderError`` immediately, not at the first chunk. Close the generator to abort
        its requests.
        """
        return self._run(self._jobs(prompts, params))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Generation:
        """Generate the assistant's next message. For streaming, use ``llm.stream(llm.chat_prompt(messages))``.

        ``tools``: functions that the model may call, in OpenAI's format; calls are part of the text. The conversation stays in
        the cache (``prefix_cache``), so that a turn processes only what is new.
        """
        return self.generate(self.chat_prompt(messages, tools), params)[0]

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Convert messages ({"role", "content"}) to token ids with the tokenizer's chat template.

        ``variables``: further variables for the template, such as ``enable_thinking``.

        Raises ``OutriderError`` if there is no template, it rejects the messages, or it has no place for the tools.
        """
        conversation = as_messages(messages)
        if self.tokenizer is None:
            raise OutriderError("messages need a tokenizer with a chat template: pass LLM(..., tokenizer=...)")
        if not self.tokenizer.chat_template:
            raise OutriderError("the tokenizer has no chat template: use generate with a plain prompt")
        with self._open():
            return chat_ids(self.tokenizer, conversation, tools, variables)

    def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Convert a prompt to token ids. Raises ``OutriderError`` for another type and for ids outside the vocabulary.

        ``add_special_tokens``: add those of the tokenizer to a text, such as the beginning-of-text token.
        """
        with self._open():
            if not isinstance(prompt, str):
                return as_token_ids(prompt, self.runner.vocab_size)
            if self.tokenizer is None:
                raise OutriderError("a text prompt needs a tokenizer: pass LLM(..., tokenizer=...), or token ids as the prompt")
            check_text(prompt)
            token_ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            return self.checked_prompt(token_ids, add_special_tokens)

    def checked_prompt(self, token_ids: Sequence[int], add_special_tokens: bool = True) -> list[int]:
        """Check the token ids of a text prompt; an empty one becomes the beginning-of-text token if it may be added."""
        bos = None if self.tokenizer is None else self.tokenizer.bos_token_id
        if not token_ids and add_special_tokens and bos is not None:
            token_ids = [bos]
        return as_token_ids(token_ids, self.runner.vocab_size)

    def requests_for(self, token_ids: Sequence[int], params: SamplingParams, owner: str = "") -> list[Request]:
        """Return the requests of one prompt and its ``n`` samples, each with its own seed. ``owner``: see ``owner_of``."""
        seed = params.seed if params.seed is not None else random.SystemRandom().getrandbits(63)
        return [self._request(token_ids, params, (seed + i * SEED_STRIDE) % 2**64, owner) for i in range(params.n)]

    def _request(self, token_ids: Sequence[int], params: SamplingParams, seed: int, owner: str) -> Request:
        matcher = None if params.grammar is None else params.grammar.matcher()
        name = f"r{next(self._ids)}"
        return Request(f"{owner}/{name}" if owner else name, list(token_ids), len(token_ids), params, seed, matcher)

    def close(self) -> None:
        """Abort all requests and free the models. Only ``stats`` remain available."""
        with self._lock, _deferred_interrupts():
            if self._is_closed:
                return
            self._is_closed = True
            try:
                scheduler = self.engine.scheduler
                for entry in [*scheduler.running, *scheduler.waiting]:
                    self.engine.abort(entry.request.request_id)
            finally:  # also after a second Ctrl-C
                del self.engine, self.policy, self.proposer, self.runner

    def __reduce__(self) -> NoReturn:
        raise OutriderError("an LLM cannot be pickled or copied: create it in the process that uses it")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # --- inside -------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock. Raises ``OutriderError`` if this ``LLM`` is closed."""
        with self._lock:
            self._check_open()
            yield

    def _check_has_room(self, batch: int) -> None:
        """Raise ``OutriderError`` if running requests leave no room to measure a pass over ``batch`` more."""
        if len(self.engine.scheduler.running) + batch > self.runner.max_batch:
            raise OutriderError(
                f"measuring passes of {batch} takes more places than are free of max_batch={self.runner.max_batch}: "
                "do it while no request runs"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise OutriderError("this LLM is closed: create another one")

    def _jobs(self, prompts: Prompts, params: Params) -> list[_Job]:
        """Create the generation and the n requests of each prompt. Raises ``OutriderError`` if one can never run."""
        with self._open():
            given = as_prompts(prompts)
            encoded = [self.encode(prompt) for prompt in given]
            jobs = []
            for prompt, token_ids, chosen in zip(given, encoded, as_params(params, len(given)), strict=True):
                requests = self.requests_for(token_ids, chosen)
                self.engine.check(requests[0])
                jobs.append(_Job(Generation(prompt if isinstance(prompt, str) else None, token_ids), requests))
            return jobs

    def _run(self, jobs: Sequence[_Job]) -> Generator[Chunk, None, None]:
        """Run requests to their end and fill the generations. If the stream is closed or fails, abort its requests."""
        open_ids: dict[str, Completion] = {}
        ready: deque[str] = deque()  # id of each emission that waits in an inbox
        try:
            with self._open():
                self._compile_for(jobs)
                with _deferred_interrupts():
                    self._submit(jobs, open_ids, ready)
            while open_ids:
                with self._open():
                    if not ready:
                        if not self.engine.has_work:
                            raise OutriderError(STEP_FAILED)
                        with _deferred_interrupts():
                            self._step()
                while ready:
                    request_id = ready.popleft()
                    chunk = open_ids[request_id].add(self._inbox[request_id].emissions.popleft())
                    if chunk.finish_reason is not None:
                        del open_ids[request_id], self._inbox[request_id]
                    yield chunk
                    if open_ids:
                        self._check_open()
        finally:
            self._close_completions(open_ids.values())
        completions = [completion for job in jobs for completion in job.generation.outputs]
        if completions and all(completion.finish_reason == "error" for completion in completions):
            raise OutriderError(completions[0].error or TARGET_FAILED)

    def _compile_for(self, jobs: Sequence[_Job]) -> None:
        """Compile before a long run, unless this engine has generated already: compiled passes differ in the last bits."""
        room = self.runner.max_len
        requests = [request for job in jobs for request in job.requests]
        num_tokens = sum(min(request.params.max_tokens, room - request.num_prompt_tokens) for request in requests)
        is_long = num_tokens >= LONG_RUN * self.runner.max_batch
        is_first = self.engine.stats.num_tokens == 0 and not self.engine.has_work
        if is_long and self.runner.config.compile == "auto" and is_first:
            self.warmup()

    def _step(self) -> None:
        """Run a step of the engine. The caller holds the lock.

        Emissions go to the inboxes of all streams; the requests of a stream that is collected meanwhile are aborted afterwards.
        """
        self._is_stepping = True
        try:
            for emission in self.engine.step():
                inbox = self._inbox.get(emission.request_id)
                if inbox is not None:
                    inbox.add(emission)
        except BaseException:
            self._fail_undelivered()
            raise
        finally:
            self._is_stepping = False
            while self._to_abort:
                self.engine.abort(self._to_abort.pop())

    def _fail_undelivered(self) -> None:
        """End requests whose tokens the failed step committed but did not deliver; all others continue."""
        for request_id, inbox in list(self._inbox.items()):
            entry = self.engine.scheduler.find(request_id)
            is_complete = inbox.has_ended if entry is None else inbox.num_tokens == entry.request.num_output_tokens
            if not is_complete:
                self.engine.abort(request_id)
                inbox.add(error_emission(request_id, OutriderError(STEP_FAILED)))

    def _close_completions(self, completions: Collection[Completion]) -> None:
        """Close open requests. A Ctrl-C while another thread holds the lock leaves their end to the next step."""
        try:
            with self._lock, _deferred_interrupts():
                for completion in completions:
                    if not self._deliver(completion):
                        continue
                    if self._is_stepping:  # an abandoned stream may be collected during a step
                        self._to_abort.append(completion.request_id)
                    elif not self._is_closed:
                        completion.text += self.engine.abort(completion.request_id)
        except BaseException:
            for completion in completions:
                self._deliver(completion)
                self._to_abort.append(completion.request_id)  # also those whose abort was interrupted
            raise

    def _deliver(self, completion: Completion) -> bool:
        """Deliver a request's remaining emissions, such as those of a step that Ctrl-C interrupted.

        Return whether it was still open.
        """
        inbox = self._inbox.pop(completion.request_id, None)
        for emission in list(inbox.emissions) if inbox is not None else ():
            completion.add(emission)
        if completion.finish_reason is not None:
            return False
        completion.finish_reason = "abort"
        return True

    def _submit(self, jobs: Sequence[_Job], open_ids: dict[str, Completion], ready: deque[str]) -> None:
        """Queue the requests of all prompts."""
        for prompt_index, (generation, requests) in enumerate(jobs):
            for sample_index, request in enumerate(requests):
                completion = Completion(
                    request.request_id,
                    prompt_index=prompt_index,
                    sample_index=sample_index,
                    num_prompt_tokens=request.num_prompt_tokens,
                )
                self.engine.add(request, fork_of=requests[0].request_id if sample_index else None)
                open_ids[request.request_id] = completion
                self._inbox[request.request_id] = _Inbox(ready)
                generation.outputs.append(completion)


@dataclass(slots=True)
class _Inbox:
    """Emissions of a request until its stream reads them."""

    ready: deque[str]  # of its stream
    emissions: deque[Emission] = field(default_factory=deque)
    num_tokens: int = 0  # received in all
    has_ended: bool = False

    def add(self, emission: Emission) -> None:
        self.emissions.append(emission)
        self.ready.append(emission.request_id)  # last: another thread may be reading
        self.num_tokens += len(emission.token_ids)
        self.has_ended = emission.finish_reason is not None


class _Job(NamedTuple):
    """The result of one prompt, and the requests that produce it."""

    generation: Generation
    requests: list[Request]


@contextmanager
def _deferred_interrupts() -> Iterator[None]:
    """Context manager: handle a Ctrl-C after the block, so that no step is left half done. A second one is handled at once.

    Only in the main thread, which alone handles signals, and where SIGINT has a handler in Python.
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):  # ignored, handled in C, or for another thread
        yield
        return
    received: list[FrameType | None] = []

    def defer(number: int, frame: FrameType | None) -> None:
        received.append(frame)
        if len(received) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(received) == 1:
            handler(signal.SIGINT, received[0])
