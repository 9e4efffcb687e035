"""The organiser's database: a damaged file is set aside and reported, and another process may change the allow-list."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from neuroshard.errors import StorageError
from neuroshard.organiser.database import DATABASE, open_database
from neuroshard.types import WalletId
from tests.organiser.desks import START, Desk


@pytest.mark.parametrize("damage", ["no database", "torn page"])
def test_a_damaged_file_is_set_aside_and_reported(tmp_path: Path, damage: str) -> None:
    desk = Desk(tmp_path)
    for number in range(12):
        desk.join(number)
    desk.database.close()
    path = tmp_path / DATABASE
    content = path.read_bytes()
    path.write_bytes(b"no" * 5000 if damage == "no database" else content[:4096] + bytes(4096) + content[8192:])
    before = path.read_bytes()
    desk.again()
    assert "is damaged" in desk.warning
    assert path.with_name(f"{DATABASE}.damaged-{START:.0f}").read_bytes() == before
    assert desk.desk.free_places()["head-0"] == 1
    desk.join(1)


def test_a_folder_that_is_no_folder_is_an_error_with_an_action(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Check the disk"):
        open_database(tmp_path / "file")


def test_the_allow_list_of_another_process_counts_at_once(tmp_path: Path) -> None:
    first, second = open_database(tmp_path)[0], open_database(tmp_path)[0]
    second.allow(WalletId("ab" * 16))
    assert first.allowed() == {"ab" * 16}
    first.close()
    second.close()


def test_a_commit_that_fails_leaves_a_database_that_works(tmp_path: Path) -> None:
    database, _ = open_database(tmp_path)
    connection = sqlite3.connect(tmp_path / DATABASE)
    connection.executescript("PRAGMA foreign_keys = ON; CREATE TABLE parents (id INTEGER PRIMARY KEY);")
    connection.close()
    inside: Any = database  # a check that SQLite makes at the commit
    inside._connection.executescript(
        "PRAGMA foreign_keys = ON; CREATE TABLE children (id INTEGER REFERENCES parents DEFERRABLE INITIALLY DEFERRED);"
    )
    with pytest.raises(sqlite3.IntegrityError), database.writing():
        inside._connection.execute("INSERT INTO children VALUES (1)")
    with database.writing():
        database.next_serial()
    changes = database.writing()
    changes.__enter__()
    inside._connection.execute("ROLLBACK")  # as SQLite itself does if the disk is full
    assert not changes.__exit__(ValueError, ValueError("of the caller"), None)  # raises no other error
    assert database.next_serial() == 2
    database.close()


def test_a_list_of_an_older_version_stays_a_list(tmp_path: Path) -> None:
    database, _ = open_database(tmp_path)
    inside: Any = database
    inside._connection.execute("INSERT INTO allowed VALUES (?)", ("ab" * 16,))
    database.disallow(WalletId("ab" * 16))
    assert database.allowed() == frozenset()
    database.close()


def test_serials_rise_over_restarts(tmp_path: Path) -> None:
    serials: list[int] = []
    for _ in range(3):
        database, _ = open_database(tmp_path)
        serials += [database.next_serial(), database.next_serial()]
        database.close()
    assert serials == [1, 2, 3, 4, 5, 6]
