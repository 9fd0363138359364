"""Worker processes give the tokenizer's results, enforce limits, and are replaced when they die."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar

import pytest
from processes import LISTED, children

from outrider import LLM
from outrider.engine import templates
from outrider.server import pool as pools
from outrider.server import schemas
from outrider.server.bridge import Busy, Stopping
from outrider.server.config import ANYONE, Client, KeyRing, ServerConfig
from outrider.server.gate import Gate
from outrider.server.grammar import FEW_OUTPUTS, MAX_CACHED, MAX_GRAMMARS, MAX_NEW, MAX_OUTPUTS, Grammars
from outrider.server.pool import WorkerLost, WorkerPool
from outrider.server.prompts import Prompts, tokenizer_data
from outrider.server.protocol import ChatBody
from outrider.server.worker import Workbench
from outrider.types import OutriderError

Result = TypeVar("Result")
Owner = TypeVar("Owner", WorkerPool, Prompts, Grammars)
Parameters = ParamSpec("Parameters")
TEXTS = ["", " ", "def add(first, second):", "naïve café\n\n\t", "<|end|>", "a<|end|>b <|user|>", "\u200b🦀" * 20, "x" * 100]
DEAR = {"schema": json.dumps({"type": "string", "allOf": [{"pattern": f".*{chr(97 + i)}.*"} for i in range(26)]})}
CHEAP = {"schema": '{"type": "integer"}'}


def in_loop(test: Callable[Parameters, Coroutine[Any, Any, None]]) -> Callable[Parameters, None]:
    """Decorate a test that is a coroutine: run it with a time limit."""

    @wraps(test)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60.0))

    return run


def chat_body(messages: list[dict[str, str]], **more: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": messages, **more})


async def in_helper_thread(work: Callable[[], Result]) -> Result:
    return work()


@asynccontextmanager
async def started(owner: Owner) -> AsyncIterator[Owner]:
    pool = owner if isinstance(owner, WorkerPool) else owner.pool
    assert pool is not None
    pool.start()
    try:
        yield owner
    finally:
        await pool.stop()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs wait long for the processor: other processes may use the machine."""
    monkeypatch.setattr(pools, "SLOWDOWN", 60.0)
    slower = "from outrider.server import worker; worker.SLOWDOWN = 60.0; main()"
    monkeypatch.setattr(pools, "COMMAND", pools.COMMAND.replace("main()", slower))


def schema_pool(plain: LLM, seconds: float = 20.0, memory: int = 1 << 30, size: int = 1) -> WorkerPool:
    limits = {"seconds": seconds, "memory": memory, "nice": 0, "for_texts": False}
    return WorkerPool("compile a JSON schema", {**(tokenizer_data(plain) or {}), **limits}, size, eager=True)


@in_loop
async def test_workers_match_the_tokenizer(plain: LLM) -> None:
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "<|end|> naïve"}]
    async with started(Prompts(plain, ServerConfig(), tokenizer_data(plain), in_helper_thread)) as prompts:
        texts = TEXTS * 60  # whose tokens take more than asyncio reads by default
        assert await prompts.encode(texts, ANYONE) == [plain.encode(text) for text in texts]
        assert await prompts.chat(chat_body(messages), ANYONE) == [plain.chat_prompt(messages)]


@in_loop
async def test_developer_messages_are_system_messages(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def messages(role: str) -> list[dict[str, str]]:
        return [{"role": role, "content": "Answer in French."}, {"role": "user", "content": "Who?"}]

    async with started(Prompts(plain, ServerConfig(), tokenizer_data(plain), in_helper_thread)) as prompts:
        assert await prompts.chat(chat_body(messages("developer")), ANYONE) == [plain.chat_prompt(messages("system"))]
    template = (plain.tokenizer.chat_template or "") + "{# the developer's instructions #}"
    told = {**(tokenizer_data(plain) or {}), "template": template}
    monkeypatch.setattr(plain.tokenizer, "chat_template", told["template"])
    async with started(Prompts(plain, ServerConfig(), told, in_helper_thread)) as prompts:
        assert await prompts.chat(chat_body(messages("developer")), ANYONE) == [plain.chat_prompt(messages("system"))]


@in_loop
async def test_other_tokenizers_run_in_the_server_process(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(type(plain.tokenizer)):  # type: ignore[misc]
        def encode(self, text: str, **options: Any) -> list[int]:
            return [7, 8]

    monkeypatch.setattr(plain.tokenizer, "__class__", Own)
    prompts = Prompts(plain, ServerConfig(), tokenizer_data(plain), in_helper_thread)
    assert prompts.pool is None
    assert await prompts.encode(["a", "b"], ANYONE) == [[7, 8], [7, 8]]
    with pytest.raises(OutriderError, match="characters"):
        await prompts.encode(["a" * 10_000], ANYONE)
    asked: list[Any] = []
    monkeypatch.setattr(plain, "chat_prompt", lambda messages, tools, variables: asked.extend([messages, variables]) or [7, 8])
    said = {"role": "developer", "content": "Answer in French."}
    await prompts.chat(chat_body([said], chat_template_kwargs={"effort": 1}), ANYONE)
    assert asked == [[{"role": "system", "content": "Answer in French."}], {"effort": 1}]


def test_a_template_that_rejects_everything_does_not_stop_completions(plain: LLM) -> None:
    bench = Workbench({**(tokenizer_data(plain) or {}), "template": "{{ raise_exception('never') }}", "for_texts": True})
    assert bench.do({"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 9})["refused"].endswith(": never")
    assert bench.do({"texts": ["a"], "max_tokens": 9}) == {"ids": [plain.encode("a")]}


@in_loop
async def test_chat_templates_run_only_in_workers(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (plain.tokenizer.chat_template or "") + "{# not rendered before #}"
    monkeypatch.setattr(plain.tokenizer, "chat_template", template)
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I", "reasoning_content": "hm"}]
    rendered: list[object] = []
    async with started(Prompts(plain, ServerConfig(), tokenizer_data(plain), in_helper_thread)) as prompts:
        with monkeypatch.context() as patch:
            patch.setattr(templates, "render_jinja_template", lambda *given, **_: rendered.append(given) or [[""]])
            found = await prompts.chat(chat_body(messages), ANYONE)
        assert not rendered and found == [plain.chat_prompt(messages)]


def test_a_panic_is_a_refusal(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As PyO3's."""

    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    bench = Workbench({**(tokenizer_data(plain) or {}), "for_texts": True})
    monkeypatch.setattr(bench, "_encode", panic)
    assert bench.do({"texts": ["a"], "max_tokens": 9}) == {"refused": "PanicException: index out of bounds"}


@in_loop
async def test_workers_do_not_inherit_keys(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OUTRIDER_API_KEYS", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, "secret")
    tell = "import json, os; print(json.dumps({'failed': str([name for name in os.environ if os.environ[name] == 'secret'])}))"
    monkeypatch.setattr(pools, "COMMAND", tell)
    with pytest.raises(OSError, match=r"^\[\]$"):
        await pools.Worker.start({})


@in_loop
async def test_an_error_of_the_tokenizer_is_no_lack_of_memory(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = pools.COMMAND.replace("main()", "worker.Workbench._encode = lambda *_, **__: 1 / 0; main()")
    monkeypatch.setattr(pools, "COMMAND", failing.replace("from", "from outrider.server import worker; from", 1))

    async with started(Prompts(plain, ServerConfig(), tokenizer_data(plain), in_helper_thread)) as prompts:
        with pytest.raises(OutriderError, match="ZeroDivisionError: division by zero"):
            await prompts.encode(["a"], ANYONE)


@in_loop
async def test_prompts_that_cannot_fit_are_refused(plain: LLM) -> None:
    async with started(Prompts(plain, ServerConfig(), tokenizer_data(plain), in_helper_thread)) as prompts:
        for given in (["fine", "x1 " * 400], [[1] * 256]):
            with pytest.raises(OutriderError, match="leaves no room in the context of 256"):
                await prompts.encode(given, ANYONE)
        with pytest.raises(OutriderError, match="300 messages do not fit"):
            await prompts.chat(chat_body([{"role": "user", "content": ""}] * 300), ANYONE)


@pytest.mark.usefixtures("patient")
@in_loop
async def test_a_job_over_its_time_limit_is_killed_and_the_next_runs(plain: LLM) -> None:
    async with started(schema_pool(plain, seconds=0.5)) as pool:
        with pytest.raises(OutriderError, match=r"within 0.5 s: send a smaller one"):
            await pool.do(DEAR, 1, ANYONE)
        assert (await pool.do(CHEAP, 1, ANYONE)).keys() == {"bytes"}


@in_loop
async def test_the_time_limit_of_a_job_ends_with_it(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SLOWDOWN", 60.0)  # the process itself ends 1.5 s after the beginning of a job
    async with started(schema_pool(plain, seconds=0.1)) as pool:
        for pause in (1.8, 0.0):
            assert (await pool.do(CHEAP, 1, ANYONE)).keys() == {"bytes"}
            await asyncio.sleep(pause)


@in_loop
async def test_a_job_without_processor_time_is_busy_and_its_schema_not_refused(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: object, job: object) -> dict[str, object]:
        await asyncio.sleep(60)
        return {}

    async with started(Grammars(tokenizer_data(plain), ServerConfig(schema_timeout=0.1), in_helper_thread)) as grammars:
        with monkeypatch.context() as patch:
            patch.setattr(pools, "Worker", Slow)
            patch.setattr(Slow, "answer", never)
            with pytest.raises(Busy):
                await grammars.get({"type": "integer"}, ANYONE)
        assert await grammars.get({"type": "integer"}, ANYONE) is not None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc (Linux)")
@in_loop
async def test_a_job_over_its_memory_limit_is_killed_and_the_next_runs(plain: LLM) -> None:
    async with started(schema_pool(plain, memory=64 << 20)) as pool:
        with pytest.raises(OutriderError, match="within 64 MiB of memory: send a smaller one"):
            await pool.do(DEAR, 1, ANYONE)
        assert (await pool.do(CHEAP, 1, ANYONE)).keys() == {"bytes"}


STUCK = (  # a chat template that takes a minute or 5 GB for one message
    "{% set said = messages[0].content %}"
    "{% if said == 'slow' %}{% for _ in range(99999) %}{% for _ in range(9999) %}{% endfor %}{% endfor %}"
    "{% elif said == 'large' %}{{ said * 10**9 }}{% endif %}{{ said }}"
)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc (Linux)")
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("said", "limit"), [("slow", "0.5 s"), ("large", "256 MiB of memory")])
@in_loop
async def test_messages_over_a_limit_are_refused_and_their_process_is_replaced(plain: LLM, said: str, limit: str) -> None:
    config = ServerConfig(text_timeout=0.5, worker_memory=0.25, workers=1)
    data = {**(tokenizer_data(plain) or {}), "template": STUCK}
    async with started(Prompts(plain, config, data, in_helper_thread)) as prompts:
        with pytest.raises(OutriderError, match=f"cannot tokenise a text within {limit}: send a smaller one"):
            await prompts.chat(chat_body([{"role": "user", "content": said}]), ANYONE)
        found = await prompts.chat(chat_body([{"role": "user", "content": "a"}]), ANYONE)
        assert found == [plain.encode("a", add_special_tokens=False)]


@pytest.mark.skipif(not LISTED, reason="needs /proc (Linux)")
@in_loop
async def test_a_killed_worker_loses_no_answer(plain: LLM) -> None:
    others = children(os.getpid())
    async with started(schema_pool(plain)) as pool:
        assert (await pool.do(CHEAP, 1, ANYONE)).keys() == {"bytes"}
        (worker,) = children(os.getpid()) - others
        os.kill(worker, signal.SIGKILL)  # while it is idle
        assert (await pool.do(CHEAP, 1, ANYONE)).keys() == {"bytes"}
        busy = asyncio.ensure_future(pool.do(DEAR, 1, ANYONE))
        for _ in range(2):  # twice while it works: after the second time the job fails
            await asyncio.sleep(1.0)
            for worker in children(os.getpid()) - others:
                os.kill(worker, signal.SIGKILL)
        with pytest.raises(Busy):
            await busy
        assert (await pool.do(CHEAP, 1, ANYONE)).keys() == {"bytes"}


@pytest.mark.skipif(not LISTED, reason="needs /proc (Linux)")
@in_loop
async def test_all_workers_may_be_killed_while_they_are_idle(plain: LLM) -> None:
    others = children(os.getpid())
    async with started(schema_pool(plain, size=2)) as pool:
        while pool._num_ready < 2:
            await asyncio.sleep(0.05)
        for worker in children(os.getpid()) - others:
            os.kill(worker, signal.SIGKILL)
        assert (await pool.do(CHEAP, 1, ANYONE)).keys() == {"bytes"}


@pytest.mark.parametrize(
    ("code", "told", "is_remembered"),
    [
        (-signal.SIGKILL, "the server is busy: try again in 2 s", False),
        (-signal.SIGSEGV, "cannot compile a JSON schema: its process failed", True),
        (-signal.SIGPROF, "cannot compile a JSON schema within 2 s: send a smaller one", True),
        (-signal.SIGABRT, "cannot compile a JSON schema within 1024 MiB of memory: send a smaller one", True),
        (os.EX_UNAVAILABLE, "cannot compile a JSON schema within 1024 MiB of memory: send a smaller one", True),
    ],
)
def test_a_schema_is_refused_later_unless_its_process_was_killed_from_outside(
    plain: LLM, faulty: Callable[..., None], monkeypatch: pytest.MonkeyPatch, code: int, told: str, is_remembered: bool
) -> None:
    monkeypatch.setattr(Slow, "answer", lambda self, job: asyncio.sleep(0, {"bytes": 0}))

    @in_loop
    async def ask() -> None:
        faulty(*[None, WorkerLost(code)] * (1 if is_remembered else 4))  # a pool of one process repeats a killed job once
        async with started(Grammars(tokenizer_data(plain), ServerConfig(workers=1), in_helper_thread)) as grammars:
            for _ in range(2):
                with pytest.raises(OutriderError) as error:
                    await grammars.get({"type": "integer"}, ANYONE)
                assert str(error.value) == told
            if not is_remembered:
                assert await grammars.get({"type": "integer"}, ANYONE) is not None

    ask()


@in_loop
async def test_jobs_fail_at_once_and_starts_are_retried_if_no_process_starts(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(pools, "COMMAND", "raise SystemExit(3)")

    async with started(schema_pool(plain)) as pool:
        for _ in range(2):
            with pytest.raises(Stopping, match="cannot start a process to compile a JSON schema"):
                await pool.do(CHEAP, 1, ANYONE)
        monkeypatch.undo()
        while pool.start_error:
            await asyncio.sleep(0.05)
        assert (await pool.do(CHEAP, 1, ANYONE)).keys() == {"bytes"}


class Slow:
    """A slow worker that records its jobs."""

    order: ClassVar[list[str]] = []

    @classmethod
    async def start(cls, setup: object) -> Slow:
        return cls()

    async def answer(self, job: dict[str, str]) -> dict[str, str]:
        await asyncio.sleep(0.01)
        self.order.append(job["of"])
        return {}

    async def kill(self) -> None: ...


class Faulty(Slow):
    """A worker whose next calls of ``start`` and ``answer`` raise these errors; None is a success."""

    outcomes: ClassVar[list[Exception | None]] = []

    @classmethod
    def _go_on(cls) -> None:
        error = cls.outcomes.pop(0) if cls.outcomes else None
        if error is not None:
            raise error

    @classmethod
    async def start(cls, setup: object) -> Faulty:
        cls._go_on()
        return cls()

    async def answer(self, job: dict[str, str]) -> dict[str, str]:
        self._go_on()
        return await super().answer(job)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the outcomes of the workers' next calls."""
    monkeypatch.setattr(pools, "Worker", Faulty)
    monkeypatch.setattr(pools, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(Slow, "order", [])
    return lambda *outcomes: monkeypatch.setattr(Faulty, "outcomes", list(outcomes))


async def recovered(pool: WorkerPool) -> None:
    while Faulty.outcomes or pool.start_error:
        await asyncio.sleep(0.01)


@in_loop
async def test_an_unexpected_failure_does_not_end_the_pool(plain: LLM, faulty: Callable[..., None]) -> None:
    faulty(None, ValueError("no JSON"), RuntimeError("can't start\nnew thread"), None)
    async with started(schema_pool(plain)) as pool:
        with pytest.raises(ValueError, match="no JSON"):
            await pool.do({"of": "a"}, 1, ANYONE)
        await recovered(pool)
        assert await pool.do({"of": "b"}, 1, ANYONE) == {}


@pytest.mark.parametrize(("error", "reason"), [(MemoryError(), "MemoryError"), (TimeoutError(), "not ready after 60 s")])
def test_the_reason_why_no_process_starts_is_logged(
    plain: LLM, faulty: Callable[..., None], caplog: pytest.LogCaptureFixture, error: Exception, reason: str
) -> None:
    @in_loop
    async def ask() -> None:
        faulty(error)
        async with started(schema_pool(plain)) as pool:
            with pytest.raises(Stopping, match=f"cannot start a process to compile a JSON schema: {reason}$"):
                await pool.do({"of": "a"}, 1, ANYONE)

    ask()
    assert f"cannot start a process to compile a JSON schema: {reason}" in caplog.messages


@in_loop
async def test_a_retried_job_that_has_failed_meanwhile_does_not_run(plain: LLM, faulty: Callable[..., None]) -> None:
    faulty(None, WorkerLost(-signal.SIGKILL), OSError("no memory"), None)
    async with started(schema_pool(plain)) as pool:
        with pytest.raises(Stopping, match="cannot start a process to compile a JSON schema: no memory"):
            await pool.do({"of": "a"}, 1, ANYONE)
        await recovered(pool)
        assert await pool.do({"of": "b"}, 1, ANYONE) == {}
        assert Slow.order == ["b"]


@in_loop
async def test_a_retried_job_keeps_its_turn(plain: LLM, faulty: Callable[..., None]) -> None:
    faulty(None, WorkerLost(-signal.SIGKILL), None)
    async with started(schema_pool(plain)) as pool:
        asked = ("ada 1", 100), ("ada 2", 100), ("bob 1", 150), ("bob 2", 150)
        await asyncio.gather(*(pool.do({"of": job}, cost, Client(job[:3])) for job, cost in asked))
    assert Slow.order == ["ada 1", "bob 1", "ada 2", "bob 2"]


@in_loop
async def test_a_process_that_does_not_start_is_no_failure_while_another_runs(
    plain: LLM, faulty: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "RETRY_SECONDS", 60.0)
    faulty(None, OSError("no memory"))
    async with started(schema_pool(plain, size=2)) as pool:
        await asyncio.sleep(0.01)
        assert pool.start_error is None and await pool.do({"of": "a"}, 1, ANYONE) == {}
    faulty(None, None, WorkerLost(-signal.SIGKILL), OSError("no memory"))
    async with started(schema_pool(plain, size=2)) as pool:
        await asyncio.sleep(0.01)
        assert await pool.do({"of": "b"}, 1, ANYONE) == {}  # repeated by the other process
    assert Slow.order == ["a", "b"]


@pytest.mark.parametrize("num_turns", range(5))
@in_loop
async def test_a_pool_stops_while_a_job_ends(plain: LLM, monkeypatch: pytest.MonkeyPatch, num_turns: int) -> None:
    """A runner that is cancelled in the moment when its answer arrives must not go on."""
    go = asyncio.Event()

    async def answer(self: Slow, job: object) -> dict[str, str]:
        await go.wait()
        return {}

    monkeypatch.setattr(pools, "Worker", Slow)
    monkeypatch.setattr(Slow, "answer", answer)
    pool = schema_pool(plain)
    pool.start()
    job = asyncio.ensure_future(pool.do({"of": "a"}, 1, ANYONE))
    await asyncio.sleep(0.01)
    go.set()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(2.0):
        await pool.stop()
    await asyncio.gather(job, return_exceptions=True)


@in_loop
async def test_clients_take_turns(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "Worker", Slow)
    monkeypatch.setattr(Slow, "order", [])

    async with started(schema_pool(plain)) as pool:
        many = [asyncio.ensure_future(pool.do({"of": "ada"}, 100, Client("ada"))) for _ in range(20)]
        await asyncio.sleep(0.015)
        await asyncio.gather(pool.do({"of": "bob"}, 100, Client("bob")), pool.do({"of": "eve"}, 100, Client("eve", 1)))
        assert Slow.order.index("eve") <= 3 and Slow.order.index("bob") <= 5
        many[5].cancel()
        await asyncio.gather(*many, return_exceptions=True)
        assert Slow.order.count("ada") == 19


@in_loop
async def test_without_keys_connections_take_turns_and_with_them_clients_do() -> None:
    asked = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["state"]["call"].client)

    async def ask(keys: KeyRing, port: int) -> None:
        headers = [(b"authorization", b"Bearer secret")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "client": ("::1", port)}
        await Gate(app, ServerConfig(), keys, "::1")(scope, asyncio.Queue().get, asyncio.Queue().put)

    for keys in (KeyRing(), KeyRing([("secret", Client("ada"))])):
        for port in (1, 2):
            await ask(keys, port)
    assert [each.name for each in asked] == ["anonymous", "anonymous", "ada", "ada"]
    assert len({each.queue_key for each in asked[:2]}) == 2 and asked[2].queue_key == asked[3].queue_key


def test_a_single_client_has_one_queue() -> None:
    ada, bob = Client("ada"), Client("bob")
    assert [KeyRing([("1", ada), ("2", ada)]).client(key).queue_key for key in "12"] == ["", ""]
    assert len({KeyRing([("1", ada), ("2", bob)]).client(key).queue_key for key in "12"} - {""}) == 2


@in_loop
async def test_a_schema_is_tested_once_and_its_refusal_cached(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "Worker", Slow)
    monkeypatch.setattr(Slow, "answer", lambda self, job: Slow.order.append(job["schema"]) or asyncio.sleep(0.01, {"bytes": 0}))
    monkeypatch.setattr(Slow, "order", [])

    async with started(Grammars(tokenizer_data(plain), ServerConfig(), in_helper_thread)) as grammars:
        found = await asyncio.gather(*(grammars.get({"type": "integer"}, ANYONE) for _ in range(5)))
        assert len(set(map(id, found))) == 1 and found[0] is await grammars.get({"type": "integer"}, ANYONE)
        for _ in range(3):
            with pytest.raises(OutriderError, match="unsupported JSON schema"):
                await grammars.get({"type": "nonsense"}, ANYONE)
        assert len(Slow.order) == 2
        released = weakref.ref(found[0])
        found.pop().refusal = "too slow"
        found.clear()
        for _ in range(2):
            with pytest.raises(OutriderError, match="too slow"):
                await grammars.get({"type": "integer"}, ANYONE)
        gc.collect()
        assert released() is None  # what it took until then is free


@in_loop
async def test_a_grammar_with_many_outputs_is_compiled_again(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs share the lexer's states: a limit that a late one exceeds is not the schema's fault."""
    monkeypatch.setattr(pools, "Worker", Slow)
    monkeypatch.setattr(Slow, "answer", lambda self, job: asyncio.sleep(0, {"bytes": 0}))

    async with started(Grammars(tokenizer_data(plain), ServerConfig(), in_helper_thread)) as grammars:
        for failure in (None, "too many states"):
            first = await grammars.get({"type": "integer"}, ANYONE)
            for _ in range(MAX_OUTPUTS if failure is None else FEW_OUTPUTS + 1):
                assert await grammars.get({"type": "integer"}, ANYONE) is first
                first.matcher()
            first.refusal = failure
            assert await grammars.get({"type": "integer"}, ANYONE) is not first


@in_loop
async def test_the_memory_of_grammars_is_limited(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "Worker", Slow)
    monkeypatch.setattr(Slow, "answer", lambda self, job: asyncio.sleep(0, {"bytes": 1 << 28}))

    other = replace(ANYONE, connection="other")
    async with started(Grammars(tokenizer_data(plain), ServerConfig(worker_memory=1.25), in_helper_thread)) as grammars:
        used = [await grammars.get({"const": number}, ANYONE) for number in range(3)]
        assert len(grammars._kept) == 2  # the cache takes half
        with pytest.raises(Busy):  # more than three quarters
            await grammars.get({"const": 3}, ANYONE)
        del used[0]
        gc.collect()
        assert await grammars.get({"const": 3}, ANYONE) and await grammars.get({"const": 4}, other)
        used.clear()
        monkeypatch.setattr(Slow, "answer", lambda self, job: asyncio.sleep(0, {"bytes": 3 << 28}))
        used = [await grammars.get({"const": 5}, ANYONE)]  # those that are only cached make room
        assert len(grammars._kept) == 1  # although it takes more than half
        assert await grammars.get(None, ANYONE)  # of any object, which is always served
        cached = list(grammars._kept)
        monkeypatch.setattr(Slow, "answer", lambda self, job: asyncio.sleep(0, {"bytes": 1 << 30}))
        for _ in range(2):
            with pytest.raises(OutriderError, match="takes too much memory: simplify it"):
                await grammars.get({"const": 6}, ANYONE)  # more than a client's share of an empty server
        assert list(grammars._kept) == cached


@in_loop
async def test_grammars_that_are_compiled_at_once_share_the_memory(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def in_thread(work: Callable[[], Result]) -> Result:
        await asyncio.sleep(0.01)
        return work()

    monkeypatch.setattr(pools, "Worker", Slow)
    monkeypatch.setattr(Slow, "answer", lambda self, job: asyncio.sleep(0, {"bytes": 1 << 28}))
    alone = replace(ANYONE, is_only=True)
    async with started(Grammars(tokenizer_data(plain), ServerConfig(workers=6), in_thread)) as grammars:
        asked = [grammars.get({"const": number}, alone) for number in range(6)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(each, Busy) for each in found].count(True) == 2  # four take the whole memory


@in_loop
async def test_a_client_with_a_full_share_does_not_make_those_busy_who_ask_for_the_same(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "Worker", Slow)
    monkeypatch.setattr(Slow, "answer", lambda self, job: asyncio.sleep(0, {"bytes": 1 << 28}))
    ada, bob = Client("ada"), Client("bob")
    async with started(Grammars(tokenizer_data(plain), ServerConfig(), in_helper_thread)) as grammars:
        used = [await grammars.get({"const": number}, ada) for number in range(2)]
        asked = [grammars.get({"const": 2}, client) for client in (ada, bob, bob)]
        first, *others = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(first, Busy) and others[0] is others[1] is await grammars.get({"const": 2}, ada)
        assert len(used) == 2


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc (Linux)")
@in_loop
async def test_a_worker_measures_the_memory_of_a_grammar(plain: LLM) -> None:
    async with started(schema_pool(plain)) as pool:
        alternatives = {"enum": ["".join(chr(0x4E00 + (i * j) % 5000) for j in range(50)) for i in range(4000)]}
        small, large = [(await pool.do(job, 1, ANYONE))["bytes"] for job in (CHEAP, {"schema": json.dumps(alternatives)})]
        assert large > 1 << 20 and large > 4 * small
        assert (await pool.do(CHEAP, 1, ANYONE))["bytes"] < large // 4


@in_loop
async def test_grammars_in_memory_are_limited(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "Worker", Slow)
    monkeypatch.setattr(Slow, "answer", lambda self, job: asyncio.sleep(0, {"bytes": 0}))

    async with started(Grammars(tokenizer_data(plain), ServerConfig(), in_helper_thread)) as grammars:
        used = [await grammars.get({"const": number}, ANYONE) for number in range(MAX_CACHED)]
        assert len(grammars._kept) == MAX_NEW  # others are in use, but not cached
        for number in range(MAX_CACHED - MAX_NEW, MAX_CACHED):
            assert await grammars.get({"const": number}, ANYONE) is used[number]
        most = MAX_GRAMMARS * 3 // 4  # of one client
        used += [await grammars.get({"const": number}, ANYONE) for number in range(MAX_CACHED, most)]
        with pytest.raises(Busy):
            await grammars.get({"const": most}, ANYONE)
        other = replace(ANYONE, connection="other")
        used += [await grammars.get({"const": number}, other) for number in range(most, most + 12)]
        with pytest.raises(Busy):
            await grammars.get({"const": "new"}, other)
        alone = replace(ANYONE, is_only=True)  # not limited in favour of others
        used += [await grammars.get({"const": number}, alone) for number in range(most + 12, MAX_GRAMMARS)]
        assert len(grammars._kept) == 2 * MAX_NEW  # those that were requested again stay
        assert await grammars.get({"const": MAX_CACHED - 1}, ANYONE) is used[MAX_CACHED - 1]
        with pytest.raises(Busy):
            await grammars.get({"const": "new"}, alone)
        assert await grammars.get({"const": MAX_GRAMMARS - 1}, ANYONE) is used[-1]
        assert await grammars.get(None, ANYONE)  # of any object
        used.clear()
        gc.collect()
        assert await grammars.get({"const": "new"}, ANYONE)
        for number in range(2 * MAX_CACHED + 2):  # each is requested twice
            assert await grammars.get({"const": f"again {number // 2}"}, alone)
        assert len(grammars._kept) == MAX_CACHED
        monkeypatch.setattr("outrider.server.grammar.MAX_KEPT", 100)
        assert await grammars.get({"const": "one more"}, alone) and sum(map(len, grammars._kept)) <= 100
        with pytest.raises(OutriderError, match="unsupported JSON schema"):
            await grammars.get({"type": "nonsense" * 20}, alone)
        assert not grammars._refused


@in_loop
async def test_the_table_of_tokens_is_built_while_a_worker_tests_the_schema(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, table = asyncio.Event(), schemas.token_table
    monkeypatch.setattr(schemas, "token_table", lambda data: built.set() or table(data))

    async def answer(self: Slow, job: dict[str, Any]) -> dict[str, Any]:
        await built.wait()
        return {"bytes": 0}

    monkeypatch.setattr(pools, "Worker", Slow)
    monkeypatch.setattr(Slow, "answer", answer)
    async with started(Grammars(tokenizer_data(plain), ServerConfig(), in_helper_thread)) as grammars:
        assert await asyncio.wait_for(grammars.get({"type": "integer"}, ANYONE), 5)
