"""Measure a server over loads and repeats, plain and speculative in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain, cycle, islice
from secrets import token_hex
from typing import Any

import httpx

from outrider.bench.load import counters
from outrider.bench.load.arrivals import Load
from outrider.bench.load.client import Client, Sample
from outrider.bench.load.counters import Counters
from outrider.progress import Report
from outrider.types import OutriderError

WARMUP_TOKENS = 8
TIMEOUT = httpx.Timeout(600.0, connect=30.0)


@dataclass(frozen=True)
class Mode:
    """A mode to measure: a server, and additional fields of its requests."""

    name: str
    url: str
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """Prompts and settings of a load test's requests."""

    prompts: Sequence[str]  # used cyclically; each run continues after those of the mode's previous run, across loads too
    turns: int = 1  # requests of a conversation; each prompt continues the answer to the one before
    requests_per_client: int = 4  # conversations
    num_requests: int = 32  # conversations per run with a rate
    max_tokens: int = 64
    temperature: float = 0.0
    shared_prefix: str = ""  # common prefix of all prompts of a run
    repeat: int = 3
    rest: float = 0.0  # seconds without requests before each run
    seed: int = 0

    def count(self, load: Load) -> int:
        """Return the number of conversations of one run."""
        return self.num_requests if load.concurrency is None else load.concurrency * self.requests_per_client

    def conversations(self, load: Load, run: str, earlier: int = 0) -> list[list[str]]:
        """Return the user's texts of each conversation of one run, ``turns`` each, after ``earlier`` conversations.

        A unique line precedes each conversation, after the shared prefix if there is one, so that only that prefix and earlier
        turns can hit a prefix cache.
        """
        found = []
        prefix = f"{_mark(run)}{self.shared_prefix}\n" if self.shared_prefix else ""
        texts = islice(cycle(self.prompts), earlier * self.turns, None)
        for index in range(self.count(load)):
            first, *later = islice(texts, self.turns)
            found.append([prefix + _mark(f"{run}, {index}") + first, *later])
        return found

    def body(self, model: str) -> dict[str, Any]:
        """Return the common fields of all requests, with a fixed number of tokens so that modes are comparable."""
        return {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass
class LoadRun:
    """One run of a load in one mode."""

    samples: list[Sample]
    seconds: float  # from the first request to the last token
    counted: Counters | None  # draft counts during the run, if available


@dataclass
class Group:
    """Repeats of one load, each with a run of every mode."""

    load: Load
    repeats: list[dict[str, LoadRun]] = field(default_factory=list)


def _mark(what: str) -> str:
    return f"# {sha256(what.encode()).hexdigest()[:8]}\n"


class Sweep:
    """Measure group by group. Finished measurements remain in ``groups`` after an interrupt."""

    def __init__(
        self,
        modes: Sequence[Mode],
        loads: Sequence[Load],
        traffic: Traffic,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.modes, self.loads, self.traffic = modes, loads, traffic
        self.groups: list[Group] = []
        self.servers: dict[str, dict[str, Any]] = {}  # mode -> entry of /v1/models
        self._headers, self._transport = dict(headers or {}), transport
        self._nonce = token_hex(4)  # makes prompts unique: the server may still cache those of an earlier sweep

    async def run(self, report: Report = lambda *_: None) -> None:
        """Run the sweep; the order of modes rotates. Raises ``httpx.HTTPError`` if a server does not answer.

        Raises ``OutriderError`` if the answers do not fit into a server's context.
        """
        async with AsyncExitStack() as stack:
            clients = {mode.name: await self._client(stack, mode) for mode in self.modes}
            done = earlier = 0
            total = sum(map(self.traffic.count, self.loads)) * self.traffic.repeat * len(self.modes)
            for load in self.loads:
                report(done, total, f"{load.label}: warming up")
                for mode in self.modes:
                    await self._warm_up(load, clients[mode.name], mode.name, earlier)
                group = Group(load)
                for repeat in range(self.traffic.repeat):
                    runs: dict[str, LoadRun] = {}
                    start = repeat % len(self.modes)
                    for mode in (*self.modes[start:], *self.modes[:start]):
                        report(done, total, f"{load.label}, {mode.name}")
                        await asyncio.sleep(self.traffic.rest)
                        runs[mode.name] = await self._measure(load, clients[mode.name], mode, repeat, earlier)
                        done += self.traffic.count(load)  # runs with many clients take longer
                    if not group.repeats:
                        self.groups.append(group)
                    group.repeats.append(runs)
                    earlier += self.traffic.count(load)

    async def _client(self, stack: AsyncExitStack, mode: Mode) -> Client:
        """Return a client for a mode, which asks for usage in every chunk if the server supports it."""
        max_connections = max([load.concurrency or self.traffic.num_requests for load in self.loads], default=1) + 1
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        options: dict[str, Any] = {"headers": self._headers, "timeout": TIMEOUT, "limits": limits, "transport": self._transport}
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=mode.url, **options))
        answer = await http.get("/v1/models")
        answer.raise_for_status()
        self.servers[mode.name] = about = dict(answer.json()["data"][0])
        context, max_tokens = about.get("max_model_len"), self.traffic.max_tokens  # Outrider and vLLM state their context
        if isinstance(context, int) and max_tokens >= context:
            where = f"the context of {mode.url} is {context} tokens, prompt included"
            raise OutriderError(f"invalid --max-tokens {max_tokens}: {where}")
        body = self.traffic.body(str(about["id"])) | dict(mode.more)
        counting = Client(http, body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}})
        sample = await counting.ask("a", max_tokens=1)
        return counting if sample.error is None else Client(http, body)

    async def _warm_up(self, load: Load, client: Client, mode: str, earlier: int) -> None:
        """Send short requests without timing, with the prompts before those that are measured next."""
        run, num = f"{self._nonce}, {load.label}, {mode}, warming up", load.concurrency or 4
        before = (earlier - num) % len(self.traffic.prompts)  # the num conversations before, cyclically
        conversations = self.traffic.conversations(load, run, before)[:num]
        await asyncio.gather(*[client.ask(first, max_tokens=WARMUP_TOKENS) for first, *_ in conversations])

    async def _measure(self, load: Load, client: Client, mode: Mode, repeat: int, earlier: int) -> LoadRun:
        traffic = self.traffic
        conversations = traffic.conversations(load, f"{self._nonce}, {load.label}, {mode.name}, {repeat}", earlier)
        seeds = range(traffic.seed, traffic.seed + len(conversations))
        before = await counters.read(client.http)

        async def converse(item: tuple[list[str], int]) -> list[Sample]:
            texts, seed = item
            history, turns = "", list[Sample]()
            for text in texts:
                turns.append(await client.ask(history + text, seed=seed))
                if turns[-1].error is not None:  # the next turn would continue nothing
                    break
                history += f"{text}{turns[-1].text}\n"
            return turns

        found = await load.send(converse, list(zip(conversations, seeds, strict=True)), traffic.seed + repeat)
        samples = list(chain.from_iterable(found))
        after = await counters.read(client.http)
        seconds = max(sample.ended for sample in samples) - min(sample.started for sample in samples)
        return LoadRun(samples, seconds, None if before is None or after is None else counters.between(before, after))
