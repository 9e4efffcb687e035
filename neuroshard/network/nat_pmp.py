"""Packets of the NAT Port Mapping Protocol (RFC 6886): bytes in, values out. The socket is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address
from struct import Struct
from typing import TypeAlias, TypeVar

from neuroshard.network.routers import Lease, RouterRefusedError

PORT = 5351  # of every gateway, UDP
MAX_PACKET_BYTES = 1100
SHORTEST_LEASE_SECONDS = 60  # anything shorter is not worth a packet every few seconds
LONGEST_LEASE_SECONDS = 7 * 86_400  # a gateway should not even give more than it was asked for
RESTART_TOLERANCE_SECONDS = 2.0  # section 3.6
_ANSWER = 128  # added to the operation of the question
_HEADER = Struct("!BBHI")  # version, operation, result, seconds since the gateway's table began
_HOST = Struct("!8x4s")
_MAPPING = Struct("!8xHHI")  # inner port, outer port, lifetime
_QUESTION = Struct("!BB2xHHI")
_Answer = TypeVar("_Answer")


class Operation(IntEnum):
    """What a gateway can be asked."""

    EXTERNAL_HOST = 0
    MAP_TCP = 2


@dataclass(frozen=True)
class Refusal:
    """A gateway's answer that it does not."""

    result: int
    epoch: int

    def error(self) -> RouterRefusedError:
        """For whoever asked."""
        return RouterRefusedError(f"The router refuses: {_RESULTS.get(self.result, f'result {self.result}')}.")


@dataclass(frozen=True)
class ExternalHost:
    """A gateway's address outside."""

    host: str
    epoch: int


@dataclass(frozen=True)
class Mapping:
    """A port that a gateway passes on, as it says."""

    inner: int
    outer: int
    seconds: int
    epoch: int

    def lease(self) -> Lease:
        """As a lease that can be used. Raises RouterRefusedError for one that cannot."""
        if self.outer == 0:
            raise RouterRefusedError("The router says that it opened port 0.")
        if not SHORTEST_LEASE_SECONDS <= self.seconds <= LONGEST_LEASE_SECONDS:
            raise RouterRefusedError(f"The router says that it opened a port for {self.seconds} s.")
        return Lease(self.inner, self.outer, float(self.seconds))


@dataclass(frozen=True)
class SeenEpoch:
    """What a gateway said of its table's age, and when (seconds of any steady clock)."""

    epoch: int
    at: float

    def has_restarted(self, epoch: int, now: float) -> bool:
        """Whether a later word means that the gateway lost its table between; clocks may differ by an eighth."""
        return epoch < self.epoch + (now - self.at) * 7 / 8 - RESTART_TOLERANCE_SECONDS


Reader: TypeAlias = Callable[[bytes], _Answer | Refusal | None]
"""What a packet says; None when it answers another question, or is none of this protocol."""


def external_host_question() -> bytes:
    """Ask for the gateway's address outside."""
    return bytes((0, Operation.EXTERNAL_HOST))


def mapping_question(inner: int, wish: int, seconds: int) -> bytes:
    """Ask for a TCP port; 0 seconds and the wish 0 give it back."""
    return _QUESTION.pack(0, Operation.MAP_TCP, inner, wish, seconds)


def read_external_host(packet: bytes) -> ExternalHost | Refusal | None:
    """The answer to `external_host_question`."""
    header = _header(packet, Operation.EXTERNAL_HOST)
    if header is None or isinstance(header, Refusal):
        return header
    if len(packet) < _HOST.size:
        return None
    (host,) = _HOST.unpack_from(packet)
    return ExternalHost(str(IPv4Address(host)), header)


def read_mapping(packet: bytes, inner: int) -> Mapping | Refusal | None:
    """The answer to `mapping_question` for this inner port. A refusal does not always name the port."""
    header = _header(packet, Operation.MAP_TCP)
    if header is None or isinstance(header, Refusal):
        return header
    if len(packet) < _MAPPING.size:
        return None
    told, outer, seconds = _MAPPING.unpack_from(packet)
    return Mapping(inner, outer, seconds, header) if told == inner else None


def _header(packet: bytes, operation: Operation) -> int | Refusal | None:
    """The epoch of a good answer."""
    if len(packet) < _HEADER.size:
        return None
    version, answered, result, epoch = _HEADER.unpack_from(packet)
    if version != 0 or answered != _ANSWER + operation:
        return None
    return Refusal(result, epoch) if result else epoch


_RESULTS = {
    1: "it speaks another version",
    2: "its owner switched this off",
    3: "it has no connection itself",
    4: "it has no port left",
    5: "it does not know how",
}
