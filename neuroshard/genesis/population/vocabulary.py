"""Which source teaches how many merges, and learning them one source after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from neuroshard.data.tokenizer import TokenizerTable, byte_table, count_words, learn_from_counts
from neuroshard.genesis.sources.configuration import SourceConfiguration, VocabularyConfiguration
from neuroshard.genesis.sources.records import Record

# A sample is cut off where it becomes large, so that counting its words fits in memory.
MAX_SAMPLE_CHARACTERS = 128 << 20  # of a source
MAX_DOCUMENT_CHARACTERS = 1 << 20  # of one document


def merge_shares(sources: Sequence[SourceConfiguration], vocabulary: VocabularyConfiguration) -> dict[str, int]:
    """Merges that each source is to teach; together `vocabulary.merges`.

    All for a source that stands alone. Else the first teaches `first_source_merges` and the others the rest, in
    proportion to their target_shards, rounded by largest remainder.
    """
    first, others = sources[0], sources[1:]
    if not others:
        return {first.name: vocabulary.merges}
    shares = {first.name: min(vocabulary.first_source_merges, vocabulary.merges)}
    rest, weight = vocabulary.merges - shares[first.name], sum(source.target_shards for source in others)
    for source in others:
        shares[source.name] = rest * source.target_shards // weight
    by_remainder = sorted(others, key=lambda source: -(rest * source.target_shards % weight))
    for source in by_remainder[: vocabulary.merges - sum(shares.values())]:
        shares[source.name] += 1
    return shares


def sample(records: Iterator[Record], documents: int) -> Iterator[str]:
    """The texts of the first documents that hold any; fewer when they are very large."""
    characters = 0
    for record in records:
        if not record.text.strip():
            continue
        yield record.text[:MAX_DOCUMENT_CHARACTERS]
        documents -= 1
        characters += min(len(record.text), MAX_DOCUMENT_CHARACTERS)
        if documents <= 0 or characters >= MAX_SAMPLE_CHARACTERS:
            return


def grow_table(
    base: TokenizerTable | None,
    wanted: Mapping[str, int],
    samples: Callable[[str], Iterator[str]],
    most_merges: int,
    progress: Callable[[str, float], None],
) -> TokenizerTable:
    """The base (none: bytes alone) with the wanted merges of each source in turn, at most `most_merges` in all.

    What one source cannot teach, because no pair of tokens occurs twice in its sample any more, the next one may.
    """
    table, owed = base or byte_table(), 0
    for name, share in wanted.items():
        count = min(share + owed, most_merges - len(table.merges))
        if count <= 0:
            continue
        progress(name, 0.0)
        words = count_words(samples(name), table.pattern)
        before = len(table.merges)
        table = learn_from_counts(words, count, table, name, lambda fraction, name=name: progress(name, fraction))
        owed = count - (len(table.merges) - before)
    return table
