"""The wallet: the text of a token or BIP39 phrase gives a secret, and the secret an Ed25519 key. Nothing here logs."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from mnemonic import Mnemonic

from neuroshard.errors import TokenError
from neuroshard.identity.signing import SigningKey, hash_parts
from neuroshard.types import WALLET_ID_DIGITS, WalletId

PHRASE_LENGTHS = (12, 15, 18, 21, 24)
_LIKELY_PHRASE_LENGTHS = range(10, 27)  # a phrase with a word lost or doubled


def new_phrase(words: int = 12) -> str:
    """Return a new random phrase of 12 or 24 words. Raises ValueError for another number."""
    if words not in (12, 24):
        raise ValueError(f"a phrase has 12 or 24 words, not {words}")
    return Mnemonic("english").generate(strength=words * 32 // 3)


def phrase_word_list() -> tuple[str, ...]:
    """Return the 2,048 words of BIP39 that phrases consist of."""
    return tuple(Mnemonic("english").wordlist)


KEY_WORDS = 4
_WORD_BITS = 11  # of a list of 2,048 words


def key_words(public_key: bytes) -> str:
    """Return four words for a public key, which two people can compare when they speak to each other."""
    digest = int.from_bytes(hash_parts("neuroshard/key-words", public_key))
    words = phrase_word_list()
    return " ".join(words[digest >> _WORD_BITS * place & len(words) - 1] for place in range(KEY_WORDS))


def phrase_words(text: str) -> tuple[str, ...] | None:
    """Return the words of `text`, in lower case, if it is meant as a phrase, otherwise None.

    A text is meant as a phrase if it has a phrase's number of words, or nearly one and consists mostly of listed words.
    A typing error must give an error, not another wallet.
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
    """Return the 64-byte seed of BIP39 (PBKDF2-HMAC-SHA512, 2,048 rounds, no passphrase).

    Raises TokenError that names an unknown word, a wrong number of words or a wrong checksum.
    """
    mnemonic = Mnemonic("english")
    if len(words) not in PHRASE_LENGTHS:
        raise TokenError(
            f"A wallet phrase has 12 or 24 words; this one has {len(words)}.",
            "Look for a word that is missing or repeated.",
        )
    listed = set(mnemonic.wordlist)
    for position, word in enumerate(words, start=1):
        if word not in listed:
            raise TokenError(
                f"Word {position} of the wallet phrase, {word[:20]!r}, is not in the BIP39 word list.",
                "Look for a typing error. A token that is not a phrase must not have the length of one.",
            )
    if not mnemonic.check(" ".join(words)):
        raise TokenError(
            "The checksum of the wallet phrase is wrong.",
            "Look for a wrong word, or two words in the wrong order. The node does not start with another wallet.",
        )
    return Mnemonic.to_seed(" ".join(words))


TokenKind = Literal["phrase", "hex", "text"]
MAX_TOKEN_CHARACTERS = 4096
STRONG_TEXT_CHARACTERS = 20
# Changing any of these changes the wallet of every user of a text token.
# 64 MiB and two passes: the least that OWASP's password storage cheat sheet accepts for scrypt (RFC 7914).
SCRYPT_N = 2**16
SCRYPT_R = 8
SCRYPT_P = 2
_SCRYPT_SALT = b"neuroshard/token/scrypt/1"
_SCRYPT_MEMORY = 80 * 1024 * 1024  # OpenSSL's limit for scrypt; N r 128 bytes are 64 MiB of it


@dataclass(frozen=True)
class TokenSecret:
    """The decoded form of a token; `warning` is one sentence for its owner, or None."""

    kind: TokenKind
    seed: bytes = field(repr=False)
    warning: str | None = None


def parse_token(text: str) -> TokenSecret:
    """Return the secret of a BIP39 phrase (64-byte seed), of 64 hex digits (32 bytes) or of other text (32, scrypt).

    Raises TokenError if the token is empty or too long, or if a phrase or a hex key is damaged: a damaged token is
    never read as some other token.
    """
    token = unicodedata.normalize("NFKD", text).strip()
    if not token:
        raise TokenError("The wallet token is empty.", "`neuroshard wallet new` makes one.")
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise TokenError(f"The wallet token has {len(token)} characters; at most {MAX_TOKEN_CHARACTERS} are read.")
    words = phrase_words(token)
    if words is not None:
        return TokenSecret("phrase", phrase_seed(words))
    if re.fullmatch(r"[0-9a-fA-F]{64}", token):
        return TokenSecret("hex", bytes.fromhex(token))
    if re.fullmatch(r"(0[xX])?[0-9a-fA-F]{62,66}", token):
        raise TokenError("The wallet token looks like a hex key, but it does not have exactly 64 hex digits.")
    return TokenSecret("text", _stretched(token), _weakness(token))


def _stretched(token: str) -> bytes:
    return hashlib.scrypt(
        token.encode("utf-8", "surrogatepass"),
        salt=_SCRYPT_SALT,
        n=SCRYPT_N,
        r=SCRYPT_R,
        p=SCRYPT_P,
        maxmem=_SCRYPT_MEMORY,
        dklen=32,
    )


def _weakness(token: str) -> str | None:
    if len(token) >= STRONG_TEXT_CHARACTERS and len(set(token)) >= 8:
        return None
    return (
        "This token is short or simple: anyone who guesses it owns the wallet. "
        "`neuroshard wallet new` makes one that cannot be guessed."
    )


_WALLET_LABEL = b"neuroshard/wallet/ed25519/1"


def wallet_id_of(public_key: bytes) -> WalletId:
    """Return the first WALLET_ID_DIGITS hex digits of SHA-256(wallet public key)."""
    return WalletId(sha256(public_key).hexdigest()[:WALLET_ID_DIGITS])


@dataclass(frozen=True)
class Wallet:
    """The token owner's key, which signs delegations, runs and manifests."""

    _key: SigningKey = field(repr=False)

    @classmethod
    def from_secret(cls, secret: TokenSecret) -> Wallet:
        """Return the wallet of a token: HKDF-SHA256 (RFC 5869) of its secret with our own label, no salt."""
        seed = HKDF(algorithm=SHA256(), length=32, salt=None, info=_WALLET_LABEL).derive(secret.seed)
        return cls(SigningKey.from_seed(seed))

    @property
    def public_key(self) -> bytes:
        """Raw Ed25519 public key, 32 bytes."""
        return self._key.public_key

    @property
    def wallet_id(self) -> WalletId:
        """Id of this wallet, from its public key."""
        return wallet_id_of(self.public_key)

    def sign(self, message: bytes) -> bytes:
        """Return the Ed25519 signature of the message, 64 bytes."""
        return self._key.sign(message)
