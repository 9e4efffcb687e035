"""A prefix of an S3-compatible object store as the destination of a data set.

Its claim is a lease: an object that its holder replaces under a condition."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, cast

import psutil

from neuroshard.dataset.folder_destination import LOCK_NAME
from neuroshard.dataset.object_store import Condition, ExpectedVersion, StoredObject, Version, checked_name, holder_name
from neuroshard.dataset.s3_objects import NoSuchObjectError, S3Connection, abort_unfinished, put, put_in_parts
from neuroshard.errors import ConflictError, DataError, DataUnavailableError, NeuroShardError, StorageError

LEASE_SECONDS = 600.0  # longer than any single request with its retries
RENEW_SECONDS = 30.0
_MAX_NOTE_BYTES = 4096
_START_TOLERANCE_SECONDS = 2.0

_LOG = logging.getLogger(__name__)


def elapsed_seconds() -> float:
    """Return the seconds of a clock that also counts while the computer sleeps, where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


@dataclass(frozen=True)
class _Held:
    """The claim that was found."""

    version: Version
    age_seconds: float
    holder: str
    is_dead: bool  # its process ran on this computer and has ended


class S3Claim:
    """A lease from acquire() to release(), renewed by its own thread meanwhile."""

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
        """Check the claim before each write: raise ConflictError if it was lost, renew it if the thread did not."""
        with self._lock:
            if self._is_lost:
                raise self._taken("another process, which took over because this one had been silent for too long")
            is_old = self._clock() - self._renewed_at > 2 * RENEW_SECONDS
        if is_old:
            self._renew()

    def release(self) -> None:
        """Release the claim; one that another process has taken stays unchanged."""
        self._stopped.set()
        self._thread.join()
        if not self._is_lost:
            self._remove()

    def _remove(self) -> None:
        try:
            self._renew()  # also fails where the store ignores the condition of a deletion
            with self._connection.in_words(LOCK_NAME):
                self._connection.client.delete_object(
                    Bucket=self._connection.bucket, Key=self._connection.key(LOCK_NAME), IfMatch=self._version
                )
        except NeuroShardError as error:
            _LOG.warning(
                "The claim on %s could not be released. It expires in a few minutes: %s",
                self._connection.location,
                error,
            )

    def _renew_forever(self) -> None:
        while not self._stopped.wait(RENEW_SECONDS):
            try:
                self._renew()
            except ConflictError:
                return  # the next write reports it
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
        """Refuse stores that ignore conditions, where two populators would overwrite each other."""
        for wrong in (Condition.ABSENT, Version('"' + 32 * "0" + '"')):
            try:
                put(self._connection, LOCK_NAME, self._note(), wrong)
            except ConflictError:
                continue
            raise StorageError(
                f"The store of {self._connection.location} does not support conditional writes.",
                "Use a store that supports If-None-Match and If-Match, or write to a folder and copy it.",
            )

    def _taken(self, holder: str) -> ConflictError:
        return ConflictError(
            f"{self._connection.location} is being written by {holder}.",
            f"Wait until it finishes, or stop it. A writer killed on another computer counts as stopped after "
            f"{LEASE_SECONDS / 60:.0f} minutes.",
        )

    def _note(self) -> bytes:
        """Return a different note each time, because only then does each renewal have another version."""
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
        """Return the present claim; None when it was released meanwhile."""
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
        return {}  # the writer is unknown
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _is_dead(note: dict[str, Any]) -> bool:
    pid, started = note.get("pid"), note.get("process_started")
    if note.get("machine") != _machine() or type(pid) is not int or not isinstance(started, float):
        return False
    try:
        return abs(psutil.Process(pid).create_time() - started) > _START_TOLERANCE_SECONDS
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return True


PART_BYTES = 16 * 1024 * 1024  # most that a broken connection costs; larger objects are sent in such parts
_READ_ATTEMPTS = 3


class _BrokenBodyError(DataUnavailableError):
    """An answer that broke off, or had another checksum."""


class S3Destination:
    """A Destination whose claim is a lease, an object that is written with conditions. Versions are ETags.

    Every object, or every part of a large one, carries its SHA-256, which the store checks before it accepts it.
    """

    def __init__(self, location: str, *, endpoint: str | None = None, part_bytes: int = PART_BYTES) -> None:
        """`location` is s3://bucket/prefix; S3 requires parts of at least 5 MiB. Raises UsageError."""
        self._connection = S3Connection(location, endpoint)
        self._part_bytes = part_bytes
        self._claim: S3Claim | None = None

    @property
    def description(self) -> str:
        return self._connection.location

    def read(self, name: str, max_bytes: int) -> StoredObject | None:
        for _ in range(_READ_ATTEMPTS - 1):  # boto3 retries requests, but not bodies that break off
            try:
                return self._read_once(checked_name(name), max_bytes)
            except _BrokenBodyError as error:
                _LOG.warning("%s Retrying.", error)
        return self._read_once(checked_name(name), max_bytes)

    def write(self, name: str, content: bytes, *, expected: ExpectedVersion = Condition.ANY) -> Version:
        """Write the object, in parts when it is large. Without a claim, it takes one for this write."""
        if self._claim is None:
            with self.claim("a write"):
                return self.write(name, content, expected=expected)
        self._claim.assure()
        checked_name(name)
        if len(content) > self._part_bytes:
            return put_in_parts(self._connection, name, content, expected, part_bytes=self._part_bytes)
        return put(self._connection, name, content, expected)

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield object names, a thousand per request."""
        connection = self._connection
        page: dict[str, Any] = {}
        while True:
            with connection.in_words(prefix):
                answer = connection.client.list_objects_v2(
                    Bucket=connection.bucket, Prefix=connection.key(prefix), **page
                )
            for item in answer.get("Contents", ()):
                name = str(item["Key"])[len(connection.prefix) :]
                if not name.startswith("."):
                    yield name
            if not answer.get("IsTruncated"):
                return
            page = {"ContinuationToken": answer["NextContinuationToken"]}

    @contextmanager
    def claim(self, purpose: str) -> Generator[None]:
        """Hold the lease; parts of killed uploads are removed."""
        if self._claim is not None:
            raise ValueError("this destination holds its claim already")
        claim = S3Claim(self._connection, purpose)
        claim.acquire()
        self._claim = claim
        try:
            abort_unfinished(self._connection)
            yield
        finally:
            self._claim = None
            claim.release()

    def close(self) -> None:
        """Close connections."""
        self._connection.client.close()

    def _read_once(self, name: str, max_bytes: int) -> StoredObject | None:
        connection = self._connection
        try:
            with connection.in_words(name):
                answer = connection.client.get_object(
                    Bucket=connection.bucket, Key=connection.key(name), ChecksumMode="ENABLED"
                )
        except NoSuchObjectError:
            return None
        with closing(answer["Body"]) as body:
            size = int(answer["ContentLength"])
            if size > max_bytes:
                raise DataError(f"{self.description}/{name} has {size} bytes, at most {max_bytes} were expected.")
            try:
                with connection.in_words(name):
                    content = cast("bytes", body.read())
            except DataUnavailableError as error:
                raise _BrokenBodyError(error.message) from error
        return StoredObject(content, Version(str(answer["ETag"])))
