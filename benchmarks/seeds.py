"""The same work for several seeds and ways of training, in as many processes as there are cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import torch

from benchmarks.sizes import IS_TINY

Job = TypeVar("Job")
Result = TypeVar("Result")


def seeds(count: int) -> tuple[int, ...]:
    """1, 2 ... $BENCHMARK_SEEDS, or `count` of them."""
    return tuple(range(1, int(os.environ.get("BENCHMARK_SEEDS", count)) + 1))


def of_each(work: Callable[[Job], Result], jobs: Sequence[Job]) -> dict[Job, Result]:
    """The results by job; each process computes with one thread, so that a result is the same on any computer."""
    if IS_TINY:  # to start the processes takes longer than the work
        return {job: work(job) for job in jobs}
    processes = ProcessPoolExecutor(
        os.cpu_count(), mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )
    with processes:
        return dict(zip(jobs, processes.map(work, jobs), strict=True))
