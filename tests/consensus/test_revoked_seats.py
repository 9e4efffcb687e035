"""The words of a node that its wallet has revoked move no seat, and the chain of before stays as it was certified."""

from __future__ import annotations

import pytest

from neuroshard.consensus.committee import Expel, GroupMember, Leave, MoveKey
from neuroshard.consensus.entries import entries_objection, merged_evidence, supported_entries
from neuroshard.consensus.round_messages import (
    AnyBody,
    Departure,
    EntryEvidence,
    Phase,
    ReducerFaults,
    Silence,
    VerifiedBody,
    Vote,
    VotingKey,
)
from neuroshard.types import NodeId
from tests.consensus.test_seats_of_strangers import FIRST, NAMED, admit, founded, seated, step_of, with_work, worked

STOLEN = NAMED[0]
NEW = GroupMember(NodeId("new"), STOLEN.wallet_id)
REVOKED = frozenset({(STOLEN.wallet_id, STOLEN.node_id)})
HERE = {FIRST.node_id, NEW.node_id, *(one.node_id for one in NAMED)}
CHAIN = worked(founded(5, NAMED), [FIRST, *NAMED[:4]])
STEP = step_of(CHAIN)


def said(by: GroupMember, body: AnyBody) -> VerifiedBody[AnyBody]:
    return VerifiedBody[AnyBody].of(by, body, f"{by} {body}".encode())


def test_a_revoked_node_neither_keeps_its_seat_from_the_new_one_nor_gives_it_up() -> None:
    keys = tuple(said(by, VotingKey(STEP.id)) for by in (STOLEN, NEW))
    leaves = (said(STOLEN, Departure(STEP.id)),)
    heard = EntryEvidence()
    for one in (EntryEvidence(keys=keys[:1], leave_requests=leaves), EntryEvidence(keys=keys[1:])):
        heard = merged_evidence(STEP, heard, one, REVOKED)
    assert (heard.keys, heard.leave_requests) == (keys[1:], ())
    entries = supported_entries(STEP, heard, HERE, REVOKED)
    assert entries == (MoveKey(NEW.wallet_id, NEW.node_id),)
    chain = with_work(CHAIN, [FIRST, *NAMED[1:4]], entries)
    assert seated(chain) == [FIRST, NEW, *NAMED[1:4]]
    assert chain.recent[:-1] == CHAIN.recent  # certified with the votes of the stolen node


@pytest.mark.parametrize(
    ("evidence", "entry"),
    [
        (EntryEvidence(keys=(said(STOLEN, VotingKey(STEP.id)),)), MoveKey(STOLEN.wallet_id, STOLEN.node_id)),
        (EntryEvidence(leave_requests=(said(STOLEN, Departure(STEP.id)),)), Leave(STOLEN.wallet_id)),
    ],
)
def test_a_seat_refuses_a_proposal_that_rests_on_a_revoked_node(
    evidence: EntryEvidence, entry: MoveKey | Leave
) -> None:
    assert "no evidence" not in entries_objection(STEP, [entry], evidence, HERE)
    assert entries_objection(STEP, [entry], evidence, HERE, REVOKED).startswith("its entry has no evidence")
    assert supported_entries(STEP, evidence, HERE, REVOKED) == ()


def test_a_revoked_node_removes_no_seat_and_accuses_no_reducer() -> None:
    """A quorum is four of five: with the stolen node these would be enough."""
    by = [FIRST, STOLEN, NAMED[1], NAMED[2]]
    silences = tuple(said(one, Silence(STEP.id, NAMED[3].wallet_id)) for one in by)
    faults = tuple(said(one, ReducerFaults(STEP.id, (NAMED[3].node_id,), ())) for one in by)
    evidence = EntryEvidence(silences=silences, faults=faults)
    assert STEP.committee.quorum == len(by)
    assert supported_entries(STEP, evidence, HERE)
    assert supported_entries(STEP, evidence, HERE, REVOKED) == ()


def test_a_liar_does_not_escape_by_revoking_the_node_that_voted_twice() -> None:
    votes = [said(STOLEN, Vote(STEP.id, 0, Phase.PREPARE, digit * 64)) for digit in "12"]
    evidence = EntryEvidence(double_votes=((votes[0], votes[1]),))
    assert supported_entries(STEP, evidence, HERE, REVOKED) == (Expel(STOLEN.wallet_id),)


def test_a_revoked_node_gets_no_first_seat_for_its_work() -> None:
    chain = worked(founded(1, NAMED), [FIRST, *NAMED[:3]])
    assert supported_entries(step_of(chain), EntryEvidence(), HERE) == admit(*NAMED[:3])
    entries = supported_entries(step_of(chain), EntryEvidence(), HERE, REVOKED)
    assert not set(entries) & set(admit(STOLEN))
    objection = entries_objection(step_of(chain), admit(*NAMED[:3]), EntryEvidence(), HERE, REVOKED)
    assert objection == "its entry has no evidence: admit"
