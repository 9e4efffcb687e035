"""The organiser's database: places, queue, allow-list and signed revocations in `organiser.sqlite`.

Every change is committed before it returns, so a killed process loses nothing that it has answered. One process writes
places and queue. Only the allow-list is written by the owner's commands, too.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from neuroshard.errors import StorageError
from neuroshard.organiser.places import Joiner
from neuroshard.types import NodeId, WalletId

_LOG = logging.getLogger(__name__)

DATABASE = "organiser.sqlite"
WAIT_SECONDS = 5.0  # for a command of the owner that writes at this moment
MOST_FREED = 1000  # times at which places became free
MOST_NAMES = 10_000  # of wallets; the oldest ones of wallets without a place are dropped
_TABLES = """
CREATE TABLE IF NOT EXISTS places (
    node TEXT PRIMARY KEY, wallet TEXT NOT NULL, stage TEXT NOT NULL, request TEXT NOT NULL, name TEXT NOT NULL,
    serial INTEGER NOT NULL, admitted_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, admission BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS departed (node TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS addresses (node TEXT PRIMARY KEY, addresses TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS names (wallet TEXT PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS queue (
    number INTEGER PRIMARY KEY AUTOINCREMENT, node TEXT UNIQUE NOT NULL, wallet TEXT NOT NULL, request TEXT NOT NULL,
    name TEXT NOT NULL, role TEXT NOT NULL, memory_mb INTEGER NOT NULL, layers_at_most INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS claims (node TEXT PRIMARY KEY, issued_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS invitations (invitation BLOB, wallet TEXT, PRIMARY KEY (invitation, wallet));
CREATE TABLE IF NOT EXISTS passes (wallet TEXT PRIMARY KEY, pass BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS allowed (wallet TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS revocations (named TEXT PRIMARY KEY, statement BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS list_changes (number INTEGER PRIMARY KEY AUTOINCREMENT, statement BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS freed (at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS queue_request ON queue (request);
CREATE INDEX IF NOT EXISTS places_request ON places (request);
CREATE INDEX IF NOT EXISTS names_name ON names (name);
"""
_DROP_OLD_NAMES = """
DELETE FROM names WHERE rowid IN (
    SELECT rowid FROM names WHERE wallet NOT IN (SELECT wallet FROM places) ORDER BY rowid
    LIMIT max(0, (SELECT count(*) FROM names) - ?))
"""
_ADDRESSES_OF_PLACES = """
SELECT node, addresses FROM addresses JOIN places USING (node) WHERE node NOT IN (SELECT node FROM departed)
"""
_HAS_LIST = "SELECT EXISTS (SELECT 1 FROM allowed) OR EXISTS (SELECT 1 FROM facts WHERE name = 'has list')"


@dataclass(frozen=True)
class HeldPlace:
    """A node's place in a stage, with the admission that it has got for it."""

    node: NodeId
    wallet: WalletId
    stage: str
    request: str
    name: str
    serial: int
    admitted_at: int
    expires_at: int
    admission: bytes


@dataclass(frozen=True)
class Waiting:
    """A node in the queue."""

    number: int  # rises with every node that joins the queue
    node: NodeId
    wallet: WalletId
    request: str
    name: str
    role: str
    memory_mb: int
    layers_at_most: int

    @cached_property
    def joiner(self) -> Joiner:
        """The facts that decide on its place."""
        return Joiner(self.node, self.role, self.memory_mb, self.layers_at_most)


class Database:
    """The tables of one run's organiser. Methods raise sqlite3.Error if the disk is full or the file is damaged.

    The queue is also kept in memory, because every waiting node asks every ten seconds. Only this process writes it.
    """

    def __init__(self, path: Path | None, wait_seconds: float = WAIT_SECONDS) -> None:
        """Open or create the database; None keeps it in memory. Raises sqlite3.DatabaseError for a damaged file."""
        self._waiting: dict[NodeId, Waiting] | None = None  # the queue in its order; None: not read yet
        self._connection = sqlite3.connect(
            ":memory:" if path is None else path, wait_seconds, isolation_level=None, check_same_thread=False
        )
        try:
            self._connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;")
            found = self._connection.execute("PRAGMA quick_check").fetchone()[0]
            if found != "ok":
                raise sqlite3.DatabaseError(found)
            self._connection.executescript(_TABLES)
        except sqlite3.Error:
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def writing(self) -> Generator[None]:
        """Make the changes inside one transaction, which is on disk when this ends, or undone after an error."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            with self._connection:  # also undoes a commit that fails, and accepts that SQLite has undone all by itself
                yield
        except BaseException:
            self._waiting = None  # it may have changes that are undone
            raise

    def run_id(self, named: str) -> str:
        """The run of this database: the first one that was named."""
        self._run("INSERT OR IGNORE INTO facts VALUES ('run', ?)", named)
        return str(self._rows("SELECT value FROM facts WHERE name = 'run'")[0][0])

    def claimed_at(self, node: NodeId) -> float:
        """Date of the newest claim of a node; 0 without one."""
        rows = self._rows("SELECT issued_at FROM claims WHERE node = ?", node)
        return float(rows[0][0]) if rows else 0.0

    def note_claim(self, node: NodeId, issued_at: float) -> None:
        """Remember the date of a node's newest claim."""
        self._run("INSERT OR REPLACE INTO claims VALUES (?, ?)", node, issued_at)

    def forget_claims(self, before: float) -> None:
        """Drop dates of claims that are refused as too old anyway."""
        self._run("DELETE FROM claims WHERE issued_at < ?", before)

    def taken(self) -> dict[str, int]:
        """Number of places in each stage."""
        return {str(row[0]): int(row[1]) for row in self._rows("SELECT stage, count(*) FROM places GROUP BY stage")}

    def expired(self, before: float) -> list[NodeId]:
        """Nodes whose admissions ended before a time."""
        return [NodeId(row[0]) for row in self._rows("SELECT node FROM places WHERE expires_at < ?", before)]

    def expired_departed(self, before: float) -> list[NodeId]:
        """Nodes that left, and whose admissions ended before a time."""
        command = "SELECT node FROM places JOIN departed USING (node) WHERE expires_at < ?"
        return [NodeId(row[0]) for row in self._rows(command, before)]

    def depart(self, node: NodeId) -> None:
        """Note that a node left. It keeps its place, which nobody else may have while its admission is valid."""
        self._run("INSERT OR IGNORE INTO departed SELECT node FROM places WHERE node = ?", node)

    def come_back(self, node: NodeId) -> None:
        """Note that a node that left is back at its place."""
        self._run("DELETE FROM departed WHERE node = ?", node)

    def has_departed(self, node: NodeId) -> bool:
        """Whether a node left its place."""
        return bool(self._rows("SELECT 1 FROM departed WHERE node = ?", node))

    def has_other(self, name: str, wallet: WalletId) -> bool:
        """Whether another wallet shows this name."""
        return bool(self._rows("SELECT 1 FROM names WHERE name = ? AND wallet <> ? LIMIT 1", name, wallet))

    def show_name(self, wallet: WalletId, name: str) -> None:
        """Show a name for a wallet from now on; "" shows none."""
        known = self._rows("SELECT name FROM names WHERE wallet = ?", wallet)
        if (known[0][0] if known else "") == name:
            return
        self._run("DELETE FROM names WHERE wallet = ?", wallet)
        if name:
            self._run("INSERT INTO names VALUES (?, ?)", wallet, name)
            self._run(_DROP_OLD_NAMES, MOST_NAMES)

    def keep_addresses(self, node: NodeId, addresses: Sequence[str]) -> None:
        """Store the addresses that a node announces; they are dropped with its place."""
        self._run("INSERT OR REPLACE INTO addresses VALUES (?, ?)", node, json.dumps(addresses))

    def addresses(self) -> dict[NodeId, tuple[str, ...]]:
        """The addresses that nodes with a place announced when they joined."""
        rows = self._rows(_ADDRESSES_OF_PLACES)
        return {NodeId(row[0]): tuple(json.loads(row[1])) for row in rows}

    def place_of(self, node: NodeId) -> HeldPlace | None:
        """The place of a node."""
        rows = self._rows("SELECT * FROM places WHERE node = ?", node)
        return HeldPlace(*rows[0]) if rows else None

    def place_of_request(self, request: str) -> HeldPlace | None:
        """The place that a request in the queue led to."""
        rows = self._rows("SELECT * FROM places WHERE request = ?", request)
        return HeldPlace(*rows[0]) if rows else None

    def keep_place(self, place: HeldPlace) -> None:
        """Give a place to a node, or change it; the node leaves the queue."""
        values = (place.node, place.wallet, place.stage, place.request, place.name, place.serial)
        marks = "INSERT OR REPLACE INTO places VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        self._run(marks, *values, place.admitted_at, place.expires_at, place.admission)
        self._run("DELETE FROM queue WHERE node = ?", place.node)
        self._queue().pop(place.node, None)

    def free(self, node: NodeId, at: float) -> None:
        """Take the place of a node."""
        self._run("DELETE FROM places WHERE node = ?", node)
        self._run("DELETE FROM addresses WHERE node = ?", node)
        self.come_back(node)
        self._run("INSERT INTO freed VALUES (?)", at)
        self._run("DELETE FROM freed WHERE rowid <= (SELECT max(rowid) FROM freed) - ?", MOST_FREED)

    def freed_at(self) -> list[float]:
        """Times at which places became free."""
        return [float(row[0]) for row in self._rows("SELECT at FROM freed")]

    def next_serial(self) -> int:
        """A number for the next admission, above all before."""
        self._run("INSERT OR IGNORE INTO facts VALUES ('serial', '0')")
        self._run("UPDATE facts SET value = CAST(value AS INTEGER) + 1 WHERE name = 'serial'")
        return int(self._rows("SELECT value FROM facts WHERE name = 'serial'")[0][0])

    def queue(self) -> tuple[Waiting, ...]:
        """The waiting nodes, the one that came first in front."""
        return tuple(self._queue().values())

    def _queue(self) -> dict[NodeId, Waiting]:
        if self._waiting is None:
            found = (Waiting(*row) for row in self._rows("SELECT * FROM queue ORDER BY number"))
            self._waiting = {each.node: each for each in found}
        return self._waiting

    def waiting(self) -> int:
        """Number of waiting nodes."""
        return len(self._queue())

    def enqueue(self, waiting: Waiting) -> None:
        """Add a node at the end of the queue, or change its entry at the place that it has. `number` is not used."""
        values = (waiting.wallet, waiting.request, waiting.name, waiting.role, waiting.memory_mb)
        known = self._queue().get(waiting.node)
        done = self._run(
            "INSERT INTO queue (wallet, request, name, role, memory_mb, layers_at_most, node) VALUES "
            "(?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (node) DO UPDATE SET "
            "wallet = ?1, request = ?2, name = ?3, role = ?4, memory_mb = ?5, layers_at_most = ?6",
            *values,
            waiting.layers_at_most,
            waiting.node,
        )
        number = done.lastrowid if known is None else known.number
        self._queue()[waiting.node] = replace(waiting, number=number or 0)

    def dequeue(self, node: NodeId) -> None:
        """Remove a node from the queue, if it is there."""
        self._run("DELETE FROM queue WHERE node = ?", node)
        self._queue().pop(node, None)
        self._run("DELETE FROM addresses WHERE node = ?1 AND NOT EXISTS (SELECT 1 FROM places WHERE node = ?1)", node)

    def uses_of(self, invitation: bytes) -> frozenset[WalletId]:
        """The wallets that joined with an invitation."""
        return frozenset(
            row[0] for row in self._rows("SELECT wallet FROM invitations WHERE invitation = ?", invitation)
        )

    def note_use(self, invitation: bytes, wallet: WalletId) -> None:
        """Count a wallet for an invitation."""
        self._run("INSERT OR IGNORE INTO invitations VALUES (?, ?)", invitation, wallet)

    def pass_of(self, wallet: WalletId) -> bytes | None:
        """The pass with which a wallet joined last."""
        rows = self._rows("SELECT pass FROM passes WHERE wallet = ?", wallet)
        return bytes(rows[0][0]) if rows else None

    def keep_pass(self, wallet: WalletId, member_pass: bytes) -> None:
        """Store the pass with which a wallet joined."""
        self._run("INSERT OR REPLACE INTO passes VALUES (?, ?)", wallet, member_pass)

    def allowed(self) -> frozenset[WalletId] | None:
        """The allow-list; None if no wallet was ever on it. A list that became empty stays a list."""
        return frozenset(row[0] for row in self._rows("SELECT wallet FROM allowed")) if self.has_list() else None

    def has_list(self) -> bool:
        """Whether there is an allow-list, which may be empty."""
        return bool(self._rows(_HAS_LIST)[0][0])

    def admits(self, wallet: WalletId) -> bool:
        """Whether a wallet is on the allow-list, or there is none."""
        return bool(self._rows("SELECT 1 FROM allowed WHERE wallet = ?", wallet)) or not self.has_list()

    def allow(self, wallet: WalletId) -> None:
        """Put a wallet on the allow-list."""
        self._run("INSERT OR IGNORE INTO facts VALUES ('has list', '1')")
        self._run("INSERT OR IGNORE INTO allowed VALUES (?)", wallet)

    def disallow(self, wallet: WalletId) -> None:
        """Take a wallet from the allow-list. The last one leaves an empty list, which admits nobody."""
        self._run("INSERT OR IGNORE INTO facts SELECT 'has list', '1' WHERE EXISTS (SELECT 1 FROM allowed)")
        self._run("DELETE FROM allowed WHERE wallet = ?", wallet)

    def allow_anyone(self) -> None:
        """Drop the allow-list: any wallet may join again."""
        self._run("DELETE FROM allowed")
        self._run("DELETE FROM facts WHERE name = 'has list'")

    def keep_list_change(self, statement: bytes) -> None:
        """Store the owner's signed statement about a change of the allow-list."""
        self._run("INSERT INTO list_changes (statement) VALUES (?)", statement)

    def list_changes(self) -> list[bytes]:
        """The owner's signed statements about changes of the allow-list, the newest last."""
        return [bytes(row[0]) for row in self._rows("SELECT statement FROM list_changes ORDER BY number")]

    def keep_revocation(self, named: str, statement: bytes) -> None:
        """Store a signed revocation of a node or wallet."""
        self._run("INSERT OR IGNORE INTO revocations VALUES (?, ?)", named, statement)

    def is_revoked(self, node: NodeId, wallet: WalletId) -> bool:
        """Whether the place of a node, or of its wallet, ended."""
        return bool(self._rows("SELECT 1 FROM revocations WHERE named IN (?, ?)", node, wallet))

    def newest_revocations(self, most: int) -> list[bytes]:
        """The newest signed revocations, the newest last."""
        rows = self._rows("SELECT statement FROM revocations ORDER BY rowid DESC LIMIT ?", most)
        return [bytes(row[0]) for row in reversed(rows)]

    def _run(self, command: str, *values: object) -> sqlite3.Cursor:
        return self._connection.execute(command, values)

    def _rows(self, command: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(command, values).fetchall()


def open_database(folder: Path, now: float | None = None, wait_seconds: float = WAIT_SECONDS) -> tuple[Database, str]:
    """Open the database in a folder, and return a warning if a damaged one was set aside, otherwise "".

    Raises StorageError if the file cannot be read or written.
    """
    path = folder / DATABASE
    try:
        return Database(path, wait_seconds), ""
    except sqlite3.OperationalError as error:
        raise StorageError(f"{path} cannot be opened: {error}.", "Check the disk and the file's owner.") from error
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{DATABASE}.damaged-{int(time.time() if now is None else now)}")
        warning = (
            f"{path} is damaged ({error}) and was moved to {aside.name}. Places and queue begin again: admitted nodes "
            "keep their admissions until these end, and join again."
        )
        _move_aside(path, aside)
        _LOG.error("%s", warning)
        return Database(path, wait_seconds), warning


def _move_aside(path: Path, aside: Path) -> None:
    try:
        for suffix in ("-wal", "-shm", ""):
            if (part := path.with_name(path.name + suffix)).exists():
                part.replace(aside.with_name(aside.name + suffix))
    except OSError as error:
        raise StorageError(f"{path} is damaged and cannot be moved: {error.strerror}.", "Move it away.") from error
