"""Loads a shard: download, verification, conversion to the run's vocabulary, and the cache.

A data set's tokenizer table may grow after a run was created. The loader replaces each token that the run does not
know by its parts."""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from neuroshard.data.data_set import Genesis
from neuroshard.data.manifest import DEFAULT_SHARD_TOKENS, MAX_SHARD_TOKENS, TokenizerEntry
from neuroshard.data.shard_cache import CachedShard, ShardCache
from neuroshard.data.shard_file import ShardForm, TokenArray
from neuroshard.data.tokenizer.table import FIRST_MERGE_ID, TokenizerTable
from neuroshard.data.transfer import FileRequest
from neuroshard.errors import DataError, DiskFullError, UnwritableError
from neuroshard.identity.signing import hash_parts
from neuroshard.status.data import ShardOrigin, ShardStatus, ShardUse
from neuroshard.types import ShardId
from neuroshard.waiting import Signal

MAX_PARTS = 1 << 24  # of all merges of a table together: 64 MB
_CHUNK_TOKENS = 1 << 17  # bounds the memory of intermediate results
Tokens: TypeAlias = "NDArray[np.integer[Any]]"


class TokenExpansion:
    """Splits every id at or above `vocabulary_size` repeatedly until only lower ids remain.

    The text stays the same, in more tokens, which depend on the table and the vocabulary alone. Raises DataError when
    the parts of all merges would fill the memory.
    """

    def __init__(self, table: TokenizerTable, vocabulary_size: int) -> None:
        if vocabulary_size < FIRST_MERGE_ID:
            raise ValueError(f"a vocabulary has at least {FIRST_MERGE_ID} ids, got {vocabulary_size}")
        beyond = table.merges[vocabulary_size - FIRST_MERGE_ID :]
        counts = array("q", [1]) * vocabulary_size
        for first, second in beyond:
            counts.append(counts[first] + counts[second])
        self._counts = np.frombuffer(counts, dtype=np.int64)  # (ids,) lower ids that each id becomes
        self._starts = np.cumsum(self._counts) - self._counts  # (ids,) where they begin in the parts
        total = int(self._starts[-1] + self._counts[-1])
        if total > MAX_PARTS:
            raise DataError(
                f"The tokenizer table cannot be read with a vocabulary of {vocabulary_size:,} ids: its merges have "
                f"{total:,} parts, at most {MAX_PARTS:,} are accepted.",
                "Create a run with a larger vocabulary.",
            )
        self._parts = _parts_of(beyond, self._starts, self._counts, vocabulary_size)

    def expand(self, tokens: Tokens, most_tokens: int) -> Tokens:
        """Convert (n,) ids of the table to (m,) ids below the vocabulary size, m >= n.

        Raises DataError when m would exceed `most_tokens`; the caller must have checked the ids.
        """
        pieces = [tokens[start : start + _CHUNK_TOKENS] for start in range(0, len(tokens), _CHUNK_TOKENS)]
        total = sum(int(self._counts[piece].sum()) for piece in pieces)
        if total > most_tokens:
            raise DataError(
                f"A shard would have {total:,} tokens in the run's vocabulary, at most {most_tokens:,} fit."
            )
        expanded = np.empty(total, dtype=self._parts.dtype)
        filled = 0
        for piece in pieces:
            counts = self._counts[piece]
            ends = np.cumsum(counts)
            shifts = np.repeat(self._starts[piece] - (ends - counts), counts)
            places: NDArray[np.int64] = np.arange(len(shifts), dtype=np.int64) + shifts
            expanded[filled : filled + len(places)] = self._parts[places]
            filled += len(places)
        return expanded


def _parts_of(
    beyond: tuple[tuple[int, int], ...], starts: NDArray[np.int64], counts: NDArray[np.int64], vocabulary_size: int
) -> Tokens:
    """Return the parts of all ids, concatenated; an id of the vocabulary is its own part."""
    parts = array("I", range(vocabulary_size))
    begins, lengths = starts.tolist(), counts.tolist()
    for first, second in beyond:
        parts += parts[begins[first] : begins[first] + lengths[first]]
        parts += parts[begins[second] : begins[second] + lengths[second]]
    return np.array(parts, dtype=np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)


_EXPANSIONS_IN_MEMORY = 2
_REFUSALS = 2  # of each place that may have a table


class VocabularyMapper:
    """Reads shards with the first `vocabulary_size` ids of the run's table, whichever table made them.

    A table that grew has the merges of the smaller one first, so a shard of either means the same text. Without a list
    of tables in the manifest there is only one, and the run's vocabulary covers it.
    """

    def __init__(self, genesis: Genesis, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size
        self._genesis = genesis
        self._expansions: OrderedDict[str, TokenExpansion] = OrderedDict()  # by the table's digest
        self._lock = anyio.Lock()

    def id_count(self, shard: ShardId) -> int:
        """Return the number of ids of the shard's table; ids in its file are lower."""
        entry = self._genesis.manifest.tokenizer_of(shard)
        return self.vocabulary_size if entry is None else entry.next_merge_id

    async def in_vocabulary(self, shard: ShardId, tokens: TokenArray, largest: int) -> TokenArray:
        """Return a shard's (n,) tokens, split into more tokens if `largest`, the largest id, is not in the run.

        Raises DataError when the shard has ids that its table does not have, or when that table does not continue the
        run's; FileMissingError and other errors of the fetcher when the table cannot be downloaded.
        """
        if largest >= self.id_count(shard):
            raise DataError(
                f"Shard {shard} has the token id {largest}, outside its vocabulary of {self.id_count(shard)}."
            )
        if largest < self.vocabulary_size:
            return tokens
        entry = self._genesis.manifest.tokenizer_of(shard)
        if entry is None:
            raise AssertionError("without a list of tables all ids are of the run")
        expansion = await self._expansion(entry)
        return await anyio.to_thread.run_sync(expansion.expand, tokens, MAX_SHARD_TOKENS)

    async def _expansion(self, entry: TokenizerEntry) -> TokenExpansion:
        async with self._lock:
            if entry.sha256 not in self._expansions:
                data = await self._genesis.tables.load(entry.sha256, _REFUSALS)
                expansion = await anyio.to_thread.run_sync(self._read, data, entry)
                self._expansions[entry.sha256] = expansion
            self._expansions.move_to_end(entry.sha256)
            while len(self._expansions) > _EXPANSIONS_IN_MEMORY:
                self._expansions.popitem(last=False)
            return self._expansions[entry.sha256]

    def _read(self, data: bytes, entry: TokenizerEntry) -> TokenExpansion:
        table = TokenizerTable.load(data, len(data))
        if table.next_merge_id != entry.next_merge_id:
            raise DataError(
                f"The tokenizer {entry.sha256[:16]} has {table.next_merge_id} ids, "
                f"the manifest says {entry.next_merge_id}."
            )
        if data != self._genesis.tokenizer:
            known = self.vocabulary_size - FIRST_MERGE_ID
            if TokenizerTable.load(self._genesis.tokenizer).merges[:known] != table.merges[:known]:
                raise DataError(f"The tokenizer {entry.sha256[:16]} does not continue the one of this run.")
        return TokenExpansion(table, self.vocabulary_size)


_LOG = logging.getLogger(__name__)
_UNVERIFIED_KEY_DOMAIN = "neuroshard/unverified-shard"


class UnusableShardError(DataError):
    """The source answers, but the file that it sends for this shard cannot be used for training."""


@dataclass
class _Gate:
    """Lets one task at a time load a shard; removed when no task waits."""

    lock: anyio.Lock = field(default_factory=anyio.Lock)
    users: int = 0


class ShardLoader:
    """Loads shards; when several tasks request the same shard, it is downloaded once."""

    def __init__(self, genesis: Genesis, cache: ShardCache, *, vocabulary_size: int, give_up_after: int = 4) -> None:
        self._genesis = genesis
        self._tables = VocabularyMapper(genesis, vocabulary_size)
        self._cache = cache
        self._give_up_after = give_up_after
        self._gates: dict[ShardId, _Gate] = {}
        self._released = Signal()
        self._origins: dict[ShardId, ShardOrigin] = {}  # of shards checked since the start, while they are cached

    async def load(self, shard: ShardId, *, keep: Collection[ShardId], patient: bool = False) -> CachedShard:
        """Return the verified shard in the run's vocabulary; waits while its source or the disk is unavailable.

        `keep` are shards in use, which the cache must not remove. Raises UnusableShardError after several answers that
        were missing or wrong (never when `patient`), and StorageError when the storage limit is too small.
        """
        gate = self._gates.setdefault(shard, _Gate())
        gate.users += 1
        try:
            async with gate.lock:
                return await self._readable(await self._obtained(shard, keep, patient))
        finally:
            gate.users -= 1
            if not gate.users:
                self._gates.pop(shard, None)

    def held(self) -> tuple[ShardId, ...]:
        """Return this data set's shards in the cache that the digests in memory identify."""
        return tuple(shard for shard in self._cache.shards() if self._size_of(shard) is not None)

    def status_of(self, shard: ShardId, use: ShardUse) -> ShardStatus:
        """Return the status of a shard, from memory only."""
        size = self._size_of(shard)
        if size is None:
            self._origins.pop(shard, None)
        origin = self._origins.get(shard)
        return ShardStatus(shard, use, size, origin, verified=origin is not None and self._genesis.verified)

    def _size_of(self, shard: ShardId) -> int | None:
        if shard >= self._genesis.manifest.total_shards:
            return None
        is_named = bool(self._genesis.manifest.pages)
        key = self._genesis.known_digest(shard) if is_named else self._unverified_key(shard)
        return None if key is None else self._cache.size_of(shard, key)

    async def _key(self, shard: ShardId) -> bytes:
        return await self._genesis.shard_digest(shard) or self._unverified_key(shard)

    def _unverified_key(self, shard: ShardId) -> bytes:
        return hash_parts(_UNVERIFIED_KEY_DOMAIN, self._genesis.fetcher.source.description, shard)

    async def _readable(self, cached: CachedShard) -> CachedShard:
        try:
            tokens = await self._tables.in_vocabulary(cached.shard, cached.tokens, cached.largest)
        except DataError as error:
            raise UnusableShardError(f"Shard {cached.shard} cannot be used: {error}") from error
        return replace(cached, tokens=tokens)

    async def _obtained(self, shard: ShardId, keep: Collection[ShardId], patient: bool) -> CachedShard:
        """Return the shard from the cache or download it; retries while the disk is full or cannot be written."""
        failures = 0
        name = self._genesis.manifest.shard_name(shard)
        while True:
            try:
                key = await self._key(shard)
                form = self._form(shard)
                cached = await anyio.to_thread.run_sync(self._cache.get, shard, key, form)
                if cached is not None:
                    self._origins.setdefault(shard, ShardOrigin.EARLIER)
                return cached or await self._fetch_once(shard, key, form, keep, patient)
            except (DiskFullError, UnwritableError) as error:
                failures += 1
                if isinstance(error, DiskFullError):
                    await anyio.to_thread.run_sync(self._cache.release_all, {*keep, shard})
                await self._genesis.fetcher.wait(name, error, failures)
            finally:
                self._genesis.fetcher.finished(name)

    async def _fetch_once(
        self, shard: ShardId, key: bytes, form: ShardForm, keep: Collection[ShardId], patient: bool
    ) -> CachedShard:
        least, most = form.size_limits
        request = FileRequest(
            form.name,
            least_bytes=least,
            most_bytes=most,
            digest=key.hex() if form.has_digest else None,
            give_up_after=None if patient else self._give_up_after,
            address=key.hex() if form.has_digest else "",
        )
        await self._reserve(shard, most, keep)
        try:
            with self._cache.writer(shard, key) as writer:
                finish = partial(self._cache.take, shard, key, form, writer)
                cached = await self._genesis.fetcher.fetch_into(request, writer, finish)
        except DataError as error:
            raise UnusableShardError(f"Shard {shard} cannot be used: {error}") from error
        else:
            is_given = self._genesis.fetcher.is_from_others(request.name)
            self._origins[shard] = ShardOrigin.NODE if is_given else ShardOrigin.SOURCE
            return cached
        finally:
            self._cache.release(shard, keep)
            self._released.notify()

    async def _reserve(self, shard: ShardId, needed_bytes: int, keep: Collection[ShardId]) -> None:
        """Wait until other downloads leave space under the storage limit."""
        while True:
            count = self._released.count
            if await anyio.to_thread.run_sync(self._cache.reserve, shard, needed_bytes, keep):
                return
            await self._released.wait(after=count)

    def _form(self, shard: ShardId) -> ShardForm:
        """Return the form of a shard's file. A minimal manifest has few facts: allow twice the average size."""
        manifest = self._genesis.manifest
        if manifest.tokens_per_shard is not None:
            return manifest.shard_form(shard)
        average = -(-manifest.total_tokens // manifest.total_shards)
        most = min(2 * (average or DEFAULT_SHARD_TOKENS), MAX_SHARD_TOKENS)
        return ShardForm(manifest.shard_name(shard), manifest.shard_format, most, self._tables.id_count(shard))
