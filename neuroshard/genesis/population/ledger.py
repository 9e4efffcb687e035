"""What a populator has written, and writing more of it in an order in which a kill does no harm.

A shard is there before checkpoints.json tells of it, that before pages and manifest do. Nothing that a manifest once
named is written again, and whoever reads sees the manifest before or after, never one that names a missing shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

from neuroshard.data.genesis.layout import CHECKPOINTS_NAME, MANIFEST_NAME, archived_tokenizer_name
from neuroshard.data.genesis.manifest import MAX_MANIFEST_BYTES, SourceCount
from neuroshard.data.genesis.object_store import Condition, Expected, put_once
from neuroshard.data.genesis.writer import GenesisWriter, Unpublished
from neuroshard.data.tokenizer import TokenizerTable
from neuroshard.data.tokenizer.table import DEFAULT_MAX_FILE_BYTES
from neuroshard.errors import DataError
from neuroshard.genesis.destination import Destination
from neuroshard.genesis.packing import MIN_SHARDS
from neuroshard.genesis.population.checkpoints import (
    MAX_CHECKPOINTS_BYTES,
    Checkpoints,
    SourceCheckpoint,
    parse_checkpoints,
)
from neuroshard.genesis.population.packer import PackedShard
from neuroshard.genesis.sources.configuration import SourceConfiguration
from neuroshard.identity.signing import Signer

_OTHERWISE_BUILT = "Name a new folder; this one was not made by `genesis build --config`."


class Ledger:
    """The state of one data set at its destination. All under the destination's claim."""

    def __init__(self, destination: Destination, signer: Signer, clock: Callable[[], str]) -> None:
        """Read what is there; `clock` gives ISO 8601 dates. Raises DataError for what no populator left behind."""
        self._destination = destination
        self._signer = signer
        self._clock = clock
        self._writer: GenesisWriter | None = None
        self._table_json = b""
        self._written = b""
        self._now: Checkpoints | None = None
        self._version: Expected = Condition.ABSENT
        there = destination.read(CHECKPOINTS_NAME, MAX_CHECKPOINTS_BYTES)
        if there is not None:
            self._version = there.version
            self._written = there.content
            self._now = parse_checkpoints(there.content)
        elif destination.read(MANIFEST_NAME, MAX_MANIFEST_BYTES) is not None:
            raise DataError(f"{destination.description} has a manifest but no {CHECKPOINTS_NAME}.", _OTHERWISE_BUILT)

    @property
    def checkpoints(self) -> Checkpoints:
        """Where all sources stand. There must be a table."""
        if self._now is None:
            raise ValueError("there is no table yet")
        return self._now

    def asked_merges(self) -> dict[str, int]:
        """Merges that each source was asked for when the table was learned."""
        return {name: source.merges for name, source in self._now.sources.items()} if self._now else {}

    def load_table(self) -> TokenizerTable | None:
        """The newest table; None before there is one. Raises DataError when it is missing or damaged."""
        if self._now is None:
            return None
        name = archived_tokenizer_name(self._now.tokenizer_sha256)
        there = self._destination.read(name, DEFAULT_MAX_FILE_BYTES)
        if there is None:
            raise DataError(f"{name} is missing in {self._destination.description}.", "Restore it from a copy.")
        if sha256(there.content).hexdigest() != self._now.tokenizer_sha256:
            raise DataError(f"{name} in {self._destination.description} is damaged.", "Restore it from a copy.")
        self._table_json = there.content
        return TokenizerTable.load(there.content)

    def take_sources(self, sources: Sequence[SourceConfiguration]) -> None:
        """Compare with what was read before. Raises DataError when a name now stands for another source."""
        for source in sources:
            known = self._now.sources.get(source.name) if self._now else None
            if known is not None and known.origin != source.origin:
                raise DataError(
                    f"Source {source.name!r} was {known.origin} when its shards were made and is {source.origin} now.",
                    "Give the new source a name of its own.",
                )

    def take_table(
        self, table: TokenizerTable, merges: Mapping[str, int], sources: Sequence[SourceConfiguration]
    ) -> None:
        """The table of all further shards, for which each source was asked for so many merges."""
        known = self._now or Checkpoints(table.sha256, table.next_merge_id)
        asked = self.asked_merges()
        taken = dict(known.sources)
        for source in sources:
            most = max(merges.get(source.name, 0), asked.get(source.name, 0))
            entry = taken.get(source.name) or SourceCheckpoint(source.origin, source.target_shards)
            taken[source.name] = replace(entry, target_shards=source.target_shards, merges=most)
        digest = known.tokenizer_sha256
        if table.next_merge_id != known.next_merge_id or not self._table_json:
            self._table_json = table.to_json()
            digest = table.sha256
            put_once(self._destination, archived_tokenizer_name(digest), self._table_json)
        self._now = replace(
            known, tokenizer_sha256=digest, next_merge_id=table.next_merge_id, sources=taken
        )  # fmt: skip
        self._save()

    def open_writer(self, tokens_per_shard: int) -> None:
        """Go on with shards of this size; from the first one on it never changes."""
        now = self.checkpoints
        self._now = replace(now, tokens_per_shard=tokens_per_shard)
        unpublished = Unpublished(now.total_shards, now.unpublished, now.total_size_bytes)
        self._writer = GenesisWriter(self._destination, tokens_per_shard=tokens_per_shard, unpublished=unpublished)

    def add_shard(self, source: str, packed: PackedShard) -> None:
        """Write one shard and where its source stands after it."""
        writer, now = self._open(), self.checkpoints
        shard = writer.add_shard(packed.ids)
        before = now.sources[source]
        after = replace(
            before,
            mark=packed.mark,
            leftover=packed.leftover,
            shards=before.shards + 1,
            last_shard_id=shard,
            timestamp=max(before.timestamp, self._clock()),  # a clock that went back must not show
        )
        self._now = replace(
            now,
            total_shards=writer.shard_count,
            total_size_bytes=writer.size_bytes,
            unpublished=(*now.unpublished, writer.digest(shard)),
            sources={**now.sources, source: after},
        )
        self._save()

    def publish(self) -> bool:
        """Tell readers of all shards; False when there is nothing to tell, or fewer than any data set has."""
        now = self.checkpoints
        if now.tokens_per_shard is None or now.total_shards < MIN_SHARDS:
            return False
        writer = self._open()
        published = writer.published
        if published is None or published.total_shards < now.total_shards:
            size = now.tokens_per_shard
            sources = {
                name: SourceCount(item.shards, item.shards * size, item.mark.documents, item.last_shard_id)
                for name, item in sorted(now.sources.items())
            }
            tables = published.tokenizers if published else ()
            is_new = not tables or tables[-1].sha256 != now.tokenizer_sha256
            writer.finish(
                self._signer,
                tokenizer_version=str(len(tables) + is_new),
                tokenizer=self._table_json,
                next_merge_id=now.next_merge_id,
                now=max(published.updated_at if published else "", self._clock()),
                sources=sources,
            )
        self._now = replace(now, unpublished=())
        self._save()
        return True

    def _open(self) -> GenesisWriter:
        if self._writer is None:
            raise ValueError("the size of shards is not settled yet")
        return self._writer

    def _save(self) -> None:
        """Write the checkpoints, unless they are there; another populator's are never overwritten."""
        data = self.checkpoints.to_json()
        if data != self._written:
            self._version = self._destination.write(CHECKPOINTS_NAME, data, expected=self._version)
            self._written = data
