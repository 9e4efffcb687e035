from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path

import pytest

from neuroshard.data.shard_assignment import Rotation, RotationReason
from neuroshard.identity import (
    Delegation,
    NodeIdentity,
    NodeKey,
    Wallet,
    parse_token,
    read_claim,
    verify_claim,
)
from neuroshard.node.training_records import KIND, RotationLog, RotationOfRun
from neuroshard.types import RunId, ShardId


@pytest.fixture
def identity() -> NodeIdentity:
    wallet = Wallet.from_secret(parse_token("ab" * 32))
    key = NodeKey.from_seed(bytes(32))
    return NodeIdentity(wallet.wallet_id, key.node_id, key, Delegation.issue(wallet, key.public_key, 10_000.0))


def test_every_rotation_is_kept_once_and_signed(tmp_path: Path, identity: NodeIdentity) -> None:
    log = RotationLog(tmp_path, RunId("a" * 64), identity, clock=lambda: 1000.0)
    rotations = [Rotation(ShardId(i), 10 * i, RotationReason.EXHAUSTED) for i in range(4)]
    log.record(rotations[:2])
    log.record(rotations[:2])
    log.record(rotations)
    lines = [json.loads(line) for line in log.path.read_bytes().splitlines()]
    claims = [read_claim(b64decode(line["claim"]), RotationOfRun) for line in lines]
    payloads = [verify_claim(claim, KIND, now=1001.0).payload for claim in claims]
    assert payloads == [RotationOfRun(RunId("a" * 64), rotation) for rotation in rotations]
    assert [line["rotation"] for line in lines] == [
        {"shard": i, "first_step": 10 * i, "reason": RotationReason.EXHAUSTED.value} for i in range(4)
    ]


def test_a_refused_write_is_tried_again(tmp_path: Path, identity: NodeIdentity) -> None:
    log = RotationLog(tmp_path, RunId("b" * 64), identity)
    blocker = tmp_path / "rotations"
    blocker.write_text("in the way")
    log.record([rotation := Rotation(ShardId(3), 7, RotationReason.EXHAUSTED)])
    blocker.unlink()
    log.record([rotation])
    assert len(log.path.read_bytes().splitlines()) == 1
