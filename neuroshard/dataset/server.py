"""An HTTP server for one Genesis folder, on the loopback address by default, for demos and home networks."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import stat
import threading
import time
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

from neuroshard.dataset.served_files import (
    STATUS_NAME,
    RangeResponse,
    cache_control,
    content_type,
    is_served,
    range_response,
)
from neuroshard.dataset.status import FolderStatus, ServerTrafficCount
from neuroshard.errors import DataError, NetworkRefusedError
from neuroshard.types import LOOPBACK

_CHUNK_BYTES = 1 << 18
_IDLE_SECONDS = 30.0
_MAX_CONNECTIONS = 128
_LOOPBACK_NAMES = (LOOPBACK, "::1", "localhost")

_LOG = logging.getLogger(__name__)


class GenesisServer:
    """Serves a folder from `start()` to `stop()`, in threads of its own; also a context manager."""

    def __init__(self, folder: Path, *, host: str = LOOPBACK, port: int = 0) -> None:
        """Port 0 takes any free one. Raises DataError when the folder has no manifest."""
        if not (folder / "manifest.json").is_file():
            raise DataError(
                f"{folder} is not a Genesis folder: it has no manifest.json.",
                "Check the path; `neuroshard genesis build` makes one.",
            )
        self._folder = folder.resolve()
        self._address = (host, port)
        self._server: _FolderServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Begin to serve; returns the base URL. Raises NetworkRefusedError when the port cannot be bound."""
        if self._server is None:
            host, port = self._address
            try:
                self._server = _FolderServer(self._address, self._folder)
            except (OSError, OverflowError) as error:
                raise NetworkRefusedError(f"Cannot serve on {host}:{port}: {error}.", "Choose another port.") from error
            self._thread = threading.Thread(target=self._server.serve, name="genesis-server", daemon=True)
            self._thread.start()
        return self.url

    @property
    def url(self) -> str:
        """Base URL of the running server."""
        if self._server is None:
            raise RuntimeError("the server is not running")
        host = self._address[0]
        return f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}"

    def stop(self) -> None:
        """Close the port and every connection, and wait for the threads. A second call does nothing."""
        server, self._server = self._server, None
        thread, self._thread = self._thread, None
        if server is None or thread is None:
            return
        server.stop_serving()
        thread.join()
        server.close_connections()
        server.server_close()

    def __enter__(self) -> GenesisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _FolderServer(ThreadingHTTPServer):
    daemon_threads = False  # server_close() then waits for the handlers, which close_connections() has ended
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], folder: Path) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.folder = folder
        self.is_private = address[0] in _LOOPBACK_NAMES
        self.status = FolderStatus(folder)
        self.traffic = ServerTrafficCount()
        self.started_at = time.monotonic()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._stopper, self._stopped = socket.socketpair()
        super().__init__(address, _FolderHandler)

    def serve(self) -> None:
        """Serve until `stop_serving`. Unlike `serve_forever`, it sleeps while no client connects."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(self._stopped, selectors.EVENT_READ)
            while all(key.fileobj is self for key, _ in selector.select()):
                self.handle_request()

    def stop_serving(self) -> None:
        """Let `serve` return. Any thread may call this, also before `serve` begins."""
        self._stopper.close()

    def server_close(self) -> None:
        super().server_close()
        self._stopper.close()
        self._stopped.close()

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        with self._lock:
            is_full = len(self._connections) >= _MAX_CONNECTIONS
            if isinstance(request, socket.socket) and not is_full:
                self._connections.add(request)
        if is_full:
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """End every open connection, so that its handler returns."""
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):  # it may have been closed from the other side
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: a client that disconnects in the middle of a file is normal."""
        _LOG.debug("The connection of %s ended early.", client_address, exc_info=True)


class _FolderHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "neuroshard"
    sys_version = ""
    timeout = _IDLE_SECONDS
    server: _FolderServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Send a file of the folder, whole or in part."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Send the headers only."""
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class names it so)
        """Log requests for debugging only."""
        _LOG.debug(format, *args)

    def _answer(self, *, with_body: bool) -> None:
        if self.server.is_private and not self._is_local_host_name():
            self._refuse(HTTPStatus.FORBIDDEN)  # a web page may have pointed its own name at this computer
            return
        name = self.path.split("?", 1)[0].removeprefix("/")
        if name == STATUS_NAME:
            self._send_status(with_body=with_body)
            return
        file = _open_regular(self.server.folder / name) if is_served(name) else None
        if file is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        with file:
            status = os.fstat(file.fileno())
            etag = f'"{status.st_size:x}-{status.st_mtime_ns:x}"'
            answer = range_response(
                status.st_size,
                etag,
                range_header=self.headers.get("Range") if with_body else None,  # RFC 9110, 14.2: of GET only
                if_range=self.headers.get("If-Range"),
                if_none_match=self.headers.get("If-None-Match"),
            )
            self.server.traffic.answered(answer.status)
            self._send_head(answer, status, etag, name)
            if with_body:
                self._send_body(file, answer)

    def _send_status(self, *, with_body: bool) -> None:
        body = self.server.status.answer(self.server.traffic.now(), time.monotonic() - self.server.started_at)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _is_local_host_name(self) -> bool:
        host = self.headers.get("Host", "")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return name.strip("[]").lower() in _LOOPBACK_NAMES

    def _send_head(self, answer: RangeResponse, file: os.stat_result, etag: str, name: str) -> None:
        size = file.st_size
        self.send_response(answer.status)
        self.send_header("ETag", etag)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Last-Modified", formatdate(file.st_mtime, usegmt=True))
        self.send_header("Cache-Control", cache_control(name, size))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Type", content_type(name))
        if answer.status == HTTPStatus.PARTIAL_CONTENT:
            self.send_header("Content-Range", f"bytes {answer.start}-{answer.stop - 1}/{size}")
        if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            self.send_header("Content-Range", f"bytes */{size}")
        if answer.status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(answer.stop - answer.start))
        self.end_headers()

    def _send_body(self, file: BinaryIO, answer: RangeResponse) -> None:
        file.seek(answer.start)
        left = answer.stop - answer.start
        while left > 0:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:  # the file became shorter: the client sees a broken length, not wrong bytes
                self.close_connection = True
                return
            self.wfile.write(chunk)
            self.server.traffic.sent(len(chunk))
            left -= len(chunk)

    def _refuse(self, status: HTTPStatus) -> None:
        self.server.traffic.answered(status)
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _open_regular(path: Path) -> BinaryIO | None:
    """A regular file opened for reading, never through a symbolic link; None when there is none."""
    try:
        if path.is_symlink() or not stat.S_ISREG(path.stat().st_mode):
            return None
        return path.open("rb")
    except OSError:
        return None
