"""NAT-PMP (RFC 6886): packets as values, and the client of a router that supports it.

The client ignores the router's multicast announcements. The owner of a lease checks it at intervals instead.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from ipaddress import IPv4Address
from struct import Struct
from typing import Final, TypeAlias, TypeVar

import anyio
import trio

from neuroshard.network.nat.router import Lease, NoRouterError, RouterRefusedError, default_gateway

PORT = 5351  # of every gateway, UDP
MAX_PACKET_BYTES = 1100
SHORTEST_LEASE_SECONDS = 60  # anything shorter would mean a packet every few seconds
LONGEST_LEASE_SECONDS = 7 * 86_400  # a gateway should not grant more than was requested
RESTART_TOLERANCE_SECONDS = 2.0  # section 3.6
_ANSWER = 128  # added to the operation of the request
_HEADER = Struct("!BBHI")  # version, operation, result, seconds since the start of the gateway's table
_HOST = Struct("!8x4s")
_MAPPING = Struct("!8xHHI")  # inner port, outer port, lifetime
_QUESTION = Struct("!BB2xHHI")
_Answer = TypeVar("_Answer")


class NatPmpOperation(IntEnum):
    """The operations of a gateway."""

    EXTERNAL_HOST = 0
    MAP_TCP = 2


@dataclass(frozen=True)
class NatPmpRefusal:
    """A gateway's answer that refuses a request."""

    result: int
    epoch: int

    def error(self) -> RouterRefusedError:
        """The exception for the caller."""
        return RouterRefusedError(f"The router refuses: {_RESULTS.get(self.result, f'result {self.result}')}.")


@dataclass(frozen=True)
class ExternalHost:
    """A gateway's external address."""

    host: str
    epoch: int


@dataclass(frozen=True)
class MappedPort:
    """A mapped port, as the gateway reports it."""

    inner: int
    outer: int
    seconds: int
    epoch: int

    def lease(self) -> Lease:
        """The mapping as a usable lease. Raises RouterRefusedError if it cannot be used."""
        if self.outer == 0:
            raise RouterRefusedError("The router reports that it opened port 0.")
        if not SHORTEST_LEASE_SECONDS <= self.seconds <= LONGEST_LEASE_SECONDS:
            raise RouterRefusedError(f"The router reports that it opened a port for {self.seconds} s.")
        return Lease(self.inner, self.outer, float(self.seconds))


@dataclass(frozen=True)
class SeenEpoch:
    """The age of the gateway's table as it reported it, and when (seconds of any steady clock)."""

    epoch: int
    at: float

    def has_restarted(self, epoch: int, now: float) -> bool:
        """Whether a later report shows that the gateway lost its table in between; clocks may differ by 1/8."""
        return epoch < self.epoch + (now - self.at) * 7 / 8 - RESTART_TOLERANCE_SECONDS


Reader: TypeAlias = Callable[[bytes], _Answer | NatPmpRefusal | None]
"""Parses a packet; None if it answers another request, or is not a packet of this protocol."""


def external_host_question() -> bytes:
    """Request for the gateway's external address."""
    return bytes((0, NatPmpOperation.EXTERNAL_HOST))


def mapping_question(inner: int, suggested_port: int, seconds: int) -> bytes:
    """Request for a TCP port. A lifetime of 0 s with the preferred port 0 deletes the mapping."""
    return _QUESTION.pack(0, NatPmpOperation.MAP_TCP, inner, suggested_port, seconds)


def read_external_host(packet: bytes) -> ExternalHost | NatPmpRefusal | None:
    """Parse the answer to `external_host_question`."""
    header = _header(packet, NatPmpOperation.EXTERNAL_HOST)
    if header is None or isinstance(header, NatPmpRefusal):
        return header
    if len(packet) < _HOST.size:
        return None
    (host,) = _HOST.unpack_from(packet)
    return ExternalHost(str(IPv4Address(host)), header)


def read_mapping(packet: bytes, inner: int) -> MappedPort | NatPmpRefusal | None:
    """Parse the answer to `mapping_question` for this inner port. A refusal does not always name the port."""
    header = _header(packet, NatPmpOperation.MAP_TCP)
    if header is None or isinstance(header, NatPmpRefusal):
        return header
    if len(packet) < _MAPPING.size:
        return None
    mapped, outer, seconds = _MAPPING.unpack_from(packet)
    return MappedPort(inner, outer, seconds, header) if mapped == inner else None


def _header(packet: bytes, operation: NatPmpOperation) -> int | NatPmpRefusal | None:
    """The epoch of a successful answer."""
    if len(packet) < _HEADER.size:
        return None
    version, answered, result, epoch = _HEADER.unpack_from(packet)
    if version != 0 or answered != _ANSWER + operation:
        return None
    return NatPmpRefusal(result, epoch) if result else epoch


_RESULTS = {
    1: "it supports another version of the protocol",
    2: "its owner turned this off",
    3: "it has no internet connection",
    4: "it has no port left",
    5: "it does not support this operation",
}


# waits for an answer before the request is repeated: section 3.1, with fewer attempts
WAITS_SECONDS: Final = (0.25, 0.5, 1.0, 2.0)
CLOSING_WAITS_SECONDS: Final = WAITS_SECONDS[:2]  # a node that stops must not wait long
_Reply = TypeVar("_Reply", ExternalHost, MappedPort)


class NatPmpRouter:
    """The gateway at one address. One request at a time; only packets from that address and port are read."""

    def __init__(self, gateway: str, *, port: int = PORT, waits: Sequence[float] = WAITS_SECONDS) -> None:
        self._endpoint = (gateway, port)
        self._waits = tuple(waits)
        self._turn = anyio.Lock()
        self._seen: SeenEpoch | None = None
        self._restarts = 0
        self._opened_after: dict[int, int] = {}  # number of restarts, by inner port
        self._local_host = ""

    @property
    def local_host(self) -> str:
        """This computer's address as the router sees it; empty before the first request."""
        return self._local_host

    async def external_host(self) -> str:
        """The router's external address. Raises RouterRefusedError."""
        return (await self._ask(external_host_question(), read_external_host)).host

    async def open(self, inner: int, suggested_port: int, seconds: int) -> Lease:
        """Map a port to this computer. Raises RouterRefusedError, also for an inconsistent answer."""
        mapping = await self._ask(mapping_question(inner, suggested_port, seconds), partial(read_mapping, inner=inner))
        lease = mapping.lease()
        self._opened_after[inner] = self._restarts
        return lease

    async def keeps(self, lease: Lease) -> bool:
        """Whether the router has not restarted since the lease, by its last answer."""
        await anyio.lowlevel.checkpoint()
        return self._opened_after.get(lease.inner) == self._restarts

    async def close(self, lease: Lease) -> None:
        """Delete a mapping. Raises RouterRefusedError."""
        read = partial(read_mapping, inner=lease.inner)
        await self._ask(mapping_question(lease.inner, 0, 0), read, self._waits[: len(CLOSING_WAITS_SECONDS)])
        self._opened_after.pop(lease.inner, None)

    async def _ask(self, question: bytes, read: Reader[_Reply], waits: Sequence[float] | None = None) -> _Reply:
        async with self._turn:
            try:
                answer = await self._answer(question, read, waits or self._waits)
            except OSError as error:  # also when the gateway reports that the port is closed
                raise NoRouterError(f"No router answers by NAT-PMP: {error.strerror or error}.") from error
        if answer is None:
            raise NoRouterError("No router answers by NAT-PMP.")
        self._note(answer.epoch)
        if isinstance(answer, NatPmpRefusal):
            raise answer.error()
        return answer

    async def _answer(
        self, question: bytes, read: Reader[_Reply], waits: Sequence[float]
    ) -> _Reply | NatPmpRefusal | None:
        """The first packet that answers the request; None if none came in time. Raises OSError."""
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            await sock.connect(self._endpoint)  # the system then drops packets of other hosts
            self._local_host = str(sock.getsockname()[0])
            for seconds in waits:
                await sock.send(question)
                with anyio.move_on_after(seconds):
                    while True:
                        answer = read(await sock.recv(MAX_PACKET_BYTES))
                        if answer is not None:
                            return answer
        return None

    def _note(self, epoch: int) -> None:
        now = anyio.current_time()
        if self._seen is not None and self._seen.has_restarted(epoch, now):
            self._restarts += 1
        self._seen = SeenEpoch(epoch, now)


async def find_nat_pmp_router() -> NatPmpRouter:
    """The router towards the internet, if it answers. Raises RouterRefusedError."""
    gateway = default_gateway()
    if gateway is None:
        raise NoRouterError("No router leads to the internet.")
    router = NatPmpRouter(gateway)
    try:
        await router.external_host()
    except NoRouterError:
        raise
    except RouterRefusedError as error:
        raise NoRouterError(f"By NAT-PMP: {error}") from error
    return router
