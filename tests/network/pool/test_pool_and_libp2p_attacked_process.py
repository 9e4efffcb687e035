"""A node that trains, in a process of its own, attacked in many ways at once: it goes on, within its memory."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from struct import pack
from typing import Any

import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from msgspec.structs import replace

from benchmarks.friends import BEFORE_EVERY_TEST, invitation_to
from benchmarks.node_process import TOKEN, NodeProcess, running_node
from benchmarks.peer_network_process import status as some_status
from neuroshard.errors import NeuroShardError
from neuroshard.identity import Wallet, parse_token
from neuroshard.membership.announcements import report_topic
from neuroshard.membership.claim_intake import signed_announcement, signed_report
from neuroshard.membership.handshake import HANDSHAKE, HANDSHAKE_LIMITS, HandshakeMessage
from neuroshard.messages import Frame
from neuroshard.network import Network, PeerRefusedError, ScoreReason
from neuroshard.network.libp2p import NetworkOptions, libp2p_network
from neuroshard.network.libp2p.bodies import CONNECT_KIND, dialled, upgraded_for_bodies
from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.negotiation import proposal
from neuroshard.network.libp2p.transport import FRAME_PROTOCOL
from neuroshard.network.pool.greeting import greet_as_dialler, receive_bytes
from neuroshard.network.pool.options import ConnectionLostError
from neuroshard.network.pool.transfers import PacketKind, packet
from neuroshard.node.peer_network import own_announcement, own_report
from neuroshard.types import NodeId, RunId
from tests.worlds.claims import identity_of
from tests.worlds.network_nodes import upgrader_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

MEMORY_MB = 500  # of `quick`
ATTACK_SECONDS = 10.0
SILENT_SOCKETS = 200
LIARS = 3
REPEATER, STRANGER = 70, 80  # who bring claims that are signed well
PLAINTEXT = b"\x13/multistream/1.0.0\n\x11/plaintext/2.0.0\n"
OVERSIZED_HEADER = b"NSHF\1\0\4\0" + (2**30).to_bytes(4, "little") + bytes(8) + b"echo"
LIES = (bytes(100), OVERSIZED_HEADER, Random(1).randbytes(5000))
PACKETS = (
    packet(PacketKind.OFFER, 1, bytes(100)),  # no frame
    packet(PacketKind.OFFER, 1, OVERSIZED_HEADER),
    pack("<BBHIQQ", PacketKind.OFFER, 0, 0, 2**30, 1, 0),  # a head of 1 GiB
    b"\xff" * 24,
)


@dataclass(frozen=True)
class Victim:
    """Where the node is reached."""

    node_id: NodeId
    address: str
    run_id: RunId
    endpoint: tuple[str, int]


def test_a_training_node_goes_on_while_it_is_attacked(quick: list[str], tmp_path: Path) -> None:
    with running_node(tmp_path, quick, fresh=True) as node:
        before = node.wait_for(
            "address and steps", lambda s: bool(s["network"]["addresses"] and s["training"]["steps"])
        )
        was_refused = refusals(before)
        answered, lowest = trio.run(attack, node, before)
        assert answered >= 10
        assert lowest < -50  # of the member who repeats its claims
        assert node.get("/health")["status"] == "ok"
        after = node.wait_for("new steps", lambda s: s["training"]["steps"] > before["training"]["steps"] + 50, 20)
        assert after["state"] == "training"
        told = refusals(after) - was_refused
        assert told[ScoreReason.MALFORMED_CLAIM] >= 1
        assert told[ScoreReason.REPLAYED_CLAIM] >= 3
        assert told[ScoreReason.FOREIGN_CLAIM] >= 3
        assert told[ScoreReason.MALFORMED_FRAME] >= LIARS
        assert after["network"]["banned_peers"] > LIARS + 1  # the liars over libp2p, and two who repeat claims
        assert after["memory"]["peak_mb"] <= MEMORY_MB
        assert peak_megabytes(node) <= MEMORY_MB
        assert node.stop() == 0


def refusals(status: dict[str, Any]) -> Counter[str]:
    """How often each thing was refused, as the status tells it."""
    return Counter(dict(status["network"]["refused"]))


def peak_megabytes(node: NodeProcess) -> float:
    """Most memory the process has held, as the kernel counts it; 0 where it does not."""
    file = Path(f"/proc/{node.process.pid}/status")
    lines = file.read_text("ascii").splitlines() if file.exists() else []
    return sum(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM"))


async def attack(node: NodeProcess, status: dict[str, Any]) -> tuple[int, float]:
    """Everything at once for a while: how often the node answered its owner, and the lowest score of a member."""
    address = status["network"]["addresses"][0]
    victim = Victim(
        NodeId(status["node_id"]),
        address,
        RunId(status["run"]["run_id"]),
        ("127.0.0.1", int(address.split("/")[4])),
    )
    answered, lowest = 0, 0.0
    async with AsyncExitStack() as stack:
        # first, because silent sockets take every place for handshakes from one address
        liars = [await stack.enter_async_context(peer_of(victim, 20 + number)) for number in range(LIARS)]
        gossiper, _ = await stack.enter_async_context(peer_of(victim, 60))
        repeaters = [await stack.enter_async_context(peer_of(victim, number)) for number in (REPEATER, STRANGER)]
        async with trio.open_nursery() as nursery:
            for _, muxer in liars:
                nursery.start_soon(lie_over_libp2p, muxer)
            nursery.start_soon(spread_claims, gossiper, report_topic(victim.run_id))
            nursery.start_soon(repeat_claims, repeaters[0][0], victim)
            nursery.start_soon(bring_foreign_claims, repeaters[1][0], victim)
            for number in range(LIARS):
                nursery.start_soon(lie_over_the_pool, victim, 40 + number)
            await trio.sleep(2)
            sockets = silent_sockets(victim.endpoint)
            stack.callback(close_all, sockets)
            nursery.start_soon(send_garbage, victim.endpoint)
            nursery.start_soon(drip, victim.endpoint)
            ends = time.monotonic() + ATTACK_SECONDS
            while time.monotonic() < ends:
                assert (await trio.to_thread.run_sync(node.get, "/health"))["status"] == "ok"
                answered += 1
                members = (await trio.to_thread.run_sync(node.get, "/api/peers"))["peers"]
                lowest = min([lowest, *(member["score"] for member in members)])
                await trio.sleep(0.3)
            nursery.cancel_scope.cancel()
    assert len(sockets) > SILENT_SOCKETS // 2
    async with peer_of(victim, 90) as (honest, _):  # who behaves is still served
        with suppress(PeerRefusedError):  # it has not dialled this peer
            await honest.transport.request(victim.node_id, Frame(CONNECT_KIND), timeout_seconds=60)
    return answered, lowest


@asynccontextmanager
async def peer_of(victim: Victim, number: int) -> AsyncIterator[tuple[Network, BoundedMuxer]]:
    """A stranger with a good key, connected with the victim."""
    async with libp2p_network(identity_of(number), NetworkOptions(host="127.0.0.1", body_connections=False)) as network:
        await network.transport.connect(victim.address)
        muxer = network.transport._connections.of(victim.node_id)
        assert isinstance(muxer, BoundedMuxer)
        yield network, muxer


def silent_sockets(port: tuple[str, int]) -> list[socket.socket]:
    """Connections that never say anything."""
    opened: list[socket.socket] = []
    for _ in range(SILENT_SOCKETS):
        with suppress(OSError):
            opened.append(socket.create_connection(port, timeout=1))
    return opened


def close_all(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


async def send_garbage(port: tuple[str, int]) -> None:
    """Bytes that are no handshake, and a client without encryption."""
    chance = Random(port[1])
    while True:
        for data in (chance.randbytes(4096), PLAINTEXT, b"GET / HTTP/1.1\r\n\r\n", bytes(70_000)):
            with suppress(OSError, trio.BrokenResourceError):
                async with await trio.open_tcp_stream(*port) as stream:
                    await stream.send_all(data)
                    with trio.move_on_after(0.2):
                        assert b"/plaintext" not in bytes(await stream.receive_some(100))
        await trio.sleep(0.05)


async def drip(port: tuple[str, int]) -> None:
    """One byte of a handshake now and then."""
    while True:
        with suppress(OSError, trio.BrokenResourceError):
            async with await trio.open_tcp_stream(*port) as stream:
                for byte in PLAINTEXT:
                    await stream.send_all(bytes((byte,)))
                    await trio.sleep(0.4)


async def lie_over_libp2p(muxer: BoundedMuxer) -> None:
    """Streams with bytes that are no request, until the node has had enough."""
    with suppress(BaseLibp2pError):  # banned
        for turn in range(100):
            stream = await muxer.open_stream()
            await stream.write(proposal(FRAME_PROTOCOL) + LIES[turn % len(LIES)], is_last=True)
            await stream.wait_ended()


async def lie_over_the_pool(victim: Victim, number: int) -> None:
    """Offers of nothing and packets that cannot be, over connections with a good key."""
    upgrader = upgrader_of(identity_of(number))
    async with peer_of(victim, number):
        while True:
            for data in PACKETS:
                with suppress(OSError, ConnectionLostError):
                    stream = await upgraded_for_bodies(upgrader, victim.node_id, await dialled(victim.endpoint))
                    try:
                        await greet_as_dialler(stream, 0)
                        await stream.send_all(data)
                        with trio.move_on_after(1):
                            await receive_bytes(stream, 24)
                    finally:
                        stream.close()
            await trio.sleep(0.05)


async def spread_claims(network: Network, topic: str) -> None:
    """Reports that nobody signed."""
    network.gossip.subscribe(topic, lambda _, __: True)
    for turn in range(1000):
        await network.gossip.publish(topic, b"no claim %d" % turn)
        await trio.sleep(0.2)


def own_claim(number: int, run_id: RunId, steps: int) -> bytes:
    """A report of a peer under its own signature, of a node that holds no layers; every one has the same number."""
    report = replace(own_report(some_status(), run_id), sequence=7, steps=steps, layers=None, roles=())
    return signed_report(identity_of(number), report, time.time())


async def repeat_claims(network: Network, victim: Victim) -> None:
    """A member's reports: the first is fine, all others come under the number that it had."""
    await join(network, victim)
    topic = report_topic(victim.run_id)
    network.gossip.subscribe(topic, lambda _, __: True)
    for turn in range(1000):
        await network.gossip.publish(topic, own_claim(REPEATER, victim.run_id, turn))
        await trio.sleep(0.1)


async def join(network: Network, victim: Victim) -> None:
    """The member's handshake, with the pass that the owner of the run gave to its wallet."""
    identity = identity_of(REPEATER)
    invitation = invitation_to(victim.run_id, Wallet.from_secret(parse_token(TOKEN)))
    shown = invitation.pass_for(identity.delegation.grant.wallet_public_key, BEFORE_EVERY_TEST)
    words = own_announcement(some_status(), victim.run_id, parameters_version=1, addresses=(), member_pass=shown)
    hello = HandshakeMessage(signed_announcement(identity, words, time.time()), None, ())
    frame = Frame(HANDSHAKE, hello)
    await network.transport.request(victim.node_id, frame, reply=HANDSHAKE_LIMITS, timeout_seconds=10)


async def bring_foreign_claims(network: Network, victim: Victim) -> None:
    """Hellos with the announcement of somebody else, which holds."""
    words = own_announcement(some_status(), victim.run_id, parameters_version=1, addresses=())
    somebody = signed_announcement(identity_of(STRANGER + 1), words, time.time())
    for _ in range(1000):
        with suppress(NeuroShardError):  # refused, and banned in the end
            await network.transport.request(
                victim.node_id, Frame(HANDSHAKE, HandshakeMessage(somebody, None, ())), timeout_seconds=5
            )
        await trio.sleep(0.2)
