"""The status values of the swarm: each peer, the totals of all nodes, and the number of shards trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from neuroshard.data.shard_assignment import Assignment, held_out_count
from neuroshard.membership.announcements import Announcement
from neuroshard.membership.swarm_view import GlobalView, Member
from neuroshard.network import Connection
from neuroshard.status.snapshot import PeerStatus, SwarmStatus
from neuroshard.types import NodeId, RunId

MOST_PEERS = 1000


def to_status(
    view: GlobalView,
    *,
    connections: Iterable[Connection] = (),
    announcements: Mapping[NodeId, Announcement] | None = None,
    score_of: Callable[[NodeId], float] = lambda _node_id: 0.0,
    shards_covered: int = 0,
    most_peers: int = MOST_PEERS,
) -> tuple[tuple[PeerStatus, ...], SwarmStatus]:
    """Return the other nodes as peers, those known longest first, and the totals of all nodes."""
    connected = {connection.peer: connection for connection in connections}
    said = announcements or {}
    others = sorted((m for m in view.members.values() if not m.is_local), key=lambda m: (m.first_seen, m.node_id))
    peers = tuple(
        _peer_status(member, connected.get(member.node_id), said.get(member.node_id), score_of(member.node_id))
        for member in others[:most_peers]
    )
    return peers, swarm_status(view, shards_covered)


def swarm_status(view: GlobalView, shards_covered: int = 0) -> SwarmStatus:
    """Return the totals of all nodes; this node counts even before its first report."""
    has_local = any(member.is_local for member in view.members.values())
    return SwarmStatus(
        nodes=len(view.members) + (not has_local),
        training_nodes=view.training_nodes,
        global_loss=view.global_loss,
        min_loss=view.min_loss,
        total_steps=view.total_steps,
        total_tokens=view.total_tokens,
        shards_covered=shards_covered,
        tokens_per_second=view.tokens_per_second,
        model_hashes=tuple(sorted(view.model_hashes.items())),
    )


def _peer_status(
    member: Member, connection: Connection | None, announcement: Announcement | None, score: float
) -> PeerStatus:
    report = member.report
    announced = announcement.addresses[0] if announcement and announcement.addresses else ""
    return PeerStatus(
        node_id=member.node_id,
        wallet_id=member.wallet_id,
        roles=report.roles,
        layers=report.layers,
        loss_ema=report.loss_ema,
        tokens_per_second=report.tokens_per_second,
        last_seen=member.last_seen,
        steps=report.steps,
        tokens=report.tokens,
        shard=report.shard,
        outer_step=report.outer_step,
        state_hash=report.state_hash,
        state=report.state.value,
        started_at=report.started_at,
        first_seen=member.first_seen,
        version=announcement.version if announcement else "",
        connection=connection.kind if connection else None,
        address=connection.address if connection else announced,
        rtt_seconds=connection.rtt_seconds if connection else None,
        bytes_sent=connection.bytes_sent if connection else 0,
        bytes_received=connection.bytes_received if connection else 0,
        score=score,
    )


MAX_KNOWN_RANKS = 32_768


def covered_places(stretches: Iterable[tuple[int, int]], length: int) -> int:
    """Return the size of the union of stretches (first place, length) on a ring of `length` places."""
    pieces: list[tuple[int, int]] = []
    for first, count in stretches:
        stop = first + min(count, length)
        pieces.append((first, min(stop, length)))
        pieces.append((0, stop - length))
    covered = reached = 0
    for start, stop in sorted(pieces):
        covered += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered


class ShardCoverage:
    """Counts the shards that the nodes of one run have trained on.

    It caches the first shard of each node, because the calculation hashes a lot.
    """

    def __init__(self, run_id: RunId, total_shards: int) -> None:
        self._run_id = run_id
        self._total_shards = total_shards
        self._ranks: dict[NodeId, int] = {}

    def covered(self, view: GlobalView) -> int:
        """Return the number of distinct shards that nodes report to have trained on, including nodes that left."""
        counts = {node: best.shards for node, best in view.departed.items()}
        counts |= {node: member.best.shards for node, member in view.members.items()}
        length = self._total_shards - held_out_count(self._total_shards)
        return covered_places(((self._rank(node), count) for node, count in counts.items() if count), length)

    def _rank(self, node_id: NodeId) -> int:
        if node_id not in self._ranks:
            if len(self._ranks) >= MAX_KNOWN_RANKS:
                self._ranks.clear()
            self._ranks[node_id] = Assignment(self._run_id, node_id, self._total_shards).first_rank
        return self._ranks[node_id]
