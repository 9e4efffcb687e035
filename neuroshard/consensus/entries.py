"""Which entries the next value may carry, by the evidence that a seat has seen. Pure.

    entry     evidence
    Admit     the ledger: a friend's accepted work (strangers get seats by a foundation only)
    Leave     a Departure that the seat's node signed for this step
    Remove    Silence statements of a quorum for this step: the seat does not answer, or the owner removed its wallet
    Expel     two votes of the seat in one phase and view, where strangers may take part
    MoveKey   a VotingKey that a node of the seat's wallet signed for this step: its vote log is new

Statements name the step, which names the value before it, so nobody can use them at another height.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from neuroshard.consensus.chain import Step
from neuroshard.consensus.committee import (
    MAX_SEATS,
    Committee,
    Entry,
    EntryRules,
    Expel,
    InvalidEntryError,
    Leave,
    MoveKey,
    Remove,
)
from neuroshard.consensus.round_messages import EntryEvidence
from neuroshard.types import NodeId, WalletId


def entry_rules(step: Step) -> EntryRules:
    """The rules for the entries of this step's value."""
    return EntryRules(step.height, step.owner)


def merged_evidence(step: Step, known: EntryEvidence, new: EntryEvidence) -> EntryEvidence:
    """The evidence for this step out of both: one statement of a kind per author and subject, so it stays small."""
    seats = step.committee.members
    departures = {one.member: one for one in (*new.departures, *known.departures) if one.body.step_id == step.id}
    keys = {one.member.wallet_id: one for one in (*new.keys, *known.keys) if one.body.step_id == step.id}
    silences = {
        (one.member, one.body.wallet_id): one
        for one in (*new.silences, *known.silences)
        if one.body.step_id == step.id and one.body.wallet_id in step.committee.wallets
    }
    double_votes = {pair[0].member: pair for pair in (*new.double_votes, *known.double_votes)}
    return EntryEvidence(
        tuple(one for member, one in sorted(departures.items()) if member in seats),
        tuple(one for (member, _), one in sorted(silences.items()) if member in seats),
        tuple(one for wallet, one in sorted(keys.items()) if wallet in step.committee.wallets),
        tuple(pair for member, pair in sorted(double_votes.items()) if member in seats),
    )


def supported_entries(step: Step, evidence: EntryEvidence, reachable: Collection[NodeId]) -> tuple[Entry, ...]:
    """The entries that a proposer puts into the next value: all that are valid together, in a fixed order."""
    chosen = list[Entry]()
    for entry in _candidates(step, evidence):
        try:
            after = entry_rules(step).applied(step.committee, [*chosen, entry])
        except InvalidEntryError:
            continue
        if _can_go_on(step.committee, after, reachable):
            chosen.append(entry)
    return tuple(chosen)


def entries_objection(
    step: Step, entries: Sequence[Entry], evidence: EntryEvidence, reachable: Collection[NodeId]
) -> str:
    """The reason not to vote for a value with these entries; "" for none.

    A seat refuses a change after which the committee could not decide: the seats that remain must be reachable. This
    is a condition for the first vote only. A certificate never depends on it, so a change that a quorum has locked
    always completes.
    """
    supported = set(_candidates(step, evidence))
    unsupported = [entry for entry in entries if entry not in supported]
    if unsupported:
        return f"its change of the committee has no evidence: {type(unsupported[0]).__name__.lower()}"
    try:
        after = entry_rules(step).applied(step.committee, entries)
    except InvalidEntryError as error:
        return f"its change of the committee is not valid: {error}"
    return "" if _can_go_on(step.committee, after, reachable) else "too few of the remaining seats can be reached"


def _candidates(step: Step, evidence: EntryEvidence) -> Iterable[Entry]:
    """Every entry that has evidence, valid or not."""
    committee = step.committee
    for signed in evidence.departures:
        if signed.body.step_id == step.id and signed.member in committee.members:
            yield Leave(signed.member.wallet_id)
    for signed in evidence.keys:
        if signed.body.step_id == step.id and signed.member.wallet_id in committee.wallets:
            yield MoveKey(signed.member.wallet_id, signed.member.node_id)
    moved = {signed.member.wallet_id for signed in evidence.keys}
    yield from (Remove(wallet) for wallet in _silent_wallets(step, evidence) if wallet not in moved)
    if step.committee.is_open:
        yield from (Expel(wallet) for wallet in _double_voters(step, evidence))
    yield from step.ledger.due_admissions(max(1, len(committee.seats) // 8) if len(committee.seats) < MAX_SEATS else 0)


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
    """Whether a quorum of the committee after a change that shrinks it can be reached."""
    if len(after.seats) >= len(before.seats):
        return True
    return after.is_quorum([seat.member for seat in after.seats if seat.node_id in reachable])
