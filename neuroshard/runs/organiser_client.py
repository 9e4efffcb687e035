"""The client of an organiser: a node asks for a place in a run and waits for it.

The organiser also sends the signed run and addresses of its members, so that a stranger needs no other address.
"""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

import anyio
import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from neuroshard.config.settings import Settings
from neuroshard.decoders import read_json
from neuroshard.errors import DataError, NetworkRefusedError, UsageError
from neuroshard.identity import NodeIdentity, sign_claim
from neuroshard.identity.admissions import (
    JOIN,
    LEAVE,
    MAX_ADMISSION_BYTES,
    MAX_JOIN_ADDRESSES,
    REFRESH,
    Admission,
    JoinClaim,
    PlaceClaim,
    read_admission,
)
from neuroshard.identity.invitations import Invitation
from neuroshard.runs.offer import RunOffer, checked_offer
from neuroshard.types import (
    LATEST_TIME,
    MAX_ADDRESS_CHARACTERS,
    PRINTABLE,
    RunId,
    is_loopback,
)
from neuroshard.waiting import Signal

if TYPE_CHECKING:
    import httpx

_LOG = logging.getLogger(__name__)

TIMEOUT_SECONDS = 30.0
MAX_ANSWER_BYTES = 64 * 1024
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 3.0, 300.0
TRIES = 10
LEAST_POLL_SECONDS = 1.0
NEAR_POSITION, NEAR_SECONDS = 2, 600.0  # in the queue: the admission may come soon
MOST_SEEDS = 64  # in an answer
_Base64 = Annotated[str, Meta(max_length=2 * MAX_ADMISSION_BYTES)]
_Seeds = Annotated[tuple[Annotated[str, Meta(max_length=MAX_ADDRESS_CHARACTERS)], ...], Meta(max_length=MOST_SEEDS)]


class OrganiserRefusedError(UsageError):
    """An organiser that does not admit this node; `code` is its stable reason."""

    def __init__(self, code: str, message: str, action: str) -> None:
        super().__init__(message, action)
        self.code = code


class AdmittedForm(Struct, frozen=True):
    """The members of an answer with an admission that a node reads."""

    admission: _Base64
    revocations: Annotated[tuple[_Base64, ...], Meta(max_length=256)] = ()
    seeds: _Seeds = ()
    reachable: bool | None = None


class StateForm(Struct, frozen=True):
    """The members of the state of a stage that a waiting node reads."""

    outer_step: Annotated[int, Meta(ge=0, le=10**15)]


class QueuedForm(Struct, frozen=True):
    """The members of an answer with a place in the queue that a node reads."""

    request_id: Annotated[str, Meta(max_length=64)]
    session_token: Annotated[str, Meta(max_length=64)]
    position: Annotated[int, Meta(ge=1, le=10**9)]
    estimated_wait_seconds: Annotated[float, Meta(ge=0, le=LATEST_TIME)] | None = None
    next_poll_seconds: Annotated[float, Meta(ge=0, le=600)] = 10.0
    is_waitlisted: bool = False
    stage: Annotated[str, Meta(max_length=64, pattern=PRINTABLE)] | None = None
    state: StateForm | None = None
    seeds: _Seeds = ()
    download_right: _Base64 | None = None

    @property
    def right(self) -> bytes | None:
        """The signed right to download before the admission; None without one. Members check it."""
        try:
            return None if self.download_right is None else b64decode(self.download_right, validate=True)
        except ValueError:
            return None

    @property
    def is_near(self) -> bool:
        """Whether the admission may come soon: by the position, or by the organiser's estimate of the wait."""
        wait = self.estimated_wait_seconds
        return self.position <= NEAR_POSITION or (wait is not None and wait <= NEAR_SECONDS)

    @property
    def sentence(self) -> str:
        """The reason for the wait, for the owner of the node."""
        wait = "" if self.estimated_wait_seconds is None else f", about {_time(self.estimated_wait_seconds)}"
        words = f"Waiting for a place in the run: number {self.position:,} in the queue{wait}."
        if self.is_waitlisted:
            return f"{words} The first ones of the queue learn their stage."
        if self.stage is None:
            return words
        at = "" if self.state is None else f", which is at outer step {self.state.outer_step:,}"
        return f"{words} The next free place is likely to be in stage {self.stage}{at}."


class QueuePlace:
    """This node's place in the queue of an organiser, with the progress of the download while it waits."""

    def __init__(self) -> None:
        self.waiting: QueuedForm | None = None  # the last answer of the organiser; None: this node does not wait
        self.changed = Signal()
        self._progress = ""
        self._report: Callable[[str], None] = lambda _: None

    def note(self, waiting: QueuedForm, report: Callable[[str], None]) -> None:
        """Record an answer of the organiser. `report` receives the reason for the wait from now on."""
        self.waiting, self._report = waiting, report
        self.changed.notify()
        self._report_now()

    def show(self, progress: str) -> None:
        """Report the progress of the download, as sentences, next to the reason for the wait."""
        self._progress = progress
        self._report_now()

    def _report_now(self) -> None:
        if self.waiting is not None:
            self._report(f"{self.waiting.sentence} {self._progress}".strip())


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
    seeds: tuple[str, ...] = ()  # addresses of members, the word of the organiser
    reachable: bool | None = None  # whether the organiser reached this node from outside; None: not checked


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

    @property
    def name(self) -> str:
        """The name that the owner of this node shows; "" for none."""
        return self._claim.name

    async def admit(
        self,
        report: Callable[[str], None],
        addresses: Sequence[str] = (),
        learn: Callable[[Sequence[str]], None] | None = None,
        place: QueuePlace | None = None,
    ) -> Admittance:
        """Join, and wait in the queue until this node has a place. `report` gets the reason for the wait.

        `addresses` are those of this node; `learn` gets those of members that a waiting node learns, and `place` each
        answer. Raises OrganiserRefusedError, and NetworkRefusedError if the organiser does not answer.
        """
        claim = replace(self._claim, addresses=tuple(addresses[:MAX_JOIN_ADDRESSES]))
        answer = await self._ask("PUT", "join", lambda: self._signed(JOIN, claim))
        while isinstance(answer, QueuedForm):
            waiting = answer
            if learn is not None:
                learn(waiting.seeds)
            if place is None:
                report(waiting.sentence)
            else:
                place.note(waiting, report)
            await anyio.sleep(max(LEAST_POLL_SECONDS, waiting.next_poll_seconds))
            question = {"request_id": waiting.request_id, "session_token": waiting.session_token}
            try:
                answer = await self._ask("PUT", "authorization_status", partial(msgspec.json.encode, question))
            except OrganiserRefusedError as error:
                if error.code != "unknown_request":
                    raise
                answer = await self._ask("PUT", "join", lambda: self._signed(JOIN, claim))
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
        return Admittance(data, admission, ended, answer.seeds, answer.reachable)

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


async def fetch_offer(
    url: str,
    run_id: RunId,
    note: Callable[[str], None],
    open_http: Callable[[str], AbstractAsyncContextManager[httpx.AsyncClient]] | None = None,
) -> RunOffer:
    """Ask an organiser for the signed run until it sends it. `note` gets the reason for the wait.

    Only the offer that leads to the run id counts, whatever the organiser says.
    """
    pause = FIRST_RETRY_SECONDS
    while True:
        async with (open_http or http_client)(url) as http:
            found = await _request(http, "GET", f"{url}/api/parameters", b"")
        if isinstance(found, str):
            reason = found
        elif found[0] != 200:
            reason = f"status {found[0]}"
        else:
            try:
                return checked_offer(run_id, found[1])
            except DataError as error:
                reason = error.message
        note(f"The organiser at {url} does not send the run: {reason.rstrip('.')}.")
        await anyio.sleep(pause)
        pause = min(2 * pause, LONGEST_RETRY_SECONDS)


def organiser_url(settings: Settings, run_id: RunId, invitation: Invitation | None) -> str | None:
    """The organiser that the owner or the invitation to a run names."""
    if settings.organiser is not None:
        return settings.organiser.rstrip("/")
    is_invited = invitation is not None and invitation.run_id == run_id and invitation.organiser is not None
    return str(invitation.organiser).rstrip("/") if invitation is not None and is_invited else None


def http_client(url: str) -> AbstractAsyncContextManager[Any]:
    """A client for the organiser at a URL. Proxies of the environment do not apply to this computer."""
    import httpx  # takes a third of a second

    host = httpx.URL(url).host
    return httpx.AsyncClient(timeout=TIMEOUT_SECONDS, follow_redirects=False, trust_env=not is_loopback(host))
