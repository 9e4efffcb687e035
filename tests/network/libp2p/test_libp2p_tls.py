"""TLS between nodes: both ends are the nodes that they claim to be, and no other certificate or version is accepted."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from OpenSSL import SSL

from neuroshard.network.libp2p import NetworkOptions
from neuroshard.network.libp2p.sockets import SocketBytes
from neuroshard.network.libp2p.tls import (
    APPLICATION,
    KEY_EXTENSION,
    SIGNED_PREFIX,
    TLS_PROTOCOL,
    TlsConnection,
    TlsError,
    TlsTransport,
    certified_key,
    signed_key,
)
from neuroshard.network.libp2p.upgrading import key_pair_of
from tests.worlds.claims import identity_of
from tests.worlds.network_nodes import echo, lives, nodes, run

NOW = datetime(2026, 6, 1, tzinfo=UTC)
HONEST, PEER, THIRD = (key_pair_of(identity_of(number).key) for number in (1, 2, 3))
PEER_ID = ID.from_pubkey(PEER.public_key)
CA_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "another")])


def transport_of(keys: Any) -> TlsTransport:
    return TlsTransport(keys, NOW.timestamp)


def spki(key: EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def signed_by(keys: Any, named: Any = None) -> Callable[[EllipticCurvePrivateKey], bytes]:
    """The extension that names `named`, signed by `keys`."""
    name = (named or keys).public_key.serialize()
    return lambda own: signed_key(name, keys.private_key.sign(SIGNED_PREFIX + spki(own)))


def key_of_unknown_kind(own: EllipticCurvePrivateKey) -> bytes:
    """It says that it is an RSA key, and contains one of an algorithm that nobody knows."""
    content = spki(own).replace(b"\x06\x07\x2a\x86\x48", b"\x06\x07\x2b\x86\x48")
    return b"\x08\x00\x12" + bytes((len(content),)) + content


def certificate_of(
    extension: Callable[[EllipticCurvePrivateKey], bytes] | None = None,
    *,
    since: datetime = NOW - timedelta(days=1),
    until: datetime = NOW + timedelta(days=1),
    signed_with: EllipticCurvePrivateKey | None = None,
    critical: str | None = None,
) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    own = generate_private_key(SECP256R1())
    builder = x509.CertificateBuilder(CA_NAME, CA_NAME, own.public_key(), 1, since, until)
    if extension is not None:
        builder = builder.add_extension(x509.UnrecognizedExtension(KEY_EXTENSION, extension(own)), critical=True)
    if critical is not None:
        unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier(critical), b"\x05\x00")
        builder = builder.add_extension(unknown, critical=True)
    return builder.sign(signed_with or own, hashes.SHA256()), own


def hostile(
    certificate: tuple[x509.Certificate, EllipticCurvePrivateKey] | None = None,
    *,
    further: Sequence[x509.Certificate] = (),
    version: int = SSL.TLS1_3_VERSION,
    application: bytes | None = APPLICATION,
) -> TlsTransport:
    """A peer that shows these certificates and speaks this version at most."""
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_max_proto_version(version)
    if certificate is not None:
        context.use_certificate(certificate[0])
        context.use_privatekey(certificate[1])
    for one in further:
        context.add_extra_chain_cert(one)
    context.set_verify(SSL.VERIFY_PEER, lambda *_: True)
    if application is not None:
        context.set_alpn_protos([application])
        context.set_alpn_select_callback(lambda _, offered: application if application in offered else b"")
    transport = transport_of(PEER)
    transport._context = context
    return transport


def honest_certificate() -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    return certificate_of(signed_by(PEER))


Ends = tuple[TlsConnection | Exception, TlsConnection | Exception]


async def shaken(client: TlsTransport, server: TlsTransport, dialled: ID = PEER_ID) -> Ends:
    """The two ends of a connection after the handshake, or the error of that end."""
    ends: list[Any] = [None, None]

    async def work(place: int, line: trio.SocketStream) -> None:
        raw = RawConnection(SocketBytes(line), initiator=place == 0)
        try:
            upgrade = server.secure_inbound(raw) if place else client.secure_outbound(raw, dialled)
            ends[place] = await upgrade
        except BaseLibp2pError as error:
            ends[place] = error
            await raw.close()

    async with anyio.create_task_group() as tasks:
        for place, line in enumerate(await lines()):
            tasks.start_soon(work, place, line)
    return ends[0], ends[1]


async def lines() -> tuple[trio.SocketStream, trio.SocketStream]:
    """Both ends of a TCP connection."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        near = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        return near, await listener.accept()


async def close(*ends: TlsConnection | Exception) -> None:
    for end in ends:
        if isinstance(end, TlsConnection):
            await end.close()


def test_both_ends_know_each_other_and_every_byte_arrives() -> None:
    data = bytes(range(256)) * 2048

    async def scenario() -> None:
        client, server = await shaken(transport_of(HONEST), transport_of(PEER))
        assert isinstance(client, TlsConnection)
        assert isinstance(server, TlsConnection)
        assert client.get_remote_peer() == PEER_ID
        assert server.get_remote_peer() == ID.from_pubkey(HONEST.public_key)
        for near, far in ((client, server), (server, client)):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(near.write, data)
                head = await far.read(3)
                received = head
                while len(received) < len(data):
                    received += await far.read()
            assert received == data
        await client.close()
        with pytest.raises(ConnectionClosedError):
            await server.read()
        await server.close()

    run(scenario)


REFUSED: dict[str, tuple[Callable[[], TlsTransport], str]] = {
    "signed by another node": (lambda: hostile(certificate_of(signed_by(THIRD, PEER))), "not signed by the node"),
    "for another key of a certificate": (
        lambda: hostile(certificate_of(lambda _: signed_by(PEER)(generate_private_key(SECP256R1())))),
        "not signed by the node",
    ),
    "without the extension": (lambda: hostile(certificate_of()), "no key of a node"),
    "with garbage in the extension": (lambda: hostile(certificate_of(lambda _: b"\x30\x03\x04\x85")), "not encoded"),
    "with bytes after the key": (
        lambda: hostile(certificate_of(lambda own: signed_by(PEER)(own) + b"\x00")),
        "not encoded",
    ),
    "with a long key": (lambda: hostile(certificate_of(lambda _: signed_key(bytes(5000), b"x"))), "too long"),
    "with an unreadable key": (lambda: hostile(certificate_of(lambda _: signed_key(b"\xff", b"x"))), "cannot be read"),
    "with a key of an unknown kind": (
        lambda: hostile(certificate_of(lambda own: signed_key(key_of_unknown_kind(own), b"x"))),
        "cannot be read",
    ),
    "expired": (
        lambda: hostile(certificate_of(signed_by(PEER), until=NOW - timedelta(seconds=1))),
        "expired",
    ),
    "not valid yet": (
        lambda: hostile(certificate_of(signed_by(PEER), since=NOW + timedelta(seconds=1))),
        "not valid yet",
    ),
    "not signed with its own key": (
        lambda: hostile(certificate_of(signed_by(PEER), signed_with=generate_private_key(SECP256R1()))),
        "not signed with its own key",
    ),
    "with an unknown critical extension": (
        lambda: hostile(certificate_of(signed_by(PEER), critical="1.2.3.4.5")),
        "critical",
    ),
    "more than one": (
        lambda: hostile(honest_certificate(), further=[honest_certificate()[0]]),
        "more than one",
    ),
    "over TLS 1.2": (lambda: hostile(honest_certificate(), version=SSL.TLS1_2_VERSION), "handshake failed"),
    "for another protocol": (lambda: hostile(honest_certificate(), application=b"h2"), "libp2p|handshake failed"),
    "for no protocol": (lambda: hostile(honest_certificate(), application=None), "another protocol"),
}


@pytest.mark.parametrize("role", ["client", "server"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_certificate_is_refused(case: str, role: str) -> None:
    make, reason = REFUSED[case]

    async def scenario() -> None:
        honest, peer = transport_of(HONEST), make()
        ends = await (
            shaken(honest, peer) if role == "client" else shaken(peer, honest, ID.from_pubkey(HONEST.public_key))
        )
        refusing = ends[0 if role == "client" else 1]
        assert isinstance(refusing, TlsError)
        assert refusing.args
        with pytest.raises(TlsError, match=reason):
            raise refusing
        await close(*ends)

    run(scenario)


def test_the_honest_certificate_of_these_tests_is_accepted() -> None:
    async def scenario() -> None:
        for client, server, dialled in (
            (transport_of(HONEST), hostile(honest_certificate()), PEER_ID),
            (hostile(honest_certificate()), transport_of(HONEST), ID.from_pubkey(HONEST.public_key)),
        ):
            ends = await shaken(client, server, dialled)
            assert all(isinstance(end, TlsConnection) for end in ends)
            await close(*ends)

    run(scenario)


def test_a_client_without_a_certificate_is_refused() -> None:
    async def scenario() -> None:
        ends = await shaken(hostile(), transport_of(HONEST), ID.from_pubkey(HONEST.public_key))
        assert isinstance(ends[1], TlsError)
        await close(*ends)

    run(scenario)


def test_another_node_than_the_dialled_one_is_refused() -> None:
    async def scenario() -> None:
        ends = await shaken(transport_of(HONEST), transport_of(THIRD), PEER_ID)
        assert isinstance(ends[0], TlsError)
        assert "another node" in str(ends[0])
        await close(*ends)

    run(scenario)


@pytest.mark.parametrize("with_sessions", [False, True], ids=["ours", "a server that allows it"])
def test_no_session_is_resumed(with_sessions: bool, tmp_path: Path) -> None:
    """The second case shows that this client does resume where a server allows it."""
    certificate, key = honest_certificate()
    file = tmp_path / "client.pem"
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(certificate.public_bytes(Encoding.PEM) + pem)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["libp2p"])
    context.load_cert_chain(file)
    server = transport_of(HONEST)
    if with_sessions:
        server = hostile(honest_certificate())
        server._context.set_session_cache_mode(SSL.SESS_CACHE_SERVER)
        server._context.set_session_id(b"test")

    async def scenario() -> None:
        session: ssl.SSLSession | None = None
        for attempt in range(2):
            near, far = await lines()
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            client = context.wrap_bio(incoming, outgoing, session=session)
            served: list[Any] = []

            async def serve(line: trio.SocketStream, served: list[Any] = served) -> None:
                served.append(await server.secure_inbound(RawConnection(SocketBytes(line), initiator=False)))
                await served[0].write(b"!")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve, far)
                while True:
                    try:
                        if client.read(1) == b"!":
                            break
                    except ssl.SSLWantReadError:
                        await near.send_all(outgoing.read())
                        incoming.write(await near.receive_some(65536))
            assert served[0].get_remote_peer() == PEER_ID
            assert client.session_reused is (with_sessions and attempt == 1)
            session = client.session
            await served[0].close()
            await near.aclose()

    run(scenario)


def test_a_damaged_record_ends_the_connection() -> None:
    async def scenario() -> None:
        client, server = await shaken(transport_of(HONEST), transport_of(PEER))
        assert isinstance(client, TlsConnection)
        assert isinstance(server, TlsConnection)
        await client.write(b"first")
        assert await server.read(5) == b"first"
        await client._conn.write(b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(ConnectionClosedError):
            await server.read(1)
        await close(client, server)

    run(scenario)


# Test vector 1 of the specification: a certificate of an Ed25519 node
VECTOR = (
    "308201ae30820156a0030201020204499602d2300a06082a8648ce3d040302302031123010060355040a13096c6962703270"
    "2e696f310a300806035504051301313020170d3735303130313133303030305a180f34303936303130313133303030305a30"
    "2031123010060355040a13096c69627032702e696f310a300806035504051301313059301306072a8648ce3d020106082a86"
    "48ce3d030107034200040c901d423c831ca85e27c73c263ba132721bb9d7a84c4f0380b2a6756fd601331c8870234dec8785"
    "04c174144fa4b14b66a651691606d8173e55bd37e381569ea37c307a3078060a2b0601040183a25a0101046a306804240801"
    "1220a77f1d92fedb59dddaea5a1c4abd1ac2fbde7d7b879ed364501809923d7c11b90440d90d2769db992d5e6195dbb08e70"
    "6b6651e024fda6cfb8846694a435519941cac215a8207792e42849cccc6cd8136c6e4bde92a58c5e08cfd4206eb5fe0bf909"
    "300a06082a8648ce3d0403020346003043021f50f6b6c52711a881778718238f650c9fb48943ae6ee6d28427dc6071ae55e7"
    "02203625f116a7a454db9c56986c82a25682f7248ea1cb764d322ea983ed36a31b77"
)
VECTOR_NODE = "12D3KooWM6CgA9iBFZmcYAHA6A2qvbAxqfkmrYiRQuz3XEsk4Ksv"


def test_the_vector_of_the_specification_is_accepted() -> None:
    certificate = x509.load_der_x509_certificate(bytes.fromhex(VECTOR))
    key = certified_key(certificate, NOW)
    assert str(ID.from_pubkey(key)) == VECTOR_NODE


def test_nodes_prefer_tls() -> None:
    async def scenario() -> None:
        async with nodes(2, NetworkOptions(host="127.0.0.1", body_connections=False)) as (a, b):
            a.transport.serve("echo", echo)
            await lives(b, a)
            for near, far in ((a, b), (b, a)):
                muxer = near.transport._connections.of(far.transport.local_id)
                assert muxer is not None
                assert vars(muxer.secured_conn)["negotiated_security_protocol"] == TLS_PROTOCOL
                assert isinstance(muxer.secured_conn, TlsConnection)

    run(scenario)


def test_a_node_reaches_a_peer_that_knows_noise_only() -> None:
    async def scenario() -> None:
        async with nodes(2, NetworkOptions(host="127.0.0.1", body_connections=False)) as (a, b):
            a.transport.serve("echo", echo)
            known: Any = a.transport._connections._swarm.upgrader.security_multistream
            del known.multiselect.handlers[TLS_PROTOCOL]
            await lives(b, a)
            muxer = b.transport._connections.of(a.transport.local_id)
            assert muxer is not None
            assert vars(muxer.secured_conn)["negotiated_security_protocol"] == NOISE

    run(scenario)
