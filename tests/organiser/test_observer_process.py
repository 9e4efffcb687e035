"""The observer's process gets signed admissions, is heard, starts again, and ends with the organiser."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

import pytest

from neuroshard.identity.admissions import AdmissionRegister
from neuroshard.organiser import observer_process
from neuroshard.organiser.observations import (
    Observation,
    ObserverEnded,
    ObserverStarted,
    RunSight,
    observation_line,
    read_given_admission,
)
from neuroshard.organiser.observer_process import ObserverProcess
from tests.organiser.desks import AUTHORITY, RUN
from tests.organiser.watched import SIGHT
from tests.worlds.claims import identity_of

PATIENCE_SECONDS = 60.0
ME = identity_of(5)
STARTED = observation_line(ObserverStarted(ME.node_id, ME.wallet_id))
# it says who it is, stores what it is given, reports a sight, and waits for the end of its input
PROGRAM = f"""
import sys
out, given = sys.stdout.buffer, sys.argv[1]
out.write({STARTED!r}); out.flush()
line = sys.stdin.buffer.readline()
open(given, "wb").write(line)
out.write(b"no observation\\n" + {observation_line(SIGHT)!r}); out.flush()
if sys.argv[2] == "waits":
    sys.stdin.buffer.read()
    open(given + ".ended", "w").close()
else:
    sys.exit(7)
"""


@contextmanager
def observer(folder: Path, command: list[str]) -> Generator[Queue[Observation]]:
    told: Queue[Observation] = Queue()
    made = ObserverProcess(command, RUN, AUTHORITY, told.put, output=folder / "output.log", now=time.time)
    made.start()
    try:
        yield told
    finally:
        made.stop()


def program(folder: Path, manner: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(folder / "given"), manner]


def test_the_organiser_admits_its_observer_and_ends_it(tmp_path: Path) -> None:
    with observer(tmp_path, program(tmp_path, "waits")) as told:
        assert isinstance(told.get(timeout=PATIENCE_SECONDS), ObserverStarted)
        assert told.get(timeout=PATIENCE_SECONDS) == SIGHT  # the line before it was none
    assert (tmp_path / "given.ended").exists()
    given = read_given_admission((tmp_path / "given").read_bytes())
    register = AdmissionRegister(RUN, lambda: [AUTHORITY.public_key])
    register.admit(given.admission, time.time())
    assert register.refusal(ME.node_id, ME.wallet_id, time.time()) == ""


@pytest.mark.parametrize("is_there", [True, False])
def test_an_observer_that_ends_is_reported_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr(observer_process, "AGAIN_SECONDS", 0.01)
    command, seen = program(tmp_path, "dies") if is_there else ["/no/such/program"], list[Observation]()
    with observer(tmp_path, command) as told:
        while sum(isinstance(one, ObserverEnded) for one in seen) < 2:
            seen.append(told.get(timeout=PATIENCE_SECONDS))
    ended = [one.reason for one in seen if isinstance(one, ObserverEnded)]
    if is_there:
        assert ended == ["exit code 7"] * 2
        assert sum(isinstance(one, RunSight) for one in seen) == 2
    else:
        assert all("No such file" in reason for reason in ended)
