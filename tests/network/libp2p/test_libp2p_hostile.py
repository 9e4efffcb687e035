from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import anyio
import libp2p
import pytest
import trio
from libp2p.abc import IHost, ISecureTransport
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as new_x25519
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.exceptions import SwarmException
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.security.secio.transport import ID as SECIO
from libp2p.security.secio.transport import Transport as SecioTransport
from libp2p.tools.anyio_service import background_trio_service
from libp2p_nodes import LOOPBACK, address_of, identity, nodes, port_of, run, until
from multiaddr import Multiaddr
from trio.testing import MockClock

from neuroshard.network import Network, PeerRefusedError, PeerUnreachableError
from neuroshard.network.libp2p import ConnectionLimits, NetworkOptions, NetworkParts, libp2p_network
from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.negotiation import proposal
from neuroshard.network.libp2p.requests import FRAME_PROTOCOL
from neuroshard.network.libp2p.yamux_frames import DATA, PING, SYN, WINDOW_UPDATE, header_bytes
from neuroshard.network.reputation import Reputation
from neuroshard.network.scores import ScoreReason
from neuroshard.types import NodeId
from neuroshard.wire import Frame, FrameLimits, TensorPart, TensorSpec, encode

Keys = Any


async def echo(_: NodeId, frame: Frame) -> Frame:
    return frame


async def lives(asker: Network, asked: Network) -> None:
    """The node that was attacked still answers."""
    await asker.transport.connect(address_of(asked))
    reply = await asker.transport.request(asked.transport.local_id, Frame("echo", {"alive": True}), timeout_seconds=10)
    assert reply.header == {"alive": True}


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


def security(protocol: str) -> Callable[[Keys], Mapping[TProtocol, ISecureTransport]]:
    def made(keys: Keys) -> Mapping[TProtocol, ISecureTransport]:
        match protocol:
            case "plaintext":
                return {TProtocol(PLAINTEXT_PROTOCOL_ID): InsecureTransport(keys)}
            case "secio":
                return {TProtocol(SECIO): SecioTransport(keys)}
            case _:
                return {NOISE: NoiseTransport(keys, noise_privkey=new_x25519().private_key)}

    return made


@asynccontextmanager
async def stock_host(protocol: str) -> AsyncIterator[IHost]:
    """A host as libp2p itself makes it, that speaks one security protocol."""
    keys = create_new_key_pair()
    host = libp2p.new_host(key_pair=keys, sec_opt=security(protocol)(keys))
    async with background_trio_service(host.get_network()):
        yield host
        await host.close()


@pytest.mark.parametrize("protocol", ["plaintext", "secio"])
def test_a_client_without_noise_is_refused(protocol: str) -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b), stock_host(protocol) as stranger:
            a.transport.serve("echo", echo)
            with pytest.raises(SwarmException):
                await stranger.connect(info_from_p2p_addr(Multiaddr(address_of(a))))
            assert a.transport.connections() == ()
            await lives(b, a)

    run(scenario)


def test_a_client_of_libp2p_itself_is_understood() -> None:
    async def scenario() -> None:
        async with nodes(1) as (a,), stock_host("noise") as stranger:
            info = info_from_p2p_addr(Multiaddr(address_of(a)))
            await stranger.connect(info)
            assert [connection.peer for connection in a.transport.connections()] == [str(stranger.get_id())]
            stream = await stranger.new_stream(info.peer_id, [TProtocol("/unknown/1"), TProtocol("/ipfs/ping/1.0.0")])
            await stream.write(bytes(range(32)))
            answer = b""
            while len(answer) < 32:
                answer += await stream.read(32 - len(answer))
            assert answer == bytes(range(32))
            await stream.close()
            peerstore = stranger.get_peerstore()
            await until(lambda: FRAME_PROTOCOL in peerstore.get_protocols(info.peer_id))  # it was identified

    run(scenario)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(1000),
        b"\xff" * 20 + b"\n",  # a length of 2^63 and more
        b"\x13/multistream/1.0.0\n\x07/noise\n" + b"\xff\xff" + Random(1).randbytes(65_535),
        b"\x13/multistream/1.0.0\n\x04\xff\xfe\xfd\n",
        Random(2).randbytes(100_000),
    ],
)
def test_garbage_instead_of_a_handshake(garbage: bytes) -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            a.transport.serve("echo", echo)
            stream = await trio.open_tcp_stream("127.0.0.1", port_of(a))
            with anyio.fail_after(20):
                async with stream:
                    try:
                        await stream.send_all(garbage)
                        while await stream.receive_some(65_536):
                            pass
                    except trio.BrokenResourceError:
                        pass
            await lives(b, a)

    run(scenario, clock=MockClock(autojump_threshold=0.1))


def test_who_connects_and_says_nothing_is_dropped() -> None:
    async def scenario() -> None:
        async with nodes(1) as (a,):
            stream = await trio.open_tcp_stream("127.0.0.1", port_of(a))
            began = trio.current_time()
            async with stream:
                while await stream.receive_some(65_536):
                    pass
            assert 5 < trio.current_time() - began < 20

    run(scenario, clock=MockClock(autojump_threshold=0.1))


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
                    if b"so slow a request" in data:
                        ended.set()
                tasks.cancel_scope.cancel()
            assert trio.current_time() - began < 30
            assert dict(opinion.refused()) == {ScoreReason.TOO_SLOW.value: 1}
            stream.abandon()
            await lives(attacker, victim)

    run(scenario, clock=MockClock(autojump_threshold=0.1))


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
            assert 16 <= most <= 32
            await until(lambda: opinion.is_banned(attacker.transport.local_id))
            await until(lambda: victim.transport.connections() == ())
            assert admission.open_streams(muxer.secured_conn.get_local_peer()) == 0
            with pytest.raises(PeerUnreachableError):
                await attacker.transport.connect(address_of(victim))  # banned
            async with nodes(1, first=3) as (other,):
                await lives(other, victim)

    run(scenario)


def test_a_thousand_connections_of_one_peer_are_bounded() -> None:
    async def scenario() -> None:
        async with attacked() as (victim, attacker, _):
            address, swarm = address_of(victim), victim.transport._connections._swarm
            connections = attacker.transport._connections
            kept: list[trio.SocketStream] = []

            async def handshake() -> None:
                with pytest.raises(PeerUnreachableError):
                    await connections._dial_direct(parse(address))

            for _ in range(3):  # with the one there is: as many as one peer may have
                await connections._dial_direct(parse(address))
            for _ in range(20):
                await handshake()
            assert len(swarm.get_connections()) <= 4
            for _ in range(300):  # and sockets that never shake hands
                try:
                    kept.append(await trio.open_tcp_stream("127.0.0.1", port_of(victim)))
                except OSError:
                    break
            await anyio.sleep(0.5)
            assert victim.transport._connections._admission._handshakes.total() <= 64
            for stream in kept:
                await stream.aclose()
            await until(lambda: victim.transport._connections._admission._handshakes.total() == 0)
            async with nodes(1, first=3) as (other,):
                await lives(other, victim)

    run(scenario)


def parse(address: str) -> Any:
    from neuroshard.network.libp2p.addresses import parse_address

    return parse_address(address)


def test_identities_from_one_address_are_bounded() -> None:
    async def scenario() -> None:
        limits = ConnectionLimits(identities_of_loopback=3)
        async with libp2p_network(identity(1), NetworkOptions(host="127.0.0.1", limits=limits)) as victim:
            async with nodes(5, first=2) as strangers:
                refused = 0
                for stranger in strangers:
                    try:
                        await stranger.transport.connect(address_of(victim))
                    except PeerUnreachableError:
                        refused += 1
                assert refused == 2
                assert len(victim.transport.connections()) == 3
            await until(lambda: victim.transport.connections() == ())
            async with nodes(1, first=20) as (other,):
                await other.transport.connect(address_of(victim))

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
    from neuroshard.network.libp2p.yamux_frames import FrameHeader

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
