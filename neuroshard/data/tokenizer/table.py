"""The tokenizer table, its file `tokenizer.json`, and the patterns that split text into words before BPE.

The parser treats the file as untrusted input."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import cast

from neuroshard.data.tokenizer.unicode_classes import LETTERS, NUMBERS, SPACES
from neuroshard.errors import DataError
from neuroshard.types import JsonValue

_SPACE = r" \t\n\x0b\x0c\r"
# Letters and marks of all scripts; general punctuation, symbols and emoji count as punctuation.
_LETTER = (
    r"A-Za-z\u00aa\u00b5\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u1fff\u2c00-\u2dff\u3040-\ufdff\ufe70-\ufefe"
    r"\uff21-\uff3a\uff41-\uff5a\uff66-\uffdc\U00010000-\U0001efff\U00020000-\U0010ffff"
)
SPLIT_PATTERN = (
    r"['\u2019](?:[sdmt]|ll|ve|re)"  # English contractions, with either apostrophe
    rf"| ?[{_LETTER}]{{1,64}}"
    r"| ?[0-9]{1,3}"
    rf"| ?[^{_SPACE}{_LETTER}0-9]{{1,64}}"
    rf"|[{_SPACE}]{{1,64}}(?![^{_SPACE}])"  # leaves the last space of a run to the word that follows
    rf"|[{_SPACE}]{{1,64}}"
)
# The pattern of Llama 3, which llama.cpp calls "llama-bpe", as tokenizer.json names it. The expression below does the
# same with the code points of llama.cpp's tables, as the classes of other engines change with their versions.
LLAMA_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_LLAMA_EXPRESSION = (
    r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
    rf"|[^\r\n{LETTERS}{NUMBERS}]?[{LETTERS}]+"
    rf"|[{NUMBERS}]{{1,3}}"
    rf"| ?[^{SPACES}{LETTERS}{NUMBERS}]+[\r\n]*"
    rf"|[{SPACES}]*[\r\n]+"
    rf"|[{SPACES}]+(?![^{SPACES}])"
    rf"|[{SPACES}]+"
)
EXPRESSIONS = {SPLIT_PATTERN: SPLIT_PATTERN, LLAMA_PATTERN: _LLAMA_EXPRESSION}  # by the pattern's name in the file
MAX_WORD_CHARACTERS = 65  # from which tokens are learned; the words of the second pattern have no limit of their own
MAX_TOKEN_BYTES = 4 * MAX_WORD_CHARACTERS

_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> str:
    """Return text that UTF-8 can encode: surrogate pairs become their character, lone surrogates U+FFFD."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_BEYOND_BMP = re.compile(r"\\U[0-9a-f]{8}(?:-\\U[0-9a-f]{8})?")


@cache
def _compiled(pattern: str, *, is_whole: bool) -> re.Pattern[str]:
    expression = EXPRESSIONS[pattern]
    return re.compile(expression if is_whole else _BEYOND_BMP.sub("", expression))


def split_words(text: str, pattern: str = SPLIT_PATTERN) -> list[str]:
    """Split text into pieces that BPE never joins; their concatenation is the text. The pattern must be a known one."""
    # Python compares a character with the ranges above U+FFFF one by one: without them it is six times as fast.
    is_whole = pattern == SPLIT_PATTERN or max(text, default="") > "\uffff"
    return _compiled(pattern, is_whole=is_whole).findall(text)


PAD, BOS, EOS, UNK = 0, 1, 2, 3  # 4-9 are reserved
SPECIAL_WORDS = {PAD: "pad", BOS: "begin_of_text", EOS: "end_of_text", UNK: "unk"}
FIRST_BYTE_ID = 10
FIRST_MERGE_ID = FIRST_BYTE_ID + 256

MAX_VOCABULARY = FIRST_MERGE_ID + 10_000_000
MAX_SOURCES = 1_000
DEFAULT_MAX_FILE_BYTES = 64 << 20  # about 2.5 million merges; parsing takes some 15 times as much memory

_PAIR_KEY = re.compile(r"([0-9]{1,8})_([0-9]{1,8})", re.ASCII)

Pair = tuple[int, int]


@dataclass(frozen=True)
class TokenizerTable:
    """Merges in learning order: merges[i] makes id 266 + i from two lower ids."""

    merges: tuple[Pair, ...]
    vocab_size: int  # ids the vocabulary is meant to have; at least next_merge_id
    pattern: str = SPLIT_PATTERN
    sources_contributed: Mapping[str, int] = field(default_factory=dict[str, int])  # merges learned from each source

    @property
    def next_merge_id(self) -> int:
        """The id that the next learned merge will get; every id in use is lower."""
        return FIRST_MERGE_ID + len(self.merges)

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of the file this table is written as."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def to_json(self) -> bytes:
        """The bytes of `tokenizer.json`; equal tables give equal bytes."""
        document = {
            "vocab_size": self.vocab_size,
            "current_vocab_size": self.next_merge_id,  # the name that older readers use
            "next_merge_id": self.next_merge_id,
            "pattern": self.pattern,
            "sources_contributed": dict(sorted(self.sources_contributed.items())),
            "merges": {f"{a}_{b}": FIRST_MERGE_ID + i for i, (a, b) in enumerate(self.merges)},
        }
        return json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode()

    def restricted_to(self, next_merge_id: int) -> TokenizerTable:
        """Return the table as it was when next_merge_id was the next id, for a run that pins this number.

        Raises DataError when the table has not grown that far.
        """
        if not FIRST_MERGE_ID <= next_merge_id <= self.next_merge_id:
            raise DataError(f"The run needs token ids up to {next_merge_id}, the tokenizer has {self.next_merge_id}.")
        return replace(self, merges=self.merges[: next_merge_id - FIRST_MERGE_ID], vocab_size=next_merge_id)

    @staticmethod
    def load(data: bytes, max_file_bytes: int = DEFAULT_MAX_FILE_BYTES) -> TokenizerTable:
        """Read `tokenizer.json`. Raises DataError for anything but a complete, consistent table."""
        if len(data) > max_file_bytes:
            raise DataError(f"tokenizer.json has {len(data)} bytes; at most {max_file_bytes} are accepted.")
        try:
            document = cast("JsonValue", json.loads(data))
        except (ValueError, RecursionError) as error:
            raise DataError(f"tokenizer.json is not valid JSON: {error}") from error
        if not isinstance(document, Mapping):
            raise DataError("tokenizer.json must be a JSON object.")
        return _table_from(document)


def byte_table(pattern: str = SPLIT_PATTERN) -> TokenizerTable:
    """Return the table before any merge was learned: one id for every byte."""
    return TokenizerTable(merges=(), vocab_size=FIRST_MERGE_ID, pattern=pattern)


def token_bytes(table: TokenizerTable) -> list[bytes]:
    """Return the byte string of every id below next_merge_id; special ids have none."""
    pieces = [b""] * FIRST_BYTE_ID + [bytes([value]) for value in range(256)]
    for first, second in table.merges:
        pieces.append(pieces[first] + pieces[second])
    return pieces


def _table_from(document: Mapping[str, JsonValue]) -> TokenizerTable:
    next_merge_id = _integer(document, "next_merge_id", FIRST_MERGE_ID, MAX_VOCABULARY)
    vocab_size = _integer(document, "vocab_size", next_merge_id, MAX_VOCABULARY)
    pattern = document.get("pattern")
    if not isinstance(pattern, str) or pattern not in EXPRESSIONS:
        raise DataError(
            f"tokenizer.json has an unknown split pattern: {str(pattern)[:80]!r}.",
            "Update NeuroShard: a newer version may support it.",
        )
    merges = _merges(document.get("merges"), next_merge_id - FIRST_MERGE_ID)
    _check_merges(merges)
    table = TokenizerTable(merges, vocab_size, pattern, _sources(document.get("sources_contributed")))
    if len(set(token_bytes(table)[FIRST_BYTE_ID:])) != next_merge_id - FIRST_BYTE_ID:
        raise DataError("tokenizer.json has two ids for one byte string.")
    return table


def _integer(document: Mapping[str, JsonValue], name: str, lowest: int, highest: int) -> int:
    value = document.get(name)
    if type(value) is not int or not lowest <= value <= highest:
        raise DataError(f"tokenizer.json: {name} must be a whole number in {lowest}..{highest}, got {str(value)[:40]}.")
    return value


def _merges(value: JsonValue, expected: int) -> tuple[Pair, ...]:
    """Return merges in id order from either form: an object {"a_b": id} or a list [[a, b], ...]."""
    if not isinstance(value, Mapping | list):
        raise DataError("tokenizer.json: merges must be an object or a list.")
    if len(value) != expected:
        raise DataError(f"tokenizer.json has {len(value)} merges; next_merge_id says {expected}.")
    if isinstance(value, Mapping):
        return _merges_of_object(cast("Mapping[str, JsonValue]", value), expected)
    return tuple(_pair_of_list(item) for item in cast("Sequence[JsonValue]", value))


def _merges_of_object(value: Mapping[str, JsonValue], expected: int) -> tuple[Pair, ...]:
    merges: list[Pair | None] = [None] * expected
    for key, identifier in value.items():
        match = _PAIR_KEY.fullmatch(key)
        if match is None:
            raise DataError(f"tokenizer.json: merge {key[:40]!r} is not of the form a_b.")
        if type(identifier) is not int or not 0 <= identifier - FIRST_MERGE_ID < expected:
            raise DataError(f"tokenizer.json: merge {key} has the id {str(identifier)[:40]}, outside the table.")
        if merges[identifier - FIRST_MERGE_ID] is not None:
            raise DataError(f"tokenizer.json: two merges have the id {identifier}.")
        merges[identifier - FIRST_MERGE_ID] = (int(match[1]), int(match[2]))
    return tuple(pair for pair in merges if pair is not None)  # as many distinct ids as merges: none is missing


def _pair_of_list(item: JsonValue) -> Pair:
    if isinstance(item, list):
        pair = cast("Sequence[JsonValue]", item)
        if len(pair) == 2 and type(pair[0]) is int and type(pair[1]) is int:
            return pair[0], pair[1]
    raise DataError(f"tokenizer.json: merge {str(item)[:40]} is not a pair of ids.")


def _check_merges(merges: Sequence[Pair]) -> None:
    """Check that both halves are earlier, not special, and short: a chain of doublings would fill the memory."""
    lengths = [0] * FIRST_BYTE_ID + [1] * 256
    for identifier, (first, second) in enumerate(merges, start=FIRST_MERGE_ID):
        if not (FIRST_BYTE_ID <= first < identifier and FIRST_BYTE_ID <= second < identifier):
            raise DataError(f"tokenizer.json: merge {identifier} = ({first}, {second}) does not use earlier ids.")
        length = lengths[first] + lengths[second]
        if length > MAX_TOKEN_BYTES:
            raise DataError(f"tokenizer.json: token {identifier} is longer than {MAX_TOKEN_BYTES} bytes.")
        lengths.append(length)


def _sources(value: JsonValue) -> dict[str, int]:
    """Return the merges that each source contributed; a plain list of names is accepted with a count of 0."""
    if isinstance(value, list) and len(value) <= MAX_SOURCES and all(isinstance(name, str) for name in value):
        return {str(name): 0 for name in cast("Sequence[JsonValue]", value)}
    if not isinstance(value, Mapping) or len(value) > MAX_SOURCES:
        raise DataError(f"tokenizer.json: sources_contributed must be an object of at most {MAX_SOURCES} entries.")
    sources: dict[str, int] = {}
    for name, count in cast("Mapping[str, JsonValue]", value).items():
        if type(count) is not int or not 0 <= count <= MAX_VOCABULARY:
            raise DataError(f"tokenizer.json: source {name[:40]!r} has {str(count)[:40]} merges.")
        sources[name] = count
    return sources
