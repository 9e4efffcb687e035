"""Which nodes have said, when asked, that they train the stages that they report."""

from __future__ import annotations

from collections.abc import Container

import anyio

from neuroshard.types import NodeId

ASK_AGAIN_SECONDS = 60.0
VALID_SECONDS = 150.0  # two questions may go unanswered


class ConfirmedHolders:
    """One for a node."""

    def __init__(self) -> None:
        self._told_at: dict[tuple[NodeId, int], float] = {}  # by the event loop's clock

    def add(self, node_id: NodeId, stage: int) -> None:
        """A node has just said that it trains a stage."""
        self._told_at[node_id, stage] = anyio.current_time()

    def remove(self, node_id: NodeId, stage: int) -> None:
        """A node has just said that it does not."""
        self._told_at.pop((node_id, stage), None)

    def keep_only(self, nodes: Container[NodeId]) -> None:
        """Forget the others."""
        self._told_at = {key: at for key, at in self._told_at.items() if key[0] in nodes}

    def told_within(self, seconds: float, node_id: NodeId, stage: int) -> bool:
        """Whether a node has said so in this time."""
        at = self._told_at.get((node_id, stage))
        return at is not None and anyio.current_time() - at < seconds
