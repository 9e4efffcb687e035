"""The plain encoder: short, slow and obviously right. The fast one is tested against it, and falls back to it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from neuroshard.data.tokenizer.splitting import replace_surrogates, split_words
from neuroshard.data.tokenizer.table import FIRST_BYTE_ID, FIRST_MERGE_ID, Pair, TokenizerTable


def merge_ids(table: TokenizerTable) -> dict[Pair, int]:
    """The id that each pair of the table merges into."""
    return {pair: FIRST_MERGE_ID + i for i, pair in enumerate(table.merges)}


def encode_word(word: bytes, ids_of_pairs: Mapping[Pair, int]) -> list[int]:
    """Ids of one word: merge the pair learned first, leftmost first, until no pair is in the table."""
    ids = [FIRST_BYTE_ID + value for value in word]
    while len(ids) > 1:
        pairs = enumerate(pairwise(ids))
        candidates = [(ids_of_pairs[pair], i) for i, pair in pairs if pair in ids_of_pairs]
        if not candidates:
            break
        merged, at = min(candidates)
        ids[at : at + 2] = [merged]
    return ids


def encode_reference(table: TokenizerTable, text: str) -> list[int]:
    """Ids of a text, without BOS and EOS; lone surrogates count as U+FFFD."""
    ids_of_pairs = merge_ids(table)
    words = split_words(replace_surrogates(text), table.pattern)
    return [identifier for word in words for identifier in encode_word(word.encode(), ids_of_pairs)]


def every_token_encodes_to_itself(table: TokenizerTable) -> bool:
    """Whether the reference gives every merged token's bytes its own id.

    This is the condition under which merging by rank of the joined bytes (tiktoken) equals merging by pair: the
    merges inside a span that nothing crosses depend on the span's bytes alone, so two adjacent tokens that spell a
    known token are always that token's own two halves. A learned table meets it by construction.

    Token t = (a, b) fails when, while a and b are being assembled, some earlier merge joins a token on a's right edge
    with one on b's left edge. x on the edge of a lives until the merge p_x that swallows it, y until p_y; a merge m of
    (x, y) comes first when m < p_x and m <= p_y (of equal merges the leftmost is applied first).
    """
    ids_of_pairs = merge_ids(table)
    for identifier, (first, second) in enumerate(table.merges, start=FIRST_MERGE_ID):
        left = _edge(table, first, identifier, side=1)
        right = _edge(table, second, identifier, side=0)
        for x, x_ends in left:
            for y, y_ends in right:
                merged = ids_of_pairs.get((x, y))
                if merged is not None and merged < x_ends and merged <= y_ends and merged != identifier:
                    return False
    return True


def _edge(table: TokenizerTable, token: int, swallowed_by: int, side: int) -> list[Pair]:
    """The tokens on one edge of a token's tree, each with the id of the merge that ends it; side 1 is the right."""
    edge = [(token, swallowed_by)]
    while token >= FIRST_MERGE_ID:
        swallowed_by, token = token, table.merges[token - FIRST_MERGE_ID][side]
        edge.append((token, swallowed_by))
    return edge
