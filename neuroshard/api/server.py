"""Runs the application in a thread of its own, on a socket that is bound already."""

from __future__ import annotations

import socket
import threading
from typing import Final

from fastapi import FastAPI
from uvicorn import Config, Server

from neuroshard.api.broadcast import Broadcaster
from neuroshard.api.connection import MOST_HEADER_BYTES, GuardedConnection
from neuroshard.api.listening import BACKLOG, bind
from neuroshard.errors import NotReadyError

__all__ = ["ApiServer", "bind"]

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 5.0
GRACE_SECONDS: Final = 1  # for answers in progress at the stop
THREAD_NAME: Final = "neuroshard-api"


class _Server(Server):
    """Uvicorn's server, which says when it serves and ends event streams before it waits for them."""

    def __init__(self, config: Config, broadcaster: Broadcaster | None) -> None:
        super().__init__(config)
        self._broadcaster = broadcaster
        self.serving = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        self.serving.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop serving."""
        if self._broadcaster is not None:
            self._broadcaster.close()
        await super().shutdown(sockets)


class ApiServer:
    """The API's thread. Signals stay with the main thread, logging with whoever configured it."""

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
            server_header=False,
            backlog=BACKLOG,
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        self._server = _Server(config, getattr(app.state, "broadcaster", None))
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)  # a stop waits 5 s at most
        self._ended = threading.Event()

    def start(self) -> None:
        """Return when requests are answered. Raises NotReadyError when the server could not start."""
        self._thread.start()
        if not self._server.serving.wait(START_SECONDS):
            self.stop()
            raise NotReadyError("The API did not start.", "Look at the log.")
        if self._ended.is_set():
            raise NotReadyError("The API ended while it started.", "Look at the log.")

    def stop(self) -> None:
        """End open streams, let answers in progress finish for a second, and join the thread."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._ended.set()
            self._server.serving.set()  # wakes start() when the server died before it served
