"""The bookkeeping of transfers without sockets: whatever breaks, the frame arrives whole and little is sent twice."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.messages import (
    CHUNK_BYTES,
    DamagedChunkError,
    EncodedFrame,
    Frame,
    FrameDecoder,
    FrameHead,
    FrameLimits,
    TensorPart,
    TensorSpec,
    encode,
)
from neuroshard.network.limits import ByteBudget
from neuroshard.network.pool.options import MisconductError
from neuroshard.network.pool.transfers import (
    BLOCK_BYTES,
    EAGER_BLOCKS,
    HEADER_BYTES,
    MAX_SERIAL,
    Filled,
    IncomingTransfer,
    OutgoingPacket,
    OutgoingTransfer,
    PacketHeader,
    PacketKind,
    encode_masks,
    is_newer,
    next_serial,
    parse_header,
    parse_masks,
)
from neuroshard.types import NodeId

LIMITS = FrameLimits(max_body_bytes=2**30)


def frame_of(*sizes: int) -> Frame:
    random = Random(sum(sizes))
    parts = (
        TensorPart(TensorSpec(f"t{index}", "uint8", (size,)), random.randbytes(size))
        for index, size in enumerate(sizes)
    )
    return Frame("kind", {}, tuple(parts))


def head_of(frame: EncodedFrame) -> FrameHead:
    decoder = FrameDecoder(lambda _: LIMITS)
    decoder.feed(frame.head)
    assert decoder.head is not None
    return decoder.head


def settle(receiver: IncomingTransfer, filled: Filled) -> None:
    if filled.check is not None:
        filled.check.run()
        receiver.settle(filled.check)


def split(packet: OutgoingPacket) -> tuple[PacketHeader, bytes]:
    data = b"".join(packet.views)
    assert len(data) == packet.byte_count
    return parse_header(data[:HEADER_BYTES]), data[HEADER_BYTES:]


class Pair:
    """A sender and a receiver, joined by connections that keep order and may break."""

    def __init__(self, frame: Frame) -> None:
        encoded = encode(frame)
        self.sender = OutgoingTransfer(7, encoded)
        self.receiver = IncomingTransfer(7, head_of(encoded), 0, self.break_connection)
        self.there: dict[int, deque[tuple[PacketHeader, bytes]]] = {}
        self.back: dict[int, deque[PacketHeader | tuple[PacketHeader, bytes]]] = {}
        self.next_connection = 0
        self.dead: set[int] = set()
        self.bytes_sent = 0
        self.bytes_lost = 0
        self.is_offered = False
        self.is_done = False

    def open(self) -> None:
        self.there[self.next_connection], self.back[self.next_connection] = deque(), deque()
        self.next_connection += 1

    def break_connection(self, connection: int) -> None:
        lost = self.there.pop(connection, None)
        if lost is not None:
            del self.back[connection]
            if connection in self.dead:
                self.receiver.abandon(connection)
                return
            self.bytes_lost += sum(len(payload) for header, payload in lost if header.kind is PacketKind.PIECE)
            self.sender.lose(connection)
            self.receiver.abandon(connection)

    def lose_sight(self, connection: int) -> None:
        """The sender sees the connection break; what is on its way still arrives, perhaps much later."""
        self.dead.add(connection)
        self.back[connection].clear()
        self.bytes_lost += sum(
            len(payload) for header, payload in self.there[connection] if header.kind is PacketKind.PIECE
        )
        self.sender.lose(connection)

    def send(self, connection: int, blocks: int) -> bool:
        if connection in self.dead:
            return False
        packet = self.sender.offer(connection) if self.sender.needs_offer else self.sender.take(connection, blocks)
        if packet is None:
            return False
        header, payload = split(packet)
        self.there[connection].append((header, payload))
        self.bytes_sent += len(payload) if header.kind is PacketKind.PIECE else 0
        return True

    def give_memory(self) -> None:
        if self.is_offered and not self.receiver.has_memory:
            reservation = ByteBudget(2**30, 2**30).try_reserve(NodeId("x"), self.receiver.head.body_bytes)
            assert reservation is not None
            self.receiver.begin(reservation)
            self.answer(self.last_offer)

    def answer(self, offer: tuple[int, PacketHeader]) -> None:
        connection, header = offer
        if connection not in self.back or not self.receiver.has_memory:
            return
        if header.serial:
            held = PacketHeader(PacketKind.HELD, 7, serial=header.serial)
            self.back[connection].append((held, self.receiver.held_blocks()))
        else:
            self.back[connection].append((PacketHeader(PacketKind.ACCEPT, 7), self.receiver.dropped_blocks()))

    def arrive(self, connection: int) -> None:
        if not self.there[connection]:
            return
        header, payload = self.there[connection].popleft()
        if header.kind is PacketKind.OFFER:
            if not self.is_offered or is_newer(header.serial, self.last_offer[1].serial):
                self.is_offered, self.last_offer = True, (connection, header)
                self.answer(self.last_offer)
            return
        memory = self.receiver.place(connection, header)
        if memory is not None:
            memory[:] = payload
            settle(self.receiver, self.receiver.filled(connection))
        self.is_done = self.receiver.is_complete

    def hear(self, connection: int) -> None:
        if self.back[connection] and connection not in self.dead:
            header, masks = self.back[connection].popleft()  # type: ignore[misc]
            if header.kind is PacketKind.ACCEPT:
                self.sender.accept(masks)
            else:
                self.sender.held(header.serial, masks)

    def finish(self) -> None:
        """Without further trouble, everything must come to an end."""
        self.open()
        for _ in range(10_000):
            if self.is_done:
                return
            self.give_memory()
            for connection in tuple(self.there):
                if connection in self.there:
                    self.hear(connection)
                if connection in self.there:
                    self.send(connection, 4)
                if connection in self.there:
                    self.arrive(connection)
        raise AssertionError("the transfer stands still")


actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["open", "send", "send", "send", "arrive", "arrive", "hear", "hear", "memory", "break", "lose"]
        ),
        st.integers(0, 5),
        st.integers(1, 16),
    ),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(actions, st.sampled_from([(1,), (BLOCK_BYTES,), (3 * CHUNK_BYTES + 5,), (100, CHUNK_BYTES, 70_000, 2)]))
def test_the_frame_arrives_whole_and_only_what_was_lost_is_sent_again(
    steps: list[tuple[str, int, int]], sizes: tuple[int, ...]
) -> None:
    frame = frame_of(*sizes)
    pair = Pair(frame)
    for action, which, blocks in steps:
        names = sorted(pair.there)
        connection = names[which % len(names)] if names else None
        if action == "open" and len(names) < 4:
            pair.open()
        elif action == "memory":
            pair.give_memory()
        elif connection is None or pair.is_done:
            continue
        elif action == "send":
            pair.send(connection, blocks)
        elif action == "arrive":
            pair.arrive(connection)
        elif action == "hear":
            pair.hear(connection)
        elif action == "break":
            pair.break_connection(connection)
        elif action == "lose" and connection not in pair.dead:
            pair.lose_sight(connection)
    pair.finish()
    received, _ = pair.receiver.frame()
    assert [bytes(part.data) for part in received.tensors] == [part.data for part in frame.tensors]
    assert pair.bytes_sent <= sum(sizes) + pair.bytes_lost + EAGER_BLOCKS * BLOCK_BYTES


def test_blocks_of_one_chunk_go_over_many_connections() -> None:
    pair = Pair(frame_of(CHUNK_BYTES))
    for _ in range(16):
        pair.open()
    pair.send(0, 1)
    pair.arrive(0)
    pair.give_memory()
    pair.hear(0)
    for connection in range(16):
        assert pair.send(connection, 1)
    for connection in reversed(range(16)):
        pair.arrive(connection)
    assert pair.is_done
    assert pair.bytes_sent == CHUNK_BYTES


def test_before_the_answer_only_the_offering_connection_sends_and_only_so_much() -> None:
    pair = Pair(frame_of(8 * CHUNK_BYTES))
    pair.open()
    pair.open()
    pair.send(0, 16)
    assert not pair.send(1, 16)
    while pair.send(0, 16):
        pass
    assert pair.bytes_sent == EAGER_BLOCKS * BLOCK_BYTES


def test_a_block_sent_again_cuts_the_connection_that_still_carries_it() -> None:
    frame = frame_of(CHUNK_BYTES)
    cut: list[int] = []
    encoded = encode(frame)
    receiver = IncomingTransfer(1, head_of(encoded), 0, cut.append)
    reservation = ByteBudget(2**30, 2**30).try_reserve(NodeId("x"), CHUNK_BYTES)
    assert reservation is not None
    receiver.begin(reservation)
    first_block = PacketHeader(PacketKind.PIECE, 1, BLOCK_BYTES, 0)
    assert receiver.place(1, first_block) is not None
    memory = receiver.place(2, PacketHeader(PacketKind.PIECE, 1, CHUNK_BYTES, 0))
    assert cut == [1]
    assert memory is not None
    memory[:] = frame.tensors[0].data
    filled = receiver.filled(2)
    assert filled.new_blocks == 16
    assert not receiver.is_complete  # nothing counts before it was checked
    settle(receiver, filled)
    assert receiver.is_complete
    assert receiver.place(3, first_block) is None


@pytest.mark.parametrize("sees_the_old_connection_break", [False, True])
def test_a_receiver_that_has_forgotten_everything_gets_all_of_it_once_more(sees_the_old_connection_break: bool) -> None:
    frame = frame_of(3 * CHUNK_BYTES)
    before, after = Pair(frame), Pair(frame)
    before.open()
    before.send(0, 1)
    before.arrive(0)
    before.give_memory()
    before.hear(0)
    before.send(0, 16)
    after.sender, after.next_connection = before.sender, 1
    after.sender.restart()
    if sees_the_old_connection_break:
        after.sender.lose(0)
    assert not after.sender.may_have_arrived
    after.finish()
    assert after.bytes_sent == 3 * CHUNK_BYTES
    assert after.sender.may_have_arrived


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES + 1])
def test_a_frame_may_have_arrived_when_its_last_byte_has_left(size: int) -> None:
    pair = Pair(Frame("kind", {}) if not size else frame_of(size))
    pair.open()
    assert not pair.sender.may_have_arrived
    sent = 0
    while pair.send(0, 1):
        assert pair.sender.may_have_arrived is (pair.bytes_sent == size)
        sent += 1
    assert sent > 0
    assert pair.sender.may_have_arrived
    pair.break_connection(0)
    assert pair.sender.may_have_arrived


def test_a_damaged_chunk_is_noticed_when_it_is_complete() -> None:
    frame = frame_of(CHUNK_BYTES + 10)
    receiver = IncomingTransfer(1, head_of(encode(frame)), 0, lambda _: None)
    reservation = ByteBudget(2**30, 2**30).try_reserve(NodeId("x"), CHUNK_BYTES + 10)
    assert reservation is not None
    receiver.begin(reservation)
    memory = receiver.place(1, PacketHeader(PacketKind.PIECE, 1, 10, CHUNK_BYTES))
    assert memory is not None
    memory[:] = b"0123456789"
    with pytest.raises(DamagedChunkError):
        settle(receiver, receiver.filled(1))
    assert not receiver.is_complete


def test_memory_that_is_being_checked_is_not_given_back() -> None:
    frame, budget = frame_of(10), ByteBudget(2**30, 2**30)
    receiver = IncomingTransfer(1, head_of(encode(frame)), 0, lambda _: None)
    reservation = budget.try_reserve(NodeId("x"), 10)
    assert reservation is not None
    receiver.begin(reservation)
    memory = receiver.place(1, PacketHeader(PacketKind.PIECE, 1, 10, 0))
    assert memory is not None
    memory[:] = frame.tensors[0].data
    filled = receiver.filled(1)
    receiver.end()
    assert budget.used == 10
    settle(receiver, filled)
    assert budget.used == 0


def test_masks_survive_the_line_and_their_length_is_checked() -> None:
    masks = [0, 0xFFFF, 0x8001]
    assert parse_masks(encode_masks(masks), 3) == masks
    with pytest.raises(MisconductError):
        parse_masks(encode_masks(masks), 2)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_24_bytes_are_a_header_or_misconduct(data: bytes) -> None:
    try:
        header = parse_header(data)
    except MisconductError:
        return
    assert header.encode() == data


def test_offers_are_ordered_also_after_very_many_of_them() -> None:
    serial = None
    serials = [serial := next_serial(serial) for _ in range(2 * MAX_SERIAL + 10)]
    assert serials[0] == 0
    for earlier, later in pairwise(serials):
        assert is_newer(later, earlier)
        assert not is_newer(earlier, later)
    assert not is_newer(7, 7)
