"""The one way in which tuples are hashed: SHA-256 over length-prefixed parts."""

from __future__ import annotations

from hashlib import sha256


def hash_parts(*parts: bytes | str | int) -> bytes:
    """SHA-256 (32 bytes) over the parts, each preceded by its length as 8 big-endian bytes.

    Text counts as UTF-8 and a whole number as its decimal digits; the prefixes keep ("ab", "c") and ("a", "bc") apart.
    """
    digest = sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
