"""Wallet phrases: BIP39 with the English word list."""

from __future__ import annotations

import unicodedata

from mnemonic import Mnemonic

from neuroshard.errors import TokenError

PHRASE_LENGTHS = (12, 15, 18, 21, 24)
_LIKELY_PHRASE_LENGTHS = range(10, 27)  # a phrase with a word lost or doubled


def new_phrase(words: int = 12) -> str:
    """A new random phrase of 12 or 24 words. Raises ValueError for another number."""
    if words not in (12, 24):
        raise ValueError(f"a phrase has 12 or 24 words, not {words}")
    return Mnemonic("english").generate(strength=words * 32 // 3)


def phrase_word_list() -> tuple[str, ...]:
    """The 2,048 words that phrases are made of."""
    return tuple(Mnemonic("english").wordlist)


def phrase_words(text: str) -> tuple[str, ...] | None:
    """The words of `text` when it is meant as a phrase, else None; lower case, any spacing.

    Meant as one is whatever has a phrase's number of words, and whatever has nearly one and consists of listed words:
    a slip of the pen must be told, not become another wallet.
    """
    words = tuple(unicodedata.normalize("NFKD", text).lower().split())
    if len(words) in PHRASE_LENGTHS:
        return words
    if len(words) not in _LIKELY_PHRASE_LENGTHS:
        return None
    listed = set(Mnemonic("english").wordlist)
    known = sum(word in listed for word in words)
    return words if known >= 0.8 * len(words) else None


def phrase_seed(words: tuple[str, ...]) -> bytes:
    """The 64-byte seed of BIP39 (PBKDF2-HMAC-SHA512, 2,048 rounds, no passphrase).

    Raises TokenError that says which word is unknown, or that the number of words or the checksum is wrong.
    """
    mnemonic = Mnemonic("english")
    if len(words) not in PHRASE_LENGTHS:
        raise TokenError(
            f"A wallet phrase has 12 or 24 words; this one has {len(words)}.",
            "Look for a word that is missing or there twice.",
        )
    listed = set(mnemonic.wordlist)
    for position, word in enumerate(words, start=1):
        if word not in listed:
            raise TokenError(
                f"Word {position} of the wallet phrase, {word[:20]!r}, is not in the BIP39 word list.",
                "Look for a typing error. A token that is no phrase must not have the length of one.",
            )
    if not mnemonic.check(" ".join(words)):
        raise TokenError(
            "The checksum of the wallet phrase is wrong.",
            "A word is mistyped or two are exchanged; the node does not start with another wallet instead.",
        )
    return Mnemonic.to_seed(" ".join(words))
