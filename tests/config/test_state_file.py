"""State files: one reader with a limit; a damaged file is handled as declared, an unreadable disk moves nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from neuroshard.config import state_file
from neuroshard.config.state_file import StateFile
from neuroshard.errors import DamagedFileError, StorageError


@dataclass(frozen=True)
class Count:
    """A value of a state file."""

    name: str
    count: int


def count_file(
    folder: Path, on_damage: Literal["set_aside", "ignore", "fail"] = "fail", *, max_bytes: int = 100
) -> StateFile[Count]:
    """The state file that the tests read and write."""
    return StateFile(folder / "below" / "count.json", Count, on_damage, "counting begins anew", max_bytes, folder)


def test_what_was_written_is_read_and_a_removed_file_is_missing(tmp_path: Path) -> None:
    file = count_file(tmp_path)
    assert file.read() is None
    file.write(Count("steps", 3))
    assert file.read() == Count("steps", 3)
    assert [path.name for path in file.path.parent.iterdir()] == ["count.json"]  # no temporary file stays
    file.remove()
    file.remove()
    assert file.read() is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "truncated"),
        (b'{"name": "steps"}', "count"),
        (b'{"name": "steps", "count": "3"}', "count"),
        (b'{"name": "steps", "count": NaN}', "invalid"),
        (b"\xff\xfe", "invalid"),
        (b"[" * 100, "Expected `object`"),
        (b'{"name": "' + b"s" * 100 + b'", "count": 3}', "longer than 100 bytes"),
    ],
)
def test_damage_is_handled_as_declared(tmp_path: Path, content: bytes, reason: str) -> None:
    path = count_file(tmp_path).path
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=reason) as caught:
        count_file(tmp_path, "fail").read()
    assert caught.value.action == "counting begins anew"
    warnings = list[str]()
    assert count_file(tmp_path, "ignore").read(warnings.append) is None
    assert path.read_bytes() == content
    assert count_file(tmp_path, "set_aside").read(warnings.append) is None
    assert [file.name for file in path.parent.iterdir()] == ["count.json.damaged"]
    assert all(reason in warning and warning.endswith("counting begins anew.") for warning in warnings)
    assert len(warnings) == 2


def test_a_deeply_nested_file_is_damaged_and_ends_nothing(tmp_path: Path) -> None:
    file = count_file(tmp_path, "ignore", max_bytes=1_000_000)
    file.path.parent.mkdir()
    file.path.write_bytes(b'{"other": ' + b"[" * 500_000)
    assert file.read(lambda _warning: None) is None


@pytest.mark.parametrize("on_damage", ["set_aside", "ignore", "fail"])
def test_a_file_that_cannot_be_read_is_no_damage(
    tmp_path: Path, on_damage: Literal["set_aside", "ignore", "fail"]
) -> None:
    file = count_file(tmp_path, on_damage)
    file.path.mkdir(parents=True)  # like a broken disk: opening it fails
    with pytest.raises(StorageError, match="cannot be read") as caught:
        file.read()
    assert not isinstance(caught.value, DamagedFileError)
    assert [path.name for path in file.path.parent.iterdir()] == ["count.json"]


def test_a_failed_write_keeps_the_old_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = count_file(tmp_path)
    file.write(Count("steps", 3))

    def refuse(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(StorageError, match="No space left on device"):
        file.write(Count("steps", 4))
    assert file.read() == Count("steps", 3)


def test_a_data_folder_that_was_moved_does_not_begin_anew(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(StorageError, match="no longer exists"):
        count_file(gone).write(Count("steps", 3))
    assert not gone.exists()


HOLDER = """
import sys
from pathlib import Path
from neuroshard.config.state_file import alone_in

with alone_in(Path(sys.argv[1]), None):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_change_waits_for_another_process_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "LOCK_SECONDS", 0.1)
    file = count_file(tmp_path)
    command = [sys.executable, "-c", HOLDER, str(file.path.parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match="Another NeuroShard process") as refusal, file.alone():
            raise AssertionError("two changes at once")
        assert "Try again" in str(refusal.value.action)
        holder.communicate("end\n")
    with file.alone():
        file.write(Count("after it", 1))
    assert file.read() == Count("after it", 1)


def test_nobody_is_alone_in_a_data_folder_that_was_moved(tmp_path: Path) -> None:
    moved = count_file(tmp_path / "gone")
    with pytest.raises(StorageError, match="no longer exists"), moved.alone():
        raise AssertionError("a folder without files")
    assert not (tmp_path / "gone").exists()
