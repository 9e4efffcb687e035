"""Learns merges from text: the most frequent pair becomes a token, repeatedly (Sennrich et al. 2016).

The result depends only on the counts of words, never on their order: ties break by (count, then lower pair). A table
grows by appending, and growing in two halves on the same text equals learning at once.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

from neuroshard.data.tokenizer.encoder import encode_word, merge_ids
from neuroshard.data.tokenizer.table import (
    MAX_WORD_CHARACTERS,
    Pair,
    TokenizerTable,
    byte_table,
    replace_surrogates,
    split_words,
    token_bytes,
)

MIN_PAIR_COUNT = 2  # a pair seen once is not a pattern of the text
_SHIFT = 24  # pairs are packed as first << 24 | second: ids stay below 2**24, and packed order is pair order
_LOW = (1 << _SHIFT) - 1

ReportFraction = Callable[[float], None]


def count_words(texts: Iterable[str], pattern: str = byte_table().pattern) -> Counter[str]:
    """Count how often each word (piece of the split pattern) occurs in the texts.

    A longer word counts as several of MAX_WORD_CHARACTERS: the time to learn from a word grows with its square.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split_words(replace_surrogates(text), pattern))
    for word in [word for word in counts if len(word) > MAX_WORD_CHARACTERS]:
        count = counts.pop(word)
        for start in range(0, len(word), MAX_WORD_CHARACTERS):
            counts[word[start : start + MAX_WORD_CHARACTERS]] += count
    return counts


def learn_merges(
    texts: Iterable[str], merge_count: int, base: TokenizerTable | None = None, source: str = "text"
) -> TokenizerTable:
    """Learn up to `merge_count` merges from the texts and return the base table with these appended."""
    start = base or byte_table()
    return learn_from_counts(count_words(texts, start.pattern), merge_count, start, source)


def learn_from_counts(
    word_counts: Mapping[str, int],
    merge_count: int,
    base: TokenizerTable | None = None,
    source: str = "text",
    progress: ReportFraction = lambda _: None,
) -> TokenizerTable:
    """Learn merges from counted words; fewer than `merge_count` when no pair occurs twice any more.

    `progress` is called at intervals with the fraction done.
    """
    start = base or byte_table()
    state = _PairIndex(word_counts, start)
    known = set(token_bytes(start))
    pieces = token_bytes(start)
    learned: list[Pair] = []
    while len(learned) < merge_count:
        pair = state.most_frequent_pair()
        if pair is None:
            break
        piece = pieces[pair[0]] + pieces[pair[1]]
        if piece in known:
            continue  # a second id for the same bytes would make decoding and encoding disagree
        state.merge(pair, len(pieces))
        known.add(piece)
        pieces.append(piece)
        learned.append(pair)
        if len(learned) % 256 == 0:
            progress(len(learned) / merge_count)
    sources = dict(start.sources_contributed)
    sources[source] = sources.get(source, 0) + len(learned)
    merges = (*start.merges, *learned)
    return TokenizerTable(merges, max(start.vocab_size, len(pieces)), start.pattern, sources)


class _PairIndex:
    """Unique words as lists of ids, the count of every adjacent pair, the words that have it, and a lazy heap.

    The heap may hold stale entries: counts that have fallen since. An entry is corrected when it reaches the top.
    `_words_with` may name words that no longer have the pair: a visit then finds nothing.
    """

    def __init__(self, word_counts: Mapping[str, int], base: TokenizerTable) -> None:
        ids_of_pairs = merge_ids(base)
        self._words = [encode_word(word.encode(), ids_of_pairs) for word in word_counts]
        self._word_counts = list(word_counts.values())
        self._pair_counts: dict[int, int] = {}
        self._words_with: dict[int, list[int]] = {}
        for index, word in enumerate(self._words):
            count = self._word_counts[index]
            for first, second in pairwise(word):
                pair = first << _SHIFT | second
                self._pair_counts[pair] = self._pair_counts.get(pair, 0) + count
                self._note(pair, index)
        self._heap = [(-count, pair) for pair, count in self._pair_counts.items()]
        heapq.heapify(self._heap)

    def _note(self, pair: int, index: int) -> None:
        words = self._words_with.setdefault(pair, [])
        if not words or words[-1] != index:
            words.append(index)

    def most_frequent_pair(self) -> Pair | None:
        """Remove and return the pair with the highest count, the lower pair on a tie; None when none occurs twice."""
        while self._heap:
            negative_count, pair = heapq.heappop(self._heap)
            count = self._pair_counts.get(pair, 0)
            if count < MIN_PAIR_COUNT:
                continue
            if count == -negative_count:
                return pair >> _SHIFT, pair & _LOW
            if count < -negative_count:  # a higher count was pushed when it rose
                heapq.heappush(self._heap, (-count, pair))
        return None

    def merge(self, pair: Pair, new: int) -> None:
        """Replace the pair by the id `new` in every word and bring counts, index and heap up to date."""
        packed = pair[0] << _SHIFT | pair[1]
        changes: dict[int, int] = {}
        for index in self._words_with.pop(packed):
            word = self._words[index]
            merged = _merge_word(word, pair, new, self._word_counts[index], changes)
            if len(merged) == len(word):
                continue
            self._words[index] = merged
            for first, second in pairwise(merged):
                if new in (first, second):
                    self._note(first << _SHIFT | second, index)
        changes.pop(packed, None)
        del self._pair_counts[packed]
        for changed, change in changes.items():
            count = self._pair_counts.get(changed, 0) + change
            if count <= 0:
                self._pair_counts.pop(changed, None)
                self._words_with.pop(changed, None)
                continue
            self._pair_counts[changed] = count
            if change > 0:
                heapq.heappush(self._heap, (-count, changed))


def _merge_word(word: list[int], pair: Pair, new: int, count: int, changes: dict[int, int]) -> list[int]:
    """Return the word with the pair replaced, left to right; adds neighbouring pairs' gains and losses to `changes`."""
    first, second = pair
    merged: list[int] = []
    last = len(word) - 1
    i = 0
    while i <= last:
        current = word[i]
        if current != first or i == last or word[i + 1] != second:
            merged.append(current)
            i += 1
            continue
        if merged:
            before = merged[-1]
            lost, gained = before << _SHIFT | first, before << _SHIFT | new
            changes[lost] = changes.get(lost, 0) - count
            changes[gained] = changes.get(gained, 0) + count
        if i + 1 < last:
            after = word[i + 2]
            lost, gained = second << _SHIFT | after, new << _SHIFT | after
            changes[lost] = changes.get(lost, 0) - count
            changes[gained] = changes.get(gained, 0) + count
        merged.append(new)
        i += 2
    return merged
