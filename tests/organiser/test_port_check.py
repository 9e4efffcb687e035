"""The check from outside: only the sender's public address, only a node that shows its key, and seldom."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

import anyio
import pytest
import trio
from anyio.abc import SocketStream
from fastapi.testclient import TestClient

from neuroshard.organiser.application import OrganiserContext, create_organiser_app
from neuroshard.organiser.desk import RunPlan
from neuroshard.organiser.port_check import (
    AGAIN_SECONDS,
    CHECK_SECONDS,
    MOST_AT_ONCE,
    PortChecks,
    may_be_checked,
    port_target,
    shows_node,
)
from neuroshard.types import NodeId
from tests.organiser.desks import OFFER, Desk, node
from tests.worlds.clock import run_virtually
from tests.worlds.network_nodes import nodes, port_of, run

SENDER = "198.51.100.7"
ADDRESS = f"/ip4/192.168.1.5/tcp/4001/p2p/{node(1)}"


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.1",
        "172.16.5.5",
        "192.168.1.1",
        "100.100.100.200",
        "169.254.169.254",
        "127.0.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "fe80::1",
        "fd00:ec2::254",
        "localhost",
        "",
    ],
)
def test_no_private_link_local_or_metadata_address_is_called(host: str) -> None:
    assert not may_be_checked(host, is_local=False)
    assert may_be_checked(host, is_local=True) is (host in {"127.0.0.1", "::1"})


def test_the_ports_are_those_that_the_node_announces_for_itself() -> None:
    announced = [
        f"/ip4/192.168.1.5/tcp/4001/p2p/{node(1)}",
        f"/ip4/203.0.113.5/tcp/4001/p2p/{node(1)}",
        f"/ip4/203.0.113.5/tcp/22/p2p/{node(2)}",
        f"/ip4/203.0.113.5/tcp/25/p2p/{node(2)}/p2p-circuit/p2p/{node(1)}",
        f"/ip6/2001:db8::1/tcp/6001/p2p/{node(1)}",
        "/dns4/example.org/tcp/80/p2p/" + node(1),
        "nonsense",
        f"/ip4/203.0.113.5/tcp/4002/p2p/{node(1)}",
        f"/ip4/203.0.113.5/tcp/4003/p2p/{node(1)}",
    ]
    found = port_target(node(1), SENDER, announced)
    assert found is not None
    assert (found.host, found.ports) == (SENDER, (4001, 4002))
    six = port_target(node(1), "2001:db8::9", announced)
    assert six is not None
    assert six.ports == (6001,)
    assert port_target(node(3), SENDER, announced) is None


def test_each_address_is_checked_once_a_minute_and_few_at_once() -> None:
    async def scenario() -> None:
        probed = list[tuple[str, int]]()

        async def slow(host: str, port: int, _: NodeId) -> bool:
            probed.append((host, port))
            await anyio.sleep(1)
            return port == 4001

        checks = PortChecks(anyio.current_time, probe=slow)
        assert await checks.reached(node(1), SENDER, [ADDRESS]) == f"/ip4/{SENDER}/tcp/4001/p2p/{node(1)}"
        assert await checks.reached(node(1), SENDER, [ADDRESS]) is None
        assert await checks.reached(node(1), None, [ADDRESS]) is None
        assert await checks.reached(node(1), "10.0.0.1", [ADDRESS]) is None
        assert probed == [(SENDER, 4001)]
        await anyio.sleep(AGAIN_SECONDS)
        assert await checks.reached(node(1), SENDER, [ADDRESS.replace("4001", "9")]) == ""
        found = dict[int, str | None]()
        async with anyio.create_task_group() as tasks:

            async def check(number: int) -> None:
                found[number] = await checks.reached(node(1), f"198.51.{number}.1", [ADDRESS])

            for number in range(MOST_AT_ONCE + 3):
                tasks.start_soon(check, number)
        assert sum(each is None for each in found.values()) == 3

    run_virtually(scenario)


def test_a_silent_program_costs_five_seconds() -> None:
    async def scenario() -> None:
        async def silent(*_: object) -> bool:
            await anyio.sleep_forever()
            return True

        checks = PortChecks(anyio.current_time, probe=silent)
        began = anyio.current_time()
        assert await checks.reached(node(1), SENDER, [ADDRESS]) == ""
        assert anyio.current_time() - began == pytest.approx(CHECK_SECONDS)

    run_virtually(scenario)


def test_a_real_node_shows_its_key_and_no_other() -> None:
    async def scenario() -> None:
        async with nodes(1) as (there,):
            me, port = there.transport.local_id, port_of(there)
            assert await shows_node("127.0.0.1", port, me)
            assert not await shows_node("127.0.0.1", port, node(77))
            local = PortChecks(anyio.current_time, is_local=True)
            address = f"/ip4/192.168.1.5/tcp/{port}/p2p/{me}"
            assert await local.reached(me, "127.0.0.1", [address]) == f"/ip4/127.0.0.1/tcp/{port}/p2p/{me}"
        assert not await shows_node("127.0.0.1", port, me)  # it is gone

    run(scenario)


@pytest.mark.parametrize("seed", range(22))
def test_a_program_that_is_no_node_shows_nothing(seed: int) -> None:
    """Whatever it answers, the check ends without an error."""
    chance = Random(seed)
    lines = b"\x13/multistream/1.0.0\n\x07/noise\n"
    size = (0, 1, 31, 32, 48, 96, 200)[seed % 7]
    garbage = bytes(size) if seed >= 14 else chance.randbytes(size)  # zeros are no point of the curve
    answer = (lines if seed < 21 else b"HTTP/1.1 400 Bad Request\r\n") + len(garbage).to_bytes(2) + garbage

    async def scenario() -> None:
        async def respond(stream: SocketStream) -> None:
            async with stream:
                await stream.send(answer)
                await stream.receive()

        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, respond)
            assert not await shows_node("127.0.0.1", port, node(1))
            tasks.cancel_scope.cancel()

    trio.run(scenario)


Probe = Callable[[str, int, NodeId], Awaitable[bool]]


class Site:
    """The application of a desk whose checks are recorded."""

    def __init__(self, *, trusts_proxy: bool = False, is_local: bool = False) -> None:
        self.desk, self.probed = Desk(), list[str]()

        async def probe(host: str, _port: int, _node: NodeId) -> bool:
            await anyio.lowlevel.checkpoint()
            self.probed.append(host)
            return host.endswith(".7")

        def monotonic() -> float:
            return self.desk.now

        checks = PortChecks(monotonic, is_local=is_local, probe=probe)
        plan = RunPlan(OFFER, self.desk.places)
        self.app = create_organiser_app(
            OrganiserContext(plan, self.desk.desk, monotonic, monotonic, checks=checks, trusts_proxy=trusts_proxy)
        )

    def join(self, number: int, host: str, *addresses: str, **headers: str) -> bool | None:
        """`reachable` in the answer to a join."""
        client = TestClient(self.app, "http://organiser", client=(host, 4000))
        claim = self.desk.claim(number, addresses=addresses or (f"/ip4/10.0.0.1/tcp/4001/p2p/{node(number)}",))
        answer = client.put("/api/join", content=claim, headers=headers)
        assert answer.status_code == 200, answer.text
        found: bool | None = answer.json()["reachable"]
        return found


def test_the_answer_says_whether_the_sender_was_reached() -> None:
    site = Site()
    assert [site.join(1, SENDER), site.join(2, "198.51.100.8"), site.join(3, "10.1.1.7")] == [True, False, None]
    assert site.probed == [SENDER, "198.51.100.8"]
    assert site.join(1, SENDER) is True  # known, within the minute
    assert len(site.probed) == 2
    site.desk.now += AGAIN_SECONDS
    assert site.join(1, "198.51.100.9") is False


def test_a_refused_claim_causes_no_check() -> None:
    site = Site()
    client = TestClient(site.app, "http://organiser", client=(SENDER, 4000))
    address = f"/ip4/10.0.0.1/tcp/4001/p2p/{node(1)}"
    for claim in (b"nonsense", site.desk.claim(1, at=site.desk.now - 999, addresses=(address,))):
        assert client.put("/api/join", content=claim).status_code >= 400
    assert site.probed == []


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"])
def test_behind_a_proxy_nobody_is_checked_unless_the_operator_trusts_it(header: str) -> None:
    assert Site().join(1, SENDER, **{header: SENDER}) is None
    assert Site(trusts_proxy=True).join(1, SENDER, **{header: SENDER}) is True
    assert Site(trusts_proxy=True).join(1, "127.0.0.1", **{header: SENDER}) is None  # it did not name the sender
    local = Site(is_local=True)
    assert local.join(1, "127.0.0.1", **{header: "127.0.0.1"}) is None


def test_an_organiser_of_one_computer_checks_that_computer() -> None:
    assert Site(is_local=True).join(1, "127.0.0.1") is False
    assert Site().join(1, "127.0.0.1") is None
