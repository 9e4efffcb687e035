"""Which entries the next value may carry, by the evidence that a seat has seen. Pure.

    entry     evidence
    Admit     the ledger: accepted work of a friend, or of a wallet that the owner has named
    Leave     a Departure that the seat's node signed for this step
    Remove    Silence statements of a quorum for this step: the seat does not answer, or the owner removed its wallet.
              Among strangers also the ledger: the owner names the wallet no more, or few aggregates contain its work
    Expel     two votes of the seat in one phase and view, where strangers may take part
    MoveKey   a VotingKey that a node of the seat's wallet signed for this step: its vote log is new, or the other node
              of the wallet is gone or revoked
    Trust     a statement of the owner with a greater number than the last one in the chain
    Bar       ReducerFaults of a quorum for this step, which name the node
    ChangeParameters  a version with a greater number than the last one in the chain, which the owner has signed
    NameHeir  none that others can check: only a step of the only seat alone carries it

The words of a node that its wallet has revoked do not count, apart from its double votes, and it gets no seat.
Statements of seats name the step, which names the value before it, so nobody can use them at another height.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from msgspec import structs

from neuroshard.consensus.chain import Step
from neuroshard.consensus.committee import (
    LEAST_OPEN_SEATS,
    Admit,
    Bar,
    ChangeParameters,
    Committee,
    Entry,
    EntryRules,
    Expel,
    InvalidEntryError,
    Leave,
    MoveKey,
    Remove,
    Trust,
    read_change,
)
from neuroshard.consensus.foundation import SignedFoundation
from neuroshard.consensus.round_messages import AnyBody, EntryEvidence, VerifiedBody
from neuroshard.identity.node_revocations import RevokedPairs
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.types import NodeId, WalletId


def merged_evidence(
    step: Step, known: EntryEvidence, new: EntryEvidence, revoked: RevokedPairs = frozenset()
) -> EntryEvidence:
    """The evidence for this step out of both: one statement of a kind per author and subject, so it stays small.

    Of several versions of the parameters the first one comes first: a later one may apply after it.

    The words of a revoked node do not count, so they cannot displace those of the node that the wallet has now.
    """
    if revoked:
        known, new = _without(revoked, known), _without(revoked, new)
    seats = step.committee.members
    leave_requests = {
        one.member: one for one in (*new.leave_requests, *known.leave_requests) if one.body.step_id == step.id
    }
    keys = {one.member.wallet_id: one for one in (*new.keys, *known.keys) if one.body.step_id == step.id}
    silences = {
        (one.member, one.body.wallet_id): one
        for one in (*new.silences, *known.silences)
        if one.body.step_id == step.id and one.body.wallet_id in step.committee.wallets
    }
    faults = {one.member: one for one in (*new.faults, *known.faults) if one.body.step_id == step.id}
    versions = [one for one in (known.version, new.version) if one is not None and newer_change(step, one) is not None]
    double_votes = {pair[0].member: pair for pair in (*new.double_votes, *known.double_votes)}
    return EntryEvidence(
        tuple(one for member, one in sorted(leave_requests.items()) if member in seats),
        tuple(one for (member, _), one in sorted(silences.items()) if member in seats),
        tuple(one for wallet, one in sorted(keys.items()) if wallet in step.committee.wallets),
        tuple(pair for member, pair in sorted(double_votes.items()) if member in seats),
        max(filter(None, (newer_word(step, known.word), newer_word(step, new.word))), key=_number_of, default=None),
        tuple(one for member, one in sorted(faults.items()) if member in seats),
        min(versions, key=_version_of, default=None),
    )


def supported_entries(
    step: Step, evidence: EntryEvidence, reachable: Collection[NodeId], revoked: RevokedPairs = frozenset()
) -> tuple[Entry, ...]:
    """The entries that a proposer puts into the next value: all that are valid together, in a fixed order."""
    chosen = list[Entry]()
    for group in _candidates(step, evidence, revoked):
        try:
            after = _committee_after(step, [*chosen, *group])
        except InvalidEntryError:
            continue
        if _can_go_on(step.committee, after, reachable):
            chosen += group
    return tuple(chosen)


def entries_objection(
    step: Step,
    entries: Sequence[Entry],
    evidence: EntryEvidence,
    reachable: Collection[NodeId],
    revoked: RevokedPairs = frozenset(),
) -> str:
    """The reason not to vote for a value with these entries; "" for none.

    A seat refuses a change after which the committee could not decide: the seats that remain must be reachable. This
    is a condition for the first vote only. A certificate never depends on it, so a change that a quorum has locked
    always completes. The same is true of a seat for a node that its wallet has revoked: this node supports it no more.
    """
    supported = {entry for group in _candidates(step, evidence, revoked) for entry in group}
    unsupported = [entry for entry in entries if entry not in supported]
    if unsupported:
        return f"its entry has no evidence: {type(unsupported[0]).__name__.lower()}"
    try:
        after = _committee_after(step, entries)
    except InvalidEntryError as error:
        return f"its entry is not valid: {error}"
    return "" if _can_go_on(step.committee, after, reachable) else "too few of the remaining seats can be reached"


def _committee_after(step: Step, entries: Sequence[Entry]) -> Committee:
    """The committee after entries that are valid in this step, with or without an aggregate. Raises InvalidEntryError.

    Fewer nodes are barred after an aggregate than without one, so it is enough to look at the latter.
    """
    step.ledger.barred_after(entries, step.number)
    return step.ledger.with_entries(entries, EntryRules(step.height, step.owner, step.number)).committee


def _candidates(step: Step, evidence: EntryEvidence, revoked: RevokedPairs) -> Iterable[Sequence[Entry]]:
    """Every entry that has evidence, valid or not, in groups of which all or none enter the value."""
    committee, admissions = step.committee, step.ledger.due_admissions()
    if revoked:
        evidence = _without(revoked, evidence)
        admissions = tuple(each for each in admissions if (each.wallet_id, each.node_id) not in revoked)
    for signed in evidence.leave_requests:
        if signed.body.step_id == step.id and signed.member in committee.members:
            yield (Leave(signed.member.wallet_id),)
    for signed in evidence.keys:
        if signed.body.step_id == step.id and signed.member.wallet_id in committee.wallets:
            yield (MoveKey(signed.member.wallet_id, signed.member.node_id),)
    if (word := newer_word(step, evidence.word)) is not None:
        yield (Trust(word.foundation.epoch, word.foundation.trusted),)
    if evidence.version is not None and (change := newer_change(step, evidence.version)) is not None:
        yield (change,)
    if committee.is_open:
        yield from ((Expel(wallet),) for wallet in _double_voters(step, evidence))
    moved = {signed.member.wallet_id for signed in evidence.keys}
    for wallet in _removable(step, evidence):
        if wallet not in moved:
            yield (Remove(wallet),)
            yield (Remove(wallet), *admissions[:1])  # a seat that may not be missing is replaced in the same value
    yield from ((bar,) for bar in _faulty_reducers(step, evidence))
    yield from _admitted(committee, admissions)


def _without(revoked: RevokedPairs, evidence: EntryEvidence) -> EntryEvidence:
    """The evidence without the words of revoked nodes.

    Double votes stay: otherwise a liar could vote twice, revoke its node, and vote on with the next one.
    """

    def said(words: Sequence[VerifiedBody[AnyBody]]) -> tuple[VerifiedBody[AnyBody], ...]:
        return tuple(one for one in words if (one.member.wallet_id, one.member.node_id) not in revoked)

    return structs.replace(
        evidence,
        leave_requests=said(evidence.leave_requests),
        silences=said(evidence.silences),
        keys=said(evidence.keys),
        faults=said(evidence.faults),
    )


def _admitted(committee: Committee, admissions: Sequence[Admit]) -> Iterable[Sequence[Admit]]:
    """Admissions one by one. An open committee gets the missing ones of its first four seats at once."""
    lacking = LEAST_OPEN_SEATS - len(committee.seats) if committee.is_open else 0
    if lacking > 0:
        yield admissions[:lacking]
    else:
        yield from ((each,) for each in admissions)


def _removable(step: Step, evidence: EntryEvidence) -> list[WalletId]:
    strangers = step.ledger.strangers
    unfit = () if strangers is None else strangers.unfit(step.committee)
    return list(dict.fromkeys((*_silent_wallets(step, evidence), *unfit)))


def newer_word(step: Step, word: SignedFoundation | None) -> SignedFoundation | None:
    """A statement with which the owner of this run names other wallets than the chain knows; its signature is valid."""
    strangers = step.ledger.strangers
    if word is None or strangers is None or wallet_id_of(word.signer) != step.owner:
        return None
    is_newer = word.foundation.run_id == step.run_id and word.foundation.epoch > strangers.number
    return word if is_newer else None


def _number_of(word: SignedFoundation) -> int:
    return word.foundation.epoch


def next_change(step: Step, changes: Iterable[ChangeParameters]) -> ChangeParameters | None:
    """The first of these versions, which the owner has signed, that the chain does not contain yet."""
    return next((change for change in changes if change.number > step.ledger.newest_version), None)


def newer_change(step: Step, signed: bytes) -> ChangeParameters | None:
    """The entry for a version that the owner of this run has signed and the chain does not contain yet."""
    change, owner = read_change(signed)
    return change if owner == step.owner and change.number > step.ledger.newest_version else None


def _version_of(signed: bytes) -> tuple[int, bytes]:
    return read_change(signed)[0].number, signed


def _silent_wallets(step: Step, evidence: EntryEvidence) -> list[WalletId]:
    """Wallets that a quorum has not heard for long. The silent seat itself is not part of that quorum."""
    said: dict[WalletId, set[NodeId]] = {}
    for signed in evidence.silences:
        if signed.body.step_id == step.id and signed.member in step.committee.members:
            said.setdefault(signed.body.wallet_id, set()).add(signed.member.node_id)
    silent = list[WalletId]()
    for wallet, nodes in sorted(said.items()):
        seat = step.committee.seat_of(wallet)
        if seat is not None and step.is_quorum(nodes - {seat.node_id}):
            silent.append(wallet)
    return silent


def _faulty_reducers(step: Step, evidence: EntryEvidence) -> Iterable[Bar]:
    """Nodes that a quorum calls wrong, and those that a quorum calls silent or wrong.

    Liars alone do not reach a quorum, so they bar nobody. The honest seats together are one, whatever the liars say.
    """
    wrong, faulty = defaultdict[NodeId, set[NodeId]](set), defaultdict[NodeId, set[NodeId]](set)
    for signed in evidence.faults:
        if signed.body.step_id == step.id and signed.member in step.committee.members:
            for node in signed.body.wrong:
                wrong[node].add(signed.member.node_id)
            for node in (*signed.body.wrong, *signed.body.silent):
                faulty[node].add(signed.member.node_id)
    for node, seats in sorted(faulty.items()):
        is_wrong = step.committee.is_open and step.is_quorum(wrong[node] - {node})
        if is_wrong or step.is_quorum(seats - {node}):
            yield Bar(node, is_wrong)


def _double_voters(step: Step, evidence: EntryEvidence) -> list[WalletId]:
    found = list[WalletId]()
    for first, second in evidence.double_votes:
        one, other = first.body, second.body
        is_double = (one.step_id, one.view, one.phase) == (other.step_id, other.view, other.phase)
        is_double = is_double and one.value != other.value and first.member == second.member
        if is_double and first.member in step.committee.members:
            found.append(first.member.wallet_id)
    return sorted(set(found))


def _can_go_on(before: Committee, after: Committee, reachable: Collection[NodeId]) -> bool:
    """Whether a quorum of the committee after a change can be reached. Friends that are added are here already."""
    if after == before or (len(after.seats) >= len(before.seats) and not before.is_open):
        return True
    return after.is_quorum([seat.member for seat in after.seats if seat.node_id in reachable])
