"""Readers: nodes in the queue of an organiser, which may download before they are members.

A reader shows a right that an authority of the run signed for its node and its wallet, for minutes. It gets the data of
the run, the chain and the state of one stage, and nothing else. Members come first: readers share a small part of the
upload, and each of them gets a bounded number of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import anyio
from msgspec import Meta, Struct

from neuroshard.identity import NodeIdentity, read_claim, sign_claim, verify_claim
from neuroshard.identity.admissions import AdmissionBytes, AdmissionError, AdmissionRegister, DownloadRight
from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS
from neuroshard.network import RequestRefusedError
from neuroshard.network.limits import UploadPacer
from neuroshard.types import NamedRun, NodeId, RunId, WalletId

READING = "handshake/reader"  # kind of the request that shows a right, and of its claim
MAX_READING_BYTES = 4096
MAX_READERS = 64
READERS_AT_ONCE = 2  # answers; the other slots of a request kind are for members
UPLOAD_SHARE = 0.1  # of the owner's limit
UNLIMITED_UPLOAD = 4e6  # bytes per second for readers if the owner sets no limit
BUDGET_SECONDS = 1800.0  # after which a reader gets its bytes again
MAX_BUDGETS = 256
STATES_OF_READER = 2  # downloads of a state within that time: the second one if the first became outdated
DATA_OF_READER = 256 * 2**20  # bytes of data files within that time


class ShownRight(Struct, frozen=True, forbid_unknown_fields=True):
    """The statement of a node that waits for a place, with the right that the organiser signed for it."""

    run_id: NamedRun
    right: AdmissionBytes


class ReaderHandshake(Struct, frozen=True, forbid_unknown_fields=True):
    """The request with which a reader shows its right, as a signed claim."""

    claim: Annotated[bytes, Meta(max_length=MAX_READING_BYTES)]


def signed_reading(identity: NodeIdentity, run_id: RunId, right: bytes, now: float) -> ReaderHandshake:
    """Sign the statement with which this node shows its right to one member."""
    return ReaderHandshake(sign_claim(identity, READING, ShownRight(run_id, right), now).encode())


class Readers:
    """The readers that a member of one run knows. Belongs to the event loop."""

    def __init__(
        self,
        admissions: AdmissionRegister,
        refusal: Callable[[NodeId], str],
        ending: Callable[[NodeId, WalletId], str],
        now: Callable[[], float],
        upload: UploadPacer,
    ) -> None:
        """`refusal` is "" for members, which need no right. `ending` is the sentence about an ended node or wallet.

        `now` returns seconds since the epoch, and `upload` has the owner's limit.
        """
        self._admissions = admissions
        self._refusal = refusal
        self._ending = ending
        self._now = now
        self._upload = upload
        self._pacer = UploadPacer()
        self._rights: dict[NodeId, DownloadRight] = {}
        self._answering = 0
        # start of the time and bytes since then, by node and subject; a renewed right does not change them
        self._spent: dict[tuple[NodeId, str], tuple[float, int]] = {}

    def note(self, sender: NodeId, shown: ReaderHandshake) -> DownloadRight:
        """Check the right that a node shows, and record it. Raises DataError with the reason against it.

        The connection proves the sender's node id, and the claim its wallet.
        """
        now = self._now()
        claim = read_claim(shown.claim, ShownRight, MAX_READING_BYTES)
        verified = verify_claim(claim, READING, now, sender, max_age_seconds=MAX_CLOCK_SKEW_SECONDS)
        right = self._admissions.verify_right(verified.payload.right, now)
        if verified.payload.run_id != right.run_id:
            raise AdmissionError("The right to download is shown in another run.")
        if (right.node, right.wallet) != (verified.node_id, verified.wallet_id):
            raise AdmissionError("The right to download is that of another node or wallet.")
        if ended := self._ending(right.node, right.wallet):
            raise AdmissionError(ended)
        self._rights = {node: held for node, held in self._rights.items() if now <= held.expires_at}
        if sender not in self._rights and len(self._rights) >= MAX_READERS:
            raise AdmissionError(f"{MAX_READERS} waiting nodes show rights here, the most that a node keeps.")
        self._rights[sender] = right
        return right

    def right_of(self, peer: NodeId) -> DownloadRight | None:
        """The live right of a peer that is not a member; None for all others."""
        right = self._rights.get(peer)
        if right is None or self._now() > right.expires_at or not self._refusal(peer):
            return None
        return None if self._ending(right.node, right.wallet) else right

    def may_read(self, peer: NodeId) -> bool:
        """Whether the gate lets a peer that is not a member make the requests of a reader."""
        return self.right_of(peer) is not None

    async def spend(self, reader: NodeId, subject: str, byte_count: int, most: int) -> None:
        """Wait until these bytes may leave for a reader, which gets `most` of this subject in BUDGET_SECONDS.

        Raises RequestRefusedError if it has had them, or others are being answered.
        """
        now, key = anyio.current_time(), (reader, subject)
        self._spent = {one: had for one, had in self._spent.items() if now - had[0] < BUDGET_SECONDS}
        began, had = self._spent.get(key, (now, 0))
        if had + byte_count > most or (key not in self._spent and len(self._spent) >= MAX_BUDGETS):
            raise RequestRefusedError("You have downloaded as much as a waiting node may; ask again later.")
        if self._answering >= READERS_AT_ONCE:
            raise RequestRefusedError("Other waiting nodes fetch from this node; ask again a little later.")
        self._spent[key] = (began, had + byte_count)
        limit = self._upload.bytes_per_second
        self._pacer.limit(UNLIMITED_UPLOAD if limit is None else limit * UPLOAD_SHARE)
        self._answering += 1
        try:
            await self._pacer.spend(byte_count)
        finally:
            self._answering -= 1
