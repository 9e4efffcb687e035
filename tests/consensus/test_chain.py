"""The chain of a stage: one value per height, what a proof shows to a newcomer, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from neuroshard.consensus.chain import (
    KEPT_VALUES,
    Chain,
    ChainError,
    ChainProof,
    ForkError,
    Step,
)
from neuroshard.consensus.committee import (
    ADMISSION_SECONDS,
    SILENT_STEPS,
    SPAN,
    WRONG_STEPS,
    Admit,
    Bar,
    Barred,
    Committee,
    Entry,
    EntryRules,
    GroupMember,
    InvalidEntryError,
    Leave,
    Seat,
)
from neuroshard.consensus.foundation import Founding, StageStart
from neuroshard.consensus.round_messages import Phase, Quorum, Value, VerifiedBody, Vote
from neuroshard.types import NodeId, RunId, WalletId

OWNER = WalletId("w0")
MEMBERS = [GroupMember(NodeId(f"n{number}"), WalletId(f"w{number}")) for number in range(8)]


def founded(count: int = 3, *, is_open: bool = False) -> Chain:
    seats = [Seat(member.wallet_id, member.node_id, 0) for member in MEMBERS[:count]]
    return Chain.founded(Founding("f" * 64, 0, StageStart(0, Committee.founded(seats, is_open=is_open)), OWNER))


def value_on(
    chain: Chain, content: str = "1", *, entries: Sequence[Entry] = (), members: Sequence[GroupMember] = MEMBERS[:3]
) -> Value:
    standing, number = chain.standing, chain.standing.outer_step + 1
    after = EntryRules(chain.standing.height + 1, OWNER).applied(chain.ledger.committee, entries)
    value = Value(
        step_id="5" * 64,
        statement=standing.statement,
        height=standing.height + 1,
        parent=standing.value,
        committee=chain.ledger.committee.digest,
        outer_step=number,
        root=standing.root or "0" * 64,
        next_root=f"{number:063x}{content}",
        round_id="9" * 64,
        aggregate=("a" * 64,),
        members=tuple(sorted(members)),
        accepted=tuple(sorted(member.node_id for member in members)),
        seconds=600,
        entries=tuple(entries),
        next_committee=None if after == chain.ledger.committee else after,
    )
    rules = EntryRules(chain.standing.height + 1, OWNER, number)
    return structs.replace(value, ledger=chain.ledger.after(value, rules).digest)


def signed(value: Value, voters: Sequence[GroupMember], phase: Phase = Phase.COMMIT) -> Quorum:
    vote = Vote(value.step_id, 0, phase, value.digest)
    return Quorum(
        value, 0, phase, tuple(VerifiedBody.of(voter, vote, repr((voter, vote)).encode()) for voter in voters)
    )


def longer(chain: Chain, count: int) -> Chain:
    for _ in range(count):
        chain = chain.extended(signed(value_on(chain), [seat.member for seat in chain.ledger.committee.seats]))
    return chain


def test_a_value_with_a_quorum_extends_the_chain_and_names_what_comes_before() -> None:
    chain = longer(founded(), 3)
    assert chain.standing.height == chain.standing.outer_step == 3
    assert chain.recent[2].value.parent == chain.recent[1].value.digest
    assert chain.place_of(chain.recent[0].value.next_root, 1) is not None


@pytest.mark.parametrize("voters", [MEMBERS[1:2], MEMBERS[5:], [MEMBERS[0], *MEMBERS[3:]], []])
def test_too_few_seats_certify_nothing_however_many_others_sign(voters: list[GroupMember]) -> None:
    chain = founded()
    with pytest.raises(ChainError, match="too few votes"):
        chain.extended(signed(value_on(chain), voters))


def test_prepare_votes_are_no_certificate() -> None:
    chain = founded()
    with pytest.raises(ChainError, match="COMMIT"):
        chain.extended(signed(value_on(chain), MEMBERS[:3], Phase.PREPARE))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"statement": "e" * 64}, "another foundation"),
        ({"committee": "e" * 64}, "another committee"),
        ({"ledger": "e" * 64}, "not the certified one"),
        ({"height": 7}, "does not follow"),
    ],
)
def test_a_certificate_that_does_not_fit_is_refused(change: dict[str, object], reason: str) -> None:
    chain = longer(founded(), 1)
    with pytest.raises(ChainError, match=reason):
        chain.extended(signed(structs.replace(value_on(chain), **change), MEMBERS[:3]))


def test_two_certificates_of_one_height_are_a_fork_that_names_the_double_signers() -> None:
    start = founded()
    chain = start.extended(signed(value_on(start, "1"), MEMBERS[:2]))
    with pytest.raises(ForkError) as found:
        chain.extended(signed(value_on(start, "2"), MEMBERS[1:3]))
    assert found.value.double == (MEMBERS[1],)
    other = start.extended(signed(value_on(start, "2"), MEMBERS[1:3]))
    with pytest.raises(ForkError):
        chain.proven(other.proof())
    with pytest.raises(ForkError):
        chain.extended(signed(value_on(other), MEMBERS[:3]))


def test_a_line_that_left_at_the_newest_value_known_here_is_a_fork_although_it_shows_only_later_values() -> None:
    """A node asks for the values above its own height, so the other value of that height is not among them."""
    start = longer(founded(), 3)
    own = start.extended(signed(value_on(start), MEMBERS[:2]))
    other = longer(start.extended(signed(value_on(start, "2"), MEMBERS[1:3])), 3)
    with pytest.raises(ForkError):
        own.proven(other.proof(own.standing.height))


def admitted(chain: Chain) -> Chain:
    """The fourth member works until it gets a seat."""
    newcomer = MEMBERS[3]
    while not chain.ledger.due_admissions():
        value = value_on(chain, members=MEMBERS[:4])
        chain = chain.extended(signed(value, MEMBERS[:3]))
    entry = Admit(newcomer.wallet_id, newcomer.node_id)
    return chain.extended(signed(value_on(chain, entries=[entry]), MEMBERS[:3]))


def test_a_friend_gets_a_seat_after_half_an_hour_of_accepted_work() -> None:
    chain = admitted(founded())
    assert chain.standing.height == ADMISSION_SECONDS // 600 + 1
    assert MEMBERS[3] in chain.ledger.committee.members
    assert not chain.ledger.candidates


def test_no_value_admits_a_wallet_before_that_and_no_work_seats_a_stranger() -> None:
    for is_open, steps in ((False, 2), (True, 50)):
        chain = founded(4 if is_open else 3, is_open=is_open)
        seats = [seat.member for seat in chain.ledger.committee.seats]
        newcomer = MEMBERS[4]
        for _ in range(steps):
            chain = chain.extended(signed(value_on(chain, members=[*seats, newcomer]), seats))
        assert not chain.ledger.due_admissions()
        entry = Admit(newcomer.wallet_id, newcomer.node_id)
        with pytest.raises(ValueError, match="for long enough"):
            value_on(chain, entries=[entry])


def test_a_newcomer_verifies_the_newest_state_by_the_changes_of_the_committee_alone() -> None:
    chain = longer(admitted(founded()), 2 * KEPT_VALUES)
    chain = chain.extended(
        signed(
            value_on(chain, entries=[Leave(MEMBERS[1].wallet_id)]),
            [seat.member for seat in chain.ledger.committee.seats],
        )
    )
    chain = longer(chain, 3)
    proof = chain.proof()
    assert len(proof.changes) == 2
    learnt = founded().proven(proof)
    assert learnt.standing == chain.standing
    assert learnt.ledger == chain.ledger
    assert longer(learnt, 1).standing.height == chain.standing.height + 1


def test_a_proof_that_leaves_a_change_out_or_invents_one_is_refused() -> None:
    chain = longer(admitted(founded()), 2)
    proof = chain.proof()
    liars = MEMBERS[4:7]
    invented = signed(value_on(chain), liars)
    own = Committee.founded([Seat(liar.wallet_id, liar.node_id, 0) for liar in liars], is_open=False)
    takeover = signed(structs.replace(value_on(founded()), next_committee=own), liars)
    for changed, reason in (
        (structs.replace(proof, changes=()), "another committee"),
        (structs.replace(proof, tip=invented), "too few votes"),
        (structs.replace(proof, ledger=founded().ledger), "not the certified one"),
        (structs.replace(proof, changes=(takeover,)), "too few votes"),
        (structs.replace(proof, changes=(proof.changes[0], proof.changes[0])), "not in order"),
    ):
        with pytest.raises(ChainError, match=reason):
            founded().proven(changed)


def test_a_proof_without_a_value_or_of_an_older_one_changes_nothing() -> None:
    chain = longer(founded(), 3)
    assert chain.proven(founded().proof()) is chain
    assert chain.proven(longer(founded(), 2).proof()) is chain
    assert founded().proven(ChainProof(founded().ledger, None)).standing == founded().standing


def test_the_draws_of_a_step_follow_from_a_state_two_steps_before() -> None:
    """So the last member to send its intent cannot choose the reducers by its contribution."""
    start = longer(founded(), 2)
    first = start.extended(signed(value_on(start, "1"), MEMBERS[:3]))
    second = start.extended(signed(value_on(start, "2"), MEMBERS[:3]))
    assert first.standing.root != second.standing.root
    assert first.ledger.seed == second.ledger.seed
    assert longer(first, 1).ledger.seed != longer(second, 1).ledger.seed


def test_a_stranger_reduces_only_when_the_seed_is_younger_than_its_key() -> None:
    """It may choose its key with all that is known when it joins: that decides no slice, however many keys it tries."""
    start = longer(founded(4, is_open=True), 2)
    seats = [seat.member for seat in start.ledger.committee.seats]
    newcomer, seeds = MEMBERS[4], set[str]()
    for content in ("1", "2", "3"):  # states that nobody knows yet when it joins
        chain, joined = start, 0
        while not step_on(chain).may_reduce(newcomer.node_id):
            members = [*seats, newcomer]
            chain = chain.extended(signed(value_on(chain, content if joined == 0 else "4", members=members), seats))
            joined += 1
        assert joined == SPAN // 2
        seeds.add(chain.ledger.seed)
    assert len(seeds) == 3


def step_on(chain: Chain) -> Step:
    root = chain.standing.root or "0" * 64
    return Step(RunId("1" * 64), 0, chain.standing.outer_step, root, "terms", chain.standing, chain.ledger, chain.owner)


def barring(chain: Chain, *entries: Bar) -> Chain:
    return chain.extended(
        signed(value_on(chain, entries=entries), [seat.member for seat in chain.ledger.committee.seats])
    )


def test_a_bar_is_in_the_ledger_until_its_outer_step_and_every_newcomer_reads_it() -> None:
    start = longer(founded(4, is_open=True), 2)
    chain = barring(start, Bar(MEMBERS[1].node_id))
    assert chain.ledger.barred == (Barred(MEMBERS[1].node_id, 3 + SILENT_STEPS),)
    assert founded(4, is_open=True).proven(chain.proof()).ledger == chain.ledger
    for _ in range(SILENT_STEPS - 1):
        chain = longer(chain, 1)
        assert chain.ledger.barred
    assert longer(chain, 1).ledger.barred == ()
    again = barring(chain, Bar(MEMBERS[1].node_id, is_wrong=True))
    assert again.ledger.barred == (Barred(MEMBERS[1].node_id, again.standing.outer_step + WRONG_STEPS),)
    assert barring(again, Bar(MEMBERS[1].node_id)).ledger.barred == again.ledger.barred  # the longer one stays


@pytest.mark.parametrize(("seats", "is_open", "most"), [(3, False, 8), (1, True, 1), (4, True, 1), (7, True, 2)])
def test_among_strangers_most_of_those_that_reduce_stay(seats: int, is_open: bool, most: int) -> None:
    chain = longer(founded(seats, is_open=is_open), 1)
    bars = [Bar(member.node_id) for member in MEMBERS]
    assert len(barring(chain, *bars[:most]).ledger.barred) == most
    if most < len(bars):
        with pytest.raises(InvalidEntryError, match=f"at most {most} "):
            chain.ledger.barred_after(bars[: most + 1], 1)
