"""A wallet's word that a node acts for it, for a limited time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from neuroshard.errors import DataError
from neuroshard.identity.fields import exact_object, hex_field, number_field
from neuroshard.identity.peer_id import node_id_of
from neuroshard.identity.signing import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Signer,
    purpose_message,
    verify_signature,
)
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.types import JsonValue, NodeId, WalletId

MOST_KNOWN = 1024
_FIELDS = {"node_public_key", "wallet_public_key", "expires_at", "signature"}


class DelegationExpiredError(DataError):
    """The wallet's delegation for this node has run out."""


@dataclass(frozen=True)
class Delegation:
    """Node key, wallet key and expiry (whole seconds since 1970), signed by the wallet."""

    node_public_key: bytes
    wallet_public_key: bytes
    expires_at: int
    signature: bytes

    @classmethod
    def issue(cls, wallet: Signer, node_public_key: bytes, expires_at: float) -> Delegation:
        """A delegation that the wallet signs; `expires_at` is cut to whole seconds."""
        message = _message(node_public_key, wallet.public_key, int(expires_at))
        return cls(node_public_key, wallet.public_key, int(expires_at), wallet.sign(message))

    @cached_property
    def node_id(self) -> NodeId:
        """The node that may act."""
        return node_id_of(self.node_public_key)

    @property
    def wallet_id(self) -> WalletId:
        """The wallet it acts for."""
        return wallet_id_of(self.wallet_public_key)

    def verify(self, now: float, known: KnownDelegations | None = None) -> None:
        """Raises SignatureError when the wallet did not sign this, DelegationExpiredError when it has run out.

        The signature of one that is `known` holds; others that hold are known afterwards.
        """
        if known is None or self not in known:
            message = _message(self.node_public_key, self.wallet_public_key, self.expires_at)
            verify_signature(self.wallet_public_key, message, self.signature)
            if known is not None:
                known.add(self)
        if now >= self.expires_at:
            raise DelegationExpiredError(f"The delegation of node {self.node_id} expired.")

    def to_json(self) -> Mapping[str, JsonValue]:
        """Keys and signature in hex."""
        return {
            "node_public_key": self.node_public_key.hex(),
            "wallet_public_key": self.wallet_public_key.hex(),
            "expires_at": self.expires_at,
            "signature": self.signature.hex(),
        }

    @classmethod
    def from_json(cls, value: JsonValue) -> Delegation:
        """Strict reading, without verifying. Raises ValueError that names the field."""
        fields = exact_object(value, _FIELDS, "delegation")
        return cls(
            node_public_key=hex_field(fields["node_public_key"], PUBLIC_KEY_BYTES, "node_public_key"),
            wallet_public_key=hex_field(fields["wallet_public_key"], PUBLIC_KEY_BYTES, "wallet_public_key"),
            expires_at=int(number_field(fields["expires_at"], "expires_at")),
            signature=hex_field(fields["signature"], SIGNATURE_BYTES, "signature"),
        )


class KnownDelegations:
    """Delegations whose signatures were checked: one comes with every claim of its node. The youngest few are kept."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._known: dict[Delegation, None] = {}

    def __contains__(self, delegation: Delegation) -> bool:
        return delegation in self._known

    def add(self, delegation: Delegation) -> None:
        """Remember one whose signature holds."""
        while len(self._known) >= self._most:
            del self._known[next(iter(self._known))]
        self._known[delegation] = None


def _message(node_public_key: bytes, wallet_public_key: bytes, expires_at: int) -> bytes:
    node, wallet = node_public_key.hex(), wallet_public_key.hex()
    return purpose_message("delegation", {"node": node, "wallet": wallet, "expires_at": expires_at})
