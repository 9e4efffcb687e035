"""The pool: asks peers over as many connections as the line needs, and takes over those that peers open."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, TypeAlias

import anyio

from neuroshard.messages import Frame, FrameLimits
from neuroshard.network.crowds import longest_silent
from neuroshard.network.limits import ByteBudget, UploadPacer
from neuroshard.network.pool.exchange import encoded
from neuroshard.network.pool.greeting import (
    GreetingVerdict,
    SecureStream,
    Sessions,
    greet_as_dialler,
    greet_as_listener,
)
from neuroshard.network.pool.link import PeerLink
from neuroshard.network.pool.options import ConnectionLostError, NotDeliveredError, PeerTraffic, PoolOptions
from neuroshard.network.pool.receiving import Resources
from neuroshard.network.reputation import Reputation
from neuroshard.network.serving import RequestServer
from neuroshard.network.transport import RequestTimeoutError, TransportClosedError
from neuroshard.types import NodeId

BUSY_TICK_SECONDS = 0.25
IDLE_TICK_SECONDS = 1.0
MOST_REFUSED = 64  # with a reason at once; others are only closed
MAX_LINKS = 512  # what was learned about lines is forgotten beyond that
DEFAULT_BUDGET_BYTES = 512 * 1024 * 1024
DEFAULT_PEER_BUDGET_BYTES = 256 * 1024 * 1024

Open: TypeAlias = Callable[[NodeId], Awaitable[SecureStream | None]]
"""Opens a connection with a peer, which is then authenticated.

None: only the peer could dial, and it has opened one. Raises ConnectionLostError.
"""


class StreamConnections(Protocol):
    """The connections for streams, without which a peer may not have any for bodies."""

    def has(self, peer: NodeId) -> bool:
        """Whether there is one with this peer."""
        ...

    def note_use(self, peer: NodeId) -> None:
        """Note that bodies of this peer are on their way, so that its connection counts as used."""
        ...


@asynccontextmanager
async def bulk_pool(
    local_id: NodeId,
    server: RequestServer,
    open_to: Open,
    options: PoolOptions | None = None,
    *,
    budget: ByteBudget | None = None,
    pacer: UploadPacer | None = None,
    reputation: Reputation | None = None,
    streams: StreamConnections | None = None,
) -> AsyncGenerator[BulkPool]:
    """A pool that works within the block; all its tasks and connections end with it.

    A peer that has no connection for streams any more loses those that it opened here. None: all have one.
    """
    async with anyio.create_task_group() as tasks:
        shared = Resources(
            server,
            budget or ByteBudget(DEFAULT_BUDGET_BYTES, DEFAULT_PEER_BUDGET_BYTES),
            pacer or UploadPacer(),
            reputation or Reputation(anyio.current_time),
            options or PoolOptions(),
            tasks,
        )
        pool = BulkPool(local_id, shared, open_to, streams)
        try:
            yield pool
        finally:
            pool.close()
            tasks.cancel_scope.cancel()


class BulkPool:
    """Made by `bulk_pool`. It reports misconduct of peers; the requesting code scores good answers and timeouts."""

    def __init__(self, local_id: NodeId, shared: Resources, open_to: Open, streams: StreamConnections | None) -> None:
        self._local_id = local_id
        self._shared = shared
        self._open = open_to
        self._streams = streams
        self._links: dict[NodeId, PeerLink] = {}
        self._inbound: dict[SecureStream, NodeId] = {}  # admitted, open or about to be
        self._refusing = 0  # connections whose dialler has not said anything yet
        self._turned_away = 0
        self._is_closed = False
        shared.tasks.start_soon(self._tend)
        shared.tasks.start_soon(shared.verifier.run)

    @property
    def connection_count(self) -> int:
        """Connections that are open, in both directions."""
        return sum(link.connection_count for link in self._links.values())

    @property
    def turned_away(self) -> int:
        """Connections that were closed before they carried anything: too many, too slow, not welcome."""
        return self._turned_away

    def connections_with(self, peer: NodeId) -> int:
        """Connections with this peer that are open."""
        return self._links[peer].connection_count if peer in self._links else 0

    @property
    def busy_peers(self) -> set[NodeId]:
        """Peers with which anything is on its way or awaited."""
        return {peer for peer, link in self._links.items() if link.is_busy}

    def traffic(self) -> Mapping[NodeId, PeerTraffic]:
        """Traffic of every peer with which there was any."""
        return {peer: link.traffic() for peer, link in self._links.items()}

    async def request(
        self, peer: NodeId, frame: Frame, reply: FrameLimits | None = None, *, timeout_seconds: float
    ) -> Frame:
        """Ask a peer and wait for its answer, which must keep the limits of `reply` (None: a header, no tensors).

        The tensors must not change meanwhile. The peer handles it at most once, whatever breaks, even if its process is
        started again meanwhile: while connections break and come back, both the request and its answer resume where
        they stopped. Hope for a peer ends 1 to 3 s after its last connection when its port, once open, is closed now,
        so its process is gone; about `resume_seconds` after it when nothing answers. While a connection does not end,
        only time limits the waiting.

        Raises PeerUnreachableError (NotDeliveredError when the peer cannot have handled the request,
        RequestTimeoutError when time ran out), PeerRefusedError, WireError for an answer that breaks the limits, or
        TransportClosedError.
        """
        with anyio.move_on_after(timeout_seconds):
            data = await encoded(frame)
            if self._is_closed:
                raise TransportClosedError("This node's pool of connections is closed.")
            if peer == self._local_id or self._shared.reputation.is_banned(peer):
                raise NotDeliveredError(f"Peer {peer} is this node itself, or banned.")
            return await self._link(peer).request(data, reply or FrameLimits())
        raise RequestTimeoutError(f"Peer {peer} did not answer within {timeout_seconds:g} s.")

    async def welcome(self, peer: NodeId, stream: SecureStream) -> None:
        """Use a connection that this authenticated peer opened until it ends. It may take the place of another one."""
        verdict = self._enter(peer, stream)
        is_welcome = verdict is GreetingVerdict.WELCOME
        if not is_welcome and self._refusing >= MOST_REFUSED:
            self._turned_away += 1
            stream.close()
            return
        self._refusing += not is_welcome
        try:
            with anyio.fail_after(self._shared.options.handshake_seconds):
                sessions = await greet_as_listener(stream, verdict, self._link(peer).session if is_welcome else 0)
            await self._link(peer).carry(stream, sessions, is_dialled=False)
        except (ConnectionLostError, TimeoutError):
            self._turned_away += 1
        finally:
            stream.close()
            self._refusing -= not is_welcome
            self._inbound.pop(stream, None)  # one that was replaced is removed already

    def _enter(self, peer: NodeId, stream: SecureStream) -> GreetingVerdict:
        """Give a connection a place. In a full table it takes that of the longest silent one of the greediest network.

        The transfers of that one resume over other connections.
        """
        verdict = self._judge(peer)
        if verdict is GreetingVerdict.WELCOME and len(self._inbound) >= self._shared.options.max_connections:
            silent = longest_silent(tuple(self._inbound), stream.ip)
            if silent is None:
                return GreetingVerdict.FULL
            del self._inbound[silent]
            silent.close()
        if verdict is GreetingVerdict.WELCOME:
            self._inbound[stream] = peer
        return verdict

    async def use_dialled(self, peer: NodeId, stream: SecureStream) -> None:
        """Use a connection that this node dialled because the peer asked for it. Raises ConnectionLostError."""
        link = self._link(peer)
        sessions = await self._greeted(stream, link.session)
        link.busy_at = anyio.current_time()
        self._shared.tasks.start_soon(partial(link.carry, stream, sessions, is_dialled=True))

    def has_room_for(self, peer: NodeId, opening: int) -> bool:
        """Whether this peer may have one more connection than those that are open or being opened."""
        return self._judge(peer, opening) is GreetingVerdict.WELCOME

    def close(self) -> None:
        """Called at the end of the block: all requests raise TransportClosedError."""
        self._is_closed = True
        for link in self._links.values():
            link.close(TransportClosedError("This node's pool of connections was closed."))

    def _link(self, peer: NodeId) -> PeerLink:
        if peer not in self._links:
            if len(self._links) >= MAX_LINKS:
                self._forget_links()
            self._links[peer] = PeerLink(peer, self._shared, self._connect)
        return self._links[peer]

    def _forget_links(self) -> None:
        unused = sorted((link.busy_at, peer) for peer, link in self._links.items() if link.is_unused)
        for _, peer in unused[: MAX_LINKS // 4]:
            del self._links[peer]

    async def _tend(self) -> None:
        while True:
            now = anyio.current_time()
            for peer, link in tuple(self._links.items()):
                if self._streams is not None:
                    self._compare(peer, link, self._streams)
                link.tend(now)
            is_busy = any(link.is_busy for link in self._links.values())
            await anyio.sleep(BUSY_TICK_SECONDS if is_busy else IDLE_TICK_SECONDS)

    def _compare(self, peer: NodeId, link: PeerLink, streams: StreamConnections) -> None:
        if link.connection_count and not streams.has(peer):
            link.close_accepted()
        if link.is_busy:
            streams.note_use(peer)

    async def _connect(self, peer: NodeId, session: int) -> tuple[SecureStream, Sessions] | None:
        """As `Connect` of `link.py`."""
        with anyio.move_on_after(self._shared.options.handshake_seconds):
            stream = await self._open(peer)
            return None if stream is None else (stream, await self._greeted(stream, session))
        raise ConnectionLostError("no answer in time")

    async def _greeted(self, stream: SecureStream, session: int) -> Sessions:
        try:
            return await greet_as_dialler(stream, session)
        except BaseException:
            stream.close()
            raise

    def _judge(self, peer: NodeId, opening: int = 0) -> GreetingVerdict:
        options = self._shared.options
        if peer == self._local_id or self._shared.reputation.is_banned(peer):
            return GreetingVerdict.UNWELCOME
        dialled = self._links[peer].dialled_count if peer in self._links else 0
        accepted = sum(owner == peer for owner in self._inbound.values())
        is_full = accepted + dialled + opening >= options.max_connections_per_peer
        return GreetingVerdict.FULL if is_full else GreetingVerdict.WELCOME
