"""Which files of a Genesis folder are served, and what caches on the way may do with each. Pure."""

from __future__ import annotations

import re

from neuroshard.data.genesis.layout import MAX_PAGE_BYTES

STATUS_NAME = "status"
# Only these names are ever looked up, so no path can lead out of the folder or to anything else in it.
_SERVED = re.compile(
    r"manifest\.json|tokenizer\.json|checkpoints\.json|run\.json|pages/[0-9]{5}\.bin|shard_[0-9]{1,9}\.pt"
    r"|tokenizers/[0-9a-f]{64}\.json",
    re.ASCII,
)
_IMMUTABLE = "public, max-age=31536000, immutable"
_REVALIDATED = "no-cache"  # kept, but asked for again before each use: that costs one answer without a body


def is_served(name: str) -> bool:
    """Whether a file of this name may be given to others."""
    return _SERVED.fullmatch(name) is not None


def cache_control(name: str, size: int) -> str:
    """What a cache may do with a file of so many bytes.

    Shards and archived tables never change, nor does a page that is full. The last page grows with the data set, like
    the manifest and the newest table: an old copy beside a new manifest would not match its digest.
    """
    is_full_page = name.startswith("pages/") and size == MAX_PAGE_BYTES
    never_changes = name.startswith(("shard_", "tokenizers/")) or is_full_page
    return _IMMUTABLE if never_changes else _REVALIDATED


def content_type(name: str) -> str:
    """Media type of a file."""
    return "application/json" if name.endswith(".json") else "application/octet-stream"
