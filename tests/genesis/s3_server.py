"""A real S3 server on loopback, and a front before it that misbehaves as asked."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install -e '.[dev]'")
pytest.importorskip("moto.server", reason="moto is not installed: pip install -e '.[dev]'")

from moto.backends import get_backend  # noqa: E402
from moto.server import ThreadedMotoServer  # noqa: E402

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
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
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
