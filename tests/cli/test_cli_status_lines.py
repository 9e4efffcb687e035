"""What `neuroshard status` says of the network, from the API's own answer."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from neuroshard.api.rendering import as_json
from neuroshard.cli.remote import status_lines
from neuroshard.config.folders import NodePaths
from neuroshard.status.snapshot import (
    ConnectionKind,
    DilocoStatus,
    NetworkState,
    NetworkStatus,
    NodeStatus,
    PathsStatus,
    PeerStatus,
    SwarmStatus,
)
from neuroshard.types import LayerRange, NodeId, Role, WalletId

JOIN_LINE = "neuroshard --run abab --peer /ip4/192.0.2.7/tcp/4001/p2p/12D3KooWme"


def lines_of(status: NodeStatus) -> list[str]:
    return status_lines(json.loads(as_json(status)))


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
        diloco=DilocoStatus(
            strategy="streaming", part="quarter 2 of 4", codec="int8", explanation="The last round had 3 members."
        ),
    )


def test_peers_addresses_and_the_join_line_are_printed() -> None:
    lines = lines_of(among(2))
    assert "network      connected: Connected." in lines
    assert "peers        2, together 31,000 tokens/s, network loss 4.250" in lines
    assert "peer         12D3KooWpeer1  training, 1,234 tokens/s, loss 4.500, punched, 32 ms" in lines
    assert "together     The last round had 3 members." in lines
    assert "next round   quarter 2 of 4 (streaming), encoded as int8" in lines
    assert "address      /ip4/192.0.2.7/tcp/4001/p2p/12D3KooWme" in lines
    assert f"join with    {JOIN_LINE}" in lines


def test_a_peer_that_only_others_know_and_few_trust() -> None:
    stranger = replace(peer(0), loss_ema=None, state="", connection=None, rtt_seconds=None, score=-70.0)
    lines = lines_of(replace(among(1), peers=(stranger,)))
    assert "peer         12D3KooWpeer0  no report yet, 1,234 tokens/s, known through others, bad" in lines


def test_a_thousand_peers_do_not_fill_the_terminal() -> None:
    lines = lines_of(among(1_000))
    assert len(lines) < 40
    assert "             and 990 more: the dashboard's Swarm view shows all" in lines


def test_every_path_is_printed(tmp_path: Path) -> None:
    paths = NodePaths.below(tmp_path)
    names = {name: str(path) for name, path in asdict(paths).items()}
    lines = lines_of(replace(among(0), paths=PathsStatus(**names)))
    assert f"data folder  {tmp_path}" in lines
    assert f"config.toml  {tmp_path / 'config.toml'}" in lines
    assert f"node key     {tmp_path / 'keys' / 'node-key'}" in lines
    assert [path for path in names.values() if not any(line.endswith(f" {path}") for line in lines)] == []


def test_without_a_network_it_says_so() -> None:
    lines = lines_of(NodeStatus("1", 1_000.0, 1_001.0))
    assert "network      off: The network is off." in lines
    assert not [line for line in lines if line.startswith(("peer", "address", "join", "together"))]
