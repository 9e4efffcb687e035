"""Two nodes with one token, in ordinary processes on loopback, pause and resume together; a friend's node does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.node_process import NodeProcess, running_node
from tests.worlds.processes import LONGEST_SECONDS, made, neuroshard, nodes_of, peers_of, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

CONFIG = "architecture = { depth = 2, sequence_length = 64 }\nbatch_size = 1\ninner_steps = 5\n"


def machines_of(node: NodeProcess) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = node.get("/api/machines")["machines"]
    return listed


def states_of(*nodes: NodeProcess) -> list[str]:
    return [node.get("/api/status")["state"] for node in nodes]


def test_two_machines_of_one_token_pause_and_resume_together(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(CONFIG, small_genesis, tmp_path)
    here = ("--data-dir", run.data_dir)
    with nodes_of(run, quick, tmp_path) as start:
        first = start(0)
        status = first.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        peer = status["network"]["addresses"][0]
        friend = start(1, peer)
        with running_node(tmp_path / "second", [*quick, "--run", run.run_id, "--peer", peer]) as second:
            for node in (first, second, friend):
                node.wait_for_steps(1, LONGEST_SECONDS)
            until("the second is known", lambda: [one["is_reachable"] for one in machines_of(first)] == [True, True])
            until("the friend is known", lambda: len(peers_of(friend)) == 2)
            assert len(machines_of(friend)) == 1
            paused = neuroshard("pause", "--all", *here)
            assert paused.code == 0, paused.err
            assert len(paused.out.splitlines()) == 2
            until("both pause", lambda: states_of(first, second) == ["paused", "paused"])  # one may be moving to layers
            assert "paused" not in states_of(friend)
            resumed = neuroshard("resume", "--all", "--json", "--data-dir", second.data_dir)
            assert (resumed.code, resumed.json()["message"]) == (0, "2 of 2 machines resumed.")
            until("both train", lambda: "paused" not in states_of(first, second))
            second.kill()
            refused = neuroshard("pause", "--all", "--json", *here)
        assert (refused.code, refused.json()["message"]) == (1, "1 of 2 machines paused.")
        listed = neuroshard("machines", *here)
        assert listed.code == 0, listed.err
        mine, other = listed.out.splitlines()
        assert "this computer" in mine
        assert "unreachable" in other
        assert "last seen" in other


def node_id_of(node: NodeProcess) -> str:
    status = node.wait_for("node id", lambda status: bool(status["node_id"]), LONGEST_SECONDS)
    return str(status["node_id"])


def test_a_stolen_computer_is_revoked_on_another_one_and_comes_back_with_a_new_key(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(CONFIG, small_genesis, tmp_path)
    stolen = tmp_path / "stolen"
    with nodes_of(run, quick, tmp_path) as start:
        first = start(0)
        status = first.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        peer = status["network"]["addresses"][0]
        friend, options = start(1, peer), [*quick, "--run", run.run_id, "--peer", peer]
        with running_node(stolen, options) as thief:
            node = node_id_of(thief)
            until("the friend knows the node", lambda: node in peers_of(friend))
            until("the owner knows it", lambda: [one["is_reachable"] for one in machines_of(first)] == [True, True])
            wrong = neuroshard("wallet", "revoke", node[-8:], "--token", "x" * 40, "--data-dir", run.data_dir)
            assert wrong.code == 2
            assert "The token is that of wallet" in wrong.err
            revoked = neuroshard("wallet", "revoke", node[-8:], "--data-dir", run.data_dir)
            assert revoked.code == 0, revoked.err
            assert "informed within a minute" in revoked.out
            for other in (first, friend):
                until("it is refused", lambda other=other: node not in peers_of(other))
            assert [one["message"] for one in machines_of(first)] == ["", "Your wallet has revoked it."]
        key = stolen / "keys" / "node-key"
        key.rename(key.with_name("old"))
        with running_node(stolen, options) as found:
            new = node_id_of(found)
            assert new != node
            until("the friend knows the new key", lambda: new in peers_of(friend))
            assert node not in peers_of(friend)
