"""Admissions to an organised run: the claims of joiners, admissions, revocations, and a member's register. Pure.

The owner of the run names up to three authority keys in its parameters. An organiser with such a key signs an
admission for one node: its wallet, its stage, and an hour. Every member checks admissions without asking anybody.
A node that waits in the queue may get a right to download, for minutes. It is not an admission.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from neuroshard.decoders import fault_of, msgpack_decoder
from neuroshard.errors import DataError
from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS, Signed, sign_message
from neuroshard.identity.invitations import PassBytes
from neuroshard.identity.signing import SignatureError, Signer
from neuroshard.types import (
    LATEST_TIME,
    MAX_ADDRESS_CHARACTERS,
    MAX_NODE_ID_CHARACTERS,
    PRINTABLE,
    HexDigest,
    LayerRange,
    NamedRun,
    NamedWallet,
    NodeId,
    RunId,
    WalletId,
)

ADMISSION_SECONDS = 3600
REFRESH_SECONDS = ADMISSION_SECONDS // 2  # after which a node renews its admission
DOWNLOAD_RIGHT_SECONDS = 300  # of a waiting node, which gets a new right with each poll
ADMISSION_GRACE_SECONDS = 72 * 3600.0  # for which members accept expired admissions while no organiser answers
OUTAGE_SECONDS = 2100  # without an admission of an authority: each member hears its own every half hour
RETURN_SECONDS = 600.0  # in which nodes refresh expired admissions after an outage, at members and at the organiser
MAX_ADMISSION_BYTES = 512
MAX_JOIN_BYTES = 16 * 1024  # of the claims that an organiser reads
MAX_JOIN_ADDRESSES = 4
MAX_NAME_CHARACTERS = 32
MAX_ADMISSIONS = 20_000
MAX_REVOKED = 4096
JOIN, REFRESH, LEAVE = "join", "refresh", "leave"  # kinds of the claims of a node
ADMISSION, ADMISSION_REVOCATION = "admission", "admission revocation"  # kinds of the messages of an authority
DOWNLOAD_RIGHT = "download right"  # the third kind
AdmissionBytes = Annotated[bytes, Meta(max_length=MAX_ADMISSION_BYTES)]  # encoded, in a message
_Name = Annotated[str, Meta(max_length=64, pattern=PRINTABLE)]
_Megabytes = Annotated[int, Meta(ge=0, le=10**9)]
_Rate = Annotated[float, Meta(ge=0, le=1e9)]
_Seconds = Annotated[int, Meta(ge=0, le=LATEST_TIME)]
_Node = Annotated[NodeId, Meta(max_length=MAX_NODE_ID_CHARACTERS, pattern=PRINTABLE)]
T = TypeVar("T")


class AdmissionError(DataError):
    """An admission or a revocation that is not accepted; the message gives the reason."""


class JoinClaim(Struct, frozen=True, forbid_unknown_fields=True):
    """The statement of a node that wants a place in a run: itself, its devices and its line."""

    run_id: NamedRun
    role: Literal["worker", "trainer"] = "worker"
    device: _Name = "cpu"
    device_memory_mb: _Megabytes = 0  # of all its accelerators
    memory_mb: _Megabytes = 0  # that the node may use
    ranks: Annotated[int, Meta(ge=1, le=4096)] = 1
    download_mbps: _Rate = 0.0  # 0: not measured
    upload_mbps: _Rate = 0.0
    latency_ms: _Rate = 0.0
    addresses: Annotated[
        tuple[Annotated[str, Meta(max_length=MAX_ADDRESS_CHARACTERS, pattern=PRINTABLE)], ...],
        Meta(max_length=MAX_JOIN_ADDRESSES),
    ] = ()
    layers_at_most: Annotated[int, Meta(ge=0, le=4096)] = 0  # 0: as many as fit
    release: _Name = ""
    release_sha256: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)] = ""  # that the owner wants to show
    invitation: PassBytes | None = None  # the pass that an invitation made for the wallet

    def __post_init__(self) -> None:
        if not self.name.isprintable():
            raise ValueError("name must be printable text")


class PlaceClaim(Struct, frozen=True, forbid_unknown_fields=True):
    """The statement of a node about its place: refresh its admission, or free the place."""

    run_id: NamedRun


class Admission(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The right of one node to take part in a run for a limited time."""

    run_id: HexDigest
    node: _Node
    wallet: NamedWallet
    stage: _Name  # such as "head-0"; "trainer" for a node without layers
    layers: LayerRange | None
    serial: Annotated[int, Meta(ge=0, le=2**53)]  # rises with every admission of an authority
    admitted_at: _Seconds
    expires_at: _Seconds


class DownloadRight(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The right of one waiting node to download the data of a run and the state of its probable stage."""

    run_id: HexDigest
    node: _Node
    wallet: NamedWallet
    stage: _Name
    layers: LayerRange | None  # None: a trainer, which downloads no state
    issued_at: _Seconds
    expires_at: _Seconds


class AdmissionRevocation(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The statement that a node, or all nodes of a wallet, may not take part any more. It has no end."""

    run_id: HexDigest
    node: _Node | None
    wallet: NamedWallet | None
    reason: Annotated[str, Meta(max_length=200, pattern=PRINTABLE)]
    at: _Seconds


def sign_admission(authority: Signer, admission: Admission) -> bytes:
    """Sign an admission with a key that the run's parameters name, and encode it."""
    return msgspec.msgpack.encode(sign_message(authority, ADMISSION, admission))


def sign_download_right(authority: Signer, right: DownloadRight) -> bytes:
    """Sign a right to download with a key that the run's parameters name, and encode it."""
    return msgspec.msgpack.encode(sign_message(authority, DOWNLOAD_RIGHT, right))


def sign_admission_revocation(authority: Signer, revocation: AdmissionRevocation) -> bytes:
    """Sign a revocation with a key that the run's parameters name, and encode it."""
    return msgspec.msgpack.encode(sign_message(authority, ADMISSION_REVOCATION, revocation))


def read_admission(data: bytes, run_id: RunId, authorities: Sequence[bytes]) -> Admission:
    """Read an admission and check its run and signature, but not its time. Raises AdmissionError."""
    admission = _verified(data, ADMISSION, Admission, authorities)
    if admission.run_id != run_id:
        raise AdmissionError(f"An admission is for run {admission.run_id[:16]}, not for {run_id[:16]}.")
    if not admission.admitted_at < admission.expires_at <= admission.admitted_at + ADMISSION_SECONDS:
        raise AdmissionError("An admission is valid for longer than an hour, or for no time.")
    return admission


def read_download_right(data: bytes, run_id: RunId, authorities: Sequence[bytes], now: float) -> DownloadRight:
    """Read a right to download and check its run, its signature and its time. Raises AdmissionError."""
    right = _verified(data, DOWNLOAD_RIGHT, DownloadRight, authorities)
    if right.run_id != run_id:
        raise AdmissionError(f"A right to download is for run {right.run_id[:16]}, not for {run_id[:16]}.")
    if not right.issued_at < right.expires_at <= right.issued_at + DOWNLOAD_RIGHT_SECONDS:
        raise AdmissionError("A right to download is valid for longer than its time, or for no time.")
    if right.issued_at > now + MAX_CLOCK_SKEW_SECONDS:
        raise AdmissionError("A right to download is dated in the future.", "Check the clocks of both computers.")
    if now > right.expires_at:
        raise AdmissionError(f"The right of node {right.node} to download has expired.", "Its node asks for a new one.")
    return right


def read_admission_revocation(data: bytes, run_id: RunId, authorities: Sequence[bytes]) -> AdmissionRevocation:
    """Read a revocation and check its run and signature. Raises AdmissionError."""
    revocation = _verified(data, ADMISSION_REVOCATION, AdmissionRevocation, authorities)
    if revocation.run_id != run_id:
        raise AdmissionError(f"A revocation is for run {revocation.run_id[:16]}, not for {run_id[:16]}.")
    if (revocation.node is None) == (revocation.wallet is None):
        raise AdmissionError("A revocation names either a node or a wallet.")
    return revocation


def _verified(data: bytes, kind: str, form: type[T], authorities: Sequence[bytes]) -> T:
    if len(data) > MAX_ADMISSION_BYTES:
        raise AdmissionError(f"The {kind} has {len(data)} bytes; at most {MAX_ADMISSION_BYTES} are allowed.")
    decoder = cast("Any", msgpack_decoder(Signed[form]))
    try:
        signed: Signed[T] = decoder.decode(data)
        statement = signed.read(form)
    except (ValueError, RecursionError) as error:
        raise AdmissionError(f"The {kind} cannot be read: {fault_of(error, form)}.") from None
    except DataError as error:
        raise AdmissionError(f"The {kind} cannot be read: {error}") from None
    for key in authorities:
        try:
            signed.verify(key, kind)
        except SignatureError:
            continue
        return statement
    raise AdmissionError(f"The {kind} is not signed by an authority of this run.")


class AdmissionRegister:
    """The admissions and revocations of one run that a member knows."""

    def __init__(self, run_id: RunId, authorities: Callable[[], Sequence[bytes]]) -> None:
        """`authorities` returns the keys that the newest parameters of the run name."""
        self._run_id = run_id
        self._authorities = authorities
        self._known: dict[NodeId, tuple[Admission, bytes]] = {}  # the one that was admitted last per node
        self._accepted: dict[bytes, Admission] = {}  # the same ones, by their bytes
        self._revoked: dict[str, bytes] = {}  # by node id or wallet id
        self._endings: set[bytes] = set()  # the same ones
        self._heard_at = 0  # newest date of an authority's admission: an organiser answered then
        self._silent_from = 0  # the last such date before the last outage
        self._back_at = 0  # the first such date after it

    def verify(self, data: bytes) -> Admission:
        """Read an admission and check its run and signature; changes nothing. Raises AdmissionError."""
        return read_admission(data, self._run_id, self._authorities())

    def verify_revocation(self, data: bytes) -> AdmissionRevocation:
        """Read a revocation and check its run and signature; changes nothing. Raises AdmissionError."""
        return read_admission_revocation(data, self._run_id, self._authorities())

    def verify_right(self, data: bytes, now: float) -> DownloadRight:
        """Read a right to download and check its run, signature and time; changes nothing. Raises AdmissionError."""
        return read_download_right(data, self._run_id, self._authorities(), now)

    def admit(
        self, data: bytes, now: float, *, is_stored: bool = False, verified: Admission | None = None
    ) -> Admission:
        """Check an admission and record it. Raises AdmissionError with the reason against it.

        An admission that has expired is refused, unless `is_stored`: this member knew it while it was live. In a full
        register the admission that ended first gives its place to a newcomer. One that is live never does.
        `verified` is the result of `verify`, if the caller has it.
        """
        accepted = self._accepted.get(data)  # every claim of the node shows it again; its signature was checked
        admission = accepted or verified or self.verify(data)
        if admission.admitted_at > now + MAX_CLOCK_SKEW_SECONDS:
            raise AdmissionError("An admission is dated in the future.", "Check the clocks of both computers.")
        if now > admission.expires_at and not is_stored:
            raise AdmissionError(f"The admission of node {admission.node} has expired.", _REFRESH)
        if not is_stored and 0 < self._heard_at < admission.admitted_at - OUTAGE_SECONDS:
            self._silent_from, self._back_at = self._heard_at, admission.admitted_at
        self._heard_at = max(self._heard_at, admission.admitted_at)
        known = self._known.get(admission.node)
        if known is not None and (accepted is not None or known[0].admitted_at > admission.admitted_at):
            return known[0]
        if known is not None:
            self._forget(admission.node)
        elif len(self._known) >= MAX_ADMISSIONS:
            first = min(self._known.values(), key=lambda one: one[0].expires_at)[0]
            if now <= first.expires_at:
                raise AdmissionError(f"The run has {MAX_ADMISSIONS:,} admitted nodes, the most that a node keeps.")
            self._forget(first.node)
        self._known[admission.node], self._accepted[data] = (admission, data), admission
        return admission

    def _forget(self, node: NodeId) -> None:
        del self._accepted[self._known.pop(node)[1]]

    def revoke(self, data: bytes, verified: AdmissionRevocation | None = None) -> bool:
        """Record a revocation of an authority; return whether it is new. Raises AdmissionError.

        `verified` is the result of `verify_revocation`, if the caller has it.
        """
        if data in self._endings:
            return False  # before the signature, which costs most: the organiser sends the same ones every half hour
        revocation = verified or self.verify_revocation(data)
        named = revocation.node or revocation.wallet or ""
        if named in self._revoked or len(self._revoked) >= MAX_REVOKED:
            return False
        self._revoked[named] = data
        self._endings.add(data)
        return True

    def refusal(self, node: NodeId, wallet: WalletId, now: float) -> str:
        """The reason why a node may not take part; "" if it may.

        An expired admission still counts for ADMISSION_GRACE_SECONDS while no organiser has answered since its end.
        After an outage it also counts for RETURN_SECONDS, because not all nodes refresh in the same moment. One that
        had ended before the outage began does not count: its node was alone in its silence.
        """
        if ended := self.ending(node, wallet):
            return ended
        known = self._known.get(node)
        if known is None or known[0].wallet != wallet:
            return f"Node {node} has not shown an admission to this organised run. {_JOIN}"
        expires_at = known[0].expires_at
        is_back = self._silent_from <= expires_at < self._back_at and now <= self._back_at + RETURN_SECONDS
        is_away = is_back or self._heard_at <= expires_at
        if now <= expires_at or (is_away and now <= expires_at + ADMISSION_GRACE_SECONDS):
            return ""
        return f"The admission of node {node} has expired. {_REFRESH}"

    def ending(self, node: NodeId, wallet: WalletId) -> str:
        """The sentence about a node whose place an authority ended for ever, or that of its wallet; otherwise ""."""
        is_ended = node in self._revoked or wallet in self._revoked
        return f"The organiser of the run ended the place of node {node}." if is_ended else ""

    def has(self, data: bytes) -> bool:
        """Whether this admission is the newest one of its node."""
        return data in self._accepted

    def has_wallet(self, wallet: WalletId) -> bool:
        """Whether a node of this wallet has shown an admission."""
        return any(admission.wallet == wallet for admission, _ in self._known.values())

    def admissions(self) -> tuple[bytes, ...]:
        """All known admissions, the newest last."""
        return tuple(data for _, data in self._known.values())

    def revocations(self) -> tuple[bytes, ...]:
        """All known revocations, the newest last."""
        return tuple(self._revoked.values())


_JOIN = "It joins through the organiser."
_REFRESH = "Its node must refresh it at the organiser."
