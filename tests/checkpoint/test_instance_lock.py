"""One node per folder; the second learns where the first answers; a SIGKILL leaves nothing behind that matters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from neuroshard.config.instance_lock import FILE_NAME, AlreadyRunningError, InstanceLock, LockOwner, read_lock_owner
from neuroshard.errors import StorageError

HOLDER = """
import sys, pathlib
from neuroshard.config.instance_lock import InstanceLock
lock = InstanceLock.acquire(pathlib.Path(sys.argv[1]))
lock.announce("127.0.0.1", 4321)
print("held", flush=True)
sys.stdin.read()
"""


def test_the_second_start_learns_where_the_first_answers(tmp_path: Path) -> None:
    lock = InstanceLock.acquire(tmp_path / "data")
    with pytest.raises(AlreadyRunningError) as before:
        InstanceLock.acquire(tmp_path / "data")
    assert before.value.owner == LockOwner(os.getpid(), None)
    lock.announce("192.0.2.7", 8123)
    with pytest.raises(AlreadyRunningError) as after:
        InstanceLock.acquire(tmp_path / "data")
    assert after.value.owner == LockOwner(os.getpid(), 8123, "192.0.2.7")
    assert read_lock_owner(tmp_path / "data") == after.value.owner
    lock.release()
    lock.release()
    assert read_lock_owner(tmp_path / "data") is None
    InstanceLock.acquire(tmp_path / "data").release()


def test_two_folders_are_two_nodes(tmp_path: Path) -> None:
    first, second = InstanceLock.acquire(tmp_path / "a"), InstanceLock.acquire(tmp_path / "b")
    first.release()
    second.release()
    assert read_lock_owner(tmp_path / "none") is None


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_holder_does_not_block_the_next(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert read_lock_owner(tmp_path) == LockOwner(process.pid, 4321)
        with pytest.raises(AlreadyRunningError):
            InstanceLock.acquire(tmp_path)
        process.kill()
        process.wait()
    assert b"4321" in (tmp_path / FILE_NAME).read_bytes()  # the stale note is still there
    assert read_lock_owner(tmp_path) is None
    lock = InstanceLock.acquire(tmp_path)
    lock.release()


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"pid": "x", "port": 99999999}', b"\xff" * 5000])
def test_a_damaged_note_names_nobody(tmp_path: Path, note: bytes) -> None:
    lock = InstanceLock.acquire(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(note)
    assert read_lock_owner(tmp_path) == LockOwner(None, None)
    lock.release()


def test_a_note_of_an_older_version_means_loopback(tmp_path: Path) -> None:
    lock = InstanceLock.acquire(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b'{"pid": 7, "port": 8123}')
    assert read_lock_owner(tmp_path) == LockOwner(7, 8123, "127.0.0.1")
    lock.release()


def test_an_unusable_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="--data-dir"):
        InstanceLock.acquire(tmp_path / "file" / "data")
