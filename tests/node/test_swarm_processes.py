"""Ordinary processes on loopback: they find each other, and their swarm outlives kills and the loss of its seeds."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.node_process import NodeProcess, running_node
from tests.worlds.processes import (
    LONGEST_SECONDS,
    all_train_on,
    made,
    neuroshard,
    nodes_of,
    peers_of,
    running_seed,
    until,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

GOODBYE_SECONDS = 30.0  # well before silence makes a node forgotten, which is after a minute
SMALL = "batch_size = 1\nsequences_per_step = 1\narchitecture = { depth = 2, sequence_length = 64 }\n"
LARGE = "architecture = { depth = 24 }\n"


@pytest.mark.long
def test_five_nodes_are_a_swarm_that_outlives_a_kill_a_leave_and_both_seeds(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(SMALL, small_genesis, tmp_path)
    with (
        running_seed(tmp_path / "a") as seed,
        running_seed(tmp_path / "b", ["--peer", seed.address]) as other_seed,
        nodes_of(run, quick, tmp_path) as start,
    ):
        first, by_seed, by_other_seed = start(0, seed.address), start(3, seed.address), start(4, other_seed.address)
        address = first.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        there = address["network"]["addresses"][0]
        killed, by_address = start(1, there), start(2, there)
        lost = start(5, there, run_id="00" * 32)
        nodes = [first, killed, by_address, by_seed, by_other_seed]
        ids = assert_all_know_each_other(nodes)
        assert_is_told(lost)
        lost.kill()

        killed.kill()
        left = [first, by_address, by_seed, by_other_seed]
        until("the loss of a connection", lambda: not any(is_connected(node, ids[1]) for node in left))
        all_train_on(left)

        assert by_other_seed.stop() == 0
        left = [first, by_address, by_seed]
        until("a good-bye", lambda: not any(ids[4] in peers_of(node) for node in left), GOODBYE_SECONDS)

        seed.kill()
        other_seed.kill()
        both_gone = time.time()
        until("reports without seeds", lambda: all(hears(node, ids[:1] + ids[2:4], both_gone) for node in left))
        for node in left:
            node.post("/api/training/pause")  # so that the processor is free for a start
        back = start(1)  # without a peer
        until("a return", lambda: set(peers_of(back)) >= {ids[0], ids[2], ids[3]})
        until("connections with the one who came back", lambda: all(is_connected(node, ids[1]) for node in left))
        for node in left:
            node.post("/api/training/resume")
        all_train_on([*left, back])


def assert_all_know_each_other(nodes: Sequence[NodeProcess]) -> list[str]:
    """Wait until all see steps and losses of all; the ids of the nodes."""
    others = len(nodes) - 1

    def holds() -> bool:
        seen = [peers_of(node).values() for node in nodes]
        return all(len(peers) == others and all(p["steps"] and p["loss_ema"] for p in peers) for peers in seen)

    until("all see all", holds)
    ids = [str(node.get("/api/status")["node_id"]) for node in nodes]
    for node, own in zip(nodes, ids, strict=True):
        peers = peers_of(node)
        until("all train", lambda node=node: node.get("/api/training/global")["training_nodes"] == len(nodes))
        together = node.get("/api/training/global")
        assert set(peers) == set(ids) - {own}
        assert {entry["node_id"] for entry in together["nodes"]} >= set(ids) - {own}
        assert together["total_steps"] >= max(peer["steps"] for peer in peers.values())  # newcomers inherit some
        assert 1 < together["global_loss"] < 8
        status = node.get("/api/status")
        assert any(way in status["run"]["explanation"] for way in ("named with --run", "was invited"))
        assert "agree on one average" in status["diloco"]["explanation"] or status["diloco"]["members"] > 1
        assert len({peer["wallet_id"] for peer in peers.values()}) == others
    return ids


def assert_is_told(lost: NodeProcess) -> None:
    """A node whose run nobody knows says so, and waits."""
    reason = "Looking for nodes of run 0000000000000000. None of the nodes that answer knows it yet."
    status = lost.wait_for("wait", lambda status: status["state_reason"] == reason, LONGEST_SECONDS)
    assert status["state"] == "starting"
    assert status["training"]["steps"] == 0


def is_connected(node: NodeProcess, peer: str) -> bool:
    return peers_of(node).get(peer, {"connection": None})["connection"] is not None


def hears(node: NodeProcess, ids: Sequence[str], since: float) -> bool:
    """Whether each of these nodes, but for the node itself, reported since then."""
    peers = peers_of(node)
    others = [peers[peer] for peer in ids if peer in peers]
    return len(others) == len(ids) - 1 and all(peer["last_seen"] > since for peer in others)


def test_a_run_that_does_not_fit_is_refused_with_numbers(small_genesis: Path, quick: list[str], tmp_path: Path) -> None:
    run = made(LARGE, small_genesis, tmp_path)
    refused = neuroshard(*quick, "--run", run.run_id, "--data-dir", run.data_dir, "--port", 0, "--headless")
    assert refused.code == 2
    assert "but only 500 MB may be used" in refused.err
    assert "MB with --memory" in refused.err
    assert "Traceback" not in refused.err


def test_a_port_in_use_is_told_and_training_goes_on(quick: list[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running_node(tmp_path, [*quick, "--p2p-port", str(port)]) as node:
            failed = node.wait_for("failure", lambda status: status["network"]["state"] == "failed", LONGEST_SECONDS)
            assert f"port {port}" in failed["network"]["explanation"]
            assert "another program uses it" in failed["network"]["explanation"]
            node.wait_for_steps(5, LONGEST_SECONDS)


def test_the_nodes_of_a_demo_meet_and_end_when_it_is_killed(small_text: Path, tmp_path: Path) -> None:
    arguments = ["--nodes", "3", "--text", str(small_text)]
    with running_node(tmp_path, arguments, demo=True) as node:
        until("a swarm of three", lambda: len(peers_of(node)) == 2)
        assert len({peer["wallet_id"] for peer in peers_of(node).values()}) == 2
        further = psutil.Process(node.process.pid).children(recursive=True)
        assert len(further) == 2
        node.kill()
        assert_ended(further)


def assert_ended(processes: Sequence[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=LONGEST_SECONDS)
    for process in alive:
        process.kill()
    assert not alive
