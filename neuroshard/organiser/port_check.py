"""The check from outside: whether a node answers at the address that sent its request, on the ports that it announces.

The organiser sends the first message of a Noise handshake (XX, as libp2p uses it) and reads the second one, which must
show the node's key. It has no node key of its own, needs no libp2p, and closes before the third message. Another
address than the sender's is never called, and of that only a public one: no network behind the organiser, and no
metadata service. An organiser that is served on loopback also checks loopback, and only then.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

import anyio
from anyio.abc import ByteReceiveStream
from cryptography.exceptions import InvalidTag
from noise.connection import Keypair, NoiseConnection
from noise.exceptions import NoiseInvalidMessage, NoiseValueError

from neuroshard.errors import NeuroShardError, UsageError
from neuroshard.identity import public_key_of
from neuroshard.identity.signing import verify_signature
from neuroshard.network.crowds import final_ip, network_of
from neuroshard.network.libp2p.addresses import Scope, parse_address, scope_of
from neuroshard.types import NodeId

CHECK_SECONDS = 5.0
AGAIN_SECONDS = 60.0  # between two checks of one address
MOST_PORTS = 2
MOST_AT_ONCE = 16  # checks; a joiner beyond is not checked
MOST_KNOWN = 8192  # addresses
MAX_MESSAGE_BYTES = 4096  # of a handshake
_NOISE: Final = b"Noise_XX_25519_ChaChaPoly_SHA256"
_PROPOSALS: Final = ("/multistream/1.0.0", "/noise")
_SIGNED: Final = b"noise-libp2p-static-key:"  # before the Noise key that a node's key signs
_ED25519: Final = b"\x08\x01\x12\x20"  # before a public key, in the encoding of libp2p


@dataclass(frozen=True)
class PortTarget:
    """A node that should answer at one IP address."""

    node: NodeId
    host: str
    ports: tuple[int, ...]


def port_target(node: NodeId, sender: str, addresses: Iterable[str]) -> PortTarget | None:
    """The ports to check at the sender of a request: those of direct addresses that the node announces for itself.

    None if there is none of the sender's IP version.
    """
    ports = dict[int, None]()
    for text in addresses:
        try:
            address = parse_address(text)
            version = ip_address(address.host).version
        except (UsageError, ValueError):
            continue
        if not address.is_relayed and address.peer == node and version == ip_address(sender).version:
            ports[address.port] = None
    return PortTarget(node, sender, tuple(ports)[:MOST_PORTS]) if ports else None


def may_be_checked(sender: str, *, is_local: bool) -> bool:
    """Whether the organiser may call the IP address of a sender: a public one, or loopback if `is_local`."""
    try:
        ip = ip_address(sender)
    except ValueError:
        return False
    return scope_of(sender) is Scope.WORLD or (is_local and ip == final_ip(ip) and ip.is_loopback)


class PortChecks:
    """Checks nodes, each address at most once in AGAIN_SECONDS. Belongs to the event loop."""

    def __init__(
        self,
        monotonic: Callable[[], float],
        *,
        is_local: bool = False,
        probe: Callable[[str, int, NodeId], Awaitable[bool]] | None = None,
    ) -> None:
        """`is_local`: this organiser serves its own computer only. `probe` replaces `shows_node`."""
        self._monotonic = monotonic
        self._is_local = is_local
        self._probe = probe or shows_node
        self._checked: OrderedDict[str, float] = OrderedDict()  # time of the last check, by host; IPv6: by /64
        self._running = 0

    async def reached(self, node: NodeId, sender: str | None, addresses: Iterable[str]) -> str | None:
        """The address at which a node answers at the sender's IP address; "" if it does not, None without a check."""
        if sender is None or not may_be_checked(sender, is_local=self._is_local):
            return None
        target = port_target(node, sender, addresses)
        if target is None or self._running >= MOST_AT_ONCE or not self._is_due(sender):
            return None
        self._running += 1
        try:
            return await self._first_answer(target)
        finally:
            self._running -= 1

    def _is_due(self, sender: str) -> bool:
        """Whether an address may be checked now; notes that it is."""
        now, host = self._monotonic(), network_of(sender, 32)
        if now - self._checked.get(host, -AGAIN_SECONDS) < AGAIN_SECONDS:
            return False
        self._checked[host] = now
        self._checked.move_to_end(host)
        if len(self._checked) > MOST_KNOWN:
            self._checked.popitem(last=False)
        return True

    async def _first_answer(self, target: PortTarget) -> str:
        found = list[str]()
        form = "ip6" if ":" in target.host else "ip4"
        with anyio.move_on_after(CHECK_SECONDS):
            async with anyio.create_task_group() as tasks:

                async def check(port: int) -> None:
                    if await self._probe(target.host, port, target.node):
                        found.append(f"/{form}/{target.host}/tcp/{port}/p2p/{target.node}")
                        tasks.cancel_scope.cancel()

                for port in target.ports:
                    tasks.start_soon(check, port)
        return found[0] if found else ""


async def shows_node(host: str, port: int, node: NodeId) -> bool:
    """Whether the program at an address shows the key of a node in a Noise handshake. The caller limits the time."""
    handshake = _Initiator()
    try:
        async with await anyio.connect_tcp(host, port) as stream:
            await stream.send(b"".join(map(_line, _PROPOSALS)))
            reader = _Reader(stream)
            for expected in _PROPOSALS:
                if await reader.take((await reader.take(1))[0]) != expected.encode() + b"\n":
                    return False
            await stream.send(_framed(handshake.first_message()))
            size = int.from_bytes(await reader.take(2))
            return size <= MAX_MESSAGE_BYTES and handshake.shows(await reader.take(size), node)
    except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
        return False


def _line(text: str) -> bytes:
    return bytes((len(text) + 1,)) + text.encode() + b"\n"


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(2) + message


class _Reader:
    """Exact numbers of bytes from a stream."""

    def __init__(self, stream: ByteReceiveStream) -> None:
        self._stream = stream
        self._buffer = b""

    async def take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._buffer += await self._stream.receive(MAX_MESSAGE_BYTES)
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken


class _Initiator:
    """The side of a Noise handshake that learns who answers."""

    def __init__(self) -> None:
        self._noise: Any = NoiseConnection.from_name(_NOISE)
        self._noise.set_keypair_from_private_bytes(Keypair.STATIC, os.urandom(32))  # for one handshake only
        self._noise.set_as_initiator()
        self._noise.start_handshake()

    def first_message(self) -> bytes:
        return bytes(self._noise.write_message(b""))

    def shows(self, message: bytes, node: NodeId) -> bool:
        """Whether the answer is authentic, and names a Noise key that the node's key signed."""
        try:
            payload = bytes(self._noise.read_message(message))
        except (NoiseInvalidMessage, NoiseValueError, InvalidTag, ValueError):  # ValueError: not a point of the curve
            return False
        noise_key: bytes = self._noise.noise_protocol.handshake_state.rs.public_bytes
        key, parts = public_key_of(node), _parts_of(payload)
        if parts.get(1) != _ED25519 + key:
            return False
        try:
            verify_signature(key, _SIGNED + noise_key, parts.get(2, b""))
        except NeuroShardError:
            return False
        return True


def _parts_of(payload: bytes) -> dict[int, bytes]:
    """The short byte strings of a protobuf message, by number; up to the first part of another form."""
    parts, at = dict[int, bytes](), 0
    while at + 2 <= len(payload) and payload[at] & 0x87 == 2 and payload[at + 1] < 0x80:
        number, size = payload[at] >> 3, payload[at + 1]
        parts[number] = payload[at + 2 : at + 2 + size]
        at += 2 + size
    return parts
