"""A data set behind a real nginx, with the configuration that the documents give."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import httpx
import numpy as np
import pytest
import trio

from benchmarks.node_process import free_port
from neuroshard.data.data_set import open_genesis
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.manifest import MAX_PAGE_BYTES, ManifestTrust
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.shard_loader import ShardLoader
from neuroshard.data.source import open_source
from neuroshard.data.transfer import RetryPolicy
from neuroshard.dataset import verify_data_set
from neuroshard.dataset.destination import open_place
from neuroshard.dataset.served_files import cache_control
from neuroshard.types import ShardId
from tests.worlds.data_sets import VOCABULARY, TestSigner, read_everything, shard_tokens, write_genesis
from tests.worlds.system_programs import nginx_path

DOCUMENTED = Path(__file__).parents[2] / "docs/nginx-genesis.conf"
_MAIN = """
daemon off; master_process off; pid {work}/nginx.pid; error_log {work}/error.log;
events {{ worker_connections 64; }}
http {{
    log_format ranges '$request_method $uri $status $http_range';
    access_log {work}/access.log ranges;
    client_body_temp_path {work}/body; proxy_temp_path {work}/proxy; fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi; scgi_temp_path {work}/scgi;
    {limit}
    {server}
}}
"""


class Nginx:
    """Serves a folder from start() to kill(); may be started again at the same address."""

    def __init__(self, folder: Path, work: Path, *, bytes_per_second: int | None = None) -> None:
        program = nginx_path()
        assert program is not None
        work.mkdir()
        self.port = free_port()
        server = DOCUMENTED.read_text(encoding="utf-8")
        for documented, here in (("listen 8100;", f"listen 127.0.0.1:{self.port};"), ("/srv/genesis", str(folder))):
            assert documented in server
            server = server.replace(documented, here)
        limit = f"limit_rate {bytes_per_second};" if bytes_per_second else ""
        (work / "nginx.conf").write_text(_MAIN.format(work=work, limit=limit, server=server), encoding="utf-8")
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [program, "-p", str(work), "-c", str(work / "nginx.conf"), "-e", str(work / "error.log")]
        self._log = work / "access.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Until it answers."""
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                assert self._process.poll() is None, self._process.communicate()[1]
                assert time.monotonic() < deadline, "nginx does not answer"
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """As by a power cut: no connection is ended with courtesy."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def requests(self) -> list[str]:
        """Method, path, status and range of what was answered to the end."""
        return self._log.read_text(encoding="utf-8").splitlines()


pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(nginx_path() is None, reason="nginx is not installed (Debian package nginx-light)"),
]
LARGE = 2_000_000  # tokens: 4 MB, two seconds at the slow rate
SLOW = 2_000_000  # bytes per second
POLICY = RetryPolicy(first_seconds=0.05, longest_seconds=0.2, stall_seconds=10, progress_bytes=512)


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[Nginx]:
    write_genesis(tmp_path / "g", shards=5, signer=TestSigner())
    running = Nginx(tmp_path / "g", tmp_path / "nginx")
    running.start()
    yield running
    running.kill()


def test_a_node_reads_all_of_it_and_so_does_verify(nginx: Nginx, tmp_path: Path) -> None:
    assert read_everything(nginx.url, tmp_path / "node").total_shards == 5
    place = open_place(nginx.url)
    found = verify_data_set(place, trust=ManifestTrust())
    place.close()
    assert found.shards_checked == 5
    assert [told for told in found.problems if "shard" in told or "pages" in told] == []


def test_caches_are_told_the_same_as_by_our_own_server(nginx: Nginx) -> None:
    with httpx.Client(base_url=nginx.url, trust_env=False) as client:
        shard, manifest = client.get("/shard_0.bin"), client.get("/manifest.json")
        assert "immutable" in shard.headers["cache-control"]
        assert manifest.headers["cache-control"] == "no-cache"
        again = client.get("/manifest.json", headers={"If-None-Match": manifest.headers["etag"]})
        assert (again.status_code, again.content, again.headers["cache-control"]) == (304, b"", "no-cache")
        part = client.get("/shard_0.bin", headers={"Range": "bytes=100-", "If-Range": shard.headers["etag"]})
        assert (part.status_code, part.content) == (206, shard.content[100:])
        other = client.get("/shard_0.bin", headers={"Range": "bytes=100-", "If-Range": '"other"'})
        assert (other.status_code, other.content) == (200, shard.content)
        assert client.head("/shard_0.bin").headers["content-length"] == str(len(shard.content))
        assert client.put("/shard_0.bin", content=b"").status_code in {403, 405}


def test_only_a_full_page_may_be_kept(nginx: Nginx, tmp_path: Path) -> None:
    """The last one grows with the data set: whoever kept it asks again and gets the longer one."""
    page = tmp_path / "g" / "pages" / "00000.bin"
    with httpx.Client(base_url=nginx.url, trust_env=False) as client:
        short = client.get("/pages/00000.bin")
        assert short.headers["cache-control"] == "no-cache"
        page.write_bytes(short.content.ljust(MAX_PAGE_BYTES, b"x"))
        grown = client.get("/pages/00000.bin", headers={"If-None-Match": short.headers["etag"]})
        assert (grown.status_code, len(grown.content)) == (200, MAX_PAGE_BYTES)
        part = client.get("/pages/00000.bin", headers={"Range": "bytes=100-", "If-Range": grown.headers["etag"]})
        assert part.status_code == 206
        for answer in (grown, part, client.head("/pages/00000.bin")):
            assert answer.headers["cache-control"] == cache_control("pages/00000.bin", MAX_PAGE_BYTES)


def test_nothing_else_is_served(nginx: Nginx, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "g" / "notes.json").write_text("notes")
    (tmp_path / "g" / "run.json").symlink_to(tmp_path / "secret")
    with httpx.Client(base_url=nginx.url, trust_env=False) as client:
        for name in ("/.populator.lock", "/notes.json", "/", "/pages/", "/pages/../notes.json", "/shard_99.bin"):
            assert client.get(name).status_code == 404, name
        assert client.get("/run.json").status_code == 403


def load_one(nginx: Nginx, folder: Path, meanwhile: Callable[[], None]) -> None:
    """Load a shard; `meanwhile` happens once a part of it has come."""

    async def main() -> None:
        fetcher = Fetcher(open_source(nginx.url), rng=Random(1), policy=POLICY)
        genesis = await open_genesis(fetcher, folder / "store")
        loader = ShardLoader(genesis, ShardCache(folder / "cache", limit_bytes=10**9), vocabulary_size=VOCABULARY)

        async def disturb() -> None:
            while not any(file.name == "shard_1.bin" and file.bytes_done > 500_000 for file in fetcher.active()):
                await trio.sleep(0.02)
            await trio.to_thread.run_sync(meanwhile)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(disturb)
                shard = await loader.load(ShardId(1), keep=())
        assert np.array_equal(shard.tokens, shard_tokens(1, LARGE))
        assert fetcher.refused_files == 0
        await fetcher.source.aclose()

    trio.run(main)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Nginx]:
    write_genesis(tmp_path / "g", shards=2, tokens=LARGE, signer=TestSigner())
    running = Nginx(tmp_path / "g", tmp_path / "nginx", bytes_per_second=SLOW)
    running.start()
    yield running
    running.kill()


def test_a_download_goes_on_where_it_was_when_nginx_was_killed(slow: Nginx, tmp_path: Path) -> None:
    def restart() -> None:
        slow.kill()
        slow.start()

    load_one(slow, tmp_path / "node", restart)
    last = slow.requests()[-1].split()
    assert last[:3] == ["GET", "/shard_1.bin", "206"]
    assert int(last[3].removeprefix("bytes=").removesuffix("-")) > 500_000


def test_a_file_that_was_replaced_meanwhile_comes_from_its_beginning(slow: Nginx, tmp_path: Path) -> None:
    """The same bytes under another date: If-Range does not match, and the part that came is not trusted."""

    def replace() -> None:
        slow.kill()
        os.utime(tmp_path / "g/shard_1.bin", (1_000_000_000, 1_000_000_000))
        slow.start()

    load_one(slow, tmp_path / "node", replace)
    last = slow.requests()[-1].split()
    assert last[:3] == ["GET", "/shard_1.bin", "200"]
    assert last[3].startswith("bytes=")
