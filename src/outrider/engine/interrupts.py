"""Ctrl-C between two steps of the engine instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Context manager: handle a Ctrl-C after the block, so that nothing is left half changed. A second one is handled at once.

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
