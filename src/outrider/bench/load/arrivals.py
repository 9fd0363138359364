"""Arrival processes of a load test: a fixed number of clients, or random arrivals at a rate."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from outrider.types import OutriderError

Item = TypeVar("Item")
Result = TypeVar("Result")
Ask = Callable[[Item], Awaitable[Result]]


@dataclass(frozen=True)
class Load:
    """A number of clients, each of which waits for its answer before the next request; or arrivals at a fixed rate."""

    concurrency: int | None = None
    rate: float | None = None  # mean number of conversations per second; arrivals are a Poisson process

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise OutriderError("invalid load: expected either a number of clients or a rate")
        if (self.concurrency is not None and self.concurrency < 1) or (self.rate is not None and not 0 < self.rate < inf):
            raise OutriderError("invalid load: expected at least 1 client, or a finite rate above 0")

    @property
    def label(self) -> str:
        return f"{self.concurrency} at a time" if self.concurrency else f"{self.rate:g}/s"

    async def send(self, ask: Ask[Item, Result], items: Sequence[Item], seed: int) -> list[Result]:
        """Send all items and return the results. ``seed``: seed of the arrival times."""
        if self.concurrency is not None:
            return await _in_turn(ask, items, self.concurrency)
        assert self.rate is not None
        return await _at_random(ask, items, self.rate, seed)


async def _in_turn(ask: Ask[Item, Result], items: Sequence[Item], concurrency: int) -> list[Result]:
    waiting, results = iter(items), []

    async def client() -> None:
        for item in waiting:
            results.append(await ask(item))

    await asyncio.gather(*[client() for _ in range(min(concurrency, len(items)))])
    return results


async def _at_random(ask: Ask[Item, Result], items: Sequence[Item], rate: float, seed: int) -> list[Result]:
    """Send items with exponential gaps between planned arrivals, so that delays do not accumulate."""
    loop, choose = asyncio.get_running_loop(), random.Random(seed)
    tasks, at = [], loop.time()
    for item in items:
        await asyncio.sleep(max(0.0, at - loop.time()))
        tasks.append(asyncio.ensure_future(ask(item)))
        at += choose.expovariate(rate)
    return list(await asyncio.gather(*tasks))
