"""Writes and extends a data set. A manifest never names a file that is not yet in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from neuroshard.data.manifest import (
    DEFAULT_SHARD_TOKENS,
    DIGEST_BYTES,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    MAX_PAGE_BYTES,
    TOKENIZER_NAME,
    DataSetManifest,
    SourceCount,
    TokenizerEntry,
    archived_tokenizer_name,
    checked_page,
    page_digest,
    page_name,
    parse_manifest,
    serialise_manifest,
)
from neuroshard.data.shard_file import ShardFormat, shard_bytes
from neuroshard.dataset.object_store import MAX_OBJECT_BYTES, Condition, ObjectStore, Version, put_current, put_once
from neuroshard.errors import ConflictError, DataError
from neuroshard.identity.signing import Signer
from neuroshard.types import ShardId


@dataclass(frozen=True)
class Unpublished:
    """The shards that an interrupted writer left: the newest ones of `total_shards`, by their SHA-256."""

    total_shards: int = 0
    digests: tuple[bytes, ...] = ()
    total_size_bytes: int = 0  # of all shards

    def after(self, published_shards: int) -> tuple[bytes, ...]:
        """Return the digests of the shards that no manifest names. Raises DataError when some are not known."""
        first = self.total_shards - len(self.digests)
        if self.total_shards and not first <= published_shards <= self.total_shards:
            raise DataError(
                f"The manifest names {published_shards} shards, the populator's checkpoints {self.total_shards}.",
                "Restore the newest of both files.",
            )
        return self.digests[published_shards - first :] if self.total_shards else ()


class GenesisWriter:
    """Adds shards to a data set; `finish` publishes them: shards are there first, then pages, then the manifest.

    Opening a place that has a manifest continues it: the size and the format of its shards stay. `finish` may be called
    again after more shards. Two writers on one place: the second to publish gets a ConflictError and changes nothing
    that a manifest names; with the destination's claim it fails sooner.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        tokens_per_shard: int = DEFAULT_SHARD_TOKENS,
        shard_format: ShardFormat = "bin",
        unpublished: Unpublished = Unpublished(),
    ) -> None:
        """Raises DataError when `unpublished` does not match the published data set."""
        self._store = store
        self._previous, self._manifest_version = _existing_manifest(store)
        self.tokens_per_shard = tokens_per_shard
        self.shard_format: ShardFormat = shard_format
        self._digests = bytearray()
        if self._previous is not None:
            self.shard_format = self._previous.shard_format
            self.tokens_per_shard = self._previous.tokens_per_shard or tokens_per_shard
            self._digests = _existing_digests(store, self._previous)
        self._size_bytes = self._previous.total_size_bytes if self._previous else 0
        left = unpublished.after(self.shard_count)
        if left:
            self._digests += b"".join(left)
            self._size_bytes = unpublished.total_size_bytes

    @property
    def published(self) -> DataSetManifest | None:
        """The manifest that readers see now."""
        return self._previous

    @property
    def shard_count(self) -> int:
        """Number of shards, including those not yet published."""
        return len(self._digests) // DIGEST_BYTES

    @property
    def size_bytes(self) -> int:
        """Size of all shards in bytes, including those not yet published."""
        return self._size_bytes

    def digest(self, shard: ShardId) -> bytes:
        """Return the SHA-256 of a shard's file."""
        return bytes(self._digests[shard * DIGEST_BYTES : (shard + 1) * DIGEST_BYTES])

    def add_shard(self, ids: NDArray[np.integer[Any]]) -> ShardId:
        """Write one shard, shape (tokens_per_shard,); `finish` publishes it."""
        if ids.shape != (self.tokens_per_shard,):
            raise ValueError(f"a shard of this data set has shape ({self.tokens_per_shard},), got {ids.shape}")
        shard = ShardId(self.shard_count)
        data = shard_bytes(ids, self.shard_format)
        put_once(self._store, f"shard_{shard}.{self.shard_format}", data)
        self._digests += sha256(data).digest()
        self._size_bytes += len(data)
        return shard

    def finish(
        self,
        signer: Signer | None,
        *,
        tokenizer: bytes,
        next_merge_id: int,
        now: str,
        tokenizer_version: str = "",
        sources: Mapping[str, SourceCount] | None = None,
    ) -> DataSetManifest:
        """Publish all shards added so far; `now` is a date for people, for example ISO 8601.

        Without a signer the manifest carries digests but counts as unverified. Raises DataError when there is no shard
        or what is published was signed by another key, ConflictError when another writer published meanwhile.
        """
        if not self._digests:
            raise DataError("A Genesis data set needs at least one shard.")
        previous = self._previous
        _refuse_other_key(previous, signer)
        entry = TokenizerEntry(next_merge_id, sha256(tokenizer).hexdigest(), first_shard=0)
        manifest = DataSetManifest(
            total_shards=self.shard_count,
            total_tokens=self.shard_count * self.tokens_per_shard,
            total_size_bytes=self._size_bytes,
            shard_format=self.shard_format,
            tokenizer_version=tokenizer_version,
            sources=dict(sources or (previous.sources if previous else {})),
            created_at=previous.created_at if previous else now,
            updated_at=now,
            tokens_per_shard=self.tokens_per_shard,
            tokenizers=_grown_tokenizers(previous, entry),
            pages=tuple(page_digest(page) for page in self._pages()),
        )
        data = serialise_manifest(manifest, signer)
        checked = parse_manifest(data)  # never publish a manifest that cannot be parsed
        self._refuse_other_publication()
        self._write_pages(previous)
        if previous is None or previous.tokenizers != manifest.tokenizers:
            put_once(self._store, archived_tokenizer_name(entry.sha256), tokenizer)
            put_current(self._store, TOKENIZER_NAME, tokenizer, max_bytes=MAX_OBJECT_BYTES)
        self._manifest_version = self._store.write(MANIFEST_NAME, data, expected=self._manifest_version)
        self._previous = checked
        return checked

    def _pages(self) -> list[bytes]:
        digests = bytes(self._digests)
        return [digests[start : start + MAX_PAGE_BYTES] for start in range(0, len(digests), MAX_PAGE_BYTES)]

    def _write_pages(self, previous: DataSetManifest | None) -> None:
        """Write the changed pages: pages only grow at the end, so the previous manifest still finds its digests."""
        known = previous.pages if previous is not None else ()
        for number, page in enumerate(self._pages()):
            if known[number : number + 1] != (page_digest(page),):
                put_current(self._store, page_name(number), page, max_bytes=MAX_PAGE_BYTES)

    def _refuse_other_publication(self) -> None:
        """Check before the first page changes; the conditional write of the manifest decides finally."""
        there = self._store.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)
        if (Condition.ABSENT if there is None else there.version) != self._manifest_version:
            raise ConflictError(
                f"Another process published to {self._store.description} in the meantime.",
                "Start again to continue from there.",
            )


def _existing_manifest(store: ObjectStore) -> tuple[DataSetManifest | None, Version | Condition]:
    there = store.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)
    if there is None:
        return None, Condition.ABSENT
    manifest = parse_manifest(there.content)
    if manifest.tokens_per_shard is None:
        raise DataError(
            f"{store.description} has a manifest without digest pages and cannot be extended.", "Name another location."
        )
    return manifest, there.version


def _existing_digests(store: ObjectStore, manifest: DataSetManifest) -> bytearray:
    digests = bytearray()
    for page, digest in enumerate(manifest.pages):
        name = page_name(page)
        there = store.read(name, MAX_PAGE_BYTES)
        if there is None:
            raise DataError(f"{store.description} has a manifest that names {name}, which is missing.")
        digests += checked_page(there.content, manifest.page_entries(page), digest, name)
    return digests


def _refuse_other_key(previous: DataSetManifest | None, signer: Signer | None) -> None:
    """Refuse another key, because nodes that trust the first key would refuse the data set."""
    if previous is None or previous.signing_key is None:
        return
    if signer is None or signer.public_key.hex() != previous.signing_key:
        raise DataError(
            f"The data set is signed by {previous.signing_key[:16]} and can be extended with that key only.",
            "Use the wallet that created it, or name another location.",
        )


def _grown_tokenizers(previous: DataSetManifest | None, entry: TokenizerEntry) -> tuple[TokenizerEntry, ...]:
    """List the table of the new shards when it differs from the previous one."""
    if previous is None:
        return (entry,)
    newest = previous.tokenizers[-1]
    if newest.sha256 == entry.sha256:
        return previous.tokenizers
    return (*previous.tokenizers, structs.replace(entry, first_shard=previous.total_shards))
