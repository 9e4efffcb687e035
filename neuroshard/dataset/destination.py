"""Opens the place at a location: a folder, s3://bucket/prefix, or for reading also http(s)://."""

from __future__ import annotations

from typing import Protocol
from urllib.parse import urlsplit

from neuroshard.config.folders import expanded
from neuroshard.dataset.folder_destination import FolderDestination
from neuroshard.dataset.object_store import Condition, Destination, ExpectedVersion, ObjectReader, StoredObject, Version
from neuroshard.dataset.s3_destination import S3Destination
from neuroshard.errors import DataError, UsageError


class ReadOnlyPlace(ObjectReader, Protocol):
    """A place that is only read."""

    def close(self) -> None:
        """Release connections."""
        ...


def open_destination(location: str, *, s3_endpoint: str | None = None) -> Destination:
    """Open s3://bucket/prefix or a folder for writing; `s3_endpoint` is the URL of a store other than Amazon's.

    Raises UsageError for a location that cannot be written to, and when boto3 is needed and not installed.
    """
    scheme = _scheme_of(location)
    if scheme == "s3":
        return S3Destination(location, endpoint=s3_endpoint)
    if "://" in location or scheme in ("http", "https", "file"):
        raise UsageError(f"{location} is not a place to write to.", "Name a folder, or s3://bucket/prefix.")
    return FolderDestination(expanded(location))


def open_place(location: str, *, s3_endpoint: str | None = None) -> ReadOnlyPlace:
    """Open the published data at http(s)://..., s3://bucket/prefix or in a folder for reading.

    Raises UsageError for other locations, DataError for a folder that does not exist.
    """
    if _scheme_of(location) in ("http", "https"):
        from neuroshard.dataset.http_reader import HttpReader

        return HttpReader(location)
    if "://" in location and _scheme_of(location) != "s3":
        raise UsageError(
            f"{location} is not a place to read from.", "Name a folder, https://... or s3://bucket/prefix."
        )
    place = open_destination(location, s3_endpoint=s3_endpoint)
    if isinstance(place, FolderDestination) and not expanded(location).is_dir():
        raise DataError(f"There is no Genesis folder {location}.", "Check the path.")
    return place


def _scheme_of(location: str) -> str:
    try:
        return urlsplit(location).scheme
    except ValueError as error:
        raise UsageError(f"{location} is not an address: {error}.", "Check how it is written.") from error


__all__ = [
    "Condition",
    "Destination",
    "ExpectedVersion",
    "FolderDestination",
    "ReadOnlyPlace",
    "S3Destination",
    "StoredObject",
    "Version",
    "open_destination",
    "open_place",
]
