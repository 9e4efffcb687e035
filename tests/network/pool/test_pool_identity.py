"""Both ends of a connection are who they say, whoever listens in, repeats or passes on what was said."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from dataclasses import replace

import anyio
import pytest
import trio

from neuroshard.identity import NodeIdentity
from neuroshard.identity.signing import purpose_message
from neuroshard.network import PeerUnreachableError, ScoreReason
from neuroshard.network.pool import tcp
from neuroshard.network.pool.options import ConnectionLostError
from neuroshard.network.pool.secure_stream import (
    GreetingVerdict,
    ListenerTls,
    SecureStream,
    dialler_context,
    greet_as_dialler,
)
from neuroshard.network.pool.transfers import PacketKind
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import POOL_LOOPBACK, digest_of, frame_of, node, run, secured, stranger, two_nodes


class Recording(SecureStream):
    """Remembers what was sent, and may send something else."""

    def __init__(self, stream: SecureStream) -> None:
        super().__init__(stream.socket)
        self.sent: list[bytes] = []

    async def send_all(self, data: bytes | memoryview) -> None:
        self.sent.append(bytes(data))
        await super().send_all(data)


class Impostor:
    """Has its own key, and a name that is another's."""

    def __init__(self, name: NodeIdentity, key: NodeIdentity) -> None:
        self.public_key = name.key.public_key
        self.node_id = name.node_id
        self.sign = key.key.sign


def test_a_listener_with_another_key_is_told_nothing() -> None:
    async def scenario() -> None:
        async with two_nodes() as (a, b), node(3) as c:
            with pytest.raises(PeerUnreachableError, match="does not have the node key"):
                await a.ask(b, frame_of(b"secret"), via=c.pool.endpoint())
            assert c.heard == []
            assert a.id not in c.pool.traffic()
            assert (await a.ask(b, frame_of(b"fine"))).tensors[0].data == b"fine"

    run(scenario)


def test_a_dialler_with_another_key_is_turned_away() -> None:
    async def scenario() -> None:
        async with node(2) as b:
            stream = await secured(b.pool.endpoint())
            impostor = Impostor(identity_of(1), identity_of(9))
            with pytest.raises(ConnectionLostError):
                await greet_as_dialler(stream, impostor, b.id, digest_of(stream))  # type: ignore[arg-type]
            stream.close()
            assert b.pool.turned_away == 1
            assert b.pool.connection_count == 0
            assert identity_of(1).node_id not in b.pool.traffic()

    run(scenario)


def test_a_replayed_greeting_is_turned_away() -> None:
    async def scenario() -> None:
        async with node(2) as b:
            first = Recording(await secured(b.pool.endpoint()))
            reception = await greet_as_dialler(first, identity_of(1).key, b.id, digest_of(first))
            assert reception.verdict is GreetingVerdict.WELCOME
            second = await secured(b.pool.endpoint())
            for message in first.sent:
                await second.send_all(message)
            await second.receive_bytes(96)
            with pytest.raises(ConnectionLostError):
                await second.receive_bytes(1)
            await until(lambda: b.pool.turned_away == 1)
            first.close()
            second.close()

    run(scenario)


async def accepted_by_the_middle(listener: socket.socket) -> tuple[SecureStream, bytes]:
    """The connection, and the digest of the certificate that the middle showed."""
    raw, _ = await tcp.accept_connection(listener)
    raw.setblocking(False)
    tls = ListenerTls.create()
    stream = SecureStream(tls.context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False))
    await stream.handshake()
    return stream, tls.certificate_digest


def test_a_node_in_the_middle_cannot_pretend_to_be_the_listener() -> None:
    """It passes on every byte of the greeting between two honest nodes, over TLS connections of its own to both."""

    async def scenario() -> None:
        async with two_nodes() as (a, b), anyio.create_task_group() as tasks:
            listener = tcp.listen(("127.0.0.1", 0))

            async def pass_on() -> None:
                near, _ = await accepted_by_the_middle(listener)
                far = await secured(b.pool.endpoint())
                await far.send_all(await near.receive_bytes(37))
                await near.send_all(await far.receive_bytes(96))
                with pytest.raises(ConnectionLostError):
                    await near.receive_bytes(1)
                near.close()
                far.close()

            tasks.start_soon(pass_on)
            with pytest.raises(PeerUnreachableError, match="does not have the node key"):
                await a.ask(b, frame_of(b"secret"), via=listener.getsockname())
            assert b.heard == []
            listener.close()

    run(scenario)


def test_a_node_that_was_dialled_cannot_pretend_to_be_the_dialler_elsewhere() -> None:
    """`a` dials node 3 on purpose; node 3 gives it the nonce of `b` to sign and passes the signature on."""

    async def scenario() -> None:
        async with two_nodes() as (a, b), anyio.create_task_group() as tasks:
            listener = tcp.listen(("127.0.0.1", 0))
            middle = identity_of(3)
            done = anyio.Event()

            async def pass_on() -> None:
                near, digest = await accepted_by_the_middle(listener)
                far = await secured(b.pool.endpoint())
                opening = await near.receive_bytes(37)
                await far.send_all(opening)
                nonce = (await far.receive_bytes(96))[:32]
                claim = {"certificate": digest.hex(), "nonce": opening[5:].hex(), "listener": middle.node_id}
                await near.send_all(nonce + middle.key.sign(purpose_message("pool-listener", claim)))
                await far.send_all(await near.receive_bytes(104))
                with pytest.raises(ConnectionLostError):
                    await far.receive_bytes(1)
                near.close()
                far.close()
                done.set()

            tasks.start_soon(pass_on)
            stream = await secured(listener.getsockname())
            with pytest.raises(ConnectionLostError):
                await greet_as_dialler(stream, a.identity.key, middle.node_id, digest_of(stream))
            stream.close()
            listener.close()
            await done.wait()
            assert b.pool.turned_away == 1
            assert a.id not in b.pool.traffic()

    run(scenario)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x13/multistream/1.0.0\n",
        bytes(1000),
        bytes([22, 3, 1, 255, 255]) + bytes(5000),
        b"\x16\x03\x01",
    ],
)
def test_who_does_not_speak_tls_is_turned_away(data: bytes) -> None:
    async def scenario() -> None:
        async with two_nodes(listener_options=replace(POOL_LOOPBACK, handshake_seconds=0.5)) as (a, b):
            stream = await trio.open_tcp_stream(*b.pool.endpoint())
            await stream.send_all(data)
            with suppress(trio.BrokenResourceError):
                while await stream.receive_some(1000):
                    pass
            await stream.aclose()
            await until(lambda: b.pool.turned_away == 1)
            assert (await a.ask(b, frame_of(b"fine"))).tensors[0].data == b"fine"

    run(scenario)


@pytest.mark.parametrize("data", [b"NSPL\x01" + bytes(32), bytes(37), b"short"])
def test_who_speaks_another_protocol_inside_tls_is_turned_away(data: bytes) -> None:
    async def scenario() -> None:
        async with node(2, replace(POOL_LOOPBACK, handshake_seconds=0.5)) as b:
            stream = await secured(b.pool.endpoint())
            await stream.send_all(data)
            with pytest.raises(ConnectionLostError):
                await stream.receive_bytes(96)
            stream.close()
            await until(lambda: b.pool.turned_away == 1)

    run(scenario)


def test_older_tls_is_refused() -> None:
    async def scenario() -> None:
        async with node(2) as b:
            context = dialler_context()
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            raw = await tcp.dial(b.pool.endpoint(), None)
            stream = SecureStream(context.wrap_socket(raw, do_handshake_on_connect=False))
            with pytest.raises(ConnectionLostError):
                await stream.handshake()
            stream.close()
            await until(lambda: b.pool.turned_away == 1)

    run(scenario)


def test_a_banned_peer_is_not_welcome_and_not_dialled() -> None:
    async def scenario() -> None:
        async with two_nodes() as (a, b):
            for _ in range(10):
                b.reputation.report(a.id, ScoreReason.MALFORMED_FRAME)
            assert b.reputation.is_banned(a.id)
            with pytest.raises(PeerUnreachableError, match="unwelcome"):
                await a.ask(b, frame_of(b"x"))
            with pytest.raises(PeerUnreachableError, match="banned"):
                await b.ask(a, frame_of(b"x"))

    run(scenario)


def test_a_ban_ends_the_connections_that_are_open() -> None:
    async def scenario() -> None:
        async with node(2) as b, stranger(b, 9) as liar:
            told: list[PacketKind] = []

            async def lie() -> None:
                for number in range(1, 100):
                    await liar.send(PacketKind.OFFER, number, b"this is no frame, whatever the length of it")
                    told.append((await liar.receive())[0].kind)

            with pytest.raises(ConnectionLostError):
                await lie()
            assert set(told) == {PacketKind.REFUSE}
            assert b.reputation.is_banned(identity_of(9).node_id)
            await until(lambda: b.pool.connection_count == 0)

    run(scenario)
