"""Run the application in its own thread on a bound socket, with limits on connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Final, cast

import h11
from fastapi import FastAPI
from uvicorn import Config, Server

from neuroshard.api.address import BACKLOG, bind
from neuroshard.api.events import Broadcaster
from neuroshard.api.problems import Problem, render
from neuroshard.errors import NotReadyError
from neuroshard.network.guarded_http import MOST_HEADER_BYTES, GuardedConnection


class ApiConnection(GuardedConnection):
    """A connection whose errors are problem documents."""

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
            http=ApiConnection,
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
