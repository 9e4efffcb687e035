"""Which tokenizer table made a shard, and its tokens in the vocabulary of a run that knows fewer ids."""

from __future__ import annotations

from collections import OrderedDict

import anyio
import anyio.to_thread

from neuroshard.data.genesis.manifest import MAX_SHARD_TOKENS, TokenizerEntry
from neuroshard.data.opening import Genesis
from neuroshard.data.tokenizer.expansion import Expansion
from neuroshard.data.tokenizer.table import FIRST_MERGE_ID, TokenizerTable
from neuroshard.data.windows import TokenArray
from neuroshard.errors import DataError
from neuroshard.types import ShardId

_EXPANSIONS_IN_MEMORY = 2
_REFUSALS = 2  # of each place where a table may lie


class ShardTables:
    """Reads shards with the first `vocabulary_size` ids of the run's table, whatever table made them.

    A table that grew has the merges of the smaller one first, so a shard of either means the same text. Without a list
    of tables in the manifest there is one only, and the run knows all of it.
    """

    def __init__(self, genesis: Genesis, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size
        self._genesis = genesis
        self._expansions: OrderedDict[str, Expansion] = OrderedDict()  # by the table's digest
        self._lock = anyio.Lock()

    def id_count(self, shard: ShardId) -> int:
        """Ids in the shard's file are below this."""
        entry = self._genesis.manifest.tokenizer_of(shard)
        return self.vocabulary_size if entry is None else entry.next_merge_id

    async def in_vocabulary(self, shard: ShardId, tokens: TokenArray, largest: int) -> TokenArray:
        """The (n,) tokens of a shard, or more and lower ones when `largest`, its largest id, is not of the run.

        Raises DataError when the shard has ids that its table lacks, or when that table is no continuation of the
        run's; FileMissingError and others of the fetcher when the table does not come.
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

    async def _expansion(self, entry: TokenizerEntry) -> Expansion:
        async with self._lock:
            if entry.sha256 not in self._expansions:
                data = await self._genesis.tables.load(entry.sha256, _REFUSALS)
                expansion = await anyio.to_thread.run_sync(self._read, data, entry)
                self._expansions[entry.sha256] = expansion
            self._expansions.move_to_end(entry.sha256)
            while len(self._expansions) > _EXPANSIONS_IN_MEMORY:
                self._expansions.popitem(last=False)
            return self._expansions[entry.sha256]

    def _read(self, data: bytes, entry: TokenizerEntry) -> Expansion:
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
        return Expansion(table, self.vocabulary_size)
