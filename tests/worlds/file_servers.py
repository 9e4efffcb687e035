"""Servers of files on loopback: an HTTP server and a real S3 server, with a front that misbehaves as asked."""

from __future__ import annotations

import http.client
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from types import TracebackType
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import pytest


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


BUCKET = "genesis"
PART = 5 * 1024 * 1024  # the smallest that stores accept
LOCATION = f"s3://{BUCKET}/data"
_ACCOUNT = "123456789012"


def set_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nobody; a computer's own are out of sight."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-nobody")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class StoreServer:
    """moto's server with one bucket; `client` looks at it from beside."""

    def __init__(self) -> None:
        # Here, because these imports take seconds and most tests of servers need none of them.
        boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install -e '.[dev]'")
        moto_server = pytest.importorskip("moto.server", reason="moto is not installed: pip install -e '.[dev]'")
        self._server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        self.client: Any = boto3.session.Session().client("s3", endpoint_url=self.url)
        self.client.create_bucket(Bucket=BUCKET)
        self.set_policy("Allow", "s3:GetObject")  # everybody may read: that is what it is for

    def set_policy(self, effect: str, action: str) -> None:
        """What everybody may do, or may not."""
        statement = {"Effect": effect, "Principal": "*", "Action": action, "Resource": f"arn:aws:s3:::{BUCKET}/*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        self.client.put_bucket_policy(Bucket=BUCKET, Policy=policy)

    def close(self) -> None:
        self.client.close()
        self._backend().reset()
        self._server.stop()

    def names(self) -> list[str]:
        """Of all objects, the claim included."""
        return [item["Key"] for item in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]

    def put_empty(self, count: int) -> None:
        """So many shards without going through HTTP."""
        for number in range(count):
            self._backend().put_object(BUCKET, f"data/shard_{number}.bin", b"")

    def unfinished_uploads(self) -> list[str]:
        return [item["Key"] for item in self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]

    def age(self, key: str, seconds: float) -> None:
        """As if the object had been written so long ago."""
        stored = self._backend().buckets[BUCKET].keys[key]
        stored.last_modified -= timedelta(seconds=seconds)

    def _backend(self) -> Any:
        from moto.backends import get_backend

        return get_backend("s3")[_ACCOUNT]["global"]


class Front:
    """Passes requests on. Each entry of `plan` is for one request that changes something, in order:

    a status refuses it, "lose" passes it on and closes the line instead of answering.
    """

    def __init__(self, target: str) -> None:
        self.plan: list[int | str] = []
        self.answers_to_cut = 0  # so many bodies break off in the middle
        self.answers_to_spoil = 0  # so many bodies have another last byte
        self.hidden_headers: tuple[str, ...] = ()  # of requests, as a store that does not know them
        self.seen: list[str] = []
        self._target = urlsplit(target).netloc
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 10

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                front.seen.append(f"{self.command} {self.path}")
                changes = self.command in {"PUT", "POST", "DELETE"}
                step = front.plan.pop(0) if front.plan and changes else None
                if isinstance(step, int):
                    self._answer(step, [("Content-Type", "application/xml")], _ERROR)
                    return
                line = http.client.HTTPConnection(front._target, timeout=10)
                headers = {
                    name: value for name, value in self.headers.items() if name.lower() not in front.hidden_headers
                }
                line.request(self.command, self.path, body, headers)
                response = line.getresponse()
                content = response.read()
                line.close()
                if step == "lose":
                    self.close_connection = True
                    return
                self._answer(response.status, response.getheaders(), content)

            def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
                self.send_response_only(status)
                dropped = {"content-length", "connection", "transfer-encoding"}
                for name, value in headers:
                    if name.lower() not in dropped:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                is_cut = self.command == "GET" and bool(content) and front.answers_to_cut > 0
                if is_cut:
                    front.answers_to_cut -= 1
                    self.close_connection = True
                if self.command == "GET" and content and front.answers_to_spoil > 0:
                    front.answers_to_spoil -= 1
                    content = content[:-1] + bytes([content[-1] ^ 1])
                if self.command != "HEAD":
                    self.wfile.write(content[: len(content) // 2] if is_cut else content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        return Handler


_ERROR = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"


@contextmanager
def front_of(server: StoreServer) -> Generator[Front]:
    """A front for the time of a test."""
    front = Front(server.url)
    try:
        yield front
    finally:
        front.close()
