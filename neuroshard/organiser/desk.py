"""The admission desk of an organised run: joins, polls of the queue, refreshed admissions, and places that become free.

Every answer follows a commit, so a repeated request gets the same place, also after a kill. The clock, the database and
the source of random names are arguments. One thread calls the desk at a time.
"""

from __future__ import annotations

import hmac
import logging
import sqlite3
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field

from neuroshard.config.run_parameters import RunParameters
from neuroshard.errors import DataError
from neuroshard.identity import (
    ClaimExpiredError,
    ClaimTooLargeError,
    DelegationExpiredError,
    KnownDelegations,
    SignatureError,
    VerifiedClaim,
    hash_parts,
    read_claim,
    verify_claim,
)
from neuroshard.identity.admissions import (
    ADMISSION_SECONDS,
    DOWNLOAD_RIGHT_SECONDS,
    JOIN,
    LEAVE,
    MAX_JOIN_BYTES,
    REFRESH,
    REFRESH_SECONDS,
    RETURN_SECONDS,
    Admission,
    DownloadRight,
    JoinClaim,
    PlaceClaim,
    sign_admission,
    sign_download_right,
)
from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS
from neuroshard.identity.invitations import InvitationError, MemberPass, check_date
from neuroshard.identity.signing import SigningKey
from neuroshard.organiser.database import Database, HeldPlace, Waiting
from neuroshard.organiser.ended_passes import EndedPasses
from neuroshard.organiser.places import (
    DOWNLOADING_AT_ONCE,
    DownloadSlots,
    Joiner,
    StagePlaces,
    assigned,
    estimated_wait,
    neediest,
)
from neuroshard.organiser.refusals import OrganiserError
from neuroshard.runs.offer import RunOffer
from neuroshard.types import LayerRange, NodeId, WalletId

_LOG = logging.getLogger(__name__)

POLL_SECONDS = 10
SILENT_POLLS = 3  # after which a waiting node loses its place in the queue
SWEEP_SECONDS = 1.0  # between two looks for places that became free and nodes that fell silent
SAME_SECONDS = 60  # in which a repeated refresh gets the same admission
MOST_REVOCATIONS_SENT = 64
MOST_WAITING = 1000
FULL_SECONDS = 60  # after which a node that found the queue full asks again
_Claim = TypeVar("_Claim", JoinClaim, PlaceClaim)


class _Answered(BaseModel):
    """The node of an answer, and the addresses that it announces. Both stay in the process."""

    node: Annotated[NodeId, Field(exclude=True)]
    addresses: Annotated[tuple[str, ...], Field(exclude=True)] = ()


class Admitted(_Answered):
    """The answer to a node that has a place."""

    status: Literal["admitted"] = "admitted"
    admission: Annotated[str, Field(description="the signed admission, in base64")]
    stage: Annotated[str, Field(description="where the node counts: head-0, body-0, ..., tail-0, or trainer")]
    layers: tuple[int, int] | None
    authority_public_key: str
    seeds: Annotated[tuple[str, ...], Field(description="addresses of members, to call first")] = ()
    reachable: Annotated[
        bool | None, Field(description="whether the node answered at the address of its request; null: not checked")
    ] = None
    refresh_after_seconds: int = REFRESH_SECONDS
    revocations: tuple[str, ...] = Field(default=(), description="newest revocations, each in base64")


class WaitingState(BaseModel):
    """The newest certified state of a stage."""

    outer_step: int
    certified_at: Annotated[int, Field(description="seconds since the epoch")]


class Queued(_Answered):
    """The answer to a node that waits for a place."""

    status: Literal["queued", "waitlisted"]
    request_id: str
    session_token: str
    position: Annotated[int, Field(description="1: the next one")]
    estimated_wait_seconds: Annotated[float | None, Field(description="null: not known yet")]
    next_poll_seconds: int = POLL_SECONDS
    is_waitlisted: bool
    stage: Annotated[str | None, Field(description="where the node would count; null while waitlisted")]
    state: Annotated[
        WaitingState | None, Field(description="of that stage, to download; null: waitlisted, not known")
    ] = None
    download_right: Annotated[
        str | None, Field(description="signed right to download data and this state at once, in base64; null: none")
    ] = None
    seeds: Annotated[
        tuple[str, ...], Field(description="addresses of members, which send data and state; none while waitlisted")
    ] = ()


@dataclass(frozen=True)
class RunPlan:
    """A run and its places."""

    offer: RunOffer
    stages: Sequence[StagePlaces]

    @property
    def parameters(self) -> RunParameters:
        """The newest parameters."""
        return self.offer.parameters

    def fitting(self, joiner: Joiner) -> list[StagePlaces]:
        """The stages that want nodes and whose work a node can do."""
        return [stage for stage in self.stages if stage.wanted and joiner.fits(stage)]

    def layers_of(self, stage: str) -> LayerRange | None:
        """The layers of a stage; None for trainers, and for a stage that the plan no longer has."""
        return next((one.layers for one in self.stages if one.name == stage), None)


class AdmissionDesk:
    """Admits nodes to one run. `trouble` is a sentence for the operator while the database cannot be written."""

    def __init__(
        self,
        plan: RunPlan,
        authority: SigningKey,
        database: Database,
        ended: EndedPasses,
        *,
        now: Callable[[], float],
        monotonic: Callable[[], float],
        random_name: Callable[[], str],
    ) -> None:
        """`now` dates admissions, and `monotonic` measures silence. `random_name` makes the names of requests.

        Raises sqlite3.Error.
        """
        self._plan = plan
        self._authority = authority
        self._database = database
        self._ended = ended
        self._now = now
        self._monotonic = monotonic
        self._random_name = random_name
        self._opened_at = monotonic()
        self._swept_at = -inf
        # monotonic time of the last sign of life, by request; a restart gives a new chance
        self._polled: dict[str, float] = {}
        self._delegations = KnownDelegations()
        self._downloads = DownloadSlots()  # a restart forgets them, which costs the members some downloads
        self.refused: Counter[str] = Counter()  # by code
        self.trouble = ""

    def join(self, data: bytes) -> Admitted | Queued:
        """Give the node of a claim its place, or a place in the queue. Raises OrganiserError, sqlite3.Error."""
        claim = self._read(data, JOIN, JoinClaim)
        return self._joined(claim).model_copy(update={"addresses": claim.payload.addresses})

    def _joined(self, claim: VerifiedClaim[JoinClaim]) -> Admitted | Queued:
        wanted, now = claim.payload, self._now()
        joiner = Joiner(claim.node_id, wanted.role, wanted.memory_mb, wanted.layers_at_most)
        with self._writing():
            self._check_time(claim)
            self._check_right(claim)
            self._database.show_name(claim.wallet_id, wanted.name)
            self._database.keep_addresses(claim.node_id, wanted.addresses)
            queue = self._free_places(now)
            place = self._database.place_of(claim.node_id)
            if place is not None and place.wallet == claim.wallet_id:
                self._database.come_back(claim.node_id)
                return self._admitted(self._renewed(place, now, REFRESH_SECONDS))
            self._check_fit(joiner)
            known = next((one.request for one in queue if one.node == claim.node_id), None)
            if known is None and len(queue) >= MOST_WAITING:
                words = f"The queue is full: {len(queue):,} nodes wait for a place in the run."
                raise self._refusal(503, "queue_full", words, "Try again later.", FULL_SECONDS)
            mine = Waiting(
                0,
                claim.node_id,
                claim.wallet_id,
                known or self._random_name(),
                wanted.name,
                wanted.role,
                wanted.memory_mb,
                wanted.layers_at_most,
            )
            self._database.enqueue(mine)
            self._polled[mine.request] = self._monotonic()
            return self._placed(claim.node_id, self._database.queue(), now)

    def poll(self, request: str, session_token: str) -> Admitted | Queued:
        """Answer a waiting node like `join`, if it may still join. Raises OrganiserError, sqlite3.Error."""
        if not hmac.compare_digest(session_token.encode(), self._token(request).encode()):
            raise self._refusal(401, "bad_session", "The session token is not that of the request.", _JOIN_AGAIN)
        now = self._now()
        with self._writing():
            place = self._database.place_of_request(request)
            if place is not None and not self._database.has_departed(place.node):
                self._check_member(place.node, place.wallet)
                return self._admitted(place)
            queue = self._free_places(now, polling=request)
            mine = next((one for one in queue if one.request == request), None)
            if mine is not None:
                self._check_member(mine.node, mine.wallet)  # a node that is refused here counts as silent
                self._polled[request] = self._monotonic()
                return self._placed(mine.node, queue, now)
        raise self._refusal(404, "unknown_request", "This request is not in the queue any more.", _JOIN_AGAIN)

    def refresh(self, data: bytes) -> Admitted:
        """Renew the admission of a node. Raises OrganiserError, sqlite3.Error.

        If the database cannot be written, the admission is signed all the same: members must not lose their places
        because of a full disk or a damaged page.
        """
        claim, now = self._read(data, REFRESH, PlaceClaim), self._now()
        try:
            with self._writing():
                self._check_time(claim)
                self._check_revoked(claim.node_id, claim.wallet_id)
                return self._admitted(self._renewed(self._place_of(claim), now, SAME_SECONDS))
        except sqlite3.DatabaseError as error:
            self.trouble = f"The database cannot be written ({error}): nodes keep their places, and no node joins."
            _LOG.error("%s", self.trouble)
            self._check_revoked(claim.node_id, claim.wallet_id)
            place = self._place_of(claim)
            return self._admitted(self._signed(place, now, place.serial + 1))

    def leave(self, data: bytes) -> NodeId:
        """Free the place of a node at the end of its admission, and its place in the queue at once. Returns the node.

        Members accept the admission until it ends. If another node had the place before, more nodes than the run wants
        could take part. Raises OrganiserError, sqlite3.Error.
        """
        claim = self._read(data, LEAVE, PlaceClaim)
        with self._writing():
            self._check_time(claim)
            self._database.depart(claim.node_id)
            self._database.dequeue(claim.node_id)
        return claim.node_id

    def free_places(self) -> dict[str, int]:
        """Number of free places in each stage. Raises sqlite3.Error."""
        taken = self._database.taken()
        return {stage.name: max(0, stage.wanted - taken.get(stage.name, 0)) for stage in self._plan.stages}

    def has_list(self) -> bool:
        """Whether only listed and invited wallets may join. Raises sqlite3.Error."""
        return self._database.has_list()

    def waiting(self) -> int:
        """Number of nodes in the queue. Raises sqlite3.Error."""
        return self._database.waiting()

    @contextmanager
    def _writing(self) -> Generator[None]:
        """Make changes in one transaction. Once it is on disk, the database has no trouble."""
        try:
            with self._database.writing():
                yield
        except BaseException:
            self._swept_at = -inf  # its changes are undone
            raise
        self.trouble = ""

    def _read(self, data: bytes, kind: str, form: type[_Claim]) -> VerifiedClaim[_Claim]:
        try:
            claim = read_claim(data, form, MAX_JOIN_BYTES)
            found = verify_claim(
                claim, kind, self._now(), max_age_seconds=MAX_CLOCK_SKEW_SECONDS, known=self._delegations
            )
        except ClaimTooLargeError as error:
            raise self._refusal(413, "too_large", error.message, f"Send at most {MAX_JOIN_BYTES:,} bytes.") from None
        except (ClaimExpiredError, DelegationExpiredError) as error:
            action = "Compare the clock of the computer with `server_time`, and sign a new claim."
            raise self._refusal(401, "expired", error.message, action) from None
        except SignatureError as error:
            raise self._refusal(
                401, "bad_signature", error.message, "Sign the claim with the key of the node."
            ) from None
        except DataError as error:
            raise self._refusal(
                400, "bad_request", error.message, "Update NeuroShard, and send the claim again."
            ) from None
        run_id = self._plan.offer.run_id
        if found.payload.run_id != run_id:
            words = f"This organiser serves run {run_id[:16]}, not run {found.payload.run_id[:16]}."
            raise self._refusal(400, "other_run", words, "Check the address of the organiser.")
        return found

    def _check_time(self, claim: VerifiedClaim[_Claim]) -> None:
        """Raise OrganiserError unless the claim is newer than the last one of its node, and remember it."""
        if claim.issued_at <= self._database.claimed_at(claim.node_id):
            raise self._refusal(401, "replayed", "A claim of this node with this or a later date is known.", _NEW_CLAIM)
        self._database.note_claim(claim.node_id, claim.issued_at)
        self._database.forget_claims(self._now() - 2 * MAX_CLOCK_SKEW_SECONDS)

    def _check_revoked(self, node: NodeId, wallet: WalletId) -> None:
        if self._database.is_revoked(node, wallet):
            raise self._refusal(403, "revoked", "The organiser ended the place of this node or wallet.", _ASK_ORGANISER)
        held: bytes | None = None
        with suppress(sqlite3.DatabaseError):
            held = self._database.pass_of(wallet)
        self._check_ended(wallet, None if held is None else MemberPass.read(held))

    def _check_member(self, node: NodeId, wallet: WalletId) -> None:
        """Raise OrganiserError if a node may not wait any more, or not have its place."""
        self._check_revoked(node, wallet)
        if not self._database.admits(wallet) and self._database.pass_of(wallet) is None:
            words = f"Wallet {wallet[:8]} is not on the list of this run."
            raise self._refusal(403, "not_in_allowlist", words, _ASK_ORGANISER)

    def _check_ended(self, wallet: WalletId, member_pass: MemberPass | None) -> None:
        if reason := self._ended.refusal(wallet, member_pass):
            raise self._refusal(403, "revoked", reason, _ASK_OWNER)

    def _check_right(self, claim: VerifiedClaim[JoinClaim]) -> None:
        """Raise OrganiserError unless the wallet may join, and count it for its invitation."""
        if claim.payload.invitation is not None:
            self._check_pass(claim.payload.invitation, claim.wallet_id)
        self._check_member(claim.node_id, claim.wallet_id)
        name = claim.payload.name
        if name and self._database.has_other(name, claim.wallet_id):
            words = f"Another wallet has the name {name!r} in this run."
            raise self._refusal(409, "already_admitted", words, "Choose another name.")

    def _check_pass(self, data: bytes, wallet: WalletId) -> None:
        try:
            shown = MemberPass.read(data)
            shown.verify(self._plan.offer.run_id, self._plan.offer.initial.owner_public_key)
            check_date(shown.not_after, self._now())
        except (InvitationError, SignatureError) as error:
            raise self._refusal(403, "not_in_allowlist", error.message, _ASK_ORGANISER) from None
        if shown.wallet_id != wallet:
            raise self._refusal(403, "not_in_allowlist", "The pass is that of another wallet.", _ASK_ORGANISER)
        self._check_ended(wallet, shown)
        for grant in shown.grants:
            used = self._database.uses_of(grant.invitation)
            if wallet not in used and len(used) >= grant.uses:
                words = f"The invitation is used up: it was for {grant.uses:,}."
                raise self._refusal(403, "invitation_used_up", words, _ASK_ORGANISER)
        for grant in shown.grants:
            self._database.note_use(grant.invitation, wallet)
        self._database.keep_pass(wallet, data)

    def _check_fit(self, joiner: Joiner) -> None:
        if not self._plan.fitting(joiner):
            least = min((stage.memory_mb for stage in self._plan.stages if stage.layers is not None), default=0)
            words = f"No stage fits this node, which may use {joiner.memory_mb:,} MB; a stage needs {least:,} MB."
            raise self._refusal(403, "no_stage_fits", words, "Allow more memory.")

    def _place_of(self, claim: VerifiedClaim[PlaceClaim]) -> HeldPlace:
        place = self._database.place_of(claim.node_id)
        if place is None or place.wallet != claim.wallet_id or self._database.has_departed(claim.node_id):
            raise self._refusal(404, "no_place", "This node has no place in the run.", _JOIN_AGAIN)
        return place

    def _free_places(self, now: float, polling: str = "") -> Sequence[Waiting]:
        """Free the places of expired admissions, and drop silent nodes from the queue. Returns the rest of the queue.

        The node of the request `polling` is not silent: it asks now. With SWEEP_SECONDS since the last time, a second
        look would find nothing.
        """
        time = self._monotonic()
        if time < self._swept_at + SWEEP_SECONDS:
            return self._database.queue()
        self._swept_at = time
        has_returned = time >= self._opened_at + RETURN_SECONDS
        for node in self._database.expired(now) if has_returned else self._database.expired_departed(now):
            self._database.free(node, now)
        queue, silent = list[Waiting](), time - SILENT_POLLS * POLL_SECONDS
        for waiting in self._database.queue():
            if waiting.request == polling or self._polled.get(waiting.request, self._opened_at) >= silent:
                queue.append(waiting)
            else:
                self._database.dequeue(waiting.node)
        times = self._polled  # nodes that have left the queue, and names that come and go, leave nothing behind
        self._polled = {one.request: times[one.request] for one in queue if one.request in times}
        return queue

    def _placed(self, node: NodeId, queue: Sequence[Waiting], now: float) -> Admitted | Queued:
        """Give a node in the queue the place that is its turn, or report its position."""
        index = next(index for index, waiting in enumerate(queue) if waiting.node == node)
        taken, mine = self._database.taken(), queue[index]
        request = mine.request
        found = assigned(self._plan.stages, taken, [waiting.joiner for waiting in queue[: index + 1]])
        if (stage := found.get(mine.node)) is not None:
            place = HeldPlace(mine.node, mine.wallet, stage, mine.request, mine.name, 0, 0, 0, b"")
            return self._admitted(self._renewed(place, now, 0))
        is_waitlisted = index >= DOWNLOADING_AT_ONCE
        probable = None if is_waitlisted else neediest(self._plan.fitting(mine.joiner), taken).name
        return Queued(
            node=mine.node,
            status="waitlisted" if is_waitlisted else "queued",
            request_id=request,
            session_token=self._token(request),
            position=index + 1,
            estimated_wait_seconds=estimated_wait(index + 1, self._database.freed_at(), now),
            is_waitlisted=is_waitlisted,
            stage=probable,
            download_right=None if probable is None else self._download_right(mine, probable, now),
        )

    def _download_right(self, waiting: Waiting, stage: str, now: float) -> str | None:
        """Sign the right of a waiting node to download its probable stage; None while it may not."""
        is_named = self._database.has_list() or self._database.pass_of(waiting.wallet) is not None
        if not self._downloads.may_download(waiting.node, waiting.wallet if is_named else None, self._monotonic()):
            return None
        run_id, layers, issued_at = self._plan.offer.run_id, self._plan.layers_of(stage), int(now)
        expires_at = issued_at + DOWNLOAD_RIGHT_SECONDS
        right = DownloadRight(run_id, waiting.node, waiting.wallet, stage, layers, issued_at, expires_at)
        return b64encode(sign_download_right(self._authority, right)).decode()

    def _renewed(self, place: HeldPlace, now: float, least_age: int) -> HeldPlace:
        """The place with an admission that is younger than `least_age`, stored."""
        if now - place.admitted_at < least_age:
            return place
        signed = self._signed(place, now, self._database.next_serial())
        self._database.keep_place(signed)
        return signed

    def _signed(self, place: HeldPlace, now: float, serial: int) -> HeldPlace:
        admitted_at = int(now)
        expires_at, layers = admitted_at + ADMISSION_SECONDS, self._plan.layers_of(place.stage)
        admission = Admission(
            self._plan.offer.run_id, place.node, place.wallet, place.stage, layers, serial, admitted_at, expires_at
        )
        signed = sign_admission(self._authority, admission)
        return replace(place, serial=serial, admitted_at=admitted_at, expires_at=expires_at, admission=signed)

    def _admitted(self, place: HeldPlace) -> Admitted:
        self._downloads.note_admission(place.node)
        layers = self._plan.layers_of(place.stage)
        revoked = list[bytes]()
        with suppress(sqlite3.DatabaseError):
            revoked = self._database.newest_revocations(MOST_REVOCATIONS_SENT)
        return Admitted(
            node=place.node,
            admission=b64encode(place.admission).decode(),
            stage=place.stage,
            layers=None if layers is None else (layers.start, layers.stop),
            authority_public_key=self._authority.public_key.hex(),
            revocations=tuple(b64encode(each).decode() for each in revoked),
        )

    def _token(self, request: str) -> str:
        """The secret of a request. It follows from the authority's key, so that a restart does not change it."""
        return hash_parts("session", self._authority.seed, request).hex()

    def _refusal(self, status: int, code: str, message: str, action: str, retry_after: int = 0) -> OrganiserError:
        self.refused[code] += 1
        return OrganiserError(status, code, message, action, retry_after)


_JOIN_AGAIN = "Join again."
_NEW_CLAIM = "Sign a new claim for each request."
_ASK_OWNER = "Ask the owner of the run."
_ASK_ORGANISER = "Ask the organiser of the run."
