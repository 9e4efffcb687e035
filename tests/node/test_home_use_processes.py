"""What friends do with their computers at home, with ordinary processes on loopback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest

from benchmarks.node_process import NodeProcess
from tests.worlds.processes import LONGEST_SECONDS, made, neuroshard, nodes_of, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

# The share keeps rounds two seconds apart: with one a second, nobody who missed some keeps up on a busy computer.
CONFIG = "architecture = { depth = 2, sequence_length = 64 }\nbatch_size = 1\ninner_steps = 5\nround_share = 0.05\n"
OWNER_IS_GONE = "too few voting nodes are online"


def outer_steps(node: NodeProcess) -> int:
    """Outer steps that the node has completed, once it trains: before, it tells nothing of its state."""
    status = node.wait_for("training", lambda status: status["state"] == "training", LONGEST_SECONDS)
    return int(status["diloco"]["outer_steps"])


def steps_of(node: NodeProcess, members: int) -> None:
    """Wait for two more outer steps; the newest one has so many members."""
    wanted = outer_steps(node) + 2

    def have_come(status: dict[str, Any]) -> bool:
        return status["diloco"]["outer_steps"] >= wanted and status["diloco"]["members"] == members

    node.wait_for(f"steps of {members}", have_come, LONGEST_SECONDS)


def waits_for_the_owner(node: NodeProcess) -> None:
    """Training continues, no outer step is completed, and the status names the cause."""
    status = node.wait_for("the cause", lambda status: OWNER_IS_GONE in str(status), LONGEST_SECONDS)
    steps, outer = status["training"]["steps"], status["diloco"]["outer_steps"]
    node.wait_for("training", lambda status: status["training"]["steps"] > steps + 5, LONGEST_SECONDS)
    assert outer_steps(node) == outer


def address_of(node: NodeProcess) -> str:
    """Where others reach the node."""
    status = node.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
    return str(status["network"]["addresses"][0])


def are_on_one_line(*nodes: NodeProcess) -> Callable[[], bool]:
    """Whether all have the same certified state."""

    def look() -> bool:
        seen = [node.get("/api/status")["diloco"] for node in nodes]
        return len({(one["outer_steps"], one["certified_root"]) for one in seen}) == 1

    return look


def test_two_friends(small_genesis: Path, quick: list[str], tmp_path: Path) -> None:
    """The owner's run of one becomes two. Then either of them is killed or stopped, and both are, at the same time."""
    with nodes_of(made(CONFIG, small_genesis, tmp_path), quick, tmp_path) as start:
        owner = start(0)
        steps_of(owner, 1)
        friend = start(1, address_of(owner))
        steps_of(owner, 2)
        steps_of(friend, 2)
        friend.kill()
        steps_of(owner, 1)
        friend = start(1, address_of(owner))
        steps_of(owner, 2)  # the friend's own first steps may be those that it missed
        steps_of(friend, 2)
        assert owner.stop() == 0
        waits_for_the_owner(friend)
        owner = start(0, address_of(friend))
        steps_of(friend, 2)
        for node in (owner, friend):
            node.kill()
        friend = start(1)
        owner = start(0, address_of(friend))
        steps_of(owner, 2)
        until("one line", are_on_one_line(owner, friend))


@pytest.mark.long
def test_three_friends_that_sleep_and_leave_in_the_evening(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    """All return in another order. Before the owner is back, the others train and name the cause of their wait.

    Two friends leave and return in the test above.
    """
    run = made(CONFIG, small_genesis, tmp_path)
    with nodes_of(run, quick, tmp_path) as start:
        owner = start(0)
        friends = [start(number, address_of(owner)) for number in (1, 2)]
        steps_of(owner, 3)
        for friend in friends:
            friend.process.send_signal(SIGSTOP)
        steps_of(owner, 1)
        for friend in friends:
            friend.process.send_signal(SIGCONT)
        steps_of(owner, 3)
        for node in (owner, *friends):
            assert node.stop() == 0
        friends[1] = start(2)
        friends[0] = start(1, address_of(friends[1]))
        waits_for_the_owner(friends[0])
        owner = start(0, address_of(friends[1]))
        steps_of(friends[0], 3)
        until("one line", are_on_one_line(owner, *friends))


@pytest.mark.long
def test_a_deputy_replaces_the_owner_who_is_away_for_weeks(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    """The owner trusts a friend while all run, and disappears. The friend continues with the others at once.

    The owner, back from the journey, follows them. In `tests/node/test_refounding_processes.py` a deputy is named and
    a run is founded again beside a node; in `tests/training/test_lost_seats.py` the members follow a deputy.
    """
    run = made(CONFIG, small_genesis, tmp_path)
    with nodes_of(run, quick, tmp_path) as start:
        owner = start(0)
        deputy, friend = (start(number, address_of(owner)) for number in (1, 2))
        steps_of(owner, 3)
        wallet = deputy.get("/api/status")["wallet_id"]
        until("the pass is stored", lambda: neuroshard("run", "trust", wallet, "--data-dir", run.data_dir).code == 0)
        place = ("--data-dir", tmp_path / "node-1")
        until("the deputy knows", lambda: "deputy" in neuroshard("run", "members", *place).out)
        owner.kill()
        waits_for_the_owner(deputy)
        founded = neuroshard("run", "refound", run.run_id, "--yes", *place, "--token", "01" * 32)
        assert founded.code == 0, founded.err
        steps_of(deputy, 2)
        owner = start(0, address_of(deputy))
        steps_of(deputy, 3)
        until("one line", are_on_one_line(owner, deputy, friend))
