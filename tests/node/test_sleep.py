"""A sleep that logind announces: stand-ins for its two programs, and seats that are given up before it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import trio

from neuroshard.host import sleep as subject
from neuroshard.host.sleep import watch_sleep
from neuroshard.network import InMemoryNetwork
from tests.training.test_leaving_seats import seated
from tests.worlds.replicas import DUE_SECONDS, A, B, C, SimulatedReplica, play

HEADER = "Monitoring signals on object /org/freedesktop/login1 owned by org.freedesktop.login1"
ANNOUNCED = "/org/freedesktop/login1: org.freedesktop.login1.Manager.PrepareForSleep ({},)"
OTHER = "/org/freedesktop/login1: org.freedesktop.login1.Manager.PrepareForShutdown (true,)"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only logind announces a sleep")


class Computer:
    """Its bus and its delay locks are files."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        programs = folder / "programs"
        programs.mkdir()
        self.bus, self.locks = folder / "bus", folder / "locks"
        self.bus.touch()
        self.locks.touch()
        self.ends = folder / "ends"
        # reads the bus to its end, line by line, until the file `ends` is there
        self.program(
            programs / "gdbus",
            f'echo "{HEADER}"; n=1; while [ ! -e {self.ends} ]; do '
            f'line=$(sed -n "${{n}}p" {self.bus}); if [ -n "$line" ]; then echo "$line"; n=$((n+1)); '
            "else sleep 0.05; fi; done",
        )
        held = f'echo "held ${{NEUROSHARD_TOKEN:-}}" >> {self.locks}; cat > /dev/null; echo released >> {self.locks}'
        self.program(programs / "systemd-inhibit", held)
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("NEUROSHARD_TOKEN", "secret")

    def program(self, file: Path, script: str) -> None:
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def say(self, line: str) -> None:
        with self.bus.open("a") as bus:
            bus.write(f"{line}\n")

    @property
    def lock_events(self) -> list[str]:
        return self.locks.read_text().split("\n")[:-1]


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not holds():
            await anyio.sleep(0.02)


def test_the_lock_is_held_until_the_goodbye_and_again_after_the_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computer, events = Computer(tmp_path, monkeypatch), list[str]()

    async def sleeps() -> None:
        assert computer.lock_events[-1] == "held "  # without the token
        await anyio.sleep(0.1)
        events.append("goodbye")

    async def wakes() -> None:
        await anyio.lowlevel.checkpoint()
        events.append("awake")

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            reasons = list[str]()

            async def watch() -> None:
                reasons.append(await watch_sleep(sleeps, wakes))

            tasks.start_soon(watch)
            await until(lambda: computer.lock_events == ["held "])
            computer.say(OTHER)
            computer.say(ANNOUNCED.format("true"))
            await until(lambda: computer.lock_events == ["held ", "released"])
            assert events == ["goodbye"]
            computer.say(ANNOUNCED.format("false"))
            await until(lambda: computer.lock_events == ["held ", "released", "held "])
            assert events == ["goodbye", "awake"]
            computer.ends.touch()
            await until(lambda: bool(reasons))
            assert reasons == ["gdbus has ended"]

    trio.run(main)
    assert computer.lock_events[-1] == "released"


def test_a_goodbye_that_takes_too_long_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computer = Computer(tmp_path, monkeypatch)
    monkeypatch.setattr(subject, "DELAYED_SECONDS", 0.2)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_sleep, anyio.sleep_forever, anyio.lowlevel.checkpoint)
            await until(lambda: computer.lock_events == ["held "])
            computer.say(ANNOUNCED.format("true"))
            await until(lambda: computer.lock_events == ["held ", "released"])
            tasks.cancel_scope.cancel()

    trio.run(main)


def test_a_killed_node_leaves_no_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computer = Computer(tmp_path, monkeypatch)
    number = tmp_path / "number"
    computer.program(tmp_path / "programs" / "gdbus", f"echo $$ > {number}; exec sleep 1000")
    node = "import trio, anyio, neuroshard.host.sleep as s; "
    node += "trio.run(s.watch_sleep, anyio.lowlevel.checkpoint, anyio.lowlevel.checkpoint)"

    async def main() -> None:
        async with await anyio.open_process([sys.executable, "-c", node]) as process:
            await until(lambda: number.exists() and number.read_text().endswith("\n"))
            await until(lambda: computer.lock_events == ["held "])
            process.kill()
        monitor = int(number.read_text())
        await until(lambda: not is_running(monitor))
        await until(lambda: computer.lock_events == ["held ", "released"])

    trio.run(main)


def is_running(number: int) -> bool:
    try:
        return "(sleep)" in Path(f"/proc/{number}/stat").read_text()
    except FileNotFoundError:
        return False


def test_a_system_without_logind_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    async def main() -> str:
        return await watch_sleep(anyio.lowlevel.checkpoint, anyio.lowlevel.checkpoint)

    assert trio.run(main) == "there is no gdbus here"


def test_two_of_three_friends_sleep_and_return() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed, may_be_alone=True) for seed, name in enumerate((A, B, C)))
        async with anyio.create_task_group() as tasks:
            for each in (a, b, c):
                tasks.start_soon(each.live)
            await anyio.sleep(DUE_SECONDS + 5)
            for sleeper in (c, b):  # b's seat stays: a, the first one, decides with half of the seats
                sleeper.may_take_part = False
                await sleeper.group.leave()
                network.suspend(sleeper.name)
            before = a.state.outer_step
            await anyio.sleep(60 * DUE_SECONDS)
            assert seated(a) == [A, B]
            assert a.state.outer_step > before + 30
            for sleeper in (c, b):
                network.wake(sleeper.name)
                sleeper.may_take_part = True
                sleeper.follow(a)
            await anyio.sleep(10 * DUE_SECONDS)
            assert seated(a) == [A, B, C]
            tasks.cancel_scope.cancel()

    play(scenario)
