"""Nodes that hold a small model in three stages, each stage twice; how they are watched while some of them die."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.prepared_run import build_data
from benchmarks.sizes import size
from benchmarks.staged_swarm import START_SECONDS, Member, StagedSwarm, staged_parameters, staged_swarm
from neuroshard.types import Architecture

STAGES, REPLICAS, BATCH, MICROBATCHES, LENGTH, VOCABULARY = size((3, 2, 1, 8, 64, 1024), (2, 2, 1, 2, 32, 300))
SHAPE = (64, 3, 4, 2, 192)  # width, layers, heads, key/value heads, feed-forward
LOOK_SECONDS = 0.05
PUBLISHED_SECONDS = 1.0  # twice as long as a node waits before it tells its numbers again

Counts = Mapping[Member, tuple[int, int]]  # of each its stage, and the sequences that count there


@contextmanager
def replicated_swarm(replicas: int = REPLICAS) -> Generator[tuple[StagedSwarm, list[Member]]]:
    """A swarm and its members, so many for each stage, all of them at work."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pins, ids = build_data(folder / "genesis", VOCABULARY)
        width, layers, heads, key_value_heads, feed_forward = SHAPE
        architecture = Architecture(width, layers, heads, key_value_heads, feed_forward, ids, LENGTH)
        parameters = staged_parameters(
            pins, architecture, stages=STAGES, batch_size=BATCH, microbatches=MICROBATCHES, routing="balanced"
        )
        with staged_swarm(folder, parameters, folder / "genesis") as swarm:
            members = list[Member]()
            for number in range(STAGES * replicas):
                with at_rest(members):  # a start takes long beside others that take both cores
                    members.append(swarm.start(number))
            wait_until_all_work(members, replicas)
            yield swarm, members


def stage_of(member: Member, members: Sequence[Member]) -> int:
    """Its stage, counted from 0; every stage has a holder among the members."""
    starts = sorted({start for other in members if (start := other.stage_start) is not None})
    start = member.stage_start
    if start is None or len(starts) != STAGES:
        raise RuntimeError(f"the stages begin at {starts}, and this node's at {start}")
    return starts.index(start)


def steps_of(member: Member) -> int:
    """Optimizer steps of its stage."""
    return int(member.status["training"]["steps"])


def steps_of_drivers(members: Sequence[Member]) -> dict[Member, int]:
    """Of all that hold the first layers."""
    return {member: steps_of(member) for member in members if member.stage_start == 0}


def longest_standstill(drivers: Sequence[Member], seconds: float) -> float:
    """Longest time in which one of them made no step, of those that begin within so many seconds from now.

    What was under way may still become steps before a standstill begins. Raises TimeoutError.
    """
    began = time.monotonic()
    stepped = {driver: (_place(driver), began) for driver in drivers}
    longest = 0.0
    while min(at for _, at in stepped.values()) < began + seconds:
        for driver, ((layer, steps), at) in list(stepped.items()):
            place, now = _place(driver), time.monotonic()
            if place[0] != layer:  # it went to another stage, which has made other steps
                stepped[driver] = place, at
            elif place[1] > steps:
                longest = max(longest, now - at)
                stepped[driver] = place, now
            elif now - at > START_SECONDS:
                raise TimeoutError("training did not go on")
        time.sleep(LOOK_SECONDS)
    return longest


def _place(member: Member) -> tuple[int | None, int]:
    """Its first layer, and the steps of its stage."""
    status = member.status
    layers = status["layers"]
    return None if layers is None else int(layers["start"]), int(status["training"]["steps"])


def wait_until_all_work(members: Sequence[Member], replicas: int = REPLICAS) -> None:
    """Until every member trains, every stage has so many holders, and every driver makes steps. Raises TimeoutError."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        starts = [member.stage_start if _is_training(member) else None for member in members]
        if (
            None not in starts
            and len(set(starts)) == STAGES
            and all(starts.count(start) >= replicas for start in starts)
        ):
            drivers = [member for member, start in zip(members, starts, strict=True) if start == 0]
            if all(steps_of(driver) > 0 for driver in drivers):
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the stages are held like this: {starts}")
        time.sleep(0.5)


@contextmanager
def at_rest(members: Sequence[Member]) -> Generator[None]:
    """No driver of these drives while the block lasts."""
    drivers = list(steps_of_drivers(members))
    with ThreadPoolExecutor(STAGES * REPLICAS) as pool:
        list(pool.map(_pause, drivers))
        yield
        list(pool.map(lambda driver: driver.node.post("/api/training/resume"), drivers))


def _pause(driver: Member) -> None:
    driver.node.wait_for("start", lambda status: status["state"] != "starting", START_SECONDS)
    driver.node.post("/api/training/pause")


def settled_counts(members: Sequence[Member]) -> Counts:
    """What counts in every member's stage while the drivers rest: told twice alike, so what was under way has ended."""
    deadline = time.monotonic() + START_SECONDS
    before = _counts(members)
    while True:
        time.sleep(PUBLISHED_SECONDS)
        now = _counts(members)
        if now == before:
            return now
        if time.monotonic() > deadline:
            raise TimeoutError("the stages do not come to rest")
        before = now


def _counts(members: Sequence[Member]) -> Counts:
    return {member: _count(member) for member in members}


def _count(member: Member) -> tuple[int, int]:
    (own,) = member.node.get("/api/pipeline")["own_stages"]
    return int(own["stage"]), int(own["steps"]) * BATCH * MICROBATCHES + int(own["sequences_accumulated"])


def _is_training(member: Member) -> bool:
    try:
        return bool(member.status["state"] == "training")
    except httpx.HTTPError:
        return False
