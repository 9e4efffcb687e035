from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import Random
from typing import Any

import anyio
import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from trio.testing import MockClock

from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec, encode
from neuroshard.network import Network, PeerRefusedError, PeerUnreachableError, Reputation, ScoreReason
from neuroshard.network.libp2p import NetworkParts
from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.negotiation import proposal
from neuroshard.network.libp2p.streams import DATA, PING, SYN, WINDOW_UPDATE, header_bytes
from neuroshard.network.libp2p.transport import FRAME_PROTOCOL
from neuroshard.network.limits import ByteBudget, PeerStanding
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import LOOPBACK, address_of, echo, lives, nodes, run


@asynccontextmanager
async def attacked(clock_opinion: Reputation | None = None) -> AsyncIterator[tuple[Network, Network, Reputation]]:
    """A node that is attacked by a second one, and its opinions."""
    opinion = clock_opinion or Reputation(trio.current_time)
    async with nodes(2, parts=lambda i: NetworkParts(reputation=opinion if i == 0 else None)) as (victim, attacker):
        victim.transport.serve("echo", echo, FrameLimits(max_body_bytes=1000))
        await attacker.transport.connect(address_of(victim))
        yield victim, attacker, opinion


def muxer_to(network: Network, peer: Network) -> BoundedMuxer:
    muxer = network.transport._connections.of(peer.transport.local_id)
    assert isinstance(muxer, BoundedMuxer)
    return muxer


def with_body(size: int) -> bytes:
    frame = Frame("echo", {}, (TensorPart(TensorSpec("x", "uint8", (size,)), bytes(size)),))
    return encode(frame).head


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", ScoreReason.MALFORMED_FRAME),
        (b"NSHF", ScoreReason.MALFORMED_FRAME),
        (bytes(100), ScoreReason.MALFORMED_FRAME),
        (Random(1).randbytes(5000), ScoreReason.MALFORMED_FRAME),
        (encode(Frame("echo", {"a": 1})).head[:-1], ScoreReason.MALFORMED_FRAME),
        (encode(Frame("echo", {"a": 1})).head[:-1] + b"x", ScoreReason.DIGEST_MISMATCH),
        (with_body(100) + bytes(50), ScoreReason.MALFORMED_FRAME),
        (with_body(100) + b"\1" * 100, ScoreReason.DIGEST_MISMATCH),
        (with_body(1001), ScoreReason.OVERSIZED),
        (b"NSHF\1\0\4\0" + (2**30).to_bytes(4, "little") + bytes(8) + b"echo", ScoreReason.OVERSIZED),
        (b"NSHF\1\0\4\0" + (9).to_bytes(4, "little") + (2**60).to_bytes(8, "little") + b"echo", ScoreReason.OVERSIZED),
    ],
)
def test_bytes_that_are_no_request_are_refused_before_they_cost_memory(sent: bytes, reason: ScoreReason) -> None:
    async def scenario() -> None:
        async with attacked() as (victim, attacker, opinion):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            stream = await muxer_to(attacker, victim).open_stream()
            await stream.write(proposal(FRAME_PROTOCOL) + sent, is_last=True)
            with anyio.fail_after(10):
                await stream.wait_ended()
            assert b"refused" in await stream.read()
            assert dict(opinion.refused()) in ({reason.value: 1}, {ScoreReason.MALFORMED_FRAME.value: 1})
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes
            await lives(attacker, victim)

    run(scenario)


@pytest.mark.parametrize("size", [1, 2**20])  # over libp2p, over the pool
def test_what_nobody_waits_for_is_not_kept(size: int) -> None:
    async def scenario() -> None:
        frame = Frame("message", {"kind": "x"}, (TensorPart(TensorSpec("payload", "uint8", (size,)), bytes(size)),))
        budget = ByteBudget(2**30, 2**30)
        async with nodes(2, parts=lambda i: NetworkParts(budget=budget if i == 0 else None)) as (victim, attacker):
            await attacker.transport.connect(address_of(victim))
            with pytest.raises(PeerRefusedError, match="does not answer requests of kind 'message'"):
                await attacker.transport.request(victim.transport.local_id, frame, timeout_seconds=10)
            assert budget.used == 0

    run(scenario)


@pytest.mark.parametrize("said", [b"\x00", b"\xff\xff", b"\x03\xff\xff\n", b"\x05abcde", b"\x04abc\n" * 100])
def test_a_stream_that_agrees_on_no_protocol_ends(said: bytes) -> None:
    async def scenario() -> None:
        async with attacked() as (victim, attacker, _):
            stream = await muxer_to(attacker, victim).open_stream()
            await stream.write(said)
            with anyio.fail_after(10):
                await stream.wait_reset()
            await lives(attacker, victim)

    run(scenario)


def test_one_byte_a_second_is_cut() -> None:
    async def scenario() -> None:
        async with attacked() as (victim, attacker, opinion):
            stream = await muxer_to(attacker, victim).open_stream()
            await stream.write(proposal(FRAME_PROTOCOL))
            began = trio.current_time()
            ended = anyio.Event()

            async def drip() -> None:
                for byte in with_body(1000) + bytes(1000):
                    await trio.sleep(1)
                    await stream.write(bytes((byte,)))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(drip)
                while not ended.is_set():
                    data = await stream.read()
                    if b"arrived too slowly" in data:
                        ended.set()
                tasks.cancel_scope.cancel()
            assert trio.current_time() - began < 30
            assert dict(opinion.refused()) == {ScoreReason.TOO_SLOW.value: 1}
            stream.abandon()
            await lives(attacker, victim)

    run(scenario, clock=MockClock(autojump_threshold=0.1))


@pytest.mark.parametrize(
    ("honest_ip", "most_seconds"), [("127.0.0.1", 60), ("20.1.1.1", 15)], ids=["one host", "other network"]
)
def test_who_holds_memory_that_others_wait_for_must_hurry(honest_ip: str, most_seconds: float) -> None:
    size = 2**23  # may take 9 minutes when nobody waits

    async def scenario() -> None:
        opinion, budget = Reputation(trio.current_time), ByteBudget(size, size)
        part = NetworkParts(reputation=opinion, budget=budget)
        options = replace(LOOPBACK, body_connections=False)
        async with nodes(3, options, parts=lambda i: part if i == 0 else NetworkParts()) as (victim, attacker, honest):
            ips = {attacker.transport.local_id: "127.0.0.1", honest.transport.local_id: honest_ip}
            budget.share_by(lambda peer: PeerStanding(ips[peer]))
            victim.transport.serve("echo", echo, FrameLimits(max_body_bytes=size))
            for other in (attacker, honest):
                await other.transport.connect(address_of(victim))
            stream = await muxer_to(attacker, victim).open_stream()
            await stream.write(proposal(FRAME_PROTOCOL) + with_body(size) + bytes(1000))
            await until(lambda: budget.used == size)
            began = trio.current_time()
            reply = await honest.transport.request(
                victim.transport.local_id,
                Frame("echo", {}, (TensorPart(TensorSpec("x", "uint8", (1000,)), bytes(1000)),)),
                reply=FrameLimits(max_body_bytes=1000),
                timeout_seconds=100,
            )
            assert reply.tensors
            assert trio.current_time() - began < most_seconds
            assert dict(opinion.refused()) == {ScoreReason.TOO_SLOW.value: 1}
            assert opinion.score(attacker.transport.local_id) < 0

    run(scenario, clock=MockClock(autojump_threshold=0.1))


STRANGER = identity_of(50).node_id


class WatchedBudget(ByteBudget):
    """Keeps what it is told to share by."""

    standing_of: Callable[[NodeId], PeerStanding] | None = None

    def share_by(self, standing_of: Callable[[NodeId], PeerStanding]) -> None:
        self.standing_of = standing_of


def test_memory_is_shared_by_the_address_of_a_peer_and_members_of_a_closed_run_are_known() -> None:
    async def scenario() -> None:
        budgets = WatchedBudget(2**30, 2**30), WatchedBudget(2**30, 2**30)
        part = NetworkParts(budget=budgets[0], heads=budgets[1])
        async with nodes(2, parts=lambda i: part if i == 0 else NetworkParts()) as (victim, other):
            await other.transport.connect(address_of(victim))
            peer = other.transport.local_id
            for budget in budgets:
                assert budget.standing_of is not None
                assert budget.standing_of(peer) == PeerStanding("127.0.0.1", is_known=False)
                assert budget.standing_of(STRANGER) == PeerStanding("", is_known=False)
            victim.gate.close(lambda who: "" if who == peer else "no pass")
            for budget in budgets:
                assert budget.standing_of is not None
                assert budget.standing_of(peer) == PeerStanding("127.0.0.1", is_known=True)
                assert budget.standing_of(STRANGER) == PeerStanding("", is_known=False)

    run(scenario)


def test_a_thousand_streams_of_one_peer_are_bounded() -> None:
    async def scenario() -> None:
        async with attacked() as (victim, attacker, opinion):
            muxer = muxer_to(attacker, victim)
            admission = victim.transport._connections._swarm.upgrader._options.admission
            most, opened = 0, 0
            with suppress(BaseLibp2pError):  # it ends before the thousandth
                for _ in range(1000):
                    stream = await muxer.open_stream()
                    await stream.write(proposal(FRAME_PROTOCOL))
                    opened += 1
                    most = max(most, admission.open_streams(muxer.secured_conn.get_local_peer()))
            assert opened > 100
            assert 16 <= most <= 56
            await until(lambda: opinion.is_banned(attacker.transport.local_id))
            await until(lambda: victim.transport.connections() == ())
            assert admission.open_streams(muxer.secured_conn.get_local_peer()) == 0
            with pytest.raises(PeerUnreachableError):
                await attacker.transport.connect(address_of(victim))  # banned
            async with nodes(1, first=3) as (other,):
                await lives(other, victim)

    run(scenario)


@pytest.mark.parametrize(
    "frames",
    [
        header_bytes(DATA, SYN, 1001, 256 * 1024 + 1),
        header_bytes(DATA, SYN, 1001, 2**32 - 1),
        b"\x07" + bytes(11),
        header_bytes(9, 0, 1, 0),
        header_bytes(DATA, SYN, 2, 0),  # not this side's number
        header_bytes(DATA, 0, 0, 5),
        Random(3).randbytes(40_000),
    ],
)
def test_a_connection_that_breaks_the_rules_of_streams_ends(frames: bytes) -> None:
    async def scenario() -> None:
        async with attacked() as (victim, attacker, opinion):
            muxer = muxer_to(attacker, victim)
            muxer.send_control(frames)
            with anyio.fail_after(10):
                await muxer.wait_closed()
            await until(lambda: victim.transport.connections() == ())
            assert opinion.score(attacker.transport.local_id) < 0
            await lives(attacker, victim)

    run(scenario)


def test_more_bytes_than_a_window_allows_end_the_connection() -> None:
    async def scenario() -> None:
        async with attacked() as (victim, attacker, _):
            muxer = muxer_to(attacker, victim)
            body = bytes(60_000)
            muxer.send_control(header_bytes(WINDOW_UPDATE, SYN, 1001, 0))
            for _ in range(10):  # nobody reads them: the stream has agreed on no protocol
                muxer.send_control(header_bytes(DATA, 0, 1001, len(body)) + body)
            with anyio.fail_after(10):
                await muxer.wait_closed()
            await lives(attacker, victim)

    run(scenario)


def test_pings_that_nobody_reads_the_answers_of_end_the_connection() -> None:
    async def scenario() -> None:
        async with attacked() as (victim, attacker, _):
            muxer = muxer_to(victim, attacker)
            for number in range(10_000):
                muxer._handle_ping(frame_header(number))
            with anyio.fail_after(10):
                await muxer.wait_closed()
            await until(lambda: attacker.transport.connections() == ())
            await lives(attacker, victim)

    run(scenario)


def frame_header(number: int) -> Any:
    from neuroshard.network.libp2p.streams import FrameHeader

    return FrameHeader(PING, SYN, 0, number)


def test_a_flood_of_bad_requests_bans_and_a_ban_holds() -> None:
    async def scenario() -> None:
        async with attacked() as (victim, attacker, opinion):
            for _ in range(6):
                if opinion.is_banned(attacker.transport.local_id):
                    break
                stream = await muxer_to(attacker, victim).open_stream()
                await stream.write(proposal(FRAME_PROTOCOL) + bytes(100), is_last=True)
                with anyio.move_on_after(5):
                    await stream.wait_ended()
            await until(lambda: victim.transport.connections() == ())
            for _ in range(2):
                with pytest.raises(PeerUnreachableError):
                    await attacker.transport.connect(address_of(victim))
            assert opinion.is_banned(attacker.transport.local_id)

    run(scenario)


def test_what_the_transport_and_the_swarm_report_is_one_opinion() -> None:
    async def scenario() -> None:
        async with attacked() as (victim, _, opinion):
            assert victim.reputation is opinion

    run(scenario)


def test_a_busy_node_says_so() -> None:
    async def scenario() -> None:
        async with nodes(2, LOOPBACK) as (a, b):
            release = anyio.Event()

            async def slow(_: NodeId, frame: Frame) -> Frame:
                await release.wait()
                return frame

            a.transport.serve("slow", slow, max_concurrent=1)
            await b.transport.connect(address_of(a))
            told: list[str] = []

            async def ask() -> None:
                try:
                    await b.transport.request(a.transport.local_id, Frame("slow"), timeout_seconds=10)
                except PeerRefusedError as error:
                    told.append(str(error))
                    release.set()

            async with anyio.create_task_group() as tasks:
                for _ in range(10):
                    tasks.start_soon(ask)
            assert told
            assert all("busy" in text for text in told)

    run(scenario)
