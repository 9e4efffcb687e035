"""The chain of a stage as one node knows it: the foundation, the values since then, and the ledger. Pure.

Every value names the value before it, so a certificate decides one height of one line and nothing else. A node extends
only what it has verified; it never counts opinions. A newcomer needs the certificates that changed the committee, the
newest one, and the ledger whose hash that one names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct, structs

from neuroshard.consensus.committee import (
    ADMISSION_SECONDS,
    KEPT_VERSIONS,
    LARGEST,
    LARGEST_HEIGHT,
    SPAN,
    Admit,
    AppliedVersion,
    Bar,
    Barred,
    Candidate,
    Committee,
    Entry,
    EntryRules,
    Expel,
    GroupMember,
    Height,
    InvalidEntryError,
    NamedNode,
    NameHeir,
    Trust,
    barred_after,
    has_one_node_per_wallet,
    versions_after,
)
from neuroshard.consensus.foundation import Founding, StageStart, epoch_parent
from neuroshard.consensus.round_messages import MAX_MEMBERS, Phase, Quorum, Value
from neuroshard.consensus.strangers import StrangersLedger
from neuroshard.consensus.waypoints import (
    MAX_MILESTONES,
    MILESTONE_HEIGHTS,
    Milestone,
    Point,
    keeps_milestone,
    with_milestone,
)
from neuroshard.errors import DataError
from neuroshard.identity import hash_parts
from neuroshard.types import HexDigest, NodeId, RunId, WalletId

KEPT_VALUES = 128  # more than the outer steps whose aggregates are kept
MAX_CHANGES = 4096  # certificates that changed a committee since the foundation
NO_ROOT = "0" * 64
_Number = Annotated[int, Meta(ge=0, le=LARGEST)]


class ChainError(DataError):
    """A certificate or a chain that does not follow from the foundation that this node knows."""


class AstrayError(ChainError):
    """A chain that does not pass through a waypoint or an invitation's tip. Its sender may not know of it."""

    def __init__(self, point: Point) -> None:
        super().__init__(
            f"The chain of this stage does not have the value of height {point.milestone.height} that {point.named_by}."
        )


class ForkError(ChainError):
    """Two certificates for one height: more seats lie than the committee tolerates, or a backup of a seat votes."""

    def __init__(self, stage: int, height: int, double: Sequence[GroupMember]) -> None:
        names = ", ".join(sorted(member.wallet_id[:8] for member in double)) or "none"
        super().__init__(
            f"Height {height} of stage {stage} was certified twice. Wallets that signed both: {names}.",
            "The run's owner decides: `neuroshard run refound`. If the owner is gone: `neuroshard run branch`.",
        )
        self.double = tuple(double)


class Standing(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The newest certified state of a stage. Reports carry it; only certificates prove it."""

    statement: HexDigest  # the foundation, which names the epoch
    epoch: Height
    height: Height
    value: HexDigest  # hash of the newest value
    outer_step: Height
    root: HexDigest | None  # of the outer state; None: the run's initial state

    def is_state(self, root: str, outer_step: int) -> bool:
        """Whether an outer state is this one. Nobody signs the initial state: every node computes it from the run."""
        return outer_step == self.outer_step and self.root in (None, root)


class LogStart(NamedTuple):
    """The newest certified height that a node knew when its vote log began. The log has all votes above it."""

    epoch: int
    height: int


class ReducerShare(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member whose contribution the last aggregate contains, and its upload in bytes per second."""

    node_id: NamedNode
    upload: _Number


class ChainLedger(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """The state that follows from a value and all values before it."""

    committee: Committee
    seed: HexDigest  # of the draws in the next outer step: nobody knew it when the members of that step were chosen
    later_root: HexDigest  # goes into the seed of the outer step after that
    sequences: _Number = 0  # trained per member since the run began
    candidates: Annotated[tuple[Candidate, ...], Meta(max_length=MAX_MEMBERS)] = ()
    reducers: Annotated[tuple[ReducerShare, ...], Meta(max_length=MAX_MEMBERS)] = ()
    milestones: Annotated[
        tuple[Milestone, ...], Meta(max_length=MAX_MILESTONES)
    ] = ()  # earlier values, the oldest first
    strangers: StrangersLedger | None = None  # None among friends
    barred: Annotated[tuple[Barred, ...], Meta(max_length=MAX_MEMBERS)] = ()  # in the next outer step
    heir: NameHeir | None = None  # None as soon as there are several seats
    # of the run's parameters, by their first outer step; before the first one the initial parameters apply
    versions: Annotated[tuple[AppliedVersion, ...], Meta(max_length=KEPT_VERSIONS)] = ()

    @property
    def digest(self) -> str:
        """Hex SHA-256; every value names that of the ledger after it."""
        return hash_parts("neuroshard/ledger", msgspec.msgpack.encode(self)).hex()

    @classmethod
    def founded(cls, by: Founding) -> ChainLedger:
        """The ledger at the beginning of an epoch."""
        start, root = by.start, by.start.root or NO_ROOT
        seed = hash_parts("neuroshard/seed", by.statement, start.stage).hex()
        strangers = StrangersLedger.founded(by) if start.committee.is_open else None
        return cls(start.committee, seed, root, 0, start.candidates, strangers=strangers, versions=start.versions)

    @property
    def newest_version(self) -> int:
        """Number of the newest version in the chain; 1 without any."""
        return self.versions[-1].number if self.versions else 1

    @cached_property
    def established(self) -> frozenset[NodeId]:
        """Nodes with whose contributions those of others are compared: the seats, and proven contributors."""
        proven = (each.node_id for each in self.candidates if each.is_established)
        return frozenset(proven) | {seat.node_id for seat in self.committee.seats}

    @cached_property
    def named_nodes(self) -> frozenset[NodeId]:
        """Nodes that have worked, with wallets that the owner has named."""
        return frozenset(each.node_id for each in self.candidates if self.trusts(each.wallet_id))

    def counts(self, node: NodeId) -> bool:
        """Whether the others wait for a member and let its work decide when a step is due.

        Among friends everybody counts, elsewhere only the established: the names of the others cost nothing.
        """
        return not self.committee.is_open or node in self.established

    def trusts(self, wallet: WalletId | None) -> bool:
        """Whether a wallet may get a seat by its work: that of a friend, or one that the owner has named."""
        return self.strangers is None or self.strangers.trusts(wallet)

    def awaits(self, node: NodeId, wallet: WalletId | None) -> bool:
        """Whether the others wait for a member: it counts, or the owner has named its wallet, which has no seat."""
        return self.counts(node) or (self.trusts(wallet) and wallet not in self.committee.wallets)

    def due_admissions(self) -> tuple[Admit, ...]:
        """The entries that the next values may carry for wallets that have worked for long enough."""
        ready = (each for each in self.candidates if each.is_due and self.trusts(each.wallet_id))
        return tuple(Admit(each.wallet_id, each.node_id) for each in ready)

    def with_entries(self, entries: Sequence[Entry], rules: EntryRules) -> ChainLedger:
        """The ledger with committee, named wallets and versions after entries. Raises InvalidEntryError.

        A list of named wallets applies to the admissions of its own value.
        """
        strangers = self.strangers
        for entry in entries:
            if isinstance(entry, Trust):
                if strangers is None:
                    raise InvalidEntryError("among friends nobody names wallets")
                strangers = strangers.trusting(entry, rules.owner)
        if strangers is not None and (expelled := [one.wallet_id for one in entries if isinstance(one, Expel)]):
            strangers = strangers.expelling(tuple(expelled))
        versions = versions_after(self.versions, entries, rules.outer_step)
        ledger = structs.replace(self, strangers=strangers, versions=versions)
        due = ledger.due_admissions()
        for entry in entries:
            if isinstance(entry, Admit) and entry not in due:
                raise InvalidEntryError(f"wallet {entry.wallet_id} has not worked for long enough to get a seat")
        committee = rules.applied(self.committee, entries)
        heirs = [entry for entry in (self.heir, *entries) if isinstance(entry, NameHeir)]
        return structs.replace(
            ledger, committee=committee, heir=heirs[-1] if heirs and len(committee.seats) == 1 else None
        )

    def after(self, value: Value, rules: EntryRules) -> ChainLedger:
        """The ledger after a value. Raises InvalidEntryError.

        The value's own `ledger` field is not read, so a value can be completed with the result.
        """
        changed = self.with_entries(value.entries, rules) if value.entries else self
        strangers = changed.strangers
        has_aggregate, uploads = value.round_id is not None, dict(value.uploads)
        reducers = [ReducerShare(node, uploads.get(node, 0)) for node in sorted(value.accepted)]
        milestones, before = self.milestones, value.height - 1
        if before and before % MILESTONE_HEIGHTS == 0:
            milestones = with_milestone(milestones, Milestone(before, value.parent))
        return structs.replace(
            changed,
            seed=hash_parts("neuroshard/seed", self.seed, self.later_root).hex() if has_aggregate else self.seed,
            later_root=value.next_root if has_aggregate else self.later_root,
            sequences=self.sequences + value.sequences,
            candidates=changed._candidates_after(value, self.committee),
            reducers=tuple(reducers) if has_aggregate else self.reducers,
            milestones=milestones,
            strangers=None if strangers is None else strangers.after(value, self.committee, changed.committee),
            barred=self.barred_after(value.entries, value.outer_step) if self.barred or value.entries else (),
        )

    def barred_after(self, entries: Iterable[Entry], outer_step: int) -> tuple[Barred, ...]:
        """The nodes that reduce nothing in an outer step, after these entries. Raises InvalidEntryError."""
        # where members may lie, most of those that may reduce stay, whatever the seats have signed
        most = max(1, self.committee.faults, len(self.established) // 4) if self.committee.is_open else MAX_MEMBERS
        bars = [entry for entry in entries if isinstance(entry, Bar)]
        return barred_after(self.barred, bars, outer_step, most)

    def _candidates_after(self, value: Value, before: Committee) -> tuple[Candidate, ...]:
        """The candidates with this value; `before` is the committee that voted on it."""
        known = dict[WalletId, Candidate]()
        for each in self.candidates:
            history = each.accepted if value.round_id is None else each.accepted << 1 & (1 << SPAN) - 1
            known[each.wallet_id] = structs.replace(each, accepted=history)
        for member in value.members:
            wallet, node = member.wallet_id, member.node_id
            old = known.get(wallet)
            if old is None or old.node_id != node:
                old = Candidate(wallet, node, 0)
            if node in value.accepted:
                seconds, history = old.seconds + value.seconds, old.accepted | 1
                known[wallet] = structs.replace(old, seconds=seconds, accepted=history)
        seated = self.committee.wallets
        for seat in before.seats:
            if seat.wallet_id not in seated and Expel(seat.wallet_id) not in value.entries:
                # it had a seat, so it gets one again as soon as it works again
                known[seat.wallet_id] = Candidate(seat.wallet_id, seat.node_id, ADMISSION_SECONDS)
        waiting = [each for wallet, each in known.items() if wallet not in seated]
        waiting.sort(key=self._precedence)
        return tuple(waiting[:MAX_MEMBERS])

    def _precedence(self, each: Candidate) -> tuple[bool, int, int, WalletId]:
        """The order in which candidates stay if there are too many.

        Among friends those that worked longest come first, so newcomers cannot displace them. Names of strangers are
        free: those that work no more make room, and none displaces a wallet that the owner has named.
        """
        recent = 0 if self.strangers is None else each.accepted.bit_count()
        return not self.trusts(each.wallet_id), -recent, -each.seconds, each.wallet_id


class ChainProof(Struct, frozen=True, forbid_unknown_fields=True):
    """The values that prove the newest certified state to a newcomer that knows the foundation."""

    ledger: ChainLedger  # after the newest value
    tip: Quorum | None  # None: no height was certified since the foundation
    changes: Annotated[tuple[Quorum, ...], Meta(max_length=MAX_CHANGES)] = ()
    # up to the newest one, without a gap: a member that missed them asks for their aggregates
    recent: Annotated[tuple[Quorum, ...], Meta(max_length=KEPT_VALUES)] = ()


@dataclass(frozen=True)
class Chain:
    """One stage's chain from its foundation on."""

    statement: str  # hash of the foundation
    epoch: int
    start: StageStart
    owner: WalletId
    ledger: ChainLedger
    points: tuple[Point, ...] = ()
    tip: Quorum | None = None
    changes: tuple[Quorum, ...] = ()
    recent: tuple[Quorum, ...] = field(default=(), repr=False)  # the last KEPT_VALUES, the oldest first

    @classmethod
    def founded(cls, by: Founding) -> Chain:
        """The chain of an epoch in which nothing is certified yet."""
        return cls(by.statement, by.epoch, by.start, by.owner, ChainLedger.founded(by), by.points)

    def bound_to(self, points: tuple[Point, ...]) -> Chain:
        """The chain with other points. Raises AstrayError if it does not pass through one."""
        bound = replace(self, points=points)
        bound._check_line(self.standing.height, self.standing.value, self.ledger, self.recent)
        return bound

    @cached_property
    def standing(self) -> Standing:
        """The newest certified state."""
        if self.tip is None:
            parent = epoch_parent(self.statement, self.start.stage)
            start = self.start
            return Standing(self.statement, self.epoch, start.height, parent, start.outer_step, start.root)
        value = self.tip.value
        return Standing(self.statement, self.epoch, value.height, value.digest, value.outer_step, value.next_root)

    def is_covered(self, member: GroupMember, log: LogStart) -> bool:
        """Whether a log that began there has all votes of a seat that can count: those since it was seated."""
        seat = self.ledger.committee.seat_of(member.wallet_id)
        return seat is not None and log < (self.epoch, max(seat.seated_at, self.start.height + 1))

    def line_in(self, founding: Founding) -> Founding:
        """The foundation that a node with this chain follows: the present one, or its own if no heir replaces it.

        A line with several seats is not lost with one wallet, whatever that wallet has signed. The only seat of a line
        replaces its heir by naming another one.
        """
        own, heir = founding.line(self.statement), self.ledger.heir
        by: Founding | None = founding
        while by is not None and by.heir is not None and by.heir.statement != self.statement:
            by = founding.line(by.heir.statement)
        named = None if by is None else by.heir
        if own is None or len(self.ledger.committee.seats) > 1:
            return own or founding
        is_void = named is not None and self.standing.height >= named.height
        return own if named is not None and is_void and (heir is None or heir.wallet_id != named.heir) else founding

    def extended(self, certificate: Quorum) -> Chain:
        """The chain with the next value. Raises ChainError, or ForkError for another value of a height that it has."""
        value, standing = certificate.value, self.standing
        self._check_certificate(certificate, self.committee_at(value.height))
        if value.height <= standing.height:
            self._check_known(certificate)
            return self
        if value.height != standing.height + 1:
            raise ChainError(f"A certificate of height {value.height} does not follow height {standing.height}.")
        if value.parent != standing.value:
            raise ForkError(self.start.stage, standing.height, ())
        try:
            ledger = self.ledger.after(value, EntryRules(value.height, self.owner, value.outer_step))
        except InvalidEntryError as error:
            raise ChainError(f"An entry at height {value.height} is not valid: {error}.") from None
        if ledger.digest != value.ledger:
            raise ChainError(f"The ledger after height {value.height} is not the certified one.")
        for point in self.points:
            if point.milestone.height == value.height and point.milestone.value != value.digest:
                raise AstrayError(point)
        has_changed = ledger.committee != self.ledger.committee
        return replace(
            self,
            ledger=ledger,
            tip=certificate,
            changes=(*self.changes, certificate) if has_changed else self.changes,
            recent=(*self.recent, certificate)[-KEPT_VALUES:],
        )

    def place_of(self, root: str, outer_step: int) -> tuple[Standing, ChainLedger] | None:
        """The standing that certifies an outer state, and the ledger after it; None if the chain does not lead there.

        For an earlier standing the ledger has only the right committee, which is enough to check the end of its step.
        """
        if self.standing.is_state(root, outer_step):
            return self.standing, self.ledger
        for certificate in reversed(self.recent):
            value = certificate.value
            if value.root == root and value.outer_step >= outer_step:
                committee = self.committee_at(value.height)
                if committee is None:
                    return None
                place = Standing(value.statement, self.epoch, value.height - 1, value.parent, outer_step, root)
                return place, structs.replace(self.ledger, committee=committee)
        return None

    def values_after(self, root: str, outer_step: int) -> Sequence[Value] | None:
        """The newest values from the one that follows a state on, the oldest first; None if none known here does."""
        if self.standing.is_state(root, outer_step):
            return ()
        recent = [each.value for each in self.recent]
        starts = [place for place, value in enumerate(recent) if value.root == root and value.outer_step >= outer_step]
        return recent[starts[0] :] if starts else None

    def has_aggregate(self, root: str) -> bool:
        """Whether the step from this state may have an aggregate: the step of a lone member has none."""
        after = [each.value for each in self.recent if each.value.root == root != each.value.next_root]
        return not after or after[-1].round_id is not None

    def committee_at(self, height: int) -> Committee | None:
        """The committee that voted on a height; None if it is not known here."""
        if height > self.standing.height:
            return self.ledger.committee
        committee = self.start.committee if self.start.height < height else None
        for change in self.changes:
            if change.value.height < height:
                committee = change.value.next_committee or committee
        return committee

    def proof(self, known_height: int = LARGEST_HEIGHT) -> ChainProof:
        """The proof for a newcomer, with the values above a height that it knows."""
        unknown = max(0, self.standing.height - known_height)
        return ChainProof(self.ledger, self.tip, self.changes, self.recent[-unknown:] if unknown else ())

    def proven(self, proof: ChainProof) -> Chain:
        """The chain that a proof shows, if it is newer than this one. Raises ChainError or ForkError.

        The proof may skip heights: a committee certifies every change of itself, so each certificate is checked
        with the committee that the certificate before it left behind.
        """
        if proof.tip is None:
            return self
        committee = self.start.committee
        for before, after in pairwise(proof.changes):
            if after.value.height <= before.value.height:
                raise ChainError("The changes of a committee are not in order.")
        for change in proof.changes:
            self._check_certificate(change, committee)
            if change.value.next_committee is None:
                raise ChainError("A certificate in a proof changes no committee.")
            committee = change.value.next_committee
        tip = proof.tip.value
        if proof.changes and proof.changes[-1].value.height > tip.height:
            raise ChainError("A proof has a change after its newest value.")
        if not proof.changes or proof.changes[-1] != proof.tip:
            self._check_certificate(proof.tip, committee)
            if tip.next_committee is not None:
                raise ChainError("A proof leaves out that its newest value changes the committee.")
        if proof.ledger.digest != tip.ledger or proof.ledger.committee != committee:
            raise ChainError("The ledger of a proof is not the certified one.")
        if tip.height <= self.standing.height:
            self._check_known(proof.tip)
            return self
        if any(tip.height < point.milestone.height for point in self.points):
            return self
        recent = self._joined((*self.recent, *proof.recent), proof.tip)
        self._check_line(tip.height, tip.digest, proof.ledger, recent)
        return replace(self, ledger=proof.ledger, tip=proof.tip, changes=proof.changes, recent=recent)

    def with_earlier(self, certificates: Iterable[Quorum]) -> Chain:
        """The chain with those of these values that lead to its newest ones."""
        return self if self.tip is None else replace(self, recent=self._joined((*certificates, *self.recent), self.tip))

    @staticmethod
    def _joined(certificates: Iterable[Quorum], tip: Quorum) -> tuple[Quorum, ...]:
        """The tip and those before it without a gap, the oldest first. Each names the one before by its hash."""
        by_digest = {each.value.digest: each for each in certificates}
        recent = [tip]
        while (before := by_digest.get(recent[-1].value.parent)) is not None and len(recent) < KEPT_VALUES:
            recent.append(before)
        return tuple(reversed(recent))

    def _check_certificate(self, certificate: Quorum, committee: Committee | None) -> None:
        value = certificate.value
        if value.statement != self.statement:
            raise ChainError("A certificate belongs to another foundation.")
        if certificate.phase is not Phase.COMMIT:
            raise ChainError("A certificate consists of COMMIT votes.")
        if committee is None or value.committee != committee.digest:
            raise ChainError(f"A certificate of height {value.height} names another committee.")
        if not committee.is_quorum(certificate.signers):
            raise ChainError(f"A certificate of height {value.height} has too few votes.")

    def _check_known(self, certificate: Quorum) -> None:
        """Raise ForkError if the chain has another value at the same height."""
        value = certificate.value
        for known in self.recent:
            if known.value.height == value.height and known.value.digest != value.digest:
                double = certificate.signers & known.signers
                raise ForkError(self.start.stage, value.height, sorted(double))

    def _check_line(self, height: int, value: str, ledger: ChainLedger, recent: Sequence[Quorum]) -> None:
        """Compare a line, given by its newest value, with the values known here and with the points.

        Raises ForkError if it has another value at a height of this chain, AstrayError if it misses a point.
        """
        known = {each.value.height: each for each in self.recent}
        for each in recent:
            other = known.get(each.value.height, each)
            if other.value.digest != each.value.digest:
                raise ForkError(self.start.stage, each.value.height, sorted(other.signers & each.signers))
        seen = {milestone.height: milestone.value for milestone in ledger.milestones}
        seen |= {each.value.height - 1: each.value.parent for each in recent}
        seen |= {each.value.height: each.value.digest for each in recent} | {height: value}
        for milestone in (*self.ledger.milestones, Milestone(self.standing.height, self.standing.value)):
            if seen.get(milestone.height, milestone.value) != milestone.value:
                raise ForkError(self.start.stage, milestone.height, ())
        for point in self.points:
            expected = point.milestone
            found = seen.get(expected.height)
            is_shown = found is not None or (expected.height <= height and keeps_milestone(expected, height))
            if is_shown and found != expected.value:
                raise AstrayError(point)


@dataclass(frozen=True)
class Step:
    """One height of a stage's chain: the outer step that it would complete, and the committee that votes on it."""

    run_id: RunId
    stage: int
    number: int  # number of the outer step, from 0
    root: str  # hex root of the state from which all members start
    terms: str  # codec, aggregator and tensor schema: members with different terms exchange nothing
    standing: Standing  # the newest certified state, on which the value builds
    ledger: ChainLedger
    owner: WalletId

    @cached_property
    def id(self) -> str:
        """Hex hash of the step. Messages of another height, line or committee, or of other terms, have another id."""
        place = self.standing
        line = (place.statement, place.height, place.value)
        parts = (self.run_id, self.stage, *line, self.number, self.root, self.terms)
        return hash_parts("neuroshard/step", *parts).hex()

    @property
    def height(self) -> int:
        """The height that the step decides."""
        return self.standing.height + 1

    @property
    def committee(self) -> Committee:
        """The seats that vote."""
        return self.ledger.committee

    @cached_property
    def seats(self) -> frozenset[NodeId]:
        """Nodes of the seats."""
        return frozenset(map(attrgetter("node_id"), self.committee.seats))

    def is_quorum(self, nodes: Collection[NodeId]) -> bool:
        """Whether the seats of these nodes decide."""
        return self.committee.is_quorum([member for member in self.committee.members if member.node_id in nodes])

    def may_meet(self, members: Collection[GroupMember]) -> bool:
        """Whether these members may be in one step, by their wallets: a seat's wallet has no other node there."""
        return not self.committee.is_open or has_one_node_per_wallet({*members, *self.committee.members})

    def may_join(self, members: Collection[GroupMember], view: int, more: int = 0) -> bool:
        """Whether these members, and some more that are free names, may be in one view.

        Wallets are free to create, so strangers join slowly: one, or a quarter of the established members, per step.
        They spoil one view at most: the later ones are without them. Wallets that the owner has named do not count.
        """
        if not self.committee.is_open:
            return True
        known = sum(self.may_reduce(member.node_id) for member in members)
        free = more + sum(self.is_free_name(member) for member in members)
        return free <= (0 if view else max(1, known // 4))

    def is_free_name(self, member: GroupMember) -> bool:
        """Whether neither the owner's word nor accepted work speaks for a member."""
        return not self.may_reduce(member.node_id) and not self.ledger.trusts(member.wallet_id)

    def proposer(self, view: int) -> NodeId:
        """The proposer of a view: the seats take turns. Where they may lie, another one begins at each height."""
        seats, first = self.committee.seats, self.height if self.committee.is_open else 0
        return seats[(first + view) % len(seats)].node_id

    def may_reduce(self, node: NodeId) -> bool:
        """Whether a member may reduce: it has a seat, or its work is in the last aggregate.

        Where strangers take part, only the established reduce. Their keys are older than the seed of the draw, so
        nobody can choose a key that makes it the reducer of a slice.
        """
        if self.committee.is_open:
            return node in self.ledger.established
        return node in self.seats or any(node == share.node_id for share in self.ledger.reducers)

    def completed(self, value: Value) -> Value:
        """The value with the committee and the digest of the ledger that follow from it. Raises InvalidEntryError."""
        after = self.ledger.after(value, EntryRules(self.height, self.owner, value.outer_step))
        committee = None if after.committee == self.committee else after.committee
        return structs.replace(value, next_committee=committee, ledger=after.digest)

    def first_value(self) -> Value:
        """A value of this step without content: the state stays as it is."""
        place = self.standing
        return Value(
            step_id=self.id,
            statement=place.statement,
            height=self.height,
            parent=place.value,
            committee=self.committee.digest,
            outer_step=self.number,
            root=self.root,
            next_root=self.root,
        )
