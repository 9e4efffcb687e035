"""Writing objects to S3: in one piece or in parts, with checksums, under a condition, and nothing half done."""

from __future__ import annotations

import logging
from base64 import b64encode
from contextlib import ExitStack, closing
from hashlib import sha256
from typing import Any, cast

from neuroshard.data.genesis.object_store import Condition, Expected, Version
from neuroshard.errors import ConflictError, NeuroShardError
from neuroshard.genesis.destination.s3_connection import NoSuchObjectError, S3Connection
from neuroshard.genesis.served_files import cache_control, content_type, is_served

_LOG = logging.getLogger(__name__)


def put(connection: S3Connection, name: str, content: bytes, expected: Expected) -> Version:
    """Write an object in one request. Raises ConflictError and what a connection raises."""
    try:
        with connection.in_words(name):
            answer = connection.client.put_object(
                **_place(connection, name),
                **_facts(name, content),
                **_checksum(content),
                **_condition(expected),
                Body=content,
            )
    except NeuroShardError as error:
        return _version_if_landed(connection, name, content, error)
    return Version(str(answer["ETag"]))


def put_in_parts(
    connection: S3Connection, name: str, content: bytes, expected: Expected, *, part_bytes: int
) -> Version:
    """Write a large object in parts of so many bytes; it appears when the last one is there, or not at all.

    Raises ConflictError and what a connection raises; the parts are then removed.
    """
    _refuse_changed(connection, name, expected)
    place = _place(connection, name)
    with connection.in_words(name):
        begun = connection.client.create_multipart_upload(**place, **_facts(name, content), ChecksumAlgorithm="SHA256")
    upload = place | {"UploadId": begun["UploadId"]}
    try:
        with ExitStack() as undo:
            undo.callback(_abort, connection, name, upload)
            parts: list[dict[str, Any]] = []
            for start in range(0, len(content), part_bytes):
                parts.append(_put_part(connection, upload, len(parts) + 1, content[start : start + part_bytes], name))
            with connection.in_words(name):
                answer = connection.client.complete_multipart_upload(
                    **upload, **_condition(expected), MultipartUpload={"Parts": parts}
                )
            undo.pop_all()
    except NeuroShardError as error:
        return _version_if_landed(connection, name, content, error)
    return Version(str(answer["ETag"]))


def abort_unfinished(connection: S3Connection) -> None:
    """Remove parts of data that a killed process left: they cost money and show up nowhere. Only under the claim."""
    page: dict[str, Any] = {}
    while True:
        with connection.in_words(""):
            answer = connection.client.list_multipart_uploads(
                Bucket=connection.bucket, Prefix=connection.prefix, **page
            )
        for item in answer.get("Uploads", ()):
            name = str(item["Key"])[len(connection.prefix) :]
            if is_served(name):  # others may keep other things in this bucket
                _abort(connection, name, _place(connection, name) | {"UploadId": item["UploadId"]})
        if not answer.get("IsTruncated"):
            return
        page = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def _place(connection: S3Connection, name: str) -> dict[str, Any]:
    return {"Bucket": connection.bucket, "Key": connection.key(name)}


def _facts(name: str, content: bytes) -> dict[str, str]:
    return {"CacheControl": cache_control(name, len(content)), "ContentType": content_type(name)}


def _checksum(content: bytes) -> dict[str, str]:
    return {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": b64encode(sha256(content).digest()).decode()}


def _condition(expected: Expected) -> dict[str, str]:
    match expected:
        case Condition.ANY:
            return {}
        case Condition.ABSENT:
            return {"IfNoneMatch": "*"}
        case _:
            return {"IfMatch": expected}


def _put_part(
    connection: S3Connection, upload: dict[str, Any], number: int, content: bytes, name: str
) -> dict[str, Any]:
    checksum = _checksum(content)
    with connection.in_words(name):
        answer = connection.client.upload_part(**upload, **checksum, PartNumber=number, Body=content)
    return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum["ChecksumSHA256"]}


def _refuse_changed(connection: S3Connection, name: str, expected: Expected) -> None:
    """Before many bytes leave in vain; the condition of the last request decides."""
    if expected is Condition.ANY:
        return
    try:
        with connection.in_words(name):
            there = connection.client.head_object(**_place(connection, name))["ETag"]
    except NoSuchObjectError:
        there = Condition.ABSENT
    if there != expected:
        raise _changed(connection, name)


def _version_if_landed(connection: S3Connection, name: str, content: bytes, error: NeuroShardError) -> Version:
    """The version of what is there, if it is this content; else raises what is wrong.

    A request whose answer was lost is repeated by boto3, and then refused because it had succeeded.
    """
    is_refused = isinstance(error, (ConflictError, NoSuchObjectError))
    response = cast("dict[str, Any]", getattr(error.__cause__, "response", {}))
    if is_refused and response.get("ResponseMetadata", {}).get("RetryAttempts"):
        version = _version_of(connection, name, content)
        if version is not None:
            return version
    if isinstance(error, NoSuchObjectError):  # what a condition names is gone
        raise _changed(connection, name) from error
    raise error


def _version_of(connection: S3Connection, name: str, content: bytes) -> Version | None:
    """None when something else is there, or nothing."""
    try:
        with connection.in_words(name):
            there = connection.client.get_object(**_place(connection, name))
            with closing(there["Body"]) as body:
                is_same = int(there["ContentLength"]) == len(content) and body.read() == content
    except NoSuchObjectError:
        return None
    return Version(str(there["ETag"])) if is_same else None


def _changed(connection: S3Connection, name: str) -> ConflictError:
    return ConflictError(
        f"{connection.location}/{name} was changed by somebody else.", "Start again to continue from what is there."
    )


def _abort(connection: S3Connection, name: str, upload: dict[str, Any]) -> None:
    try:
        with connection.in_words(name):
            connection.client.abort_multipart_upload(**upload)
    except NoSuchObjectError:
        return  # it is gone by itself
    except NeuroShardError as error:  # the first error is the one to raise
        _LOG.warning("Parts of %s/%s are left until the next run: %s", connection.location, name, error)
