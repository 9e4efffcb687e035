"""Seats among strangers: only the owner's word and work together lead to one, and the chain alone decides it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import pytest
from msgspec import structs

from neuroshard.consensus.chain import Chain, ChainError, Step
from neuroshard.consensus.committee import (
    SPAN,
    Admit,
    Committee,
    Entry,
    GroupMember,
    InvalidEntryError,
    Remove,
    Seat,
    Trust,
)
from neuroshard.consensus.entries import entries_objection, merged_evidence, supported_entries
from neuroshard.consensus.foundation import Foundation, Foundations, Founding, SignedFoundation, StageStart
from neuroshard.consensus.round_messages import (
    EntryEvidence,
    EvidenceSaid,
    MalformedMessageError,
    Phase,
    VerifiedBody,
    Vote,
    encode_round_message,
    read_round_message,
)
from neuroshard.consensus.strangers import LEAST_ACCEPTED, SEAT_SPAN
from neuroshard.identity import TokenSecret, Wallet
from neuroshard.types import NodeId, RunId, WalletId
from tests.consensus.test_chain import signed

RUN = RunId("1" * 64)
OWNER, THIEF = (Wallet.from_secret(TokenSecret("hex", bytes([number] * 32))) for number in (1, 2))
FIRST = GroupMember(NodeId("n0"), OWNER.wallet_id)
NAMED = [GroupMember(NodeId(f"named {number}"), WalletId(f"{number:032x}")) for number in range(1, 9)]
FREE = [GroupMember(NodeId(f"free {number:03d}"), WalletId(f"f{number:031x}")) for number in range(200)]
NOTHING = EntryEvidence()


def founded(seats: int = 1, trusted: Sequence[GroupMember] = (), *, epoch: int = 0) -> Chain:
    """A chain with the owner's seat and those of the first named wallets."""
    members = [FIRST, *NAMED[: seats - 1]]
    committee = Committee.founded([Seat(one.wallet_id, one.node_id, 0) for one in members], is_open=True)
    names = tuple(one.wallet_id for one in trusted)
    return Chain.founded(Founding("f" * 64, epoch, StageStart(0, committee), OWNER.wallet_id, trusted=names))


def step_of(chain: Chain) -> Step:
    place = chain.standing
    root = place.root or "0" * 64
    return Step(RUN, 0, place.outer_step, root, "terms", place, chain.ledger, chain.owner)


def with_work(chain: Chain, members: Collection[GroupMember], entries: Sequence[Entry] = ()) -> Chain:
    """The chain after an aggregate of these members' work, ten minutes after the one before."""
    step, names = step_of(chain), tuple(sorted(member.node_id for member in members))
    value = structs.replace(
        step.first_value(),
        outer_step=step.number + 1,
        next_root=f"{step.height:064x}",
        round_id="9" * 64,
        aggregate=("a" * 64,),
        members=tuple(sorted(members)),
        accepted=names,
        seconds=600,
        entries=tuple(entries),
    )
    return chain.extended(signed(step.completed(value), [seat.member for seat in chain.ledger.committee.seats]))


def worked(chain: Chain, members: Collection[GroupMember], times: int = 3) -> Chain:
    """The chain after some such aggregates. After three of them the members have worked for 30 minutes."""
    for _ in range(times):
        chain = with_work(chain, members)
    return chain


def word(number: int, trusted: Sequence[GroupMember], signer: Wallet = OWNER, run_id: RunId = RUN) -> EntryEvidence:
    """A list of the owner, or of somebody else."""
    names = tuple(one.wallet_id for one in trusted)
    return EntryEvidence(word=SignedFoundation.sign(signer, Foundation(run_id, number, (), "e" * 64, trusted=names)))


def proposed(
    chain: Chain, evidence: EntryEvidence = NOTHING, absent: Collection[GroupMember] = ()
) -> tuple[Entry, ...]:
    """The entries that an honest proposer puts into the next value, while some nodes do not answer."""
    here = {FIRST.node_id, *(one.node_id for one in NAMED)} - {one.node_id for one in absent}
    entries = supported_entries(step_of(chain), evidence, here)
    assert entries_objection(step_of(chain), entries, evidence, here) == ""
    return entries


def admit(*members: GroupMember) -> tuple[Admit, ...]:
    return tuple(Admit(member.wallet_id, member.node_id) for member in members)


def seated(chain: Chain) -> list[GroupMember]:
    return [seat.member for seat in chain.ledger.committee.seats]


def test_two_hundred_free_names_that_work_honestly_get_no_seat() -> None:
    chain = founded()
    for turn in range(100):
        chain = worked(chain, [FIRST, *FREE[2 * turn : 2 * turn + 2]])
        assert sum(one.is_due for one in chain.ledger.candidates) == 2
        assert proposed(chain) == ()
    chain = worked(chain, [FIRST, *FREE[:12]])
    entries = admit(*FREE[:3])
    assert "no evidence" in entries_objection(step_of(chain), entries, NOTHING, {FIRST.node_id})
    with pytest.raises(InvalidEntryError, match="has not worked"):
        with_work(chain, [FIRST], entries)


def test_three_named_wallets_get_their_seats_in_one_value() -> None:
    chain = founded(trusted=NAMED)
    chain = worked(worked(chain, [FIRST, *NAMED[:2]]), [FIRST, NAMED[2]], times=2)
    assert proposed(chain) == ()  # one of the first two is away, and the third has worked for 20 minutes only
    chain = worked(chain, [FIRST, *NAMED[:3]], times=1)
    assert proposed(chain) == admit(*NAMED[:3])
    for away in (1, 2):  # one absent seat of four leaves a quorum, two do not
        assert proposed(chain, absent=NAMED[:away]) == (admit(*NAMED[:3]) if away == 1 else ())
    chain = with_work(chain, [FIRST, *NAMED[:3]], proposed(chain))
    assert seated(chain) == [FIRST, *NAMED[:3]]
    assert (chain.ledger.committee.faults, chain.ledger.committee.quorum) == (1, 3)
    chain = worked(chain, [FIRST, *NAMED[:5]])
    assert proposed(chain) == admit(NAMED[3])  # then one per value
    proof = with_work(chain, [FIRST, *NAMED[:5]], proposed(chain)).proof()
    assert seated(founded(trusted=NAMED).proven(proof)) == [FIRST, *NAMED[:4]]


def test_the_owners_list_enters_the_chain_by_its_signature_alone() -> None:
    """The seat that votes need not know the statement: it travels with the proposal."""
    chain, evidence = founded(epoch=3), word(4, NAMED[:3])
    entries = (Trust(4, tuple(one.wallet_id for one in NAMED[:3])),)
    assert proposed(chain, evidence) == entries
    assert entries_objection(step_of(chain), (), evidence, {FIRST.node_id}) == ""  # a missing entry is no fault
    assert "no evidence" in entries_objection(step_of(chain), entries, NOTHING, {FIRST.node_id})
    more = (Trust(4, (*entries[0].wallets, FREE[0].wallet_id)),)
    assert "no evidence" in entries_objection(step_of(chain), more, evidence, {FIRST.node_id})
    chain = with_work(chain, [FIRST], entries)
    assert all(chain.ledger.trusts(one.wallet_id) for one in (FIRST, *NAMED[:3]))
    assert not chain.ledger.trusts(NAMED[3].wallet_id)


@pytest.mark.parametrize(
    "evidence",
    [word(2, NAMED), word(3, NAMED), word(4, NAMED, THIEF), word(4, NAMED, run_id=RunId("2" * 64))],
    ids=["older", "the same number", "another signer", "another run"],
)
def test_a_statement_that_is_not_the_owners_newest_changes_nothing(evidence: EntryEvidence) -> None:
    chain = founded(epoch=3)
    assert proposed(chain, evidence) == ()
    assert evidence.word is not None
    entry = Trust(evidence.word.foundation.epoch, evidence.word.foundation.trusted)
    assert "no evidence" in entries_objection(step_of(chain), (entry,), evidence, {FIRST.node_id})


def test_an_old_statement_names_no_wallet_again() -> None:
    chain = founded()
    for number, names in ((1, NAMED[:4]), (2, NAMED[:3])):
        chain = with_work(chain, [FIRST], proposed(chain, word(number, names)))
    assert proposed(chain, word(1, NAMED[:4])) == ()
    with pytest.raises(InvalidEntryError, match="not newer"):
        with_work(chain, [FIRST], [Trust(1, tuple(one.wallet_id for one in NAMED[:4]))])
    newest = merged_evidence(step_of(chain), word(4, NAMED[:1]), word(3, NAMED[:4]))
    assert newest == word(4, NAMED[:1])


def test_a_forged_statement_is_no_message() -> None:
    said = word(4, NAMED).word
    assert said is not None
    with pytest.raises(ValueError, match="in `word`"):
        EntryEvidence(word=SignedFoundation.sign(OWNER, msgspec.Raw(b"\x01")))  # type: ignore[arg-type]
    (data,) = encode_round_message(EvidenceSaid(EntryEvidence(word=said)))
    assert read_round_message([data]) == EvidenceSaid(EntryEvidence(word=said))
    with pytest.raises(MalformedMessageError, match="in `word`"):
        read_round_message([bytes(data).replace(NAMED[0].wallet_id.encode(), FREE[0].wallet_id.encode())])


def test_a_wallet_that_is_named_no_more_keeps_its_seat_until_another_replaces_it() -> None:
    """Four seats are needed to tolerate a liar, and the committee never tolerates fewer without a foundation."""
    chain = worked(founded(4, NAMED), [FIRST, *NAMED[:3]], times=1)
    liar, rest = NAMED[2], [*NAMED[:2], *NAMED[3:]]
    chain = with_work(chain, [FIRST, *NAMED[:3]], proposed(chain, word(1, rest)))
    assert proposed(chain) == ()
    with pytest.raises(InvalidEntryError, match="fewer than the 4"):
        with_work(chain, [FIRST], [Remove(liar.wallet_id)])
    chain = worked(chain, [FIRST, *NAMED[:4]])
    assert proposed(chain) == (Remove(liar.wallet_id), *admit(NAMED[3]))
    chain = with_work(chain, [FIRST, *NAMED[:4]], proposed(chain))
    assert seated(chain) == [FIRST, *NAMED[:2], NAMED[3]]
    assert proposed(worked(chain, [FIRST, *NAMED[:4]])) == ()  # its work gives it no seat


def test_a_list_counts_for_the_admissions_of_its_own_value() -> None:
    chain = worked(founded(4, NAMED), [FIRST, *NAMED[:4]])
    evidence = word(1, NAMED[:3])
    assert proposed(chain, evidence) == (Trust(1, tuple(one.wallet_id for one in NAMED[:3])),)
    both = (*proposed(chain, evidence), *admit(NAMED[3]))
    here = {FIRST.node_id, *(one.node_id for one in NAMED)}
    assert "is not valid" in entries_objection(step_of(chain), both, evidence, here)


def test_a_seat_in_too_few_aggregates_is_removed_and_returns_with_its_work() -> None:
    chain = worked(founded(5, NAMED), [FIRST, *NAMED[:4]], times=1)
    others = [FIRST, *NAMED[:3]]
    for _ in range(SEAT_SPAN - LEAST_ACCEPTED):
        assert proposed(chain) == ()
        chain = with_work(chain, others)
    chain = with_work(chain, others)
    assert proposed(chain) == (Remove(NAMED[3].wallet_id),)
    assert proposed(chain, absent=[*others[1:]]) == ()  # no quorum of the others is here
    chain = with_work(chain, others, proposed(chain))
    assert proposed(worked(chain, others)) == ()
    chain = with_work(chain, [*others, NAMED[3]])
    assert proposed(chain) == admit(NAMED[3])
    chain = with_work(chain, others, proposed(chain))
    for _ in range(SEAT_SPAN - LEAST_ACCEPTED):
        assert proposed(chain) == ()
        chain = with_work(chain, others)


def test_the_owner_is_away_for_long_and_gets_the_first_seat_again() -> None:
    chain = worked(founded(4, NAMED), [FIRST, *NAMED[:3]], times=1)
    chain = worked(chain, NAMED[:4], times=SEAT_SPAN)
    assert proposed(chain, absent=[FIRST]) == (Remove(FIRST.wallet_id), *admit(NAMED[3]))
    chain = with_work(chain, NAMED[:4], proposed(chain, absent=[FIRST]))
    chain = with_work(with_work(chain, [FIRST, *NAMED[:4]]), NAMED[:4], admit(FIRST))
    assert seated(chain) == [FIRST, *NAMED[:4]]


def test_the_last_seats_stay_however_little_they_work() -> None:
    chain = worked(founded(4, NAMED), [FIRST], times=2 * SEAT_SPAN)
    assert chain.ledger.strangers is not None
    assert len(chain.ledger.strangers.unfit(chain.ledger.committee)) == 3
    assert proposed(chain) == ()


def test_a_seat_that_voted_twice_gets_none_again_although_it_is_named() -> None:
    chain = worked(founded(5, NAMED), [FIRST, *NAMED[:4]])
    liar, votes = NAMED[3], [Vote(step_of(chain).id, 0, Phase.PREPARE, digit * 64) for digit in "12"]
    first, second = (VerifiedBody[Vote].of(liar, vote, vote.value.encode()) for vote in votes)
    chain = with_work(chain, NAMED[:4], proposed(chain, EntryEvidence(double_votes=((first, second),))))
    assert seated(chain) == [FIRST, *NAMED[:3]]
    chain = worked(chain, [FIRST, *NAMED[:4]], times=5)
    assert proposed(chain) == ()
    names = tuple(one.wallet_id for one in NAMED)
    chain = with_work(chain, [FIRST, *NAMED[:4]], [Trust(1, names)])
    assert proposed(chain) == ()


def test_free_names_displace_no_named_wallet_and_no_newcomer_among_the_candidates() -> None:
    """64 of them have worked once, and other ones keep coming."""
    chain = founded(trusted=NAMED)
    for number in range(64):
        chain = with_work(chain, [FIRST, FREE[number]])
        chain = with_work(chain, [FIRST, FREE[number]])
    assert len(chain.ledger.candidates) == 64
    newcomer = FREE[199]
    for number in range(SPAN // 2):
        chain = with_work(chain, [FIRST, newcomer, NAMED[0], *FREE[64 + 3 * number : 67 + 3 * number]])
    assert {newcomer.node_id, NAMED[0].node_id} <= chain.ledger.established
    chain = worked(chain, [FIRST, *FREE[100:162]], times=SPAN)
    assert [one.node_id for one in chain.ledger.candidates if one.wallet_id == NAMED[0].wallet_id]


def test_a_new_foundation_begins_with_the_owners_present_list() -> None:
    known = Foundations(RUN, OWNER.public_key)
    start = founded().start
    names = tuple(one.wallet_id for one in NAMED[:3])
    for starts, trusted in (((start,), None), ((), names), ((start,), None)):
        known = known.with_statements([known.next(OWNER, starts, trusted=trusted)])
    assert known.current is not None
    foundation = known.current.foundation
    chain = Chain.founded(
        Founding(known.current.id, foundation.epoch, start, OWNER.wallet_id, trusted=foundation.trusted)
    )
    assert chain.ledger.strangers is not None
    assert chain.ledger.strangers.number == 2
    assert set(names) <= set(chain.ledger.strangers.trusted)
    for old in known.known.values():
        assert proposed(chain, EntryEvidence(word=old)) == ()
    with pytest.raises(ChainError):
        chain.extended(with_work(founded(), [FIRST]).recent[-1])
