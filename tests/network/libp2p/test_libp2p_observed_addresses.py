"""Where this node is seen: the newest words count, and old ones are forgotten."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import anyio
import trio
from multiaddr import Multiaddr
from trio.testing import MockClock

from neuroshard.network.libp2p.hole_punching import KEPT_SECONDS, MAX_OBSERVERS, ObservedAddresses
from neuroshard.network.libp2p.muxer import BoundedMuxer


@dataclass
class Observer:
    ip: str
    is_from_listening_port: bool = True
    is_closed: bool = False

    def get_remote_address(self) -> tuple[str, int]:
        return self.ip, 4001


def see(addresses: ObservedAddresses, observer: Observer, text: str) -> None:
    addresses.record(cast("BoundedMuxer", cast("Any", observer)), Multiaddr(text), [Multiaddr("/ip4/10.0.0.2/tcp/9")])


def virtual(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def test_todays_address_comes_first_and_yesterdays_is_forgotten() -> None:
    async def scenario() -> None:
        moves: list[int] = []
        addresses = ObservedAddresses(lambda: moves.append(1))
        before: list[Observer] = []
        for day in range(10):
            for observer in before:
                observer.is_closed = True
            before = [Observer(f"192.0.2.{3 * day + number}") for number in range(3)]
            for observer in before[day % 2 :]:  # three of them on even days
                see(addresses, observer, f"/ip4/198.51.100.{day}/tcp/9")
            assert addresses.likely()[0] == f"/ip4/198.51.100.{day}/tcp/9"
            assert str(addresses.addrs()[0]) == f"/ip4/198.51.100.{day}/tcp/9"
            await anyio.sleep(KEPT_SECONDS / 2)
            assert len(addresses.likely()) <= 2
        assert len(moves) == 9
        await anyio.sleep(10 * KEPT_SECONDS)
        assert addresses.likely() == ["/ip4/198.51.100.9/tcp/9"]  # nobody hung up
        before[1].is_closed = before[2].is_closed = True
        await anyio.sleep(KEPT_SECONDS)
        assert addresses.likely() == []

    virtual(scenario)


def test_many_observers_do_not_keep_a_new_one_from_being_heard() -> None:
    async def scenario() -> None:
        addresses = ObservedAddresses()
        for number in range(2 * MAX_OBSERVERS):
            see(addresses, Observer(f"192.0.2.{number}", is_closed=True), f"/ip4/198.51.100.1/tcp/{number + 1}")
            await anyio.sleep(1)
        see(addresses, Observer("203.0.113.1"), "/ip4/198.51.100.1/tcp/9")
        assert addresses.likely()[0] == "/ip4/198.51.100.1/tcp/9"
        assert len(addresses.likely()) == MAX_OBSERVERS

    virtual(scenario)


def test_the_addresses_of_one_ipv6_network_are_one_observer() -> None:
    async def scenario() -> None:
        addresses = ObservedAddresses()
        for number in range(1, 10):
            see(addresses, Observer(f"2606:4700:1:1::{number}"), "/ip4/198.51.100.1/tcp/9")
        assert addresses.addrs() == []
        see(addresses, Observer("2606:4700:1:2::1"), "/ip4/198.51.100.1/tcp/9")
        assert [str(address) for address in addresses.addrs()] == ["/ip4/198.51.100.1/tcp/9"]

    virtual(scenario)


def test_one_word_of_each_address_counts() -> None:
    async def scenario() -> None:
        addresses = ObservedAddresses()
        for port in range(1, 100):
            see(addresses, Observer("192.0.2.1"), f"/ip4/198.51.100.1/tcp/{port}")
        see(addresses, Observer("192.0.2.2", is_from_listening_port=False), "/ip4/198.51.100.2/tcp/9")
        assert addresses.likely() == ["/ip4/198.51.100.1/tcp/99"]
        assert addresses.addrs() == []
        see(addresses, Observer("192.0.2.1"), "/ip4/10.0.0.2/tcp/9")  # no router in between any more
        assert addresses.likely() == []

    virtual(scenario)
