"""Gets one shard into the cache and out of it: the only place where download, verification and conversion meet."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial

import anyio
import anyio.to_thread

from neuroshard.data.cache import CachedShard, ShardCache
from neuroshard.data.genesis.layout import shard_name, shard_size_limits
from neuroshard.data.genesis.manifest import DEFAULT_SHARD_TOKENS, MAX_SHARD_TOKENS
from neuroshard.data.genesis.shard_stream import ShardForm
from neuroshard.data.intake import FileRequest
from neuroshard.data.opening import Genesis
from neuroshard.data.tables import ShardTables
from neuroshard.errors import DataError, DiskFullError, UnwritableError
from neuroshard.identity.hashing import hash_parts
from neuroshard.status.data import ShardOrigin, ShardStatus, ShardUse
from neuroshard.types import ShardId

_LOG = logging.getLogger(__name__)
_UNVERIFIED_KEY_DOMAIN = "neuroshard/unverified-shard"


class UnusableShardError(DataError):
    """The source answers, but what it gives for this shard cannot be trained on."""


@dataclass
class _Gate:
    """Lets one task at a time load a shard; removed when nobody waits."""

    lock: anyio.Lock = field(default_factory=anyio.Lock)
    users: int = 0


class ShardLoader:
    """Loads shards; several tasks may ask for the same one and it comes once."""

    def __init__(self, genesis: Genesis, cache: ShardCache, *, vocabulary_size: int, give_up_after: int = 4) -> None:
        self._genesis = genesis
        self._tables = ShardTables(genesis, vocabulary_size)
        self._cache = cache
        self._give_up_after = give_up_after
        self._gates: dict[ShardId, _Gate] = {}
        self._released = anyio.Event()
        self._origins: dict[ShardId, ShardOrigin] = {}  # of shards checked since the start, while they are cached

    async def load(self, shard: ShardId, *, keep: Collection[ShardId], patient: bool = False) -> CachedShard:
        """The shard, verified, in the run's vocabulary; waits while its source or the disk can give or take nothing.

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
        """Shards of this data set in the cache, as far as the digests in memory tell."""
        return tuple(shard for shard in self._cache.shards() if self._size_of(shard) is not None)

    def standing(self, shard: ShardId, use: ShardUse) -> ShardStatus:
        """What is known of a shard; looks at memory only."""
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
        """From the cache, or fetched into it; again and again while the disk is full or cannot be written."""
        failures = 0
        name = shard_name(shard)
        while True:
            try:
                key = await self._key(shard)
                cached = await anyio.to_thread.run_sync(self._cache.get, shard, key)
                if cached is not None:
                    self._origins.setdefault(shard, ShardOrigin.EARLIER)
                return cached or await self._fetch_once(shard, key, keep, patient)
            except (DiskFullError, UnwritableError) as error:
                failures += 1
                if isinstance(error, DiskFullError):
                    await anyio.to_thread.run_sync(self._cache.release_all, {*keep, shard})
                await self._genesis.fetcher.wait(name, error, failures)
            finally:
                self._genesis.fetcher.finished(name)

    async def _fetch_once(self, shard: ShardId, key: bytes, keep: Collection[ShardId], patient: bool) -> CachedShard:
        exact = self._genesis.manifest.tokens_per_shard
        most, ids = exact or self._most_tokens(), self._tables.id_count(shard)
        request = FileRequest(
            shard_name(shard),
            least_bytes=shard_size_limits(exact or 1)[0],
            most_bytes=shard_size_limits(most)[1],
            digest=key.hex() if self._genesis.manifest.pages else None,
            give_up_after=None if patient else self._give_up_after,
            address=key.hex() if self._genesis.manifest.pages else "",
        )

        form = ShardForm(request.name, most, exact, has_digest=request.digest is not None)
        await self._reserve(shard, self._cache.file_size(most, ids), keep)
        try:
            with self._cache.writer(shard, key, ids, form) as writer:
                finish = partial(self._cache.take, shard, key, writer)
                cached = await self._genesis.fetcher.fetch_into(request, writer, finish)
        except DataError as error:
            raise UnusableShardError(f"Shard {shard} cannot be used: {error}") from error
        else:
            is_given = self._genesis.fetcher.is_from_others(request.name)
            self._origins[shard] = ShardOrigin.NODE if is_given else ShardOrigin.SOURCE
            return cached
        finally:
            self._cache.release(shard, keep)
            released, self._released = self._released, anyio.Event()
            released.set()

    async def _reserve(self, shard: ShardId, needed_bytes: int, keep: Collection[ShardId]) -> None:
        """Wait until other downloads leave room under the storage limit."""
        while True:
            released = self._released
            if await anyio.to_thread.run_sync(self._cache.reserve, shard, needed_bytes, keep):
                return
            await released.wait()

    def _most_tokens(self) -> int:
        """What a shard of a minimal manifest may hold: twice the average it claims. So much room is set aside."""
        manifest = self._genesis.manifest
        average = -(-manifest.total_tokens // manifest.total_shards)
        return min(2 * (average or DEFAULT_SHARD_TOKENS), MAX_SHARD_TOKENS)
