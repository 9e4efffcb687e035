"""The history of a run in `organiser.sqlite`: certified values, the work that they prove, and samples of the reports.

It is bounded. The oldest values become sums by wallet and stage; samples of a past day become one per hour. Work is
kept in sequences, because SQLite's integers are smaller than the operations of a long run.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeAlias

from neuroshard.organiser.observations import CertifiedValue, ReadyNode, ValueKind
from neuroshard.types import DAY_SECONDS, WalletId

WAIT_SECONDS = 5.0  # for another writer
KEPT_VALUES = 4096  # newest heights of each stage; older ones are sums
KEPT_HOURS = 24 * 366
MOST_READY = 1000
HOUR_SECONDS = 3600
Kept: TypeAlias = Literal["known", "added", "replaced"]
_TABLES = """
CREATE TABLE IF NOT EXISTS certified (
    stage INTEGER, height INTEGER, statement TEXT NOT NULL, outer_step INTEGER NOT NULL, at INTEGER NOT NULL,
    sequences INTEGER NOT NULL, seconds INTEGER NOT NULL, members INTEGER NOT NULL, accepted TEXT NOT NULL,
    kind TEXT NOT NULL, PRIMARY KEY (stage, height)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS earlier_work (
    wallet TEXT, stage INTEGER, sequences INTEGER NOT NULL, rounds INTEGER NOT NULL, seconds INTEGER NOT NULL,
    since INTEGER NOT NULL, PRIMARY KEY (wallet, stage)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS earlier_values (
    stage INTEGER PRIMARY KEY, height INTEGER NOT NULL, count INTEGER NOT NULL, rounds INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
    at INTEGER PRIMARY KEY, outer_step INTEGER NOT NULL, loss REAL, held_out_loss REAL, tokens_per_second REAL,
    participants INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS ready_nodes (at REAL PRIMARY KEY, node TEXT NOT NULL, seconds REAL NOT NULL);
CREATE TABLE IF NOT EXISTS counted (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""


_SELECT_VALUES = "SELECT stage, height, outer_step, at, sequences, seconds, members, kind, accepted FROM certified "
_SELECT_WORK = "SELECT wallet, stage, sequences, rounds, seconds, since FROM earlier_work "


@dataclass(frozen=True)
class StoredValue:
    """A certified value that is not part of the sums yet."""

    stage: int
    height: int
    outer_step: int
    at: int
    sequences: int
    seconds: int
    members: int
    kind: ValueKind
    accepted: tuple[WalletId, ...]


@dataclass(frozen=True)
class Work:
    """The certified work of one wallet in one stage."""

    sequences: int = 0
    rounds: int = 0
    seconds: int = 0
    since: int = 0  # date of the first certificate that names the wallet

    def plus(self, other: Work) -> Work:
        """The sum of both."""
        since = min(filter(None, (self.since, other.since)), default=0)
        return Work(self.sequences + other.sequences, self.rounds + other.rounds, self.seconds + other.seconds, since)


@dataclass(frozen=True)
class EarlierValues:
    """The values of a stage that became sums: all up to a height, and how many of them were known here."""

    height: int = 0
    count: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class RunSample:
    """The run at one moment; losses are those that nodes reported."""

    at: int
    outer_step: int
    loss: float | None
    held_out_loss: float | None
    tokens_per_second: float | None
    participants: int


class RunHistory:
    """The tables. Methods raise sqlite3.Error if the disk is full or the file is damaged. Any thread may call them."""

    def __init__(self, path: Path | None, wait_seconds: float = WAIT_SECONDS) -> None:
        """Open or create the tables next to those of the admissions; None keeps them in memory."""
        self._lock = Lock()
        self._connection = sqlite3.connect(
            ":memory:" if path is None else path, wait_seconds, isolation_level=None, check_same_thread=False
        )
        try:
            # without a sync per write: a sample may be lost, and the observer reports values again
            self._connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;" + _TABLES)
        except sqlite3.Error:
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def keep_value(self, value: CertifiedValue) -> Kept:
        """Store a value, and drop those of other foundations that it makes void."""
        with self._writing():
            rows = self._rows("SELECT height FROM earlier_values WHERE stage = ?", value.stage)
            if rows and value.height <= rows[0][0]:
                return "known"
            known = self._rows(
                "SELECT statement FROM certified WHERE stage = ? AND height = ?", value.stage, value.height
            )
            if known and known[0][0] == value.statement:
                return "known"
            void = "DELETE FROM certified WHERE stage = ? AND statement <> ? AND height > ?"
            dropped = self._run(void, value.stage, value.statement, value.start_height)
            self._run(
                "INSERT OR REPLACE INTO certified VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                value.stage,
                value.height,
                value.statement,
                value.outer_step,
                value.at,
                value.sequences,
                value.seconds,
                value.members,
                json.dumps(value.accepted),
                value.kind,
            )
            self._sum_up(value.stage, value.height)
        return "replaced" if dropped else "added"

    def _sum_up(self, stage: int, newest: int) -> None:
        """Turn the values of a stage that are KEPT_VALUES heights or more before the newest one into sums."""
        old = self._values("WHERE stage = ? AND height <= ? ORDER BY height", stage, newest - KEPT_VALUES)
        if not old:
            return
        known = self._earlier_work("WHERE stage = ?", stage)
        for key, work in work_of(old).items():
            sums = astuple(known.get(key, Work()).plus(work))
            self._run("INSERT OR REPLACE INTO earlier_work VALUES (?, ?, ?, ?, ?, ?)", *key, *sums)
        before, last = self._earlier_values().get(stage, EarlierValues()), old[-1].height
        rounds = before.rounds + sum(value.kind == "aggregate" for value in old)
        count = before.count + len(old)
        self._run("INSERT OR REPLACE INTO earlier_values VALUES (?, ?, ?, ?)", stage, last, count, rounds)
        self._run("DELETE FROM certified WHERE stage = ? AND height <= ?", stage, last)

    def _earlier_work(self, where: str, *values: object) -> dict[tuple[WalletId, int], Work]:
        rows = self._rows(_SELECT_WORK + where, *values)
        return {(WalletId(wallet), stage): Work(*sums) for wallet, stage, *sums in rows}

    def _earlier_values(self) -> dict[int, EarlierValues]:
        return {int(row[0]): EarlierValues(*row[1:]) for row in self._rows("SELECT * FROM earlier_values")}

    def earlier_values(self) -> dict[int, EarlierValues]:
        """The values of each stage that became sums."""
        with self._lock:
            return self._earlier_values()

    def values(self) -> list[StoredValue]:
        """The values that are not part of the sums, by stage and height."""
        with self._lock:
            return self._values("ORDER BY stage, height")

    def earlier_work(self) -> dict[tuple[WalletId, int], Work]:
        """The work of the values that became sums, by wallet and stage."""
        with self._lock:
            return self._earlier_work("")

    def keep_sample(self, sample: RunSample) -> None:
        """Store a sample, and thin out those of past days."""
        with self._writing():
            self._run("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?)", *astuple(sample))
            past = "DELETE FROM samples WHERE at < ? AND at NOT IN (SELECT max(at) FROM samples GROUP BY at / ?)"
            self._run(past, sample.at - DAY_SECONDS, HOUR_SECONDS)
            self._run("DELETE FROM samples WHERE at < ?", sample.at - KEPT_HOURS * HOUR_SECONDS)

    def samples(self) -> list[RunSample]:
        """All samples, the oldest first."""
        with self._lock:
            return [RunSample(*row) for row in self._rows("SELECT * FROM samples ORDER BY at")]

    def keep_ready(self, at: float, ready: ReadyNode) -> None:
        """Store the time that a node took to join."""
        with self._writing():
            self._run("INSERT OR REPLACE INTO ready_nodes VALUES (?, ?, ?)", at, ready.node, ready.seconds)
            older = "DELETE FROM ready_nodes WHERE at NOT IN (SELECT at FROM ready_nodes ORDER BY at DESC LIMIT ?)"
            self._run(older, MOST_READY)

    def join_seconds(self, since: float) -> list[float]:
        """The times that nodes took to join since a moment."""
        with self._lock:
            return [float(row[0]) for row in self._rows("SELECT seconds FROM ready_nodes WHERE at >= ?", since)]

    def count(self, name: str, more: int) -> None:
        """Add to a number that survives restarts."""
        with self._writing():
            add = "INSERT INTO counted VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = value + ?2"
            self._run(add, name, more)

    def counted(self) -> Mapping[str, int]:
        """The numbers that survive restarts."""
        with self._lock:
            return {str(row[0]): int(row[1]) for row in self._rows("SELECT * FROM counted")}

    def names(self) -> dict[WalletId, str]:
        """The names that wallets show."""
        with self._lock:
            return {WalletId(row[0]): str(row[1]) for row in self._rows("SELECT wallet, name FROM names")}

    @contextmanager
    def _writing(self) -> Generator[None]:
        with self._lock, self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield

    def _values(self, where: str, *values: object) -> list[StoredValue]:
        rows = self._rows(_SELECT_VALUES + where, *values)
        return [StoredValue(*row[:-1], accepted=tuple(json.loads(row[-1]))) for row in rows]

    def _run(self, command: str, *values: object) -> int:
        """Returns the number of rows that changed."""
        return self._connection.execute(command, values).rowcount

    def _rows(self, command: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(command, values).fetchall()


def work_of(values: Iterable[StoredValue]) -> dict[tuple[WalletId, int], Work]:
    """The work that values prove, by wallet and stage. Each accepted wallet counts the certified median."""
    found: dict[tuple[WalletId, int], list[int]] = {}
    for value in values:
        for wallet in value.accepted if value.kind == "aggregate" else ():
            sums = found.setdefault((wallet, value.stage), [0, 0, 0, value.at])
            sums[0] += value.sequences
            sums[1] += 1
            sums[2] += value.seconds
            sums[3] = min(sums[3], value.at)
    return {key: Work(*sums) for key, sums in found.items()}
