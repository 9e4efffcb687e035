"""When a router is asked for which port, and what is told of it. The router here is made of memory."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from random import Random

import anyio
import pytest
import trio
from anyio import to_thread
from made_identity import identity
from network_of_addresses import move, network_at
from trio.testing import MockClock

from neuroshard.network.port_mapping import (
    CLOSE_SECONDS,
    LEASE_SECONDS,
    LOOK_SECONDS,
    RENEW_SECONDS,
    RETRY_SECONDS,
    NoRouterError,
    PortMapping,
    Router,
    RouterRefusedError,
    is_behind_router,
    is_public_ipv4,
)

ME = identity(1).node_id
HOME = "192.168.1.5"


@dataclass
class MemoryRouter:
    """A router that works, unless told otherwise; `calls` says what it was asked for."""

    local_host: str = HOME
    outside: str = "1.2.3.4"
    taken: set[int] = field(default_factory=set[int])
    is_broken: bool = False
    opened: dict[int, int] = field(default_factory=dict[int, int])
    calls: SimpleQueue[str] = field(default_factory=SimpleQueue[str])

    def external_host(self) -> str:
        return self.outside

    def is_taken(self, port: int) -> bool:
        return port in self.taken

    def open(self, external_port: int, internal_port: int, lease_seconds: int) -> None:
        self.calls.put(f"open for {lease_seconds}")
        if self.is_broken:
            raise RouterRefusedError("The router is broken.")
        self.opened[external_port] = internal_port

    def close(self, external_port: int) -> None:
        self.calls.put("close")
        del self.opened[external_port]

    def find(self) -> Router:
        self.calls.put("find")
        return self


async def next_call(router: MemoryRouter) -> str:
    return await to_thread.run_sync(lambda: router.calls.get(timeout=10))


async def until(holds: Callable[[], bool]) -> None:
    """Wait for other threads, in real time."""
    for _ in range(1000):
        if holds():
            return
        await to_thread.run_sync(time.sleep, 0.01)
    raise TimeoutError


def address(port: int, host: str = "1.2.3.4") -> str:
    return f"/ip4/{host}/tcp/{port}/p2p/{ME}"


def live(
    router: MemoryRouter,
    scenario: Callable[[PortMapping, Callable[[float], None], Callable[..., None]], Awaitable[None]],
    find: Callable[[], Router] | None = None,
) -> None:
    """Run a mapping beside a scenario that gets it, a clock to push on, and a way to move the node elsewhere."""
    mapping = PortMapping(ME, find or router.find, Random(1))
    network = network_at(ME, f"/ip4/{HOME}/tcp/4001/p2p/{ME}")
    clock = MockClock(rate=1.0)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mapping.live, network)
            await scenario(mapping, clock.jump, lambda *addresses: move(network, *addresses))
            tasks.cancel_scope.cancel()

    trio.run(main, clock=clock)
    assert mapping.external_address() is None
    assert router.opened == {}


def test_the_same_number_is_had_renewed_and_given_back() -> None:
    router = MemoryRouter()

    async def scenario(mapping: PortMapping, pass_seconds: Callable[[float], None], _: object) -> None:
        assert [await next_call(router) for _ in range(2)] == ["find", f"open for {LEASE_SECONDS}"]
        await until(lambda: mapping.external_address() == address(4001))
        assert router.opened == {4001: 4001}
        router.outside = "5.6.7.8"  # the line was given a new address
        await trio.testing.wait_all_tasks_blocked()
        pass_seconds(RENEW_SECONDS)
        assert await next_call(router) == f"open for {LEASE_SECONDS}"
        await until(lambda: mapping.external_address() == address(4001, "5.6.7.8"))

    live(router, scenario)
    assert router.calls.get(timeout=1) == "close"
    with pytest.raises(Empty):
        router.calls.get_nowait()


def test_a_lease_is_renewed_long_before_it_ends() -> None:
    assert 2 * (RENEW_SECONDS + LOOK_SECONDS) < LEASE_SECONDS


def test_another_number_is_taken_when_its_own_belongs_to_another_computer() -> None:
    router = MemoryRouter(taken={4001})

    async def scenario(mapping: PortMapping, *_: object) -> None:
        await until(lambda: mapping.external_address() is not None)
        ((outer, inner),) = router.opened.items()
        assert inner == 4001
        assert outer != 4001
        assert mapping.external_address() == address(outer)

    live(router, scenario)


@pytest.mark.parametrize(
    "outside", ["100.64.1.2", "192.168.0.1", "0.0.0.0", "", "nonsense", "2001:db8::1", "1.2.3.4/x"]
)
def test_no_port_is_opened_where_the_router_has_no_public_address(
    outside: str, caplog: pytest.LogCaptureFixture
) -> None:
    router = MemoryRouter(outside=outside)

    async def scenario(mapping: PortMapping, pass_seconds: Callable[[float], None], _: object) -> None:
        for _ in range(3):
            assert await next_call(router) == "find"
            await until(lambda: len(caplog.records) > 0)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert mapping.external_address() is None
            pass_seconds(RETRY_SECONDS)

    with caplog.at_level("INFO", "neuroshard"):
        live(router, scenario)
    assert len(caplog.records) == 1  # told once


def test_without_a_router_it_is_looked_for_rarely_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    router = MemoryRouter()

    def find() -> Router:
        router.calls.put("find")
        raise NoRouterError("No router.")

    async def scenario(_: object, pass_seconds: Callable[[float], None], __: object) -> None:
        assert await next_call(router) == "find"
        await until(lambda: len(caplog.records) > 0)
        await trio.testing.wait_all_tasks_blocked(0.05)
        pass_seconds(RETRY_SECONDS / 2)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert router.calls.empty()
        pass_seconds(RETRY_SECONDS / 2)
        assert await next_call(router) == "find"

    with caplog.at_level("INFO", "neuroshard"):
        live(router, scenario, find)
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_router_that_refuses_to_renew_is_not_told_of_any_more() -> None:
    router = MemoryRouter()

    async def scenario(mapping: PortMapping, pass_seconds: Callable[[float], None], _: object) -> None:
        await until(lambda: mapping.external_address() == address(4001))
        router.is_broken = True
        await trio.testing.wait_all_tasks_blocked(0.05)
        pass_seconds(RENEW_SECONDS)
        await until(lambda: mapping.external_address() is None)
        router.is_broken = False
        await until(lambda: not router.opened)
        await trio.testing.wait_all_tasks_blocked(0.05)
        pass_seconds(RETRY_SECONDS)
        await until(lambda: mapping.external_address() == address(4001))

    live(router, scenario)


def test_a_computer_that_went_elsewhere_gives_its_port_back_and_asks_there() -> None:
    here, there = MemoryRouter(), MemoryRouter(local_host="192.168.7.9", outside="5.6.7.8")
    routers = iter((here, there))

    async def scenario(mapping: PortMapping, pass_seconds: Callable[[float], None], go: Callable[..., None]) -> None:
        await until(lambda: mapping.external_address() == address(4001))
        go(f"/ip4/192.168.7.9/tcp/4002/p2p/{ME}")
        await trio.testing.wait_all_tasks_blocked(0.05)
        pass_seconds(LOOK_SECONDS)
        await until(lambda: mapping.external_address() == address(4002, "5.6.7.8"))
        assert here.opened == {}

    live(here, scenario, lambda: next(routers))
    assert there.opened == {}


def test_a_router_that_hangs_is_given_up_and_does_not_hold_the_end() -> None:
    router = MemoryRouter()
    hanging = SimpleQueue[None]()

    def find() -> Router:
        router.calls.put("find")
        hanging.get()
        return router

    async def scenario(*_: object) -> None:
        assert await next_call(router) == "find"

    started = time.monotonic()
    live(router, scenario, find)
    assert time.monotonic() - started < CLOSE_SECONDS + 3
    hanging.put(None)


def test_who_ends_waits_for_a_router_that_answers_soon() -> None:
    router = MemoryRouter()
    found: list[float] = []

    def find() -> Router:
        router.calls.put("find")
        time.sleep(0.5)
        found.append(time.monotonic())
        return router

    async def scenario(*_: object) -> None:
        assert await next_call(router) == "find"

    live(router, scenario, find)
    assert len(found) == 1
    assert time.monotonic() - found[0] < 1


@pytest.mark.parametrize(
    ("addresses", "is_behind"),
    [
        ((f"/ip4/{HOME}/tcp/4001/p2p/{ME}",), True),
        ((f"/ip4/{HOME}/tcp/4001/p2p/{ME}", f"/ip6/2001:db8::1/tcp/4001/p2p/{ME}"), True),
        ((f"/ip4/{HOME}/tcp/4001/p2p/{ME}", f"/ip4/1.2.3.4/tcp/4001/p2p/{ME}"), False),
        ((f"/ip4/127.0.0.1/tcp/4001/p2p/{ME}",), False),
        ((f"/ip6/fd00::1/tcp/4001/p2p/{ME}",), False),
        ((f"/ip4/{HOME}/tcp/4001/p2p/{identity(2).node_id}/p2p-circuit/p2p/{ME}",), False),
        ((), False),
    ],
)
def test_only_a_node_with_local_addresses_asks(addresses: tuple[str, ...], is_behind: bool) -> None:
    assert is_behind_router(addresses) == is_behind


def test_public_addresses_are_told_from_others() -> None:
    assert is_public_ipv4("1.2.3.4")
    others = ("10.0.0.1", "100.64.0.1", "127.0.0.1", "169.254.1.1", "224.0.0.1", "255.255.255.255", "240.0.0.1", "x")
    assert not any(map(is_public_ipv4, others))
