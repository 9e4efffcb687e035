"""Snapshot to answers about the network and its nodes."""

from __future__ import annotations

from collections import Counter
from math import isnan

from neuroshard.api.bodies.base import encodable
from neuroshard.api.bodies.network import NetworkBody, PeerBody, PeersBody, Standing, SwarmBody
from neuroshard.status.snapshot import NodeStatus, PeerStatus

BANNED_BELOW = -100.0
BAD_BELOW = -50.0
ROUNDING = 1.0  # a score this close to 0 says nothing


def peers_view(status: NodeStatus) -> PeersBody:
    """GET /api/peers."""
    return PeersBody(
        count=len(status.peers),
        network=network_body(status),
        swarm=swarm_body(status),
        peers=[peer_body(peer) for peer in status.peers],
    )


def network_body(status: NodeStatus) -> NetworkBody:
    """This node's connections."""
    network = status.network
    return NetworkBody.model_validate(
        {**vars(network), "peers": len(status.peers), "refused": refusals(network.refused)}
    )


def swarm_body(status: NodeStatus) -> SwarmBody | None:
    """All nodes together, once the node has looked around."""
    return SwarmBody.model_validate(status.swarm) if status.swarm else None


def peer_body(peer: PeerStatus) -> PeerBody:
    """One other node."""
    return PeerBody.model_validate({**vars(peer), "role": "+".join(peer.roles), "standing": standing(peer.score)})


def standing(score: float) -> Standing:
    """A score in a word; a number that says nothing is neutral."""
    if isnan(score) or abs(score) < ROUNDING:
        return Standing.NEUTRAL
    if score > 0:
        return Standing.GOOD
    if score < BANNED_BELOW:
        return Standing.BANNED
    return Standing.BAD if score < BAD_BELOW else Standing.DOUBTFUL


def refusals(refused: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """How often something was refused, by reason."""
    counts: Counter[str] = Counter()
    for reason, count in refused:
        counts[encodable(reason)] += count
    return dict(counts)
