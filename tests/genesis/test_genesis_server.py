from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from neuroshard.dataset import GenesisServer
from neuroshard.dataset.served_files import cache_control
from neuroshard.errors import DataError, NetworkRefusedError
from tests.worlds.data_sets import TestSigner, write_genesis

SHARD = bytes(range(256)) * 4000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "genesis"
    (root / "pages").mkdir(parents=True)
    (root / "manifest.json").write_text("{}")
    (root / "shard_0.bin").write_bytes(SHARD)
    (root / "pages" / "00000.bin").write_bytes(b"p" * 32)
    (root / "build.json").write_text("private")
    (tmp_path / "secret.json").write_text("secret")
    return root


@pytest.fixture
def client(folder: Path) -> Iterator[httpx.Client]:
    with GenesisServer(folder) as server, httpx.Client(base_url=server.url, trust_env=False) as opened:
        yield opened


def raw(client: httpx.Client, target: str, host: str = "localhost", method: str = "GET") -> tuple[int, bytes]:
    """A request whose target no client library has tidied up."""
    address = urlsplit(str(client.base_url))
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
    connection.putrequest(method, target, skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    response = connection.getresponse()
    result = response.status, response.read()
    connection.close()
    return result


def test_files_are_served_whole_and_in_part(client: httpx.Client) -> None:
    whole = client.get("/shard_0.bin")
    assert (whole.status_code, whole.content) == (200, SHARD)
    assert whole.headers["accept-ranges"] == "bytes"
    etag = whole.headers["etag"]
    part = client.get("/shard_0.bin", headers={"Range": "bytes=1000-", "If-Range": etag})
    assert (part.status_code, part.content) == (206, SHARD[1000:])
    assert part.headers["content-range"] == f"bytes 1000-{len(SHARD) - 1}/{len(SHARD)}"
    assert client.get("/pages/00000.bin").content == b"p" * 32
    assert client.get("/manifest.json").headers["content-type"] == "application/json"


def test_conditions(client: httpx.Client, folder: Path) -> None:
    etag = client.get("/shard_0.bin").headers["etag"]
    unchanged = client.get("/shard_0.bin", headers={"If-None-Match": etag})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    beyond = client.get("/shard_0.bin", headers={"Range": f"bytes={len(SHARD)}-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{len(SHARD)}")
    (folder / "shard_0.bin").write_bytes(SHARD + b"more")
    changed = client.get("/shard_0.bin", headers={"Range": "bytes=1000-", "If-Range": etag})
    assert (changed.status_code, changed.content) == (200, SHARD + b"more")


def test_head_has_the_length_and_no_body(client: httpx.Client) -> None:
    head = client.head("/shard_0.bin")
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(SHARD)), b"")
    assert client.get("/manifest.json").status_code == 200  # the connection is still in step


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/nothing.json",
        "/build.json",
        "/shard_1.bin",
        "/../secret.json",
        "/pages/../../secret.json",
        "/pages/../manifest.json",
        "/%2e%2e/secret.json",
        "/pages/..%2f..%2fsecret.json",
        "/manifest.json/",
        "/manifest.json%00",
        "/pages",
        "/./manifest.json",
        "/..\\secret.json",
        "http://other/manifest.json",
    ],
)
def test_nothing_else_is_served(client: httpx.Client, target: str) -> None:
    assert raw(client, target) == (404, b"")


@pytest.mark.parametrize(
    ("name", "size", "is_immutable"),
    [
        ("shard_7.bin", 20_000_000, True),
        (f"tokenizers/{'a' * 64}.json", 1000, True),
        ("pages/00000.bin", 4096 * 32, True),
        ("pages/00000.bin", 4095 * 32, False),  # it grows with the data set
        ("manifest.json", 1000, False),
        ("tokenizer.json", 1000, False),
        ("run.json", 1000, False),
    ],
)
def test_only_what_never_changes_is_immutable(name: str, size: int, is_immutable: bool) -> None:
    assert cache_control(name, size) == ("public, max-age=31536000, immutable" if is_immutable else "no-cache")


def test_caches_are_told_what_they_may_keep(client: httpx.Client) -> None:
    assert "immutable" in client.get("/shard_0.bin").headers["cache-control"]
    manifest = client.get("/manifest.json")
    assert manifest.headers["cache-control"] == "no-cache"
    again = client.get("/manifest.json", headers={"If-None-Match": manifest.headers["etag"]})
    assert (again.status_code, again.headers["cache-control"]) == (304, "no-cache")


def test_a_range_counts_for_get_only(client: httpx.Client) -> None:
    head = client.head("/shard_0.bin", headers={"Range": "bytes=10-19"})
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(SHARD)))


def test_the_status_tells_the_data_set_and_the_traffic(tmp_path: Path) -> None:
    manifest = write_genesis(tmp_path, shards=17, tokens=50, signer=TestSigner())
    with GenesisServer(tmp_path) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        size = len(client.get("/shard_3.bin").content)
        client.get("/shard_3.bin", headers={"Range": "bytes=5-9"})
        client.get("/shard_99.bin")
        told = client.get("/status").json()
        (tmp_path / "manifest.json").write_text("{}")
        broken = client.get("/status").json()
    assert (told["total_shards"], told["root"], told["problem"]) == (17, manifest.root(), "")
    assert told["signed_by"] == TestSigner().public_key.hex()
    assert told["requests"] == {
        "whole": 1,
        "partial": 1,
        "not_modified": 0,
        "refused": 1,
        "bytes_sent": size + 5,
    }
    assert "total_shards" in broken["problem"]


def test_a_link_out_of_the_folder_is_not_served(client: httpx.Client, folder: Path) -> None:
    (folder / "run.json").symlink_to(folder.parent / "secret.json")
    assert client.get("/run.json").status_code == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", ""])
def test_a_foreign_host_name_is_refused(client: httpx.Client, host: str) -> None:
    assert raw(client, "/manifest.json", host) == (403, b"")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]", "[::1]:80"])
def test_local_host_names_are_served(client: httpx.Client, host: str) -> None:
    assert raw(client, "/manifest.json", host) == (200, b"{}")


def test_other_methods_are_refused(client: httpx.Client, folder: Path) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert raw(client, "/manifest.json", method=method)[0] == 501
    assert (folder / "manifest.json").read_text() == "{}"


def test_stopping_ends_silent_connections_and_frees_the_port(folder: Path) -> None:
    server = GenesisServer(folder)
    server.start()
    address = urlsplit(server.url)
    silent = [socket.create_connection((str(address.hostname), address.port or 0), timeout=10) for _ in range(20)]
    with httpx.Client(trust_env=False) as client:
        assert client.get(f"{server.url}/manifest.json").status_code == 200  # the silent ones were accepted before it
    server.stop()
    server.stop()
    for connection in silent:
        assert connection.recv(1) == b""
        connection.close()
    again = GenesisServer(folder, port=address.port or 0)
    again.start()
    again.stop()


def test_a_crowd_of_silent_connections_is_turned_away(folder: Path) -> None:
    with GenesisServer(folder) as server:
        address = urlsplit(server.url)
        crowd = [socket.create_connection((str(address.hostname), address.port or 0), timeout=10) for _ in range(140)]
        assert crowd[-1].recv(1) == b""  # closed at once; the first 128 are kept
        for connection in crowd:
            connection.close()
        with httpx.Client(transport=httpx.HTTPTransport(retries=5), trust_env=False) as client:
            assert served_soon(client, f"{server.url}/manifest.json")


def served_soon(client: httpx.Client, url: str) -> bool:
    """Whether the server answers again once it noticed that the crowd has gone."""
    for _ in range(200):
        try:
            if client.get(url).status_code == 200:
                return True
        except httpx.TransportError:
            continue  # still full
    return False


def test_starting_twice_is_one_server(folder: Path) -> None:
    server = GenesisServer(folder)
    assert server.start() == server.start()
    server.stop()
    with pytest.raises(RuntimeError):
        _ = server.url


def test_a_busy_port_and_a_wrong_folder_are_told(folder: Path) -> None:
    with GenesisServer(folder) as server, pytest.raises(NetworkRefusedError, match="another port"):
        GenesisServer(folder, port=urlsplit(server.url).port or 0).start()
    with pytest.raises(DataError, match=r"manifest\.json"):
        GenesisServer(folder.parent)
