"""The organiser's server: slow clients are closed, and only a proxy on this computer names the address of a client."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from uvicorn import Server

import neuroshard.network.guarded_http as connection
from neuroshard.errors import NetworkRefusedError
from neuroshard.organiser.application import OrganiserContext, create_organiser_app
from neuroshard.organiser.desk import RunPlan
from neuroshard.organiser.service import listener_at, server_of
from tests.organiser.desks import OFFER, Desk


class Site:
    """The server of a desk on a free port of loopback."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.desk = Desk()
        context = OrganiserContext(RunPlan(OFFER, self.desk.places), self.desk.desk, time.time, time.monotonic)
        self.server: Server = server_of(create_organiser_app(context))
        self.listener = listener_at(host, 0)
        self.address = self.listener.getsockname()[:2]
        self.desk.now = time.time()
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})

    def __enter__(self) -> Site:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.listener.close()
        assert not self.thread.is_alive()

    def join(self, number: int, **headers: str) -> int:
        host, port = self.address
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/api/join"
        with httpx.Client(trust_env=False) as client:
            return client.put(url, content=self.desk.claim(number), headers=headers, timeout=30).status_code


@pytest.fixture(params=["127.0.0.1", "::1"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    try:
        made = Site(request.param)
    except NetworkRefusedError:
        pytest.skip("no IPv6 on this computer")
    with made:
        yield made


def test_slow_headers_do_not_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 0.3)
    with Site() as site, socket.create_connection(site.address, timeout=20) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: ")  # and never the rest
        with suppress(ConnectionResetError):
            assert link.recv(100) == b""


def test_a_proxy_on_this_computer_names_the_address_of_its_client(site: Site) -> None:
    lines = {f"203.0.113.{number}": number for number in range(10)}
    assert 429 not in [site.join(number, **{"X-Forwarded-For": line}) for line, number in lines.items()]
    # what a client writes there itself is before the address that the proxy adds
    assert site.join(11, **{"X-Forwarded-For": "127.0.0.1, 203.0.113.77"}) == 429
    assert site.join(11, **{"X-Forwarded-For": "203.0.113.77, 198.51.100.1"}) != 429
    assert 429 not in [site.join(number) for number in range(12, 24)]


def test_the_server_is_announced_when_it_answers_and_has_counted_no_request() -> None:
    announced = list[int]()
    desk = Desk()
    context = OrganiserContext(RunPlan(OFFER, desk.places), desk.desk, time.time, time.monotonic)
    with listener_at("127.0.0.1", 0) as listener:

        def started() -> None:
            announced.append(len(server.servers))
            server.should_exit = True

        server = server_of(create_organiser_app(context), started)
        server.run(sockets=[listener])
    assert announced == [1]
    assert not desk.desk.refused
    assert context.joins.wait("127.0.0.1", time.monotonic(), is_forwarded=True) == 0
    desk.database.close()


def test_the_listener_names_tcp_so_that_answers_are_sent_without_delay() -> None:
    """Otherwise asyncio leaves Nagle's algorithm on, and the second packet of an answer waits 40 ms for the client."""
    with listener_at("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert (listener.proto, accepted.proto) == (socket.IPPROTO_TCP, socket.IPPROTO_TCP)
