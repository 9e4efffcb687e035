"""The link to one peer: its connections, its transfers, and the times at which it dials again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from itertools import count
from secrets import randbits
from typing import TypeAlias

import anyio

from neuroshard.messages import CHUNK_BYTES, EncodedFrame, Frame, FrameLimits
from neuroshard.network.pool.connection import PoolConnection
from neuroshard.network.pool.exchange import PeerTransfers, TransferHooks
from neuroshard.network.pool.greeting import SecureStream, Sessions
from neuroshard.network.pool.options import (
    ConnectionLostError,
    DialRefusedError,
    MisconductError,
    PeerFullError,
    PeerTraffic,
)
from neuroshard.network.pool.receiving import Resources
from neuroshard.network.pool.sizing import IDLE_SECONDS, LineMonitor, PoolSize, next_size, wanted_connections
from neuroshard.network.pool.transfers import BLOCK_BYTES, CHUNK_BLOCKS
from neuroshard.network.reputation import ScoreReason
from neuroshard.types import NodeId

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
FULL_PAUSE_SECONDS = 30.0  # when the peer has no room for another connection
REFUSED_SECONDS = 1.0  # after this time without a listener at the peer's port its process is gone


class Redialling:
    """Results of the attempts to connect with one peer. Times are those of the event loop, in seconds."""

    def __init__(self, resume_seconds: float) -> None:
        """`resume_seconds`: how long to hope for a peer of which nothing is heard."""
        self.dial_after = 0.0
        self._resume_seconds = resume_seconds
        self._failures = 0  # rounds of attempts in a row
        self._left_at: float | None = None  # when a connection ended last; None: nothing to resume
        self._refused_since: float | None = None
        self._has_listened = False

    def reached(self) -> None:
        """The peer was dialled and greeted."""
        self._failures = 0
        self._refused_since = None
        self._has_listened = True

    def left(self, now: float) -> None:
        """A connection ended, whichever side had dialled."""
        self._left_at = now
        self._refused_since = None

    def failed(self, error: ConnectionLostError, now: float) -> None:
        """An attempt failed. A closed port means something only for a peer that could be dialled before."""
        self._failures += now >= self.dial_after  # attempts of one round count once
        if self._has_listened and isinstance(error, DialRefusedError):
            self._refused_since = now if self._refused_since is None else self._refused_since
            if now - self._refused_since >= REFUSED_SECONDS:
                self._left_at = None
        else:
            self._refused_since = None
        self.dial_after = now + self._pause(error, now)

    def is_hopeful(self, now: float) -> bool:
        """Whether the peer was here lately, and its process may still be there and know what was on its way."""
        return self._left_at is not None and now - self._left_at < self._resume_seconds

    def _pause(self, error: ConnectionLostError, now: float) -> float:
        if isinstance(error, PeerFullError):
            return FULL_PAUSE_SECONDS
        if self._refused_since is not None and self.is_hopeful(now):
            return FIRST_PAUSE_SECONDS  # soon it is known whether the process is gone
        return min(FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures, 10), LONGEST_PAUSE_SECONDS)


SILENCE_SECONDS = 10.0  # after an offer, when nothing else is on its way
_SESSION_BITS = 64
_LOG = logging.getLogger(__name__)


Connect: TypeAlias = Callable[[NodeId, int], Awaitable[tuple[SecureStream, Sessions] | None]]
"""Opens a connection with a peer and greets it; the number is this side's session.

None: the peer could dial and this side could not, so the peer has opened one. Raises ConnectionLostError.
"""


class PeerLink:
    """Belongs to the pool's event loop. Connections of both directions are one; either side may have dialled."""

    def __init__(self, peer: NodeId, shared: Resources, connect: Connect) -> None:
        self.peer = peer
        self.busy_at = anyio.current_time()
        self._shared = shared
        self._connect = connect
        self._connections: dict[int, PoolConnection] = {}
        self._dialled: set[int] = set()
        self._numbers = count()
        self._dialling = 0
        self._redialling = Redialling(shared.options.resume_seconds)
        self.session = randbits(_SESSION_BITS)  # `secure_stream.py` explains sessions
        self._session_of_peer: int | None = None
        self._size = PoolSize()
        self._observer = LineMonitor()
        self._bytes_before = (0, 0)  # sent and received over connections that ended
        self._arrived, self._busy_seconds = 0.0, 0.0  # bytes that arrived, and the time with any on their way
        hooks = TransferHooks(
            self._report, self._wake, self._send, self._cut, self._cut_stalled, self._blocks_at_a_time
        )
        self._exchange = PeerTransfers(peer, shared, hooks)

    @property
    def connection_count(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    @property
    def dialled_count(self) -> int:
        """Number of connections that this node dialled."""
        return len(self._dialled)

    @property
    def is_busy(self) -> bool:
        """Whether anything is on its way or awaited."""
        return self._exchange.is_busy

    @property
    def is_unused(self) -> bool:
        """Whether nothing is lost when this link is forgotten, except what it learned about the line."""
        return not (self._connections or self._dialling or self.is_busy)

    def traffic(self) -> PeerTraffic:
        """Bytes so far."""
        sent, received = self._bytes_before
        return PeerTraffic(
            bytes_sent=sent + sum(connection.bytes_sent for connection in self._connections.values()),
            bytes_received=received + sum(connection.bytes_received for connection in self._connections.values()),
            connections=self.connection_count,
            rtt_seconds=self._observer.rtt_seconds,
            bytes_arrived=int(self._arrived),
            busy_seconds=self._busy_seconds,
        )

    async def request(self, frame: EncodedFrame, limits: FrameLimits) -> Frame:
        """Send a request to the peer and return its answer."""
        self.busy_at = anyio.current_time()
        if not self._connections and not self._dialling:
            self._dial(1)
        return await self._exchange.request(frame, limits)

    async def carry(self, stream: SecureStream, sessions: Sessions, *, is_dialled: bool) -> None:
        """Use a connection until it ends."""
        if sessions.here != self.session:  # this side has forgotten the peer since it sent that number
            stream.close()
            return
        if sessions.there != self._session_of_peer:
            self._session_of_peer = sessions.there
            self._close_all("the peer has restarted")
            self._exchange.begin_anew()
        shared = self._shared
        connection = PoolConnection(next(self._numbers), stream, self._exchange, shared.pacer, shared.options)
        self._connections[connection.number] = connection
        if is_dialled:
            self._dialled.add(connection.number)
        self._let_rest()
        try:
            await connection.run()
        except MisconductError as error:
            _LOG.debug("A connection to %s was cut: %s", self.peer, error)
            self._report(error.reason)
        except ConnectionLostError as error:
            _LOG.debug("A connection to %s ended: %s", self.peer, error)
        finally:
            del self._connections[connection.number]
            self._dialled.discard(connection.number)
            sent, received = self._bytes_before
            self._bytes_before = (sent + connection.bytes_sent, received + connection.bytes_received)
            self._redialling.left(anyio.current_time())
            self._exchange.lose(connection)

    def close_accepted(self) -> None:
        """Close the connections that the peer opened."""
        for connection in [c for c in self._connections.values() if c.number not in self._dialled]:
            connection.close(ConnectionLostError("the peer has no connection for streams"))

    def close(self, error: Exception) -> None:
        """End everything; requests raise `error`."""
        self._exchange.fail(error)
        for connection in tuple(self._connections.values()):
            connection.close()

    def tend(self, now: float) -> None:
        """Look after the link; to be called every fraction of a second."""
        if self._shared.reputation.is_banned(self.peer):  # perhaps for what it did elsewhere
            self._close_all("the peer is banned")
        if self.is_busy:
            self.busy_at = now
        wanted = self._wanted(now)
        self._let_rest()
        # a peer that left is not dialled again for nothing
        if (self.is_busy or self._connections) and now >= self._redialling.dial_after:
            self._dial(wanted - self.connection_count - self._dialling)
        self._close_superfluous(wanted, now)
        self._close_silent(now)
        if self.connection_count > 1:
            self._exchange.doubt_stalled(now)
        self._exchange.drop_stalled(now)
        if self._exchange.receiver.is_overdue(now) and self._connections:
            self._report(ScoreReason.TOO_SLOW)
            self._exchange.receiver.drop_all()
            self._close_all("the peer sends too slowly")
        if self.is_busy and self._is_gone_for_good(now):
            self._give_up(f"The connections to peer {self.peer} broke.")

    def _wanted(self, now: float) -> int:
        options = self._shared.options
        seen = self._observer.look(tuple(self._connections.values()), now)
        self._arrived += max(0.0, seen.bytes_arrived)
        self._busy_seconds += 0.0 if seen.segments is None else max(0.0, seen.busy_seconds)
        idle_seconds = now - self.busy_at
        if options.fixed_connections is not None:
            return options.fixed_connections if idle_seconds < options.idle_seconds else 0
        waiting = self._exchange.bytes_waiting
        wanted = wanted_connections(self._size, idle_seconds, waiting, options.idle_seconds)
        if self.is_busy and wanted == self._size.connections:
            self._size = next_size(self._size, seen, options.max_connections_per_peer)
            wanted = wanted_connections(self._size, idle_seconds, waiting, options.idle_seconds)
        return wanted

    def _let_rest(self) -> None:
        """Let only the chosen number of connections send: their measured rate decides on the next number."""
        most = self._shared.options.fixed_connections or self._size.connections
        for rank, connection in enumerate(self._connections.values()):
            connection.take_part(is_resting=rank >= most)

    def _dial(self, missing: int) -> None:
        for _ in range(missing):
            self._dialling += 1
            self._shared.tasks.start_soon(self._dial_once)

    async def _dial_once(self) -> None:
        try:
            opened = await self._connect(self.peer, self.session)
        except ConnectionLostError as error:
            self._dialling -= 1
            self._dialling_failed(error)
            return
        self._dialling -= 1
        if opened is not None:
            self._redialling.reached()
            await self.carry(*opened, is_dialled=True)
        elif not self._connections:
            self._dialling_failed(ConnectionLostError("its connection did not arrive"))

    def _dialling_failed(self, error: ConnectionLostError) -> None:
        _LOG.debug("Peer %s cannot be dialled for tensors: %s", self.peer, error)
        now = anyio.current_time()
        self._redialling.failed(error, now)
        if self._is_gone_for_good(now):
            self._give_up(f"Peer {self.peer} cannot be reached for tensors: {error}.")

    def _is_gone_for_good(self, now: float) -> bool:
        return not self._connections and not self._dialling and not self._redialling.is_hopeful(now)

    def _give_up(self, reason: str) -> None:
        self.session = randbits(_SESSION_BITS)  # so the peer, if it comes back, does not wait for what is forgotten
        self._exchange.give_up(reason)

    def _close_superfluous(self, wanted: int, now: float) -> None:
        surplus = self.connection_count - wanted
        idle_seconds = min(IDLE_SECONDS, self._shared.options.idle_seconds)
        idle = [c for c in self._connections.values() if now - c.idle_since >= idle_seconds]
        for connection in [c for c in idle if c.number in self._dialled][: max(0, surplus)]:
            connection.close(ConnectionLostError("it is not needed"))
        for connection in idle:  # the side that dialled should have closed it long ago
            if now - connection.idle_since >= 2 * self._shared.options.idle_seconds:
                connection.close(ConnectionLostError("it is idle"))

    def _close_silent(self, now: float) -> None:
        for connection in self._connections.values():
            connection.close_if_slow(now)
        for number in self._exchange.unanswered_over():
            connection = self._connections.get(number)
            if connection and connection.has_nothing_to_write and now - connection.idle_since >= SILENCE_SECONDS:
                connection.close(ConnectionLostError("the peer does not answer"))

    def _close_all(self, reason: str) -> None:
        for connection in tuple(self._connections.values()):
            connection.close(ConnectionLostError(reason))

    def _report(self, reason: ScoreReason) -> None:
        self._shared.reputation.report(self.peer, reason)
        if self._shared.reputation.is_banned(self.peer):
            self._close_all("the peer is banned")

    def _wake(self) -> None:
        for connection in self._connections.values():
            connection.wake()

    def _send(self, data: bytes) -> None:
        for connection in self._connections.values():
            connection.answer(data)
            return

    def _cut(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            connection.close(ConnectionLostError("its bytes arrived over another connection"))

    def _cut_stalled(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is not None and connection.has_nothing_to_write:  # otherwise it waits for the upload limit
            connection.close(ConnectionLostError("it carries nothing, and others do"))

    def _blocks_at_a_time(self) -> int:
        """Whole chunks over one connection; small portions over many, so that no slow one is waited for at the end."""
        portion = self._shared.pacer.portion(CHUNK_BYTES) // BLOCK_BYTES
        sending = sum(not connection.is_resting for connection in self._connections.values())
        return max(1, min(portion, CHUNK_BLOCKS // max(1, sending)))
