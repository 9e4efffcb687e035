"""The claim of one populator on a prefix of an object store: a lease, an object that is replaced with conditions.

Its age is the difference of two times that the store tells, so that no clock of a computer matters.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, cast

import psutil

from neuroshard.data.genesis.object_store import Condition, Version
from neuroshard.errors import ConflictError, NeuroShardError, StorageError
from neuroshard.genesis.destination.folder import LOCK_NAME
from neuroshard.genesis.destination.protocol import holder_name
from neuroshard.genesis.destination.s3_connection import NoSuchObjectError, S3Connection
from neuroshard.genesis.destination.s3_upload import put

LEASE_SECONDS = 600.0  # longer than any single request with its repetitions
RENEW_SECONDS = 30.0
_MAX_NOTE_BYTES = 4096
_START_TOLERANCE_SECONDS = 2.0

_LOG = logging.getLogger(__name__)


def elapsed_seconds() -> float:
    """Of a clock that also counts while the computer sleeps, where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


@dataclass(frozen=True)
class _Held:
    """The claim as it was found."""

    version: Version
    age_seconds: float
    holder: str
    is_dead: bool  # its process ran on this computer and has ended


class S3Claim:
    """Held from acquire() to release(), renewed by a thread of its own meanwhile."""

    def __init__(self, connection: S3Connection, purpose: str, *, clock: Callable[[], float] = elapsed_seconds) -> None:
        self._connection = connection
        self._purpose = purpose
        self._clock = clock
        self._lock = threading.Lock()  # over the following three
        self._version: Version | Condition = Condition.ABSENT
        self._renewed_at = 0.0
        self._is_lost = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew_forever, name="s3-claim", daemon=True)

    def acquire(self) -> None:
        """Take the claim, or take it over from a process that died.

        Raises ConflictError naming the holder, StorageError when the store does not check conditions.
        """
        try:
            self._version = put(self._connection, LOCK_NAME, self._note(), Condition.ABSENT)
        except ConflictError:
            held = self._found()
            if held is not None and not held.is_dead and held.age_seconds <= LEASE_SECONDS:
                raise self._taken(held.holder) from None
            self._version = put(
                self._connection, LOCK_NAME, self._note(), Condition.ABSENT if held is None else held.version
            )
        self._renewed_at = self._clock()
        with ExitStack() as undo:
            undo.callback(self._remove)
            self._refuse_blind_store()
            undo.pop_all()
        self._thread.start()

    def assure(self) -> None:
        """Before each write: raises ConflictError when the claim was lost; renews it when the thread did not."""
        with self._lock:
            if self._is_lost:
                raise self._taken("somebody who took over after this process was silent for too long")
            is_old = self._clock() - self._renewed_at > 2 * RENEW_SECONDS
        if is_old:
            self._renew()

    def release(self) -> None:
        """Give the place free; what was lost to somebody else stays theirs."""
        self._stopped.set()
        self._thread.join()
        if not self._is_lost:
            self._remove()

    def _remove(self) -> None:
        try:
            self._renew()  # also refuses where the condition of a deletion is ignored
            with self._connection.in_words(LOCK_NAME):
                self._connection.client.delete_object(
                    Bucket=self._connection.bucket, Key=self._connection.key(LOCK_NAME), IfMatch=self._version
                )
        except NeuroShardError as error:
            _LOG.warning("The claim on %s ends by itself in some minutes: %s", self._connection.location, error)

    def _renew_forever(self) -> None:
        while not self._stopped.wait(RENEW_SECONDS):
            try:
                self._renew()
            except ConflictError:
                return  # the next write tells it
            except NeuroShardError as error:
                _LOG.warning("The claim on %s was not renewed: %s", self._connection.location, error)

    def _renew(self) -> None:
        with self._lock:
            began = self._clock()
            try:
                self._version = put(self._connection, LOCK_NAME, self._note(), self._version)
            except (ConflictError, NoSuchObjectError) as error:
                self._is_lost = True
                raise self._taken("somebody else") from error
            self._renewed_at = began

    def _refuse_blind_store(self) -> None:
        """Some stores ignore conditions: then two populators would overwrite each other."""
        for wrong in (Condition.ABSENT, Version('"' + 32 * "0" + '"')):
            try:
                put(self._connection, LOCK_NAME, self._note(), wrong)
            except ConflictError:
                continue
            raise StorageError(
                f"The store of {self._connection.location} does not check the conditions of writes.",
                "Use one that knows If-None-Match and If-Match, or write to a folder and copy it.",
            )

    def _taken(self, holder: str) -> ConflictError:
        return ConflictError(
            f"{self._connection.location} is being written by {holder}.",
            f"Wait until it is done, or end it. Killed on another computer, it counts as ended after "
            f"{LEASE_SECONDS / 60:.0f} minutes.",
        )

    def _note(self) -> bytes:
        """Different each time: only so does its version tell one renewal from the next."""
        process = psutil.Process()
        note = {
            "holder": holder_name(self._purpose),
            "machine": _machine(),
            "pid": process.pid,
            "process_started": process.create_time(),
            "renewal": secrets.token_hex(16),
        }
        return json.dumps(note, indent=1).encode()

    def _found(self) -> _Held | None:
        """The claim that is there; None when it was released in this moment."""
        connection = self._connection
        try:
            with connection.in_words(LOCK_NAME):
                answer = connection.client.get_object(Bucket=connection.bucket, Key=connection.key(LOCK_NAME))
                with closing(answer["Body"]) as body:
                    note = _parsed(cast("bytes", body.read(_MAX_NOTE_BYTES)))
        except NoSuchObjectError:
            return None
        date = str(answer["ResponseMetadata"]["HTTPHeaders"].get("date", ""))
        age = (parsedate_to_datetime(date) - answer["LastModified"]).total_seconds() if date else 0.0
        return _Held(Version(str(answer["ETag"])), age, str(note.get("holder", "another process")), _is_dead(note))


def _machine() -> str:
    return f"{socket.gethostname()}-{uuid.getnode():x}"


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError):
        return {}  # nothing is known about its writer
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _is_dead(note: dict[str, Any]) -> bool:
    pid, started = note.get("pid"), note.get("process_started")
    if note.get("machine") != _machine() or type(pid) is not int or not isinstance(started, float):
        return False
    try:
        return abs(psutil.Process(pid).create_time() - started) > _START_TOLERANCE_SECONDS
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return True
