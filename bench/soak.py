"""Load a server with many clients, cancelled streams, malformed bodies, huge prompts and a failing proposer.

    python bench/soak.py --minutes 30 --clients 32 --out results/soak.json
    python bench/soak.py --minutes 45 --clients 32 --hostile 0.1 --out results/soak-alternating.json

With ``--hostile`` others make calls designed to stall or break the server (``hostile.py``), as that share of all calls, in two
of every three minutes. None may make the server fail, and the clients' first tokens may come at most 1.5 times as late (95th
percentile) as in the minutes between them, which are compared because a shared machine's speed changes from hour to hour.

The server is a separate process whose proposer fails every few seconds. Every greedy answer is compared with the same engine's
offline output, streams must end, no request may hang, and memory may not grow by more than 5% after the first fifth of the run.
Exit code 1 if a condition fails. The last line of output is the result as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import hostile
import httpx
from outcome import count, finish, parsed, parser_of
from processes import children, resident

from outrider.bench.load.own_server import OwnServer, own_server
from outrider.bench.provenance import origin
from outrider.bench.statistics import percentiles
from outrider.types import OutriderError

PROMPTS = [
    "def quicksort(",
    "Once upon a time",
    "class Stack:\n",
    "The ship left the harbour",
    '{"name": "Ada", ',
    "import os\n\n",
    "def add(a, b):\n    return a + b\n\n\n" * 6,  # prefilled in its first round
    "She wrote the number down, and the next, and went on. " * 40,  # prefilled in several chunks
]
Call = Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]
MAX_TOKENS = (8, 24, 60)
FAULT_SECONDS = 3.0
STUCK_SECONDS = 300.0
MAX_GROWTH = 0.05
MAX_DELAY = 1.5  # maximum ratio of first-token times with and without hostile requests, 95th percentile
HOSTILE_SECONDS, QUIET_SECONDS = 120.0, 60.0  # in turn
SETTLING_SECONDS = 15.0  # at the start of each phase, not compared: requests of the previous phase are still running


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=count, default=32)
    parser.add_argument("--target", help="folder or hub id (default: the embedded target)")
    parser.add_argument("--draft")
    parser.add_argument("--method")
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)  # of the server process
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hostile", type=share, default=0.0, help="share of requests designed to stall the server")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parsed(parser)


def share(text: str) -> float:
    """Parse the value of ``--hostile``, 0 to 0.5."""
    value = float(text)
    if not 0 <= value <= 0.5:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 0.5")
    return value


def options(args: argparse.Namespace) -> dict[str, Any]:
    given = {"draft": args.draft, "method": args.method}
    return {name: value for name, value in given.items() if value is not None} | {"same_text": True}


def serve(args: argparse.Namespace) -> None:
    """Main function of the server process. Its proposer raises or returns invalid proposals every few seconds."""
    from outrider import LLM, Proposal
    from outrider.cli.serve import MAX_BATCH
    from outrider.server.config import KeyRing, ServerConfig
    from outrider.server.run import listen, log_json
    from outrider.server.run import serve as run

    llm = LLM(args.target, max_batch=MAX_BATCH, **options(args))
    propose, last, kinds = llm.proposer.propose, [time.monotonic()], itertools.cycle((0, 1))

    def faulty(context: Any, k: int) -> Proposal:
        proposal = propose(context, k)
        if time.monotonic() - last[0] < FAULT_SECONDS:
            return proposal
        last[0] = time.monotonic()
        if next(kinds):
            raise RuntimeError("injected")
        return Proposal(proposal.token_ids - 10**9, proposal.lens)

    llm.proposer.propose = faulty  # type: ignore[method-assign]
    config = ServerConfig(port=args.port, max_queue=4 * args.clients)
    listener = listen(config.host, config.port)
    log_json()
    run(llm, config, KeyRing(), listener)


class Soak:
    """The clients and their findings."""

    def __init__(self, args: argparse.Namespace, wanted: dict[tuple[str, int], str], server: OwnServer) -> None:
        self._args, self._wanted, self._url, self._pid = args, wanted, server.url, server.process.pid
        self._end = time.monotonic() + 60 * args.minutes
        self.counts: dict[str, int] = {}
        self.wrong: list[str] = []
        self.rss: list[tuple[float, int]] = []
        self.worker_rss = 0  # maximum bytes of the server's worker processes
        # seconds to the first token of honest streams, with and without hostile requests at the same time
        self.first_tokens: dict[bool, list[float]] = {True: [], False: []}
        self._started = time.monotonic()
        self.num_honest = self.num_hostile = 0
        self._due: asyncio.Queue[None] = asyncio.Queue()  # hostile calls to make

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    async def run(self) -> None:
        """Run all clients until the time is over, sampling the server's memory every few seconds."""
        clients = [asyncio.create_task(self._client(index)) for index in range(self._args.clients)]
        adversaries = [asyncio.create_task(self._adversary(index)) for index in range(self._args.clients)]
        while time.monotonic() < self._end:
            self.rss.append((time.monotonic() - self._started, resident(self._pid)))
            self.worker_rss = max(self.worker_rss, sum(map(resident, children(self._pid))))
            await asyncio.sleep(min(5.0, max(self._end - time.monotonic(), 0.1)))
        done, stuck = await asyncio.wait(clients, timeout=STUCK_SECONDS)
        for task in done:
            task.result()
        for task in stuck:
            self.wrong.append("a client never received the end of its answer")
            task.cancel()
        for task in adversaries:
            task.cancel()
        await asyncio.gather(*adversaries, return_exceptions=True)

    async def _client(self, index: int) -> None:
        choose = random.Random(f"{self._args.seed}-{index}")
        async with httpx.AsyncClient(base_url=self._url, timeout=STUCK_SECONDS) as http:
            while time.monotonic() < self._end:
                kinds = (self._whole, self._stream, self._cancel, self._malformed, self._huge)
                (kind,) = choose.choices(kinds, (4, 4, 2, 1, 1))
                self.num_honest += 1
                is_hostile = self._phase(time.monotonic())[0]
                if is_hostile and choose.random() < self._args.hostile / (1 - self._args.hostile):
                    self._due.put_nowait(None)
                await self._try(kind, http, choose)
                await asyncio.sleep(choose.random() * 0.2)

    def _phase(self, at: float) -> tuple[bool, float]:
        """Return whether hostile calls are made at this time, and for how many seconds it has been so."""
        if not self._args.hostile:
            return False, at - self._started
        since = (at - self._started) % (HOSTILE_SECONDS + QUIET_SECONDS)
        return (True, since) if since < HOSTILE_SECONDS else (False, since - HOSTILE_SECONDS)

    def _time_of_first(self, started: float) -> None:
        """Record the time to the first token of an honest stream that starts its output now."""
        is_hostile, since = self._phase(started)
        if since >= SETTLING_SECONDS:
            self.first_tokens[is_hostile].append(time.monotonic() - started)

    async def _adversary(self, index: int) -> None:
        """Send a hostile request for each entry that the clients put into the queue, each over a new connection."""
        choose = random.Random(f"{self._args.seed}-hostile-{index}")
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._url, timeout=STUCK_SECONDS, limits=limits) as http:
            while True:
                await self._due.get()
                self.num_hostile += 1
                await self._try(self._hostile, http, choose)

    async def _try(self, kind: Call, http: httpx.AsyncClient, choose: random.Random) -> None:
        try:
            await kind(http, choose)
        except (httpx.HTTPError, OSError, ValueError, LookupError) as error:  # a lost connection, an answer of another form
            self.wrong.append(f"{kind.__name__}: {type(error).__name__} {error}")

    def _asked(self, choose: random.Random) -> tuple[tuple[str, int], dict[str, Any]]:
        key = choose.choice(PROMPTS), choose.choice(MAX_TOKENS)
        return key, {"prompt": key[0], "max_tokens": key[1], "temperature": 0}

    async def _whole(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        key, body = self._asked(choose)
        answer = await http.post("/v1/completions", json=body)
        if answer.status_code == 429:
            self.count("busy")
        elif answer.status_code != 200:
            self.wrong.append(f"{answer.status_code}: {answer.text[:200]}")
        else:
            self._compare(key, answer.json()["choices"][0]["text"])

    async def _stream(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        key, body = self._asked(choose)
        text, is_done, is_first, started = "", False, True, time.monotonic()
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            if answer.status_code == 429:
                self.count("busy")
                return
            if answer.status_code != 200:
                self.wrong.append(f"{answer.status_code}: {(await answer.aread())[:200]!r}")
                return
            async for line in answer.aiter_lines():
                is_done |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    if is_first:
                        self._time_of_first(started)
                    is_first = False
                    text += "".join(choice["text"] for choice in json.loads(line[6:]).get("choices", ()))
        if not is_done:
            self.wrong.append("a stream ended before its end")
        self._compare(key, text)

    async def _cancel(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        """Disconnect in the middle of a stream, or while waiting for a complete answer."""
        body = self._asked(choose)[1] | {"max_tokens": 400}
        if choose.random() < 0.5:
            async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                lines = answer.aiter_lines()
                for _ in range(choose.randrange(6)):
                    await anext(lines, None)
        else:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(http.post("/v1/completions", json=body), choose.random() * 0.5)
        self.count("cancelled")

    async def _malformed(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        bodies = (b"{", b"\xff\x00", b'{"prompt": 3}', b'{"prompt": "a", "temperature": NaN}', b"[" * 5000)
        answer = await http.post("/v1/completions", content=choose.choice(bodies), headers={"content-type": "application/json"})
        self._refused(answer, "malformed")

    async def _huge(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        answer = await http.post("/v1/completions", json={"prompt": "word " * choose.choice((20_000, 2_000_000))})
        self._refused(answer, "huge")

    async def _hostile(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        """Send a hostile request. It may be rejected, answered or disconnected; a failing server is a finding."""
        if choose.random() < 0.25:
            kind, status = await hostile.connection(int(self._url.rpartition(":")[2]), choose.choice(list(hostile.CONNECTIONS)))
        else:
            kind, body = choose.choice((hostile.schema, hostile.text, hostile.value, hostile.malformed))(choose)
            answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            status = answer.status_code
        self.count(f"{kind}: {status}")
        if status >= 500 or (kind.startswith("malformed") and not 400 <= status < 500):
            self.wrong.append(f"{kind}: {status}")

    def _refused(self, answer: httpx.Response, kind: str) -> None:
        self.count(kind)
        if not 400 <= answer.status_code < 500:
            self.wrong.append(f"a {kind} body: {answer.status_code}")

    def _compare(self, key: tuple[str, int], text: str) -> None:
        self.count("answers")
        if text != self._wanted[key]:
            self.wrong.append(f"{key}: {text!r}, offline {self._wanted[key]!r}")


def expected(args: argparse.Namespace) -> dict[tuple[str, int], str]:
    """Return the engine's offline output without drafts."""
    from outrider import LLM, SamplingParams

    llm = LLM(args.target, **options(args) | {"num_draft_tokens": 0})
    pairs = [(prompt, count) for prompt in PROMPTS for count in MAX_TOKENS]
    return {
        (prompt, count): llm.generate(prompt, SamplingParams(max_tokens=count))[0].outputs[0].text for prompt, count in pairs
    }


def ended(server: subprocess.Popen[bytes]) -> list[str]:
    """End the server. Returns what was wrong with its end."""
    if server.poll() is not None:
        return [f"the server ended early, with code {server.returncode}"]
    server.send_signal(signal.SIGTERM)
    try:
        code = server.wait(90)
    except subprocess.TimeoutExpired:
        server.kill()
        return ["the server did not end after a signal"]
    return [] if code == 0 else [f"the server ended with code {code}"]


def settled(url: str) -> tuple[str, list[str]]:
    """Wait until the server is idle. Returns the metrics page, and gauges that are not 0 in time."""
    for _ in range(100):
        page = httpx.get(f"{url}/metrics", timeout=30).text
        left = [name for name in ("vllm:num_requests_running", "vllm:num_requests_waiting") if metric(page, name)]
        if not left:
            break
        time.sleep(0.1)
    return page, [f"{name} is not 0 at the end" for name in left]


def metric(page: str, name: str) -> float:
    return next((float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)), 0.0)


def growth(rss: list[tuple[float, int]], minutes: float) -> float:
    """Return the relative growth of memory after the first fifth of the time."""
    sizes = [size for at, size in rss if at > 60 * minutes / 5]
    return max(sizes) / sizes[0] - 1 if sizes else 0.0


def main() -> int:
    args = arguments()
    if args.serve:
        serve(args)
        return 0
    wanted, started = expected(args), time.monotonic()
    with own_server(sys.argv[1:], (sys.executable, __file__, "--serve")) as server:
        seconds = time.monotonic() - started
        hostile.texts()
        soak = Soak(args, wanted, server)
        try:
            asyncio.run(soak.run())
            page, left = settled(server.url)
            wrong = [*soak.wrong, *left, *ended(server.process)]
        finally:
            shutil.copy(server.log, "soak-server.log")
    grown, faults = growth(soak.rss, args.minutes), metric(page, "outrider:proposer_faults_total")
    late, usual = percentiles(soak.first_tokens[True]), percentiles(soak.first_tokens[False])
    delayed = late["p95"] / usual["p95"] if late and usual else None
    holds = not wrong and grown < MAX_GROWTH and faults > 0 and (delayed is None or delayed <= MAX_DELAY)
    result = {
        **origin(),
        "minutes": args.minutes,
        "clients": args.clients,
        "hostile": round(soak.num_hostile / max(soak.num_honest + soak.num_hostile, 1), 3),
        "first_token_p50": round(usual["p50"], 4) if usual else None,
        "first_token_p95": round(usual["p95"], 4) if usual else None,
        "first_token_p95_hostile": round(late["p95"], 4) if late else None,
        "first_token_p95_ratio": None if delayed is None else round(delayed, 2),
        "seconds_to_ready": round(seconds, 2),
        "counts": soak.counts,
        "wrong": wrong[:20],
        "num_wrong": len(wrong),
        "rss_growth": round(grown, 4),
        "rss_mib": max((size for _, size in soak.rss), default=0) >> 20,
        "worker_rss_mib": soak.worker_rss >> 20,
        "proposer_faults": faults,
        "holds": holds,
    }
    return finish(result, args.out)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OutriderError as error:
        raise SystemExit(f"error: {error}") from None
