"""Many streams over one connection (yamux). Every buffer is bounded, and a cancelled task never splits a frame.

libp2p's own muxer does not enforce the windows it grants and gives up on a window that stays closed for 5 s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import anyio
import trio
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from multiaddr import Multiaddr

from neuroshard.network.libp2p.addresses import is_near
from neuroshard.network.libp2p.peer_limits import ReceiveMemory, StreamAdmission, contain_errors
from neuroshard.network.libp2p.streams import (
    ACK,
    DATA,
    FIN,
    FIRST_PING_SECONDS,
    GO_AWAY,
    NORMAL_TERMINATION,
    PING,
    PROTOCOL_ERROR,
    RST,
    SYN,
    WINDOW_UPDATE,
    Event,
    FrameHeader,
    FrameParser,
    RoundTrips,
    YamuxError,
    YamuxStream,
    header_bytes,
)
from neuroshard.network.reputation import ScoreReason

PING_SECONDS = 45.0
MAX_SILENT_PERIODS = 2  # a peer that sends nothing for this number of periods, not even answers to pings, is gone
GOODBYE_SECONDS = 0.2
WRITE_SECONDS = 60.0  # a frame of 64 KiB that takes longer than this will not arrive
LINGER_SECONDS = 60.0  # how long the other side may leave its half of a stream open
REFUSED_STREAMS_OF_FLOOD = 64  # some streams above the limit may be an accident; this number is a flood
MAX_UNACCEPTED_STREAMS = 256
MAX_WAITING_CONTROL_FRAMES = 4096
MAX_WAITING_DATA_FRAMES = 8


@dataclass(frozen=True)
class MuxerOptions:
    """Options that the muxers of one node share."""

    admission: StreamAdmission
    spend: Callable[[int], Awaitable[None]] | None = None  # waits until this number of bytes may be uploaded
    now: Callable[[], float] = trio.current_time
    report: Callable[[ID, ScoreReason], None] | None = None
    memory: ReceiveMemory = field(default_factory=ReceiveMemory)


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A queued frame."""

    frame: bytes
    stream: YamuxStream | None = None
    holds_slot: bool = False


class BoundedMuxer(IMuxedConn):
    """The streams of one connection."""

    def __init__(
        self,
        conn: ISecureConn,
        peer_id: ID,
        options: MuxerOptions | None = None,
        when_closed: Callable[[], None] | None = None,
    ) -> None:
        self.secured_conn = conn
        self.peer_id = peer_id
        self.event_started = trio.Event()
        # set by libp2p; the accept loop gets the same signal
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self.round_trips = RoundTrips()
        self.end_reason = ""
        # whether it uses the listening port, so that other peers see the same external port
        self.is_from_listening_port = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self._options = options or MuxerOptions(StreamAdmission())
        self._when_closed = when_closed
        self.opened_at = self._options.now()
        self.used_at = trio.current_time()  # when a stream was last opened by either side, or a body was on its way
        self._streams: dict[int, YamuxStream] = {}
        self._next_stream_id = 1 if conn.is_initiator else 2
        self._new_streams, self._accepted = trio.open_memory_channel[IMuxedStream](MAX_UNACCEPTED_STREAMS)
        self._control: deque[bytes] = deque()
        self._data: deque[_Waiting] = deque()
        self._data_slots = trio.Semaphore(MAX_WAITING_DATA_FRAMES)
        self._work = trio.Event()
        self._idle = trio.Event()  # no frame waits to be written
        self._scope = anyio.CancelScope()
        self._closed = trio.Event()
        self._pong = trio.Event()
        self._ping_number = 0
        self._writing_since = inf
        self._refused_streams = 0

    # Methods called by libp2p

    @property
    def is_initiator(self) -> bool:
        return self.secured_conn.is_initiator

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and not self._closed.is_set()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    async def start(self) -> None:
        """Move frames until the connection ends. The end of the connection is not an error."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    self.event_started.set()
                    for work in (self._read, self._write, self._keep_alive):
                        tasks.start_soon(self._until_it_ends, work)
        finally:
            self.event_started.set()
            self._end()
            with anyio.move_on_after(1, shield=True):
                await self._close_socket()

    async def close(self) -> None:
        """Send a goodbye if that does not block, and end the connection."""
        if not self._closed.is_set():
            await self._say_goodbye(NORMAL_TERMINATION)
        self._scope.cancel()
        self._end()
        await self._close_socket()

    async def wait_closed(self) -> None:
        """Return when the connection ended."""
        await self._closed.wait()

    async def open_stream(self) -> YamuxStream:
        """Open a stream; the other side sees it with the first write. Raises MuxedConnUnavailable."""
        await trio.lowlevel.checkpoint()
        if not self.is_established:
            raise MuxedConnUnavailable("the connection is closed")
        stream_id = self._next_stream_id
        self._next_stream_id += 2
        self.note_use()
        stream = YamuxStream(self, self, stream_id, is_outbound=True)
        self._streams[stream_id] = stream
        return stream

    async def accept_stream(self) -> IMuxedStream:
        """The next stream of the other side. Raises MuxedConnUnavailable at the end of the connection."""
        try:
            return await self._accepted.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise MuxedConnUnavailable("the connection is closed") from None

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.secured_conn.get_transport_addresses()

    @cached_property
    def remote_text(self) -> str:
        """The same as a multiaddr's text, "" if unknown. Built once, because it is read several times per second."""
        return next((str(address) for address in self.get_transport_addresses()), "")

    @cached_property
    def is_far(self) -> bool:
        """Whether the other side was outside this computer's own networks when it connected."""
        address = self.get_remote_address()
        return address is not None and not is_near(address[0])

    def get_connection_type(self) -> ConnectionType:
        return self.secured_conn.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.secured_conn.get_remote_address()

    def note_use(self) -> None:
        """Count the connection as used now."""
        self.used_at = trio.current_time()

    # Methods called by streams

    def send_control(self, frame: bytes) -> None:
        """Queue a small frame. If too many are waiting because the peer reads none, the connection ends."""
        if len(self._control) >= MAX_WAITING_CONTROL_FRAMES:
            self._scope.cancel()
        elif not self._closed.is_set():
            self._control.append(frame)
            self._wake_writer()

    async def send_data(self, stream: YamuxStream, frame: bytes) -> None:
        """Queue a frame once there is space for it. Raises MuxedConnUnavailable when the connection ends."""
        await self._data_slots.acquire()
        if self._closed.is_set():
            self._data_slots.release()  # wakes the next waiting writer
            raise MuxedConnUnavailable("the connection is closed")
        self._queue(_Waiting(frame, stream, holds_slot=True))

    def send_end(self, stream: YamuxStream, frame: bytes) -> None:
        """Queue the small frame that ends a stream, behind all its waiting data."""
        self._queue(_Waiting(frame, stream))

    def drop_waiting(self, stream: YamuxStream) -> None:
        """Drop the waiting frames of a stream."""
        for waiting in [waiting for waiting in self._data if waiting.stream is stream]:
            self._data.remove(waiting)
            if waiting.holds_slot:
                self._data_slots.release()

    def forget(self, stream: YamuxStream) -> None:
        """Remove a stream that is closed on both sides."""
        if self._streams.pop(stream.stream_id, None) is not None and not stream.is_outbound:
            self._options.admission.leave(self.peer_id)
        self._options.memory.leave(stream)

    def may_grow(self, stream: YamuxStream, byte_count: int) -> bool:
        """Whether the stream's window may grow by this number of bytes."""
        return self._options.memory.may_grow(stream, self.peer_id, byte_count)

    def count_unread(self, stream: YamuxStream, change: int) -> None:
        """Count bytes that wait to be read (negative: were read). This may end this stream or another one."""
        if change > 0 and stream.stream_id in self._streams:
            self._options.memory.arrived(stream, self.peer_id, change)
        elif change < 0:
            self._options.memory.taken(stream, -change)

    # Internals

    async def _until_it_ends(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            result = await contain_errors(work(), "A connection")  # users of its streams get the error there
            self.end_reason = self.end_reason or str(result or "silence")
        finally:
            self._scope.cancel()

    async def _read(self) -> None:
        parser = FrameParser()
        while True:
            data = await self.secured_conn.read()
            self.bytes_received += len(data)
            try:
                for event in parser.feed(data):
                    self._handle(event)
            except YamuxError:
                self._report(ScoreReason.MALFORMED_FRAME)
                await self._say_goodbye(PROTOCOL_ERROR)
                raise

    async def _say_goodbye(self, code: int) -> None:
        self._queue(_Waiting(header_bytes(GO_AWAY, 0, 0, code)))
        with trio.move_on_after(GOODBYE_SECONDS):
            await self._idle.wait()

    def _handle(self, event: Event) -> None:
        if isinstance(event, FrameHeader):
            if event.type == PING:
                self._handle_ping(event)
            elif event.type == GO_AWAY:
                raise MuxedConnUnavailable(f"the peer ended the connection with code {event.length}")
            else:
                self._handle_stream_frame(event)
        elif stream := self._streams.get(event.stream_id):
            stream.deliver(event.data)

    def _handle_stream_frame(self, header: FrameHeader) -> None:
        if header.flags & SYN:
            self._open_inbound(header)
        stream = self._streams.get(header.stream_id)
        if stream is None:
            if header.stream_id == 0:
                raise YamuxError("a frame for no stream")
            return  # closed here already: data under way is dropped
        if header.type == DATA:
            stream.announce(header.length)
        elif header.length:
            stream.extend_window(header.length)
        if header.flags & FIN:
            stream.end_reading()
        if header.flags & RST:
            stream.break_off()
            self.forget(stream)

    def _open_inbound(self, header: FrameHeader) -> None:
        is_theirs = header.stream_id % 2 == (0 if self.is_initiator else 1)
        if not is_theirs or header.stream_id in self._streams:
            raise YamuxError(f"stream {header.stream_id} cannot be opened by the peer")
        # a stream that is reset at once has already left the admission, but still waits to be accepted
        is_full = self._new_streams.statistics().current_buffer_used >= MAX_UNACCEPTED_STREAMS
        if is_full or not self._options.admission.enter(self.peer_id):
            self.send_control(header_bytes(WINDOW_UPDATE, RST, header.stream_id, 0))
            self._refused_streams += 1
            if self._refused_streams % REFUSED_STREAMS_OF_FLOOD == 0:
                self._report(ScoreReason.FLOOD)
            return
        self.note_use()
        stream = YamuxStream(self, self, header.stream_id, is_outbound=False)
        self._streams[header.stream_id] = stream
        self.send_control(header_bytes(WINDOW_UPDATE, ACK, header.stream_id, 0))
        self._new_streams.send_nowait(stream)

    def _report(self, reason: ScoreReason) -> None:
        if self._options.report is not None:
            self._options.report(self.peer_id, reason)

    def _handle_ping(self, header: FrameHeader) -> None:
        if header.flags & SYN:
            self.send_control(header_bytes(PING, ACK, 0, header.length))
        elif header.length == self._ping_number:
            self._pong.set()

    def _queue(self, waiting: _Waiting) -> None:
        if not self._closed.is_set():
            self._data.append(waiting)
            self._wake_writer()

    def _wake_writer(self) -> None:
        self._work.set()
        if self._idle.is_set():
            self._idle = trio.Event()

    async def _write(self) -> None:
        while True:
            while not self._control and not self._data:
                self._idle.set()
                await self._work.wait()
                self._work = trio.Event()
            frame = b"".join(self._taken_control()) or self._taken_data()
            if self._options.spend is not None:
                await self._options.spend(len(frame))
            self._writing_since = trio.current_time()
            await self.secured_conn.write(frame)
            self._writing_since = inf
            self.bytes_sent += len(frame)

    def _taken_control(self) -> list[bytes]:
        return [self._control.popleft() for _ in range(min(len(self._control), 1000))]

    def _taken_data(self) -> bytes:
        waiting = self._data.popleft()
        if waiting.holds_slot:
            self._data_slots.release()
        if waiting.stream is not None:
            waiting.stream.is_known_to_peer = True
        return waiting.frame

    async def _keep_alive(self) -> None:
        """Measure the round trip, detect a vanished peer, and end streams that one side left open."""
        silent_periods = 0
        while silent_periods < MAX_SILENT_PERIODS:
            received, began = self.bytes_received, trio.current_time()
            await self._ping()
            await trio.sleep_until(began + (PING_SECONDS if self.round_trips.are_enough else FIRST_PING_SECONDS))
            silent_periods = silent_periods + 1 if self.bytes_received == received else 0
            if trio.current_time() - self._writing_since > WRITE_SECONDS:
                return
            self._end_lingering(trio.current_time() - LINGER_SECONDS)

    async def _ping(self) -> None:
        self._ping_number = (self._ping_number + 1) % 2**32
        self._pong = trio.Event()
        started = trio.current_time()
        self.send_control(header_bytes(PING, SYN, 0, self._ping_number))
        with trio.move_on_after(PING_SECONDS) as waiting:
            await self._pong.wait()
        if not waiting.cancelled_caught:
            self.round_trips.add(trio.current_time() - started)

    def _end_lingering(self, before: float) -> None:
        for stream in tuple(self._streams.values()):
            if stream.closed_at is not None and stream.closed_at < before:
                stream.abandon()

    def _end(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._idle.set()
        for stream in tuple(self._streams.values()):
            stream.break_off()
            self.forget(stream)
        self._new_streams.close()
        self._data_slots.release()  # waiting writers find the connection closed
        if self._when_closed is not None:
            self._when_closed()

    async def _close_socket(self) -> None:
        await contain_errors(self.secured_conn.close(), "Closing")  # it may be closed already
