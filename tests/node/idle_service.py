"""A stage service that computes nothing, for nodes whose training is a count."""

from __future__ import annotations

from collections.abc import Container

import anyio

from neuroshard.types import NodeId


class IdleService:
    """Computes nothing."""

    def __init__(self) -> None:
        self.kept: list[tuple[float, Container[NodeId]]] = []

    def keep_only(self, nodes: Container[NodeId]) -> None:
        """Remember who counts as present, and when."""
        self.kept.append((anyio.current_time(), nodes))
