"""The stream of batches of one node: resumes at the exact window, loads ahead, and waits for its source."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuroshard.data.data_set import Genesis
from neuroshard.data.entropy import unigram_entropy
from neuroshard.data.shard_assignment import (
    DEFAULT_ROTATION_RULE,
    Assignment,
    Rotation,
    RotationReason,
    RotationRule,
    held_out_count,
    held_out_shards,
    plateau_reason,
    ranges_of,
    shards_by_use,
)
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.shard_loader import ShardLoader, UnusableShardError
from neuroshard.data.windows import (
    Batch,
    TokenArray,
    gather_windows,
    held_out_window_key,
    make_batch,
    window_count,
    window_key,
    window_order,
)
from neuroshard.errors import DataError, StorageError
from neuroshard.status.data import DataStatus, ShardStatus
from neuroshard.types import DataPosition, NodeId, RunId, ShardId
from neuroshard.waiting import Signal

_LOG = logging.getLogger(__name__)
_ROTATIONS_KEPT = 1000
_MOST_UNUSABLE = 3  # consecutive missing or damaged shards that may be skipped
_SEARCH_NAME = "a usable shard"


@dataclass(frozen=True)
class _Reader:
    """A shard ready to be cut into windows."""

    shard: ShardId
    tokens: TokenArray
    order: NDArray[np.int64]  # (windows,)

    @property
    def windows(self) -> int:
        return len(self.order)


@dataclass(frozen=True)
class HeldOut:
    """The pinned sequences that no node trains on."""

    sequences: Tensor  # (count, sequence_length + 1) int64
    unigram_entropy: float  # nats per token, over all tokens of their shards


class DataFeed:
    """Provides the batches of one node in one run.

    `start` is where to resume (`Batch.position` of the last batch trained on) and `start_node` is the node that this
    position belongs to. For another node the assignment starts from its beginning, and `status().explanation` reports
    it. The run has `vocabulary_size` ids: tokens that the data set's table learned beyond them are read as their parts.
    All methods belong to the event loop's thread. `run` downloads the next shard ahead of time, but is not required.
    """

    def __init__(
        self,
        genesis: Genesis,
        cache: ShardCache,
        *,
        run_id: RunId,
        node_id: NodeId,
        sequence_length: int,
        vocabulary_size: int,
        start: DataPosition | None = None,
        start_node: NodeId | None = None,
        rule: RotationRule = DEFAULT_ROTATION_RULE,
        is_demo: bool = False,
    ) -> None:
        self._genesis = genesis
        self._cache = cache
        self._loader = ShardLoader(genesis, cache, vocabulary_size=vocabulary_size)
        self._assignment = Assignment(run_id, node_id, genesis.manifest.total_shards)
        self._sequence_length = sequence_length
        self._rule = rule
        self._is_demo = is_demo
        self._restart_reason = _restart_reason(self._assignment, start, start_node)
        is_resumed = start is not None and not self._restart_reason
        self._position = start if start is not None and is_resumed else self._place(0)
        self._readers: deque[_Reader] = deque(maxlen=2)
        self._losses: list[float] = []
        self._early_reason: RotationReason | None = None
        self._rotations: deque[Rotation] = deque(maxlen=_ROTATIONS_KEPT)
        self._rotation_count = 0
        self._step = 0
        self._held_out: HeldOut | None = None
        self._held_out_from: list[ShardId] = []
        self._next_ready = False
        self._moved = Signal()
        genesis.store.make_room = self._make_room
        cache.change_limit(cache.limit_bytes, keep={self._position.shard})  # the last limit may have been higher

    @property
    def position(self) -> DataPosition:
        """The next unread window."""
        return self._position

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """Changes of shard since this feed was created, oldest first; at most the newest 1,000."""
        return tuple(self._rotations)

    def limit_storage(self, limit_bytes: int) -> None:
        """Apply a storage limit to the cache at once; the shard in use stays."""
        if limit_bytes == self._cache.limit_bytes:
            return
        self._cache.change_limit(limit_bytes, keep={self._position.shard})
        self._look_ahead()  # the next shard may have been removed, or may fit now

    async def run(self) -> None:
        """Download the current shard and then always the next one, until cancelled."""
        while True:
            count = self._moved.count
            current, following = self._position, self._place(self._position.order + 1)
            is_loaded = await self._prefetch(current.shard, keep=set())
            is_next_loaded = is_loaded and await self._prefetch(following.shard, keep={current.shard})
            self._next_ready = is_next_loaded and count == self._moved.count  # otherwise the position has moved
            await self._moved.wait(after=count)

    async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
        """Return the next (sequences, sequence_length) batch; it may span shards. Waits while data are unavailable.

        `step` is the training step that will use it, for the record of rotations. When cancelled, nothing is consumed.
        Raises DataError when no shard of the assignment can be used, StorageError when the storage limit is too small.
        """
        if sequences < 1:
            raise ValueError(f"a batch needs at least one sequence, got {sequences}")
        self._step = self._step if step is None else step
        position = self._position
        passed: list[Rotation] = []
        if self._early_reason is not None:
            position = self._rotate(position, self._early_reason, passed)
        parts: list[TokenArray] = []
        while sequences:
            reader, position = await self._usable_reader(position, passed)
            count = min(sequences, reader.windows - position.window)
            parts.append(gather_windows(reader.tokens, reader.order, position.window, count, self._sequence_length))
            sequences -= count
            position = replace(position, window=position.window + count)
            if position.window == reader.windows:
                position = self._rotate(position, RotationReason.EXHAUSTED, passed)
        batch = make_batch(parts, position)
        self._commit(position, passed)
        return batch

    async def held_out(self, count: int = 32) -> HeldOut:
        """Return the pinned held-out sequences, equal on every node of the run; waits while data are unavailable.

        Fewer than `count` when the held-out shards have no more windows. Raises DataError when they have none.
        """
        if self._held_out is None or len(self._held_out.sequences) < count:
            self._held_out = await self._load_held_out(count)
        return HeldOut(self._held_out.sequences[:count], self._held_out.unigram_entropy)

    async def held_out_sequences(self, count: int = 32) -> Tensor:
        """Return the (count, sequence_length + 1) int64 sequences of `held_out`."""
        return (await self.held_out(count)).sequences

    def note_evaluation(self, train_loss: float, held_out_loss: float | None, step: int) -> None:
        """Record the loss of a training step (nats per token) and the held-out loss if one was measured.

        On a plateau the next batch comes from the next shard.
        """
        self._step = step
        self._losses.append(train_loss)
        del self._losses[: -self._rule.losses]
        self._early_reason = self._early_reason or plateau_reason(self._losses, held_out_loss, self._rule)

    def rewind(self, position: DataPosition) -> None:
        """Continue from an earlier position. Losses that were noted since are forgotten."""
        self._position = position
        self._losses.clear()
        self._early_reason = None
        self._look_ahead()

    def status(self) -> DataStatus:
        """Return a snapshot for the dashboard, from memory only."""
        manifest = self._genesis.manifest
        length = self._assignment.length
        downloads = self._genesis.fetcher.active()
        cached, cached_bytes = self._cache.usage()
        reader = self._reader_in_memory(self._position.shard)
        started = self._position.order + (1 if self._position.window else 0)
        waiting = [f"Waiting for {item.name}: {item.error}" for item in downloads if item.retry_at is not None]
        last = self._rotations[-1].reason.explanation if self._rotations else ""
        return DataStatus(
            source=self._genesis.fetcher.source.description,
            verified=self._genesis.verified,
            explanation=" ".join([self._genesis.explanation, *filter(None, [self._restart_reason]), *waiting]),
            is_demo=self._is_demo,
            total_shards=manifest.total_shards,
            total_tokens=manifest.total_tokens,
            held_out_shards=held_out_count(manifest.total_shards),
            shard=self._position.shard,
            shard_windows_done=self._position.window,
            shard_windows_total=reader.windows if reader else self._expected_windows(),
            passes=self._position.order // length,
            shards_seen=min(started, length),
            rotations=self._rotation_count,
            last_rotation_reason=last,
            cached_shards=cached,
            cached_bytes=cached_bytes,
            cache_limit_bytes=self._cache.limit_bytes,
            next_shard_ready=self._next_ready,
            downloads=downloads,
            shared=ranges_of(self._loader.held()) if manifest.pages else (),
            files_from_nodes=self._genesis.fetcher.files_from_others,
            shards=self._shards(),
        )

    def _shards(self) -> tuple[ShardStatus, ...]:
        uses = shards_by_use(self._assignment, self._position.order, self._held_out_from, self._loader.held())
        return tuple(self._loader.status_of(shard, use) for shard, use in uses.items())

    def _make_room(self, needed_bytes: int) -> bool:
        """Free cache space for a description of the data before it is written."""
        return self._cache.make_room(needed_bytes, keep={self._position.shard})

    def _place(self, order: int) -> DataPosition:
        return DataPosition(order, self._assignment.shard_at(order), 0)

    def _rotate(self, position: DataPosition, reason: RotationReason, passed: list[Rotation]) -> DataPosition:
        following = self._place(position.order + 1)
        passed.append(Rotation(following.shard, self._step, reason))
        return following

    def _commit(self, position: DataPosition, passed: list[Rotation]) -> None:
        # The position moves only once the batch exists, so a cancelled or failed `next_batch` consumes no
        # window.
        self._position = position
        if not passed:
            return
        self._rotations.extend(passed)
        self._rotation_count += len(passed)
        self._losses.clear()
        self._early_reason = None
        self._look_ahead()
        for rotation in passed:
            _LOG.info("Shard %d from step %d: %s.", rotation.shard, rotation.first_step, rotation.reason.explanation)

    def _look_ahead(self) -> None:
        """Wake `run` to check whether the next shard is loaded."""
        self._next_ready = False
        self._moved.notify()

    async def _usable_reader(self, position: DataPosition, passed: list[Rotation]) -> tuple[_Reader, DataPosition]:
        """Return the reader of the first usable shard at or after the position that has an unread window.

        When several shards in a row are missing or damaged, the source itself has a fault: no shard is skipped, and
        after a pause the search begins again at the position.
        """
        failures = 0
        while True:
            skipped: list[Rotation] = []
            try:
                reader, found = await self._search(position, skipped)
            except UnusableShardError as error:
                failures += 1
                await self._genesis.fetcher.wait(_SEARCH_NAME, error, failures)
            else:
                passed += skipped
                return reader, found
            finally:
                self._genesis.fetcher.finished(_SEARCH_NAME)

    async def _search(self, position: DataPosition, skipped: list[Rotation]) -> tuple[_Reader, DataPosition]:
        unusable = 0
        for _ in range(self._assignment.length + 1):
            reason = RotationReason.EXHAUSTED
            try:
                reader = await self._reader(position.shard)
                if position.window < reader.windows:
                    return reader, position
            except UnusableShardError as error:
                unusable += 1
                if unusable >= min(_MOST_UNUSABLE, self._assignment.length):
                    raise
                _LOG.warning("%s Continuing with the next shard.", error)
                reason = RotationReason.UNUSABLE
            position = self._rotate(position, reason, skipped)
        raise DataError(f"The shards of {self._genesis.fetcher.source.description} are shorter than one sequence.")

    def _reader_in_memory(self, shard: ShardId) -> _Reader | None:
        return next((reader for reader in self._readers if reader.shard == shard), None)

    async def _reader(self, shard: ShardId) -> _Reader:
        reader = self._reader_in_memory(shard)
        if reader is None:
            cached = await self._loader.load(shard, keep={shard})
            windows = window_count(len(cached.tokens), self._sequence_length)
            key = window_key(self._assignment.run_id, self._assignment.node_id, shard)
            reader = _Reader(shard, cached.tokens, window_order(key, windows))
            self._readers.append(reader)
        return reader

    async def _prefetch(self, shard: ShardId, keep: set[ShardId]) -> bool:
        try:
            await self._loader.load(shard, keep={*keep, shard})
        except (UnusableShardError, StorageError) as error:
            _LOG.info(
                "Shard %d could not be downloaded ahead of time: %s", shard, error
            )  # a later caller meets the error again
            return False
        return True

    async def _load_held_out(self, count: int) -> HeldOut:
        parts: list[TokenArray] = []
        whole: list[TokenArray] = []
        missing = count
        self._held_out_from.clear()
        for shard in held_out_shards(self._assignment.run_id, self._assignment.total_shards):
            self._held_out_from.append(shard)
            cached = await self._loader.load(shard, keep={shard, self._position.shard}, patient=True)
            windows = window_count(len(cached.tokens), self._sequence_length)
            order = window_order(held_out_window_key(self._assignment.run_id, shard), windows)
            parts.append(gather_windows(cached.tokens, order, 0, min(missing, windows), self._sequence_length))
            whole.append(cached.tokens)
            missing -= len(parts[-1])
            if not missing:
                break
        if missing == count:
            raise DataError("The held-out shards are shorter than one sequence, so learning cannot be measured.")
        rows = np.concatenate(parts).astype(np.int64)
        entropy = unigram_entropy(np.bincount(np.concatenate(whole)))
        return HeldOut(torch.from_numpy(rows), entropy)  # pyright: ignore[reportUnknownMemberType]

    def _expected_windows(self) -> int:
        return window_count(self._genesis.manifest.tokens_per_shard or 0, self._sequence_length)


def _restart_reason(assignment: Assignment, start: DataPosition | None, start_node: NodeId | None) -> str | None:
    """Return why a stored position does not belong to this assignment, or None."""
    if start is None:
        return None
    if start_node is not None and start_node != assignment.node_id:
        return "The data position belongs to another node, so the assignment starts again from its beginning."
    if start.order < 0 or start.window < 0 or assignment.shard_at(start.order) != start.shard:
        return "The data position does not fit this node and run, so the assignment starts again from its beginning."
    return None
