"""What can be checked of a data set without its shards: tables, counts, and the populator's own state beside them."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from neuroshard.data.genesis.layout import TOKENIZER_NAME, archived_tokenizer_name
from neuroshard.data.genesis.manifest import Manifest, TokenizerEntry
from neuroshard.data.genesis.object_store import ObjectReader
from neuroshard.data.tokenizer.table import DEFAULT_MAX_FILE_BYTES, TokenizerTable
from neuroshard.errors import DataError
from neuroshard.genesis.population.checkpoints import CHECKPOINTS_NAME, MAX_CHECKPOINTS_BYTES, parse_checkpoints


def table_problems(place: ObjectReader, manifest: Manifest) -> Iterator[str]:
    """Every table is there, has its digest and its size, and continues the one before it."""
    before: TokenizerTable | None = None
    for entry in manifest.tokenizers:
        try:
            table = _table(place, archived_tokenizer_name(entry.sha256), entry)
        except DataError as error:
            yield error.message
            continue
        if before is not None and table.merges[: len(before.merges)] != before.merges:
            yield f"The table of shard {entry.first_shard} and later does not continue the one before it."
        before = table
    try:
        _table(place, TOKENIZER_NAME, manifest.tokenizers[-1])
    except DataError as error:
        yield error.message


def _table(place: ObjectReader, name: str, entry: TokenizerEntry) -> TokenizerTable:
    there = place.read(name, DEFAULT_MAX_FILE_BYTES)
    if there is None:
        raise DataError(f"{name} is missing.")
    if sha256(there.content).hexdigest() != entry.sha256:
        raise DataError(f"{name} does not match its digest in the manifest.")
    table = TokenizerTable.load(there.content)
    if table.next_merge_id != entry.next_merge_id:
        raise DataError(f"{name} has {table.next_merge_id} ids, the manifest says {entry.next_merge_id}.")
    return table


def count_problems(manifest: Manifest) -> Iterator[str]:
    """The sums of the manifest agree with each other."""
    tokens_per_shard, total = manifest.tokens_per_shard or 0, manifest.total_shards
    if manifest.total_tokens != total * tokens_per_shard:
        yield f"The manifest says {manifest.total_tokens} tokens, its {total} shards have {total * tokens_per_shard}."
    counts = manifest.sources
    if counts and sum(count.shards for count in counts.values()) != total:
        yield f"The sources of the manifest gave {sum(c.shards for c in counts.values())} shards, there are {total}."
    for name, count in counts.items():
        if count.tokens != count.shards * tokens_per_shard or count.last_shard_id >= total:
            yield f"The counts of source {name} contradict each other."


def stored_problems(place: ObjectReader, manifest: Manifest) -> Iterator[str]:
    """The populator's state, where there is one, is at least as new as the manifest."""
    there = place.read(CHECKPOINTS_NAME, MAX_CHECKPOINTS_BYTES)
    if there is None:
        return
    try:
        checkpoints = parse_checkpoints(there.content)
    except DataError as error:
        yield error.message
        return
    if checkpoints.total_shards < manifest.total_shards:
        yield (
            f"{CHECKPOINTS_NAME} tells of {checkpoints.total_shards} shards, the manifest of {manifest.total_shards}: "
            "it is the older one, and a build cannot go on from it."
        )
