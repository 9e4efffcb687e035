"""From what a user types to the destination it names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from neuroshard.errors import UsageError
from neuroshard.genesis.destination.folder import FolderDestination
from neuroshard.genesis.destination.protocol import Destination
from neuroshard.genesis.destination.s3 import S3Destination


def open_destination(location: str, *, s3_endpoint: str | None = None) -> Destination:
    """The destination for s3://bucket/prefix or a folder; `s3_endpoint` is the URL of a store other than Amazon's.

    Raises UsageError for a location that cannot be written to, and where boto3 is needed and missing.
    """
    scheme = urlsplit(location).scheme
    if scheme == "s3":
        return S3Destination(location, endpoint=s3_endpoint)
    if "://" in location or scheme in ("http", "https", "file"):
        raise UsageError(f"{location} is no place to write to.", "Name a folder, or s3://bucket/prefix.")
    return FolderDestination(Path(location).expanduser())
