"""`neuroshard status` shows the declared values of the status, from a response of the API."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from neuroshard.api.rendering import as_json
from neuroshard.cli.status_text import StatusText, local_time
from neuroshard.config.folders import NodePaths
from neuroshard.status.computer import AccelerationStatus, PathsStatus
from neuroshard.status.freshness import fresh
from neuroshard.status.owner_policy import OwnerPolicyStatus, SensorReading, TrainingAction, TrainingDecision
from neuroshard.status.snapshot import (
    ConnectionKind,
    NetworkState,
    NetworkStatus,
    NodeState,
    NodeStatus,
    PeerStatus,
    SwarmStatus,
    TrainingStatus,
)
from neuroshard.status.values import Number, Stale, about
from neuroshard.types import LayerRange, NodeId, Role, WalletId

TEXT = StatusText(NodeStatus)
JOIN_LINE = "neuroshard --run abab --peer /ip4/192.0.2.7/tcp/4001/p2p/12D3KooWme"


def lines_of(status: NodeStatus, *, every_value: bool = False) -> list[str]:
    """The lines without the spaces that align them."""
    lines = TEXT.lines(json.loads(as_json(fresh(status, 1.0))), every_value=every_value)
    return [re.sub(" {2,}", "  ", line) for line in lines]


def peer(number: int) -> PeerStatus:
    return PeerStatus(
        NodeId(f"12D3KooWpeer{number}"),
        WalletId("0123456789abcdef"),
        (Role.DRIVER,),
        LayerRange(0, 2),
        loss_ema=4.5,
        tokens_per_second=1_234.0,
        last_seen=1_000.0,
        state="training",
        connection=ConnectionKind.PUNCHED,
        rtt_seconds=0.0321,
    )


def among(count: int) -> NodeStatus:
    network = NetworkStatus(
        NetworkState.CONNECTED, "Connected.", ("/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWme",), count, join_line=JOIN_LINE
    )
    return NodeStatus(
        "1",
        1_000.0,
        1_001.0,
        network=network,
        swarm=SwarmStatus(count + 1, count + 1, 4.25, 4.0, tokens_per_second=31_000.0),
        peers=tuple(peer(number) for number in range(count)),
    )


TRAINING = replace(
    among(0),
    state=NodeState.TRAINING,
    state_reason="Training.",
    training=TrainingStatus(steps=1_234, loss_ema=6.5, tokens_per_second=900.0),
)


def test_values_have_their_names_and_units() -> None:
    lines = lines_of(TRAINING)
    assert lines[:2] == ["state  training", "reason  Training."]
    assert "steps  1,234" in lines
    assert "loss  6.5 nats/token" in lines
    assert "speed  900 tokens/s" in lines
    assert [line for line in lines if line.startswith("a kill could lose  ")]


def test_the_speed_of_the_device_is_one_line_and_every_value_has_a_prefix() -> None:
    device = AccelerationStatus("NVIDIA H200", "bf16", 2_100_000_000, 989e12, "table", tokens_per_second=200_000.0)
    status = replace(TRAINING, acceleration=device)
    assert [line for line in lines_of(status) if line not in lines_of(TRAINING)] == [
        "share of the device's peak (MFU)  42.5%"
    ]
    every = "\n".join(lines_of(status, every_value=True))
    for shown in ("per token  2.1 GFLOP/token  (", "per second  420 TFLOP/s  (", "peak flops  989 TFLOP/s  ("):
        assert shown in every


def test_labels_are_aligned() -> None:
    lines = TEXT.lines(json.loads(as_json(among(2))))
    values = [line.index(value) for line in lines for value in ("connected", "Connected.", JOIN_LINE) if value in line]
    assert (len(values), len(set(values))) == (3, 1)


def test_peers_addresses_and_the_join_line_are_shown() -> None:
    lines = lines_of(among(2))
    assert "network  connected" in lines
    assert "other nodes  2" in lines
    assert "speed of all nodes  31,000 tokens/s" in lines
    assert "loss of all nodes  4.25 nats/token" in lines
    assert (
        "peer  12D3KooWpeer1: loss 4.5 nats/token, speed 1,234 tokens/s, state training, "
        "connection punched, round trip 0.0321 s, rating neutral"
    ) in lines
    assert "address  /ip4/192.0.2.7/tcp/4001/p2p/12D3KooWme" in lines
    assert f"join with  {JOIN_LINE}" in lines


def test_facts_of_a_peer_that_are_not_known_are_left_out() -> None:
    stranger = replace(peer(0), loss_ema=None, state="", connection=None, rtt_seconds=None, score=-70.0)
    lines = lines_of(replace(among(1), peers=(stranger,)))
    assert "peer  12D3KooWpeer0: speed 1,234 tokens/s, rating bad" in lines


def test_a_thousand_peers_do_not_fill_the_terminal() -> None:
    lines = lines_of(among(1_000))
    assert len(lines) < 40
    assert "other nodes  1,000" in lines
    assert "peer  and 22 more" in lines  # the status has the first 32


def test_every_path_is_shown(tmp_path: Path) -> None:
    names = {name: str(path) for name, path in vars(NodePaths.below(tmp_path)).items()}
    lines = lines_of(replace(among(0), paths=PathsStatus(**names)))
    assert f"node key  {tmp_path / 'keys' / 'node-key'}" in lines
    assert [path for path in names.values() if not any(line.endswith(f"  {path}") for line in lines)] == []


def test_the_rule_its_end_and_the_readings_are_shown() -> None:
    decision = TrainingDecision(TrainingAction.PAUSE, "Somebody works here.", "train_when", until=1_000.0, share=0.0)
    readings = (SensorReading("power", "plugged in"), SensorReading("load", "is not known", is_known=False))
    lines = lines_of(replace(among(0), owner_policy=OwnerPolicyStatus(decision, readings)))
    assert "limited by  train_when" in lines
    assert f"limited until  {local_time(1_000.0)}" in lines
    assert "sensor  power: plugged in" in lines


def test_a_stale_value_is_shown_with_its_condition() -> None:
    paused = replace(TRAINING, state=NodeState.PAUSED)
    assert f"speed  not known (hidden when {Stale.NOT_TRAINING})" in lines_of(paused)


def test_without_a_network_nothing_of_it_is_shown() -> None:
    lines = lines_of(NodeStatus("1", 1_000.0, 1_001.0))
    assert "about the network  The network is off." in lines
    assert not [line for line in lines if line.startswith(("peer", "address", "join", "speed of all", "loss of all"))]


def test_all_shows_every_declared_value_with_its_meaning() -> None:
    status = TRAINING
    lines = lines_of(status, every_value=True)
    assert "is standing by  no  (it could train, but no node uses its layers now)" in lines
    assert "paused until  none" in lines
    answer = json.loads(as_json(status))
    labels = {line.partition("  ")[0] for line in lines}
    scalars = {name for name, value in answer.items() if not isinstance(value, dict | list)}
    missing = {name for name in scalars if name.replace("_", " ").removesuffix(" seconds") not in labels}
    assert missing == set()
    assert len(lines) > 100


@dataclass(frozen=True)
class NewPart:
    """A part of a status that this program does not know."""

    is_new: Annotated[bool, about("a new fact", brief="newness")]
    is_detail: Annotated[bool, about("a detail")]
    size: Annotated[int, about("its size", "bytes")] = 2_500_000
    share: Annotated[Number | None, about("its share", "0..1", stale=Stale.OLD_SNAPSHOT)] = 0.5
    counts: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class NewStatus:
    """A status with that part."""

    part: NewPart


def test_a_new_value_needs_its_declaration_only() -> None:
    text = StatusText(NewStatus)
    answer = json.loads(as_json(NewStatus(NewPart(is_new=True, is_detail=False))))
    assert text.lines(answer) == ["newness  yes"]
    assert text.lines(answer, every_value=True) == [
        "part is new     yes  (a new fact)",
        "part is detail  no  (a detail)",
        "part size       2.5 MB  (its size)",
        "part share      50.0%  (its share)",
        "part counts     1, 2",
    ]


def test_a_value_that_an_older_node_does_not_have_is_left_out() -> None:
    answer = json.loads(as_json(TRAINING))
    del answer["checkpoints"], answer["training"]["loss_ema"]
    lines = TEXT.lines(answer)
    assert not [line for line in lines if line.startswith(("a kill", "loss  "))]
