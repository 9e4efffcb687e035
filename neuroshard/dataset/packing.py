"""The sizes of shards, sections and vocabulary for a given amount of text. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.errors import DataError

MIN_SHARDS = 16  # one of them is held out
MIN_SHARD_TOKENS = 1_024  # at least seven windows of 128 tokens
DEFAULT_MAX_SHARD_TOKENS = 2_500_000


@dataclass(frozen=True)
class ShardPlan:
    """Number and size of the shards; the remainder, fewer tokens than there are shards, is dropped."""

    shard_count: int
    tokens_per_shard: int


def plan_shards(
    total_tokens: int, max_shard_tokens: int = DEFAULT_MAX_SHARD_TOKENS, min_shard_tokens: int = MIN_SHARD_TOKENS
) -> ShardPlan:
    """Plan at least 16 shards, none larger than the maximum. Raises DataError when the text is too short."""
    if total_tokens < MIN_SHARDS * min_shard_tokens:
        raise _too_little(total_tokens, min_shard_tokens)
    shard_count = max(MIN_SHARDS, -(-total_tokens // max_shard_tokens))
    return ShardPlan(shard_count, total_tokens // shard_count)


def common_shard_tokens(supplies: Sequence[tuple[int, int]], max_shard_tokens: int = DEFAULT_MAX_SHARD_TOKENS) -> int:
    """Return the largest shard size, up to the maximum, with which sources of (tokens, most shards) fill 16 shards.

    Every shard has tokens of one source only; each source with a 256th of the tokens fills at least one. Raises
    DataError when there is too little text for that.
    """
    total = sum(tokens for tokens, _ in supplies)
    represented = [tokens for tokens, _ in supplies if tokens >= max(MIN_SHARD_TOKENS, total / 256)]

    def shards(size: int) -> int:
        return sum(min(most, tokens // size) for tokens, most in supplies)

    if shards(MIN_SHARD_TOKENS) < MIN_SHARDS:
        raise _too_little(total, MIN_SHARD_TOKENS)
    smallest, beyond = MIN_SHARD_TOKENS, min(max_shard_tokens, *represented) + 1
    while beyond - smallest > 1:
        size = (smallest + beyond) // 2
        smallest, beyond = (size, beyond) if shards(size) >= MIN_SHARDS else (smallest, size)
    return smallest


def cut_shards(ids: NDArray[np.uint32], plan: ShardPlan) -> Iterable[NDArray[np.uint32]]:
    """Cut ids (n,) into consecutive pieces of shape (tokens_per_shard,)."""
    used = plan.shard_count * plan.tokens_per_shard
    return ids[:used].reshape(plan.shard_count, plan.tokens_per_shard)


def _too_little(total_tokens: int, min_shard_tokens: int) -> DataError:
    return DataError(
        f"The text has only {total_tokens:,} tokens; at least {MIN_SHARDS * min_shard_tokens:,} are needed.",
        "Add more text: about 100 kB is the least, a few megabytes are good.",
    )


def default_merge_count(text_bytes: int) -> int:
    """Return the merges that a text can teach: about one per 1,200 bytes, within 256..31,734 (2.3 MB: about 1,900)."""
    return min(31_734, max(256, text_bytes // 1_200))


def section_characters(total_characters: int) -> int:
    """Return the longest section: at least 64 sections per shard in a small text, within 1,000..20,000 characters.

    A shard of few long sections is not like any other, and the model would follow each shard in turn.
    """
    return min(20_000, max(1_000, total_characters // (64 * MIN_SHARDS)))
