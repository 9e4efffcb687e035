"""When a router is asked for which port, and what is told of it. The router here is made of memory, the clock too."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import pytest
import trio
from trio.testing import MockClock

from neuroshard.network.nat.external_addresses import ExternalAddresses
from neuroshard.network.nat.port_mapping import (
    AGAIN_SECONDS,
    CHECK_SECONDS,
    CLOSE_SECONDS,
    LOOK_SECONDS,
    RETRY_SECONDS,
    PortMapping,
)
from neuroshard.network.nat.router import LEASE_SECONDS, Lease, NoRouterError, Router, RouterFinder, RouterRefusedError

HOME = "192.168.1.5"
P2P, POOL = 4001, 4002
START = 1_700_000_000.0


@dataclass
class MemoryRouter:
    """A router that works, unless told otherwise; `calls` says what it was asked for, and when."""

    local_host: str = HOME
    outside: str = "1.2.3.4"
    taken: set[int] = field(default_factory=set[int])
    refused: set[int] = field(default_factory=set[int])  # inner ports
    lease_seconds: float = LEASE_SECONDS
    is_broken: bool = False
    hangs: bool = False
    opened: dict[int, int] = field(default_factory=dict[int, int])  # outer by inner
    calls: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])

    async def find(self) -> Router:
        await self._called("find")
        return self

    async def external_host(self) -> str:
        await self._called("host")
        return self.outside

    async def open(self, inner: int, suggested_port: int, seconds: int) -> Lease:
        outer = suggested_port
        while outer in self.taken:
            outer += 1000
        self.opened[inner] = outer
        await self._called(f"open {inner} as {suggested_port}")
        if inner in self.refused:
            del self.opened[inner]
            raise RouterRefusedError("Not this one.")
        return Lease(inner, outer, self.lease_seconds)

    async def keeps(self, lease: Lease) -> bool:
        await anyio.lowlevel.checkpoint()
        return lease.inner in self.opened

    async def close(self, lease: Lease) -> None:
        await self._called(f"close {lease.inner}")
        self.opened.pop(lease.inner, None)

    async def _called(self, what: str) -> None:
        self.calls.append((anyio.current_time(), what))
        if self.hangs:
            await anyio.sleep_forever()
        await anyio.sleep(0.01)
        if self.is_broken:
            raise RouterRefusedError("The router is broken.")

    def times_of(self, what: str) -> list[float]:
        return [round(at) for at, called in self.calls if called == what]


@dataclass
class Node:
    """What a scenario changes and looks at."""

    mapping: PortMapping
    hosts: Sequence[str] = (HOME,)
    slept: float = 0.0  # seconds that only the calendar noticed
    took_to_end: float = 0.0

    def reached(self) -> tuple[object, object]:
        return self.mapping.ports.of(P2P), self.mapping.ports.of(POOL)


def live(scenario: Callable[[Node], Awaitable[None]], *finders: RouterFinder, hosts: Sequence[str] = (HOME,)) -> Node:
    """Run a mapping beside a scenario, under a virtual clock; afterwards nothing is told any more."""
    ports = ExternalAddresses()
    node = Node(PortMapping(ports, finders, lambda: START + anyio.current_time() + node.slept), hosts)

    async def main() -> None:
        with ports.listening(lambda: node.hosts, (P2P, POOL)):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(node.mapping.live, cast("Any", None))
                await scenario(node)
                ended_at = anyio.current_time()
                tasks.cancel_scope.cancel()
            node.took_to_end = anyio.current_time() - ended_at
            assert node.reached() == (None, None)
            assert node.mapping.trouble() == ""

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return node


def test_both_ports_are_had_renewed_at_half_time_and_given_back() -> None:
    router = MemoryRouter()

    async def scenario(node: Node) -> None:
        await anyio.sleep(1)
        assert node.reached() == (("1.2.3.4", P2P), ("1.2.3.4", POOL))
        await anyio.sleep(2 * LEASE_SECONDS)
        assert router.opened == {P2P: P2P, POOL: POOL}

    live(scenario, router.find)
    opened = router.times_of(f"open {P2P} as {P2P}")
    assert len(opened) == 5
    assert all(
        LEASE_SECONDS / 2 <= later - earlier <= LEASE_SECONDS / 2 + LOOK_SECONDS
        for earlier, later in itertools.pairwise(opened)
    )
    assert [call for _, call in router.calls][-2:] == [f"close {P2P}", f"close {POOL}"]
    assert router.opened == {}
    assert len(router.times_of("find")) == 1


def test_a_short_lease_is_renewed_in_time() -> None:
    router = MemoryRouter(lease_seconds=60)

    async def scenario(_: Node) -> None:
        await anyio.sleep(3600)

    live(scenario, router.find)
    opened = router.times_of(f"open {P2P} as {P2P}")
    assert max(later - earlier for earlier, later in itertools.pairwise(opened)) < 60


def test_a_lease_that_ended_in_sleep_is_asked_for_again_at_once() -> None:
    router = MemoryRouter()

    async def scenario(node: Node) -> None:
        await anyio.sleep(10)
        node.slept = 2 * LEASE_SECONDS
        await anyio.sleep(LOOK_SECONDS + 1)
        assert len(router.times_of(f"open {P2P} as {P2P}")) == 2

    live(scenario, router.find)


def test_another_number_is_told_and_kept_when_its_own_is_taken() -> None:
    router = MemoryRouter(taken={P2P})

    async def scenario(node: Node) -> None:
        await anyio.sleep(LEASE_SECONDS)
        assert node.reached() == (("1.2.3.4", P2P + 1000), ("1.2.3.4", POOL))
        assert router.times_of(f"open {P2P} as {P2P + 1000}")

    live(scenario, router.find)


def test_a_router_that_lost_its_table_is_asked_again_and_a_new_address_told() -> None:
    router = MemoryRouter()

    async def scenario(node: Node) -> None:
        await anyio.sleep(1)
        router.opened.clear()
        router.outside = "5.6.7.8"
        await anyio.sleep(CHECK_SECONDS + 1)
        assert node.reached() == (("5.6.7.8", P2P), ("5.6.7.8", POOL))
        assert router.opened == {P2P: P2P, POOL: POOL}

    live(scenario, router.find)


def test_without_a_port_for_tensors_the_other_one_is_still_of_use() -> None:
    router = MemoryRouter(refused={POOL})

    async def scenario(node: Node) -> None:
        await anyio.sleep(1)
        assert node.reached() == (("1.2.3.4", P2P), None)
        router.refused.clear()
        await anyio.sleep(CHECK_SECONDS + 1)
        assert node.reached() == (("1.2.3.4", P2P), ("1.2.3.4", POOL))

    live(scenario, router.find)


@pytest.mark.parametrize("outside", ["100.64.1.2", "192.168.0.1", "10.1.2.3"])
def test_behind_a_second_router_no_port_is_opened_and_the_owner_told(
    outside: str, caplog: pytest.LogCaptureFixture
) -> None:
    router, other = MemoryRouter(outside=outside), MemoryRouter()

    async def scenario(node: Node) -> None:
        await anyio.sleep(2 * RETRY_SECONDS + 1)
        assert node.reached() == (None, None)
        assert outside in node.mapping.trouble()
        assert "behind another one" in node.mapping.trouble()
        router.outside = "1.2.3.4"
        await anyio.sleep(RETRY_SECONDS + LOOK_SECONDS)
        assert node.reached()[0] == ("1.2.3.4", P2P)
        assert node.mapping.trouble() == ""
        router.outside = outside  # the provider changed its mind
        await anyio.sleep(CHECK_SECONDS + AGAIN_SECONDS + LOOK_SECONDS + 1)
        assert node.reached() == (None, None)
        assert outside in node.mapping.trouble()

    with caplog.at_level("INFO", "neuroshard"):
        live(scenario, router.find, other.find)
    assert other.calls == []  # another protocol would not change it
    assert len(caplog.records) == 4  # told once each time


@pytest.mark.parametrize("outside", ["0.0.0.0", "", "nonsense", "2001:db8::1", "1.2.3.4/x", "224.0.0.1", "127.0.0.1"])
def test_no_port_is_opened_where_the_router_has_no_address(outside: str) -> None:
    router = MemoryRouter(outside=outside)

    async def scenario(node: Node) -> None:
        await anyio.sleep(RETRY_SECONDS + LOOK_SECONDS)
        assert node.reached() == (None, None)
        assert node.mapping.trouble() == ""

    live(scenario, router.find)
    assert {call for _, call in router.calls} == {"find", "host"}


def test_without_a_router_it_is_looked_for_rarely_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[tuple[str, float]] = []

    async def scenario(_: Node) -> None:
        await anyio.sleep(3 * RETRY_SECONDS + 1)

    with caplog.at_level("INFO", "neuroshard"):
        live(scenario, finding_none("one", asked), finding_none("two", asked))
    assert asked == [(name, turn * RETRY_SECONDS) for turn in range(4) for name in ("one", "two")]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "No router maps a port to this node: No one. No two.")
    ]


def finding_none(name: str, asked: list[tuple[str, float]]) -> RouterFinder:
    async def find() -> Router:
        asked.append((name, anyio.current_time()))
        await anyio.lowlevel.checkpoint()
        raise NoRouterError(f"No {name}.")

    return find


def test_the_next_way_is_tried_where_the_first_leads_to_no_port() -> None:
    useless, good = MemoryRouter(refused={P2P}), MemoryRouter(outside="5.6.7.8")

    async def scenario(node: Node) -> None:
        await anyio.sleep(1)
        assert node.reached()[0] == ("5.6.7.8", P2P)

    live(scenario, finding_none("router", []), useless.find, good.find)
    assert useless.calls[-1][1] == f"close {P2P}"  # it may have opened it all the same


def test_a_router_that_refuses_to_renew_is_not_told_of_any_more() -> None:
    router = MemoryRouter()

    async def scenario(node: Node) -> None:
        await anyio.sleep(1)
        router.is_broken = True
        await anyio.sleep(CHECK_SECONDS + 1)
        assert node.reached() == (None, None)
        router.is_broken = False
        await anyio.sleep(AGAIN_SECONDS + LOOK_SECONDS)
        assert node.reached() == (("1.2.3.4", P2P), ("1.2.3.4", POOL))

    live(scenario, router.find)


def test_a_computer_that_went_elsewhere_gives_its_ports_back_and_asks_there() -> None:
    here, there = MemoryRouter(), MemoryRouter(local_host="192.168.7.9", outside="5.6.7.8")
    routers = iter((here, there))

    async def find() -> Router:
        return await next(routers).find()

    async def scenario(node: Node) -> None:
        await anyio.sleep(1)
        node.hosts = ("192.168.7.9",)
        await anyio.sleep(LOOK_SECONDS + 1)
        assert node.reached()[0] == ("5.6.7.8", P2P)
        assert here.opened == {}
        node.hosts = ("192.168.7.9", "8.8.8.8")
        await anyio.sleep(LOOK_SECONDS + 1)

    live(scenario, find)
    assert there.opened == {}


@pytest.mark.parametrize("hosts", [("127.0.0.1",), ("192.168.1.5", "8.8.8.8"), ("2001:db8::1",), ()])
def test_nobody_is_asked_where_there_is_no_need(hosts: tuple[str, ...]) -> None:
    router = MemoryRouter(local_host=hosts[0] if hosts else "")

    async def scenario(_: Node) -> None:
        await anyio.sleep(RETRY_SECONDS + 1)

    live(scenario, router.find, hosts=hosts)
    assert router.calls == []


def test_a_router_that_passes_ports_on_to_another_computer_is_of_no_use() -> None:
    router = MemoryRouter(local_host="192.168.1.6")

    async def scenario(_: Node) -> None:
        await anyio.sleep(1)

    live(scenario, router.find)
    assert [call for _, call in router.calls] == ["find"]


def test_a_port_that_was_just_asked_for_is_given_back_too() -> None:
    router = MemoryRouter()

    async def scenario(_: Node) -> None:
        while not router.opened:
            await anyio.sleep(0.001)

    live(scenario, router.find)
    assert router.opened == {}


def test_a_router_that_hangs_does_not_hold_the_end() -> None:
    router = MemoryRouter()

    async def scenario(_: Node) -> None:
        await anyio.sleep(1)
        router.hangs = True

    assert live(scenario, router.find).took_to_end <= CLOSE_SECONDS
    assert router.calls[-1][1] == f"close {P2P}"
