"""Names and sizes of the files in a Genesis folder, and the digests in its pages."""

from __future__ import annotations

from hashlib import sha256

from neuroshard.data.genesis.manifest import PAGE_DIGESTS
from neuroshard.data.genesis.torch_file import MAX_CONTAINER_BYTES
from neuroshard.errors import DataError
from neuroshard.types import ShardId

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
CHECKPOINTS_NAME = "checkpoints.json"  # of a populator
DIGEST_BYTES = 32
MAX_PAGE_BYTES = PAGE_DIGESTS * DIGEST_BYTES


def shard_name(shard: ShardId) -> str:
    """File of a shard."""
    return f"shard_{shard}.pt"


def page_name(page: int) -> str:
    """File with the digests of shards page * 4096 and following."""
    return f"pages/{page:05d}.bin"


def archived_tokenizer_name(digest: str) -> str:
    """Where a table stays after the data set's tokenizer grew, for runs that pinned it."""
    return f"tokenizers/{digest}.json"


def shard_size_limits(tokens: int) -> tuple[int, int]:
    """Fewest and most bytes a file of so many tokens can have."""
    return tokens * 8, tokens * 8 + MAX_CONTAINER_BYTES


def checked_page(data: bytes, entries: int, digest: str, name: str) -> bytes:
    """The first `entries` digests of a page; what the data set grew by since is cut off.

    Raises DataError when the page is too short or too long, or when those digests do not hash to `digest`.
    """
    wanted = entries * DIGEST_BYTES
    if not wanted <= len(data) <= MAX_PAGE_BYTES or len(data) % DIGEST_BYTES:
        raise DataError(f"{name} has {len(data)} bytes, expected at least {wanted} and at most {MAX_PAGE_BYTES}.")
    prefix = data[:wanted]
    if sha256(prefix).hexdigest() != digest:
        raise DataError(f"{name} does not match its digest in the signed manifest.")
    return prefix


def page_digest(data: bytes) -> str:
    """SHA-256 of a page, as the manifest names it."""
    return sha256(data).hexdigest()
