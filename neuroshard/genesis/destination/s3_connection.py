"""One bucket of an S3-compatible object store: calls of boto3, its errors in words. boto3 is loaded on first use only.

Credentials come from the environment or the AWS files, by boto3's own rules; nothing here reads or shows them.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

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
    """A bucket and a prefix in it. Calls of `client` belong into `in_words`."""

    def __init__(self, location: str, endpoint: str | None = None) -> None:
        """`location` is s3://bucket/prefix. Raises UsageError, also when boto3 is not installed."""
        self.bucket, self.prefix = split_location(location)
        self.location = location.rstrip("/")
        self.client, self._errors = _connect(self.location, endpoint)

    def key(self, name: str) -> str:
        """The bucket's name for an object of the data set."""
        return f"{self.prefix}{name}"

    @contextmanager
    def in_words(self, name: str) -> Generator[None]:
        """Turn what boto3 raises about an object into our errors."""
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
            return ConflictError(
                f"{where} was changed by somebody else.", "Start again to continue from what is there."
            )
        if code == "NoSuchBucket":
            return StorageError(f"There is no bucket {self.bucket}.", "Make it, or check its name and the endpoint.")
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
            return DataUnavailableError(f"{where}: the store does not keep up ({code or status}).", "Try again later.")
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
        return DataUnavailableError(f"{self.location}/{name} did not come through ({kind}): {error}")


def split_location(location: str) -> tuple[str, str]:
    """Bucket and prefix, "" or ending with a slash. Raises UsageError."""
    parts = urlsplit(location)
    prefix = parts.path.strip("/")
    names = prefix.split("/") if prefix else []
    is_plain = not (parts.query or parts.fragment) and all(name not in ("", ".", "..") for name in names)
    if parts.scheme != "s3" or _BUCKET.fullmatch(parts.netloc) is None or not is_plain or not prefix.isprintable():
        raise UsageError(f"{location} names no place in an object store.", "Use s3://bucket or s3://bucket/prefix.")
    return parts.netloc, f"{prefix}/" if prefix else ""


def _connect(location: str, endpoint: str | None) -> tuple[S3Client, Any]:
    """A client and the module of its errors."""
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
