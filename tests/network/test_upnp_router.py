"""What the UPnP library is asked for, and for how long its blocking calls are waited for."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from random import Random
from typing import Any

import anyio
import pytest
import trio

from neuroshard.network.nat.router import Lease, RouterRefusedError
from neuroshard.network.nat.upnp import CLOSE_SECONDS, UpnpRouter, answered_in_time

HOME, OTHER = "192.168.1.5", "192.168.1.6"
Target = tuple[str, int, str, bool, int]


@dataclass
class Gateway:
    """As the library shows a router: its methods block, and raise Exception itself."""

    knows_leases: bool = True
    tells_targets: bool = True
    open: dict[int, Target] = field(default_factory=dict[int, Target])

    def externalipaddress(self) -> str:
        return "1.2.3.4"

    def getspecificportmapping(self, port: int, protocol: str) -> Target | None:
        assert protocol == "TCP"
        return self.open.get(port) if self.tells_targets else None

    def addportmapping(self, *arguments: Any) -> bool:
        outer, protocol, host, inner, description, remote, seconds = arguments
        assert (protocol, description, remote) == ("TCP", "NeuroShard", "")
        if seconds and not self.knows_leases:
            raise Exception("OnlyPermanentLeasesSupported")
        if outer < 1024:
            raise Exception("NotAuthorized")
        self.open[outer] = (host, inner, description, True, seconds)
        return True

    def deleteportmapping(self, outer: int, protocol: str) -> bool:
        del self.open[outer]
        return True


def asked(gateway: Gateway, scenario: Callable[[UpnpRouter], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(20):
            await scenario(UpnpRouter(gateway, HOME, Random(1)))

    trio.run(main)


@pytest.mark.parametrize(("knows_leases", "seconds"), [(True, 3600), (False, 0)])
def test_a_port_is_had_for_a_time_or_for_ever(knows_leases: bool, seconds: int) -> None:
    gateway = Gateway(knows_leases=knows_leases)

    async def scenario(router: UpnpRouter) -> None:
        assert await router.external_host() == "1.2.3.4"
        lease = await router.open(4001, 4001, 3600)
        assert lease == Lease(4001, 4001, 3600.0)
        assert gateway.open[4001][4] == seconds
        assert await router.keeps(lease)
        assert await router.open(4001, 4001, 3600) == lease
        await router.close(lease)
        assert gateway.open == {}
        assert not await router.keeps(lease)

    asked(gateway, scenario)


@pytest.mark.parametrize("target", [(OTHER, 4001), (HOME, 5001)])
def test_a_port_that_leads_elsewhere_is_neither_taken_over_nor_closed(target: tuple[str, int]) -> None:
    theirs = (*target, "theirs", True, 0)
    gateway = Gateway(open={4001: theirs})

    async def scenario(router: UpnpRouter) -> None:
        lease = await router.open(4001, 4001, 3600)
        assert lease.outer >= 20_000
        await router.close(Lease(4001, 4001, 3600.0))
        assert gateway.open[4001] == theirs
        await router.close(lease)
        assert gateway.open == {4001: theirs}

    asked(gateway, scenario)


def test_a_router_that_does_not_tell_its_ports_is_believed_to_have_them_free() -> None:
    gateway = Gateway(tells_targets=False)

    async def scenario(router: UpnpRouter) -> None:
        lease = await router.open(4001, 4001, 3600)
        await router.close(lease)
        assert gateway.open == {}

    asked(gateway, scenario)


def test_a_refusal_says_why() -> None:
    async def scenario(router: UpnpRouter) -> None:
        with pytest.raises(RouterRefusedError, match="NotAuthorized"):
            await router.open(80, 80, 3600)

    asked(Gateway(), scenario)


def test_a_router_that_hangs_is_given_up_and_does_not_hold_the_end() -> None:
    begun, hanging = SimpleQueue[None](), SimpleQueue[None]()

    def hang() -> None:
        begun.put(None)
        hanging.get()

    async def main() -> None:
        with pytest.raises(RouterRefusedError, match=r"within 0\.1 s"):
            await answered_in_time(hang, 0.1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answered_in_time, hang)
            for _ in range(2):
                await anyio.to_thread.run_sync(begun.get)
            tasks.cancel_scope.cancel()

    started = time.monotonic()
    trio.run(main)
    assert time.monotonic() - started < CLOSE_SECONDS + 3
    for _ in range(2):
        hanging.put(None)


def test_who_ends_waits_for_a_router_that_answers_soon() -> None:
    begun, answered, found = SimpleQueue[None](), SimpleQueue[None](), list[float]()

    def find() -> None:
        begun.put(None)
        answered.get(timeout=20)
        found.append(time.monotonic())

    async def answer_after_the_end() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            answered.put(None)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answered_in_time, find)
            tasks.start_soon(answer_after_the_end)
            await anyio.to_thread.run_sync(begun.get)
            tasks.cancel_scope.cancel()

    trio.run(main)
    assert len(found) == 1
    assert time.monotonic() - found[0] < 1
