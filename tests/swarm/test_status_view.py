from __future__ import annotations

from neuroshard.membership.swarm_status import to_status
from neuroshard.membership.swarm_view import GlobalView
from neuroshard.network import Connection
from neuroshard.status.snapshot import ConnectionKind, NodeState
from neuroshard.types import NodeId
from tests.worlds.claims import EPOCH, REPORT, announcement_of, identity_of, said

ME = identity_of(1)
ONE, TWO = NodeId("node 1"), NodeId("node 2")


def test_peers_show_what_they_reported_and_how_they_are_reached() -> None:
    view = GlobalView().with_local(ME.node_id, ME.wallet_id, REPORT, EPOCH)
    view = view.with_reports([(said(2), EPOCH + 1)]).with_reports([(said(1, state=NodeState.PAUSED), EPOCH + 2)])
    announcement = announcement_of(ME, addresses=("/ip4/203.0.113.9/tcp/1/p2p/x",), version="0.2.1")
    connection = Connection(ONE, "/ip4/10.0.0.1/tcp/5", ConnectionKind.PUNCHED, True, EPOCH, 10, 20, 0.05)
    peers, swarm = to_status(
        view,
        connections=[connection],
        announcements={ONE: announcement, TWO: announcement},
        score_of={ONE: -3.0, TWO: 0.0}.__getitem__,
        shards_covered=12,
    )
    assert [peer.node_id for peer in peers] == [TWO, ONE]  # known longest first, this node is no peer
    two, one = peers
    assert (two.connection, two.address, two.rtt_seconds) == (None, "/ip4/203.0.113.9/tcp/1/p2p/x", None)
    assert (one.connection, one.address, one.rtt_seconds) == (ConnectionKind.PUNCHED, "/ip4/10.0.0.1/tcp/5", 0.05)
    assert (one.bytes_sent, one.bytes_received, one.score, one.version) == (10, 20, -3.0, "0.2.1")
    assert (one.state, one.first_seen, one.last_seen) == ("paused", EPOCH + 2, EPOCH + 2)
    assert (one.steps, one.tokens, one.shard, one.layers) == (REPORT.steps, REPORT.tokens, 17, REPORT.layers)
    assert (swarm.nodes, swarm.training_nodes, swarm.shards_covered) == (3, 2, 12)
    assert swarm.total_steps == 3 * REPORT.steps
    assert swarm.global_loss == swarm.min_loss == REPORT.loss_ema
    assert dict(swarm.model_hashes) == dict.fromkeys((ME.node_id, ONE, TWO), REPORT.state_hash)


def test_a_node_alone_counts_itself_also_before_its_first_report() -> None:
    peers, swarm = to_status(GlobalView())
    assert (peers, swarm.nodes, swarm.total_steps, swarm.global_loss) == ((), 1, 0, None)


def test_a_very_long_list_of_peers_is_cut_but_all_of_them_count() -> None:
    view = GlobalView().with_reports([(said(number), EPOCH + number) for number in range(30)])
    peers, swarm = to_status(view, most_peers=10)
    assert [peer.node_id for peer in peers] == [NodeId(f"node {n}") for n in range(10)]
    assert swarm.nodes == 31
