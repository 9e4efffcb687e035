from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import anyio
import libp2p
import pytest
import trio
from libp2p.abc import IHost, INetStream, ISecureTransport
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as new_x25519
from libp2p.custom_types import TProtocol
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.network.exceptions import SwarmException
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.peer.peerstore import PeerStoreError
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.security.secio.transport import ID as SECIO
from libp2p.security.secio.transport import Transport as SecioTransport
from libp2p.security.tls.transport import PROTOCOL_ID as TLS
from libp2p.security.tls.transport import TLSTransport
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils.varint import encode_uvarint
from multiaddr import Multiaddr
from trio.testing import MockClock

from neuroshard.network.libp2p.host import IDENTIFY_PROTOCOL, MAX_IDENTIFY_BYTES
from neuroshard.network.libp2p.relay_messages import HOP_PROTOCOL
from neuroshard.network.libp2p.transport import FRAME_PROTOCOL
from tests.worlds.clock import until
from tests.worlds.network_nodes import address_of, echo, lives, nodes, port_of, run

Keys = Any


def security(protocol: str) -> Callable[[Keys], Mapping[TProtocol, ISecureTransport]]:
    def made(keys: Keys) -> Mapping[TProtocol, ISecureTransport]:
        match protocol:
            case "plaintext":
                return {TProtocol(PLAINTEXT_PROTOCOL_ID): InsecureTransport(keys)}
            case "secio":
                return {TProtocol(SECIO): SecioTransport(keys)}
            case "tls":
                return {TLS: TLSTransport(keys)}
            case _:
                return {NOISE: NoiseTransport(keys, noise_privkey=new_x25519().private_key)}

    return made


@asynccontextmanager
async def stock_host(protocol: str) -> AsyncIterator[IHost]:
    """A host as libp2p itself makes it, that speaks one security protocol."""
    keys = create_new_key_pair()
    host = libp2p.new_host(key_pair=keys, sec_opt=security(protocol)(keys))
    swarm: Any = host.get_network()
    (transport,) = swarm.transport_manager.get_transports()
    dial, dialled = transport.dial, list[Any]()

    async def noted_dial(address: Multiaddr) -> Any:
        dialled.append(await dial(address))
        return dialled[-1]

    transport.dial = noted_dial
    async with background_trio_service(swarm):
        yield host
        await host.close()
        for connection in dialled:  # libp2p does not close the sockets of those that the other side ended
            await connection.close()


@pytest.mark.parametrize("protocol", ["plaintext", "secio"])
def test_a_client_without_tls_or_noise_is_refused(protocol: str) -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b), stock_host(protocol) as stranger:
            a.transport.serve("echo", echo)
            with pytest.raises(SwarmException):
                await stranger.connect(info_from_p2p_addr(Multiaddr(address_of(a))))
            assert a.transport.connections() == ()
            await lives(b, a)

    run(scenario)


@pytest.mark.parametrize("protocol", ["noise", "tls"])
def test_a_client_of_libp2p_itself_is_understood(protocol: str) -> None:
    async def scenario() -> None:
        async with nodes(1) as (a,), stock_host(protocol) as stranger:
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


@pytest.mark.parametrize("names", [500, 5000], ids=["much", "too much"])
def test_of_what_a_stranger_says_about_itself_little_is_kept(names: int) -> None:
    said = Identify(
        public_key=b"x" * 100,
        protocols=[HOP_PROTOCOL, *(f"/{number:020}" for number in range(names))],
        listen_addrs=[Multiaddr("/ip4/192.0.2.1/tcp/1").to_bytes()] * 20,
    )
    told = anyio.Event()

    async def tell(stream: INetStream) -> None:
        data = said.SerializeToString()
        assert (len(data) > MAX_IDENTIFY_BYTES) is (names == 5000)
        await stream.write(encode_uvarint(len(data)) + data)
        await stream.read()  # until the other side ends it
        told.set()

    async def scenario() -> None:
        async with nodes(1) as (a,), stock_host("noise") as stranger:
            stranger.set_stream_handler(TProtocol(IDENTIFY_PROTOCOL), tell)
            await stranger.connect(info_from_p2p_addr(Multiaddr(address_of(a))))
            peerstore = a.transport._connections._swarm.peerstore
            if names == 500:
                await until(lambda: peerstore.has_peer(stranger.get_id()))
                assert peerstore.get_protocols(stranger.get_id()) == [HOP_PROTOCOL]
                assert peerstore.peer_data_map[stranger.get_id()].addrs == []
            else:
                with anyio.move_on_after(5):
                    await told.wait()
                assert HOP_PROTOCOL not in protocols_of(peerstore, stranger.get_id())

    run(scenario)


def protocols_of(peerstore: Any, peer: Any) -> list[str]:
    try:
        return list(peerstore.get_protocols(peer))
    except PeerStoreError:
        return []
