"""Counters of events, from any thread, and the CPU share of every thread."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

import psutil

from neuroshard.status.computer import ThreadShare

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True)
class CounterValue:
    """Value of one counter at one moment, with its name and help text."""

    name: str  # snake case, without "_total": the exporter adds it
    help: str
    value: int


class Counters:
    """Thread-safe counters with help texts. Declare all of them first: a scrape then shows 0 before the first event."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._help: dict[str, str] = {}
        self._values: dict[str, int] = {}

    def declare(self, name: str, help_text: str) -> None:
        """Declare a counter with value 0. A second, equal declaration has no effect.

        Raises ValueError for a name that is not snake case, and for a second declaration with another help text.
        """
        if not _NAME.match(name):
            raise ValueError(f"a counter name is snake case, got {name!r}")
        with self._lock:
            if self._help.setdefault(name, help_text) != help_text:
                raise ValueError(f"counter {name} was declared with another help text")
            self._values.setdefault(name, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Add `amount`. Raises KeyError for a counter that was not declared, ValueError for a negative amount."""
        if amount < 0:
            raise ValueError(f"counter {name} can only grow, got {amount}")
        with self._lock:
            self._values[name] = self._values[name] + amount

    def value(self, name: str) -> int:
        """Return the current value. Raises KeyError for a counter that was not declared."""
        with self._lock:
            return self._values[name]

    def values(self) -> dict[str, int]:
        """Values of all counters at one moment, by name."""
        with self._lock:
            return dict(self._values)

    def snapshot(self) -> tuple[CounterValue, ...]:
        """All counters at one moment with their help texts, sorted by name."""
        with self._lock:
            return tuple(CounterValue(name, self._help[name], self._values[name]) for name in sorted(self._values))


UNNAMED = "native"  # threads of libraries, such as the pool of a matrix product


@dataclass(frozen=True)
class ThreadSample:
    """CPU seconds of every thread of this process at one moment."""

    monotonic: float
    seconds: Mapping[int, float]  # by native thread id: user + system
    names: Mapping[int, str]


def sample_threads(monotonic: float) -> ThreadSample:
    """Measure the CPU time of all threads now; `monotonic` is the current time of the caller's clock, in seconds."""
    times = psutil.Process().threads()
    names = {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id is not None}
    return ThreadSample(monotonic, {item.id: item.user_time + item.system_time for item in times}, names)


def thread_shares(before: ThreadSample, after: ThreadSample) -> tuple[ThreadShare, ...]:
    """CPU cores used per thread name between two samples, busiest first. Threads with the same name are added up.

    A new thread counts from zero. An ended thread is not counted, because its time is no longer readable.
    """
    elapsed = after.monotonic - before.monotonic
    if elapsed <= 0:
        return ()
    cores: dict[str, float] = defaultdict(float)
    for native_id, seconds in after.seconds.items():
        used = max(0.0, seconds - before.seconds.get(native_id, 0.0))  # a reused id may seem to run backwards
        cores[after.names.get(native_id, UNNAMED)] += used / elapsed
    return tuple(ThreadShare(name, share) for name, share in sorted(cores.items(), key=lambda item: -item[1]))
