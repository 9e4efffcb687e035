"""An admission desk with a clock that tests set, the claims of its visitors, and the run that it serves."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.identity import SignedRunParameters, TokenSecret, Wallet, sign_claim
from neuroshard.identity.admissions import (
    JOIN,
    LEAVE,
    REFRESH,
    Admission,
    DownloadRight,
    JoinClaim,
    PlaceClaim,
    read_admission,
    read_download_right,
)
from neuroshard.identity.signing import SigningKey
from neuroshard.organiser.database import Database, open_database
from neuroshard.organiser.desk import AdmissionDesk, Admitted, Queued, RunPlan
from neuroshard.organiser.ended_passes import EndedPasses
from neuroshard.organiser.places import StagePlaces
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stored_passes import StoredPasses
from neuroshard.types import Architecture, LayerRange, NodeId, RunId
from tests.worlds.claims import identity_of

START = 1_800_000_000.0
OWNER = Wallet.from_secret(TokenSecret("hex", bytes(32)))
AUTHORITY = SigningKey.from_seed(b"authority".ljust(32, b"\0"))
SHAPE = Architecture(64, 3, 2, 1, 128, 512, 8)
PARAMETERS = RunParameters(
    "organised",
    1,
    SHAPE,
    3,
    1,
    4,
    7,
    GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 64),
    admission="admitted",
    authority=(AUTHORITY.public_key.hex(),),
)
OFFER = RunOffer.of_new_run(SignedRunParameters.sign(OWNER, PARAMETERS))
RUN = OFFER.run_id
NAMES = ("head-0", "body-0", "tail-0")


def stages(wanted: int = 1, memory_mb: int = 1000) -> tuple[StagePlaces, ...]:
    """Three stages of one layer with this many places each, and ten places for trainers."""
    held = (StagePlaces(name, LayerRange(at, at + 1), memory_mb, wanted) for at, name in enumerate(NAMES))
    return (*held, StagePlaces("trainer", None, 0, 10))


@dataclass
class Desk:
    """The desk and its clock. `again` opens the same database as a new process does."""

    folder: Path | None = None
    places: Sequence[StagePlaces] = field(default_factory=stages)
    now: float = START
    clock_error: float = 0.0  # of the wall clock; the monotonic clock has none
    wait_seconds: float = 5.0  # for another writer of the database

    def __post_init__(self) -> None:
        self.ticks = count()
        self.again()

    def again(self) -> None:
        """Start again. With a folder the database is the same one; nothing was closed before."""
        if self.folder is None:
            self.database = Database(None)
        else:
            self.database, self.warning = open_database(self.folder, self.now, self.wait_seconds)
        names = (f"request-{number}-{self.now}" for number in count())
        plan = RunPlan(OFFER, self.places)
        ended = EndedPasses(OFFER, None if self.folder is None else StoredPasses(self.folder, OFFER))
        self.desk = AdmissionDesk(
            plan,
            AUTHORITY,
            self.database,
            ended,
            now=lambda: self.now + self.clock_error,
            monotonic=lambda: self.now,
            random_name=lambda: next(names),
        )

    def claim(self, number: int, kind: str = JOIN, at: float | None = None, run: RunId = RUN, **facts: Any) -> bytes:
        """A claim of a node, a little later than its last one."""
        payload = JoinClaim(run, **{"memory_mb": 4000, **facts}) if kind == JOIN else PlaceClaim(run)
        issued_at = self.now + next(self.ticks) / 1e4 if at is None else at
        return sign_claim(identity_of(number), kind, payload, issued_at).encode()

    def join(self, number: int, **facts: Any) -> Admitted | Queued:
        return self.desk.join(self.claim(number, **facts))

    def refresh(self, number: int) -> Admitted:
        return self.desk.refresh(self.claim(number, REFRESH))

    def leave(self, number: int) -> None:
        self.desk.leave(self.claim(number, LEAVE))

    def poll(self, answer: Admitted | Queued) -> Admitted | Queued:
        assert isinstance(answer, Queued)
        return self.desk.poll(answer.request_id, answer.session_token)


def admission_in(answer: Admitted | Queued) -> Admission:
    """The admission of an answer, which must be one of the run's authority."""
    assert isinstance(answer, Admitted)
    return read_admission(b64decode(answer.admission), RUN, [AUTHORITY.public_key])


def right_in(answer: Admitted | Queued, now: float = START) -> DownloadRight | None:
    """The right to download in the answer to a waiting node, as a member checks it."""
    assert isinstance(answer, Queued)
    if answer.download_right is None:
        return None
    return read_download_right(b64decode(answer.download_right), RUN, [AUTHORITY.public_key], now)


def node(number: int) -> NodeId:
    return identity_of(number).node_id
