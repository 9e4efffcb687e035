"""The network in the API: every peer, this node's connections, the run's numbers, and what changes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.api.context import ApiLimits
from neuroshard.status.snapshot import ConnectionKind, DilocoStatus, NetworkStatus, PeerRating, rating_of
from tests.worlds.api import Api, FakeNode, events_of
from tests.worlds.statuses import JOIN_LINE, among, peer, training_status


def test_peers_tells_everything_about_every_peer(api: Api) -> None:
    suspect = replace(peer(1), score=-60.0, connection=None, rtt_seconds=None, shard=None, first_seen=None)
    api.node.board.publish(replace(among(1), peers=(peer(0), suspect)))
    body = api.get("/api/peers").json()
    assert body["count"] == 2
    known, heard_of = body["peers"]
    assert known == {
        "node_id": "12D3KooWpeer0000",
        "wallet_id": "0" * 16,
        "roles": ["driver", "validator"],
        "role": "driver+validator",
        "layers": {"start": 0, "stop": 4},
        "state": "training",
        "loss_ema": 5.0,
        "tokens_per_second": 1_000.0,
        "steps": 100,
        "tokens": 51_200,
        "shard": 0,
        "outer_step": 2,
        "state_hash": "aa" * 32,
        "version": "0.0.1",
        "started_at": 900.0,
        "first_seen": 1_001.0,
        "last_seen": 1_059.0,
        "connection": "direct",
        "address": "/ip4/192.0.2.0/tcp/4001",
        "rtt_seconds": 0.012,
        "bytes_sent": 1_000,
        "bytes_received": 2_000,
        "score": 3.0,
        "rating": "good",
    }
    assert (heard_of["rating"], heard_of["connection"], heard_of["rtt_seconds"]) == ("bad", None, None)


def test_peers_and_status_tell_the_same_about_the_network(api: Api) -> None:
    api.node.board.publish(among(3))
    body = api.get("/api/peers").json()
    assert body["network"] == {
        "state": "connected",
        "explanation": "Connected.",
        "connections": 3,
        "addresses": ["/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWtest"],
        "join_line": JOIN_LINE,
        "reachable": None,
        "bytes_sent": 10_000,
        "bytes_received": 20_000,
        "upload_rate": 100.0,
        "download_rate": 200.0,
        "upload_limit": 1e6,
        "line_upload": None,
        "line_measured_at": None,
        "banned_peers": 1,
        "refused": {"bad_signature": 2, "oversized": 1},
    }
    status = api.get("/api/status").json()
    assert (status["network"], status["swarm"]) == (body["network"], body["swarm"])
    assert (status["swarm"]["nodes"], status["swarm"]["tokens_per_second"]) == (4, 5_000.0)


def test_the_status_stays_small_among_a_thousand(api: Api) -> None:
    api.node.board.publish(among(1_000))
    response = api.get("/api/status")
    assert len(response.json()["peers"]) == 32
    assert response.json()["peer_count"] == 1_000
    assert len(response.content) < 40_000
    assert len(api.get("/api/peers").json()["peers"]) == 1_000


def test_a_node_that_never_heard_of_a_network_says_so(api: Api) -> None:
    body = api.get("/api/peers").json()
    assert (body["count"], body["peers"], body["swarm"]) == (0, [], None)
    assert (body["network"]["state"], body["network"]["explanation"]) == ("off", "The network is off.")


def test_global_numbers_are_the_swarms(api: Api) -> None:
    api.node.board.publish(among(3))
    body = api.get("/api/training/global").json()
    expected = {
        "training_nodes": 4,
        "global_loss": 5.5,
        "global_min_loss": 4.5,
        "total_steps": 9_000,
        "total_tokens": 4_608_000,
        "data_shards": 16,
        "data_shards_covered": 9,
        "tokens_per_second": 5_000.0,
        "model_hashes": {"12D3KooWpeer0000": "aa" * 32},
    }
    assert {name: body[name] for name in expected} == expected
    assert [node["is_local"] for node in body["nodes"]] == [True, False, False, False]
    assert api.get("/api/training/verify").json()["global_loss"] == 5.5


def test_global_numbers_never_fall_behind_this_node(api: Api) -> None:
    late = among(1)
    assert late.swarm is not None
    late = replace(late, swarm=replace(late.swarm, total_steps=3, total_tokens=3, shards_covered=0, global_loss=None))
    api.node.board.publish(late)
    body = api.get("/api/training/global").json()
    assert (body["total_steps"], body["total_tokens"], body["data_shards_covered"]) == (20, 20 * 512, 2)
    assert body["global_loss"] == pytest.approx((6.9 * 900 + 5.0 * 1_000) / 1_900)


@pytest.mark.parametrize(
    ("diloco", "rate"),
    [
        (DilocoStatus(outer_steps=2, state_root="aa" * 32, certified_root="aa" * 32, members=4), 1.0),
        (DilocoStatus(outer_steps=2, state_root="bb" * 32, certified_root="aa" * 32, members=4), 0.75),
        (DilocoStatus(outer_steps=2, state_root="bb" * 32, certified_root="bb" * 32), 0.25),  # nobody synchronises
        (DilocoStatus(outer_steps=9, state_root="bb" * 32, certified_root="bb" * 32), 1.0),  # nobody is there yet
        (DilocoStatus(), 1.0),
    ],
)
def test_hash_agreement_is_a_share_of_comparable_nodes(api: Api, diloco: DilocoStatus, rate: float) -> None:
    api.node.board.publish(replace(among(3), diloco=diloco))
    body = api.get("/api/training/global").json()
    assert body["hash_agreement_rate"] == rate
    assert body["model_hashes"].get("12D3KooWtest") == (diloco.state_root or None)


def test_how_nodes_train_together_is_told_in_the_nodes_own_words(api: Api) -> None:
    words = "3 other nodes hold the same layers: every 500 steps all of them agree on one average."
    api.node.board.publish(replace(among(3), diloco=DilocoStatus(explanation=words)))
    assert api.get("/api/status").json()["diloco"]["explanation"] == words
    assert api.get("/api/training/global").json()["diloco"]["explanation"] == words


def test_metrics_tell_peers_traffic_and_refusals(api: Api) -> None:
    punched = replace(peer(1), connection=ConnectionKind.PUNCHED)
    api.node.board.publish(replace(among(2), peers=(peer(0), punched)))
    lines = set(api.get("/metrics").text.splitlines())
    assert {
        "neuroshard_peers 2.0",
        "neuroshard_connections 2.0",
        "neuroshard_network_sent_bytes_total 10000.0",
        "neuroshard_network_received_bytes_total 20000.0",
        'neuroshard_network_refused_total{reason="bad_signature"} 2.0',
        'neuroshard_connected_peers{kind="punched"} 1.0',
        'neuroshard_connected_peers{kind="relayed"} 0.0',
        'neuroshard_network_state{state="connected"} 1.0',
        "neuroshard_banned_peers 1.0",
        "neuroshard_swarm_nodes 3.0",
        "neuroshard_swarm_loss 5.5",
    } <= lines


def test_a_reason_that_comes_twice_is_added_up(api: Api) -> None:
    network = NetworkStatus(refused=(("oversized", 1), ("timeout", 5), ("oversized", 2)))
    api.node.board.publish(replace(training_status(), network=network))
    assert api.get("/api/peers").json()["network"]["refused"] == {"oversized": 3, "timeout": 5}
    assert api.get("/metrics").text.count('reason="oversized"') == 1


@given(st.floats(), st.floats())
def test_a_higher_score_is_never_a_worse_rating(one: float, other: float) -> None:
    order = list(PeerRating)
    if one <= other:
        assert order.index(rating_of(one)) >= order.index(rating_of(other))


@pytest.mark.parametrize(
    ("score", "word"),
    [
        (5, "good"),
        (0, "neutral"),
        (-20, "doubtful"),
        (-80, "bad"),
        (-101, "banned"),
        (float("nan"), "neutral"),
        (float("-inf"), "banned"),
    ],
)
def test_a_rating_is_a_word(score: float, word: str) -> None:
    assert rating_of(score) == word


def test_a_stream_tells_of_the_network(serve: Callable[..., Api], node: FakeNode) -> None:
    node.board.publish(among(1))
    api = serve(ApiLimits(events_per_second=100))
    with (
        httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60) as client,
        client.stream("GET", "/api/events") as response,
    ):
        events = events_of(response)
        name, status = next(events)
        assert (name, status["peer_count"]) == ("status", 1)
        node.board.publish(among(2))
        assert next(events)[1]["peer_count"] == 2


def test_peers_that_did_not_change_are_not_sent_again(api: Api) -> None:
    api.node.board.publish(among(3))
    first = api.get("/api/peers")
    tag = {"If-None-Match": first.headers["etag"]}
    api.node.board.publish(replace(among(3), uptime_seconds=99.0))
    again = api.get("/api/peers", tag)
    assert (again.status_code, again.content) == (304, b"")
    api.node.board.publish(among(4))
    assert api.get("/api/peers", tag).json()["count"] == 4
