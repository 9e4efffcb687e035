"""Objects in an S3 bucket through boto3: errors in plain words, conditional and multipart uploads, checksums.

boto3 is imported on first use only."""

from __future__ import annotations

import importlib
import logging
import os
import re
from base64 import b64encode
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing, contextmanager
from hashlib import sha256
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from neuroshard.dataset.object_store import Condition, ExpectedVersion, Version
from neuroshard.dataset.served_files import cache_control, content_type, is_served
from neuroshard.errors import ConflictError, DataUnavailableError, NeuroShardError, StorageError, UsageError

_CONNECT_SECONDS, _READ_SECONDS = 10, 30
_ATTEMPTS = 6  # with boto3's back-off in between: throttling, HTTP 5xx, broken connections
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_PERMISSIONS = (
    "The key needs s3:GetObject, s3:PutObject, s3:DeleteObject, s3:ListBucket, s3:ListBucketMultipartUploads and "
    "s3:AbortMultipartUpload here."
)
_CHANGED = frozenset({"PreconditionFailed", "412", "ConditionalRequestConflict", "409"})
_MISSING = frozenset({"NoSuchKey", "NoSuchUpload", "404", "NotFound"})
_REFUSED = frozenset({"AccessDenied", "403", "AllAccessDisabled", "Forbidden"})
_BAD_CREDENTIALS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
)
_ELSEWHERE = frozenset(
    {"PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)


class S3Client(Protocol):
    """The calls of boto3's client that are used; all take keyword arguments."""

    def get_object(self, **arguments: Any) -> dict[str, Any]:
        """An object and its body."""
        ...

    def head_object(self, **arguments: Any) -> dict[str, Any]:
        """The facts of an object."""
        ...

    def put_object(self, **arguments: Any) -> dict[str, Any]:
        """Write an object in one piece."""
        ...

    def delete_object(self, **arguments: Any) -> dict[str, Any]:
        """Remove an object."""
        ...

    def list_objects_v2(self, **arguments: Any) -> dict[str, Any]:
        """A thousand names."""
        ...

    def list_multipart_uploads(self, **arguments: Any) -> dict[str, Any]:
        """Uploads that were begun and not ended."""
        ...

    def create_multipart_upload(self, **arguments: Any) -> dict[str, Any]:
        """Begin to write an object in parts."""
        ...

    def upload_part(self, **arguments: Any) -> dict[str, Any]:
        """One part."""
        ...

    def complete_multipart_upload(self, **arguments: Any) -> dict[str, Any]:
        """The parts become the object."""
        ...

    def abort_multipart_upload(self, **arguments: Any) -> dict[str, Any]:
        """Forget the parts."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


class NoSuchObjectError(StorageError):
    """There is no object of this name, or no upload of it."""


class S3Connection:
    """A bucket and a prefix in it. Make calls of `client` inside `in_words`."""

    def __init__(self, location: str, endpoint: str | None = None) -> None:
        """`location` is s3://bucket/prefix. Raises UsageError, also when boto3 is not installed."""
        self.bucket, self.prefix = split_location(location)
        self.location = location.rstrip("/")
        self.client, self._errors = _connect(self.location, endpoint)

    def key(self, name: str) -> str:
        """Return the bucket's key for an object of the data set."""
        return f"{self.prefix}{name}"

    @contextmanager
    def in_words(self, name: str) -> Generator[None]:
        """Convert boto3's exceptions about an object to our errors."""
        try:
            yield
        except self._errors.ClientError as error:
            raise self._refused(name, error.response) from error
        except self._errors.NoCredentialsError as error:
            raise self._without_credentials() from error
        except self._errors.BotoCoreError as error:
            raise self._broken(name, error) from error

    def _refused(self, name: str, response: Mapping[str, Any]) -> NeuroShardError:
        code = str(response.get("Error", {}).get("Code", ""))
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        where = f"{self.location}/{name}"
        if code in _CHANGED:
            return ConflictError(f"Another process changed {where}.", "Start again to continue from what is there.")
        if code == "NoSuchBucket":
            return StorageError(f"There is no bucket {self.bucket}.", "Create it, or check its name and the endpoint.")
        if code in _MISSING:
            return NoSuchObjectError(f"There is no {where}.")
        if code in _BAD_CREDENTIALS:
            return UsageError(f"{self.location} does not accept the credentials ({code}).", "Check the AWS_ variables.")
        if code in _REFUSED:
            return StorageError(f"{where}: permission denied.", _PERMISSIONS)
        return self._other(where, code, status)

    def _other(self, where: str, code: str, status: int) -> NeuroShardError:
        if code in _ELSEWHERE:
            return StorageError(f"The bucket {self.bucket} is in another region.", "Set AWS_REGION to its region.")
        if status >= 500 or status == 429 or "SlowDown" in code or "Throttl" in code or "Timeout" in code:
            return DataUnavailableError(f"{where}: the store is overloaded ({code or status}).", "Try again later.")
        return StorageError(f"{where}: the store refuses with {code or status}.")

    def _without_credentials(self) -> UsageError:
        return UsageError(
            f"There are no credentials for {self.location}.",
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write them to ~/.aws/credentials.",
        )

    def _broken(self, name: str, error: Exception) -> NeuroShardError:
        kind = type(error).__name__
        if isinstance(error, (self._errors.PartialCredentialsError, self._errors.ProfileNotFound)):
            return UsageError(
                f"The credentials for {self.location} cannot be used: {error}.", "Check the AWS_ variables."
            )
        if isinstance(error, self._errors.ParamValidationError):
            return StorageError(f"{self.location}/{name}: {error}.")
        if isinstance(error, self._errors.ConnectionError):
            return DataUnavailableError(f"{self.location} cannot be reached ({kind}): {error}", "Try again later.")
        return DataUnavailableError(f"The transfer of {self.location}/{name} failed ({kind}): {error}")


def split_location(location: str) -> tuple[str, str]:
    """Return bucket and prefix, which is "" or ends with a slash. Raises UsageError."""
    parts = urlsplit(location)
    prefix = parts.path.strip("/")
    names = prefix.split("/") if prefix else []
    is_plain = not (parts.query or parts.fragment) and all(name not in ("", ".", "..") for name in names)
    if parts.scheme != "s3" or _BUCKET.fullmatch(parts.netloc) is None or not is_plain or not prefix.isprintable():
        raise UsageError(f"{location} is not a location in an object store.", "Use s3://bucket or s3://bucket/prefix.")
    return parts.netloc, f"{prefix}/" if prefix else ""


def _connect(location: str, endpoint: str | None) -> tuple[S3Client, Any]:
    """Return a client and the module of its errors."""
    try:
        boto3 = importlib.import_module("boto3")
        config = importlib.import_module("botocore.config")
        errors = importlib.import_module("botocore.exceptions")
    except ImportError as error:
        raise UsageError(f"{location} needs boto3, which is not installed.", "pip install 'neuroshard[s3]'") from error
    has_own_endpoint = endpoint is not None or any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
    settings = config.Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        s3={"addressing_style": "path" if has_own_endpoint else "auto"},  # small stores have no name for each bucket
        tcp_keepalive=True,
    )
    try:
        client = boto3.session.Session().client("s3", endpoint_url=endpoint, config=settings)
    except (ValueError, errors.BotoCoreError) as error:
        raise UsageError(
            f"{location} cannot be opened: {error}", "Check --s3-endpoint and the AWS_ variables."
        ) from error
    return cast("S3Client", client), errors


_LOG = logging.getLogger(__name__)


def put(connection: S3Connection, name: str, content: bytes, expected: ExpectedVersion) -> Version:
    """Write an object in one request. Raises ConflictError and the errors of a connection."""
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
    connection: S3Connection, name: str, content: bytes, expected: ExpectedVersion, *, part_bytes: int
) -> Version:
    """Write a large object in parts of `part_bytes`; it appears completely with the last one, or not at all.

    Raises ConflictError and the errors of a connection; the parts are then removed.
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
    """Remove a killed process's parts, which cost money and are not listed as objects. Only under the claim."""
    page: dict[str, Any] = {}
    while True:
        with connection.in_words(""):
            answer = connection.client.list_multipart_uploads(
                Bucket=connection.bucket, Prefix=connection.prefix, **page
            )
        for item in answer.get("Uploads", ()):
            name = str(item["Key"])[len(connection.prefix) :]
            if is_served(name):  # the bucket may contain other objects
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


def _condition(expected: ExpectedVersion) -> dict[str, str]:
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


def _refuse_changed(connection: S3Connection, name: str, expected: ExpectedVersion) -> None:
    """Raise ConflictError before a large upload that would fail; the condition of the last request decides."""
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
    """Return the version of the present object if it has this content; otherwise raise the error.

    boto3 repeats a request whose answer was lost, and the store then refuses it because the first one had succeeded.
    """
    is_refused = isinstance(error, (ConflictError, NoSuchObjectError))
    response = cast("dict[str, Any]", getattr(error.__cause__, "response", {}))
    if is_refused and response.get("ResponseMetadata", {}).get("RetryAttempts"):
        version = _version_of(connection, name, content)
        if version is not None:
            return version
    if isinstance(error, NoSuchObjectError):  # the object that the condition names is gone
        raise _changed(connection, name) from error
    raise error


def _version_of(connection: S3Connection, name: str, content: bytes) -> Version | None:
    """Return the object's version, or None when it has other content or does not exist."""
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
        f"Another process changed {connection.location}/{name}.", "Start again to continue from what is there."
    )


def _abort(connection: S3Connection, name: str, upload: dict[str, Any]) -> None:
    try:
        with connection.in_words(name):
            connection.client.abort_multipart_upload(**upload)
    except NoSuchObjectError:
        return  # the parts are gone already
    except NeuroShardError as error:  # the first error is the one to raise
        _LOG.warning("Parts of %s/%s are left until the next run: %s", connection.location, name, error)
