"""Two ordinary nodes; the line between them falls silent and comes back, and steps go on all the time."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.worlds.processes import LONGEST_SECONDS, made, nodes_of, peers_of, steps_of, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SILENT_SECONDS = 12.0  # longer than the time between two reports
APART = (  # no round falls into the silence
    "inner_steps = 1000000\nbatch_size = 1\nsequences_per_step = 1\n"
    "architecture = { depth = 2, sequence_length = 64 }\n"
)


@pytest.mark.skipif(sys.platform == "win32", reason="processes cannot be stopped and continued there")
def test_steps_go_on_while_a_peer_is_silent_and_it_is_heard_again(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(APART, small_genesis, tmp_path)
    with nodes_of(run, quick, tmp_path) as start:
        first = start(0)
        address = first.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        second = start(1, address["network"]["addresses"][0])
        until("a report", lambda: any(peer["steps"] for peer in peers_of(first).values()))
        (other,) = peers_of(first)

        second.process.send_signal(signal.SIGSTOP)
        try:
            silent_from = time.time()
            before, ends = steps_of(first), time.monotonic() + SILENT_SECONDS
            while time.monotonic() < ends:
                was = steps_of(first)
                until("a step", lambda was=was: steps_of(first) > was, 5)
                assert first.get("/health")["status"] == "ok"
            assert steps_of(first) > before + SILENT_SECONDS
            assert first.get("/api/status")["state"] == "training"
        finally:
            second.process.send_signal(signal.SIGCONT)
        back = silent_from + SILENT_SECONDS
        until("its report", lambda: peers_of(first).get(other, {"last_seen": 0})["last_seen"] > back)
        until("its connection", lambda: peers_of(first)[other]["connection"] is not None)
        until("its view", lambda: bool(peers_of(second)))
        assert steps_of(second) > 0
