"""An application around a fake node, called directly or over a real socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from neuroshard.api.context import ApiLimits
from neuroshard.api.server import ApiServer, bind
from tests.worlds.api import Api, FakeNode, make_api


@pytest.fixture
def node() -> Iterator[FakeNode]:
    """A node that takes commands."""
    with FakeNode() as fake:
        yield fake


@pytest.fixture
def api(node: FakeNode) -> Api:
    """An application bound to this computer only."""
    return make_api(node)


@pytest.fixture
def open_api(node: FakeNode) -> Api:
    """An application that other computers can reach."""
    return make_api(node, host="0.0.0.0")


Serve = Callable[..., Api]


@pytest.fixture
def serve(node: FakeNode) -> Iterator[Serve]:
    """Starts real servers on loopback and stops them."""
    servers: list[ApiServer] = []

    def start(limits: ApiLimits | None = None) -> Api:
        listener = bind("127.0.0.1", 0)
        api = make_api(node, port=listener.getsockname()[1], limits=limits)
        server = ApiServer(api.app, listener)
        servers.append(server)
        server.start()
        return api

    yield start
    for server in servers:
        server.stop()
        assert not server.is_alive()
