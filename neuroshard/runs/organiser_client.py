"""The client of an organiser: a node asks for a place in a run, waits for it, and keeps its admission fresh."""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import anyio
import msgspec
from msgspec import Meta, Struct

from neuroshard import __version__
from neuroshard.config.settings import Settings
from neuroshard.config.state_file import StateFile
from neuroshard.decoders import read_json
from neuroshard.errors import DataError, NetworkRefusedError, StorageError, UsageError
from neuroshard.identity import NodeIdentity, sign_claim
from neuroshard.identity.admissions import (
    JOIN,
    LEAVE,
    MAX_ADMISSION_BYTES,
    REFRESH,
    REFRESH_SECONDS,
    Admission,
    AdmissionBytes,
    JoinClaim,
    PlaceClaim,
    read_admission,
)
from neuroshard.identity.invitations import Invitation, InvitationError
from neuroshard.membership.run_members import RunMembers
from neuroshard.model.memory_limit import available_mb, probe_memory, tier_mb
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stored_passes import StoredPasses
from neuroshard.types import LATEST_TIME, LayerRange, is_loopback

if TYPE_CHECKING:
    import httpx

_LOG = logging.getLogger(__name__)

TIMEOUT_SECONDS = 30.0
MAX_ANSWER_BYTES = 64 * 1024
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 3.0, 300.0
TRIES = 10
AGAIN_SECONDS = 600.0  # until a node whose place was refused asks again
LEAST_POLL_SECONDS = 1.0
LEAVE_SECONDS = 3.0  # of a node that ends, for its last request
_Base64 = Annotated[str, Meta(max_length=2 * MAX_ADMISSION_BYTES)]


class OrganiserRefusedError(UsageError):
    """An organiser that does not admit this node; `code` is its stable reason."""

    def __init__(self, code: str, message: str, action: str) -> None:
        super().__init__(message, action)
        self.code = code


class AdmittedForm(Struct, frozen=True):
    """The members of an answer with an admission that a node reads."""

    admission: _Base64
    revocations: Annotated[tuple[_Base64, ...], Meta(max_length=256)] = ()


class QueuedForm(Struct, frozen=True):
    """The members of an answer with a place in the queue that a node reads."""

    request_id: Annotated[str, Meta(max_length=64)]
    session_token: Annotated[str, Meta(max_length=64)]
    position: Annotated[int, Meta(ge=1, le=10**9)]
    estimated_wait_seconds: Annotated[float, Meta(ge=0, le=LATEST_TIME)] | None = None
    next_poll_seconds: Annotated[float, Meta(ge=0, le=600)] = 10.0


class ProblemForm(Struct, frozen=True):
    """The members of a problem document that a node reads."""

    code: Annotated[str, Meta(max_length=64)] = ""
    detail: Annotated[str, Meta(max_length=1000)] = "The organiser refused the request."
    action: Annotated[str, Meta(max_length=1000)] = ""


@dataclass(frozen=True)
class Admittance:
    """An admission of this node, checked, and the newest revocations of the organiser, which are not checked."""

    data: bytes
    admission: Admission
    ended: tuple[bytes, ...] = ()


class OrganiserClient:
    """Asks one organiser about one node in one run."""

    def __init__(
        self,
        url: str,
        identity: NodeIdentity,
        offer: Callable[[], RunOffer],
        claim: JoinClaim,
        now: Callable[[], float],
        *,
        open_http: Callable[[], AbstractAsyncContextManager[httpx.AsyncClient]],
    ) -> None:
        """`offer` returns the newest known offer of the run, whose keys an admission must have."""
        self._url = url
        self._identity = identity
        self._offer = offer
        self._claim = claim
        self._now = now
        self._open_http = open_http

    async def admit(self, report: Callable[[str], None]) -> Admittance:
        """Join, and wait in the queue until this node has a place. `report` gets the reason for the wait.

        Raises OrganiserRefusedError, and NetworkRefusedError if the organiser does not answer.
        """
        answer = await self._ask("PUT", "join", lambda: self._signed(JOIN, self._claim))
        while isinstance(answer, QueuedForm):
            waiting = answer
            wait = "" if waiting.estimated_wait_seconds is None else f", about {_time(waiting.estimated_wait_seconds)}"
            report(f"Waiting for a place in the run: number {waiting.position:,} in the queue{wait}.")
            await anyio.sleep(max(LEAST_POLL_SECONDS, waiting.next_poll_seconds))
            question = {"request_id": waiting.request_id, "session_token": waiting.session_token}
            try:
                answer = await self._ask("PUT", "authorization_status", partial(msgspec.json.encode, question))
            except OrganiserRefusedError as error:
                if error.code != "unknown_request":
                    raise
                answer = await self._ask("PUT", "join", lambda: self._signed(JOIN, self._claim))
        return self._checked(answer)

    async def refresh(self) -> Admittance:
        """Renew the admission of this node's place. Raises like `admit`; code "no_place" without a place."""
        answer = await self._ask("POST", "refresh", lambda: self._signed(REFRESH, PlaceClaim(self._claim.run_id)))
        if isinstance(answer, QueuedForm):
            raise _unreadable("it put a node with a place into the queue")
        return self._checked(answer)

    async def leave(self) -> None:
        """Give this node's place back, with one request: an organiser that is away learns of it by the silence."""
        async with self._open_http() as http:
            body = self._signed(LEAVE, PlaceClaim(self._claim.run_id))
            found = await _request(http, "POST", f"{self._url}/api/leave", body)
        if isinstance(found, str) or found[0] != 204:
            _LOG.debug("The organiser did not record that this node leaves: %s", found)

    def _signed(self, kind: str, payload: JoinClaim | PlaceClaim) -> bytes:
        return sign_claim(self._identity, kind, payload, self._now()).encode()

    def _checked(self, answer: AdmittedForm) -> Admittance:
        offer = self._offer()
        try:
            data = b64decode(answer.admission, validate=True)
            ended = tuple(b64decode(each, validate=True) for each in answer.revocations)
            authorities = tuple(map(bytes.fromhex, offer.parameters.authority))
            admission = read_admission(data, offer.run_id, authorities)
        except (ValueError, DataError) as error:
            raise _unreadable(str(error)) from None
        if (admission.node, admission.wallet) != (self._identity.node_id, self._identity.wallet_id):
            raise _unreadable("it admitted another node")
        return Admittance(data, admission, ended)

    async def _ask(self, method: str, route: str, body: Callable[[], bytes]) -> AdmittedForm | QueuedForm:
        """Send a request, with a new claim for each try, until the organiser gives its answer."""
        pause, reason = FIRST_RETRY_SECONDS, ""
        async with self._open_http() as http:
            for attempt in range(TRIES):
                if attempt:
                    await anyio.sleep(pause)
                    pause = min(2 * pause, LONGEST_RETRY_SECONDS)
                found = await _request(http, method, f"{self._url}/api/{route}", body())
                if isinstance(found, str):
                    reason = found
                    continue
                status, content, retry_after = found
                if status not in {429, 503}:
                    return _read_answer(status, content)
                reason = f"it is busy (status {status}{_detail(content)})"
                if retry_after is not None:
                    pause = max(FIRST_RETRY_SECONDS, min(retry_after, LONGEST_RETRY_SECONDS))
        raise NetworkRefusedError(
            f"The organiser at {self._url} does not answer: {reason}.", "Check the address and the network."
        )


async def _request(
    http: httpx.AsyncClient, method: str, url: str, body: bytes
) -> tuple[int, bytes, float | None] | str:
    """Status, content and Retry-After of an answer, or the reason why there is none."""
    import httpx

    content = bytearray()
    try:
        async with http.stream(method, url, content=body) as response:
            async with aclosing(cast("AsyncGenerator[bytes]", response.aiter_bytes())) as parts:
                async for part in parts:
                    content += part
                    if len(content) > MAX_ANSWER_BYTES:
                        return "its answer is too long"
            given = response.headers.get("retry-after", "")
            retry_after = float(given) if given.isascii() and given.isdigit() and len(given) < 6 else None
            return response.status_code, bytes(content), retry_after
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__


def _read_answer(status: int, content: bytes) -> AdmittedForm | QueuedForm:
    try:
        if status == 200:
            return read_json(content, AdmittedForm, MAX_ANSWER_BYTES)
        if status == 202:
            return read_json(content, QueuedForm, MAX_ANSWER_BYTES)
        problem = read_json(content, ProblemForm, MAX_ANSWER_BYTES)
    except ValueError as error:
        raise _unreadable(f"status {status}, {error}") from None
    raise OrganiserRefusedError(problem.code, problem.detail, problem.action)


def _detail(content: bytes) -> str:
    try:
        return f": {read_json(content, ProblemForm, MAX_ANSWER_BYTES).detail.rstrip('.')}"
    except ValueError:
        return ""


def _unreadable(reason: str) -> OrganiserRefusedError:
    words = f"The answer of the organiser is not that of this run: {reason}."
    return OrganiserRefusedError("unreadable", words, "Check the address of the organiser.")


def _time(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 120 else f"{seconds / 60:,.0f} minutes"


class OwnAdmission(Struct, frozen=True):
    """The admission of this computer's node, and the organiser that gave it."""

    organiser: Annotated[str, Meta(max_length=1000)]
    admission: AdmissionBytes


class AdmissionKeeper:
    """Gets and keeps this node's admission to one run. `trouble` is a sentence for the owner, or ""."""

    def __init__(self, client: OrganiserClient, url: str, file: StateFile[OwnAdmission], now: Callable[[], float]):
        self._client = client
        self._url = url
        self._file = file
        self._now = now
        self._shown: Admittance | None = None
        self.trouble = ""

    @property
    def layers(self) -> LayerRange | None:
        """The layers for which the organiser admitted this node; None without an admission, or for a trainer."""
        return None if self._shown is None else self._shown.admission.layers

    def restore(self, offer: RunOffer, identity: NodeIdentity) -> bool:
        """Show the stored admission of this node; return whether it is live. Raises StorageError."""
        self._shown = self._stored(offer, identity)
        return self._shown is not None

    def _stored(self, offer: RunOffer, identity: NodeIdentity) -> Admittance | None:
        held = self._file.read()
        if held is None:
            return None
        try:
            admission = read_admission(
                held.admission, offer.run_id, tuple(map(bytes.fromhex, offer.parameters.authority))
            )
        except DataError as error:
            _LOG.warning("The stored admission is not used: %s", error)
            return None
        is_own = admission.node == identity.node_id and admission.wallet == identity.wallet_id
        return Admittance(held.admission, admission) if is_own and self._now() <= admission.expires_at else None

    async def admit(self, report: Callable[[str], None]) -> None:
        """Wait for a place, and store the admission. Raises like `OrganiserClient.admit`, and StorageError."""
        self._keep(await self._client.admit(report))

    async def run(self, members: RunMembers) -> None:
        """Show the admission to the other nodes and renew it at half of its time, until cancelled.

        While the organiser is away, the node works on: the others accept the admission that they know. At the end the
        organiser hears that the node leaves.
        """
        try:
            while True:
                shown = self._shown
                if shown is not None:
                    members.renew(shown.data, shown.ended)
                    refresh_at = shown.admission.admitted_at + REFRESH_SECONDS
                    await anyio.sleep(max(LEAST_POLL_SECONDS, refresh_at - self._now()))
                await self._renew(is_known=shown is not None)
        finally:
            with anyio.move_on_after(LEAVE_SECONDS, shield=True):
                await self._client.leave()

    async def _renew(self, *, is_known: bool) -> None:
        """Wait for the next admission. It counts even if it cannot be stored: the others see it."""
        while True:
            try:
                admittance = await (self._client.refresh() if is_known else self._client.admit(self._note))
                break
            except OrganiserRefusedError as error:
                if is_known and error.code == "no_place":
                    is_known = False  # the node joins at once, and waits after a refusal of that
                    continue
                self._note(str(error))
                await anyio.sleep(AGAIN_SECONDS)
            except NetworkRefusedError as error:
                self._note(f"{error} This computer works on with its last admission.")
        try:
            self._keep(admittance)
            self.trouble = ""
        except StorageError as error:
            self._note(str(error))

    def _keep(self, admittance: Admittance) -> None:
        self._shown = admittance
        self._file.write(OwnAdmission(self._url, admittance.data))

    def _note(self, sentence: str) -> None:
        if sentence != self.trouble:
            _LOG.warning("%s", sentence)
        self.trouble = sentence


def keeper_of(
    settings: Settings,
    identity: NodeIdentity,
    offer: Callable[[], RunOffer],
    now: Callable[[], float],
    invitation: Invitation | None = None,
) -> AdmissionKeeper | None:
    """The keeper of this node's admission; None if the run or the wallet needs none, or no organiser is known.

    The organiser is that of the setting, of the invitation, or the one that admitted this node before. Raises
    StorageError.
    """
    run = offer()
    if run.parameters.admission != "admitted" or identity.wallet_id == run.owner:
        return None
    file = admission_file(settings.data_dir, run)
    url = settings.organiser
    if url is None and invitation is not None and invitation.run_id == run.run_id:
        url = invitation.organiser
    if url is None:
        held = file.read()
        url = None if held is None else held.organiser
    if url is None:
        return None
    own = StoredPasses(settings.data_dir, run).own(identity.wallet_id)
    claim = JoinClaim(
        run.run_id,
        device=settings.device,
        memory_mb=tier_mb(available_mb(probe_memory(), settings.memory)),
        release=__version__,
        invitation=None if own is None else own.member_pass,
    )
    url = url.rstrip("/")
    client = OrganiserClient(url, identity, offer, claim, now, open_http=lambda: _http(url))
    return AdmissionKeeper(client, url, file, now)


def admission_file(data_dir: Path, offer: RunOffer) -> StateFile[OwnAdmission]:
    """The file with this node's admission to a run."""
    return StateFile(
        data_dir / "runs" / "joined" / f"{offer.run_id}.admission",
        OwnAdmission,
        "set_aside",
        "this computer asks the organiser again",
        data_dir=data_dir,
    )


def check_entry(settings: Settings, identity: NodeIdentity, offer: RunOffer, invitation: Invitation | None) -> None:
    """Raise InvitationError if an organised run has no way in for this node, and StorageError."""
    keeper = keeper_of(settings, identity, lambda: offer, lambda: 0.0, invitation)
    if offer.parameters.admission != "admitted" or identity.wallet_id == offer.owner or keeper is not None:
        return
    if StoredPasses(settings.data_dir, offer).own(identity.wallet_id) is None:
        raise InvitationError(
            f"Run {offer.run_id[:16]} is an organised run, and this computer does not know its organiser.",
            "Start with --organiser URL.",
        )


def _http(url: str) -> AbstractAsyncContextManager[Any]:
    import httpx  # takes a third of a second

    host = httpx.URL(url).host
    return httpx.AsyncClient(timeout=TIMEOUT_SECONDS, follow_redirects=False, trust_env=not is_loopback(host))
