"""Writes and extends a Genesis folder. A reader never sees a manifest that names something not yet there."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuroshard.data.genesis.layout import (
    DIGEST_BYTES,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    archived_tokenizer_name,
    checked_page,
    page_digest,
    page_name,
    shard_name,
)
from neuroshard.data.genesis.manifest import (
    DEFAULT_SHARD_TOKENS,
    PAGE_DIGESTS,
    Manifest,
    SourceCount,
    TokenizerEntry,
    parse_manifest,
    serialise_manifest,
)
from neuroshard.data.genesis.torch_file import write_shard
from neuroshard.data.storage import write_atomically
from neuroshard.errors import DataError
from neuroshard.identity.signing import Signer
from neuroshard.types import ShardId


class GenesisWriter:
    """Adds shards to a folder; `finish` publishes them: shards are there first, then pages, then the manifest.

    Opening a folder that already has a signed manifest continues it (the data set grows); its shard size stays.
    """

    def __init__(self, folder: Path, *, tokens_per_shard: int = DEFAULT_SHARD_TOKENS) -> None:
        self._folder = folder
        self._previous = _existing_manifest(folder)
        self.tokens_per_shard = tokens_per_shard
        self._digests = bytearray()
        if self._previous is not None:
            self.tokens_per_shard = self._previous.tokens_per_shard or tokens_per_shard
            self._digests = _existing_digests(folder, self._previous)
        self._size_bytes = self._previous.total_size_bytes if self._previous else 0

    @property
    def shard_count(self) -> int:
        """Shards in the folder, those added but not yet published included."""
        return len(self._digests) // DIGEST_BYTES

    def add_shard(self, ids: NDArray[np.integer[Any]]) -> ShardId:
        """Write one shard, shape (tokens_per_shard,); `finish` publishes it."""
        if ids.shape != (self.tokens_per_shard,):
            raise ValueError(f"a shard of this folder has shape ({self.tokens_per_shard},), got {ids.shape}")
        shard = ShardId(self.shard_count)
        buffer = io.BytesIO()
        write_shard(buffer, ids)
        data = buffer.getvalue()
        self._write(shard_name(shard), data)
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
    ) -> Manifest:
        """Publish all shards added so far; `now` is a date for people, for example ISO 8601.

        Without a signer the manifest carries digests but counts as unverified. Raises DataError when there is no shard.
        """
        if not self._digests:
            raise DataError("A Genesis folder needs at least one shard.")
        previous = self._previous
        entry = TokenizerEntry(next_merge_id, sha256(tokenizer).hexdigest(), first_shard=0)
        manifest = Manifest(
            total_shards=self.shard_count,
            total_tokens=self.shard_count * self.tokens_per_shard,
            total_size_bytes=self._size_bytes,
            tokenizer_version=tokenizer_version,
            sources=dict(sources or (previous.sources if previous else {})),
            created_at=previous.created_at if previous else now,
            updated_at=now,
            tokens_per_shard=self.tokens_per_shard,
            tokenizers=_grown_tokenizers(previous, entry),
            pages=self._write_pages(),
        )
        data = serialise_manifest(manifest, signer)
        checked = parse_manifest(data)  # a manifest nobody could read is not published
        self._write(archived_tokenizer_name(entry.sha256), tokenizer)
        self._write(TOKENIZER_NAME, tokenizer)
        self._write(MANIFEST_NAME, data)
        self._previous = checked
        return checked

    def _write_pages(self) -> tuple[str, ...]:
        digests: list[str] = []
        page_bytes = PAGE_DIGESTS * DIGEST_BYTES
        for page in range(-(-self.shard_count // PAGE_DIGESTS)):
            data = bytes(self._digests[page * page_bytes : (page + 1) * page_bytes])
            digests.append(page_digest(data))
            is_unchanged = self._previous is not None and self._previous.pages[page : page + 1] == (digests[page],)
            if not is_unchanged:
                self._write(page_name(page), data)
        return tuple(digests)

    def _write(self, name: str, data: bytes) -> None:
        write_atomically(self._folder / name, data)


def _existing_manifest(folder: Path) -> Manifest | None:
    path = folder / MANIFEST_NAME
    if not path.exists():
        return None
    manifest = parse_manifest(path.read_bytes())
    if manifest.tokens_per_shard is None:
        raise DataError(f"{folder} has a manifest without digest pages and cannot be extended.", "Build a new folder.")
    return manifest


def _existing_digests(folder: Path, manifest: Manifest) -> bytearray:
    digests = bytearray()
    for page, digest in enumerate(manifest.pages):
        name = page_name(page)
        digests += checked_page((folder / name).read_bytes(), manifest.page_entries(page), digest, name)
    return digests


def _grown_tokenizers(previous: Manifest | None, entry: TokenizerEntry) -> tuple[TokenizerEntry, ...]:
    """The table of the new shards is listed when it differs from the one before."""
    if previous is None:
        return (entry,)
    newest = previous.tokenizers[-1]
    if newest.sha256 == entry.sha256:
        return previous.tokenizers
    return (*previous.tokenizers, replace(entry, first_shard=previous.total_shards))
