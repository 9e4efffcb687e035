"""What the world outside asks of the process: signals, and the end of its input."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from threading import Thread
from types import FrameType

from neuroshard.node.stopping import StopRequest


def _wait_for_end_of_input(stop: StopRequest) -> None:
    while os.read(0, 4096):  # not sys.stdin: its lock would be held when the interpreter ends
        pass
    stop.ask("the program that started this node has ended")


@contextmanager
def outside_requests(stop: StopRequest, *, ends_with_stdin: bool) -> Generator[None]:
    """SIGINT and SIGTERM ask for a clean stop; a second one ends the process at once."""
    if ends_with_stdin:
        Thread(target=_wait_for_end_of_input, args=(stop,), name="neuroshard-leash", daemon=True).start()
    received = 0

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 1:
            os._exit(128 + number)
        stop.ask(f"{signal.Signals(number).name} received")

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
