"""The intake of claims from strangers: each claim is parsed and verified once, then accepted or refused with a reason.

The cheap checks run first. Reports and announcements are the two kinds of claims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from neuroshard.errors import DataError
from neuroshard.identity import (
    ClaimTooLargeError,
    DelegationExpiredError,
    KnownDelegations,
    NodeIdentity,
    SignedClaim,
    read_claim,
    sign_claim,
    verify_claim,
)
from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS
from neuroshard.membership.announcements import Announcement
from neuroshard.membership.clock_skew import ClockSkew
from neuroshard.membership.reports import MAX_REPORT_BYTES, TrainingReport
from neuroshard.membership.run_members import NOTHING_SHOWN, Papers, RunMembers
from neuroshard.network import ScoreReason
from neuroshard.network.transport import MAX_RECORD_BYTES, RECORD_KIND, RECORD_SECONDS
from neuroshard.types import NodeId, RunId, WalletId

MAX_CACHED_BYTES = 16 * 1024 * 1024
ENTRY_BYTES = 2048  # of a claim's objects in addition to its text, which is in memory about three times

T = TypeVar("T")


@dataclass(frozen=True)
class Statement(Generic[T]):
    """The content of a claim that a node signed, and the times that the claim is dated and delegated."""

    node_id: NodeId
    wallet_id: WalletId
    issued_at: float  # seconds since the epoch
    delegated_until: float  # seconds since the epoch
    value: T


@dataclass(frozen=True)
class Refusal:
    """The reason why a claim is not accepted."""

    explanation: str
    reason: ScoreReason | None  # None: no node is at fault
    culprit: NodeId | None = None  # None: the node that brought it
    is_other_run: bool = False
    is_repetition: bool = False  # received just before, in the very same bytes


@dataclass(frozen=True)
class ClaimRules(Generic[T]):
    """The declaration and limits of one kind of claim."""

    kind: str
    form: type[T]
    fault: Callable[[T, NodeId], str] | None  # reason why the node cannot have said this, or ""; None: it always can
    run_of: Callable[[T], RunId]
    sequence_of: Callable[[T], int] | None  # must rise from claim to claim of a node; None: may be repeated
    max_bytes: int
    max_age_seconds: float
    shown_by: Callable[[T], Papers] | None = None  # pass and admission in a claim; None: this kind shows none


@dataclass
class _Known(Generic[T]):
    claim: SignedClaim[T] | None  # None after its signatures were checked
    statement: Statement[T]
    forged: Refusal | None = None


class ClaimCache(Generic[T]):
    """Remembers parsed claims, so that the many copies of a claim are parsed and verified once. Bounded by bytes."""

    def __init__(self, rules: ClaimRules[T], max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._rules = rules
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: dict[bytes, _Known[T] | Refusal] = {}
        self._delegations = KnownDelegations()
        self.verifications = 0

    def read(self, data: bytes) -> Statement[T] | Refusal:
        """Return the statement of a claim whose signatures may still be false, or why there is none."""
        known = self._known.get(data)
        if known is None:
            known = self._parse(data)
            self._bytes += _memory_of(data)
            while self._known and self._bytes > self._max_bytes:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._bytes -= _memory_of(oldest)
            self._known[data] = known
        return known if isinstance(known, Refusal) else known.statement

    def authenticity(self, data: bytes) -> Refusal | None:
        """Return why the signatures of a claim are false, or None if they are valid.

        The claim must have been given to `read` immediately before: the cache may have dropped an older one.
        """
        known = self._known[data]
        if isinstance(known, Refusal):
            return known
        if known.claim is not None:
            self.verifications += 1
            known.forged = _forgery(known.claim, self._rules.kind, self._delegations)
            known.claim = None
        return known.forged

    def _parse(self, data: bytes) -> _Known[T] | Refusal:
        try:
            claim = read_claim(data, self._rules.form, self._rules.max_bytes)
        except ClaimTooLargeError as error:
            return Refusal(str(error), ScoreReason.OVERSIZED)
        except DataError as error:
            return Refusal(str(error), ScoreReason.MALFORMED_CLAIM)
        value, delegation = claim.payload, claim.delegation
        fault = "" if self._rules.fault is None else self._rules.fault(value, delegation.node_id)
        if fault:
            return Refusal(f"A claim of node {delegation.node_id} is false: {fault}.", ScoreReason.MALFORMED_CLAIM)
        node_id, wallet_id = delegation.node_id, delegation.wallet_id
        return _Known(claim, Statement(node_id, wallet_id, claim.issued_at, delegation.grant.expires_at, value))


def _memory_of(data: bytes) -> int:
    """Bytes of memory that a parsed claim takes: an estimate on the high side."""
    return ENTRY_BYTES + 3 * len(data)


def _forgery(claim: SignedClaim[T], kind: str, delegations: KnownDelegations) -> Refusal | None:
    """The reason why a claim's signatures are false at the time that it is dated, or None."""
    # The time is the claim's own: the result is stored for all intakes, so it must not depend on when the first one
    # asks. `_wrong_time` compares the dates with this computer's clock on every arrival.
    try:
        verify_claim(claim, kind, now=claim.issued_at, known=delegations)
    except DelegationExpiredError as error:
        return Refusal(str(error), ScoreReason.EXPIRED_CLAIM)
    except DataError as error:
        return Refusal(str(error), ScoreReason.BAD_SIGNATURE)
    return None


REPORT_KIND = "report"
MAX_REPORT_AGE_SECONDS = MAX_CLOCK_SKEW_SECONDS + 60  # the largest clock error, and time for gossip


def _foreign_address(announcement: Announcement, node_id: NodeId) -> str:
    return "" if announcement.leads_to(node_id) else "its addresses must end with /p2p/ and the node's id"


def _shown_by(announcement: Announcement) -> Papers:
    shown, admission = announcement.member_pass, announcement.admission
    return Papers(() if shown is None else (shown,), admissions=() if admission is None else (admission,))


REPORT_RULES: ClaimRules[TrainingReport] = ClaimRules(
    kind=REPORT_KIND,
    form=TrainingReport,
    fault=None,
    run_of=lambda report: report.run_id,
    sequence_of=lambda report: report.sequence,
    max_bytes=MAX_REPORT_BYTES,
    max_age_seconds=MAX_REPORT_AGE_SECONDS,
)
ANNOUNCEMENT_RULES: ClaimRules[Announcement] = ClaimRules(
    kind=RECORD_KIND,
    form=Announcement,
    fault=_foreign_address,
    run_of=lambda announcement: announcement.run_id,
    sequence_of=None,
    max_bytes=MAX_RECORD_BYTES,
    max_age_seconds=RECORD_SECONDS,
    shown_by=_shown_by,
)


def signed_report(identity: NodeIdentity, report: TrainingReport, now: float) -> bytes:
    """Sign a report and encode it for gossip."""
    return sign_claim(identity, REPORT_KIND, report, now).encode()


def signed_announcement(identity: NodeIdentity, announcement: Announcement, now: float) -> bytes:
    """Sign an announcement and encode it for handshakes and the directory."""
    return sign_claim(identity, RECORD_KIND, announcement, now).encode()


MAX_SPEAKERS = 8192  # nodes whose newest claim is remembered
LATE_SECONDS = 60.0  # an older claim may arrive by another way this much after a newer one
BURST_CLAIMS = 8.0  # of one node; then as many as CLAIMS_PER_SECOND
CLAIMS_PER_SECOND = 1.0


@dataclass(frozen=True)
class _Speaker:
    """The last claims of one node: the basis for detecting repetitions and floods."""

    sequence: int  # the highest
    newest: int  # hash of its bytes
    issued_at: float  # the latest
    allowance: float  # claims it may make now
    seen_at: float


class ClaimIntake(Generic[T]):
    """Accepts or refuses claims of one kind about one run.

    `now` returns seconds since the epoch; `cache` and `clock_skew` may be shared by several intakes.
    """

    def __init__(
        self,
        rules: ClaimRules[T],
        run_id: RunId,
        now: Callable[[], float],
        cache: ClaimCache[T] | None = None,
        *,
        members: RunMembers | None = None,
        clock_skew: ClockSkew | None = None,
    ) -> None:
        """With `members`, only claims of nodes whose wallets may take part are accepted."""
        self._members = members
        self._rules = rules
        self._run_id = run_id
        self._now = now
        self._cache = cache or ClaimCache(rules)
        self._speakers: dict[NodeId, _Speaker] = {}
        self.clock_skew = clock_skew or ClockSkew(now)
        self._refused: Counter[str] = Counter()

    def check(self, data: bytes, sender: NodeId | None = None) -> Statement[T] | Refusal:
        """Return the result that `take` would give, without counting the claim as received.

        A recent claim that this node has already received, perhaps from its author, is accepted here: others may not
        have it.
        """
        found = self._examine(data, sender, self._now())
        return self._cache.read(data) if isinstance(found, Refusal) and found.is_repetition else found

    def take(self, data: bytes, sender: NodeId | None = None) -> Statement[T] | Refusal:
        """Return the statement, which counts as received from now on, or the refusal, which is counted.

        `sender` is the authenticated peer that brought the claim as its own, or None if any node may have forwarded it.
        """
        now = self._now()
        found = self._examine(data, sender, now)
        if isinstance(found, Refusal):
            self._refused[found.reason.value if found.reason else "late"] += 1
            return found
        self._note_clock(found, sender, now)
        self._remember(data, found, now)
        return found

    @property
    def refused(self) -> dict[str, int]:
        """Number of refused claims for each reason."""
        return dict(self._refused)

    def count_refusal(self, refusal: Refusal) -> None:
        """Count a claim that `check` refused and that `take` will not receive."""
        self._refused[refusal.reason.value if refusal.reason else "late"] += 1

    def _examine(self, data: bytes, sender: NodeId | None, now: float) -> Statement[T] | Refusal:
        if len(data) > self._rules.max_bytes:
            text = f"A claim of {len(data)} bytes; at most {self._rules.max_bytes} are allowed."
            return Refusal(text, ScoreReason.OVERSIZED)
        statement = self._cache.read(data)
        if isinstance(statement, Refusal):
            return statement
        # The order matters. Cheap checks come before the signature. The rate limit comes after it, because a flood is
        # blamed on the node that the claim names, and that node did not make a forged claim.
        return (
            self._wrong_place(statement, sender)
            or self._wrong_time(data, statement, sender, now)
            or self._repeated(data, statement, sender, now)
            or self._cache.authenticity(data)
            or self._not_invited(statement)
            or self._too_many(statement, now)
            or statement
        )

    def _wrong_place(self, statement: Statement[T], sender: NodeId | None) -> Refusal | None:
        run = self._rules.run_of(statement.value)
        if run != self._run_id:
            text = f"This node serves run {self._run_id[:16]}, not run {run[:16]}."
            return Refusal(text, ScoreReason.FOREIGN_CLAIM, is_other_run=True)
        if sender is not None and statement.node_id != sender:
            text = f"A claim of node {statement.node_id} came in the name of {sender}."
            return Refusal(text, ScoreReason.FOREIGN_CLAIM)
        return None

    def _wrong_time(self, data: bytes, statement: Statement[T], sender: NodeId | None, now: float) -> Refusal | None:
        ahead = statement.issued_at - now
        if -self._rules.max_age_seconds <= ahead <= MAX_CLOCK_SKEW_SECONDS:
            if now < statement.delegated_until:
                return None  # the signatures are checked after the other cheap checks
            return Refusal(f"The delegation of node {statement.node_id} expired.", ScoreReason.EXPIRED_CLAIM)
        # Only an authentic claim shows its author's clock: a forged one must not move the estimate.
        forged = self._cache.authenticity(data)
        if forged is not None:
            return forged
        if self._not_invited(statement) is None:
            self._note_clock(statement, sender, now)
        text = f"A claim of node {statement.node_id} is dated {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'ago'}."
        return Refusal(text, ScoreReason.EXPIRED_CLAIM)

    def _repeated(self, data: bytes, statement: Statement[T], sender: NodeId | None, now: float) -> Refusal | None:
        if self._rules.sequence_of is None:
            return None
        speaker = self._speakers.get(statement.node_id)
        sequence = self._rules.sequence_of(statement.value)
        if speaker is None or sequence > speaker.sequence:
            return None
        text = f"Claim {sequence} of node {statement.node_id} is not newer than the last."
        # the newest claim may come from its author and by gossip; the same number in other bytes is an attack
        if hash(data) == speaker.newest and (sender is not None or now - speaker.seen_at <= LATE_SECONDS):
            return Refusal(text, None, is_repetition=True)
        # other nodes forward a claim that came from its author, and may be slower than the author's next claim
        is_late = sequence != speaker.sequence and statement.issued_at >= speaker.issued_at - LATE_SECONDS
        return Refusal(text, None if is_late else ScoreReason.REPLAYED_CLAIM)

    def _not_invited(self, statement: Statement[T]) -> Refusal | None:
        """No node is at fault: the one that forwards the claim may know a pass that this node does not know yet."""
        if self._members is None:
            return None
        shown = NOTHING_SHOWN if self._rules.shown_by is None else self._rules.shown_by(statement.value)
        node, wallet = statement.node_id, statement.wallet_id
        reason = self._members.introduce(node, wallet, statement.delegated_until, shown)
        return Refusal(reason, None) if reason else None

    def _too_many(self, statement: Statement[T], now: float) -> Refusal | None:
        if self._rules.sequence_of is None or self._allowance(statement, now) >= 1:
            return None
        text = f"Node {statement.node_id} makes too many claims."
        return Refusal(text, ScoreReason.FLOOD, culprit=statement.node_id)

    def _allowance(self, statement: Statement[T], now: float) -> float:
        """Claims that the node may make now.

        The time by the node's own clock counts as well, because a line that stalled delivers many claims in a moment.
        """
        speaker = self._speakers.get(statement.node_id)
        if speaker is None:
            return BURST_CLAIMS
        elapsed = max(0.0, now - speaker.seen_at, statement.issued_at - speaker.issued_at)
        return min(BURST_CLAIMS, speaker.allowance + elapsed * CLAIMS_PER_SECOND)

    def _note_clock(self, statement: Statement[T], sender: NodeId | None, now: float) -> None:
        """Use the date of an authentic claim of a node that may take part, unless it may have been made long ago."""
        if sender is not None or self._rules.max_age_seconds <= MAX_REPORT_AGE_SECONDS:
            self.clock_skew.note(statement.node_id, statement.issued_at - now)

    def _remember(self, data: bytes, statement: Statement[T], now: float) -> None:
        if self._rules.sequence_of is None:
            return
        allowance = self._allowance(statement, now) - 1
        before = self._speakers.pop(statement.node_id, None)
        sequence = self._rules.sequence_of(statement.value)
        issued_at = max(statement.issued_at, before.issued_at if before else statement.issued_at)
        if len(self._speakers) >= MAX_SPEAKERS:  # drop the node whose last claim is the oldest
            del self._speakers[next(iter(self._speakers))]
        self._speakers[statement.node_id] = _Speaker(sequence, hash(data), issued_at, allowance, now)
