"""From the text of a token to the secret behind the wallet. Nothing here logs."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Literal

from neuroshard.errors import TokenError
from neuroshard.identity.phrase import phrase_seed, phrase_words

TokenKind = Literal["phrase", "hex", "text"]
MAX_TOKEN_CHARACTERS = 4096
STRONG_TEXT_CHARACTERS = 20

# Changing any of these changes the wallet of everybody who uses a text token.
# 64 MiB and two passes: the least that OWASP's password storage cheat sheet accepts for scrypt (RFC 7914).
SCRYPT_N = 2**16
SCRYPT_R = 8
SCRYPT_P = 2
_SCRYPT_SALT = b"neuroshard/token/scrypt/1"
_SCRYPT_MEMORY = 80 * 1024 * 1024  # of OpenSSL's limit; N r 128 bytes are 64 MiB of it


@dataclass(frozen=True)
class TokenSecret:
    """What a token decodes to; `warning` is one sentence for its owner, or None."""

    kind: TokenKind
    seed: bytes = field(repr=False)
    warning: str | None = None


def parse_token(text: str) -> TokenSecret:
    """Secret of a BIP39 phrase (64-byte seed), of 64 hex digits (32 bytes) or of any other text (32 bytes by scrypt).

    Raises TokenError when the token is empty or too long, and when a phrase or a hex key is damaged:
    a damaged token is never read as some other token.
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
        "This token is short or simple: whoever guesses it owns the wallet. "
        "`neuroshard wallet new` makes one that cannot be guessed."
    )
