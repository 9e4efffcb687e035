"""The greeting on a new connection of the pool: each side says which memory of the other side it has.

    dialler  -> listener   its session
    listener -> dialler    the verdict, its session

A session is a number that identifies a side's memory of the other side's transfers. It changes when that memory is
lost, also after a restart of the process. The security upgrade below has proved both nodes already.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from neuroshard.network.pool.options import ConnectionLostError, PeerFullError
from neuroshard.network.tcp_options import TcpInfo

_SESSION_BYTES = 8


class SecureStream(Protocol):
    """An authenticated and encrypted connection; one task may send while another one receives."""

    heard_at: float  # when bytes came or went last

    @property
    def ip(self) -> str:
        """IP address of the other side, "" through a relay."""
        ...

    async def receive_some(self, memory: memoryview) -> int:
        """Wait for bytes and put some into `memory`. Raises ConnectionLostError, also at the end."""
        ...

    async def send_all(self, *views: bytes | memoryview) -> None:
        """Hand all bytes to the system. Raises ConnectionLostError."""
        ...

    def close(self) -> None:
        """Close it; a task that waits for it gets ConnectionLostError."""
        ...

    def tcp_info(self) -> TcpInfo | None:
        """The system's measurements, where it has any."""
        ...


async def receive_exactly(stream: SecureStream, memory: memoryview) -> None:
    """Fill `memory`. Raises ConnectionLostError."""
    filled = 0
    while filled < len(memory):
        filled += await stream.receive_some(memory[filled:])


async def receive_bytes(stream: SecureStream, count: int) -> bytes:
    """Receive exactly `count` bytes. Raises ConnectionLostError."""
    data = bytearray(count)
    await receive_exactly(stream, memoryview(data))
    return bytes(data)


class GreetingVerdict(IntEnum):
    """The listener's answer."""

    WELCOME = 0
    FULL = 1  # no more connections now
    UNWELCOME = 2


@dataclass(frozen=True)
class Sessions:
    """The session numbers that both sides sent on a connection."""

    here: int
    there: int


async def greet_as_dialler(stream: SecureStream, session: int) -> Sessions:
    """Say which session this side has. Raises PeerFullError when the peer has no room, or ConnectionLostError."""
    await stream.send_all(session.to_bytes(_SESSION_BYTES, "little"))
    answer = await receive_bytes(stream, 1 + _SESSION_BYTES)
    if answer[0] == GreetingVerdict.WELCOME:
        return Sessions(session, int.from_bytes(answer[1:], "little"))
    if answer[0] == GreetingVerdict.FULL:
        raise PeerFullError("the peer has no room for another connection")
    raise ConnectionLostError("the peer does not accept this node")


async def greet_as_listener(stream: SecureStream, verdict: GreetingVerdict, session: int) -> Sessions:
    """Answer a dialler. Raises ConnectionLostError, also after a verdict that refuses."""
    there = int.from_bytes(await receive_bytes(stream, _SESSION_BYTES), "little")
    await stream.send_all(bytes((verdict,)) + session.to_bytes(_SESSION_BYTES, "little"))
    if verdict is not GreetingVerdict.WELCOME:
        raise ConnectionLostError(f"the dialler was refused: {verdict.name.lower()}")
    return Sessions(session, there)
