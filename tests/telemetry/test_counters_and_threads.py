"""Counters that only grow, and CPU shares of threads as a difference of two samples."""

from __future__ import annotations

import threading
import time

import pytest

from neuroshard.telemetry.counters import Counters, CounterValue, ThreadSample, sample_threads, thread_shares


def test_counters_start_at_zero_and_add_up_over_threads() -> None:
    counters = Counters()
    counters.declare("steps", "Inner steps done.")
    counters.declare("aborted_rounds", "Rounds given up.")
    counters.declare("steps", "Inner steps done.")

    def count() -> None:
        for _ in range(1000):
            counters.add("steps")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot() == (
        CounterValue("aborted_rounds", "Rounds given up.", 0),
        CounterValue("steps", "Inner steps done.", 4000),
    )
    assert counters.value("steps") == 4000


def test_counters_refuse_what_would_break_a_scrape() -> None:
    counters = Counters()
    counters.declare("steps", "a")
    for name in ("Steps", "a-b", "", "1a"):
        with pytest.raises(ValueError, match="snake case"):
            counters.declare(name, "x")
    with pytest.raises(ValueError, match="another help"):
        counters.declare("steps", "b")
    with pytest.raises(KeyError):
        counters.add("unknown")
    with pytest.raises(ValueError, match="only grow"):
        counters.add("steps", -1)
    assert counters.values() == {"steps": 0}


def test_shares_are_differences_per_second_by_name() -> None:
    names = {1: "compute", 2: "api"}
    before = ThreadSample(10.0, {1: 5.0, 2: 1.0, 8: 7.0}, names)
    after = ThreadSample(12.0, {1: 6.9, 2: 1.0, 3: 0.5, 4: 0.5, 8: 6.0}, names)
    shares = {share.name: share.cores for share in thread_shares(before, after)}
    assert shares == pytest.approx({"compute": 0.95, "native": 0.5, "api": 0.0})
    assert [share.name for share in thread_shares(before, after)] == ["compute", "native", "api"]
    assert thread_shares(after, before) == ()


def test_a_busy_thread_shows_up_under_its_name() -> None:
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            sum(range(1000))

    before = sample_threads(time.monotonic())
    thread = threading.Thread(target=burn, name="burner")
    thread.start()
    stop.wait(0.3)
    after = sample_threads(time.monotonic())
    stop.set()
    thread.join()
    shares = {share.name: share.cores for share in thread_shares(before, after)}
    assert shares["burner"] > 0.02
