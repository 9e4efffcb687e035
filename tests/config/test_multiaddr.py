"""Which texts are addresses of nodes, and what people are told about the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.config.multiaddr import checked_multiaddr
from neuroshard.types import MAX_ADDRESS_CHARACTERS

NODE = "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"


@pytest.mark.parametrize(
    "text",
    [
        f"/ip4/192.0.2.1/tcp/1/p2p/{NODE}",
        f"/ip6/2001:db8::1/tcp/65535/p2p/{NODE}",
        f"/dns4/seed-1.example.org/tcp/4001/p2p/{NODE}",
        f"/dns/localhost/tcp/4001/p2p/{NODE}",
        f"/ip4/192.0.2.1/tcp/4001/p2p/{NODE}/p2p-circuit/p2p/{NODE}",
    ],
)
def test_addresses_of_nodes_come_back_as_they_are(text: str) -> None:
    from multiaddr import Multiaddr  # what the network library makes of them

    assert checked_multiaddr(text) == text
    assert str(Multiaddr(text)) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "does not start with /ip4/"),
        ("192.0.2.1:4001", "does not start with /ip4/"),
        (f" /ip4/192.0.2.1/tcp/1/p2p/{NODE}", "does not start with"),
        (f"/ip4/192.0.2.1/udp/1/quic-v1/p2p/{NODE}", "no /tcp/<port>"),
        ("/ip4/192.0.2.1/tcp/4001", "does not end with /p2p/<node id>"),
        (f"/ip4/192.0.2.1/tcp/4001/ws/p2p/{NODE}", "not of the form"),
        (f"/ip4/192.0.2.1/tcp/4001/p2p/{NODE}/", "not of the form"),
        (f"/ip4/192.0.2.1/tcp/4001/p2p/{NODE}\n", "is not a node id"),
        (f"/ip4/192.0.2.256/tcp/4001/p2p/{NODE}", "'192.0.2.256' where ip4 needs an IPv4 address"),
        (f"/ip6/192.0.2.1/tcp/4001/p2p/{NODE}", "where ip6 needs an IPv6 address"),
        (f"/dns4/a b/tcp/4001/p2p/{NODE}", "where dns4 needs a host name"),
        (f"/dns4/{'a.' * 120}a{'b' * 20}/tcp/1/p2p/{NODE}", "more than 256 characters"),
        (f"/ip4/192.0.2.1/tcp/0/p2p/{NODE}", "the port 0"),
        (f"/ip4/192.0.2.1/tcp/65536/p2p/{NODE}", "the port 65536"),
        (f"/ip4/192.0.2.1/tcp/{'9' * 100}/p2p/{NODE}", "the port 9999"),
        (f"/ip4/192.0.2.1/tcp/4001/p2p/{NODE[:-1]}", "is not a node id"),
        (f"/ip4/192.0.2.1/tcp/4001/p2p/{NODE[:-1]}0", "is not a node id"),
        (f"/ip4/192.0.2.1/tcp/4001/p2p/{NODE}/p2p-circuit/p2p/x", "'x', which is not a node id"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        checked_multiaddr(text)


@given(st.text(max_size=300) | st.text("/ip46tcdns2p.0:", max_size=80))
def test_any_text_is_an_address_or_a_short_complaint(text: str) -> None:
    assert len(complaint_about(text)) < 400


def complaint_about(text: str) -> str:
    try:
        return "" if len(checked_multiaddr(text)) <= MAX_ADDRESS_CHARACTERS else "too long" * 100
    except ValueError as error:
        return str(error)
