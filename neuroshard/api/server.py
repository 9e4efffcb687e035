"""Run the application in its own thread on a bound socket, with limits on connections.

A client that sends nothing cannot keep a connection open, and the number of connections is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any, Final, cast

import h11
from fastapi import FastAPI
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from neuroshard.api.address import BACKLOG, bind
from neuroshard.api.events import Broadcaster
from neuroshard.api.problems import Problem, render
from neuroshard.errors import NotReadyError

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

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with a problem document, and close the connection."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.close()
            return
        response = render(Problem(400, msg), "")
        headers = [*response.raw_headers, (b"connection", b"close")]
        events = (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event))
        self.transport.close()

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


__all__ = ["ApiServer", "bind"]

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 5.0
GRACE_SECONDS: Final = 1  # time for responses in progress when the server stops
THREAD_NAME: Final = "neuroshard-api"


class _Server(Server):
    """Uvicorn's server without its ten wake-ups per second. It ends event streams before it waits for open requests."""

    def __init__(self, config: Config, broadcaster: Broadcaster | None) -> None:
        super().__init__(config)
        self._broadcaster = broadcaster
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exit = asyncio.Event()
        self.serving = threading.Event()

    def request_exit(self) -> None:
        """Let the server end. Any thread may call this, also before the server runs."""
        # The order matters: `main_loop` stores `_loop` before it reads `should_exit`, and here it is the reverse. So
        # either this thread sees the loop, or `main_loop` sees the flag; the request cannot be lost.
        self.should_exit = True
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(self._exit.set)

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        if not self.should_exit:
            await self._exit.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.serving.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._broadcaster is not None:
            self._broadcaster.close()
        await self._stop_accepting(sockets or [])
        await super().shutdown(sockets)
        # Left are clients that do not read, and those accepted too late to be asked to close. The loop ends after this.
        for connection in cast("set[object]", set(self.server_state.connections)):
            if isinstance(connection, GuardedConnection):
                connection.abort()
        await asyncio.sleep(0)  # the loop closes aborted sockets in its next turn

    async def _stop_accepting(self, sockets: list[socket.socket]) -> None:
        """Accept nobody else, and wait for those accepted in this turn of the loop.

        asyncio loses a connection that it accepted in the turn in which its server closes. The client waits for ever.
        """
        for listener in sockets:
            with contextlib.suppress(NotImplementedError):  # the loop of Windows has no readers
                asyncio.get_running_loop().remove_reader(listener)
        await asyncio.sleep(0)


class ApiServer:
    """Runs the API in a thread. It neither handles signals nor configures logging."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        config = Config(
            app,
            http=GuardedConnection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            date_header=False,  # uvicorn's own loop would have to wake up each second to keep it right
            server_header=False,
            backlog=BACKLOG,
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        self._server = _Server(config, getattr(app.state, "broadcaster", None))
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)  # `stop` waits at most 5 s
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the thread and return when it answers requests. Raises NotReadyError if the server did not start."""
        self._thread.start()
        if not self._server.serving.wait(START_SECONDS):
            self.stop()
            raise NotReadyError("The API did not start.", "Look at the log.")
        if self._ended.is_set():
            raise NotReadyError("The API ended while it started.", "Look at the log.")

    def stop(self) -> None:
        """End open streams, give responses in progress a second to finish, and join the thread for at most 5 s."""
        self._server.request_exit()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    def is_alive(self) -> bool:
        """Whether the server's thread is running."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._ended.set()
            self._server.serving.set()  # wakes start() if the server failed before it served
