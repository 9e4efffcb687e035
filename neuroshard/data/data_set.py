"""Opens a data set: checks manifest and tokenizer against signature and pins, and loads digest pages on demand."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import anyio

from neuroshard.config.run_parameters import GenesisPins
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.manifest import (
    DIGEST_BYTES,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    MAX_PAGE_BYTES,
    PAGE_DIGESTS,
    TOKENIZER_NAME,
    UNKNOWN_SOURCE,
    DataSetManifest,
    ManifestTrust,
    archived_tokenizer_name,
    checked_page,
    page_digest,
    page_name,
    parse_manifest,
    serialise_manifest,
)
from neuroshard.data.storage import MetadataStore, manifest_copy, page_copy, tokenizer_copy
from neuroshard.data.transfer import FileRequest
from neuroshard.errors import DataError
from neuroshard.types import ShardId

_LOG = logging.getLogger(__name__)
_PAGES_IN_MEMORY = 2


class Genesis:
    """An opened data set, restricted to the shards its run pins. Holds at most two digest pages in memory."""

    def __init__(
        self, tables: TokenizerLoader, manifest: DataSetManifest, raw_manifest: bytes, tokenizer: bytes
    ) -> None:
        self.tables = tables
        self.fetcher = tables.fetcher
        self.store = tables.store  # where the descriptions of data sets are kept
        self.manifest = manifest
        self.tokenizer = tokenizer  # bytes of tokenizer.json, digest checked when the manifest names one
        self._raw_manifest = raw_manifest
        self._pages: OrderedDict[int, bytes] = OrderedDict()
        self._lock = anyio.Lock()

    @property
    def verified(self) -> bool:
        """Whether every shard is checked against a signed digest."""
        return self.manifest.is_verifiable

    @property
    def explanation(self) -> str:
        """The state of verification, in words."""
        if self.manifest.signing_key is not None:
            return f"Verified: the manifest is signed by {self.manifest.signing_key[:16]}, every shard has a digest."
        if self.manifest.pages:
            return "Unverified data: the manifest is not signed; shards are only checked for transfer errors."
        return "Unverified data: the manifest has neither a signature nor digests."

    def pins(self, next_merge_id: int) -> GenesisPins:
        """Return the pins of a new run on this data set; `next_merge_id` is that of the loaded tokenizer table."""
        return GenesisPins(
            root=self.manifest.root(),
            total_shards=self.manifest.total_shards,
            signing_key=self.manifest.signing_key,
            tokenizer_sha256=sha256(self.tokenizer).hexdigest(),
            next_merge_id=next_merge_id,
        )

    async def shard_digest(self, shard: ShardId) -> bytes | None:
        """Return the SHA-256 of a shard file, or None without digests; downloads the shard's page when needed."""
        if not self.manifest.pages:
            return None
        page, entry = divmod(shard, PAGE_DIGESTS)
        async with self._lock:
            if page not in self._pages:
                self._pages[page] = await load_page(self.fetcher, self.store, self.manifest, page)
            self._pages.move_to_end(page)
            while len(self._pages) > _PAGES_IN_MEMORY:
                self._pages.popitem(last=False)
            return self._pages[page][entry * DIGEST_BYTES : (entry + 1) * DIGEST_BYTES]

    def known_digest(self, shard: ShardId) -> bytes | None:
        """Return the SHA-256 of a shard file if its page is in memory, otherwise None."""
        page, entry = divmod(shard, PAGE_DIGESTS)
        digests = self._pages.get(page, b"")
        return digests[entry * DIGEST_BYTES : (entry + 1) * DIGEST_BYTES] or None

    async def remember(self) -> None:
        """Store manifest and tokenizer, so that the run pinned to this data set opens again without its source."""
        manifest = self.manifest
        data = serialise_manifest(manifest, None) if manifest.pages else self._raw_manifest
        self.store.keep(manifest_copy(manifest.root()), data)
        self.store.keep(tokenizer_copy(sha256(self.tokenizer).hexdigest()), self.tokenizer)


@dataclass(frozen=True)
class TokenizerLoader:
    """Loads tokenizer tables from the store, otherwise from the source under the name of their digest.

    A table stays under that name when the data set grows. A data set that was assembled by hand may have its only table
    as tokenizer.json alone.
    """

    fetcher: Fetcher
    store: MetadataStore
    most_bytes: int

    async def load(self, digest: str, give_up_after: int) -> bytes:
        """Return the table of this digest; waits while the source cannot be reached.

        Raises DataError after `give_up_after` answers from each of its places that were missing or wrong.
        """
        stored = self.store.read(tokenizer_copy(digest), digest)
        if stored is not None:
            return stored
        name = archived_tokenizer_name(digest)
        archived = FileRequest(name, 2, self.most_bytes, digest, give_up_after=min(2, give_up_after), address=digest)
        try:
            data = await self.fetcher.fetch_bytes(archived, bytes)
        except DataError as refused:
            _LOG.info("%s Looking at %s.", refused, TOKENIZER_NAME)
            current = replace(archived, name=TOKENIZER_NAME, give_up_after=give_up_after)
            try:
                data = await self.fetcher.fetch_bytes(current, bytes)
            except DataError as error:
                raise DataError(
                    f"The tokenizer of this run ({digest[:16]}) is not at {self.fetcher.source.description}: {error}",
                    "Use the source that the run was created with.",
                ) from error
        self.store.keep(tokenizer_copy(digest), data)
        return data

    async def load_unnamed(self, give_up_after: int) -> bytes:
        """Return the table of a data set whose manifest names none."""
        request = FileRequest(TOKENIZER_NAME, 2, self.most_bytes, give_up_after=give_up_after)
        return await self.fetcher.fetch_bytes(request, bytes)


async def open_genesis(
    fetcher: Fetcher,
    store: Path,
    *,
    trust: ManifestTrust = UNKNOWN_SOURCE,
    pins: GenesisPins | None = None,
    give_up_after: int = 5,
    max_tokenizer_bytes: int = 64 * 1024 * 1024,
) -> Genesis:
    """Open the data set of a source; with `pins`, exactly the part of it that the run was created with.

    `store` keeps manifest, pages and tokenizer by their digests, so that a pinned run starts without its source. Waits
    while the source cannot be reached (see `fetcher.active()`). Raises DataError after `give_up_after` answers that
    were missing or wrong, or when the data set is not the pinned one.
    """
    if pins is not None and pins.signing_key is not None:
        trust = ManifestTrust(signing_key=pins.signing_key, was_signed=True)
    copies = MetadataStore(store)
    manifest, raw = _stored_manifest(copies, pins) or (None, b"")
    if manifest is None:
        address = pins.root if pins is not None else ""
        request = FileRequest(MANIFEST_NAME, 2, MAX_MANIFEST_BYTES, give_up_after=give_up_after, address=address)
        manifest, raw = await fetcher.fetch_bytes(
            request, lambda data: (pinned_manifest(data, pins) or parse_manifest(data, trust), data)
        )
        if pins is not None:
            manifest = await pinned_part(fetcher, copies, manifest, pins)
    named = manifest.tokenizers[-1].sha256 if manifest.tokenizers else None
    digest = pins.tokenizer_sha256 if pins else named
    tables = TokenizerLoader(fetcher, copies, max_tokenizer_bytes)
    tokenizer = await (tables.load(digest, give_up_after) if digest else tables.load_unnamed(give_up_after))
    genesis = Genesis(tables, manifest, raw, tokenizer)
    await genesis.remember()
    return genesis


async def load_page(
    fetcher: Fetcher, store: MetadataStore, manifest: DataSetManifest, page: int, give_up_after: int | None = None
) -> bytes:
    """Return the digests of a page, from the store or the source, without entries added since the manifest.

    Raises DataError after `give_up_after` answers that were missing or wrong; with None it never gives up.
    """
    digest, entries = manifest.pages[page], manifest.page_entries(page)
    stored = store.read(page_copy(digest), digest)
    if stored is not None:
        return stored
    name = page_name(page)
    request = FileRequest(name, entries * DIGEST_BYTES, MAX_PAGE_BYTES, give_up_after=give_up_after, address=digest)
    data = await fetcher.fetch_bytes(request, lambda data: checked_page(data, entries, digest, name))
    store.keep(page_copy(digest), data)
    return data


class WrongDataSetError(DataError):
    """A data set that is not the one a run was created with."""


async def pinned_part(
    fetcher: Fetcher,
    store: MetadataStore,
    manifest: DataSetManifest,
    pins: GenesisPins,
    give_up_after: int | None = None,
) -> DataSetManifest:
    """Return the manifest as it was for the pinned number of shards. Raises WrongDataSetError if there is none.

    Raises DataError when a page that is needed for this is missing or wrong `give_up_after` times.
    """
    if manifest.total_shards < pins.total_shards:
        raise WrongDataSetError(
            f"The data set has {manifest.total_shards} shards, but this run was created with {pins.total_shards}.",
            "Use the source that the run was created with.",
        )
    if not manifest.pages:
        if manifest.root() != pins.root:
            _LOG.warning("The unverified manifest changed since the run was created.")
        return replace(manifest, total_shards=pins.total_shards)
    part = manifest
    if manifest.total_shards > pins.total_shards:
        part = await _cut(fetcher, store, manifest, pins.total_shards, give_up_after)
    if part.root() != pins.root:
        raise WrongDataSetError(
            "This run was created with another data set: the manifest root differs.",
            "Use the source that the run was created with.",
        )
    return part


async def _cut(
    fetcher: Fetcher, store: MetadataStore, manifest: DataSetManifest, total_shards: int, give_up_after: int | None
) -> DataSetManifest:
    """Return a manifest of the first `total_shards` shards: their last page is a prefix of the present one."""
    last = (total_shards - 1) // PAGE_DIGESTS
    whole = await load_page(fetcher, store, manifest, last, give_up_after)
    prefix = whole[: manifest.page_entries(last, total_shards) * DIGEST_BYTES]
    digest = page_digest(prefix)
    store.keep(page_copy(digest), prefix)
    return replace(
        manifest,
        total_shards=total_shards,
        total_tokens=total_shards * (manifest.tokens_per_shard or 0),
        pages=(*manifest.pages[:last], digest),
        tokenizers=manifest.tokenizers_before(total_shards),
    )


def _stored_manifest(store: MetadataStore, pins: GenesisPins | None) -> tuple[DataSetManifest, bytes] | None:
    """Return the copy stored when the run was first opened; the pinned root proves it without a signature."""
    if pins is None:
        return None
    data = store.find(manifest_copy(pins.root))
    manifest = None if data is None else pinned_manifest(data, pins)
    return None if data is None or manifest is None else (manifest, data)


def pinned_manifest(data: bytes, pins: GenesisPins | None) -> DataSetManifest | None:
    """Return the manifest if it is of exactly the pinned data: the root proves it, whatever its origin."""
    try:
        manifest = parse_manifest(data)
    except DataError:
        return None
    if pins is None or manifest.root() != pins.root or manifest.signing_key not in (None, pins.signing_key):
        return None
    return replace(manifest, signing_key=pins.signing_key)
