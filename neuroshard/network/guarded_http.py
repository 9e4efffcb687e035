"""Uvicorn's HTTP/1.1 protocol with limits, for the API of a node and for an organiser.

A client that sends nothing cannot keep a connection open, and the number of connections is bounded."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MOST_CONNECTIONS: Final = 256
SILENCE_SECONDS: Final = 10.0  # time for a whole request head to arrive
STALL_SECONDS: Final = 30.0  # time for a client to read the sent data
MOST_HEADER_BYTES: Final = 32_768  # limit of an incomplete request head


class GuardedConnection(H11Protocol):
    """Uvicorn's HTTP/1.1 protocol with three limits.

    A connection without a request in progress is idle. If there are more than MOST_CONNECTIONS, the one that has been
    idle for longest is closed. A connection that has sent no complete request head ends after SILENCE_SECONDS; uvicorn
    itself ends those that wait for a next request. A client that does not read for STALL_SECONDS is disconnected.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._idle_since: float | None = self.loop.time()
        self._silence: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Accept a new connection. If there are too many, close the one that has been idle for longest."""
        super().connection_made(transport)
        self._listen_for_silence()
        if len(self.connections) > MOST_CONNECTIONS:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Process received bytes, and start or stop the timer for the rest of a request's head."""
        super().data_received(data)
        if self._in_progress():
            self._idle_since = None
            self._stop_listening()
        elif not self.transport.is_closing():
            self._listen_for_silence()

    def on_response_complete(self) -> None:
        """Mark the connection as idle, unless a pipelined request is already in progress."""
        self._idle_since = self.loop.time()
        super().on_response_complete()
        if self._in_progress():
            self._idle_since = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop_listening()
        self._stop_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the timer after which a client that does not read is disconnected."""
        super().pause_writing()
        self._stop_stall()
        self._stall = self.loop.call_later(STALL_SECONDS, self.abort)

    def resume_writing(self) -> None:
        """Stop the timer: the client reads again."""
        self._stop_stall()
        super().resume_writing()

    def abort(self) -> None:
        """Close the connection at once; unsent bytes are dropped."""
        self.transport.abort()

    def _make_room(self) -> None:
        """Close the connection that has been idle for longest; it is this new one if all others are busy."""
        connections = cast("set[object]", self.connections)
        open_ones = [
            other for other in connections if isinstance(other, GuardedConnection) and not other.transport.is_closing()
        ]
        if len(open_ones) > MOST_CONNECTIONS:
            idle = [(other._idle_since, id(other), other) for other in open_ones if other._idle_since is not None]
            min(idle)[2].abort()  # never empty: this new connection is idle too

    def _in_progress(self) -> bool:
        """Whether a request was read and its response is not complete."""
        return cast("object", self.cycle) is not None and not self.cycle.response_complete

    def _listen_for_silence(self) -> None:
        if self._silence is None:
            self._silence = self.loop.call_later(SILENCE_SECONDS, self.abort)

    def _stop_listening(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
