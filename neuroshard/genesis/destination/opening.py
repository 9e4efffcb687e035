"""From what a user types to the destination it names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from neuroshard.errors import UsageError
from neuroshard.genesis.destination.folder import FolderDestination
from neuroshard.genesis.destination.protocol import Destination


def open_destination(location: str) -> Destination:
    """The destination for a folder. Raises UsageError for a location that cannot be written to."""
    scheme = urlsplit(location).scheme
    if "://" in location or scheme in ("http", "https", "file", "s3"):
        raise UsageError(f"{location} is no place to write to.", "Name a folder.")
    return FolderDestination(Path(location).expanduser())
