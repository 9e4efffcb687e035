"""Signed messages: `Signed`, the claims of a node, and the wallet's delegation to the node key.

A signature covers the bytes that travel and names the kind of the message. Every reader can check the author, the kind
and the time of a claim. A delegation is valid for a limited time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from neuroshard.decoders import fault_of, msgpack_decoder
from neuroshard.errors import DataError
from neuroshard.identity.node_key import NodeKey, node_id_of
from neuroshard.identity.signing import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Signer, verify_signature
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.types import DAY_SECONDS, LATEST_TIME, NodeId, UnixSeconds, WalletId

MAX_CLAIM_BYTES = 64 * 1024
MAX_CLOCK_SKEW_SECONDS = 300.0
DELEGATION_SECONDS = 14 * DAY_SECONDS  # the time for which a stolen node key can act for its wallet
MOST_KNOWN = 1024
_MAX_BODY_BYTES = MAX_CLAIM_BYTES - SIGNATURE_BYTES

PublicKey = Annotated[bytes, Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
T = TypeVar("T")


class MalformedClaimError(DataError):
    """Bytes that are not a claim."""


class ClaimTooLargeError(DataError):
    """A claim above the size limit, which was not read."""


class ForeignClaimError(DataError):
    """A claim made by another node or about another subject than the reader expects."""


class ClaimExpiredError(DataError):
    """A claim that is too old, or dated in the future."""


class DelegationExpiredError(DataError):
    """The wallet's delegation for this node has expired."""


class Signed(Struct, Generic[T], frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message of type T in msgpack, and the Ed25519 signature over exactly these bytes."""

    body: Annotated[bytes, Meta(max_length=_MAX_BODY_BYTES)]
    signature: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]

    def verify(self, public_key: bytes, kind: str) -> None:
        """Raise SignatureError unless the key signed this body as a message of this kind."""
        verify_signature(public_key, _to_sign(kind, self.body), self.signature)

    def read(self, form: type[T]) -> T:
        """Decode the message without verifying it. Raises MalformedClaimError that names the field."""
        return cast("T", _decoded(self.body, form))


def sign_message(signer: Signer, kind: str, message: T) -> Signed[T]:
    """Encode a message and sign it as one of this kind."""
    body = msgspec.msgpack.encode(message)
    return Signed(body, signer.sign(_to_sign(kind, body)))


def _to_sign(kind: str, body: bytes) -> bytes:
    # the prefix separates the kinds from each other, and all of them from `purpose_message`
    return f"neuroshard/signed/{kind}/1\0".encode() + body


def _decoded(data: bytes | msgspec.Raw, form: Any) -> Any:
    try:
        return msgpack_decoder(form).decode(data)
    except (ValueError, RecursionError) as error:  # ValidationError, DecodeError; text that is not UTF-8
        raise MalformedClaimError(f"A claim cannot be read: {fault_of(error, form)}.") from None


class DelegationGrant(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The statement of a wallet that a node may act for it until `expires_at`, in whole seconds since 1970."""

    node_public_key: PublicKey
    wallet_public_key: PublicKey
    expires_at: Annotated[int, Meta(ge=0, le=LATEST_TIME)]


@dataclass(frozen=True)
class Delegation:
    """A grant as the wallet signed it. `verify` checks the signature."""

    signed: Signed[DelegationGrant]
    grant: DelegationGrant = field(compare=False)

    @classmethod
    def issue(cls, wallet: Signer, node_public_key: bytes, expires_at: float) -> Delegation:
        """Return a delegation signed by the wallet; `expires_at` is cut to whole seconds."""
        grant = DelegationGrant(node_public_key, wallet.public_key, int(expires_at))
        return cls(sign_message(wallet, "delegation", grant), grant)

    @classmethod
    def read(cls, signed: Signed[DelegationGrant]) -> Delegation:
        """Read a delegation without verifying it. Raises MalformedClaimError."""
        return cls(signed, signed.read(DelegationGrant))

    @cached_property
    def node_id(self) -> NodeId:
        """The node that may act for the wallet."""
        return node_id_of(self.grant.node_public_key)

    @property
    def wallet_id(self) -> WalletId:
        """The wallet that the node may act for."""
        return wallet_id_of(self.grant.wallet_public_key)

    def verify(self, now: float, known: KnownDelegations | None = None) -> None:
        """Raise SignatureError if the wallet did not sign this, DelegationExpiredError if it has expired.

        A delegation in `known` is not verified again; a valid one is added to it.
        """
        if known is None or self not in known:
            self.signed.verify(self.grant.wallet_public_key, "delegation")
            if known is not None:
                known.add(self)
        if now >= self.grant.expires_at:
            raise DelegationExpiredError(f"The delegation of node {self.node_id} expired.")


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


class ClaimBody(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The bytes that a node signs. They contain the delegation, so that a claim cannot be moved to another wallet."""

    payload: msgspec.Raw
    issued_at: UnixSeconds
    delegation: Signed[DelegationGrant]


@dataclass(frozen=True)
class SignedClaim(Generic[T]):
    """One statement of a node with its signature; a decoded claim is not verified yet."""

    signed: Signed[ClaimBody]  # by the node key
    payload: T = field(compare=False)
    issued_at: float = field(compare=False)  # seconds since 1970
    delegation: Delegation = field(compare=False)

    @property
    def is_canonical(self) -> bool:
        """Whether `sign_claim` writes these signed bytes; an author could sign others of the same meaning."""
        body = ClaimBody(msgspec.Raw(msgspec.msgpack.encode(self.payload)), self.issued_at, self.delegation.signed)
        grant = msgspec.msgpack.encode(self.delegation.grant)
        return msgspec.msgpack.encode(body) == self.signed.body and grant == self.delegation.signed.body

    def encode(self) -> bytes:
        """Return the bytes to send. Raises ClaimTooLargeError above MAX_CLAIM_BYTES."""
        return _checked_size(msgspec.msgpack.encode(self.signed), MAX_CLAIM_BYTES)


@dataclass(frozen=True)
class VerifiedClaim(Generic[T]):
    """A claim whose signature, delegation, kind and age were checked."""

    node_id: NodeId
    wallet_id: WalletId
    payload: T
    issued_at: float


@dataclass(eq=False)
class NodeIdentity:
    """This node as others see it: its key, and the wallet that vouches for it."""

    wallet_id: WalletId
    node_id: NodeId
    key: NodeKey
    delegation: Delegation  # the newest one
    wallet: Signer | None = field(default=None, repr=False)  # renews the delegation; None: it is never renewed

    def __post_init__(self) -> None:
        if self.node_id != self.key.node_id or self.delegation.grant.node_public_key != self.key.public_key:
            raise ValueError("the delegation is not for this node key")
        if self.wallet_id != self.delegation.wallet_id:
            raise ValueError("the delegation is not from this wallet")

    def delegation_at(self, now: float) -> Delegation:
        """The delegation to show to others, which is renewed when half of its time has passed, or the clock was set."""
        left = self.delegation.grant.expires_at - now
        if self.wallet is not None and not DELEGATION_SECONDS / 2 <= left <= DELEGATION_SECONDS:
            self.delegation = Delegation.issue(self.wallet, self.key.public_key, now + DELEGATION_SECONDS)
        return self.delegation


def sign_claim(identity: NodeIdentity, kind: str, payload: T, now: float) -> SignedClaim[T]:
    """Return a claim of this node, issued at `now`. The kind, e.g. "announcement", is part of the signature."""
    delegation = identity.delegation_at(now)
    body = ClaimBody(msgspec.Raw(msgspec.msgpack.encode(payload)), now, delegation.signed)
    return SignedClaim(sign_message(identity.key, kind, body), payload, now, delegation)


def read_claim(data: bytes, form: type[T], max_bytes: int = MAX_CLAIM_BYTES) -> SignedClaim[T]:
    """Read a claim with a payload of type `form` (`object`: any) without verifying it.

    Raises ClaimTooLargeError, or MalformedClaimError that names the field.
    """
    signed: Signed[ClaimBody] = _decoded(_checked_size(data, max_bytes), Signed[ClaimBody])
    # msgpack has several forms of one length, and no signature covers the lengths of body and signature. A claim with
    # the same signature in other bytes would look like a second claim, and honest nodes would be blamed for it.
    if msgspec.msgpack.encode(signed) != data:
        raise MalformedClaimError("A claim cannot be read: it is not in the shortest encoding.")
    body = signed.read(ClaimBody)
    payload: T = _decoded(body.payload, form)
    return SignedClaim(signed, payload, body.issued_at, Delegation.read(body.delegation))


def verify_claim(
    claim: SignedClaim[T],
    kind: str,
    now: float,
    sender: NodeId | None = None,
    max_age_seconds: float | None = None,
    *,
    known: KnownDelegations | None = None,
) -> VerifiedClaim[T]:
    """Check sender (if given), signature and kind, delegation (unless it is `known`) and age, in this order.

    Raises ForeignClaimError, SignatureError, DelegationExpiredError or ClaimExpiredError.
    """
    delegation = claim.delegation
    node_id = delegation.node_id
    if sender is not None and node_id != sender:
        raise ForeignClaimError(f"A claim of node {node_id} came in the name of {sender}.")
    claim.signed.verify(delegation.grant.node_public_key, kind)
    delegation.verify(now, known)
    if claim.issued_at > now + MAX_CLOCK_SKEW_SECONDS:
        raise ClaimExpiredError(f"A claim of node {node_id} is dated in the future.", "Check the clocks.")
    if max_age_seconds is not None and claim.issued_at < now - max_age_seconds:
        raise ClaimExpiredError(f"A claim of node {node_id} is older than {max_age_seconds:g} s.")
    return VerifiedClaim(node_id, delegation.wallet_id, claim.payload, claim.issued_at)


def _checked_size(data: bytes, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise ClaimTooLargeError(f"A claim has {len(data)} bytes; at most {max_bytes} are allowed.")
    return data
