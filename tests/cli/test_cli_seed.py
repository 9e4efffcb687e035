"""`neuroshard seed` as its user types it: what keeps it from starting is told."""

from __future__ import annotations

import socket

import pytest

from neuroshard.config.instance_lock import InstanceLock
from tests.worlds.commands import Command

pytestmark = pytest.mark.process


def test_a_port_in_use_is_4(neuroshard: Command) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = neuroshard("seed", "--p2p-port", port, "--data-dir", neuroshard.home)
    assert outcome.code == 4
    assert f"The port {port} at 127.0.0.1 cannot be opened: another program uses it." in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


def test_a_second_seed_on_one_folder_is_told_of_the_first(neuroshard: Command) -> None:
    lock = InstanceLock.acquire(neuroshard.home / "seed")
    try:
        outcome = neuroshard("seed", "--p2p-port", 0, "--data-dir", neuroshard.home)
    finally:
        lock.release()
    assert outcome.code == 4
    assert "A seed already runs" in outcome.err


def test_a_wrong_peer_is_2(neuroshard: Command) -> None:
    outcome = neuroshard("seed", "--peer", "192.0.2.1:4001", "--data-dir", neuroshard.home)
    assert outcome.code == 2
    assert "192.0.2.1:4001" in outcome.err
