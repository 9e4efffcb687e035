"""SIGKILL of one of six nodes that hold a model in three stages, twenty times: how long until training goes on.

Then of both that hold a stage, one after the other; a stop without a word (SIGSTOP); and a newcomer.
"""

from __future__ import annotations

import math
import os
import re
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
LOOK_SECONDS = 2.0  # between two looks at what it has done and what the swarm says of its copy
GONE_ON_STEPS = 2  # of a driver that lives, after the kill: the first may have been under way


@dataclass(frozen=True)
class _Kill:
    """One kill and what followed."""

    role: str
    seconds: float  # until every driver that lives had made GONE_ON_STEPS further steps
    exits: int  # of other nodes


@dataclass(frozen=True)
class _Look:
    """At a stage's only holder."""

    at: float
    steps: int
    copy_age: float  # infinite: there is no copy


@dataclass(frozen=True)
class _Takeover:
    """A stage whose last holder was killed."""

    seconds: float  # until every driver that lives had made GONE_ON_STEPS further steps
    stated_seconds: float  # of its work that would be lost, as the swarm had said
    lost_seconds: float  # of its work, by the steps that its new holder did not begin with

    @property
    def kept_word(self) -> bool:
        """Whether no more was lost than had been said; the statement is up to LOOK_SECONDS old."""
        return self.lost_seconds <= self.stated_seconds + LOOK_SECONDS


def measure() -> Report:
    """All that can happen to a member, by chance, each time until the whole swarm works again."""
    random = Random(SEED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pins, ids = build_data(folder / "genesis", VOCABULARY)
        width, layers, heads, key_value_heads, feed_forward = SHAPE
        architecture = Architecture(width, layers, heads, key_value_heads, feed_forward, ids, LENGTH)
        parameters = staged_parameters(
            pins, architecture, stages=STAGES, batch_size=BATCH, microbatches=MICROBATCHES, routing="balanced"
        )
        with staged_swarm(folder, parameters, folder / "genesis") as swarm:
            members = [swarm.start(number) for number in range(STAGES * REPLICAS)]
            _wait_until_all_work(members)
            kills = [_kill_one(swarm, members, random.choice(members)) for _ in range(KILLS)]
            silences = [_silence_one(members, random.choice(members)) for _ in range(SILENCES)]
            takeovers = [_kill_stage(swarm, members, 1 + number % (STAGES - 1)) for number in range(TAKEOVERS)]
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
            *_takeover_rows(takeovers),
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


def _takeover_rows(takeovers: Sequence[_Takeover]) -> list[Row]:
    slowest = max(takeover.seconds for takeover in takeovers)
    lost = ", ".join(f"{takeover.lost_seconds:.0f} of {takeover.stated_seconds:.0f} s" for takeover in takeovers)
    return [
        Row(
            f"the only holder of a stage killed: longest time until training went on, {len(takeovers)} times",
            f"{slowest:.1f} s",
            "< 30 s",
            slowest < 30,
        ),
        Row(
            "of its work lost, of the stated age of the second copy",
            lost,
            "no more than stated",
            all(takeover.kept_word for takeover in takeovers),
        ),
    ]


def _kill_one(swarm: StagedSwarm, members: list[Member], victim: Member) -> _Kill:
    """Kill a member, wait until the others go on, start it again and wait until all work."""
    role = "+".join(victim.status["roles"])
    members.remove(victim)
    before = _steps_of_drivers(members)
    victim.node.kill()
    seconds = _seconds_until_gone_on(before)
    exits = sum(member.node.process.poll() is not None for member in members)
    print(f"{role} killed: {seconds:.1f} s", flush=True)
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


def _kill_stage(swarm: StagedSwarm, members: list[Member], stage: int) -> _Takeover:
    """Kill all holders of a later stage, the last when it was alone for a while; how long until training goes on."""
    starts = sorted({start for member in members if (start := member.stage_start) is not None})
    *others, last = holders = [member for member in members if member.stage_start == starts[stage]]
    for member in others:
        member.node.kill()
    members[:] = [member for member in members if member not in holders]
    looks = _watched(last, members[0], stage)
    before = _steps_of_drivers(members)
    last.node.kill()
    took = _seconds_until_gone_on(before)
    taker = next(member for member in members if member.stage_start == starts[stage])
    began, end = _step_of_taken_state(taker), looks[-1]
    kept = max((look.at for look in looks if look.steps <= began), default=looks[0].at)
    takeover = _Takeover(took, end.copy_age, end.at - kept)
    print(f"stage {stage + 1} killed at step {end.steps}, taken over from step {began}: {takeover}", flush=True)
    members.extend(swarm.start(victim.number) for victim in holders)
    _wait_until_all_work(members, replicas=1)
    return takeover


def _watched(holder: Member, other: Member, stage: int) -> list[_Look]:
    """A stage's only holder while it works alone, and what another node knows of its copy."""
    looks: list[_Look] = []
    ends = time.monotonic() + ALONE_SECONDS
    while time.monotonic() < ends or looks[-1].copy_age == math.inf:
        age = other.node.get("/api/pipeline")["stages"][stage]["copy_age_seconds"]
        looks.append(_Look(time.monotonic(), _steps(holder), math.inf if age is None else float(age)))
        if time.monotonic() > ends + START_SECONDS:
            raise TimeoutError(f"nobody has a copy of stage {stage + 1}")
        time.sleep(LOOK_SECONDS)
    return looks


def _step_of_taken_state(member: Member) -> int:
    """The step of the state that it fetched last, by its log."""
    text = (member.node.data_dir / "logs" / "node.log").read_text(encoding="utf-8")
    return int(re.findall(r"came from node \S+ as of step ([\d,]+)\.", text)[-1].replace(",", ""))


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
