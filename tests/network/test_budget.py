from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from neuroshard.network import MessageTooLargeError
from neuroshard.network.limits import ByteBudget, PeerStanding, contested_seconds, frame_budget
from neuroshard.types import NodeId

A, B, C, D = NodeId("a"), NodeId("b"), NodeId("c"), NodeId("d")


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def test_a_message_waits_until_there_is_room() -> None:
    async def scenario() -> None:
        budget = ByteBudget(total=100, per_peer=100)
        got: list[str] = []

        async def wait_for_room() -> None:
            async with budget.reserved(B, 60):
                got.append("room")

        async with anyio.create_task_group() as tasks:
            async with budget.reserved(A, 50):
                tasks.start_soon(wait_for_room)
                await wait_all_tasks_blocked()
                assert got == []
                assert budget.used == 50
            await wait_all_tasks_blocked()
            assert got == ["room"]
        assert budget.used == 0
        assert budget.used_by(A) == 0

    run(scenario)


def test_what_never_fits_is_refused_at_once() -> None:
    async def scenario() -> None:
        budget = ByteBudget(total=100, per_peer=40)
        with pytest.raises(MessageTooLargeError, match="41"):
            await budget.reserve(A, 41)
        assert budget.used == 0

    run(scenario)


def test_a_peer_at_its_own_limit_does_not_hold_up_others() -> None:
    async def scenario() -> None:
        budget = ByteBudget(total=100, per_peer=40)
        first = await budget.reserve(A, 40)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(budget.reserve, A, 10)
            await wait_all_tasks_blocked()
            assert budget.try_reserve(B, 40) is not None
            first.release()
        assert budget.used == 50

    run(scenario)


def test_small_messages_do_not_starve_a_large_one() -> None:
    async def scenario() -> None:
        budget = ByteBudget(total=100, per_peer=100)
        first = await budget.reserve(A, 60)
        order: list[str] = []

        async def reserve(name: str, peer: NodeId, byte_count: int) -> None:
            await budget.reserve(peer, byte_count)
            order.append(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reserve, "large", B, 80)
            await wait_all_tasks_blocked()
            tasks.start_soon(reserve, "small", C, 30)
            await wait_all_tasks_blocked()
            assert order == []
            assert budget.try_reserve(C, 10) is None
            first.release()
            await wait_all_tasks_blocked()
            assert order == ["large"]
            tasks.cancel_scope.cancel()

    run(scenario)


def test_messages_of_one_peer_keep_their_order() -> None:
    async def scenario() -> None:
        budget = ByteBudget(total=1000, per_peer=100)
        first = await budget.reserve(A, 90)
        order: list[int] = []

        async def reserve(byte_count: int) -> None:
            await budget.reserve(A, byte_count)
            order.append(byte_count)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reserve, 95)
            await wait_all_tasks_blocked()
            tasks.start_soon(reserve, 10)
            await wait_all_tasks_blocked()
            assert order == []
            first.release()
            await wait_all_tasks_blocked()
            assert order == [95]
            tasks.cancel_scope.cancel()

    run(scenario)


def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        budget = ByteBudget(total=10, per_peer=10)
        first = await budget.reserve(A, 10)
        with anyio.move_on_after(1):
            await budget.reserve(B, 5)
        assert budget.waiting == 0
        first.release()
        first.release()
        assert budget.used == 0
        assert budget.try_reserve(C, 10) is not None

    run(scenario)


def test_a_wait_cancelled_in_the_moment_it_is_granted_gives_the_bytes_back() -> None:
    async def scenario() -> None:
        budget = ByteBudget(total=10, per_peer=10)
        first = await budget.reserve(A, 10)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(budget.reserve, B, 5)
            await wait_all_tasks_blocked()
            first.release()
            tasks.cancel_scope.cancel()
        assert budget.used in {0, 5}  # 5 when the waiter was already on its way: then it has them
        assert budget.waiting == 0

    run(scenario)


STANDINGS = {
    A: PeerStanding("9.9.9.9"),
    B: PeerStanding("9.9.9.8"),
    C: PeerStanding("9.9.8.1"),
    D: PeerStanding("", is_known=True),
}


@given(
    st.lists(
        st.tuples(st.sampled_from([A, B, C, D]), st.integers(0, 40), st.floats(0, 5), st.floats(0, 5)), max_size=30
    )
)
def test_the_limits_hold_whatever_happens_and_everybody_is_served(
    messages: list[tuple[NodeId, int, float, float]],
) -> None:
    async def scenario() -> None:
        budget = ByteBudget(total=60, per_peer=40)
        budget.share_by(STANDINGS.__getitem__)
        served: list[int] = []

        async def receive(peer: NodeId, byte_count: int, after: float, lasting: float) -> None:
            await anyio.sleep(after)
            async with budget.reserved(peer, byte_count):
                assert budget.used <= 60
                assert budget.used_by(peer) <= 40
                served.append(byte_count)
                await anyio.sleep(lasting)

        async with anyio.create_task_group() as tasks:
            for message in messages:
                tasks.start_soon(receive, *message)
        assert sorted(served) == sorted(byte_count for _, byte_count, _, _ in messages)
        assert budget.used == budget.waiting == 0

    run(scenario)


@pytest.mark.parametrize(
    ("waiting", "order"),
    [
        (["9.9.9.1", "9.9.9.2", "20.1.1.1"], [2, 0, 1]),  # 9.9.9.9 holds everything
        (["9.9.8.1", "9.9.7.1", "20.1.1.1"], [2, 0, 1]),
        (["9.9.9.9", "9.9.9.2", "9.9.8.1"], [2, 1, 0]),
        (["9.9.9.9", "20.1.1.1", "9.9.9.9 known"], [2, 1, 0]),
        (["20.1.1.1", "9.9.9.9", "20.1.1.2", "21.1.1.1"], [0, 3, 2, 1]),  # a grant counts at once
    ],
)
def test_the_greediest_network_waits_longest(waiting: list[str], order: list[int]) -> None:
    async def scenario() -> None:
        standings = {NodeId(f"{n}"): PeerStanding(ip.split()[0], "known" in ip) for n, ip in enumerate(waiting)}
        budget = ByteBudget(total=100, per_peer=100)
        budget.share_by({A: PeerStanding("9.9.9.9"), **standings}.__getitem__)
        held = [await budget.reserve(A, 20) for _ in range(5)]
        served: list[int] = []

        async def reserve(number: int) -> None:
            await budget.reserve(NodeId(f"{number}"), 20)
            served.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(len(waiting)):
                tasks.start_soon(reserve, number)
                await wait_all_tasks_blocked()
            for one in held:
                one.release()
                await wait_all_tasks_blocked()
        assert served == order

    run(scenario)


@pytest.mark.parametrize(
    ("holders", "newcomer", "yielding"),
    [
        (["9.9.9.9", "9.9.9.8"], "20.1.1.1", [True, True]),
        (["9.9.9.9", "20.1.1.1"], "21.1.1.1", [True, True]),  # it would hold as much as each of them
        (["9.9.9.9", "20.1.1.1"], "20.1.1.2", [False, True]),  # its network would hold more than 9.9.9.0/24
        (["9.9.9.9", "9.9.9.9 known"], "20.1.1.1", [True, False]),
        (["9.9.9.9", "9.9.9.9 known"], "9.9.9.9 known", [True, True]),
    ],
)
def test_who_holds_less_than_a_newcomer_would_need_not_yield(
    holders: list[str], newcomer: str, yielding: list[bool]
) -> None:
    async def scenario() -> None:
        ips = [*holders, newcomer]
        standings = {NodeId(f"{n}"): PeerStanding(ip.split()[0], "known" in ip) for n, ip in enumerate(ips)}
        budget = ByteBudget(total=100, per_peer=50)
        budget.share_by(standings.__getitem__)
        peers = list(standings)
        for peer in peers[:-1]:
            await budget.reserve(peer, 50)
        assert not any(budget.must_yield(peer) for peer in peers)  # nobody waits
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(budget.reserve, peers[-1], 50)
            await wait_all_tasks_blocked()
            assert [budget.must_yield(peer) for peer in peers[:-1]] == yielding
            assert not budget.must_yield(peers[-1])
            tasks.cancel_scope.cancel()

    run(scenario)


def test_one_peer_gets_a_quarter_of_what_all_frames_may_take() -> None:
    total = 2**28
    budget = frame_budget(total)
    budget.check(total // 4)
    with pytest.raises(MessageTooLargeError):
        budget.check(total // 4 + 1)
    peers = [NodeId(str(number)) for number in range(5)]
    assert [budget.try_reserve(peer, total // 4) is not None for peer in peers] == [True] * 4 + [False]


def test_the_largest_frame_that_is_expected_fits() -> None:
    budget = ByteBudget(total=100, per_peer=25)
    budget.make_fit(10)
    with pytest.raises(MessageTooLargeError):
        budget.check(26)
    budget.make_fit(300)
    assert budget.try_reserve(A, 300) is not None


def test_only_what_others_wait_for_is_contested() -> None:
    async def scenario() -> None:
        budget = ByteBudget(total=100, per_peer=60)
        held = [await budget.reserve(A, 60)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(budget.reserve, A, 10)
            await wait_all_tasks_blocked()
            assert not budget.is_awaited_by_others(B)  # A waits for itself
            tasks.start_soon(budget.reserve, B, 50)
            await wait_all_tasks_blocked()
            assert budget.is_awaited_by_others(A)
            assert not budget.is_awaited_by_others(B)
            held[0].release()
            await wait_all_tasks_blocked()
            assert not budget.is_awaited_by_others(A)

    run(scenario)
    assert contested_seconds(0) == 10
    assert contested_seconds(64 * 1024 * 1024) == 45
