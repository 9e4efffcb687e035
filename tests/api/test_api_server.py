"""The server on a real socket: binding, starting, stopping, and clients that mean it badly."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from neuroshard.api.access import load_or_create_secret
from neuroshard.api.context import ApiLimits
from neuroshard.api.server import ApiServer, bind
from neuroshard.errors import NetworkRefusedError, StorageError
from neuroshard.network import guarded_http as connection
from tests.worlds.api import SECRET, Api, FakeNode, make_api

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
HISTORY = f"GET /api/training/history HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {SECRET}\r\n\r\n".encode()


def connect(api: Api) -> socket.socket:
    """A raw connection."""
    return socket.create_connection(("127.0.0.1", api.context.port), timeout=5)


def answer(link: socket.socket) -> bytes:
    """Everything until the server closes."""
    chunks: list[bytes] = []
    try:
        while chunk := link.recv(65_536):
            chunks.append(chunk)
    except ConnectionResetError:
        pass  # closed with our bytes unread; what came before counts
    return b"".join(chunks)


def test_a_busy_port_is_named() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(NetworkRefusedError, match=f"Port {port} on 127.0.0.1 is busy.*--port"):
            bind("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(NetworkRefusedError, match="cannot be used"):
        bind("192.0.2.1", 0)


def test_requests_before_the_start_wait(node: FakeNode) -> None:
    listener = bind("127.0.0.1", 0)
    api = make_api(node, port=listener.getsockname()[1])
    with connect(api) as early:
        early.sendall(HEAD + b"Connection: close\r\n\r\n")
        server = ApiServer(api.app, listener)
        server.start()
        assert answer(early).startswith(b"HTTP/1.1 200")
    assert "neuroshard-api" in [thread.name for thread in threading.enumerate()]
    began = time.monotonic()
    server.stop()
    server.stop()
    assert time.monotonic() - began < 20
    assert not server.is_alive()
    with pytest.raises(OSError, match="refused"):
        connect(api).close()


def test_no_server_name_is_told(serve: Callable[..., Api]) -> None:
    assert "server" not in httpx.get(f"{serve().base_url}/health").headers


def test_a_hundred_megabytes_are_refused_unread(serve: Callable[..., Api], node: FakeNode) -> None:
    api = serve()
    sent = 0

    def body() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1_600):
            sent += 65_536
            yield bytes(65_536)

    with connect(api) as link:
        request = f"POST /api/shutdown HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {SECRET}\r\n"
        link.sendall(request.encode() + b"Content-Type: application/json\r\nContent-Length: 104857600\r\n\r\n{")
        reply = answer(link)
        assert reply.startswith(b"HTTP/1.1 413")
        assert b"application/problem+json" in reply
    headers = {**api.secret, "Content-Type": "application/json"}
    with httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60) as client:
        with suppress(httpx.WriteError, httpx.ReadError):  # closed while we were still sending: refused as well
            assert client.post("/api/shutdown", headers=headers, content=body()).status_code == 413
        assert client.get("/health").status_code == 200
    assert sent < 20_000_000
    assert node.taken == []


def test_chunks_above_the_limit_are_refused(serve: Callable[..., Api], node: FakeNode) -> None:
    api = serve(ApiLimits(body_bytes=1_000))
    with httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60) as client:
        headers = {**api.secret, "Content-Type": "application/json"}
        response = client.post("/api/shutdown", headers=headers, content=iter([b" " * 600, b" " * 600]))
        assert response.status_code == 413
        assert client.post("/api/training/pause", headers=headers, content=iter([b" " * 600, b"{}"])).status_code == 202
    assert len(node.taken) == 1


def test_a_body_that_does_not_come_is_not_waited_for(serve: Callable[..., Api], node: FakeNode) -> None:
    api = serve(ApiLimits(body_seconds=0.05))
    with connect(api) as link:
        request = f"POST /api/shutdown HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {SECRET}\r\n"
        link.sendall(request.encode() + b"Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{")
        assert answer(link).startswith(b"HTTP/1.1 408")
    assert node.taken == []


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        HEAD + b"X: " + b"x" * 70_000,
        HEAD + b"X: " + b"x" * 700_000,
    ],
)
def test_what_is_not_http_gets_a_problem(serve: Callable[..., Api], request_bytes: bytes) -> None:
    with connect(serve()) as link:
        link.sendall(request_bytes + b"\r\n\r\n")
        reply = answer(link)
    assert reply.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    assert b"application/problem+json" in reply


def test_five_hundred_silent_connections_do_not_stop_the_api(
    serve: Callable[..., Api], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 0.6)
    api = serve()
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    with ExitStack() as stack:
        links = [stack.enter_context(closing(connect(api))) for _ in range(500)]
        for link in links[::3]:
            link.sendall(b"GET /health HT")  # and never the rest
        with httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60) as client:
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            assert time.monotonic() - began < 10
        assert process.memory_info().rss - before < 30_000_000
        for link in links:
            assert answer(link) == b""  # every one is closed by the server in the end


def test_the_longest_idle_connection_gives_way(serve: Callable[..., Api], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_CONNECTIONS", 3)
    api = serve()
    with ExitStack() as stack:
        busy = stack.enter_context(httpx.Client(base_url=api.base_url, headers=api.secret, timeout=60))
        stream = stack.enter_context(busy.stream("GET", "/api/events"))
        links = [stack.enter_context(closing(connect(api))) for _ in range(4)]
        assert answer(links[0]) == b""
        assert answer(links[1]) == b""
        links[3].sendall(HEAD + b"Connection: close\r\n\r\n")
        assert answer(links[3]).startswith(b"HTTP/1.1 200")
        assert next(stream.iter_raw())  # the one at work was spared


def test_a_second_half_request_is_not_waited_for(serve: Callable[..., Api], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 0.2)
    with connect(serve()) as link:
        link.sendall(HEAD + b"\r\n")
        assert link.recv(65_536).startswith(b"HTTP/1.1 200")
        link.sendall(HEAD)
        assert b"HTTP/1.1" not in answer(link)  # at most the end of the first answer


def test_pipelined_requests_are_answered(serve: Callable[..., Api]) -> None:
    with connect(serve()) as link:
        link.sendall((HEAD + b"\r\n") * 5 + HEAD + b"Connection: close\r\n\r\n")
        assert answer(link).count(b"HTTP/1.1 200") == 6


def test_a_client_that_does_not_read_is_cut_off(
    serve: Callable[..., Api], node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.2)
    api = serve()
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        link.settimeout(5)
        link.connect(("127.0.0.1", api.context.port))
        node.train(900)
        link.sendall(HISTORY * 500)
        assert was_reset(link)


def test_a_client_that_does_not_read_outlives_no_stop(node: FakeNode) -> None:
    listener = bind("127.0.0.1", 0)
    api = make_api(node, port=listener.getsockname()[1])
    server = ApiServer(api.app, listener)
    server.start()
    node.train(900)
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        link.settimeout(5)
        link.connect(("127.0.0.1", api.context.port))
        link.sendall(HISTORY * 500)
        pause = threading.Event()
        while not any(is_stalled(each) for each in list(server._server.server_state.connections)):
            pause.wait(0.02)
        server.stop()
        assert not server.is_alive()
        assert was_reset(link)


def test_a_client_that_is_accepted_while_the_server_stops_is_disconnected(node: FakeNode) -> None:
    listener = bind("127.0.0.1", 0)
    api = make_api(node, port=listener.getsockname()[1])
    server = ApiServer(api.app, listener)
    server.start()
    with connect(api) as link:
        link.sendall(HEAD + b"Connection: close\r\n\r\n")
        assert answer(link).startswith(b"HTTP/1.1 200")
    links: list[socket.socket] = []

    def connect_and_stop() -> None:
        links.append(connect(api))  # the loop accepts it in its next turn, and asks the server to end before that
        server._server.request_exit()

    loop = server._server._loop
    assert loop is not None
    loop.call_soon_threadsafe(connect_and_stop)
    server._thread.join(5)
    assert not server.is_alive()
    with links[0] as link:
        assert was_reset(link)


def is_stalled(each: object) -> bool:
    """Whether a connection has more to send than its client reads."""
    return isinstance(each, connection.GuardedConnection) and each.flow.write_paused


def was_reset(link: socket.socket) -> bool:
    """Whether the server cuts the connection off within 5 s, tried by sending."""
    pause = threading.Event()
    for _ in range(250):
        try:
            link.sendall(b"\r\n")
        except (ConnectionResetError, BrokenPipeError):
            return True
        pause.wait(0.02)
    return False


def test_the_secret_is_made_once_and_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    secret = load_or_create_secret(folder)
    assert len(secret) >= 40
    assert load_or_create_secret(folder) == secret
    assert (folder / "api-secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == ["api-secret"]
    (folder / "api-secret").chmod(0o644)
    load_or_create_secret(folder)
    assert (folder / "api-secret").stat().st_mode & 0o777 == 0o600


def test_an_unusable_secret_is_an_error(tmp_path: Path) -> None:
    for content in (b"", b"short", b"\xff" * 50, b"x" * 10_000):
        (tmp_path / "api-secret").write_bytes(content)
        with pytest.raises(StorageError, match="api-secret"):
            load_or_create_secret(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        load_or_create_secret(tmp_path / "file")


def test_two_starts_at_once_agree_on_one_secret(tmp_path: Path) -> None:
    seen: list[str] = []
    threads = [threading.Thread(target=lambda: seen.append(load_or_create_secret(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1
