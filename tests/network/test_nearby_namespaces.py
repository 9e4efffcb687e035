"""Real multicast between two computers that have no way out."""

from __future__ import annotations

import json
import time
from typing import Any

from neuroshard.network.mdns import NEW_ADDRESSES, NEW_ADDRESSES_A_SECOND
from tests.worlds.claims import identity_of
from tests.worlds.lan import FAR, LAN_PROGRAMS, NEAR, Computer, Program, local_network

CLEAN = {"threads": [], "sockets": 0}


def said(program: Program, key: str) -> Any:
    """What the next line with this key says."""
    while True:
        line = json.loads(program.line())
        if key in line:
            return line[key]


def address(number: int, host: str) -> str:
    return f"/ip4/{host}/tcp/{4000 + number}/p2p/{identity_of(number).node_id}"


def packets_when_quiet(computer: Computer) -> int:
    """What was sent until nothing was for three seconds. Raises TimeoutError after a minute."""
    sent, since = computer.packets_sent(), time.monotonic()
    deadline = since + 60
    while time.monotonic() - since < 3:
        time.sleep(0.1)
        if (now := computer.packets_sent()) != sent:
            sent, since = now, time.monotonic()
        if since > deadline:
            raise TimeoutError("it never becomes quiet")
    return sent


def test_computers_on_one_network_find_each_other_whoever_comes_first() -> None:
    with local_network() as (near, far), near.start(LAN_PROGRAMS, "nearby", 1, NEAR) as first:
        assert said(first, "started")
        quiet = packets_when_quiet(near)  # the first one's introduction is over and nobody heard it
        with far.start(LAN_PROGRAMS, "nearby", 2, FAR) as second:
            assert said(second, "started")
            started = time.monotonic()
            assert said(second, "found") == address(1, NEAR)
            assert said(first, "found") == address(2, FAR)
            assert time.monotonic() - started < 30
            assert near.packets_sent() - quiet <= 12
            assert json.loads(second.end()[-1]) == CLEAN
        assert json.loads(first.end()[-1]) == CLEAN


def test_two_nodes_on_one_computer_find_each_other() -> None:
    with (
        local_network() as (near, _),
        near.start(LAN_PROGRAMS, "nearby", 1, NEAR) as first,
        near.start(LAN_PROGRAMS, "nearby", 2, NEAR) as second,
    ):
        assert said(first, "found") == address(2, NEAR)
        assert said(second, "found") == address(1, NEAR)


def test_a_node_is_quiet_between_its_introduction_and_its_good_bye() -> None:
    with local_network() as (near, _), near.start(LAN_PROGRAMS, "nearby", 1, NEAR) as node:
        assert said(node, "started")
        introduced = packets_when_quiet(near)
        assert 3 <= introduced <= 10
        time.sleep(8.0)
        assert near.packets_sent() == introduced
        node.end()
        assert introduced < near.packets_sent() <= introduced + 4  # good-bye, and leaving the multicast group


def test_whole_nodes_meet_with_no_other_configuration() -> None:
    with (
        local_network() as (near, far),
        near.start(LAN_PROGRAMS, "node", 1, "0.0.0.0") as first,
        far.start(LAN_PROGRAMS, "node", 2, "0.0.0.0") as second,
    ):
        assert said(first, "addresses")[0].startswith(f"/ip4/{NEAR}/")
        assert said(second, "addresses")[0].startswith(f"/ip4/{FAR}/")
        assert said(first, "met") == [identity_of(2).node_id]
        assert said(second, "met") == [identity_of(1).node_id]


def test_a_node_on_loopback_sends_nothing_to_others() -> None:
    with local_network() as (near, _), near.start(LAN_PROGRAMS, "node", 1, "127.0.0.1") as node:
        before = near.packets_sent()
        assert said(node, "addresses")[0].startswith("/ip4/127.0.0.1/")
        time.sleep(5.0)
        sockets = near.run("cat", "/proc/net/udp").splitlines()[1:]
        assert sockets == []
        node.end()
        assert near.packets_sent() == before


def test_a_flood_of_hostile_records_is_bounded_and_a_real_node_is_found_after_it() -> None:
    with local_network() as (near, far), near.start(LAN_PROGRAMS, "nearby", 1, NEAR) as node:
        assert said(node, "started")
        with far.start(LAN_PROGRAMS, "flood", 3, FAR) as enemy:
            started = time.monotonic()
            assert said(enemy, "flooded")
        with far.start(LAN_PROGRAMS, "nearby", 2, FAR) as friend:
            found = [said(node, "found")]
            while found[-1] != address(2, FAR):
                found.append(said(node, "found"))
            assert said(friend, "found") == address(1, NEAR)
            assert len(found) <= NEW_ADDRESSES + (time.monotonic() - started) * NEW_ADDRESSES_A_SECOND + 1
            assert len(found) > 10  # the flood was there
            assert all(text.startswith("/ip4/10.77.0.") for text in found)
        assert json.loads(node.end()[-1]) == CLEAN
