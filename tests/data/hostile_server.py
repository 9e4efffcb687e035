"""A loopback HTTP server that misbehaves on request, one behaviour a request and file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from types import TracebackType
from typing import TypeAlias


class Request(BaseHTTPRequestHandler):
    """One request; behaviours write the answer through it."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        owner = self.server.owner
        owner.requests.append((name, self.headers.get("Range")))
        planned = owner.behaviours[name]
        behaviour = planned.pop(0) if planned else owner.default
        self.close_connection = True
        try:
            behaviour(self, owner.files.get(name))
        except (BrokenPipeError, ConnectionResetError):
            return  # the client went away, as hostile tests expect

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Silence."""

    def head(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Connection", "close")
        self.end_headers()

    def part_asked_for(self, body: bytes, etag: str) -> int:
        """Start of the range, 0 when the whole file is due."""
        asked = self.headers.get("Range")
        if asked is None or self.headers.get("If-Range") != etag:
            return 0
        return int(asked.removeprefix("bytes=").rstrip("-"))


Behaviour: TypeAlias = Callable[[Request, "bytes | None"], None]


def etag_of(body: bytes) -> str:
    return f'"{sha256(body).hexdigest()[:16]}"'


def _announce(request: Request, body: bytes) -> bytes:
    etag = etag_of(body)
    start = request.part_asked_for(body, etag)
    if start:
        content_range = f"bytes {start}-{len(body) - 1}/{len(body)}"
        request.head(206, Content_Length=len(body) - start, ETag=etag, Content_Range=content_range)
    else:
        request.head(200, Content_Length=len(body), ETag=etag)
    return body[start:]


def honest(request: Request, body: bytes | None) -> None:
    if body is None:
        request.head(404, Content_Length=0)
        return
    request.wfile.write(_announce(request, body))


def drops_after(count: int) -> Behaviour:
    def behave(request: Request, body: bytes | None) -> None:
        assert body is not None
        request.wfile.write(_announce(request, body)[:count])

    return behave


def drops_with_validator(name: str, validator: str) -> Behaviour:
    def behave(request: Request, body: bytes | None) -> None:
        assert body is not None
        request.head(200, Content_Length=len(body), **{name: validator})
        request.wfile.write(body[:100_000])

    return behave


def answers(status: int, **headers: object) -> Behaviour:
    def behave(request: Request, body: bytes | None) -> None:
        request.head(status, Content_Length=0, **headers)

    return behave


def serves(body: bytes) -> Behaviour:
    """Another file than the right one, well served."""

    def behave(request: Request, _: bytes | None) -> None:
        honest(request, body)

    return behave


def claims_length(length: int) -> Behaviour:
    def behave(request: Request, body: bytes | None) -> None:
        assert body is not None
        request.head(200, Content_Length=length)
        request.wfile.write(body[:length])

    return behave


def chunks_and_drops(request: Request, body: bytes | None) -> None:
    """Names no length at first, and breaks off."""
    assert body is not None
    request.head(200, Transfer_Encoding="chunked", ETag=etag_of(body))
    request.wfile.write(b"%x\r\n" % 50_000 + body[:50_000] + b"\r\n")


def never_ends(request: Request, body: bytes | None) -> None:
    request.head(200)
    while True:
        request.wfile.write(bytes(65536))


def ignores_range(request: Request, body: bytes | None) -> None:
    assert body is not None
    request.head(200, Content_Length=len(body), ETag=etag_of(body))
    request.wfile.write(body)


def sends_wrong_part(request: Request, body: bytes | None) -> None:
    assert body is not None
    request.head(206, Content_Length=10, ETag=etag_of(body), Content_Range=f"bytes 5-14/{len(body)}")
    request.wfile.write(body[5:15])


def compresses(request: Request, body: bytes | None) -> None:
    request.head(200, Content_Length=3, Content_Encoding="gzip")
    request.wfile.write(b"abc")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, owner: HostileServer) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", 0), Request)


class HostileServer:
    """Serves `files`; `behaviours[name]` are used up one a request, then `default` answers."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = files if files is not None else {}
        self.behaviours: defaultdict[str, list[Behaviour]] = defaultdict(list)
        self.default: Behaviour = honest
        self.requests: list[tuple[str, str | None]] = []
        self.released = Event()
        self._server = _Server(self)
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def stalls_after(self, count: int) -> Behaviour:
        def behave(request: Request, body: bytes | None) -> None:
            assert body is not None
            request.wfile.write(_announce(request, body)[:count])
            request.wfile.flush()
            self.released.wait(30)

        return behave

    def asked_for(self, name: str) -> list[str | None]:
        """Range headers of the requests for a file."""
        return [asked for requested, asked in self.requests if requested == name]

    def __enter__(self) -> HostileServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
