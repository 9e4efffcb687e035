"""Voters of a run in its branch: the foundation names them, and their first accepted work there leads to the seat."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from neuroshard.consensus.chain import Chain
from neuroshard.consensus.committee import (
    ADMISSION_SECONDS,
    MAX_SEATS,
    Candidate,
    Committee,
    GroupMember,
    Leave,
    Seat,
)
from neuroshard.consensus.foundation import Founding, StageStart
from neuroshard.node.branching import seats_at
from neuroshard.types import NodeId
from tests.consensus.test_chain import MEMBERS, longer, signed, value_on
from tests.consensus.test_chain import founded as friends
from tests.consensus.test_seats_of_strangers import FIRST, FREE, NAMED, OWNER, admit, proposed, seated, with_work


def candidates(members: Sequence[GroupMember]) -> tuple[Candidate, ...]:
    return tuple(Candidate(one.wallet_id, one.node_id, ADMISSION_SECONDS) for one in members)


def branched(voters: Sequence[GroupMember], trusted: Sequence[GroupMember] = (), *, is_open: bool = False) -> Chain:
    """The chain of a branch: the owner has the only seat, and the run before had these other voters."""
    committee = Committee.founded([Seat(FIRST.wallet_id, FIRST.node_id, 0)], is_open=is_open)
    start = StageStart(0, committee, 0, 40, "a" * 64, candidates=candidates(voters))
    names = tuple(one.wallet_id for one in trusted)
    return Chain.founded(Founding("f" * 64, 0, start, OWNER.wallet_id, trusted=names))


def test_a_voter_of_the_run_before_has_its_seat_after_one_aggregate_and_a_newcomer_has_not() -> None:
    chain = branched(NAMED[:2])
    assert (seated(chain), proposed(chain)) == ([FIRST], ())  # nobody is seated without work in the branch
    chain = with_work(chain, [FIRST, NAMED[0], NAMED[2]])
    assert proposed(chain) == admit(NAMED[0])
    chain = with_work(chain, [FIRST, NAMED[0], NAMED[2]], proposed(chain))
    assert seated(chain) == [FIRST, NAMED[0]]
    assert proposed(chain) == ()  # the other voter is away, and the newcomer has worked for 20 minutes
    chain = with_work(chain, [FIRST, *NAMED[:3]])
    chain = with_work(chain, [FIRST, *NAMED[:3]], proposed(chain)[:1])
    chain = with_work(chain, [FIRST, *NAMED[:3]], proposed(chain)[:1])
    assert set(seated(chain)) == {FIRST, *NAMED[:3]}  # the newcomer by its 30 minutes
    proof = chain.proof()
    assert seated(branched(NAMED[:2]).proven(proof)) == seated(chain)
    assert seated(branched([]).proven(branched([]).proof())) == [FIRST]


def test_voters_that_do_not_follow_are_missing_in_no_quorum() -> None:
    chain = branched(NAMED[:5])
    for _ in range(3):
        assert chain.ledger.committee.is_quorum([FIRST])
        chain = with_work(chain, [FIRST])
    assert chain.standing.height == 3


def test_another_node_of_a_voters_wallet_begins_again() -> None:
    other = GroupMember(NodeId("another"), NAMED[0].wallet_id)
    chain = with_work(branched(NAMED[:1]), [FIRST, other])
    assert proposed(chain) == ()


def test_the_first_three_named_voters_get_their_seats_together_and_free_names_none() -> None:
    chain = with_work(branched([*NAMED[:2], FREE[0]], NAMED, is_open=True), [FIRST, *NAMED[:2], FREE[0]])
    assert proposed(chain) == ()  # two named voters would make three seats, and one liar could be a quorum's tie
    chain = with_work(branched([*NAMED[:3], FREE[0]], NAMED, is_open=True), [FIRST, *NAMED[:3], FREE[0]])
    assert proposed(chain) == admit(*NAMED[:3])
    chain = with_work(chain, [FIRST, *NAMED[:3]], proposed(chain))
    assert (len(seated(chain)), chain.ledger.committee.faults) == (4, 1)
    chain = with_work(branched(NAMED[:3], NAMED[:2], is_open=True), [FIRST, *NAMED[:3]])
    assert proposed(chain) == ()  # the owner names the third one no more


def test_the_seats_of_an_earlier_state_are_those_after_its_outer_step() -> None:
    chain = longer(friends(), 2)
    leave = value_on(chain, entries=[Leave(MEMBERS[2].wallet_id)])
    chain = longer(chain.extended(signed(leave, MEMBERS[:3])), 2)
    wallets = {step: [seat.member for seat in seats_at(chain, step)] for step in (0, 2, 3, 5)}
    assert wallets == {0: MEMBERS[:3], 2: MEMBERS[:3], 3: MEMBERS[:2], 5: MEMBERS[:2]}
    later = Chain.founded(Founding("e" * 64, 1, StageStart(0, chain.ledger.committee, 5, 5, "a" * 64), chain.owner))
    assert (seats_at(later, 4), len(seats_at(later, 5))) == ((), 2)  # the chain before a foundation proves nothing


def test_a_start_of_an_earlier_program_is_read_and_the_number_of_voters_is_limited() -> None:
    start = StageStart(0, Committee.founded([Seat(FIRST.wallet_id, FIRST.node_id, 0)], is_open=False), 7)
    before = msgspec.msgpack.encode(msgspec.to_builtins(start)[:-1])
    assert msgspec.msgpack.decode(before, type=StageStart) == start
    many = msgspec.structs.replace(start, candidates=candidates(FREE[: MAX_SEATS + 1]))
    with pytest.raises(msgspec.ValidationError, match="length <= 16"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(many), type=StageStart)
