"""Messages of rounds in parts: whole at their receiver, which keeps no more than it said it would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import anyio
import anyio.lowlevel
import msgspec
import pytest

from neuroshard.consensus.message_queue import (
    LARGE_AT_ONCE,
    PART,
    PART_BYTES,
    PART_LIMITS,
    SMALL_AT_ONCE,
    STALE_SECONDS,
    MessagePart,
    RoundMessageQueue,
)
from neuroshard.consensus.slices import Encoded
from neuroshard.messages import Frame, MalformedFrameError, TensorPart, TensorSpec
from neuroshard.messages.frame import unpack
from neuroshard.network import InMemoryNetwork, RequestRefusedError
from neuroshard.network.in_memory_links import Link
from neuroshard.types import NodeId
from tests.worlds.replicas import NAMES, STAGE, A, B, C, play

D = NAMES[3]
PIECE = bytes(PART_BYTES)


def everybody(_node: NodeId) -> bool:
    """Among friends every node counts."""
    return True


def tensor_of(data: bytes, name: str = "part") -> TensorPart:
    return TensorPart(TensorSpec(name, "uint8", (len(data),)), data)


class Post:
    """A receiver of messages up to so many bytes, with those that have come."""

    def __init__(self, network: InMemoryNetwork, most_bytes: int, counts: Callable[[NodeId], bool] = everybody) -> None:
        self.come: list[tuple[NodeId, bytes]] = []
        self.mail = RoundMessageQueue(STAGE, network.join(A), most_bytes, self._note, counts)

    async def _note(self, sender: NodeId, pieces: Sequence[Encoded]) -> None:
        await anyio.lowlevel.checkpoint()
        self.come.append((sender, b"".join(pieces)))

    async def take(self, sender: NodeId, number: int, total: int, start: int, data: bytes) -> None:
        """A part of a message of `total` bytes."""
        part = MessagePart(STAGE, number, start, total)
        await self.mail.take(sender, Frame(PART, part, (tensor_of(data),)))


def test_parts_out_of_order_or_of_too_large_a_message_are_refused() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        total = 2 * PART_BYTES
        post = Post(network, total)
        for size in (10**14, total + 1):
            with pytest.raises(RequestRefusedError, match="no memory"):
                await post.take(C, 1, size, 0, PIECE)
        with pytest.raises(RequestRefusedError, match="does not follow"):
            await post.take(C, 2, total, PART_BYTES, PIECE)
        await post.take(C, 3, total, 0, PIECE)
        await post.take(C, 3, total, 0, PIECE)  # the answer did not come
        with pytest.raises(RequestRefusedError, match="does not follow"):
            await post.take(C, 3, total - 1, PART_BYTES, PIECE[1:])
        for number, start in ((4, PART_BYTES), (3, PART_BYTES + 2)):
            with pytest.raises(RequestRefusedError, match="does not follow"):
                await post.take(C, number, total, start, PIECE[:4])
        await post.take(C, 3, total, PART_BYTES, PIECE)
        await post.take(C, 3, total, PART_BYTES, PIECE)
        with pytest.raises(RequestRefusedError, match="does not follow"):
            await post.take(C, 3, total, total, PIECE)
        assert [sender for sender, _ in post.come] == [C]

    play(scenario)


@pytest.mark.parametrize(
    "tensors",
    [(), (tensor_of(b"x"), tensor_of(b"x", "more")), (TensorPart(TensorSpec("part", "int8", (1,)), b"x"),)],
    ids=["none", "two", "numbers"],
)
def test_a_part_is_one_tensor_of_bytes(tensors: tuple[TensorPart, ...]) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        post = Post(network, PART_BYTES)
        with pytest.raises(RequestRefusedError, match="one tensor"):
            await post.mail.take(B, Frame(PART, MessagePart(STAGE, 1, 0, max(1, len(tensors))), tensors))
        assert not post.come

    play(scenario)


@pytest.mark.parametrize("data", [b"", b"x", PIECE[:-1]], ids=["empty", "tiny", "short"])
def test_only_the_last_part_of_a_message_may_be_small(data: bytes) -> None:
    """Else a member could have any number of pieces kept here, which take memory and are no bytes."""

    async def scenario(network: InMemoryNetwork) -> None:
        total = PART_BYTES + len(data)
        post = Post(network, 2 * PART_BYTES)
        for start in (0, PART_BYTES):
            if start:
                await post.take(B, 1, 2 * PART_BYTES, 0, PIECE)
            with pytest.raises(RequestRefusedError, match="Only the last part"):
                await post.take(B, 1, 2 * PART_BYTES, start, data)
        await post.take(C, 1, total, 0, PIECE)
        if total > PART_BYTES:
            await post.take(C, 1, total, PART_BYTES, data)
        assert [sender for sender, _ in post.come] == [C]
        assert post.mail.received_bytes == PART_BYTES + total

    play(scenario)


def test_what_a_vanished_node_began_to_send_gives_way_to_others_and_small_messages_never_wait() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        total = PART_BYTES + 1
        post = Post(network, total)
        await post.take(B, 1, total, 0, PIECE)
        await post.take(C, 1, total, 0, PIECE)
        with pytest.raises(RequestRefusedError, match="no memory"):
            await post.take(D, 1, total, 0, PIECE)
        await post.take(D, 2, 4, 0, b"vote")
        await anyio.sleep(STALE_SECONDS + 1)
        await post.take(D, 3, total, 0, PIECE)
        assert [sender for sender, _ in post.come] == [D]

    play(scenario)


def test_two_hundred_free_names_take_no_memory_from_a_node_that_counts() -> None:
    """Each begins a large message, and continues it whenever there is room."""

    async def scenario(network: InMemoryNetwork) -> None:
        total = 4 * PART_BYTES
        post = Post(network, total, lambda node: node in {B, C})
        names, sent = [NodeId(f"free {number}") for number in range(200)], Counter[NodeId]()
        for start in range(0, total, PART_BYTES):
            for name in names:
                with suppress(RequestRefusedError):
                    await post.take(name, 1, total, sent[name], PIECE)
                    sent[name] += PART_BYTES
            with pytest.raises(RequestRefusedError, match="no memory"):
                await post.take(NodeId("another"), 1, total, 0, PIECE)
            for node in (B, C):
                await post.take(node, 1, total, start, PIECE)
        assert [sender for sender, _ in post.come] == [B, C]

    play(scenario)


def test_long_messages_travel_in_parts() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        transports = [network.join(A), network.join(B)]
        message = [bytes([number]) * (PART_BYTES // 10 + number) for number in range(25)]
        short, bare = [b"short"] * 100, [b"x"]
        come = list[tuple[NodeId, bytes]]()

        async def note(sender: NodeId, pieces: Sequence[Encoded]) -> None:
            await anyio.lowlevel.checkpoint()
            come.append((sender, b"".join(pieces)))

        mails = [
            RoundMessageQueue(STAGE, transport, sum(map(len, message)), note, everybody) for transport in transports
        ]
        transports[1].serve(PART, mails[1].take, PART_LIMITS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mails[0].run)
            for one in (message, short, bare):
                mails[0].send(B, one)
            while len(come) < 3:
                await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()
        assert sorted(come) == sorted((A, b"".join(one)) for one in (message, short, bare))

    play(scenario)


class Correspondents:
    """A sends to B over a line of a megabyte per second and 100 ms each way; when and what has come to B."""

    def __init__(self, network: InMemoryNetwork) -> None:
        network.set_uplink(A, 1e6)
        for ends in ((A, B), (B, A)):
            network.set_link(*ends, Link(delay_seconds=0.1))
        self.come: list[tuple[float, bytes]] = []
        transports = [network.join(A), network.join(B)]
        self.sender, receiver = (
            RoundMessageQueue(STAGE, one, 64 * PART_BYTES, self._note, everybody) for one in transports
        )
        transports[1].serve(PART, receiver.take, PART_LIMITS)

    async def _note(self, _sender: NodeId, pieces: Sequence[Encoded]) -> None:
        await anyio.lowlevel.checkpoint()
        self.come.append((anyio.current_time(), b"".join(pieces)))

    async def deliver(self, *messages: bytes) -> float:
        """Send them; returns the seconds until all have come."""
        began, count = anyio.current_time(), len(self.come) + len(messages)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.sender.run)
            for one in messages:
                self.sender.send(B, [one])
            while len(self.come) < count or not self.sender.is_empty():
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        return max(at for at, _ in self.come) - began


def test_a_line_is_full_while_answers_are_under_way() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        messages, pair = [bytes([number]) * 500_000 for number in range(8)], Correspondents(network)
        seconds = await pair.deliver(*messages)
        assert sorted(one for _, one in pair.come) == messages
        assert 4 < seconds < 4.2  # one at a time, they would take 8 x 0.7 s
        assert 0.7e6 < pair.sender.upload < 1.1e6

    play(scenario)


def test_a_small_message_does_not_wait_for_large_ones() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        pair = Correspondents(network)
        await pair.deliver(*(bytes(500_000) for _ in range(8)), b"vote")
        (place,) = (place for place, (_, one) in enumerate(pair.come) if one == b"vote")
        assert place <= LARGE_AT_ONCE  # only messages that had left already come before it

    play(scenario)


def test_small_messages_arrive_in_the_order_in_which_they_were_sent() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        sent, come, transports = [bytes([number]) for number in range(9)], list[bytes](), [*map(network.join, (A, B))]

        async def read(_sender: NodeId, pieces: Sequence[Encoded]) -> None:
            whole = b"".join(pieces)
            await anyio.sleep(0.3 if whole[0] % 2 else 0.1)  # some messages take longer to read
            come.append(whole)

        queues = [RoundMessageQueue(STAGE, one, PART_BYTES, read, everybody) for one in transports]
        transports[1].serve(PART, queues[1].take, PART_LIMITS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(queues[0].run)
            for one in sent:
                queues[0].send(B, [one])
            await anyio.sleep(60)
            tasks.cancel_scope.cancel()
        assert come == sent

    play(scenario)


def test_messages_of_a_sender_may_arrive_between_the_parts_of_another_one() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        total, post = 2 * PART_BYTES, Post(network, 16 * PART_BYTES)
        await post.take(B, 1, total, 0, PIECE)
        for number in range(2, 20):
            await post.take(B, number, 4, 0, b"vote")
            await post.take(B, number, 4, 0, b"vote")  # the answer did not come
        await post.take(B, 20, total, 0, PIECE)
        for number in (20, 1):
            await post.take(B, number, total, PART_BYTES, PIECE)
        assert [one for _, one in post.come] == [*([b"vote"] * 18), 2 * PIECE, 2 * PIECE]

    play(scenario)


def test_a_sender_cannot_begin_any_number_of_messages() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        total, post = 2 * PART_BYTES, Post(network, 64 * PART_BYTES)
        for number in range(LARGE_AT_ONCE + SMALL_AT_ONCE + 1):
            await post.take(B, number, total, 0, PIECE)
        with pytest.raises(RequestRefusedError, match="does not follow"):
            await post.take(B, 0, total, PART_BYTES, PIECE)
        await post.take(B, 1, total, PART_BYTES, PIECE)
        assert len(post.come) == 1

    play(scenario)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"number": -1}, "`$.number`"),
        ({"start": 10**16}, "`$.start`"),
        ({"size": 0}, "`$.size`"),
        ({"size": 2.0}, "`$.size`"),
        ({"stage": {"run_id": "1", "layers": [0, 1]}}, "`$.stage.run_id`"),
        ({"stage": {"run_id": "1" * 64, "layers": [1, 1]}}, "`$.stage.layers`"),
        ({"message": {}}, "unknown field `message`"),
    ],
)
def test_the_head_of_a_part_is_within_its_bounds(change: dict[str, object], path: str) -> None:
    good = {"stage": STAGE, "number": 1, "start": 0, "size": 10}
    assert unpack(msgspec.msgpack.encode(good), MessagePart) == MessagePart(STAGE, 1, 0, 10)
    with pytest.raises(MalformedFrameError) as refusal:
        unpack(msgspec.msgpack.encode({**good, **change}), MessagePart)
    assert path in str(refusal.value)


def test_a_receiver_costs_nothing_once_all_has_arrived_and_can_be_written_to_again() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        others, come = (B, C, D), list[str]()

        async def note(_sender: NodeId, pieces: Sequence[Encoded]) -> None:
            await anyio.lowlevel.checkpoint()
            come.append(b"".join(pieces).decode())

        sender = RoundMessageQueue(STAGE, network.join(A), 1024, note, everybody)
        for peer in others:
            transport = network.join(peer)
            transport.serve(PART, RoundMessageQueue(STAGE, transport, 1024, note, everybody).take, PART_LIMITS)
        async with anyio.create_task_group() as tasks:
            sender.send(B, [B.encode()])  # waits for `run`
            tasks.start_soon(sender.run)
            await anyio.sleep(60)
            quiet = len(anyio.get_running_tasks())
            for _ in range(2):
                for peer in others:
                    sender.send(peer, [peer.encode()])
                await anyio.sleep(60)
                assert len(anyio.get_running_tasks()) == quiet
            tasks.cancel_scope.cancel()
        assert sorted(come) == sorted([B, *others, *others])

    play(scenario)
