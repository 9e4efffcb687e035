"""The owner invites, a friend joins with the link and trains, and a stranger is refused: ordinary processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node_process import running_node
from tests.worlds.processes import LONGEST_SECONDS, made, neuroshard, nodes_of, peers_of, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

CONFIG = "architecture = { depth = 2, sequence_length = 64 }\nbatch_size = 1\ninner_steps = 5\n"
FRIEND, STRANGER = ({"NEUROSHARD_TOKEN": digits * 32} for digits in ("a1", "b2"))


def start_of_a_stranger(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
    environment |= {**STRANGER, "NEUROSHARD_P2P_HOST": "127.0.0.1"}
    command = [sys.executable, "-m", "neuroshard", *map(str, arguments), "--port", "0", "--headless"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_friend_joins_with_a_link_and_a_stranger_is_refused(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(CONFIG, small_genesis, tmp_path)
    here = ("--data-dir", run.data_dir)
    early = neuroshard("run", "invite", *here)
    assert early.code == 2
    assert "Start your node first" in early.err
    with nodes_of(run, quick, tmp_path) as start:
        owner = start(0)
        status = owner.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        address = status["network"]["addresses"][0]
        assert status["network"]["join_line"] == f"neuroshard --invite LINK --genesis {small_genesis}"
        file = tmp_path / "ada.neuroshard-invitation"
        invited = neuroshard("run", "invite", "--label", "Ada", "--file", file, "--json", *here)
        assert invited.code == 0, invited.err
        link = invited.json()["link"]
        assert file.read_text().strip() == link
        assert file.stat().st_mode & 0o777 == 0o600

        folder = tmp_path / "stranger"
        refused = start_of_a_stranger(*quick, "--run", run.run_id, "--peer", address, "--data-dir", folder)
        assert refused.returncode == 2, refused.stderr
        assert "Ask for an invitation" in refused.stderr

        arguments = [*quick, "--invite", str(file)]
        with running_node(tmp_path / "friend", arguments, variables=FRIEND) as friend:
            friend.wait_for_steps(2, LONGEST_SECONDS)
            me = friend.get("/api/status")
            until("the owner sees the friend", lambda: me["node_id"] in peers_of(owner))
            logs = json.dumps(friend.get("/api/logs?after=0"))
            assert link.rpartition("/")[2] not in logs
            until("the owner's node has stored the pass", lambda: len(members(run.data_dir)) > 1)
            listed = members(run.data_dir)
            assert [(one["label"], one["online"]) for one in listed] == [("owner", True), ("Ada", True)]
            assert listed[1]["wallet_id"] == me["wallet_id"]
            until("the owner votes", lambda: [one["seats"] for one in members(run.data_dir)] == [[0], []])
            assert [one["is_deputy"] for one in listed] == [False, False]
            assert neuroshard("run", "trust", me["wallet_id"][:8], *here).code == 0
            assert [one["is_deputy"] for one in members(run.data_dir)] == [False, True]
            shown = neuroshard("run", "members", *here).out.splitlines()
            assert [("votes" in line, "deputy" in line) for line in shown[:2]] == [(True, False), (False, True)]
            revoked = neuroshard("run", "revoke", "Ada", *here)
            assert revoked.code == 0, revoked.err
            until("the friend is out", lambda: me["node_id"] not in peers_of(owner))
        assert len(members(run.data_dir)) == 1


def members(data_dir: Path) -> list[dict[str, Any]]:
    """The members that the owner's command lists."""
    shown = neuroshard("run", "members", "--data-dir", data_dir, "--json")
    assert shown.code == 0, shown.err
    listed: list[dict[str, Any]] = shown.json()["members"]
    return listed
