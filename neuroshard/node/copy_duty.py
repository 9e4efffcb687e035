"""Which node keeps the copy of a stage, and when it is renewed. Decisions only."""

from __future__ import annotations

from dataclasses import dataclass

from neuroshard.node.joining import copy_order
from neuroshard.node.stage_swarm import HOLDING, StageSwarm
from neuroshard.types import NodeId


@dataclass(frozen=True)
class CopyTimes:
    """How often, and how much of the holder's line it may take."""

    every_seconds: float = 30.0
    look_seconds: float = 1.0
    retry_seconds: float = 5.0  # while there is no copy at all
    stale_seconds: float = 90.0  # of a copy: then the next one in the order makes one too
    turn_seconds: float = 20.0  # so long each one in the order waits for the ones before it
    ranks: int = 4  # how many of the order may come to it
    share: float = 0.5  # of the holder's line


def rank_of(swarm: StageSwarm, stage: int, holder: NodeId) -> int:
    """This node's place in the order of those that keep the copy.

    Nodes of other wallets come first: two computers of one owner are often switched off together.
    """
    members = swarm.membership.view.members
    wallet = members[holder].wallet_id if holder in members else None
    able = [node for node, member in members.items() if node != holder and member.report.state in HOLDING]
    if swarm.node_id not in able:
        able.append(swarm.node_id)
    wallets = {node: swarm.wallet_id if node == swarm.node_id else members[node].wallet_id for node in able}
    order = copy_order(swarm, swarm.plan[stage], able)
    order.sort(key=lambda node: wallets[node] == wallet)  # stable
    return order.index(swarm.node_id)


def copy_is_due(
    times: CopyTimes, rank: int, age_seconds: float | None, *, single_seconds: float, waited: float | None
) -> bool:
    """Whether to ask the holder for its state now.

    `age_seconds` of the copy here, `single_seconds` since the stage has one holder, `waited` since the last try.
    """
    if rank >= times.ranks or single_seconds < rank * times.turn_seconds:
        return False
    pause = times.retry_seconds if age_seconds is None and rank == 0 else times.every_seconds
    is_old = age_seconds is None or age_seconds >= times.every_seconds
    return is_old and (waited is None or waited >= pause)
