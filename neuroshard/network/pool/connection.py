"""One connection to a peer: a task that reads packets, a task that writes them, and the deadlines of both."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from math import inf
from typing import Protocol

import anyio
import trio

from neuroshard.network.limits import UploadPacer
from neuroshard.network.pool.greeting import SecureStream, receive_bytes, receive_exactly
from neuroshard.network.pool.options import ConnectionLostError, MisconductError, PoolOptions
from neuroshard.network.pool.transfers import HEADER_BYTES, OutgoingPacket, PacketHeader, PacketKind, parse_header
from neuroshard.network.reputation import ScoreReason

MAX_QUEUED_ANSWERS = 256
_PORTION_BYTES = 16 * 1024


class OfferReader(Protocol):
    """Takes the head of a frame as it arrives; it never keeps more than the limits of its kind allow."""

    def feed(self, data: memoryview) -> None:
        """The next bytes. Raises MisconductError."""
        ...

    def end(self) -> None:
        """All bytes were there. Raises MisconductError."""
        ...


class PacketHandler(Protocol):
    """Supplies and receives the packets on the connections to one peer."""

    def next_packet(self, connection: PoolConnection) -> OutgoingPacket | None:
        """The next packet to send over this connection; None if there is none."""
        ...

    def place(self, connection: PoolConnection, header: PacketHeader) -> memoryview | None:
        """Memory for a piece; None to drop it. Raises MisconductError."""
        ...

    def filled(self, connection: PoolConnection, header: PacketHeader) -> None:
        """The memory is filled. Raises MisconductError."""
        ...

    def read_offer(self, connection: PoolConnection, header: PacketHeader) -> OfferReader:
        """The reader of this offer."""
        ...

    def heard(self, connection: PoolConnection, header: PacketHeader, payload: bytes) -> None:
        """A small packet arrived. Raises MisconductError."""
        ...


class PoolConnection:
    """Owns its stream."""

    def __init__(
        self, number: int, stream: SecureStream, exchange: PacketHandler, pacer: UploadPacer, options: PoolOptions
    ) -> None:
        self.number = number
        self.stream = stream
        self.opened_at = self.heard_at = self.wrote_at = trio.current_time()
        self.bytes_sent = 0
        self.bytes_received = 0
        self.is_closed = False
        self.is_resting = False  # it sends no tensors: fewer connections do as well
        self._end: ConnectionLostError | None = None
        self._read_until = self._write_until = inf  # when the packet that is on its way must be complete
        self._exchange = exchange
        self._pacer = pacer
        self._options = options
        self._answers: deque[bytes] = deque()
        self._work = trio.lowlevel.ParkingLot()
        self._scratch = memoryview(bytearray(_PORTION_BYTES))

    @property
    def idle_since(self) -> float:
        """When the last packet came or went."""
        return max(self.heard_at, self.wrote_at)

    @property
    def has_nothing_to_write(self) -> bool:
        """Whether everything was handed to the system."""
        return bool(self._work)

    async def run(self) -> None:
        """Read and write until the connection ends; it is closed afterwards. Raises ConnectionLostError."""
        ends: list[ConnectionLostError] = []
        try:
            async with anyio.create_task_group() as tasks:
                for task in (self._read, self._write):
                    tasks.start_soon(_until_lost, task, ends, tasks.cancel_scope)
        finally:
            self.close()
        raise self._end or ends[0]

    def close(self, reason: ConnectionLostError | None = None) -> None:
        """End the connection at once; `run` raises the reason."""
        self._end = self._end or reason
        self.is_closed = True
        self.stream.close()

    def close_if_slow(self, now: float) -> None:
        """End it when a packet takes too long. Asked from time to time: a timer for each packet would cost more."""
        if now > min(self._read_until, self._write_until):
            self.close(MisconductError(ScoreReason.TOO_SLOW, "a peer is too slow"))

    def take_part(self, *, is_resting: bool) -> None:
        """Whether to send tensors."""
        was_resting, self.is_resting = self.is_resting, is_resting
        if was_resting and not is_resting:
            self.wake()

    def wake(self) -> None:
        """There may be something to send."""
        self._work.unpark_all()

    def answer(self, packet: bytes) -> None:
        """Queue a small packet, which goes before everything else. Ends the connection to a peer that floods."""
        if len(self._answers) >= MAX_QUEUED_ANSWERS:
            self.close(MisconductError(ScoreReason.FLOOD, "a peer asks faster than it reads the answers"))
            return
        self._answers.append(packet)
        self.wake()

    async def _write(self) -> None:
        while not self.is_closed:
            if self._answers:
                data = b"".join(self._answers)
                self._answers.clear()
                await self._send(OutgoingPacket((data,), len(data)))
            elif (packet := self._exchange.next_packet(self)) is not None:
                await self._send(packet)
            else:
                await self._work.park()
        raise ConnectionLostError("it was closed here")

    async def _send(self, packet: OutgoingPacket) -> None:
        await self._pacer.spend(packet.byte_count)
        self._write_until = trio.current_time() + self._options.seconds_for(packet.byte_count)
        await self.stream.send_all(*packet.views)
        self._write_until = inf
        self.bytes_sent += packet.byte_count
        self.wrote_at = trio.current_time()

    async def _read(self) -> None:
        data = bytearray(HEADER_BYTES)
        memory = memoryview(data)
        while True:
            count = await self.stream.receive_some(memory)  # as long as it takes: an idle peer is not a slow one
            self._read_until = trio.current_time() + self._options.seconds_for(HEADER_BYTES)
            await receive_exactly(self.stream, memory[count:])
            header = parse_header(data)
            self._read_until += header.length / self._options.min_bytes_per_second
            await self._receive(header)
            self._read_until = inf
            self.bytes_received += HEADER_BYTES + header.length
            self.heard_at = trio.current_time()

    async def _receive(self, header: PacketHeader) -> None:
        if header.kind is PacketKind.PIECE:
            memory = self._exchange.place(self, header)
            if memory is None:
                await self._receive_portions(header.length, _ignore)
            else:
                await receive_exactly(self.stream, memory)
                self._exchange.filled(self, header)
        elif header.kind is PacketKind.OFFER:
            reader = self._exchange.read_offer(self, header)
            await self._receive_portions(header.length, reader.feed)
            reader.end()
        else:
            payload = await receive_bytes(self.stream, header.length)
            self._exchange.heard(self, header, payload)

    async def _receive_portions(self, length: int, take: Callable[[memoryview], None]) -> None:
        while length:
            count = await self.stream.receive_some(self._scratch[:length])
            take(self._scratch[:count])
            length -= count


def _ignore(_: memoryview) -> None:
    """Drop bytes that are not needed."""


async def _until_lost(
    task: Callable[[], Awaitable[None]], ends: list[ConnectionLostError], both: anyio.CancelScope
) -> None:
    try:
        await task()
    except ConnectionLostError as error:
        ends.append(error)
    finally:
        both.cancel()
