"""Which thread uses how much CPU: two samples and their difference."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from neuroshard.status.snapshot import ThreadShare

UNNAMED = "native"  # threads of libraries, such as a matrix product's pool


@dataclass(frozen=True)
class ThreadSample:
    """CPU seconds of every thread of this process at one moment."""

    monotonic: float
    seconds: Mapping[int, float]  # by native thread id: user + system
    names: Mapping[int, str]


def sample_threads(monotonic: float) -> ThreadSample:
    """Measure now; `monotonic` is the caller's clock."""
    times = psutil.Process().threads()
    names = {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id is not None}
    return ThreadSample(monotonic, {item.id: item.user_time + item.system_time for item in times}, names)


def thread_shares(before: ThreadSample, after: ThreadSample) -> tuple[ThreadShare, ...]:
    """Cores used by each thread name between two samples, busiest first; threads of one name are added up.

    A thread that is new counts from zero; one that ended is not counted (its time is no longer readable).
    """
    elapsed = after.monotonic - before.monotonic
    if elapsed <= 0:
        return ()
    cores: dict[str, float] = defaultdict(float)
    for native_id, seconds in after.seconds.items():
        used = max(0.0, seconds - before.seconds.get(native_id, 0.0))  # a reused id may seem to run backwards
        cores[after.names.get(native_id, UNNAMED)] += used / elapsed
    return tuple(ThreadShare(name, share) for name, share in sorted(cores.items(), key=lambda item: -item[1]))
