"""Which ports are told as reached from outside, and which addresses can be outside at all."""

from __future__ import annotations

import pytest

from neuroshard.network.nat.external_addresses import ExternalAddresses, is_behind_router, is_inner_ipv4, is_public_ipv4

PRIVATE = ("10.0.0.1", "172.16.5.5", "192.168.1.1", "192.0.0.2")  # the last: behind a provider's IPv6 line
CARRIER = ("100.64.0.1", "100.127.255.254")
NOWHERE = ("0.0.0.0", "127.0.0.1", "169.254.1.1", "224.0.0.1", "255.255.255.255", "240.0.0.1", "x", "", "::1")


def test_public_inner_and_useless_addresses_are_told_apart() -> None:
    assert is_public_ipv4("1.2.3.4")
    assert not is_inner_ipv4("1.2.3.4")
    assert is_public_ipv4("100.128.0.1")
    assert all(map(is_inner_ipv4, PRIVATE + CARRIER))
    assert not any(map(is_public_ipv4, PRIVATE + CARRIER + NOWHERE))
    assert not any(map(is_inner_ipv4, NOWHERE))


@pytest.mark.parametrize(
    ("hosts", "is_behind"),
    [
        (("192.168.1.5",), True),
        (("192.168.1.5", "2001:db8::1"), True),
        (("192.168.1.5", "1.2.3.4"), False),
        (("127.0.0.1",), False),
        (("fd00::1",), False),
        ((), False),
    ],
)
def test_only_a_node_with_local_addresses_asks(hosts: tuple[str, ...], is_behind: bool) -> None:
    assert is_behind_router(hosts) == is_behind


def test_ports_are_known_as_long_as_the_network_listens() -> None:
    ports = ExternalAddresses()
    ports.update({4001: ("1.2.3.4", 5000)})
    assert ports.of(4001) is None  # nobody listens there
    with ports.listening(lambda: ("192.168.1.5",), (4001, 4002)):
        assert (ports.hosts(), ports.ports()) == (("192.168.1.5",), (4001, 4002))
        ports.update({4001: ("1.2.3.4", 5000), 9: ("1.2.3.4", 9)})
        assert ports.of(4001) == ("1.2.3.4", 5000)
        assert ports.of(9) is None
        ports.update({4002: ("1.2.3.4", 5001)})
        assert ports.of(4001) is None
    assert (ports.hosts(), ports.ports(), ports.of(4002)) == ((), (), None)
