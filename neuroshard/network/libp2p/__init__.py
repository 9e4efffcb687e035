"""The network of a node over libp2p. The first call imports libp2p, which takes half a second."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import anyio.to_thread

from neuroshard.identity import NodeIdentity
from neuroshard.network.libp2p.lean_import import lean_libp2p
from neuroshard.network.libp2p.options import NetworkOptions, NetworkParts
from neuroshard.network.libp2p.peer_limits import ConnectionLimits
from neuroshard.network.transport import Network, NetworkFailedError

__all__ = [
    "ConnectionLimits",
    "NetworkFailedError",
    "NetworkOptions",
    "NetworkParts",
    "libp2p_network",
]


@asynccontextmanager
async def libp2p_network(
    identity: NodeIdentity,
    options: NetworkOptions,
    now: Callable[[], float] = time.time,
    parts: NetworkParts | None = None,
) -> AsyncGenerator[Network]:
    """Run this node's network inside a trio loop; all its tasks and sockets end with the block.

    Raises NetworkRefusedError if the port is not available, UsageError for an unusable host. A defect in a
    background task ends the block with NetworkFailedError, so that the caller can start the network again.
    """
    running_network = await anyio.to_thread.run_sync(_loaded)
    async with running_network(identity, options, now, parts or NetworkParts()) as network:
        yield network


def _loaded() -> Callable[..., AbstractAsyncContextManager[Network]]:
    with lean_libp2p():
        from neuroshard.network.libp2p.network import running_network

    return running_network
