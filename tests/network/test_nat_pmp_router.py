"""Asking a gateway by NAT-PMP over real sockets on loopback: a good one, silent ones, and ones that lie."""

from __future__ import annotations

import itertools
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
import trio

from neuroshard.network.nat.nat_pmp import WAITS_SECONDS, NatPmpRouter
from neuroshard.network.nat.router import Lease, NoRouterError, RouterRefusedError
from tests.worlds.lan import NatPmpBox

GATEWAY = "127.0.0.2"
QUICK = (0.05, 0.1, 0.2)
Reply = Callable[[bytes], bytes | None]


@asynccontextmanager
async def gateway(reply: Reply, host: str = GATEWAY) -> AsyncGenerator[int]:
    """A gateway on loopback that answers every packet with what `reply` says; its port."""
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        await sock.bind((host, 0))

        async def serve() -> None:
            while True:
                packet, asker = await sock.recvfrom(2048)
                answer = reply(packet)
                if answer is not None:
                    await sock.sendto(answer, asker)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            yield int(sock.getsockname()[1])
            tasks.cancel_scope.cancel()


def play(reply: Reply, scenario: Callable[[NatPmpRouter], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(20):
            async with gateway(reply) as port:
                await scenario(NatPmpRouter(GATEWAY, port=port, waits=QUICK))

    trio.run(main)


def test_a_port_is_had_renewed_and_given_back() -> None:
    box = NatPmpBox(taken={4001})

    async def scenario(router: NatPmpRouter) -> None:
        assert await router.external_host() == "1.2.3.4"
        assert router.local_host.startswith("127.")
        lease = await router.open(4001, 4001, 3600)
        assert lease == Lease(4001, 4002, 3600.0)
        assert await router.open(4001, lease.outer, 3600) == lease
        assert box.opened == {4001: 4002}
        await router.close(lease)
        assert box.opened == {}

    play(box.answer, scenario)
    assert box.questions == [("host",), ("open", 4001, 4001, 3600), ("open", 4001, 4002, 3600), ("close", 4001)]


def test_the_gateway_decides_how_long() -> None:
    box = NatPmpBox(longest=600)

    async def scenario(router: NatPmpRouter) -> None:
        assert (await router.open(4001, 4001, 3600)).seconds == 600

    play(box.answer, scenario)


def test_a_question_that_was_lost_is_asked_again() -> None:
    box, lost = NatPmpBox(), [True, True, False]

    async def scenario(router: NatPmpRouter) -> None:
        assert await router.external_host() == "1.2.3.4"

    play(lambda packet: None if lost.pop(0) else box.answer(packet), scenario)
    assert lost == []


def test_a_silent_gateway_is_given_up_in_seconds() -> None:
    asked: list[float] = []

    def silent(_: bytes) -> None:
        asked.append(trio.current_time())

    async def scenario(router: NatPmpRouter) -> None:
        began = trio.current_time()
        with pytest.raises(NoRouterError):
            await router.external_host()
        assert sum(QUICK) <= trio.current_time() - began < sum(QUICK) + 2

    play(silent, scenario)
    assert len(asked) == len(QUICK)
    assert WAITS_SECONDS[0] == 0.25
    assert all(later == 2 * earlier for earlier, later in itertools.pairwise(WAITS_SECONDS))
    assert sum(WAITS_SECONDS) < 4


def test_where_nobody_listens_nobody_is_waited_for() -> None:
    async def main() -> None:
        async with gateway(lambda _: None) as port:
            pass
        began = trio.current_time()
        with pytest.raises(NoRouterError):
            await NatPmpRouter(GATEWAY, port=port, waits=(20.0,)).external_host()
        assert trio.current_time() - began < 10

    trio.run(main)


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda good: good[:11],
        lambda good: good[:3],
        lambda good: b"",
        lambda good: good[:1] + b"\x81" + good[2:],
        lambda good: good[:1] + b"\0" + good[2:],
        lambda good: b"\2" + good[1:],
    ],
)
def test_packets_that_are_no_answer_are_passed_over(spoilt: Callable[[bytes], bytes]) -> None:
    box = NatPmpBox()

    async def scenario(router: NatPmpRouter) -> None:
        with pytest.raises(NoRouterError):
            await router.external_host()

    play(lambda packet: spoilt(box.answer(packet) or b""), scenario)
    assert len(box.questions) == len(QUICK)


def test_a_packet_from_another_address_is_not_read() -> None:
    async def main() -> None:
        seen: list[tuple[str, int]] = []
        box = NatPmpBox(outside="6.6.6.6")
        with trio.fail_after(20), trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as liar:
            await liar.bind(("127.0.0.3", 0))
            with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as true:
                await true.bind((GATEWAY, 0))

                async def lie() -> None:
                    while True:
                        packet, asker = await true.recvfrom(2048)
                        seen.append(asker)
                        await liar.sendto(box.answer(packet) or b"", asker)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(lie)
                    router = NatPmpRouter(GATEWAY, port=true.getsockname()[1], waits=QUICK)
                    with pytest.raises(NoRouterError):
                        await router.external_host()
                    tasks.cancel_scope.cancel()
        assert len(seen) == len(QUICK)

    trio.run(main)


@pytest.mark.parametrize(("position", "value"), [(10, b"\0\0"), (12, bytes(4)), (12, b"\xff" * 4)])
def test_a_success_with_a_port_or_a_time_that_makes_no_sense_is_refused(position: int, value: bytes) -> None:
    box = NatPmpBox()

    def lie(packet: bytes) -> bytes:
        good = box.answer(packet) or b""
        return good[:position] + value + good[position + len(value) :]

    async def scenario(router: NatPmpRouter) -> None:
        with pytest.raises(RouterRefusedError, match="reports that it opened"):
            await router.open(4001, 4001, 3600)

    play(lie, scenario)
    assert len(box.questions) == 1  # it was an answer


def test_a_refusal_is_told_and_not_asked_again() -> None:
    box = NatPmpBox(result=2)

    async def scenario(router: NatPmpRouter) -> None:
        with pytest.raises(RouterRefusedError, match="turned this off"):
            await router.open(4001, 4001, 3600)

    play(box.answer, scenario)
    assert len(box.questions) == 1


def test_a_gateway_that_began_anew_keeps_no_lease() -> None:
    now = 1000.0
    box = NatPmpBox(clock=lambda: now)

    async def scenario(router: NatPmpRouter) -> None:
        nonlocal now
        first, second = await router.open(4001, 4001, 3600), await router.open(4002, 4002, 3600)
        now += 60  # its clock may be fast, and this computer may have slept
        await router.external_host()
        assert await router.keeps(first)
        box.restart()
        await router.external_host()
        assert not await router.keeps(first)
        assert await router.open(4001, first.outer, 3600) == first
        assert await router.keeps(first)
        assert not await router.keeps(second)

    play(box.answer, scenario)
