"""SIGKILL of all that hold a stage, the last one after it was alone for a while: who takes the stage over, and when.

Then a stop without a word (SIGSTOP) of a node that another replica can stand in for.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.record import Report, Row
from benchmarks.replicated_swarm import (
    REPLICAS,
    STAGES,
    at_rest,
    longest_standstill,
    replicated_swarm,
    steps_of,
    steps_of_drivers,
    wait_until_all_work,
)
from benchmarks.sizes import size
from benchmarks.staged_swarm import START_SECONDS, Member, StagedSwarm

TAKEOVERS = int(os.environ.get("BENCHMARK_TAKEOVERS", size(4, 1)))
SILENCES = int(os.environ.get("BENCHMARK_SILENCES", size(2, 1)))
SEED = 11
ALONE_SECONDS = size(45.0, 0.0)  # before a stage's last holder is killed: its second copy is made by then
WATCH_SECONDS = size(10.0, 0.5)  # after a death; a standstill that begins by then is watched to its end
LOOK_SECONDS = 1.0  # between two looks at what it has done and what the swarm says of its copy


@dataclass(frozen=True)
class _Look:
    """At a stage's only holder."""

    at: float
    steps: int
    copy_age: float  # infinite: there is no copy


@dataclass(frozen=True)
class _Takeover:
    """A stage whose last holder was killed."""

    seconds: float  # the longest in which a driver made no step
    stated_seconds: float  # of its work that would be lost, as the swarm had said
    lost_seconds: float  # of its work, by the steps that its new holder did not begin with

    @property
    def kept_word(self) -> bool:
        """Whether no more was lost than had been said; the statement is up to LOOK_SECONDS old, as are the steps."""
        return self.lost_seconds <= self.stated_seconds + 2 * LOOK_SECONDS


def measure() -> Report:
    """Stages die one after the other, the later ones in turn; the whole swarm works again before the next."""
    random = Random(SEED)
    with replicated_swarm() as (swarm, members):
        takeovers = [_kill_stage(swarm, members, 1 + number % (STAGES - 1)) for number in range(TAKEOVERS)]
        wait_until_all_work(members, replicas=1)
        silences = [_silence_one(members, random) for _ in range(SILENCES)]
    return Report(
        "pipeline_takeovers",
        f"A stage's only holder killed, and a silent node, in a swarm of {STAGES} stages and {STAGES * REPLICAS} nodes",
        (
            *_takeover_rows(takeovers),
            Row(
                f"a node that stops without a word: longest standstill of a driver, {SILENCES} times",
                f"{max(silences):.1f} s",
                "< 70 s (time limit of a request + 10 s)",
                max(silences) < 70,
            ),
        ),
    )


def _takeover_rows(takeovers: Sequence[_Takeover]) -> list[Row]:
    slowest = max(takeover.seconds for takeover in takeovers)
    lost = ", ".join(f"{takeover.lost_seconds:.0f} of {takeover.stated_seconds:.0f} s" for takeover in takeovers)
    oldest = max(takeover.stated_seconds for takeover in takeovers)
    return [
        Row(
            f"the only holder of a stage killed: longest standstill of a driver, {len(takeovers)} times",
            f"{slowest:.1f} s",
            "<= 13 s",
            slowest <= 13,
        ),
        Row(
            "of its work lost, of the stated age of the second copy",
            lost,
            "no more than stated",
            all(takeover.kept_word for takeover in takeovers),
        ),
        Row("oldest stated age", f"{oldest:.0f} s", "30 s and the making of a copy", oldest < 40),
    ]


def _silence_one(members: list[Member], random: Random) -> float:
    """Stop a process for as long as the others need to go on without it; its stage has another holder."""
    starts = [member.stage_start for member in members]
    several = [one for one, start in zip(members, starts, strict=True) if start != 0 and starts.count(start) > 1]
    victim = random.choice(several)
    drivers = list(steps_of_drivers(members))
    victim.node.process.send_signal(signal.SIGSTOP)
    try:
        seconds = longest_standstill(drivers, WATCH_SECONDS)
    finally:
        victim.node.process.send_signal(signal.SIGCONT)
    print(f"silent: {seconds:.1f} s", flush=True)
    wait_until_all_work(members, replicas=1)
    return seconds


def _kill_stage(swarm: StagedSwarm, members: list[Member], stage: int) -> _Takeover:
    """Kill all holders of a later stage, the last when it was alone for a while; how long until training goes on."""
    starts = sorted({start for member in members if (start := member.stage_start) is not None})
    *others, last = holders = [member for member in members if member.stage_start == starts[stage]]
    for member in others:
        member.node.kill()
    members[:] = [member for member in members if member not in holders]
    looks = _watched(last, members[0], stage)
    drivers, killed_at = list(steps_of_drivers(members)), time.strftime("%Y-%m-%d %H:%M:%S")
    last.node.kill()
    took = longest_standstill(drivers, WATCH_SECONDS)
    began, end = _step_of_taken_state(members, stage, killed_at), looks[-1]
    kept = max((look.at for look in looks if look.steps <= began), default=looks[0].at)
    takeover = _Takeover(took, end.copy_age, end.at - kept)
    print(f"at step {end.steps}, taken over from step {began}: {takeover}", flush=True)
    with at_rest(members):
        again = [swarm.start(victim.number) for victim in holders]
    members.extend(again)
    wait_until_all_work(members, replicas=1)
    return takeover


def _watched(holder: Member, other: Member, stage: int) -> list[_Look]:
    """A stage's only holder while it works alone, and what another node knows of its copy."""
    looks: list[_Look] = []
    ends = time.monotonic() + ALONE_SECONDS
    while time.monotonic() < ends or looks[-1].copy_age == math.inf:
        age = other.node.get("/api/pipeline")["stages"][stage]["copy_age_seconds"]
        looks.append(_Look(time.monotonic(), steps_of(holder), math.inf if age is None else float(age)))
        if time.monotonic() > ends + START_SECONDS:
            raise TimeoutError(f"nobody has a copy of stage {stage + 1}")
        time.sleep(LOOK_SECONDS)
    return looks


def _step_of_taken_state(members: Sequence[Member], stage: int, since: str) -> int:
    """The step of the state that the first node to take a stage over fetched, by the nodes' logs."""
    fetched = re.compile(
        rf"^(\S+ \S+) .* Layers {stage + 1}-\d+ were downloaded from node \S+ at step ([\d,]+)\.", re.M
    )
    found = list[tuple[str, int]]()
    for member in members:
        text = (member.node.data_dir / "logs" / "node.log").read_text(encoding="utf-8")
        found += [(moment, int(step.replace(",", ""))) for moment, step in fetched.findall(text)]
    return min(taken for taken in found if taken[0] >= since)[1]
