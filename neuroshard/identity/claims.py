"""Signed claims of a node, and the wallet's delegation to the node key.

Every reader can check the author, the purpose and the time of a claim. A delegation is valid for a limited time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from neuroshard.errors import DataError
from neuroshard.identity.node_key import NodeKey, node_id_of
from neuroshard.identity.signing import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Signer, purpose_message, verify_signature
from neuroshard.identity.strict_json import (
    canonical_json,
    exact_object,
    hex_field,
    number_field,
    parse_json,
    text_field,
)
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.types import JsonValue, NodeId, WalletId

MOST_KNOWN = 1024
_DELEGATION_FIELDS = {"node_public_key", "wallet_public_key", "expires_at", "signature"}


class DelegationExpiredError(DataError):
    """The wallet's delegation for this node has expired."""


@dataclass(frozen=True)
class Delegation:
    """Node key, wallet key and expiry (whole seconds since 1970), signed by the wallet."""

    node_public_key: bytes
    wallet_public_key: bytes
    expires_at: int
    signature: bytes

    @classmethod
    def issue(cls, wallet: Signer, node_public_key: bytes, expires_at: float) -> Delegation:
        """Return a delegation signed by the wallet; `expires_at` is cut to whole seconds."""
        message = _delegation_message(node_public_key, wallet.public_key, int(expires_at))
        return cls(node_public_key, wallet.public_key, int(expires_at), wallet.sign(message))

    @cached_property
    def node_id(self) -> NodeId:
        """The node that may act for the wallet."""
        return node_id_of(self.node_public_key)

    @property
    def wallet_id(self) -> WalletId:
        """The wallet that the node may act for."""
        return wallet_id_of(self.wallet_public_key)

    def verify(self, now: float, known: KnownDelegations | None = None) -> None:
        """Raise SignatureError if the wallet did not sign this, DelegationExpiredError if it has expired.

        A delegation in `known` is not verified again; a valid one is added to it.
        """
        if known is None or self not in known:
            message = _delegation_message(self.node_public_key, self.wallet_public_key, self.expires_at)
            verify_signature(self.wallet_public_key, message, self.signature)
            if known is not None:
                known.add(self)
        if now >= self.expires_at:
            raise DelegationExpiredError(f"The delegation of node {self.node_id} expired.")

    def to_json(self) -> Mapping[str, JsonValue]:
        """Return the fields by name, keys and signature in hex."""
        return {
            "node_public_key": self.node_public_key.hex(),
            "wallet_public_key": self.wallet_public_key.hex(),
            "expires_at": self.expires_at,
            "signature": self.signature.hex(),
        }

    @classmethod
    def from_json(cls, value: JsonValue) -> Delegation:
        """Read a delegation strictly, without verifying it. Raises ValueError that names the field."""
        fields = exact_object(value, _DELEGATION_FIELDS, "delegation")
        return cls(
            node_public_key=hex_field(fields["node_public_key"], PUBLIC_KEY_BYTES, "node_public_key"),
            wallet_public_key=hex_field(fields["wallet_public_key"], PUBLIC_KEY_BYTES, "wallet_public_key"),
            expires_at=int(number_field(fields["expires_at"], "expires_at")),
            signature=hex_field(fields["signature"], SIGNATURE_BYTES, "signature"),
        )


class KnownDelegations:
    """The most recent delegations whose signatures were verified.

    Every claim of a node contains its delegation, so one verification serves many claims.
    """

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._known: dict[Delegation, None] = {}

    def __contains__(self, delegation: Delegation) -> bool:
        return delegation in self._known

    def add(self, delegation: Delegation) -> None:
        """Remember a delegation whose signature is valid."""
        while len(self._known) >= self._most:
            del self._known[next(iter(self._known))]
        self._known[delegation] = None


def _delegation_message(node_public_key: bytes, wallet_public_key: bytes, expires_at: int) -> bytes:
    node, wallet = node_public_key.hex(), wallet_public_key.hex()
    return purpose_message("delegation", {"node": node, "wallet": wallet, "expires_at": expires_at})


MAX_CLAIM_BYTES = 64 * 1024
MAX_CLOCK_SKEW_SECONDS = 300.0
_MAX_DOMAIN_CHARACTERS = 64
_CLAIM_FIELDS = {"domain", "payload", "issued_at", "signature", "delegation"}


class MalformedClaimError(DataError):
    """Bytes that are not a claim."""


class ClaimTooLargeError(DataError):
    """A claim above the size limit, which was not read."""


class ForeignClaimError(DataError):
    """A claim made by another node or for another purpose than the reader expects."""


class ClaimExpiredError(DataError):
    """A claim that is too old, or dated in the future."""


@dataclass(frozen=True)
class SignedClaim:
    """One statement of a node with its signature; a decoded claim is not verified yet."""

    domain: str  # purpose of the claim, e.g. "announcement"
    payload: JsonValue
    issued_at: float  # seconds since 1970
    signature: bytes  # of the node key
    delegation: Delegation

    def encode(self) -> bytes:
        """Return the claim as canonical JSON. Raises ClaimTooLargeError above MAX_CLAIM_BYTES."""
        data = canonical_json(
            {
                "domain": self.domain,
                "payload": self.payload,
                "issued_at": self.issued_at,
                "signature": self.signature.hex(),
                "delegation": self.delegation.to_json(),
            }
        )
        return _checked_size(data, MAX_CLAIM_BYTES)

    @classmethod
    def decode(cls, data: bytes, max_bytes: int = MAX_CLAIM_BYTES) -> SignedClaim:
        """Read the bytes that `encode` wrote, without verifying. Raises ClaimTooLargeError or MalformedClaimError."""
        _checked_size(data, max_bytes)
        try:
            fields = exact_object(parse_json(data, max_bytes), _CLAIM_FIELDS, "claim")
            return cls(
                domain=text_field(fields["domain"], _MAX_DOMAIN_CHARACTERS, "domain"),
                payload=fields["payload"],
                issued_at=number_field(fields["issued_at"], "issued_at"),
                signature=hex_field(fields["signature"], SIGNATURE_BYTES, "signature"),
                delegation=Delegation.from_json(fields["delegation"]),
            )
        except (ValueError, OverflowError) as error:
            raise MalformedClaimError(f"A claim cannot be read: {error}.") from None


@dataclass(frozen=True)
class VerifiedClaim:
    """A claim whose signature, delegation, purpose and age were checked."""

    node_id: NodeId
    wallet_id: WalletId
    payload: JsonValue
    issued_at: float


@dataclass(frozen=True)
class NodeIdentity:
    """This node as others see it: its key, and the wallet that vouches for it."""

    wallet_id: WalletId
    node_id: NodeId
    key: NodeKey
    delegation: Delegation

    def __post_init__(self) -> None:
        if self.node_id != self.key.node_id or self.delegation.node_public_key != self.key.public_key:
            raise ValueError("the delegation is not for this node key")
        if self.wallet_id != self.delegation.wallet_id:
            raise ValueError("the delegation is not from this wallet")


def sign_claim(identity: NodeIdentity, domain: str, payload: JsonValue, now: float) -> SignedClaim:
    """Return a claim of this node, issued at `now`. Raises ValueError if a number in the payload is not finite."""
    signature = identity.key.sign(_claim_message(domain, payload, now, identity.delegation))
    return SignedClaim(domain, payload, now, signature, identity.delegation)


def verify_claim(
    claim: SignedClaim,
    domain: str,
    now: float,
    sender: NodeId | None = None,
    max_age_seconds: float | None = None,
    *,
    known: KnownDelegations | None = None,
) -> VerifiedClaim:
    """Check purpose, sender (if given), signature, delegation (unless it is `known`) and age, in this order.

    Raises ForeignClaimError, SignatureError, DelegationExpiredError or ClaimExpiredError.
    """
    if claim.domain != domain:
        raise ForeignClaimError(f"A claim is about {claim.domain!r}, expected {domain!r}.")
    node_id = claim.delegation.node_id
    if sender is not None and node_id != sender:
        raise ForeignClaimError(f"A claim of node {node_id} came in the name of {sender}.")
    message = _claim_message(claim.domain, claim.payload, claim.issued_at, claim.delegation)
    verify_signature(claim.delegation.node_public_key, message, claim.signature)
    claim.delegation.verify(now, known)
    if claim.issued_at > now + MAX_CLOCK_SKEW_SECONDS:
        raise ClaimExpiredError(f"A claim of node {node_id} is dated in the future.", "Check the clocks.")
    if max_age_seconds is not None and claim.issued_at < now - max_age_seconds:
        raise ClaimExpiredError(f"A claim of node {node_id} is older than {max_age_seconds:g} s.")
    return VerifiedClaim(node_id, claim.delegation.wallet_id, claim.payload, claim.issued_at)


def _claim_message(domain: str, payload: JsonValue, issued_at: float, delegation: Delegation) -> bytes:
    # includes the wallet: a claim must not be moved to another wallet that delegated to the same node
    return purpose_message(
        "claim",
        {
            "domain": domain,
            "payload": payload,
            "issued_at": float(issued_at),  # a reader has a float, and 5 and 5.0 give different bytes
            "node": delegation.node_public_key.hex(),
            "wallet": delegation.wallet_public_key.hex(),
        },
    )


def _checked_size(data: bytes, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise ClaimTooLargeError(f"A claim has {len(data)} bytes; at most {max_bytes} are allowed.")
    return data
