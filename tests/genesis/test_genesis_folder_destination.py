from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from neuroshard.dataset.destination import Condition, Destination, FolderDestination, Version, open_destination
from neuroshard.errors import ConflictError, DataError, StorageError, UsageError
from tests.worlds.data_sets import refuses_a_large_object_before_it_is_read, writes_only_under_its_condition


@pytest.fixture
def destination(tmp_path: Path) -> Destination:
    return FolderDestination(tmp_path / "new" / "genesis")


def test_what_was_written_is_read(destination: Destination) -> None:
    assert destination.read("manifest.json", 100) is None
    assert list(destination.names()) == []
    version = destination.write("pages/00000.bin", b"page")
    destination.write("manifest.json", b"{}")
    there = destination.read("pages/00000.bin", 4)
    assert there is not None
    assert (there.content, there.version) == (b"page", version)
    assert list(destination.names()) == ["manifest.json", "pages/00000.bin"]
    assert list(destination.names("pages/")) == ["pages/00000.bin"]


def test_a_large_object_is_refused_before_it_is_read(destination: Destination) -> None:
    refuses_a_large_object_before_it_is_read(destination)


def test_a_write_with_a_condition_happens_only_under_it(destination: Destination) -> None:
    writes_only_under_its_condition(destination, Version("another"))


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "a//b", ".hidden", "a/.b", "a\\b", "a\0", "é"])
def test_no_name_leads_out_of_the_folder(destination: Destination, name: str) -> None:
    with pytest.raises(ValueError, match="not the name"):
        destination.write(name, b"")
    with pytest.raises(ValueError, match="not the name"):
        destination.read(name, 1)


def test_of_many_writers_with_one_condition_one_succeeds(tmp_path: Path) -> None:
    won: list[int] = []

    def write(number: int) -> None:
        try:
            FolderDestination(tmp_path).write("checkpoints.json", b"%d" % number, expected=Condition.ABSENT)
        except ConflictError:
            return
        won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert (tmp_path / "checkpoints.json").read_bytes() == b"%d" % won[0]


def test_while_one_has_the_claim_nobody_else_writes(tmp_path: Path) -> None:
    mine, other = FolderDestination(tmp_path), FolderDestination(tmp_path)
    with mine.claim("genesis build"):
        mine.write("a.json", b"mine")
        with pytest.raises(ConflictError, match=rf"written by genesis build \(process {os.getpid()} on "):
            other.write("a.json", b"theirs")
        with pytest.raises(ConflictError), other.claim("another build"):
            pass
        there = other.read("a.json", 10)  # readers are not kept out
        assert there is not None
        assert there.content == b"mine"
    with other.claim("another build"):
        other.write("a.json", b"theirs")


HOLD = """
import sys
from pathlib import Path
from neuroshard.dataset.destination import FolderDestination
with FolderDestination(Path(sys.argv[1])).claim("a build"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.process
def test_the_claim_of_a_killed_process_ends_with_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConflictError, match=f"process {holder.pid}"), FolderDestination(tmp_path).claim("mine"):
            pass
        holder.send_signal(signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM)
        holder.wait()
    with FolderDestination(tmp_path).claim("mine"):
        pass


def test_a_place_that_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    destination = FolderDestination(tmp_path / "file")
    with pytest.raises(StorageError, match="cannot be written"):
        destination.write("a.json", b"")
    assert destination.read("a.json", 1) is None
    (tmp_path / "g" / "a.json").mkdir(parents=True)
    with pytest.raises(DataError, match="is not a file"):
        FolderDestination(tmp_path / "g").read("a.json", 1)


def test_only_what_can_be_written_to_is_opened(tmp_path: Path) -> None:
    assert open_destination(str(tmp_path)).description == str(tmp_path)
    for location in ("https://example.org/data", "ftp://x", "file:///x"):
        with pytest.raises(UsageError, match="not a place to write to"):
            open_destination(location)


FILL = """
import resource, sys
from pathlib import Path
from neuroshard.errors import DiskFullError
from neuroshard.dataset.destination import Condition, FolderDestination
destination = FolderDestination(Path(sys.argv[1]))
version = destination.write("checkpoints.json", b"old", expected=Condition.ABSENT)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for expected in (Condition.ANY, version):
    try:
        destination.write("checkpoints.json", bytes(2000), expected=expected)
    except DiskFullError as error:
        print(error)
destination.write("checkpoints.json", b"new", expected=version)
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit for the size of files")
def test_a_full_disk_is_told_and_what_was_there_stays(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("no space left") == 2
    assert (tmp_path / "checkpoints.json").read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".populator.lock", "checkpoints.json"]
