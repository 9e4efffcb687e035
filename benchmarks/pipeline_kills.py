"""SIGKILL of one of six nodes that hold a model in three stages, twenty times: how long until training goes on.

Then of both that hold a stage, one after the other; a stop without a word (SIGSTOP); and a newcomer.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
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
TAKEOVERS = int(os.environ.get("BENCHMARK_TAKEOVERS", "3"))
ALONE_SECONDS = 45.0  # a stage's last holder works so long before it is killed: its second copy is made by then
SILENCES = 2
GONE_ON_STEPS = 2  # of a driver that lives, after the kill: the first may have been under way


@dataclass(frozen=True)
class _Kill:
    """One kill and what followed."""

    role: str
    seconds: float  # until every driver that lives had made GONE_ON_STEPS further steps
    exits: int  # of other nodes


def measure() -> Report:
    """All that can happen to a member, by chance, each time until the whole swarm works again."""
    random = Random(SEED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pins, ids = build_data(folder / "genesis", VOCABULARY)
        width, layers, heads, key_value_heads, feed_forward = SHAPE
        architecture = Architecture(width, layers, heads, key_value_heads, feed_forward, ids, LENGTH)
        parameters = staged_parameters(pins, architecture, stages=STAGES, batch_size=BATCH, microbatches=MICROBATCHES)
        with staged_swarm(folder, parameters, folder / "genesis") as swarm:
            members = [swarm.start(number) for number in range(STAGES * REPLICAS)]
            _wait_until_all_work(members)
            kills = [_kill_one(swarm, members, random.choice(members)) for _ in range(KILLS)]
            silences = [_silence_one(members, random.choice(members)) for _ in range(SILENCES)]
            takeovers = [_kill_stage(swarm, members, random.randrange(STAGES)) for _ in range(TAKEOVERS)]
            joined = _newcomer(swarm, len(members))
    return Report(
        "pipeline_kills",
        f"SIGKILL in a swarm of {STAGES} stages with {REPLICAS} replicas each",
        (
            *_kill_rows(kills),
            Row(
                f"a node that stops without a word: longest time until training went on, {SILENCES} times",
                f"{max(silences):.1f} s",
                "< 70 s (time limit of a request + 10 s)",
                max(silences) < 70,
            ),
            Row(
                f"the only holder of a stage killed: longest time until training went on, {TAKEOVERS} times",
                f"{max(takeovers):.1f} s",
                "< 30 s",
                max(takeovers) < 30,
            ),
            Row("a newcomer with an empty disk: start to first step", f"{joined:.1f} s", "< 15 s", joined < 15),
        ),
    )


def _kill_rows(kills: Sequence[_Kill]) -> list[Row]:
    worst = max(kill.seconds for kill in kills)
    roles = {role: sum(kill.role == role for kill in kills) for role in ("driver", "worker", "validator")}
    exits = sum(kill.exits for kill in kills)
    return [
        Row(f"longest time until training went on, {len(kills)} kills", f"{worst:.1f} s", "< 10 s", worst < 10),
        Row("mean time", f"{fmean(kill.seconds for kill in kills):.1f} s", "report", None),
        Row("other nodes that ended", str(exits), "0", exits == 0),
        Row("killed", ", ".join(f"{role} {count}" for role, count in roles.items()), "report", None),
    ]


def _kill_one(swarm: StagedSwarm, members: list[Member], victim: Member) -> _Kill:
    """Kill a member, wait until the others go on, start it again and wait until all work."""
    role = "+".join(victim.status["roles"])
    members.remove(victim)
    before = _steps_of_drivers(members)
    victim.node.kill()
    seconds = _seconds_until_gone_on(before)
    exits = sum(member.node.process.poll() is not None for member in members)
    members.append(swarm.start(victim.number))
    _wait_until_all_work(members)
    return _Kill(role, seconds, exits)


def _silence_one(members: list[Member], victim: Member) -> float:
    """Stop a process for as long as the others need to go on without it."""
    before = _steps_of_drivers([member for member in members if member is not victim])
    victim.node.process.send_signal(signal.SIGSTOP)
    try:
        return _seconds_until_gone_on(before)
    finally:
        victim.node.process.send_signal(signal.SIGCONT)
        _wait_until_all_work(members)


def _kill_stage(swarm: StagedSwarm, members: list[Member], stage: int) -> float:
    """Kill all holders of a stage, the last when it was alone for a while; how long until training goes on."""
    starts = sorted({start for member in members if (start := member.stage_start) is not None})
    *others, last = holders = [member for member in members if member.stage_start == starts[stage]]
    for member in others:
        member.node.kill()
    time.sleep(ALONE_SECONDS)
    members[:] = [member for member in members if member not in holders]
    before = _steps_of_drivers(members)
    last.node.kill()
    killed = time.monotonic()
    seconds = _seconds_until_gone_on(before) if before else _seconds_until_driven(members, killed)
    members.extend(swarm.start(victim.number) for victim in holders)
    _wait_until_all_work(members, replicas=1)
    return seconds


def _newcomer(swarm: StagedSwarm, number: int) -> float:
    """From the start of its process until it has made a step on the state that it fetched."""
    began = time.monotonic()
    member = swarm.start(number)
    member.node.wait_for("training", lambda status: status["state"] == "training", START_SECONDS)
    steps = _steps(member)
    _seconds_until_gone_on({member: steps - GONE_ON_STEPS + 1})
    return time.monotonic() - began


def _steps_of_drivers(members: Sequence[Member]) -> dict[Member, int]:
    return {member: _steps(member) for member in members if member.stage_start == 0}


def _seconds_until_gone_on(before: Mapping[Member, int]) -> float:
    """Until each of them has made GONE_ON_STEPS more."""
    began = time.monotonic()
    while any(_steps(member) < steps + GONE_ON_STEPS for member, steps in before.items()):
        if time.monotonic() - began > START_SECONDS:
            raise TimeoutError("training did not go on")
        time.sleep(0.05)
    return time.monotonic() - began


def _seconds_until_driven(members: Sequence[Member], since: float) -> float:
    """Until one of them has taken the first layers over and drives."""
    while not (drivers := _steps_of_drivers([member for member in members if _is_training(member)])):
        if time.monotonic() - since > START_SECONDS:
            raise TimeoutError("nobody took the first layers over")
        time.sleep(0.05)
    _seconds_until_gone_on(drivers)
    return time.monotonic() - since


def _wait_until_all_work(members: Sequence[Member], replicas: int = REPLICAS) -> None:
    """Until every member trains, every stage has so many holders, and every driver makes steps."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        starts = [member.stage_start if _is_training(member) else None for member in members]
        if (
            None not in starts
            and len(set(starts)) == STAGES
            and all(starts.count(start) >= replicas for start in starts)
        ):
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
