"""Invitations to a run of friends: grants, passes and revocations as signed messages, and the code that people pass on.

The chain is owner key -> invitation key -> wallet. The owner signs a grant for the key of an invitation. The holder of
the invitation's secret signs a pass for a wallet and shows only the pass. A pass need not stay secret: it is worth
something only to the owner of its wallet. Pure: no sockets, no files, no clock.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from neuroshard.config.multiaddr import checked_multiaddr
from neuroshard.decoders import msgpack_decoder
from neuroshard.errors import UsageError
from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS, MalformedClaimError, PublicKey, Signed, sign_message
from neuroshard.identity.signing import SEED_BYTES, SignatureError, Signer, SigningKey, hash_parts
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.types import LATEST_TIME, MAX_ADDRESS_CHARACTERS, RunId, WalletId

MAX_USES = 10_000
MAX_LABEL_CHARACTERS = 40
MAX_PASS_BYTES = 1024
MAX_REVOCATION_BYTES = 512
MAX_TIP_HEIGHT = 1 << 48
GRANT, PASS, REVOCATION = "invitation grant", "pass", "pass revocation"  # kinds of signed messages
PassBytes = Annotated[bytes, Meta(max_length=MAX_PASS_BYTES)]  # an encoded pass in a message
RevocationBytes = Annotated[bytes, Meta(max_length=MAX_REVOCATION_BYTES)]
_SECONDS = Annotated[int, Meta(ge=0, le=LATEST_TIME)]
_RunBytes = Annotated[bytes, Meta(min_length=32, max_length=32)]


class InvitationError(UsageError):
    """An invitation or a pass that is not accepted; the message gives the reason."""


class InvitedTip(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The line of one stage that the inviter has verified: the invited follows no other one, and no older one.

    Of that line it names the foundation, and a certified value that the line's later ledgers keep, if there is one.
    """

    stage: Annotated[int, Meta(ge=0, le=4096)]
    epoch: Annotated[int, Meta(ge=0, le=65_535)]
    foundation: Annotated[bytes, Meta(min_length=32, max_length=32)]  # its hash
    height: Annotated[int, Meta(ge=0, le=MAX_TIP_HEIGHT)] = 0
    value: Annotated[bytes, Meta(min_length=32, max_length=32)] | None = None  # its hash


class InvitationGrant(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The right of an invitation's key to make passes for a run.

    The owner signs it. With a `parent`, the parent's invitation key signs it; the parent is then a grant of the owner
    that may invite.
    """

    run_id: _RunBytes
    owner: PublicKey
    invitation: PublicKey
    not_after: _SECONDS
    uses: Annotated[int, Meta(ge=1, le=MAX_USES)]  # number of wallets
    label: Annotated[str, Meta(max_length=MAX_LABEL_CHARACTERS)]  # for people
    may_invite: bool = False
    parent: Signed[InvitationGrant] | None = None
    tip: InvitedTip | None = None  # also in every pass: nobody can take it out of an invitation

    def __post_init__(self) -> None:
        if not self.label.isprintable():  # also excludes characters that change the direction of the text
            raise ValueError("label must be printable text")


class PassStatement(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The bytes of a pass that the invitation's key signs."""

    grant: Signed[InvitationGrant]
    wallet: PublicKey
    issued_at: _SECONDS


class Revocation(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The owner's statement that the passes of an invitation or of a wallet, or one pass, are no longer valid."""

    run_id: _RunBytes
    key: PublicKey  # of the invitation or the wallet, or the place that a pass takes
    issued_at: _SECONDS


@dataclass(frozen=True)
class MemberPass:
    """A pass and its grants, read but not verified."""

    encoded: bytes
    signed: Signed[PassStatement] = field(compare=False)
    statement: PassStatement = field(compare=False)
    grants: tuple[InvitationGrant, ...] = field(compare=False)  # that of the invitation, then its parent, if any

    @classmethod
    def read(cls, data: bytes) -> MemberPass:
        """Read a pass. Raises InvitationError."""
        if len(data) > MAX_PASS_BYTES:
            raise InvitationError(f"A pass has {len(data)} bytes; at most {MAX_PASS_BYTES} are allowed.")
        try:
            signed = msgpack_decoder(Signed[PassStatement]).decode(data)
            if msgspec.msgpack.encode(signed) != data:  # other bytes would look like another pass
                raise InvitationError("A pass is not in the shortest encoding.")
            statement = signed.read(PassStatement)
            return cls(data, signed, statement, grants_of(statement.grant))
        except (ValueError, RecursionError, MalformedClaimError):
            raise InvitationError("A pass cannot be read.") from None

    @property
    def wallet_id(self) -> WalletId:
        """The wallet that may take part."""
        return wallet_id_of(self.statement.wallet)

    @property
    def place(self) -> bytes:
        """Names the place that this wallet takes of the invitation: 32 bytes, the same for every pass of the two."""
        return hash_parts("neuroshard/place", self.grants[0].invitation, self.statement.wallet)

    @property
    def ending_keys(self) -> frozenset[bytes]:
        """The keys of which each ends this pass if the owner revokes it: place, wallet and invitations."""
        return frozenset((self.place, self.statement.wallet, *(grant.invitation for grant in self.grants)))

    @property
    def label(self) -> str:
        """The label of the invitation, for people."""
        return self.grants[0].label

    @property
    def tip(self) -> InvitedTip | None:
        """The line that the inviter has verified, if the invitation names one."""
        return _tip_of(self.grants)

    @property
    def not_after(self) -> int:
        """Time until which the pass could be made, in seconds since 1970."""
        return min(grant.not_after for grant in self.grants)

    def verify(self, run_id: RunId, owner: bytes) -> None:
        """Check the run, all signatures and the date of issue. Raises InvitationError."""
        verify_grants(self.statement.grant, self.grants, run_id, owner)
        try:
            self.signed.verify(self.grants[0].invitation, PASS)
        except SignatureError:
            raise InvitationError("A pass was not signed with the key of its invitation.") from None
        if self.statement.issued_at > self.not_after + MAX_CLOCK_SKEW_SECONDS:
            raise InvitationError(f"A pass was made after its invitation ended ({date_of(self.not_after)}).")


def is_pass_of(data: bytes, wallet: WalletId, run_id: RunId, owner: bytes) -> bool:
    """Whether these bytes, as a node sends them, are a pass of the wallet that leads to the owner of the run."""
    try:
        member_pass = MemberPass.read(data)
        member_pass.verify(run_id, owner)
    except InvitationError:
        return False
    return member_pass.wallet_id == wallet


def _tip_of(grants: tuple[InvitationGrant, ...]) -> InvitedTip | None:
    return next((grant.tip for grant in grants if grant.tip is not None), None)


def grants_of(signed: Signed[InvitationGrant]) -> tuple[InvitationGrant, ...]:
    """Read a grant and its parent without verifying them. Raises InvitationError for a chain that is too long."""
    grant = signed.read(InvitationGrant)
    if grant.parent is None:
        return (grant,)
    parent = grant.parent.read(InvitationGrant)
    if parent.parent is not None:
        raise InvitationError("A guest of a guest cannot invite others.", "Ask the owner of the run for an invitation.")
    return (grant, parent)


def verify_grants(
    signed: Signed[InvitationGrant], grants: tuple[InvitationGrant, ...], run_id: RunId, owner: bytes
) -> None:
    """Check that the owner's key leads to this grant of the run. Raises InvitationError with the reason."""
    if any(grant.run_id.hex() != run_id or grant.owner != owner for grant in grants):
        raise InvitationError(
            f"The invitation is for another run. The peers serve run {run_id[:16]}.", "Ask for a new invitation."
        )
    try:
        if len(grants) == 1:
            signed.verify(owner, GRANT)
            return
        grant, parent = grants
        assert grant.parent is not None
        grant.parent.verify(owner, GRANT)
        signed.verify(parent.invitation, GRANT)
    except SignatureError:
        raise InvitationError(
            "The invitation is not signed by the owner of the run.", "Ask the owner of the run for an invitation."
        ) from None
    _check_guests_grant(grant, parent)


def _check_guests_grant(grant: InvitationGrant, parent: InvitationGrant) -> None:
    if not parent.may_invite or grant.may_invite:
        raise InvitationError("The invitation was made by a guest who may not invite.", "Ask the owner of the run.")
    if grant.uses >= parent.uses or grant.not_after > parent.not_after:
        raise InvitationError("The invitation has more uses than the guest may give.", "Ask for one with fewer uses.")


def date_of(seconds: float) -> str:
    """A time for people, such as 2026-12-04 13:45 UTC."""
    return datetime.fromtimestamp(min(seconds, 250_000_000_000), UTC).strftime("%Y-%m-%d %H:%M UTC")


def sign_revocation(owner: Signer, run_id: RunId, key: bytes, now: float) -> bytes:
    """Revoke an invitation, its passes and those of invitations made with it, the passes of a wallet, or one place."""
    statement = Revocation(bytes.fromhex(run_id), key, int(now))
    return msgspec.msgpack.encode(sign_message(owner, REVOCATION, statement))


def read_revocation(data: bytes, run_id: RunId, owner: bytes) -> Revocation:
    """Read and verify a revocation. Raises InvitationError."""
    try:
        if len(data) > MAX_REVOCATION_BYTES:
            raise InvitationError(f"A revocation has {len(data)} bytes; at most {MAX_REVOCATION_BYTES} are allowed.")
        signed = msgpack_decoder(Signed[Revocation]).decode(data)
        revocation: Revocation = signed.read(Revocation)
        signed.verify(owner, REVOCATION)
    except (ValueError, MalformedClaimError, SignatureError):
        raise InvitationError("A revocation cannot be read or is not signed by the owner of the run.") from None
    if revocation.run_id.hex() != run_id:
        raise InvitationError("A revocation is of another run.")
    return revocation


VERSION = 1
MAX_CODE_CHARACTERS = 1600
FEWEST_CHARACTERS = 40  # of a text that is taken for a code with a part cut off: a whole code has several hundred
MAX_PEERS = 3
MAX_DATA_PLACES = 2
MAX_NAME_CHARACTERS = 40
LINK = "neuroshard://join/"
FILE_SUFFIX = ".neuroshard-invitation"
_CHECKSUM_BYTES = 4
_CODE = re.compile(r"[A-Za-z0-9_-]*")
_HTTPS_LINK = re.compile(r"https://[^/?#\s]+/join/?#(?P<code>\S*)", re.IGNORECASE)
_COPY = "Copy all of it, from the first to the last character."
_Url = Annotated[str, Meta(max_length=MAX_ADDRESS_CHARACTERS)]


class InvitedModel(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The model of the run as the inviter states it, so that the invited can decide before they ask any node.

    It is only shown. The signed parameters of the run decide.
    """

    parameters: Annotated[int, Meta(ge=1, le=1 << 50)]
    stages: Annotated[int, Meta(ge=1, le=4096)]
    stage_mb: Annotated[int, Meta(ge=1, le=1 << 40)]  # memory with which a computer can hold the smallest stage


class Invitation(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of a code: a grant, the secret that makes passes of it, and places to begin with.

    Anyone who reads it can join, so no log contains it.
    """

    signed_grant: Signed[InvitationGrant]
    secret: Annotated[bytes, Meta(min_length=SEED_BYTES, max_length=SEED_BYTES)]
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]  # of the run
    peers: Annotated[tuple[_Url, ...], Meta(max_length=MAX_PEERS)]  # multiaddrs with node ids
    data: Annotated[tuple[_Url, ...], Meta(max_length=MAX_DATA_PLACES)]  # https:// addresses of the run's data
    organiser: _Url | None = None
    model: InvitedModel | None = None

    def __post_init__(self) -> None:
        if not self.name.isprintable():
            raise ValueError("name must be printable text")

    def __repr__(self) -> str:
        """The label and the key's first digits only: an invitation in a log would let its readers join."""
        return f"Invitation({self.label!r}, {self.grant.invitation.hex()[:8]})"

    @property
    def grant(self) -> InvitationGrant:
        """The grant; `check` verifies it."""
        return self.signed_grant.read(InvitationGrant)

    @property
    def label(self) -> str:
        """The label of the grant."""
        return self.grant.label

    @property
    def run_id(self) -> RunId:
        """The run that it leads to."""
        return RunId(self.grant.run_id.hex())

    @property
    def tip(self) -> InvitedTip | None:
        """The line that the inviter has verified; a guest's own invitation counts before its parent."""
        return _tip_of(grants_of(self.signed_grant))

    @property
    def not_after(self) -> int:
        """Time at which it ends, in seconds since 1970."""
        return min(grant.not_after for grant in grants_of(self.signed_grant))

    def check(self, run_id: RunId, owner: bytes, now: float) -> None:
        """Check the grant against the run that the peers serve, and the date. Raises InvitationError."""
        grants = grants_of(self.signed_grant)
        verify_grants(self.signed_grant, grants, run_id, owner)
        check_date(self.not_after, now)

    def pass_for(self, wallet: bytes, now: float) -> bytes:
        """Make the pass of a wallet, given by its public key."""
        statement = PassStatement(self.signed_grant, wallet, int(now))
        return msgspec.msgpack.encode(sign_message(SigningKey.from_seed(self.secret), PASS, statement))


def check_date(not_after: float, now: float) -> None:
    """Raise InvitationError if an invitation has expired."""
    if now > not_after + MAX_CLOCK_SKEW_SECONDS:
        raise InvitationError(f"The invitation expired on {date_of(not_after)}.", "Ask for a new invitation.")


@dataclass(frozen=True)
class InvitationTerms:
    """Limits of a new invitation."""

    not_after: float  # seconds since 1970
    uses: int = 1
    label: str = ""
    may_invite: bool = False
    tip: InvitedTip | None = None


@dataclass(frozen=True)
class InvitedPlaces:
    """Places with which an invited node begins."""

    name: str  # of the run
    peers: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    organiser: str | None = None
    model: InvitedModel | None = None


def invite(owner: Signer, run_id: RunId, terms: InvitationTerms, places: InvitedPlaces, *, seed: bytes) -> Invitation:
    """Make an invitation as the owner of the run. `seed` is the secret of the invitation's key: 32 random bytes.

    Raises InvitationError for terms that are not possible.
    """
    key = SigningKey.from_seed(seed)
    return _invitation(key, places, owner, _grant(run_id, owner.public_key, key, terms, None))


def invite_as_guest(
    member_pass: MemberPass, secret: bytes, terms: InvitationTerms, places: InvitedPlaces, *, seed: bytes
) -> Invitation:
    """Make an invitation with the secret of an invitation that may invite. Raises InvitationError."""
    parent, key = member_pass.grants[0], SigningKey.from_seed(seed)
    if parent.parent is not None:
        raise InvitationError("This pass was made with a guest's invitation and cannot invite.", "Ask the owner.")
    grant = _grant(RunId(parent.run_id.hex()), parent.owner, key, terms, member_pass.statement.grant)
    _check_guests_grant(grant, parent)
    return _invitation(key, places, SigningKey.from_seed(secret), grant)


def _grant(
    run_id: RunId, owner: bytes, key: SigningKey, terms: InvitationTerms, parent: Signed[InvitationGrant] | None
) -> InvitationGrant:
    try:
        return InvitationGrant(
            bytes.fromhex(run_id),
            owner,
            key.public_key,
            int(terms.not_after),
            terms.uses,
            terms.label,
            terms.may_invite,
            parent,
            terms.tip,
        )
    except ValueError as error:
        raise _impossible(error) from None


def _invitation(key: SigningKey, places: InvitedPlaces, signer: Signer, grant: InvitationGrant) -> Invitation:
    signed = sign_message(signer, GRANT, grant)
    try:
        signed.read(InvitationGrant)  # checks the limits, which the constructor does not
    except MalformedClaimError as error:
        raise _impossible(error) from None
    name = places.name[:MAX_NAME_CHARACTERS]
    return Invitation(signed, key.seed, name, places.peers, places.data, places.organiser, places.model)


def _impossible(error: Exception) -> InvitationError:
    return InvitationError(f"An invitation cannot have these terms: {error}", "Choose other terms.")


def to_code(invitation: Invitation) -> str:
    """Encode an invitation: base64url of the version, MessagePack and the first bytes of their BLAKE3.

    Raises InvitationError if it would be too long, and for places that `read_invitation` refuses.
    """
    _check_places(invitation)
    content = bytes([VERSION]) + msgspec.msgpack.encode(invitation)
    code = _to_base64(content + _checksum(content))
    if len(code) > MAX_CODE_CHARACTERS:
        raise InvitationError(
            f"The invitation would have {len(code)} characters; at most {MAX_CODE_CHARACTERS} are possible.",
            "Leave out peers or data, or choose a shorter label.",
        )
    return code


def read_invitation(text: str) -> Invitation:
    """Read a code or one of its links, as somebody pasted it. Signatures and dates are not checked.

    Raises InvitationError with the reason. Memory and time are bounded by the length of the text.
    """
    if len(text) > 2 * MAX_CODE_CHARACTERS:
        raise _too_long(len(text))
    if not text.strip():
        raise InvitationError("There is no invitation.", "Paste its link or its code.")
    code = _code_in(text.strip())
    if code == text.strip() and (len(code) < FEWEST_CHARACTERS or "://" in code or len(code.split()) > 1):
        raise InvitationError("This text is not an invitation.", "Paste the whole link or the whole code of one.")
    if len(code) > MAX_CODE_CHARACTERS:
        raise _too_long(len(code))
    data = _from_base64(code)
    content, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if not content or checksum != _checksum(content):
        raise InvitationError("The invitation is damaged.", _COPY)
    if content[0] != VERSION:
        raise InvitationError(f"The invitation is of version {content[0]}, which this program does not know.", _UPDATE)
    try:
        invitation: Invitation = msgpack_decoder(Invitation).decode(content[1:])
        grants_of(invitation.signed_grant)
    except (ValueError, RecursionError, MalformedClaimError):
        raise InvitationError("The invitation has a form that this program does not know.", _UPDATE) from None
    _check_places(invitation)
    return invitation


_UPDATE = "Update NeuroShard first."


def _code_in(text: str) -> str:
    if text.lower().startswith(LINK):
        return text[len(LINK) :].rstrip("/")
    found = _HTTPS_LINK.fullmatch(text)
    return text if found is None else found["code"]


def _too_long(characters: int) -> InvitationError:
    return InvitationError(
        f"The invitation has {characters} characters; at most {MAX_CODE_CHARACTERS} are read.",
        "Copy only the invitation.",
    )


def _checksum(content: bytes) -> bytes:
    return blake3(content).digest(_CHECKSUM_BYTES)


def _to_base64(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _from_base64(code: str) -> bytes:
    if not _CODE.fullmatch(code) or len(code) % 4 == 1:
        raise InvitationError("The invitation is damaged.", _COPY)
    data = urlsafe_b64decode(code + "=" * (-len(code) % 4))
    if _to_base64(data) != code:  # unused bits of the last character
        raise InvitationError("The invitation is damaged.", _COPY)
    return data


def _check_places(invitation: Invitation) -> None:
    for peer in invitation.peers:
        try:
            checked_multiaddr(peer)
        except ValueError as error:
            raise InvitationError(f"The invitation has an address that cannot be used: {error}.", _ASK) from None
    for kind, url in (*(("data", place) for place in invitation.data), ("organiser", invitation.organiser)):
        if url is not None and not _is_https(url):
            raise InvitationError(
                f"The invitation has an address of its {kind} that does not start with https://.", _ASK
            )


_ASK = "Ask for a new invitation."


def _is_https(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme == "https" and bool(parts.hostname) and url.isascii() and url.isprintable()
    except ValueError:
        return False
