"""How text is cut into words before BPE: one fixed pattern that every regex engine reads the same way.

A pattern from a downloaded file is never compiled: an unknown one could hang or crash the engine that runs it
(backtracking), so a table must name a pattern of `KNOWN_PATTERNS`. The pattern names its characters by code point,
not by Unicode property: properties differ between engines and versions, and with them the words of newer scripts.
No piece is longer than 65 code points, so neither the learner nor the encoder can be made to take quadratic time.
"""

from __future__ import annotations

import re

_SPACE = r" \t\n\x0b\x0c\r"
# Letters and marks of all scripts; what lies between (general punctuation, symbols, emoji) counts as punctuation.
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
KNOWN_PATTERNS = frozenset({SPLIT_PATTERN})
MAX_PIECE_BYTES = 4 * 65

_SURROGATE = re.compile("[\ud800-\udfff]")
_COMPILED = {pattern: re.compile(pattern) for pattern in KNOWN_PATTERNS}


def replace_surrogates(text: str) -> str:
    """Text that UTF-8 can hold: surrogate pairs become their character, lone surrogates U+FFFD."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def split_words(text: str, pattern: str = SPLIT_PATTERN) -> list[str]:
    """The pieces of text that BPE never joins; their concatenation is the text. The pattern must be a known one."""
    return _COMPILED[pattern].findall(text)
