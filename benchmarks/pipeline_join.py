"""Newcomers with an empty disk: from the start of a process to its first microbatch, in a swarm of one node a stage."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from benchmarks.node_process import NodeProcess
from benchmarks.record import Report, Row
from benchmarks.replicated_swarm import STAGES, replicated_swarm, wait_until_all_work
from benchmarks.sizes import size
from benchmarks.staged_swarm import START_SECONDS, StagedSwarm

NEWCOMERS = size(4, 1)
PARTS = ("process and network", "PyTorch, data and placing", "the stage's state", "first microbatch")
LOOK_SECONDS = 0.05


def measure() -> Report:
    """One after the other, each gone before the next one comes; the first ones find the machine's caches as it is."""
    with replicated_swarm(replicas=1) as (swarm, members):
        times = list[tuple[float, ...]]()
        for number in range(len(members), len(members) + NEWCOMERS):
            times.append(_join(swarm, number))
            print(times[-1], flush=True)
            wait_until_all_work(members, replicas=1)
    joined, stepped = [moments[-2] for moments in times], [moments[-1] for moments in times]
    slowest = max(times, key=lambda moments: moments[-2])
    parts = (after - before for before, after in pairwise((0.0, *slowest[:-1])))
    shares = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in zip(PARTS, parts, strict=True))
    return Report(
        "pipeline_join",
        f"A newcomer in a swarm of {STAGES} stages on {STAGES} nodes",
        (
            Row(
                f"start of the process to the first microbatch that counts, slowest of {NEWCOMERS}",
                f"{max(joined):.1f} s",
                "< 15 s",
                max(joined) < 15,
            ),
            Row("all of them", ", ".join(f"{seconds:.1f}" for seconds in joined) + " s", "report", None),
            Row("the slowest one's time", shares, "report", None),
            Row("until the first step", ", ".join(f"{seconds:.1f}" for seconds in stepped) + " s", "report", None),
        ),
        (
            "All nodes share the cores of one machine, which those that train use up.",
            "A microbatch counts when it has gone both ways through the newcomer; counts are published twice a second.",
        ),
    )


def _join(swarm: StagedSwarm, number: int) -> tuple[float, ...]:
    """Seconds since the start: network up, stages chosen, it trains, has done a microbatch, has made a step."""
    began = time.monotonic()
    node = swarm.launch(number)
    node.wait_for("network", lambda status: bool(status["network"]["addresses"]), START_SECONDS)
    moments = [time.monotonic() - began]
    node.wait_for("layers", lambda status: status["layers"] is not None, START_SECONDS)
    moments.append(time.monotonic() - began)
    first = node.wait_for("training", lambda status: status["state"] == "training", START_SECONDS)["training"]["steps"]
    moments.append(time.monotonic() - began)
    while not _counts(_own_stage(node), first):
        time.sleep(LOOK_SECONDS)
    moments.append(time.monotonic() - began)
    node.wait_for_steps(first + 1, START_SECONDS)
    moments.append(time.monotonic() - began)
    node.kill()
    return tuple(moments)


def _own_stage(node: NodeProcess) -> dict[str, Any]:
    (stage,) = node.get("/api/pipeline")["own_stages"]
    return dict(stage)


def _counts(stage: dict[str, Any], first: int) -> bool:
    return bool(stage["sequences_accumulated"] > 0 or stage["steps"] > first)
