"""A seat given up at shutdown: the others need no vote of it, and it gets the seat again when it works again."""

from __future__ import annotations

import anyio

from neuroshard.network import InMemoryNetwork
from tests.worlds.replicas import DUE_SECONDS, IDENTITIES, A, B, C, SimulatedReplica, for_seconds, play


def seated(replica: SimulatedReplica) -> list[str]:
    """Nodes with a seat, as a replica knows them."""
    chain = replica.group.chain.chain
    assert chain is not None
    return [seat.node_id for seat in chain.ledger.committee.seats]


async def leave(leaver: SimulatedReplica, *others: SimulatedReplica) -> bool:
    """What a node does at shutdown while the others work."""
    gone = list[bool]()
    async with anyio.create_task_group() as tasks:
        for each in (leaver, *others):
            each.is_idle = True
            tasks.start_soon(each.live)
        await anyio.sleep(2)
        gone.append(await leaver.group.leave())
        tasks.cancel_scope.cancel()
    for each in (leaver, *others):
        each.is_idle = False
    return gone[0]


def test_two_of_three_friends_shut_down_and_the_owner_goes_on() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed, may_be_alone=True) for seed, name in enumerate((A, B, C)))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        assert a.state.outer_step == c.state.outer_step == 1
        assert await leave(c, a, b)
        assert seated(a) == seated(b) == seated(c) == [A, B]
        network.kill(C)
        assert not await leave(b, a)  # one seat would be left; it only counts as absent
        network.kill(B)
        before = a.state.outer_step
        await for_seconds(4 * DUE_SECONDS, a)
        assert a.state.outer_step > before

    play(scenario)


def test_without_the_leave_the_owner_waits_for_one_of_the_two() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed, may_be_alone=True) for seed, name in enumerate((A, B, C)))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        assert [(one.node_id, one.is_owner, one.is_online) for one in a.group.status.voters] == [
            (A, True, True),
            (B, False, True),
            (C, False, True),
        ]
        network.kill(B)
        network.kill(C)
        before = a.state.outer_step
        await for_seconds(4 * DUE_SECONDS, a)
        assert a.state.outer_step == before
        assert IDENTITIES[B].wallet_id[:8] in a.group.obstacle
        assert [one.is_online for one in a.group.status.voters] == [True, False, False]

    play(scenario)


def test_who_left_gets_its_seat_again_with_its_first_accepted_work() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        assert await leave(c, a, b)
        await for_seconds(2 * DUE_SECONDS, a, b)  # the absent one gets no seat
        assert seated(a) == [A, B]
        await for_seconds(5 * DUE_SECONDS, a, b, c)
        assert seated(a) == seated(b) == seated(c) == [A, B, C]
        assert a.replica_status().line == c.replica_status().line

    play(scenario)


def test_the_owner_leaves_and_gets_the_first_seat_again() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        assert await leave(a, b, c)
        before = b.state.outer_step
        await for_seconds(3 * DUE_SECONDS, b, c)
        assert b.state.outer_step > before
        await for_seconds(5 * DUE_SECONDS, a, b, c)
        assert seated(b) == seated(a) == [A, B, C]

    play(scenario)
