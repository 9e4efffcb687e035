"""A swarm of ordinary processes: in every round some are killed, as many start, some sleep, as one seed decides."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import httpx
from swarm_of_processes import LONGEST_SECONDS, until

from benchmarks.node_process import NodeProcess
from tests.training.churn_plan import Coming, RoundPlan, Sleep

LONGEST_SLEEP_SECONDS = 10.0
VOTERS = ("accepted", "abstained")  # parts of those of whom a certificate says that they contributed


class ProcessChurn:
    """Carries a plan out, all but clocks and slow lines.

    Who dies or sleeps is drawn among those without whom a quorum of the voters is alive and awake.
    """

    def __init__(self, start: Callable[..., NodeProcess], seed: int) -> None:
        """`start` as `nodes_of` gives it."""
        self.live: dict[int, NodeProcess] = {}
        self.roots: dict[int, set[str]] = {}  # that anybody has told, by outer step
        self.together: set[int] = set()  # outer steps that several members have completed
        self.events: list[str] = []
        self._start = start
        self._random = Random(f"processes {seed}")
        self._began = time.monotonic()
        self._unused = 0
        self._dead: list[int] = []
        self._told: dict[int, dict[str, Any]] = {}  # the newest status of each that lives and is awake
        self._wakes: dict[int, float] = {}  # when those who sleep wake

    @property
    def step(self) -> int:
        """The highest outer step of those who live."""
        return max((told["diloco"]["outer_steps"] for told in self._told.values()), default=0)

    @property
    def is_settled(self) -> bool:
        """Whether all who live told the same root of the same outer step."""
        lines = {(told["diloco"]["outer_steps"], told["diloco"]["state_root"]) for told in self._told.values()}
        return len(self._told) == len(self.live) and len(lines) == 1

    def found(self, members: int) -> None:
        """Start a swarm and wait until all of its members have completed a round together."""
        self.come()
        self.wait("an address", lambda: bool(self._addresses()))
        for _ in range(members - 1):
            self.come()
        self.wait("a round of all", lambda: len(self._voters()) == members)

    def carry_out(self, plan: RoundPlan) -> None:
        """One round: kill at its moments, and have another one come for each."""
        began, step = time.monotonic(), self.step
        events: list[tuple[float, Coming | Sleep]] = list(zip(plan.deaths, plan.comings, strict=True))
        events += [(sleep.after, sleep) for sleep in plan.sleeps]
        for after, event in sorted(events, key=lambda pair: pair[0]):
            self.wait("a moment", lambda moment=began + after: time.monotonic() >= moment)
            self.wait("somebody who may be gone", lambda: bool(self._dispensable()))
            number = self._random.choice(sorted(self._dispensable()))
            if isinstance(event, Coming):
                self._kill(number)
                self.come(returns=event.returns)
            elif sys.platform != "win32":  # no process can be stopped and continued there
                self._suspend(number, min(event.seconds, LONGEST_SLEEP_SECONDS))
        self.wait("the next outer step", lambda: self.step > step)

    def come(self, *, returns: bool = False) -> None:
        """A node starts: somebody who has died, with what lies on its disk, or a new one."""
        if returns and self._dead:
            number = self._dead.pop(self._random.randrange(len(self._dead)))
        else:
            number, self._unused = self._unused, self._unused + 1
        self.live[number] = self._start(number, *self._addresses())
        self._note(f"{number} comes")

    def wait(self, event: str, holds: Callable[[], bool]) -> None:
        """Look at all of them until this holds. Raises AssertionError when it takes too long, or a node ends."""

        def look() -> bool:
            self._look()
            return holds()

        until(event, look, LONGEST_SECONDS)

    def _look(self) -> None:
        for number in [number for number, at in self._wakes.items() if time.monotonic() >= at]:
            self._wake(number)
        for number, node in self.live.items():
            if number in self._wakes:
                continue
            assert node.process.poll() is None, f"node {number} ended with code {node.process.returncode}"
            with suppress(httpx.HTTPError):  # it is just starting, or very busy
                self._hear(number, node.get("/api/status"))

    def _hear(self, number: int, status: dict[str, Any]) -> None:
        step, root = status["diloco"]["outer_steps"], status["diloco"]["state_root"]
        if not root:
            return
        before = self._told.get(number)
        self._told[number] = status
        self.roots.setdefault(step, set()).add(root)
        if status["diloco"]["members"] > 1:
            self.together.add(step)
        if before is None or before["diloco"]["outer_steps"] != step:
            self._note(f"{number} is at step {step} ({root[:8]}), {status['diloco']['members']} members")

    def _kill(self, number: int) -> None:
        self.live.pop(number).kill()
        self._told.pop(number, None)
        self._dead.append(number)
        self._note(f"{number} dies")

    def _suspend(self, number: int, seconds: float) -> None:
        self.live[number].process.send_signal(signal.SIGSTOP)
        self._wakes[number] = time.monotonic() + seconds
        self._told.pop(number, None)
        self._note(f"{number} sleeps")

    def _wake(self, number: int) -> None:
        del self._wakes[number]
        self.live[number].process.send_signal(signal.SIGCONT)
        self._note(f"{number} wakes")

    def _dispensable(self) -> list[int]:
        """Without whom more than half of the voters are alive and awake."""
        voters = self._voters()
        alive = {number for number, told in self._told.items() if told["node_id"] in voters and self._is_newest(told)}
        return [number for number in self._told if voters and 2 * len(alive - {number}) > len(voters)]

    def _is_newest(self, told: dict[str, Any]) -> bool:
        return bool(told["diloco"]["outer_steps"] == self.step)

    def _voters(self) -> set[str]:
        """Whom the certificate of the newest step names."""
        for number in self._told:
            with suppress(httpx.HTTPError):
                for record in self.live[number].get("/api/rounds")["rounds"]:
                    if record["result"] == "completed" and record["outer_step"] + 1 == self.step:
                        return {member["node_id"] for member in record["members"] if member["part"] in VOTERS}
        return set()

    def _addresses(self) -> list[str]:
        """Of two of those who live: the one that a newcomer is told of may die meanwhile."""
        told = [status["network"]["addresses"] for status in self._told.values()]
        return [addresses[0] for addresses in told if addresses][:2]

    def _note(self, event: str) -> None:
        self.events.append(f"{time.monotonic() - self._began:.1f} s: {event}")
