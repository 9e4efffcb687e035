"""The sizes of shards, sections and vocabulary for a given amount of text. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from neuroshard.errors import DataError

MIN_SHARDS = 16  # one of them is held out
MIN_SHARD_TOKENS = 1_024  # at least seven windows of 128 tokens


def common_shard_tokens(supplies: Sequence[tuple[int, int]], max_shard_tokens: int) -> int:
    """Return the largest shard size, up to the maximum, with which sources of (tokens, most shards) fill 16 shards.

    Every shard has tokens of one source only; each source with a 256th of the tokens fills at least one. Raises
    DataError when there is too little text for that.
    """
    total = sum(tokens for tokens, _ in supplies)
    represented = [tokens for tokens, _ in supplies if tokens >= max(MIN_SHARD_TOKENS, total / 256)]

    def shards(size: int) -> int:
        return sum(min(most, tokens // size) for tokens, most in supplies)

    if shards(MIN_SHARD_TOKENS) < MIN_SHARDS:
        raise DataError(
            f"The text has only {total:,} tokens; at least {MIN_SHARDS * MIN_SHARD_TOKENS:,} are needed.",
            "Add more text: about 100 kB is the least, a few megabytes are good.",
        )
    smallest, beyond = MIN_SHARD_TOKENS, min(max_shard_tokens, *represented) + 1
    while beyond - smallest > 1:
        size = (smallest + beyond) // 2
        smallest, beyond = (size, beyond) if shards(size) >= MIN_SHARDS else (smallest, size)
    return smallest


def default_merge_count(text_bytes: int) -> int:
    """Return the merges that a text can teach: about one per 1,200 bytes, within 256..31,734 (2.3 MB: about 1,900)."""
    return min(31_734, max(256, text_bytes // 1_200))


def section_characters(total_characters: int) -> int:
    """Return the longest section: at least 64 sections per shard in a small text, within 1,000..20,000 characters.

    A shard of few long sections is not like any other, and the model would follow each shard in turn.
    """
    return min(20_000, max(1_000, total_characters // (64 * MIN_SHARDS)))
