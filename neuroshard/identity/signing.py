"""Ed25519 signatures (RFC 8032) over canonical JSON and over messages that name their purpose; the hash of tuples."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from neuroshard.errors import DataError
from neuroshard.identity.strict_json import canonical_json
from neuroshard.types import JsonValue

SEED_BYTES = 32
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64


class SignatureError(DataError):
    """A signature is not that of the named key over the named value."""


class Signer(Protocol):
    """An object that signs messages: a wallet or a node key."""

    @property
    def public_key(self) -> bytes:
        """Raw Ed25519 public key, 32 bytes."""
        ...

    def sign(self, message: bytes) -> bytes:
        """Return the Ed25519 signature of the message, 64 bytes."""
        ...


@dataclass(frozen=True)
class SigningKey:
    """An Ed25519 private key that no repr shows."""

    _private: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """Return the key of a 32-byte seed. Raises ValueError for another length."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def generate(cls) -> Self:
        """Return a new random key."""
        return cls(Ed25519PrivateKey.generate())

    @property
    def seed(self) -> bytes:
        """The 32 secret bytes."""
        return self._private.private_bytes_raw()

    @property
    def public_key(self) -> bytes:
        """Raw Ed25519 public key, 32 bytes."""
        return self._private.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """Return the Ed25519 signature of the message, 64 bytes."""
        return self._private.sign(message)


def verify_signature(public_key: bytes, message: bytes, signature: bytes) -> None:
    """Raise SignatureError unless `signature` is that of the raw public key over the message."""
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        raise SignatureError("A signature or its public key has the wrong length.")
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise SignatureError(f"A signature is not that of the key {public_key.hex()[:16]}.") from None


def purpose_message(purpose: str, value: JsonValue) -> bytes:
    """Return the bytes to sign for one purpose: `neuroshard/<purpose>/1`, a zero byte, canonical JSON.

    They are not JSON, so a signature made for one purpose is never valid for another purpose or for plain JSON.
    """
    return f"neuroshard/{purpose}/1\0".encode() + canonical_json(value)


def sign_json(signer: Signer, value: JsonValue) -> str:
    """Sign the value's canonical JSON; return 128 hex digits. Raises ValueError as canonical_json does."""
    return signer.sign(canonical_json(value)).hex()


def verify_json(public_key: bytes, value: JsonValue, signature: str) -> None:
    """Raise SignatureError unless `signature` (hex) is that of the key over the value's canonical JSON."""
    try:
        raw = bytes.fromhex(signature)
    except ValueError:
        raise SignatureError("A signature is not written in hex digits.") from None
    verify_signature(public_key, canonical_json(value), raw)


def hash_parts(*parts: bytes | str | int) -> bytes:
    """Return SHA-256 (32 bytes) over the parts, each preceded by its length as 8 big-endian bytes.

    Text counts as UTF-8 and a whole number as its decimal digits; the prefixes keep ("ab", "c") and ("a", "bc") apart.
    """
    digest = sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
