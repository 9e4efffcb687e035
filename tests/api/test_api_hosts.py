"""A node is found where it really answers: by the commands, by a second start, and by who opens the address it logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from neuroshard.api.address import HostPolicy, dashboard_url, local_url
from neuroshard.api.server import ApiServer, bind
from neuroshard.cli.client import connect
from neuroshard.config.instance_lock import InstanceLock
from neuroshard.config.loading import load_settings
from neuroshard.errors import NetworkRefusedError
from neuroshard.node.launch import run_node
from tests.worlds.api import SECRET, FakeNode, make_api


@pytest.fixture(params=["127.0.0.1", "127.0.0.2", "::1", "0.0.0.0", "::"])
def folder_of_node(request: pytest.FixtureRequest, node: FakeNode, tmp_path: Path) -> Iterator[Path]:
    """The data folder of something that serves on the host as a node does."""
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(bind(request.param, 0))
        except NetworkRefusedError as error:
            pytest.skip(f"this computer cannot: {error}")
        port = listener.getsockname()[1]
        server = ApiServer(make_api(node, host=request.param, port=port).app, listener)
        server.start()
        stack.callback(server.stop)
        lock = InstanceLock.acquire(tmp_path)
        stack.callback(lock.release)
        lock.announce(request.param, port)
        (tmp_path / "api-secret").write_text(SECRET)
        yield tmp_path


def test_commands_reach_a_node_on_any_host(folder_of_node: Path) -> None:
    client = connect(folder_of_node, None)
    assert any(client.answers() for _ in range(20))  # a busy computer can need more than its 2 s
    assert client.get("/api/status")["state"] == "training"
    assert client.post("/api/training/pause")["state"] == "paused"
    assert connect(folder_of_node, int(client.base_url.rsplit(":", 1)[1])).answers()


def test_a_second_start_names_an_address_that_answers(folder_of_node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"data_dir": folder_of_node, "token": "any text that is long enough", "browser": False}
    assert run_node(load_settings(flags, {})) == 0
    url = capsys.readouterr().out.split()[-1]
    assert httpx.get(url, trust_env=False).status_code == 200


@pytest.mark.parametrize(
    ("host", "people", "programs"),
    [
        ("127.0.0.1", "localhost", "127.0.0.1"),
        ("localhost", "localhost", "127.0.0.1"),
        ("0.0.0.0", "localhost", "127.0.0.1"),
        ("::", "[::1]", "[::1]"),  # answers IPv6 alone
        ("::1", "[::1]", "[::1]"),
        ("192.168.1.5", "192.168.1.5", "192.168.1.5"),
        ("2001:DB8:0:0::7", "[2001:db8::7]", "[2001:db8::7]"),
        ("Attic.lan", "attic.lan", "attic.lan"),
    ],
)
def test_an_address_that_can_be_opened_and_is_let_in(host: str, people: str, programs: str) -> None:
    assert dashboard_url(host, 8000) == f"http://{people}:8000"
    assert local_url(host, 8000) == f"http://{programs}:8000"
    policy = HostPolicy.for_host(host, 8000)
    assert policy.url == f"http://{people}:8000"
    assert policy.allows(f"{people}:8000")
    assert policy.allows(f"{programs}:8000")
