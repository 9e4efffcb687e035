"""Two populators on one object store: the second is told, the first is never disturbed, the dead are succeeded."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from neuroshard.data.manifest import parse_manifest
from neuroshard.dataset import s3_destination as claim_module
from neuroshard.dataset.destination import S3Destination
from neuroshard.dataset.s3_destination import LEASE_SECONDS, RENEW_SECONDS, S3Claim
from neuroshard.dataset.s3_objects import S3Connection
from neuroshard.errors import ConflictError, StorageError
from tests.worlds.data_sets import publish, read_everything
from tests.worlds.file_servers import BUCKET, LOCATION, PART, StoreServer, front_of

ROOT = Path(__file__).parents[2]
CLAIM = "data/.populator.lock"


def opened(server: StoreServer) -> S3Destination:
    return S3Destination(LOCATION, endpoint=server.url, part_bytes=PART)


def total_shards(server: StoreServer) -> int:
    body = server.client.get_object(Bucket=BUCKET, Key="data/manifest.json")["Body"].read()
    return parse_manifest(body).total_shards


def readable_shards(server: StoreServer, folder: Path) -> int:
    """As many as a node finds over HTTP, each of them verified."""
    return read_everything(f"{server.url}/{BUCKET}/data", folder).total_shards


@contextmanager
def populator(server: StoreServer, shards: int) -> Generator[subprocess.Popen[str]]:
    """A process that publishes shards one by one, seen after its first one."""
    command = [sys.executable, "-m", "tests.worlds.data_sets", LOCATION, server.url, str(shards)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), process.communicate()[1]
            yield process
        finally:
            process.kill()


def test_while_one_has_the_claim_nobody_else_writes(server: StoreServer) -> None:
    mine, other = opened(server), opened(server)
    with mine.claim("genesis build"):
        mine.write("a.json", b"mine")
        with pytest.raises(ConflictError, match="is being written by genesis build"):
            other.write("a.json", b"theirs")
        with pytest.raises(ConflictError), other.claim("another build"):
            pass
        there = other.read("a.json", 10)
        assert there is not None
        assert there.content == b"mine"
    other.write("a.json", b"theirs")


def test_a_claim_from_elsewhere_ends_by_the_clock_of_the_store(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(claim_module, "_machine", lambda: "another computer")
        S3Claim(S3Connection(LOCATION, server.url), "a build there").acquire()
    server.age(CLAIM, LEASE_SECONDS - 60)
    with pytest.raises(ConflictError, match="a build there"), opened(server).claim("mine"):
        pass
    server.age(CLAIM, 120)
    with opened(server).claim("mine"):
        pass
    assert server.names() == []


def test_who_was_silent_too_long_cannot_go_on(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asleep for longer than its lease, it wakes up beside its successor."""
    now = 0.0
    monkeypatch.setattr(claim_module, "_machine", iter(["first", "second", "second", "second"]).__next__)
    sleeper = S3Claim(S3Connection(LOCATION, server.url), "sleeper", clock=lambda: now)
    sleeper.acquire()
    sleeper.assure()
    server.age(CLAIM, LEASE_SECONDS + 1)
    monkeypatch.setattr(claim_module, "_machine", lambda: "second")
    with opened(server).claim("successor"):
        sleeper.assure()  # renewed a moment ago, by its own clock
        now = 2 * RENEW_SECONDS + 1
        with pytest.raises(ConflictError, match="being written by somebody"):
            sleeper.assure()
        with pytest.raises(ConflictError):
            sleeper.assure()
        sleeper.release()
        assert server.names() == [CLAIM]  # the successor's


def test_a_claim_that_nobody_can_read_is_respected(server: StoreServer) -> None:
    server.client.put_object(Bucket=BUCKET, Key=CLAIM, Body=b"\xff[" * 5000)
    with pytest.raises(ConflictError, match="another process"), opened(server).claim("mine"):
        pass


def test_a_store_that_ignores_conditions_is_refused(server: StoreServer) -> None:
    with front_of(server) as front:
        front.hidden_headers = ("if-match",)
        destination = S3Destination(LOCATION, endpoint=front.url)
        with pytest.raises(StorageError, match="does not support conditional writes"), destination.claim("mine"):
            pass
        destination.close()
    assert server.names() == []


@pytest.mark.long
@pytest.mark.process
def test_a_second_populator_is_told_and_changes_nothing(server: StoreServer, tmp_path: Path) -> None:
    with populator(server, 1000) as first:
        command = [sys.executable, "-m", "tests.worlds.data_sets", LOCATION, server.url, "3"]
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
        assert second.returncode == 1
        assert f"is being written by test populator (process {first.pid} on " in second.stderr
        assert first.poll() is None
    assert readable_shards(server, tmp_path) >= 1


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="Windows knows no SIGKILL")
def test_a_killed_populator_is_succeeded_at_once_and_nothing_is_half_published(
    server: StoreServer, tmp_path: Path
) -> None:
    for round_number in range(4):
        with populator(server, 1000) as process:
            assert process.stdout is not None
            for _ in range(round_number % 2):
                process.stdout.readline()
            process.kill()
        published = total_shards(server)
        assert readable_shards(server, tmp_path / str(round_number)) == published > round_number
    with opened(server).claim("the next one"):
        assert server.unfinished_uploads() == []


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signal for processes")
def test_ctrl_c_leaves_neither_parts_nor_claim(server: StoreServer, tmp_path: Path) -> None:
    with populator(server, 1000) as process:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode != 0  # it did not come to its end
    assert server.unfinished_uploads() == []
    assert CLAIM not in server.names()
    assert readable_shards(server, tmp_path) == total_shards(server)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot stop a process")
def test_a_populator_that_was_stopped_gives_way_to_its_successor(server: StoreServer, tmp_path: Path) -> None:
    with populator(server, 1000) as sleeper:
        sleeper.send_signal(signal.SIGSTOP)
        server.age(CLAIM, LEASE_SECONDS + 1)
        successor = opened(server)
        with successor.claim("successor"):
            publish(successor, total_shards(server) + 2)
            published = total_shards(server)
            sleeper.send_signal(signal.SIGCONT)
            _, told = sleeper.communicate(timeout=120)
            assert sleeper.returncode == 1
            assert "ConflictError" in told
            assert total_shards(server) == published
    assert readable_shards(server, tmp_path) == published
