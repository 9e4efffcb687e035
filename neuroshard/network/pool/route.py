"""The route of large frames: the pool of direct connections if the peer's pool is reachable, otherwise libp2p."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import anyio

from neuroshard.errors import NeuroShardError
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network.nat.external_addresses import ExternalAddresses, is_public_ipv4
from neuroshard.network.pool import Endpoint, NotDeliveredError, PeerTraffic
from neuroshard.network.transfer_policy import BULK_BYTES
from neuroshard.network.transport import PeerUnreachableError, RequestTimeoutError
from neuroshard.types import NodeId

ENDPOINT_KIND = "pool/endpoint"
ENDPOINT_SECONDS = 5.0
ASKED_AGAIN_SECONDS = 60.0  # about an endpoint that was not there or could not be reached
KNOWN_SECONDS = 600.0
MAX_KNOWN = 1024
ENDPOINT_TRIES = 2  # a process that was started again listens at another port


class BulkRequests(Protocol):
    """Direct connections for tensors; see BulkPool."""

    async def request(
        self,
        peer: NodeId,
        endpoint: Endpoint | None,
        frame: Frame,
        reply: FrameLimits | None = None,
        *,
        timeout_seconds: float,
    ) -> Frame:
        """The peer's answer. Raises as Transport.request, NotDeliveredError when the peer cannot have handled it."""
        ...

    def endpoint(self) -> Endpoint:
        """Where this node's pool listens."""
        ...

    def traffic(self) -> Mapping[NodeId, PeerTraffic]:
        """Traffic with each peer since the start."""
        ...


AskSmall = Callable[[NodeId, Frame, float], Awaitable[Frame]]
"""A small request over libp2p: peer, frame, seconds."""


def is_bulk(frame: Frame, reply: FrameLimits) -> bool:
    """Whether a request or its answer is worth a direct connection."""
    return sum(part.spec.byte_count for part in frame.tensors) > BULK_BYTES or reply.max_body_bytes > BULK_BYTES


class BulkRoute:
    """Knows which peers have a pool, and falls back where it cannot be used."""

    def __init__(
        self,
        pool: BulkRequests,
        ip_of: Callable[[NodeId], str | None],
        ask: AskSmall,
        outside: ExternalAddresses | None = None,
    ) -> None:
        self._pool = pool
        self._outside = outside or ExternalAddresses()
        self._ip_of = ip_of
        self._ask = ask
        self._known: dict[NodeId, tuple[float, Endpoint | None]] = {}  # until when, where

    def traffic(self) -> Mapping[NodeId, PeerTraffic]:
        """Traffic of the pool with each peer since the start."""
        return self._pool.traffic()

    async def answer_endpoint(self, requester: NodeId, question: Frame) -> Frame:
        """Send a peer the port at which it reaches this node's pool; the peer knows the address."""
        await anyio.lowlevel.checkpoint()
        return Frame(ENDPOINT_KIND, {"port": self._own_port(self._ip_of(requester))})

    async def request(self, peer: NodeId, frame: Frame, reply: FrameLimits, timeout_seconds: float) -> Frame | None:
        """The peer's answer; None when it has no pool that this node can reach, and has not handled the request.

        So the request may go another way then. Raises as Transport.request, also for a peer that went away when it may
        have handled the request: to send it once more is for those who know what that does.
        """
        tried: Endpoint | None = None
        for _ in range(ENDPOINT_TRIES):
            endpoint = await self._endpoint(peer)
            if endpoint is None:
                return None
            if endpoint == tried:
                break
            try:
                return await self._pool.request(peer, endpoint, frame, reply, timeout_seconds=timeout_seconds)
            except NotDeliveredError:
                tried = endpoint
                self._known.pop(peer, None)
        self._remember(peer, None)
        return None

    def _own_port(self, requester_ip: str | None) -> int:
        """Where a requester finds the pool: one in the internet, where a router translates, at the router's port."""
        inside = self._pool.endpoint()[1]
        outside = self._outside.of(inside)
        return outside[1] if outside is not None and is_public_ipv4(requester_ip or "") else inside

    async def _endpoint(self, peer: NodeId) -> Endpoint | None:
        until, endpoint = self._known.get(peer, (0.0, None))
        if anyio.current_time() < until:
            return endpoint
        port = await self._port(peer)
        ip = self._ip_of(peer)  # known once it was asked: where it is connected from
        endpoint = None if ip is None or port is None else (ip, port)
        self._remember(peer, endpoint)
        return endpoint

    async def _port(self, peer: NodeId) -> int | None:
        try:
            answer = await self._ask(peer, Frame(ENDPOINT_KIND), ENDPOINT_SECONDS)
        except RequestTimeoutError:
            return None
        except PeerUnreachableError:
            raise  # the request would not reach it either; nothing is remembered, so the next one asks again
        except NeuroShardError:
            return None  # whatever is wrong shows itself in the request as well
        port = answer.header.get("port")
        return port if type(port) is int and 0 < port < 65_536 else None

    def _remember(self, peer: NodeId, endpoint: Endpoint | None) -> None:
        self._known.pop(peer, None)
        while len(self._known) >= MAX_KNOWN:
            del self._known[next(iter(self._known))]
        seconds = ASKED_AGAIN_SECONDS if endpoint is None else KNOWN_SECONDS
        self._known[peer] = (anyio.current_time() + seconds, endpoint)
