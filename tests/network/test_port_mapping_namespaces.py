"""A node asks a router over real UPnP and NAT-PMP, on a network without a way out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest

from neuroshard.network.nat.upnp import CLOSE_SECONDS
from tests.worlds.claims import identity_of
from tests.worlds.lan import FAR, LAN_PROGRAMS, NEAR, Computer, Program, local_network

OUTSIDE = "1.2.3.4"  # only ever text here


@contextmanager
def behind_router(outside: str, speaks: str) -> Iterator[tuple[Computer, Program]]:
    """A computer whose way out is a router that leads nowhere."""
    with local_network() as (near, far), far.start(LAN_PROGRAMS, "router", FAR, outside, speaks) as router:
        near.run("ip", "route", "add", "default", "via", FAR)
        assert action(router)["action"] == "started"
        yield near, router


def action(router: Program, name: str = "") -> dict[str, Any]:
    """The next action of this name that the router is asked for."""
    while True:
        asked: dict[str, Any] = json.loads(router.line())
        if name in {"", asked["action"]}:
            return asked


@pytest.mark.parametrize(("leases", "seconds"), [("leases", "3600"), ("permanent", "0")])
def test_a_port_of_the_router_is_had_and_given_back(leases: str, seconds: str) -> None:
    with behind_router(OUTSIDE, leases) as (near, router), near.start(LAN_PROGRAMS, "mapping", 1, NEAR) as node:
        assert json.loads(node.line()) == {"started": True}
        assert json.loads(node.line()) == {"outside": [[OUTSIDE, 4001], [OUTSIDE, 5001]]}
        for port in ("4001", "5001"):
            added = action(router, "AddPortMapping")
            while added["NewLeaseDuration"] != seconds:
                added = action(router, "AddPortMapping")
            assert (added["NewInternalClient"], added["NewInternalPort"]) == (NEAR, port)
            assert (added["NewExternalPort"], added["NewProtocol"]) == (port, "TCP")
        assert json.loads(node.end()[-1]) == {"threads": [], "sockets": 0}
        assert [action(router, "DeletePortMapping")["NewExternalPort"] for _ in range(2)] == ["4001", "5001"]


def test_a_router_that_speaks_nat_pmp_is_asked_nothing_else() -> None:
    with behind_router(OUTSIDE, "both") as (near, router), near.start(LAN_PROGRAMS, "mapping", 1, NEAR) as node:
        assert json.loads(node.line()) == {"started": True}
        assert json.loads(node.line()) == {"outside": [[OUTSIDE, 4001], [OUTSIDE, 5001]]}
        assert json.loads(node.end()[-1]) == {"threads": [], "sockets": 0}
        asked = [json.loads(line) for line in router.end()]
        assert {each["action"].split()[0] for each in asked} == {"nat-pmp"}
        ports = [each["values"][0] for each in asked if each["action"] == "nat-pmp open"]
        assert ports == [each["values"][0] for each in asked if each["action"] == "nat-pmp close"] == [4001, 5001]


def test_a_whole_node_tells_the_address_outside() -> None:
    with behind_router(OUTSIDE, "leases") as (near, router), near.start(LAN_PROGRAMS, "node", 1, "0.0.0.0") as node:
        port = action(router, "AddPortMapping")["NewExternalPort"]
        assert told(node, "outside")["outside"] == f"/ip4/{OUTSIDE}/tcp/{port}/p2p/{identity_of(1).node_id}"
        node.end()
        assert action(router, "DeletePortMapping")["NewExternalPort"] == port


@pytest.mark.parametrize("speaks", ["leases", "nat-pmp"])
def test_a_whole_node_behind_two_routers_says_so_in_its_status(speaks: str) -> None:
    with behind_router("100.64.3.4", speaks) as (near, _), near.start(LAN_PROGRAMS, "node", 1, "0.0.0.0") as node:
        said = told(node, "explanation")
        assert "behind another one (its address is 100.64.3.4)" in str(said["explanation"])
        assert [str(address).split("/")[2] for address in said["addresses"]] == [NEAR]
        node.end()


@pytest.mark.parametrize(("host", "setting"), [("127.0.0.1", "log_json=false"), ("0.0.0.0", "port_mapping=false")])
def test_a_node_that_shall_not_asks_nobody(host: str, setting: str) -> None:
    quiet = "lan_discovery=false"
    with (
        behind_router(OUTSIDE, "both") as (near, router),
        near.start(LAN_PROGRAMS, "node", 1, host, setting, quiet) as node,
    ):
        told(node, "addresses")
        time.sleep(1)  # NAT-PMP is asked within milliseconds, UPnP at the same moment where that answers
        node.end()
        assert router.end() == []


def test_a_seed_tells_its_address_outside_and_gives_it_back(tmp_path: Path) -> None:
    with behind_router(OUTSIDE, "nat-pmp") as (near, router):
        arguments = ("seed", "--p2p-port", 4001, "--data-dir", tmp_path)
        with near.start(LAN_PROGRAMS, *arguments) as seed:
            while f"/ip4/{OUTSIDE}/tcp/4001/" not in seed.line():
                pass
            seed.process.send_signal(SIGTERM)
            assert seed.process.wait(20) == 0
        assert [action(router, "nat-pmp close")["values"][0] for _ in range(1)] == [4001]


def test_a_seed_is_found_on_the_local_network_and_may_ask_no_router(tmp_path: Path) -> None:
    with behind_router(OUTSIDE, "nat-pmp") as (near, router):
        arguments = ("seed", "--p2p-port", 4001, "--no-port-mapping", "--data-dir", tmp_path)
        with near.start(LAN_PROGRAMS, *arguments) as seed:
            place = seed.line()
            with near.start(LAN_PROGRAMS, "nearby", 2, NEAR) as other:
                assert told(other, "found")["found"] == place
                other.end()
            seed.process.send_signal(SIGTERM)
            assert seed.process.wait(20) == 0
        assert router.end() == []


def told(program: Program, what: str) -> dict[str, Any]:
    """The next line of a program that says this."""
    while True:
        said: dict[str, Any] = json.loads(program.line())
        if what in said:
            return said


def test_a_router_behind_another_one_is_asked_for_nothing() -> None:
    with behind_router("100.64.3.4", "leases") as (near, router), near.start(LAN_PROGRAMS, "mapping", 1, NEAR) as node:
        assert action(router, "GetExternalIPAddress")
        assert json.loads(node.line()) == {"started": True}
        node.end()
        rest = [json.loads(line)["action"] for line in router.end()]
        assert "AddPortMapping" not in rest
        assert "DeletePortMapping" not in rest


def test_a_search_that_finds_no_router_ends_with_the_node() -> None:
    with local_network() as (near, _):
        near.run("ip", "route", "add", "default", "via", FAR)  # where nobody answers
        with near.start(LAN_PROGRAMS, "mapping", 1, NEAR) as node:
            assert json.loads(node.line()) == {"started": True}
            deadline = time.monotonic() + 10
            while near.packets_sent() == 0 and time.monotonic() < deadline:  # until it asks
                time.sleep(0.02)
            ended = time.monotonic()
            assert json.loads(node.end()[-1]) == {"threads": [], "sockets": 0}
            assert time.monotonic() - ended < CLOSE_SECONDS + 3
        assert near.packets_sent() > 0
