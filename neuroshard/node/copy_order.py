"""Which nodes keep the copy of a stage that one node holds alone: an order that everybody comes to. Decisions only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from neuroshard.identity import hash_parts
from neuroshard.node.stage_swarm import HOLDING, StageSwarm
from neuroshard.types import LayerRange, NodeId, WalletId

RANKS = 4  # how many of the order may come to keep one
MOST_OF_A_WALLET = 8  # of those that are asked for a copy while it is not known whose stage it is


def rank_of(swarm: StageSwarm, stage: int, holder: NodeId) -> int:
    """This node's place in the order of those that keep the copy of this holder's stage."""
    members = swarm.membership.view.members
    able = {
        node: member.wallet_id
        for node, member in members.items()
        if member.report.layers is not None and member.report.state in HOLDING
    }
    able[swarm.node_id] = swarm.wallet_id
    wallet = members[holder].wallet_id if holder in members else None
    order = _in_order(swarm, swarm.plan[stage], able.keys() - {holder})
    order.sort(key=lambda node: able[node] == wallet)  # stable: computers of one owner are often switched off together
    return order.index(swarm.node_id)


def likely_keepers(swarm: StageSwarm, layers: LayerRange, most: int) -> list[NodeId]:
    """Other nodes that most likely keep a copy of a stage whose holder may be forgotten; those that do come first.

    The order that `rank_of` knows puts nodes of the holder's wallet last. Here it may be any wallet, so that none of
    them has more than a part of the places.
    """
    members = swarm.membership.view.members
    able = [
        node
        for node, member in members.items()
        if node != swarm.node_id and node not in swarm.lost and member.report.layers is not None
    ]
    asked, later = list[NodeId](), list[NodeId]()
    counts = Counter[WalletId]()
    for node in _in_order(swarm, layers, able):
        wallet = members[node].wallet_id
        counts[wallet] += 1
        (asked if counts[wallet] <= MOST_OF_A_WALLET else later).append(node)
    return [*asked, *later][:most]


def _in_order(swarm: StageSwarm, layers: LayerRange, nodes: Iterable[NodeId]) -> list[NodeId]:
    """By rendezvous hashing."""
    return sorted(
        nodes, key=lambda node: hash_parts("neuroshard/second-copy", swarm.run_id, layers.start, layers.stop, node)
    )
