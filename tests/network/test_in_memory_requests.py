from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
import pytest
import trio
from trio.testing import MockClock

from neuroshard.errors import UsageError
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec, WireError
from neuroshard.network import (
    InMemoryNetwork,
    Link,
    PeerRefusedError,
    PeerUnreachableError,
    RequestRefusedError,
    RequestTimeoutError,
    Transport,
    TransportClosedError,
)
from neuroshard.network.transport import MAX_REASON_CHARACTERS
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId

A, B = NodeId("a"), NodeId("b")
NUMBERS = TensorPart(TensorSpec("numbers", "uint8", (4,)), b"1234")


def run(scenario: Callable[[InMemoryNetwork, Transport, Transport], Awaitable[None]]) -> None:
    with InMemoryNetwork() as network:
        a, b = network.join(A), network.join(B)
        trio.run(scenario, network, a, b, clock=MockClock(autojump_threshold=0))


async def echo(sender: NodeId, frame: Frame) -> Frame:
    await anyio.lowlevel.checkpoint()
    return Frame("echo", {**frame.header, "from": sender}, frame.tensors)


def test_a_request_is_answered_after_both_ways() -> None:
    async def scenario(network: InMemoryNetwork, a: Transport, b: Transport) -> None:
        b.serve("echo", echo)
        network.set_link(A, B, Link(delay_seconds=2))
        network.set_link(B, A, Link(delay_seconds=3))
        answer = await a.request(B, Frame("echo", {"x": 1}), timeout_seconds=10)
        assert answer.header == {"x": 1, "from": A}
        assert anyio.current_time() == 5

    run(scenario)


def test_what_a_node_sends_shares_its_line() -> None:
    async def scenario(network: InMemoryNetwork, a: Transport, b: Transport) -> None:
        b.serve("echo", echo, FrameLimits(max_body_bytes=4))
        network.set_uplink(A, 2.0)
        arrivals = list[float]()

        async def ask() -> None:
            await a.request(
                B, Frame("echo", tensors=(NUMBERS,)), reply=FrameLimits(max_body_bytes=4), timeout_seconds=9
            )
            arrivals.append(anyio.current_time() - began)

        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
        assert arrivals == pytest.approx([2.0, 4.0, 6.0])  # the answers come over the other one's

    run(scenario)


def test_refusals_carry_their_reason_and_defects_do_not(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(_sender: NodeId, _frame: Frame) -> Frame:
        await anyio.lowlevel.checkpoint()
        raise RequestRefusedError("not today " + "x" * 1000)

    async def fail(_sender: NodeId, _frame: Frame) -> Frame:
        await anyio.lowlevel.checkpoint()
        raise KeyError("a secret")

    async def scenario(_network: InMemoryNetwork, a: Transport, b: Transport) -> None:
        b.serve("refuse", refuse)
        b.serve("fail", fail)
        with pytest.raises(PeerRefusedError, match="not today") as refused:
            await a.request(B, Frame("refuse"), timeout_seconds=1)
        assert len(str(refused.value)) < MAX_REASON_CHARACTERS + 50
        with pytest.raises(PeerRefusedError, match="internal error"):
            await a.request(B, Frame("fail"), timeout_seconds=1)
        with pytest.raises(PeerRefusedError, match="does not answer requests of kind 'unknown'"):
            await a.request(B, Frame("unknown"), timeout_seconds=1)
        with pytest.raises(ValueError, match="already have a handler"):
            b.serve("fail", fail)

    with caplog.at_level(logging.CRITICAL + 1):
        run(scenario)


def test_tensors_pass_only_within_the_limits_of_both_ends() -> None:
    async def scenario(_network: InMemoryNetwork, a: Transport, b: Transport) -> None:
        b.serve("echo", echo, FrameLimits(max_body_bytes=4))
        frame = Frame("echo", {}, (NUMBERS,))
        answer = await a.request(B, frame, reply=FrameLimits(max_body_bytes=4), timeout_seconds=1)
        assert answer.tensors == (NUMBERS,)
        with pytest.raises(WireError):
            await a.request(B, frame, timeout_seconds=1)
        large = TensorPart(TensorSpec("numbers", "uint8", (5,)), b"12345")
        with pytest.raises(PeerRefusedError, match="5 bytes of tensors; 4 are allowed"):
            await a.request(B, Frame("echo", {}, (large,)), timeout_seconds=1)

    run(scenario)


@pytest.mark.parametrize("trouble", ["loss", "loss on the way back", "partition", "slow handler", "delay"])
def test_whatever_keeps_an_answer_away_ends_at_the_deadline(trouble: str) -> None:
    async def answer_late(sender: NodeId, frame: Frame) -> Frame:
        await anyio.sleep(60 if trouble == "slow handler" else 0)
        return await echo(sender, frame)

    async def scenario(network: InMemoryNetwork, a: Transport, b: Transport) -> None:
        b.serve("echo", answer_late)
        match trouble:
            case "loss":
                network.set_link(A, B, Link(loss=1))
            case "loss on the way back":
                network.set_link(B, A, Link(loss=1))
            case "partition":
                network.partition([A], [B])
            case "delay":
                network.set_link(A, B, Link(delay_seconds=60))
            case _:
                pass
        with pytest.raises(RequestTimeoutError, match="within 7 s"):
            await a.request(B, Frame("echo"), timeout_seconds=7)
        assert anyio.current_time() == 7

    run(scenario)


def test_the_dead_are_unreachable_and_the_closed_ask_nothing() -> None:
    async def scenario(network: InMemoryNetwork, a: Transport, b: Transport) -> None:
        network.kill(B)
        with pytest.raises(PeerUnreachableError):
            await a.request(B, Frame("echo"), timeout_seconds=1)
        with pytest.raises(TransportClosedError):
            await b.request(A, Frame("echo"), timeout_seconds=1)

    run(scenario)


def test_addresses_lead_to_nodes() -> None:
    async def scenario(_network: InMemoryNetwork, a: Transport, b: Transport) -> None:
        (address,) = b.addresses()
        assert await a.connect(address) == B
        with pytest.raises(PeerUnreachableError):
            await a.connect("/memory/p2p/nobody")
        with pytest.raises(UsageError):
            await a.connect("/ip4/127.0.0.1/tcp/1/p2p/b")
        (connection,) = a.connections()
        assert (connection.peer, connection.kind) == (B, ConnectionKind.IN_MEMORY)

    run(scenario)


def test_a_refusal_is_told_also_when_tensors_were_expected() -> None:
    async def refuse(_sender: NodeId, _frame: Frame) -> Frame:
        await anyio.lowlevel.checkpoint()
        raise RequestRefusedError("not today")

    async def scenario(_network: InMemoryNetwork, a: Transport, b: Transport) -> None:
        b.serve("numbers", refuse)
        with pytest.raises(PeerRefusedError, match="not today"):
            await a.request(B, Frame("numbers"), reply=FrameLimits.exactly(NUMBERS.spec), timeout_seconds=1)

    run(scenario)
