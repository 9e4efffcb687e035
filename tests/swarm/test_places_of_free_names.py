"""Free names around a step of an open run: they change neither its members, nor its deadlines, nor who is asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from msgspec import structs

from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.matchmaking import ASKED_AT_ONCE, Look
from neuroshard.consensus.round_messages import Intent, NewView, VerifiedBody
from neuroshard.consensus.views import Views
from neuroshard.network import InMemoryNetwork
from neuroshard.types import NodeId
from tests.worlds.replicas import EVERYBODY, IDENTITIES, SimulatedReplica, play, wallet_of
from tests.worlds.rounds import World, member_named, signed_as

NAMED, FREE = (
    [member_named(f"named {number}") for number in range(3)],
    [member_named(f"free {number}") for number in range(200)],
)
SEATS = [member_named(name) for name in "abcd"]


def intent(views: Views, member: GroupMember, view: int = 0) -> VerifiedBody[Intent]:
    step_id = views._setting.step.id  # pyright: ignore[reportPrivateUsage]
    return signed_as(member, Intent(step_id, view, "c" * 64, 100, 1000, 60, 1))


def views_of(members: Iterable[GroupMember], *, newcomer_seconds: float = 3.0) -> Views:
    """The views of the first seat, which has heard from these members. The owner has named three wallets."""
    world = World("abcd", is_open=True)
    world.ask_for_the_end(NodeId("a"))
    (machine,) = world.nodes[NodeId("a")].machines.values()
    step, strangers = machine.setting.step, machine.setting.step.ledger.strangers
    assert strangers is not None
    strangers = structs.replace(strangers, trusted=(*strangers.trusted, *(one.wallet_id for one in NAMED)))
    step = replace(step, ledger=structs.replace(step.ledger, strangers=strangers))
    expected = frozenset(one.node_id for one in (*SEATS, *NAMED))
    invited = frozenset(one.node_id for one in FREE)
    views = Views(
        replace(machine.setting, step=step, expected=expected, invited=invited, newcomer_seconds=newcomer_seconds)
    )
    views.begin(0, 0.0)
    for member in members:
        views.add_intent(intent(views, member))
    return views


def test_named_wallets_take_part_and_two_hundred_free_names_share_one_place() -> None:
    views = views_of([*FREE, *SEATS, *NAMED])
    members = {one.member for one in views.chosen_intents()}
    assert members.issuperset([*SEATS, *NAMED])
    assert len(members) == len(SEATS) + len(NAMED) + 1
    intents = [intent(views, member) for member in (*SEATS, *NAMED, *FREE[:2])]
    assert views.are_fit(intents[:-1], 0)
    assert not views.are_fit(intents, 0)
    assert not views.are_fit(intents[:-1], 1)
    assert views.are_fit(intents[:-2], 1)


@pytest.mark.parametrize("names", [0, 200])
def test_the_proposer_waits_no_longer_for_any_number_of_them(names: int) -> None:
    waits = views_of([*SEATS, *NAMED, *FREE[:names]])
    assert waits.may_propose(0.0) is (names > 0)  # the one place may still be taken, for a tenth of the usual time
    assert waits.may_propose(3.0)
    without = views_of([*SEATS, *NAMED[:2], *FREE[:names]])
    assert not without.may_propose(3.5)  # it waits for those that the owner has named, as for a seat
    assert without.may_propose(4.0)


def test_they_move_no_member_to_another_view() -> None:
    views = views_of(SEATS)
    step_id = views._setting.step.id  # pyright: ignore[reportPrivateUsage]
    for name in FREE:
        views.add_new_view(signed_as(name, NewView(step_id, 9, tuple(seat.node_id for seat in SEATS))), None)
    assert views.view_of_others() == 0
    assert {one.member for one in views.chosen_intents()} == set(SEATS)  # nobody accuses a seat


def test_a_look_asks_and_waits_as_if_they_were_not_there() -> None:
    names = [NodeId(f"free {number:03d}") for number in range(200)]
    seats, named = EVERYBODY[:4], EVERYBODY[5]

    async def scenario(network: InMemoryNetwork) -> None:
        replica = SimulatedReplica(seats[0], network, 0, seats=seats, is_open=True)
        ledger = replica.group.chain.ledger
        assert ledger is not None
        assert ledger.strangers is not None
        trusted = (*ledger.strangers.trusted, IDENTITIES[named].wallet_id)
        ledger = structs.replace(ledger, strangers=structs.replace(ledger.strangers, trusted=trusted))
        matchmaking, here = replica.group._matchmaking, [*seats[1:], named]  # pyright: ignore[reportPrivateUsage]
        step = replica.group._present_step()  # pyright: ignore[reportPrivateUsage]
        assert step is not None
        step = replace(step, ledger=ledger)
        pauses = list[float]()
        replica.sequences = 10**6  # this replica has done its part, so only the others are missing
        for peers in (here, [*here, *names]):
            replica.known = lambda peers=peers: peers
            matchmaking.note_answers(peers, 1.0)
            status = replica.replica_status()
            matchmaking.looked(Look(replace(status, sequences=0), {}, step, 1.0))
            assert sorted(matchmaking.asked(ledger, 1.0)) == sorted(here)
            pauses.append(matchmaking.pause_seconds(1.0, is_soon=False))
        assert pauses[0] == pauses[1]
        asked = [matchmaking.unproven(ledger, 1.0) for _ in range(20)]
        assert max(map(len, asked)) <= ASKED_AT_ONCE
        matchmaking.note_answers(names, 100.0)  # the others have been silent since
        for _ in range(20):
            probed = matchmaking.unproven(ledger, 100.0)
            assert set(here) <= set(probed)
            assert len(probed) <= ASKED_AT_ONCE + len(here)
        ready = {node: replica.replica_status() for node in (*here, *names)}
        due = matchmaking.looked(Look(replica.replica_status(), ready, step, 100.0))
        assert due is not None
        assert {member.node_id for member in due.members} == {*seats, named}
        assert due.invited == set(names)
        assert all(wallet_of(member.node_id) == member.wallet_id for member in due.members)

    play(scenario)
