"""A node asks a router over real UPnP, on a network without a way out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from made_identity import identity
from namespaces import FAR, NEAR, Computer, Program, local_network

from neuroshard.network.port_mapping import CLOSE_SECONDS

NODE = Path(__file__).with_name("nearby_program.py")
ROUTER = Path(__file__).with_name("router_program.py")
OUTSIDE = "1.2.3.4"  # only ever text here


@contextmanager
def behind_router(outside: str, leases: str) -> Iterator[tuple[Computer, Program]]:
    """A computer whose way out is a router that leads nowhere."""
    with local_network() as (near, far), far.start(ROUTER, FAR, outside, leases) as router:
        near.run("ip", "route", "add", "default", "via", FAR)
        assert action(router)["action"] == "started"
        yield near, router


def action(router: Program, name: str = "") -> dict[str, str]:
    """The next action of this name that the router is asked for."""
    while True:
        asked: dict[str, str] = json.loads(router.line())
        if name in {"", asked["action"]}:
            return asked


@pytest.mark.parametrize(("leases", "seconds"), [("leases", "3600"), ("permanent", "0")])
def test_a_port_of_the_router_is_had_and_given_back(leases: str, seconds: str) -> None:
    with behind_router(OUTSIDE, leases) as (near, router), near.start(NODE, "mapping", 1, NEAR) as node:
        assert json.loads(node.line()) == {"started": True}
        assert json.loads(node.line()) == {"address": f"/ip4/{OUTSIDE}/tcp/4001/p2p/{identity(1).node_id}"}
        added = action(router, "AddPortMapping")
        while added["NewLeaseDuration"] != seconds:
            added = action(router, "AddPortMapping")
        assert (added["NewInternalClient"], added["NewInternalPort"]) == (NEAR, "4001")
        assert (added["NewExternalPort"], added["NewProtocol"]) == ("4001", "TCP")
        assert json.loads(node.end()[-1]) == {"threads": [], "sockets": 0}
        assert action(router, "DeletePortMapping")["NewExternalPort"] == "4001"


def test_a_whole_node_tells_the_address_outside() -> None:
    with behind_router(OUTSIDE, "leases") as (near, router), near.start(NODE, "node", 1, "0.0.0.0") as node:
        port = action(router, "AddPortMapping")["NewExternalPort"]
        told = json.loads(node.line())
        while "outside" not in told:
            told = json.loads(node.line())
        assert told["outside"] == f"/ip4/{OUTSIDE}/tcp/{port}/p2p/{identity(1).node_id}"
        node.end()
        assert action(router, "DeletePortMapping")["NewExternalPort"] == port


def test_a_router_behind_another_one_is_asked_for_nothing() -> None:
    with behind_router("100.64.3.4", "leases") as (near, router), near.start(NODE, "mapping", 1, NEAR) as node:
        assert action(router, "GetExternalIPAddress")
        assert json.loads(node.line()) == {"started": True}
        node.end()
        rest = [json.loads(line)["action"] for line in router.end()]
        assert "AddPortMapping" not in rest
        assert "DeletePortMapping" not in rest


def test_a_search_that_finds_no_router_ends_with_the_node() -> None:
    with local_network() as (near, _):
        near.run("ip", "route", "add", "default", "via", FAR)  # where nobody answers
        with near.start(NODE, "mapping", 1, NEAR) as node:
            assert json.loads(node.line()) == {"started": True}
            deadline = time.monotonic() + 10
            while near.packets_sent() == 0 and time.monotonic() < deadline:  # until it asks
                time.sleep(0.02)
            ended = time.monotonic()
            assert json.loads(node.end()[-1]) == {"threads": [], "sockets": 0}
            assert time.monotonic() - ended < CLOSE_SECONDS + 3
        assert near.packets_sent() > 0
