"""A prefix of an S3-compatible object store as the place that a data set is published to."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

from neuroshard.data.genesis.object_store import Condition, Expected, StoredObject, Version
from neuroshard.errors import DataError, DataUnavailableError
from neuroshard.genesis.destination.protocol import checked_name
from neuroshard.genesis.destination.s3_claim import S3Claim
from neuroshard.genesis.destination.s3_connection import NoSuchObjectError, S3Connection
from neuroshard.genesis.destination.s3_upload import abort_unfinished, put, put_in_parts

PART_BYTES = 16 * 1024 * 1024  # what a broken connection costs at most; larger objects go up in such parts
_READ_ATTEMPTS = 3

_LOG = logging.getLogger(__name__)


class _BrokenBodyError(DataUnavailableError):
    """An answer that broke off, or came with another checksum."""


class S3Destination:
    """A Destination whose claim is a lease, an object that is written with conditions. Versions are ETags.

    Every object, or every part of a large one, carries its SHA-256, which the store checks before it accepts it.
    """

    def __init__(self, location: str, *, endpoint: str | None = None, part_bytes: int = PART_BYTES) -> None:
        """`location` is s3://bucket/prefix; the store wants parts of 5 MiB at least. Raises UsageError."""
        self._connection = S3Connection(location, endpoint)
        self._part_bytes = part_bytes
        self._claim: S3Claim | None = None

    @property
    def description(self) -> str:
        """The s3:// location."""
        return self._connection.location

    def read(self, name: str, max_bytes: int) -> StoredObject | None:
        """The object's content, see ObjectStore."""
        for _ in range(_READ_ATTEMPTS - 1):  # boto3 repeats requests, but not bodies that break off
            try:
                return self._read_once(checked_name(name), max_bytes)
            except _BrokenBodyError as error:
                _LOG.warning("%s Asking again.", error)
        return self._read_once(checked_name(name), max_bytes)

    def write(self, name: str, content: bytes, *, expected: Expected = Condition.ANY) -> Version:
        """Write the object, in parts when it is large, see ObjectStore. Without the claim it is held for this write."""
        if self._claim is None:
            with self.claim("a write"):
                return self.write(name, content, expected=expected)
        self._claim.assure()
        checked_name(name)
        if len(content) > self._part_bytes:
            return put_in_parts(self._connection, name, content, expected, part_bytes=self._part_bytes)
        return put(self._connection, name, content, expected)

    def names(self, prefix: str = "") -> Iterator[str]:
        """Names of the objects, a thousand a request, see Destination."""
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
        """Hold the lease, see Destination; parts of uploads that were killed are removed."""
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
