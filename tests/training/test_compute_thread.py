from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from itertools import pairwise
from threading import Event

import pytest
import torch
import trio

from neuroshard.errors import NotReadyError
from neuroshard.pipeline.executor import ComputeThread, Priority


def test_values_and_exceptions_travel_to_the_caller(compute: ComputeThread) -> None:
    def fail() -> int:
        raise KeyError("gone")

    async def main() -> None:
        assert await compute.run(lambda: 6 * 7) == 42
        with pytest.raises(KeyError, match="gone"):
            await compute.run(fail)
        assert await compute.run(lambda: threading.current_thread().name) == "neuroshard-compute"

    trio.run(main)


def test_the_thread_count_is_set_inside_the_thread() -> None:
    before = torch.get_num_threads()
    thread = ComputeThread(cpu_threads=1, name="other-name")
    assert thread.submit(torch.get_num_threads).result() == 1
    assert thread.submit(lambda: threading.current_thread().name).result() == "other-name"
    thread.close()
    assert torch.get_num_threads() in (1, before)


def test_a_small_job_overtakes_waiting_training_jobs(compute: ComputeThread) -> None:
    release, order = Event(), list[str]()
    first = compute.submit(release.wait)
    jobs = [compute.submit(lambda i=i: order.append(f"microbatch {i}")) for i in range(2)]
    jobs.append(compute.submit(lambda: order.append("token"), Priority.SMALL))
    release.set()
    for job in [first, *jobs]:
        job.result()
    assert order == ["token", "microbatch 0", "microbatch 1"]


def test_text_and_training_take_turns_and_what_is_left_follows(compute: ComputeThread) -> None:
    begun, release, order = Event(), Event(), list[str]()
    jobs = [compute.submit(lambda: begun.set() or release.wait())]
    assert begun.wait(10)
    jobs += [compute.submit(lambda: order.append("text"), Priority.TEXT) for _ in range(4)]
    jobs += [compute.submit(lambda: order.append("microbatch")) for _ in range(2)]
    release.set()
    for job in jobs:
        job.result()
    assert order == ["text", "microbatch", "text", "microbatch", "text", "text"]


def test_a_cancelled_caller_drops_a_waiting_job_and_waits_for_a_running_one(compute: ComputeThread) -> None:
    release, started, ran = Event(), Event(), list[str]()

    def hold() -> None:
        started.set()
        release.wait()
        ran.append("running")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute.run, hold)
            await trio.to_thread.run_sync(started.wait)
            with trio.move_on_after(0.01):
                await compute.run(lambda: ran.append("waiting"))
            nursery.cancel_scope.cancel()
            release.set()
        assert ran == ["running"]

    trio.run(main)
    compute.close()
    assert ran == ["running"]


def test_close_finishes_accepted_jobs_and_takes_no_more() -> None:
    thread = ComputeThread(cpu_threads=1)
    release = Event()
    thread.submit(release.wait)
    last = thread.submit(lambda: "done")
    threading.Timer(0.01, release.set).start()
    thread.close()
    thread.close()
    assert last.result(timeout=0) == "done"
    with pytest.raises(NotReadyError):
        thread.submit(lambda: None)


def test_the_bridge_costs_little(compute: ComputeThread) -> None:
    async def main() -> float:
        await compute.run(lambda: None)
        fastest = float("inf")
        for _ in range(20):
            started = time.perf_counter()
            for _ in range(20):
                await compute.run(lambda: None)
            fastest = min(fastest, (time.perf_counter() - started) / 20)
        return fastest

    assert trio.run(main) < 0.3e-3


PRIORITIES = """
import os, torch
from pathlib import Path
from neuroshard.pipeline.executor import ComputeThread
def multiply():
    values = torch.ones(2_000, 1_000)
    assert float((values @ values.T)[0, 0]) == 1_000
compute = ComputeThread(cpu_threads=2)
compute.submit(multiply).result()
tasks = Path("/proc/self/task").iterdir()
print([os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks].count(19), os.getpriority(os.PRIO_PROCESS, 0))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own there")
@pytest.mark.parametrize(("niceness", "gives_way"), [(0, True), (1, False)])
def test_computing_gives_way_to_everything_else_unless_a_niceness_was_chosen(niceness: int, gives_way: bool) -> None:
    """One of the two is a worker of PyTorch, which does half of the work."""
    here = os.getpriority(os.PRIO_PROCESS, 0)
    if here > niceness and os.geteuid() != 0:
        pytest.skip("only root can start a process with a lower niceness than that of the tests")
    command = ["nice", "-n", str(niceness - here), sys.executable, "-c", PRIORITIES]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=variables).stdout
    lowest, of_main = map(int, said.split())
    assert (lowest >= 2, of_main) == (gives_way, niceness)
    assert gives_way or lowest == 0


def test_throttled_training_rests_between_its_jobs_and_other_work_does_not(compute: ComputeThread) -> None:
    """Ratios of one run: a job as long as those before it, at a fifth of the time."""
    compute.throttle(0.2)
    begun: list[tuple[float, float]] = []

    def job() -> None:
        start = time.perf_counter()
        while time.perf_counter() - start < 0.02:
            pass
        begun.append((start, time.perf_counter()))

    jobs = [compute.submit(job) for _ in range(3)]
    jobs[0].result()
    compute.submit(lambda: None, Priority.SMALL).result()
    compute.submit(lambda: None, Priority.TEXT).result()
    assert len(begun) == 1
    for one in jobs:
        one.result()
    for (start, end), (following, _) in pairwise(begun):
        assert following - end >= 3.9 * (end - start)


def test_a_rest_ends_as_soon_as_training_may_go_on(compute: ComputeThread) -> None:
    compute.throttle(0.0001)
    compute.submit(lambda: time.sleep(0.02)).result()
    waiting = compute.submit(lambda: "done")
    assert not waiting.done()
    compute.throttle(1.0)
    assert waiting.result(timeout=60) == "done"
    with pytest.raises(ValueError, match="share"):
        compute.throttle(0.0)


def test_a_thread_that_rests_closes_at_once() -> None:
    thread = ComputeThread(cpu_threads=1)
    thread.throttle(0.0001)
    thread.submit(lambda: time.sleep(0.02)).result()
    last = thread.submit(lambda: "the last one")
    thread.close()
    assert last.result(timeout=0) == "the last one"


def test_what_fails_on_the_accelerator_is_told_and_the_next_job_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slowed job waits for the accelerator, which is where its late errors come out."""

    def fail(_device: torch.device) -> None:
        raise RuntimeError("an illegal memory access")

    waited = list[torch.device]()
    monkeypatch.setattr(torch.accelerator, "synchronize", fail)
    with closing(ComputeThread(1, device=torch.device("xpu", 1))) as thread:
        thread.throttle(0.9)
        with pytest.raises(RuntimeError, match="illegal"):
            thread.submit(lambda: "begun").result(timeout=60)
        monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
        assert thread.submit(lambda: "done").result(timeout=60) == "done"
    assert waited == [torch.device("xpu", 1)]
