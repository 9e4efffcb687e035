"""SIGKILL of one of six nodes that hold a model in three stages, twenty times: how long until training goes on.

And whether a stage counted something twice, and whether the killed node found less than it had said it would.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.record import Report, Row
from benchmarks.replicated_swarm import (
    BATCH,
    MICROBATCHES,
    REPLICAS,
    STAGES,
    Counts,
    at_rest,
    longest_standstill,
    replicated_swarm,
    settled_counts,
    stage_of,
    steps_of_drivers,
    wait_until_all_work,
)
from benchmarks.sizes import size
from benchmarks.staged_swarm import Member, StagedSwarm

KILLS = int(os.environ.get("BENCHMARK_KILLS", size(20, 1)))
SEED = int(os.environ.get("BENCHMARK_SEED", "11"))
WORK_SECONDS = size((1.0, 4.0), (0.0, 0.5))  # between the look at the counts and the kill
WATCH_SECONDS = size(5.0, 0.5)  # after a kill; a standstill that begins by then is watched to its end
IN_FLIGHT = BATCH * MICROBATCHES  # sequences of one driver


@dataclass(frozen=True)
class _Kill:
    """One kill and what followed."""

    role: str
    seconds: float  # the longest in which a driver that lives made no step
    exits: int  # of other nodes
    counted_twice: int  # sequences, by the counts of the stages that lived on
    lost_steps: int  # of the killed node, by the step that it began with again
    stated_steps: int  # that a kill could cost, as it had said

    @property
    def kept_word(self) -> bool:
        """Whether no more was lost than had been said; a step may have come since."""
        return self.lost_steps <= self.stated_steps + 1


def measure() -> Report:
    """Members die by chance, one at a time; each is started again, and all work before the next dies."""
    random = Random(SEED)
    with replicated_swarm() as (swarm, members):
        kills = [_kill_one(swarm, members, random) for _ in range(KILLS)]
    return Report(
        "pipeline_kills",
        f"SIGKILL in a swarm of {STAGES} stages with {REPLICAS} replicas each",
        tuple(_rows(kills)),
        (_conditions(),),
    )


def _conditions() -> str:
    return (
        f"Times are the longest in which a driver that lives made no step, of those that begin within "
        f"{WATCH_SECONDS:g} s of the kill. Before and after it the drivers rest, and the sequences that count in the "
        "stages of those that live are compared: whoever drove them, each counts once in every stage; those that the "
        "killed node counted and those that a killed driver had under way are left out."
    )


def _rows(kills: Sequence[_Kill]) -> list[Row]:
    worst = max(kill.seconds for kill in kills)
    roles = {role: sum(kill.role == role for kill in kills) for role in ("driver", "worker", "validator")}
    exits = sum(kill.exits for kill in kills)
    twice = sum(kill.counted_twice for kill in kills)
    broken = sum(not kill.kept_word for kill in kills)
    return [
        Row(f"longest standstill of a driver, {len(kills)} kills", f"{worst:.1f} s", "< 10 s", worst < 10),
        Row("mean time", f"{fmean(kill.seconds for kill in kills):.1f} s", "report", None),
        Row("other nodes that ended", str(exits), "0", exits == 0),
        Row("sequences that a stage counted twice", str(twice), "0", twice == 0),
        Row("kills that cost the killed node more steps than it had said", str(broken), "0", broken == 0),
        Row("most steps that one cost it", str(max(kill.lost_steps for kill in kills)), "report", None),
        Row("killed", ", ".join(f"{role} {count}" for role, count in roles.items()), "report", None),
    ]


def _kill_one(swarm: StagedSwarm, members: list[Member], random: Random) -> _Kill:
    """Kill a member, wait until the others go on, start it again and wait until all work."""
    victim = random.choice(members)
    stage = stage_of(victim, members)
    with at_rest(members):
        before = settled_counts(members)
    time.sleep(random.uniform(*WORK_SECONDS))
    last = victim.status
    members.remove(victim)
    drivers = list(steps_of_drivers(members))
    victim.node.kill()
    seconds = longest_standstill(drivers, WATCH_SECONDS)
    exits = sum(member.node.process.poll() is not None for member in members)
    with at_rest(members):
        twice = counted_twice(_gains(before, settled_counts(members)), stage)
        again = swarm.start(victim.number)
    members.append(again)
    wait_until_all_work(members)
    kill = _Kill(
        role="+".join(last["roles"]),
        seconds=seconds,
        exits=exits,
        counted_twice=twice,
        lost_steps=max(0, int(last["training"]["steps"]) - _restored_step(again.status)),
        stated_steps=int(last["checkpoints"]["could_lose_steps"]),
    )
    print(kill, flush=True)
    return kill


def _gains(before: Counts, after: Counts) -> tuple[int, ...]:
    """Sequences that came to count in each stage, at the members that lived all the time."""
    gains = [0] * STAGES
    for member, (stage, count) in after.items():
        gains[stage] += count - before[member][1]
    return tuple(gains)


def counted_twice(gains: Sequence[int], killed: int) -> int:
    """Sequences that a stage has counted more than once, when a holder of the stage `killed` has died.

    Every sequence that was driven counts once in each of the other stages. In the killed one's the replica counts what
    the dead one had not. Of a killed driver, those under way may count in later stages only.
    """
    others = [gain for stage, gain in enumerate(gains) if stage != killed]
    under_way = IN_FLIGHT if killed == 0 else 0
    apart = max(others) - min(others)
    return max(0, apart - under_way) + max(0, gains[killed] - max(others))


def _restored_step(status: dict[str, Any]) -> int:
    """The step that a start went on from, by its own word; 0 when it found nothing."""
    words = (status["checkpoints"]["restored"] or "").replace(".", " ").replace(",", "").split()
    return next((int(b) for a, b in pairwise(words) if a == "step" and b.isdigit()), 0)
