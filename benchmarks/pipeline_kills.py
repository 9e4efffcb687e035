"""SIGKILL of one of six nodes that hold a model in three stages, twenty times: how long until training goes on."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean

import httpx

from benchmarks.prepared_run import build_data
from benchmarks.record import Report, Row
from benchmarks.staged_swarm import START_SECONDS, Member, StagedSwarm, staged_parameters, staged_swarm
from neuroshard.types import Architecture

KILLS = int(os.environ.get("BENCHMARK_KILLS", "20"))
SEED = 11
STAGES, REPLICAS, BATCH, MICROBATCHES, LENGTH, VOCABULARY = 3, 2, 1, 8, 64, 1024
SHAPE = (64, 3, 4, 2, 192)  # width, layers, heads, key/value heads, feed-forward
GONE_ON_STEPS = 2  # of a driver that lives, after the kill: the first may have been under way


@dataclass(frozen=True)
class _Kill:
    """One kill and what followed."""

    role: str
    seconds: float  # until every driver that lives had made GONE_ON_STEPS further steps
    exits: int  # of other nodes


def measure() -> Report:
    """Kill a member by chance, wait until training has gone on, start it again and wait until it works."""
    random = Random(SEED)
    kills: list[_Kill] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pins, ids = build_data(folder / "genesis", VOCABULARY)
        width, layers, heads, key_value_heads, feed_forward = SHAPE
        architecture = Architecture(width, layers, heads, key_value_heads, feed_forward, ids, LENGTH)
        parameters = staged_parameters(pins, architecture, stages=STAGES, batch_size=BATCH, microbatches=MICROBATCHES)
        with staged_swarm(folder, parameters, folder / "genesis") as swarm:
            members = [swarm.start(number) for number in range(STAGES * REPLICAS)]
            _wait_until_all_work(members)
            for _ in range(KILLS):
                members, kill = _kill_one(swarm, members, random)
                kills.append(kill)
    worst = max(kill.seconds for kill in kills)
    roles = {role: sum(kill.role == role for kill in kills) for role in ("driver", "worker", "validator")}
    return Report(
        "pipeline_kills",
        f"SIGKILL in a swarm of {STAGES} stages with {REPLICAS} replicas each",
        (
            Row(f"longest time until training went on, {KILLS} kills", f"{worst:.1f} s", "< 10 s", worst < 10),
            Row("mean time", f"{fmean(kill.seconds for kill in kills):.1f} s", "report", None),
            Row("other nodes that ended", str(sum(kill.exits for kill in kills)), "0", not any(k.exits for k in kills)),
            Row("killed", ", ".join(f"{role} {count}" for role, count in roles.items()), "report", None),
        ),
    )


def _kill_one(swarm: StagedSwarm, members: list[Member], random: Random) -> tuple[list[Member], _Kill]:
    victim = random.choice(members)
    role = "+".join(victim.status["roles"])
    left = [member for member in members if member is not victim]
    drivers = [member for member in left if member.stage_start == 0]
    before = {member.number: _steps(member) for member in drivers}
    victim.node.kill()
    killed = time.monotonic()
    while any(_steps(member) < before[member.number] + GONE_ON_STEPS for member in drivers):
        if time.monotonic() - killed > START_SECONDS:
            raise TimeoutError(f"training did not go on after the {role} was killed")
        time.sleep(0.05)
    seconds = time.monotonic() - killed
    exits = sum(member.node.process.poll() is not None for member in left)
    members = [*left, swarm.start(victim.number)]
    _wait_until_all_work(members)
    return members, _Kill(role, seconds, exits)


def _wait_until_all_work(members: Sequence[Member]) -> None:
    """Until every stage has all its replicas and every driver makes steps."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        starts = [member.stage_start if _is_training(member) else None for member in members]
        if None not in starts and all(starts.count(start) == REPLICAS for start in starts):
            drivers = [member for member, start in zip(members, starts, strict=True) if start == 0]
            if all(_steps(driver) > 0 for driver in drivers):
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the stages are held like this: {starts}")
        time.sleep(0.5)


def _is_training(member: Member) -> bool:
    try:
        return bool(member.status["state"] == "training")
    except httpx.HTTPError:
        return False


def _steps(member: Member) -> int:
    return int(member.status["training"]["steps"])
