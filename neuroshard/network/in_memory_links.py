"""Links between the nodes of an in-memory network, with delay, loss, bandwidth and partitions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from neuroshard.types import NodeId


@dataclass(frozen=True)
class Link:
    """Delay and loss of the messages from one node to another."""

    delay_seconds: float = 0.0
    loss: float = 0.0  # share of messages that are lost

    def __post_init__(self) -> None:
        if not (0 <= self.delay_seconds < math.inf and 0 <= self.loss <= 1):
            raise ValueError(f"a link needs a finite delay and a loss in [0, 1], got {self}")


PERFECT_LINK = Link()


class Links:
    """All links of one network.

    `random` decides which messages are lost; `default` applies to pairs without their own link.
    """

    def __init__(self, random: Random, default: Link) -> None:
        self._random = random
        self._default = default
        self._links: dict[tuple[NodeId, NodeId], Link] = {}
        self._sides: tuple[frozenset[NodeId], ...] = ()
        self._uplinks: dict[NodeId, float] = {}  # bytes per second
        self._sent_at: dict[NodeId, float] = {}  # when the last message in a node's queue has left

    def set_link(self, sender: NodeId, receiver: NodeId, link: Link) -> None:
        """Set the link of one direction between two nodes."""
        self._links[sender, receiver] = link

    def partition(self, *sides: Iterable[NodeId]) -> None:
        """Separate the sides. Nodes of no side still reach all others; without sides, the network heals."""
        self._sides = tuple(frozenset(side) for side in sides)

    @property
    def common_delay_seconds(self) -> float | None:
        """The delay of every message if all links are alike and lossless; otherwise None."""
        is_simple = not self._links and not self._sides and self._default.loss == 0
        return self._default.delay_seconds if is_simple else None

    def link(self, sender: NodeId, receiver: NodeId) -> Link:
        """The link from one node to another."""
        return self._links.get((sender, receiver), self._default) if self._links else self._default

    def set_uplink(self, sender: NodeId, bytes_per_second: float) -> None:
        """From now on, messages of this node leave one after the other over a line of this bandwidth."""
        self._uplinks[sender] = bytes_per_second

    def seconds_to_arrival(self, sender: NodeId, receiver: NodeId, byte_count: int, now: float) -> float:
        """Seconds until a message sent now arrives."""
        delay, rate = self.link(sender, receiver).delay_seconds, self._uplinks.get(sender)
        if rate is None:
            return delay
        self._sent_at[sender] = max(now, self._sent_at.get(sender, now)) + byte_count / rate
        return self._sent_at[sender] - now + delay

    def are_separated(self, one: NodeId, other: NodeId) -> bool:
        """Whether a partition separates two nodes."""
        return any(one in side and other not in side and self._is_placed(other) for side in self._sides)

    def is_lost(self, sender: NodeId, receiver: NodeId) -> bool:
        """Whether the next message is lost; draws from `random` on a lossy link."""
        if self._sides and self.are_separated(sender, receiver):
            return True
        loss = self.link(sender, receiver).loss
        return loss > 0 and self._random.random() < loss

    def _is_placed(self, node_id: NodeId) -> bool:
        return any(node_id in side for side in self._sides)
