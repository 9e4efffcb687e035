"""Finding the router that a computer's way to the internet begins with."""

from __future__ import annotations

from ipaddress import IPv4Interface
from pathlib import Path

import pytest

from neuroshard.network.nat import router as gateway
from neuroshard.network.nat.router import default_gateway, first_host_of_network, gateway_in

TITLE = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"


def route(target: str, gateway_: str, flags: str, metric: int, mask: str) -> str:
    return f"eth0\t{target}\t{gateway_}\t{flags}\t0\t0\t{metric}\t{mask}\t0\t0\t0   \n"


DEFAULT = route("00000000", "0101A8C0", "0003", 100, "00000000")
BETTER = route("00000000", "FE01A8C0", "0003", 50, "00000000")
LOCAL = route("0001A8C0", "00000000", "0001", 0, "00FFFFFF")
DOWN = route("00000000", "0901A8C0", "0002", 0, "00000000")
TUNNEL = route("00000000", "00000000", "0001", 0, "00000000")
HALF = route("00000000", "0901A8C0", "0003", 0, "00000080")


@pytest.mark.parametrize(
    ("routes", "found"),
    [
        (DEFAULT + LOCAL, "192.168.1.1"),
        (LOCAL + DEFAULT + BETTER, "192.168.1.254"),
        (LOCAL, None),
        (DOWN + TUNNEL + HALF, None),
        ("", None),
        ("eth0 00000000\nnonsense\n" + route("00000000", "xyz", "0003", 0, "00000000") + DEFAULT, "192.168.1.1"),
    ],
)
def test_the_best_default_route_names_the_router(routes: str, found: str | None) -> None:
    assert gateway_in(TITLE + routes, "little") == found


def test_a_big_endian_computer_writes_addresses_the_other_way() -> None:
    assert gateway_in(TITLE + route("00000000", "C0A80101", "0003", 0, "00000000"), "big") == "192.168.1.1"


@pytest.mark.parametrize(
    ("host", "found"),
    [("192.168.1.5", "192.168.1.1"), ("10.20.30.40", "10.20.0.1"), ("172.16.0.1", None), ("10.9.9.9", None)],
)
def test_elsewhere_the_first_address_of_the_network_is_taken_for_the_router(host: str, found: str | None) -> None:
    networks = ("127.0.0.1/8", "192.168.1.5/24", "10.20.30.40/16", "172.16.0.1/12", "10.9.9.9/32")
    assert first_host_of_network(host, map(IPv4Interface, networks)) == found


def test_a_system_without_the_file_is_asked_for_its_addresses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gateway, "ROUTES", tmp_path / "missing")
    monkeypatch.setattr(gateway, "outbound_host", lambda: "192.168.7.9")
    monkeypatch.setattr(gateway, "_interfaces", lambda: [IPv4Interface("192.168.7.9/24")])
    assert default_gateway() == "192.168.7.1"
    monkeypatch.setattr(gateway, "outbound_host", lambda: None)
    assert default_gateway() is None
