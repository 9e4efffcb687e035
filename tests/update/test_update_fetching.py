"""Fetching of an archive: continued, capped and checked."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from neuroshard.errors import DataUnavailableError, DiskFullError
from neuroshard.update import fetching
from neuroshard.update.fetching import MAX_METADATA_BYTES, fetch_artefact, fetch_metadata, unpack_archive
from neuroshard.update.release import Artefact, UpdateRefusedError
from tests.worlds.file_servers import HostileServer, answers, drops_after, ignores_range, never_ends, serves
from tests.worlds.releases import archive_of

CONTENT = b"".join(sha256(str(index).encode()).digest() for index in range(20_000))
NAME = "n.tar.gz"


@pytest.fixture
def server() -> Iterator[HostileServer]:
    """Serves the archive."""
    with HostileServer({NAME: CONTENT}) as server:
        yield server


def artefact(server: HostileServer) -> Artefact:
    return Artefact(f"{server.url}/{NAME}", len(CONTENT), 1000, sha256(CONTENT).hexdigest())


def test_an_archive_comes_whole_over_a_line_that_breaks(server: HostileServer, tmp_path: Path) -> None:
    server.behaviours[NAME] = [drops_after(100_000), drops_after(200_000)]
    told: list[int] = []
    anyio.run(fetch_artefact, artefact(server), tmp_path / NAME, lambda done, _size: told.append(done))
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert server.asked_for(NAME) == [None, "bytes=100000-", "bytes=300000-"]
    assert told == sorted(told)
    assert told[-1] == len(CONTENT)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_later_try_goes_on_where_a_killed_one_was(server: HostileServer, tmp_path: Path) -> None:
    """The first try is cut off by its own progress, in the middle of the file, as a kill would."""

    def die_half_way(done: int, size: int) -> None:
        if done > size // 2:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)):
        anyio.run(fetch_artefact, artefact(server), tmp_path / NAME, die_half_way)
    here = (tmp_path / f"{NAME}.part").stat().st_size
    assert here > len(CONTENT) // 2
    server.requests.clear()
    anyio.run(fetch_artefact, artefact(server), tmp_path / NAME)
    assert server.asked_for(NAME) == ([f"bytes={here}-"] if here < len(CONTENT) else [])
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_a_server_that_cannot_continue_is_asked_for_everything(server: HostileServer, tmp_path: Path) -> None:
    server.behaviours[NAME] = [drops_after(1000), ignores_range]
    anyio.run(fetch_artefact, artefact(server), tmp_path / NAME)
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_another_file_of_the_same_size_is_refused_and_removed(server: HostileServer, tmp_path: Path) -> None:
    server.default = serves(bytes(len(CONTENT)))
    with pytest.raises(UpdateRefusedError, match="does not match its signed digest"):
        anyio.run(fetch_artefact, artefact(server), tmp_path / NAME)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("behaviour", [serves(CONTENT + b"x"), never_ends], ids=["longer", "endless"])
def test_more_bytes_than_signed_are_refused(server: HostileServer, tmp_path: Path, behaviour: object) -> None:
    server.default = behaviour  # type: ignore[assignment]
    with pytest.raises(UpdateRefusedError, match="bytes"):
        anyio.run(fetch_artefact, artefact(server), tmp_path / NAME)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= len(CONTENT) + 100


def test_a_disk_too_small_is_told_before_anything_comes(server: HostileServer, tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match="MB are free"):
        anyio.run(fetch_artefact, replace(artefact(server), unpacked_size=10**18), tmp_path / NAME)
    assert server.requests == []


def test_endless_metadata_are_cut(server: HostileServer) -> None:
    server.default = never_ends
    with pytest.raises(UpdateRefusedError, match=str(MAX_METADATA_BYTES)):
        anyio.run(fetch_metadata, f"{server.url}/timestamp.json", 20.0)


def test_metadata_that_do_not_come_are_no_refused_update(server: HostileServer) -> None:
    server.files["timestamp.json"] = b"{}"
    server.default = server.stalls_after(0)
    with pytest.raises(DataUnavailableError, match="did not arrive in time"):
        anyio.run(fetch_metadata, f"{server.url}/timestamp.json", 0.05)


def test_what_to_do_about_a_redirect_elsewhere_is_what_helps_here(
    server: HostileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "ATTEMPTS", 1)
    server.default = answers(302, Location="http://localhost:9/elsewhere")
    with pytest.raises(DataUnavailableError, match="redirects to localhost") as metadata:
        anyio.run(fetch_metadata, f"{server.url}/timestamp.json", 20.0)
    assert "update_url" in metadata.value.action
    with pytest.raises(DataUnavailableError, match="redirects to localhost") as archive:
        anyio.run(fetch_artefact, artefact(server), tmp_path / NAME)
    assert "publisher" in archive.value.action
    assert "--genesis" not in f"{metadata.value} {archive.value}"


def test_an_archive_that_unpacks_to_more_than_signed_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(archive_of({"neuroshard": bytes(5_000_000)}))
    with pytest.raises(UpdateRefusedError, match="more bytes than were signed"):
        unpack_archive(tmp_path / NAME, tmp_path / "version", 1_000_000)


@pytest.mark.parametrize("name", ["../escaped", "/escaped", "a/../../escaped"])
def test_an_archive_that_escapes_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / NAME).write_bytes(archive_of({name: b"x"}))
    folder = tmp_path / "below" / "version"
    with pytest.raises(UpdateRefusedError, match="outside"):
        unpack_archive(tmp_path / NAME, folder, 1000)
    outside = [path for path in tmp_path.rglob("escaped") if not path.is_relative_to(folder)]
    assert outside == []


def test_a_broken_archive_is_told(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(archive_of({"neuroshard": b"x" * 5000}, padding=5000)[:-600])
    with pytest.raises(UpdateRefusedError, match="cannot be unpacked"):
        unpack_archive(tmp_path / NAME, tmp_path / "version", 10**6)
