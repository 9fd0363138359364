"""Arrival processes: a number of clients, or random arrivals at a rate."""

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
    """A number of clients, each sending its next request after an answer; or arrivals at a rate, however many are running."""

    concurrency: int | None = None
    rate: float | None = None  # requests per second, as a Poisson process

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise OutriderError("a load needs either a number of clients or a rate")
        if (self.concurrency is not None and self.concurrency < 1) or (self.rate is not None and not 0 < self.rate < inf):
            raise OutriderError("invalid load: expected at least 1 client, or a finite rate above 0")

    @property
    def label(self) -> str:
        return f"{self.concurrency} at a time" if self.concurrency else f"{self.rate:g}/s"

    async def send(self, ask: Ask[Item, Result], items: Sequence[Item], seed: int) -> list[Result]:
        """Send all items. ``seed``: of the arrivals, so that two runs have the same."""
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
    """Start items with exponential gaps from the last planned arrival, so that delays do not accumulate."""
    loop, choose = asyncio.get_running_loop(), random.Random(seed)
    tasks, at = [], loop.time()
    for item in items:
        await asyncio.sleep(max(0.0, at - loop.time()))
        tasks.append(asyncio.ensure_future(ask(item)))
        at += choose.expovariate(rate)
    return list(await asyncio.gather(*tasks))
