"""Foundations: signed statements with which the owner of a run begins its chains, at first or again. Pure.

An epoch is the statement that began it, so votes and values name the statement by its hash: two statements with one
number are two epochs, and nothing that belongs to one counts in the other. Nothing founds by itself and no timer does.

    a node learns                                    it continues
    a statement of a higher number, valid            from the standing that the statement names
    two statements of one number that differ         not at all, until a higher one names both. Two of the owner
                                                     without stages after the same statement do not contradict
    a statement of a lower or the same number again  as before
    a statement whose predecessor is not known       as before, and asks for the predecessor
    a deputy's statement, and one of the owner of    as before: the owner's word counts
    its number or above that trusts it no more
    a stage's heir continues it                      that stage from there, until a statement begins it again

The owner names deputies in a statement, which needs no stages. A deputy may found while the owner is away. It names no
other deputies, and never goes below the heights of earlier statements or below the owner's newest waypoint on its line.
Statements that the owner has continued stay valid.

In a run that is open to strangers, the owner's statements also name the wallets that may get seats. The chain takes the
list in by an entry whose number is the epoch of the statement, so an old list cannot return.

A stage whose seats are gone may have an heir: the wallet that keeps the copy of the only holder's state, as the only
seat has named it. Its `Succession` continues this stage alone. It is not in the line of statements, so it contradicts
none and stops no other stage, and the next statement about the stage replaces it. Only a stage that was founded with
one seat has heirs, and the line of an heir is one. That seat's word proves an heir; of several, the one that was named
last counts. A chain shows more than that word: see `Chain.line_in`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from neuroshard.consensus.committee import (
    KEPT_VERSIONS,
    MAX_NAMING_BYTES,
    MAX_SEATS,
    MAX_TRUSTED,
    AppliedVersion,
    Candidate,
    Committee,
    Height,
)
from neuroshard.consensus.waypoints import (
    MAX_STAGES,
    Milestone,
    Point,
    SignedWaypoint,
    StageIndex,
    Waypoint,
    newest_of,
    valid_points,
)
from neuroshard.errors import DataError
from neuroshard.identity import hash_parts
from neuroshard.identity.claims import PublicKey, Signed, VerifiedClaim, read_claim, sign_message, verify_claim
from neuroshard.identity.invitations import InvitedTip
from neuroshard.identity.signing import Signer
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.types import HexDigest, NamedRun, NamedWallet, WalletId

MAX_STATEMENTS = 256  # per run: a node keeps and sends all of them, because each names the one before
MAX_DEPUTIES = 4
MAX_CONTRADICTIONS = 16  # statements of one number that a later one replaces
LARGEST_EPOCH = MAX_STATEMENTS - 1
KEPT_HEIRS = 8  # per stage, of the newest foundation first
KEPT_PER_NAMING = 2  # an heir may have typed the command on two computers
_KIND, _SUCCESSION_KIND = "foundation", "succession"


class FoundationError(DataError):
    """A statement that is malformed, signed by another key, or does not follow from the statements before it."""


class StageStart(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The place from which a stage's chain continues in a new epoch, and its committee."""

    stage: StageIndex
    committee: Committee
    height: Height = 0  # of the standing that is continued; the first value has the next height
    outer_step: Height = 0
    root: HexDigest | None = None  # of the outer state; None: the run's initial state
    parent: HexDigest | None = None  # the value that led there; None at the beginning of a run
    # of the run's parameters, that apply there or later
    versions: Annotated[tuple[AppliedVersion, ...], Meta(max_length=KEPT_VERSIONS)] = ()
    # of a branch: wallets that had a seat in the run before, with the work that a seat takes
    candidates: Annotated[tuple[Candidate, ...], Meta(max_length=MAX_SEATS)] = ()


class Foundation(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A statement: these stages continue from here, with these seats. Without stages it only names the deputies."""

    run_id: NamedRun
    epoch: Annotated[int, Meta(ge=0, le=LARGEST_EPOCH)]
    stages: Annotated[tuple[StageStart, ...], Meta(max_length=MAX_STAGES)]
    previous: HexDigest | None = None  # the statement before it
    # all statements of the number before this one, if they contradict each other
    contradictions: Annotated[tuple[HexDigest, ...], Meta(max_length=MAX_CONTRADICTIONS)] = ()
    # keys that may sign later statements, in addition to the owner's
    deputies: Annotated[tuple[PublicKey, ...], Meta(max_length=MAX_DEPUTIES)] = ()
    # wallets that may get seats among strangers, in addition to the owner's
    trusted: Annotated[tuple[NamedWallet, ...], Meta(max_length=MAX_TRUSTED)] = ()

    def __post_init__(self) -> None:
        if len({start.stage for start in self.stages}) != len(self.stages):
            raise ValueError("a foundation names a stage twice")


class SignedFoundation(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """A statement and the key that signed it."""

    signed: Signed[Foundation]
    signer: PublicKey

    @classmethod
    def sign(cls, signer: Signer, foundation: Foundation) -> SignedFoundation:
        """Sign a statement with the key of the run's owner or of a deputy."""
        return cls(sign_message(signer, _KIND, foundation), signer.public_key)

    @cached_property
    def foundation(self) -> Foundation:
        """The statement. Raises MalformedClaimError."""
        return self.signed.read(Foundation)

    @cached_property
    def id(self) -> str:
        """Hex hash of the signed bytes without the signature: the name of the epoch."""
        return hash_parts("neuroshard/foundation", self.signed.body).hex()

    def verify(self) -> None:
        """Raise SignatureError unless `signer` signed it."""
        self.signed.verify(self.signer, _KIND)


class HeirNaming(Struct, frozen=True, forbid_unknown_fields=True):
    """The author, the only seat of a stage, names the wallet that keeps the copy of its state."""

    kind: ClassVar[str] = "heir"
    statement: HexDigest  # the foundation of the stage
    stage: StageIndex
    height: Height  # of the value that carries this
    heir: NamedWallet


class Succession(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An heir continues a stage whose only seat is gone: a node with the copy's state has the only seat now."""

    run_id: NamedRun
    statement: HexDigest  # the foundation that it continues
    start: StageStart
    naming: Annotated[bytes, Meta(max_length=MAX_NAMING_BYTES)]  # a HeirNaming, signed by the seat that is gone


class SignedSuccession(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """A succession and the heir's key."""

    signed: Signed[Succession]
    heir: PublicKey

    @classmethod
    def sign(cls, heir: Signer, succession: Succession) -> SignedSuccession:
        """Sign with the key of the heir's wallet."""
        return cls(sign_message(heir, _SUCCESSION_KIND, succession), heir.public_key)

    @cached_property
    def succession(self) -> Succession:
        """The content. Raises MalformedClaimError."""
        return self.signed.read(Succession)

    @cached_property
    def id(self) -> str:
        """Hex hash of the signed bytes without the signature: votes name it like that of a foundation."""
        return hash_parts("neuroshard/succession", self.signed.body).hex()

    @cached_property
    def named(self) -> VerifiedClaim[HeirNaming]:
        """The word of the seat that is gone, verified. It stays valid however old it is. Raises DataError."""
        claim = read_claim(self.succession.naming, HeirNaming, MAX_NAMING_BYTES)
        return verify_claim(claim, HeirNaming.kind, claim.issued_at)

    def check(self, run_id: str, founded: StageStart) -> None:
        """Raise FoundationError, SignatureError or another DataError unless the founded stage's only seat named it."""
        self.signed.verify(self.heir, _SUCCESSION_KIND)
        content, named, start = self.succession, self.named, self.succession.start
        subject = (content.run_id, named.payload.statement, named.payload.stage, named.payload.heir)
        if subject != (run_id, content.statement, start.stage, wallet_id_of(self.heir)):
            raise FoundationError("An heir continues a stage for which it was not named.")
        if founded.committee.is_open or [seat.wallet_id for seat in founded.committee.seats] != [named.wallet_id]:
            raise FoundationError("An heir was not named by the only seat of its stage.")
        if len(start.committee.seats) > 1 or start.committee.is_open or start.candidates:
            raise FoundationError("An heir gives one node the seat of its stage.")
        if start.height < max(named.payload.height, founded.height) or start.root is None or start.parent is None:
            raise FoundationError("An heir continues a stage from before its naming, or without a state.")


def epoch_parent(foundation_id: str, stage: int) -> str:
    """Hex hash that the first value of a stage in an epoch names as its parent."""
    return hash_parts("neuroshard/first-parent", foundation_id, stage).hex()


@dataclass(frozen=True)
class Founding:
    """The foundation that applies to a stage."""

    statement: str  # its hash
    epoch: int
    start: StageStart
    owner: WalletId
    points: tuple[Point, ...] = ()  # values of this epoch through which the chain must pass
    trusted: tuple[WalletId, ...] = ()  # wallets that may get seats among strangers
    heir: HeirNaming | None = None  # of an heir: the word of the seat that is gone
    others: tuple[Founding, ...] = ()  # other lines of the stage since the statement: its own, and those of heirs

    def line(self, statement: str) -> Founding | None:
        """This foundation or another line, by its hash."""
        return next((each for each in (self, *self.others) if each.statement == statement), None)


@dataclass(frozen=True)
class Foundations:
    """The statements of one run that a node knows: a pure fold, the same for every order in which they arrive."""

    run_id: NamedRun
    owner: bytes  # public key
    known: Mapping[str, SignedFoundation] = field(default_factory=dict[str, SignedFoundation])
    waypoints: Mapping[int, tuple[SignedWaypoint, ...]] = field(default_factory=dict[int, tuple[SignedWaypoint, ...]])
    successions: Mapping[int, tuple[SignedSuccession, ...]] = field(
        default_factory=dict[int, tuple[SignedSuccession, ...]]
    )

    def with_statements(
        self,
        statements: Iterable[SignedFoundation],
        waypoints: Iterable[SignedWaypoint] = (),
        successions: Iterable[SignedSuccession] = (),
    ) -> Foundations:
        """Add statements in the order of their epochs. Raises FoundationError or SignatureError for the first bad one.

        A statement without a known predecessor is an error: its sender must send the predecessors with it.
        """
        points = self._with_waypoints(waypoints)
        known = dict(self.known)
        for statement in sorted(statements, key=lambda each: each.foundation.epoch):
            if statement.id not in known:
                self._check(statement, known)
                known[statement.id] = statement
        trusted = self._trusted(known, points)
        return Foundations(self.run_id, self.owner, trusted, points, self._with_successions(successions, trusted))

    @cached_property
    def points(self) -> Mapping[int, Waypoint]:
        """The owner's newest waypoint of each stage that no other one contradicts."""
        found = {stage: valid_points(each) for stage, each in self.waypoints.items()}
        return {stage: each[0] for stage, each in found.items() if each}

    @cached_property
    def highest(self) -> tuple[SignedFoundation, ...]:
        """The statements of the highest epoch, the owner's first; several contradict each other."""
        top = max((each.foundation.epoch for each in self.known.values()), default=-1)
        found = (each for each in self.known.values() if each.foundation.epoch == top)
        return tuple(sorted(found, key=lambda each: (each.signer != self.owner, each.id)))

    @property
    def current(self) -> SignedFoundation | None:
        """The statement that applies; None before the first one and while two contradict each other."""
        return self.highest[0] if self.highest and self._agree(self.highest) else None

    @property
    def is_contradictory(self) -> bool:
        """Whether two statements of the highest epoch contradict each other."""
        return bool(self.highest) and self.current is None

    def _agree(self, statements: Sequence[SignedFoundation]) -> bool:
        """Whether statements of one number lead to the same chains: one, or lists that the owner signed on two
        computers.
        """
        changes = any(each.foundation.stages or each.signer != self.owner for each in statements)
        lines = {each.foundation.previous for each in statements}
        return len(statements) == 1 or (not changes and len(lines) == 1)

    def start_of(self, stage: int) -> tuple[SignedFoundation, StageStart] | None:
        """The newest statement about a stage on the line of the current one, and the start that it names.

        A statement names only the stages that begin again; the others continue in their epoch.
        """
        return None if self.current is None else _newest_start(self.current, self.known, stage)

    def heights_of(self, stage: int) -> list[int]:
        """The heights from which the highest statements, or those before them, continue a stage."""
        found = (_newest_start(each, self.known, stage) for each in self.highest)
        return [each[1].height for each in found if each is not None]

    @property
    def deputies(self) -> tuple[bytes, ...]:
        """The keys that may sign the next statement in addition to the owner's: all highest statements name them."""
        named = [each.foundation.deputies for each in self.highest]
        return tuple(key for key in named[0] if all(key in keys for keys in named)) if named else ()

    @property
    def trusted(self) -> tuple[WalletId, ...]:
        """The wallets that may get seats among strangers, in addition to the owner's."""
        return self.highest[0].foundation.trusted if self.highest else ()

    @property
    def word(self) -> SignedFoundation | None:
        """The owner's newest statement that applies: it names the wallets that may get seats among strangers."""
        line = () if self.current is None else _line(self.current, self.known)
        return next((each for each in line if each.signer == self.owner), None)

    def lacks(self, tip: InvitedTip) -> bool:
        """Whether the statements known here are older than an invitation's tip, or lead elsewhere.

        They contain the tip's statement, even after a later one has replaced it. Only the owner's word of its epoch or
        above replaces a tip whose statement is void or not known: a deputy that is trusted no more signs such a line.
        """
        statements = self.known.values()
        heirs = {each.id for stage in self.successions.values() for each in stage}
        return tip.foundation.hex() not in {*self.known, *heirs} and all(
            each.signer != self.owner or each.foundation.epoch < tip.epoch for each in statements
        )

    def successors(self, stage: int, statement: str) -> list[SignedSuccession]:
        """The heirs that continue a stage after a statement or after one another. The one that was named last is the
        first, and each comes before the one that it continues.
        """
        lines, found = {statement}, list[SignedSuccession]()
        for each in reversed(self.successions.get(stage, ())):
            if each.succession.statement in lines:
                lines.add(each.id)
                found.append(each)
        return found[::-1]

    def _with_successions(
        self, new: Iterable[SignedSuccession], known: Mapping[str, SignedFoundation]
    ) -> Mapping[int, tuple[SignedSuccession, ...]]:
        """The successions with new ones. An heir of a line that is void or not known is ignored."""
        kept = {each.id: each for stage in self.successions.values() for each in stage}
        waiting = kept | {each.id: each for each in new if each.id not in kept}
        starts = {(key, start.stage): start for key, each in known.items() for start in each.foundation.stages}
        ranks: dict[str, tuple[tuple[int, str], ...]] = {
            key: ((each.foundation.epoch, key),) for key, each in known.items()
        }
        found = dict[int, list[SignedSuccession]]()
        while ready := [each for each in waiting.values() if each.succession.statement in ranks]:
            for each in ready:
                del waiting[each.id]
                content = each.succession
                stage, founded = content.start.stage, starts.get((content.statement, content.start.stage))
                if founded is None:
                    raise FoundationError("An heir continues another foundation than that of its stage.")
                if each.id not in kept:
                    each.check(self.run_id, founded)
                others = found.setdefault(stage, [])
                if sum(each.named.payload == other.named.payload for other in others) < KEPT_PER_NAMING:
                    others.append(each)
                    starts[each.id, stage] = content.start
                    ranks[each.id] = (*ranks[content.statement], (each.named.payload.height, each.id))
        for stage, heirs in found.items():
            heirs.sort(key=lambda each: (-ranks[each.id][0][0], each.id not in kept))  # a line comes before its heirs
            found[stage] = sorted(heirs[:KEPT_HEIRS], key=lambda each: ranks[each.id], reverse=True)
        return {stage: tuple(heirs) for stage, heirs in found.items()}

    def may_sign(self, key: bytes) -> bool:
        """Whether a key may sign the next statement: the owner's, or that of a deputy."""
        return key == self.owner or key in self.deputies

    def next(
        self,
        signer: Signer,
        stages: Sequence[StageStart],
        deputies: tuple[bytes, ...] | None = None,
        trusted: tuple[WalletId, ...] | None = None,
    ) -> SignedFoundation:
        """Sign the statement of the next epoch.

        It names the same deputies and the same trusted wallets as the one before, unless others are given.
        """
        before = self.highest[0] if self.highest else None
        known = ((), ()) if before is None else (before.foundation.deputies, before.foundation.trusted)
        foundation = Foundation(
            self.run_id,
            0 if before is None else before.foundation.epoch + 1,
            tuple(stages),
            None if before is None else before.id,
            tuple(each.id for each in self.highest[1:]),
            known[0] if deputies is None else deputies,
            known[1] if trusted is None else trusted,
        )
        return SignedFoundation.sign(signer, foundation)

    def _with_waypoints(self, new: Iterable[SignedWaypoint]) -> Mapping[int, tuple[SignedWaypoint, ...]]:
        points = dict(self.waypoints)
        for each in new:
            stage = each.waypoint.stage
            if each not in points.get(stage, ()):
                if each.waypoint.run_id != self.run_id:
                    raise FoundationError(f"A waypoint is of run {each.waypoint.run_id[:16]}.")
                each.verify(self.owner)
                points[stage] = newest_of((*points.get(stage, ()), each))
        return points

    def _trusted(
        self, known: Mapping[str, SignedFoundation], points: Mapping[int, tuple[SignedWaypoint, ...]]
    ) -> Mapping[str, SignedFoundation]:
        """The statements without those of deputies whose trust the owner has ended, and without all that follow.

        Those that set a stage back below a waypoint of the owner on their line are void in the same way.
        """
        words = [each for each in known.values() if each.signer == self.owner]
        continued = {each.id for word in words for each in _line(word, known)}
        kept = dict[str, SignedFoundation]()
        for statement in sorted(known.values(), key=lambda each: each.foundation.epoch):
            is_owners = statement.signer == self.owner or statement.id in continued
            is_ended = not is_owners and (
                any(_ends_trust(word.foundation, statement) for word in words) or _is_set_back(statement, known, points)
            )
            if not is_ended and statement.foundation.previous in {None, *kept}:
                kept[statement.id] = statement
        return kept

    def _check(self, statement: SignedFoundation, known: Mapping[str, SignedFoundation]) -> None:
        foundation = statement.foundation
        if foundation.run_id != self.run_id:
            raise FoundationError(f"A foundation is of run {foundation.run_id[:16]}, expected {self.run_id[:16]}.")
        if len(known) >= MAX_STATEMENTS:
            raise FoundationError("The run has more foundations than a node keeps.", "Branch the run into a new one.")
        before = None if foundation.previous is None else known.get(foundation.previous)
        if (before is None) != (foundation.epoch == 0):
            raise FoundationError(f"The foundation before epoch {foundation.epoch} is not known.")
        allowed = {self.owner} if before is None else {self.owner, *before.foundation.deputies}
        if statement.signer not in allowed:
            raise FoundationError("A foundation is signed neither by the run's owner nor by a deputy.")
        statement.verify()
        if before is not None:
            self._check_succession(foundation, before, known)
            if statement.signer != self.owner:
                self._check_deputy(foundation, before, known)

    def _check_deputy(
        self, foundation: Foundation, before: SignedFoundation, known: Mapping[str, SignedFoundation]
    ) -> None:
        named = before.foundation.deputies, before.foundation.trusted
        if (foundation.deputies, foundation.trusted) != named:
            raise FoundationError("A deputy's foundation names other deputies or wallets than the owner's.")
        epoch = before.foundation.epoch
        signers = {each.signer for each in known.values() if each.foundation.epoch == epoch}
        if self.owner in signers and before.signer != self.owner:
            raise FoundationError("A deputy's foundation continues from another one than the owner's.")

    def _check_succession(
        self, foundation: Foundation, previous: SignedFoundation, known: Mapping[str, SignedFoundation]
    ) -> None:
        before = previous.foundation
        if foundation.epoch != before.epoch + 1:
            raise FoundationError(f"A foundation of epoch {foundation.epoch} follows one of epoch {before.epoch}.")
        rivals = {key: each for key, each in known.items() if each.foundation.epoch == before.epoch}
        named = {*foundation.contradictions, foundation.previous}
        if not self._agree(list(rivals.values())) and not rivals.keys() <= named:
            raise FoundationError(
                f"Epoch {before.epoch} has {len(rivals)} foundations that contradict each other, and the foundation "
                "after it does not name all of them.",
                "Found the run again with `neuroshard run refound`.",
            )
        for start in foundation.stages:
            earlier = _newest_start(previous, known, start.stage)
            if earlier is not None and start.height < earlier[1].height:
                raise FoundationError(f"Stage {start.stage} would continue below height {earlier[1].height}.")


def _line(statement: SignedFoundation, known: Mapping[str, SignedFoundation]) -> Iterator[SignedFoundation]:
    """A statement and those before it, the newest first."""
    each: SignedFoundation | None = statement
    while each is not None:
        yield each
        previous = each.foundation.previous
        each = None if previous is None else known[previous]


def _newest_start(
    statement: SignedFoundation, known: Mapping[str, SignedFoundation], stage: int
) -> tuple[SignedFoundation, StageStart] | None:
    for each in _line(statement, known):
        for start in each.foundation.stages:
            if start.stage == stage:
                return each, start
    return None


def _ends_trust(word: Foundation, statement: SignedFoundation) -> bool:
    """Whether a statement of the owner ends the trust in the deputy that signed another one."""
    return word.epoch >= statement.foundation.epoch and statement.signer not in word.deputies


def _is_set_back(
    statement: SignedFoundation,
    known: Mapping[str, SignedFoundation],
    points: Mapping[int, tuple[SignedWaypoint, ...]],
) -> bool:
    """Whether a statement continues a stage from below a waypoint that the owner signed on its line."""
    line = {each.id for each in _line(statement, known)} - {statement.id}
    return any(
        is_set_back(start, [point.milestone])
        for start in statement.foundation.stages
        for point in valid_points(points.get(start.stage, ()))
        if point.statement in line
    )


def is_set_back(start: StageStart, passed: Iterable[Milestone]) -> bool:
    """Whether a stage would continue from below a value through which its chain passes, or from another one there."""
    return any(
        start.height < each.height or (start.height == each.height and start.parent != each.value) for each in passed
    )
