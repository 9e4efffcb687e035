"""The wallet: the Ed25519 key behind a token, and its public name."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from neuroshard.identity.signing import SigningKey
from neuroshard.identity.token import TokenSecret
from neuroshard.types import WalletId

_WALLET_LABEL = b"neuroshard/wallet/ed25519/1"


def wallet_id_of(public_key: bytes) -> WalletId:
    """First 16 hex digits of SHA-256(wallet public key)."""
    return WalletId(sha256(public_key).hexdigest()[:16])


@dataclass(frozen=True)
class Wallet:
    """Signs what the owner of the token stands for: delegations, runs, manifests."""

    _key: SigningKey = field(repr=False)

    @classmethod
    def from_secret(cls, secret: TokenSecret) -> Wallet:
        """The wallet of a token: HKDF-SHA256 (RFC 5869) of its secret with a label of its own, no salt."""
        seed = HKDF(algorithm=SHA256(), length=32, salt=None, info=_WALLET_LABEL).derive(secret.seed)
        return cls(SigningKey.from_seed(seed))

    @property
    def public_key(self) -> bytes:
        """Raw Ed25519 public key, 32 bytes."""
        return self._key.public_key

    @property
    def wallet_id(self) -> WalletId:
        """First 16 hex digits of SHA-256(public key)."""
        return wallet_id_of(self.public_key)

    def sign(self, message: bytes) -> bytes:
        """Ed25519 signature of the message, 64 bytes."""
        return self._key.sign(message)
