"""Turn a request body into a response: tokenize, queue, stream, count usage. Independent of routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from outrider.engine.outputs import Chunk, Completion
from outrider.errors import TARGET_FAILED, PromptTooLong
from outrider.server.answers import Answer, ChatAnswer, CompletionAnswer, Echo, TokenEnds, TokenTexts
from outrider.server.bridge import Busy, EngineBridge, Stopping, Stream, TargetFailed
from outrider.server.completions import CompletionBody
from outrider.server.config import Client, ServerConfig
from outrider.server.gate import CLOSED, Call, error_body
from outrider.server.grammar import Grammars, TokenGrammar
from outrider.server.message_events import PREFIX, MessageAnswer
from outrider.server.messages import CountBody, MessagesBody
from outrider.server.metrics import Metrics
from outrider.server.mistakes import MAX_DETAIL, mistakes, unreadable
from outrider.server.prompts import InThread, Prompts, tokenizer_data
from outrider.server.protocol import MAX_LOGPROBS, ChatBody, SamplingFields, StreamOptions
from outrider.server.record import Record
from outrider.server.replies import Replies
from outrider.server.response_events import ResponseAnswer
from outrider.server.responses import ResponseBody
from outrider.server.tokenization import DetokenizeBody, TokenizeBody
from outrider.types import OutriderError, SamplingParams
from outrider.types import Request as EngineRequest

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

Result = TypeVar("Result")
Encode = Callable[[], Awaitable[list[list[int]]]]  # tokenizes the prompts of a call
ParamsWith = Callable[[TokenGrammar | None], SamplingParams]
Conversion = Callable[[Client], Coroutine[Any, Any, dict[str, Any]]]
DONE = b"data: [DONE]\n\n"
# ASCII, because some clients split the lines of a stream at characters such as U+2028, too.
COMPACT = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
MAX_TOTAL_LOGPROBS = 1 << 22  # per call, unless a full context has more; each takes about 100 bytes, and again in the answer
PING_INTERVAL = 15.0  # seconds without an event after which a stream gets a ping: proxies close silent connections
NO_RETRY = {"x-should-retry": "false"}  # otherwise OpenAI's and Anthropic's clients send the request again


class Service:
    """Handlers of the API routes."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm, self.config = llm, config
        self.bridge = EngineBridge(llm, config.max_queue, config.stream_interval)
        self.metrics = Metrics(self.bridge, config.name)
        self._max_total_logprobs = max(MAX_TOTAL_LOGPROBS, llm.runner.max_len * (MAX_LOGPROBS + 1))
        self._tokens = TokenTexts(llm.tokenizer)
        self._replies = Replies(llm.tokenizer)
        # For slow work, and all work with the tokenizer, which is not thread-safe.
        self._helper_thread = ThreadPoolExecutor(1, "outrider-helper")
        self._grammar_thread = ThreadPoolExecutor(1, "outrider-grammars")  # so that only calls with new schemas wait for it
        self._record = None if config.record is None else Record(config.record, config.name, llm.tokenizer)
        data = tokenizer_data(llm)
        self._in_helper_thread: InThread = partial(_in_thread, self._helper_thread)
        self._prompts = Prompts(llm, config, data, self._in_helper_thread)
        self._grammars = Grammars(data, config, partial(_in_thread, self._grammar_thread))
        self.pools = [pool for pool in (self._prompts.pool, self._grammars.pool) if pool is not None]

    async def completions(self, body: CompletionBody, http: Request) -> Response:
        """Handle ``POST /v1/completions``."""
        self.check_model(body.model)
        given, call = body.prompts(), http.state.call
        answer = CompletionAnswer("cmpl-" + call.request_id, self.config.name, self._tokens)

        async def encode() -> list[list[int]]:
            prompts = await self._prompts.encode(given, call.client)
            if body.echo:
                answer.echoes = await self._echoes(given, prompts, body)
            if body.logprobs is not None:
                follows = [prompt for prompt in prompts for _ in range(body.n)]
                ends = await self._in_helper_thread(lambda: [self._token_ends(prompt, body) for prompt in follows])
                answer.token_ends |= enumerate(ends)
            return prompts

        params = partial(body.params, body.max_tokens, body.logprobs)
        return await self._answer(body, http, answer, len(given) * body.n, encode, params)

    async def _echoes(self, given: list[str] | list[list[int]], prompts: list[list[int]], body: CompletionBody) -> list[Echo]:
        """Return the prompts as parts of the answer; if log-probabilities are asked for, with their tokens."""
        decode = partial(self._tokens.decoded, skips_special=body.skip_special_tokens)
        texts = [each if isinstance(each, str) else await self._in_helper_thread(partial(decode, each)) for each in given]
        if body.logprobs is None:
            return [Echo(text) for text in texts]
        begins = [await self._in_helper_thread(partial(self._token_ends((), body).add, prompt)) for prompt in prompts]
        # The client's text may be shorter than that of its tokens.
        offsets = [[min(begin, len(text)) for begin in each] for text, each in zip(texts, begins, strict=True)]
        return [Echo(*each) for each in zip(texts, prompts, offsets, strict=True)]

    def _token_ends(self, prompt: Sequence[int], body: SamplingFields, delimiters: frozenset[int] = frozenset()) -> TokenEnds:
        """Return the ``TokenEnds`` of a choice that follows this prompt."""
        make = self.llm.engine.scheduler.make_detokenizer
        return TokenEnds() if make is None else TokenEnds(make(prompt, body.skip_special_tokens, delimiters))

    async def chat(self, body: ChatBody, http: Request) -> Response:
        """Handle ``POST /v1/chat/completions``."""
        answer = ChatAnswer("chatcmpl-" + http.state.call.request_id, self.config.name, self._tokens)
        return await self._chat(body, http, answer)

    async def responses(self, body: ResponseBody, http: Request) -> Response:
        """Handle ``POST /v1/responses``."""
        answer = ResponseAnswer(
            "resp_" + http.state.call.request_id, self.config.name, self._tokens, echo=body.echo, names=body.names
        )
        return await self._chat(body.chat(), http, answer)

    async def messages(self, body: MessagesBody, http: Request) -> Response:
        """Handle ``POST /v1/messages``."""
        answer = MessageAnswer(PREFIX + http.state.call.request_id, self.config.name, self._tokens, max_tokens=body.max_tokens)
        return await self._chat(body.chat(), http, answer)

    async def count_tokens(self, body: CountBody, http: Request) -> Response:
        """Handle ``POST /v1/messages/count_tokens``."""
        chat = body.chat()

        async def count(client: Client) -> dict[str, Any]:
            (token_ids,) = await self._prompts.chat(chat, client)
            return {"input_tokens": len(token_ids)}

        return await self._convert(chat, http, count)

    async def _chat(self, body: ChatBody, http: Request, answer: ChatAnswer) -> Response:
        self.check_model(body.model)
        self._replies.check(body)
        call = http.state.call
        answer.delimiters = self._replies.delimiters(body)
        whole = max(self.llm.runner.max_len, body.min_tokens)  # the context, which ends the reply in any case
        max_tokens = body.max_completion_tokens or body.max_tokens or whole

        async def encode() -> list[list[int]]:
            prompts = await self._prompts.chat(body, call.client)
            readers = await self._in_helper_thread(lambda: self._replies.readers(body, prompts[0]))
            answer.replies |= enumerate(readers)
            answer.preamble = readers[0].preamble
            if readers[0].may_reason:
                ends = await self._in_helper_thread(
                    lambda: [self._token_ends(prompts[0], body, answer.delimiters) for _ in readers]
                )
                answer.token_ends |= enumerate(ends)
            return prompts

        params = partial(body.params, max_tokens, body.num_logprobs())
        return await self._answer(body, http, answer, body.n, encode, params)

    async def tokenize(self, body: TokenizeBody, http: Request) -> Response:
        """Handle ``POST /tokenize``."""

        async def encode(client: Client) -> dict[str, Any]:
            if body.messages is not None:
                (token_ids,) = await self._prompts.chat(body, client)
            else:
                (token_ids,) = await self._prompts.encode([body.prompt or ""], client, body.add_special_tokens is not False)
            names = await self._prompts.names(token_ids) if body.return_token_strs else None
            max_len = self.llm.runner.max_len
            return {"count": len(token_ids), "max_model_len": max_len, "tokens": token_ids, "token_strs": names}

        return await self._convert(body, http, encode)

    async def detokenize(self, body: DetokenizeBody, http: Request) -> Response:
        """Handle ``POST /detokenize``."""

        async def decode(client: Client) -> dict[str, Any]:
            checked = await self._prompts.encode([body.tokens], client) if body.tokens else [[]]  # an empty text may have none
            return {"prompt": await self._prompts.text(checked[0])}

        return await self._convert(body, http, decode)

    async def _convert(self, body: TokenizeBody | DetokenizeBody | ChatBody, http: Request, work: Conversion) -> Response:
        """Return the result of ``work`` as JSON. The call takes a place in the queue and has the time limit of a completion."""
        self.check_model(body.model)
        call = http.state.call
        with self.bridge.reserve_places(1, call.client):
            left = call.arrived + self.config.request_timeout - monotonic()
            found = await _unless_disconnected(http, work(call.client), left)
        return Response(status_code=CLOSED) if found is None else JSONResponse(found)

    def start(self) -> None:
        """Start threads and processes for the running event loop."""
        self.bridge.start()
        for pool in self.pools:
            pool.start()

    async def stop(self) -> None:
        """Stop threads and processes, and abort running requests."""
        await self.bridge.stop()
        for pool in self.pools:
            await pool.stop()
        self._grammar_thread.shutdown(wait=False)
        self._helper_thread.shutdown(wait=self._record is not None)
        if self._record is not None:
            self._record.close()

    def check_model(self, name: str | None) -> None:
        """Raise ``UnknownModel`` unless this is the served model's name, or None."""
        if name not in (None, self.config.name):
            raise UnknownModel(f"unknown model {name!r}: this server serves {self.config.name!r}")

    def unready(self) -> str | None:
        """Return the one-line reason why the server does not accept requests, or None if it does."""
        bridge, most = self.bridge, self.config.stall_timeout
        if not bridge.is_healthy:
            return "the engine thread has stopped"
        if bridge.is_draining:
            return "the server is shutting down"
        if bridge.stalled_seconds > most:
            return f"the engine has made no progress for {bridge.stalled_seconds:.0f} s"
        for pool in self.pools:
            if pool.start_error is not None:
                return pool.start_error
            if pool.stalled_seconds > most:
                return f"the workers have made no progress for {pool.stalled_seconds:.0f} s"
        return None

    async def _answer(
        self, body: SamplingFields, http: Request, answer: Answer, num_sequences: int, encode: Encode, params_with: ParamsWith
    ) -> Response:
        """Prepare the prompts, queue them and return the response, whole or as a stream."""
        most = self.config.max_choices
        if not 1 <= num_sequences <= most:
            raise OutriderError(f"invalid number of sequences {num_sequences} (prompts x n): expected 1 to {most}")
        call = http.state.call
        deadline = call.arrived + self.config.request_timeout
        with self.bridge.reserve_places(num_sequences, call.client):
            left = deadline - monotonic()
            prepared = await _unless_disconnected(http, self._prepared(body, call, encode, params_with, answer), left)
            if prepared is None:
                return Response(status_code=CLOSED)
            prompts, params = prepared
            samples = self._samples(body, prompts, params, answer, call.client.name)
            stream = self.bridge.submit(samples, deadline, call.client)
        self.metrics.accepted(prompts)
        if self._record is not None:
            self._helper_thread.submit(self._record.add, body)
        running = RunningAnswer(stream, answer, call, self.metrics, params)
        if body.stream:
            return EventStream(running, body.stream_options or StreamOptions())
        return await _whole(running, http)

    async def _prepared(
        self, body: SamplingFields, call: Call, encode: Encode, params_with: ParamsWith, answer: Answer
    ) -> tuple[list[list[int]], SamplingParams]:
        """Return the token ids and sampling parameters; tokenization and grammar run in workers."""
        prompts = await encode()
        grammar = await self._grammars.get(body.output_schema, call.client, answer.preamble) if body.is_json else None
        params = params_with(grammar)
        if params.logprobs is not None:
            await self._in_helper_thread(self._tokens.load)
        return prompts, params

    def _check_logprobs(self, prompts: list[list[int]], params: SamplingParams, scores_prompts: bool) -> None:
        """Raise ``OutriderError`` if the answer may contain more log-probabilities than the server holds for a call."""
        if params.logprobs is None:
            return
        context = self.llm.runner.max_len
        lens = [min(params.max_tokens, context - len(each)) + (len(each) if scores_prompts else 0) for each in prompts]
        num_tokens = params.n * sum(lens)
        if num_tokens * (params.logprobs + 1) > self._max_total_logprobs:
            raise OutriderError(
                f"too many log-probabilities: {num_tokens} tokens with {params.logprobs + 1} each: expected at most "
                f"{self._max_total_logprobs} in a call: lower max_tokens, the number of sequences or of log-probabilities"
            )

    def _samples(
        self, body: SamplingFields, prompts: list[list[int]], params: SamplingParams, answer: Answer, owner: str
    ) -> list[list[EngineRequest]]:
        """Create the requests of each prompt and add their choices. Raises ``OutriderError`` for requests that cannot run."""
        self._check_logprobs(prompts, params, answer.scores_prompts)
        num_drafts = body.num_drafts(self.llm.proposer.name)
        samples: list[list[EngineRequest]] = []
        for index, prompt in enumerate(prompts):
            group = self.llm.requests_for(prompt, params, owner)
            for sample, request in enumerate(group):
                request.num_draft_tokens, request.delimiters = num_drafts, answer.delimiters
                request.scores_prompt = answer.scores_prompts and sample == 0
                completion = Completion(
                    request.request_id, prompt_index=index, sample_index=sample, num_prompt_tokens=len(prompt)
                )
                answer.choices.append(completion)
            if index == 0:
                self.llm.engine.check(group[0])
            else:  # its parameters, whose check takes longer, are the first prompt's
                self.llm.engine.scheduler.check_prompt_len(len(prompt))
            samples.append(group)
        return samples


class RunningAnswer:
    """A stream of emissions together with its response and timing."""

    def __init__(self, stream: Stream, answer: Answer, call: Call, metrics: Metrics, params: SamplingParams) -> None:
        self.answer, self._params = answer, params
        self._stream, self._call, self._metrics = stream, call, metrics
        self._index = {completion.request_id: index for index, completion in enumerate(answer.choices)}
        self._last: dict[int, float] = {}

    async def chunks(self) -> AsyncIterator[tuple[int, Chunk] | None]:
        """Iterate over (choice, chunk), and None when a ping is due. Raises ``OutriderError`` if the target failed."""
        try:
            async for emission in self._stream:
                if emission is None:
                    yield None
                    continue
                index = self._index[emission.request_id]
                chunk = self.answer.add(index, emission)
                self._record_latencies(index, chunk)
                if chunk.finish_reason == "error":
                    raise self._failure(chunk.error or TARGET_FAILED)
                yield index, chunk
        finally:
            self.close()

    def postpone_ping(self) -> None:
        """Let a ping be due ``PING_INTERVAL`` seconds from now."""
        self._stream.ping_due = monotonic() + PING_INTERVAL

    def _failure(self, error: str) -> OutriderError:
        """Return the exception for an output that ended with an error: its cause may be the request."""
        grammar, params = self._params.grammar, self._params
        if error.startswith(TARGET_FAILED):  # out of memory, say: no request is to blame
            return TargetFailed(error)
        if isinstance(grammar, TokenGrammar) and grammar.refusal is not None:
            return OutriderError(grammar.refusal)
        if grammar is not None and (params.allowed_token_ids is not None or params.banned_token_ids):
            return OutriderError(f"the form of the output and the allowed or banned tokens may leave no token: {error}")
        return TargetFailed(error)

    def close(self) -> None:
        """Cancel unfinished requests and record metrics."""
        self._stream.close()
        for completion in self.answer.choices:
            if completion.finish_reason is None:
                completion.finish_reason = "abort"
                self._metrics.ended("abort", len(completion.token_ids))
        usage = self.answer.usage()
        self._call.log_fields |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        self._call.log_fields["finish_reason"] = [completion.finish_reason for completion in self.answer.choices]

    def _record_latencies(self, index: int, chunk: Chunk) -> None:
        now, num_tokens = monotonic(), len(chunk.token_ids)
        if num_tokens and index in self._last:
            for _ in range(num_tokens):
                self._metrics.between_tokens.observe((now - self._last[index]) / num_tokens)
        elif num_tokens:
            self._metrics.first_token.observe(now - self._call.arrived)
            self._call.log_fields.setdefault("first_token_seconds", round(now - self._call.arrived, 4))
        self._last[index] = now
        if chunk.finish_reason is not None:
            self._metrics.whole.observe(now - self._call.arrived)
            self._metrics.ended(chunk.finish_reason, len(self.answer.choices[index].token_ids))


class UnknownModel(OutriderError):
    """The requested model is not served."""


async def _in_thread(thread: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(thread, work)


async def _unless_disconnected(http: Request, work: Coroutine[Any, Any, Result], seconds: float | None = None) -> Result | None:
    """Return the result of ``work``, or None if the client disconnects. Raises ``TimeoutError`` after ``seconds``."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(http))]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        if not tasks[1].done():
            raise TimeoutError
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _whole(running: RunningAnswer, http: Request) -> Response:
    """Return the complete response; if the client disconnects, cancel its requests."""

    async def collect() -> bool:
        async for _ in running.chunks():
            pass
        return True

    try:
        if not await _unless_disconnected(http, collect()):
            return Response(status_code=CLOSED)
        if all(completion.logprobs is None for completion in running.answer.choices):
            content = COMPACT.encode(running.answer.response())
        else:  # log-probabilities of many samples are megabytes of JSON: iterencode lets other threads run meanwhile
            content = await asyncio.to_thread(lambda: "".join(COMPACT.iterencode(running.answer.response())))
        return Response(content, media_type="application/json")
    finally:
        running.close()


class EventStream(StreamingResponse):
    """Stream of server-sent events. However the stream ends, its requests are removed from the engine."""

    def __init__(self, running: RunningAnswer, options: StreamOptions) -> None:
        self._running, self._options = running, options
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second one is for nginx
        super().__init__(self._events(), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.close()

    async def _events(self) -> AsyncIterator[bytes]:
        """Iterate over the events, with a ping after each ``PING_INTERVAL`` seconds without one."""
        answer = self._running.answer
        is_counting = self._options.include_usage and self._options.continuous_usage_stats

        def encoded(event: dict[str, Any]) -> bytes:
            return _event({**event, "usage": answer.usage()} if is_counting else event)

        for opening in answer.opening():
            yield encoded(opening)
        self._running.postpone_ping()
        try:
            async for each in self._running.chunks():
                for event in [answer.ping] if each is None else map(encoded, answer.events(*each)):
                    yield event
                    self._running.postpone_ping()  # not after a chunk without events, whose text is held back
        except (TimeoutError, OutriderError) as error:
            for failure in answer.failure(*as_http_error(error)[:2]):
                yield _event(failure)
            return
        if self._options.include_usage:
            yield _event(answer.usage_chunk())
        if answer.ends_with_done:
            yield DONE


def as_http_error(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return the HTTP status, body and headers for an error."""
    if isinstance(error, HTTPException):  # FastAPI's own, with status 400, is about JSON that Python cannot read
        what = unreadable(error.__cause__) if error.status_code == 400 else str(error.detail)
        return error.status_code, error_body(what, "invalid_request_error"), dict(error.headers or {})
    if isinstance(error, RequestValidationError):
        inside = [{**each, "loc": each["loc"][1:]} for each in error.errors()]  # the first part is "body"
        where = inside[0]["loc"] if inside[0]["type"] != "json_invalid" else ()  # of broken JSON it is a position
        param = str(where[0])[:MAX_DETAIL] if where else None
        body = error_body(mistakes(inside), "invalid_request_error", "invalid_body", param)
        details = next((found for each in inside if (found := each.get("ctx", {}).get("details"))), None)
        if details is not None:
            body["error"]["details"] = details
        return 400, body, {}
    if isinstance(error, PromptTooLong):
        return 400, error_body(str(error), "invalid_request_error", "context_length_exceeded"), {}
    if isinstance(error, UnknownModel):
        return 404, error_body(str(error), "invalid_request_error", "model_not_found"), {}
    if isinstance(error, Busy):
        return 429, error_body(str(error), "rate_limit_error", "queue_full"), {"retry-after": str(error.retry_after)}
    if isinstance(error, Stopping):
        return 503, error_body(str(error), "server_error", "stopping"), {"retry-after": "5"}
    if isinstance(error, TimeoutError):
        return 504, error_body("the answer exceeded the server's time limit", "server_error", "timeout"), NO_RETRY
    if isinstance(error, TargetFailed):
        return 500, error_body(str(error), "server_error"), NO_RETRY
    return 400, error_body(str(error), "invalid_request_error"), {}


def _event(body: dict[str, Any]) -> bytes:
    """Return a server-sent event. Events of the Responses API have a type, which is also the event's name."""
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {COMPACT.encode(body)}\n\n".encode()
