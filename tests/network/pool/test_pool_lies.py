"""A peer with a good key that breaks every rule: it is refused and scored, and the node lives on unharmed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from struct import pack

import anyio
import pytest

from neuroshard.messages import EncodedFrame, Frame, FrameLimits, TensorPart, TensorSpec, encode
from neuroshard.network import RequestTimeoutError
from neuroshard.network.limits import ByteBudget
from neuroshard.network.pool.options import ConnectionLostError
from neuroshard.network.pool.transfers import BLOCK_BYTES, PacketKind, packet
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import LIMITS, MIB, POOL_LOOPBACK, Node, Stranger, frame_of, node, run, stranger

LIAR = identity_of(9).node_id
QUICK = replace(POOL_LOOPBACK, grace_seconds=0.3, min_bytes_per_second=4 * MIB)


async def assert_lives(victim: Node) -> None:
    async with node(1) as honest:
        assert (await honest.ask(victim, frame_of(b"fine"))).tensors[0].data == b"fine"


async def offered(liar: Stranger, frame: EncodedFrame, number: int = 1) -> PacketKind:
    await liar.send(PacketKind.OFFER, number, frame.head)
    return (await liar.receive())[0].kind


async def assert_cut(liar: Stranger) -> None:
    async def read_on() -> None:
        while True:
            await liar.receive()

    with pytest.raises(ConnectionLostError):
        await read_on()


@pytest.mark.parametrize("size", [1000, MIB])
def test_a_body_that_does_not_match_its_digests_is_refused(size: int) -> None:
    async def scenario() -> None:
        async with node(2) as b, stranger(b) as liar:
            assert await offered(liar, encode(frame_of(bytes(size)))) is PacketKind.ACCEPT
            await liar.send(PacketKind.PIECE, 1, bytes(size - 1) + b"!", extra=0)
            header, reason = await liar.receive()
            assert header.kind is PacketKind.REFUSE
            assert b"does not match its digest" in reason
            assert b.reputation.score(LIAR) < 0
            assert b.heard == []
            assert b.budget.used == 0
            await assert_lives(b)

    run(scenario)


def test_a_body_above_the_limit_is_refused_before_memory_is_touched() -> None:
    huge = TensorPart(TensorSpec("x", "uint8", (LIMITS.max_body_bytes + 1,)), bytes(LIMITS.max_body_bytes + 1))

    async def scenario() -> None:
        async with node(2) as b, stranger(b) as liar:
            assert await offered(liar, encode(Frame("echo", {}, (huge,)))) is PacketKind.REFUSE
            assert b.budget.used == 0
            assert b.reputation.score(LIAR) < 0
            await assert_lives(b)

    run(scenario)


def test_a_body_above_the_memory_of_this_node_is_refused_without_blame() -> None:
    async def scenario() -> None:
        async with node(2, budget=ByteBudget(4 * MIB, 2 * MIB)) as b, stranger(b) as peer:
            assert await offered(peer, encode(frame_of(bytes(3 * MIB)))) is PacketKind.REFUSE
            assert b.reputation.score(LIAR) == 0

    run(scenario)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"NSHF",
        bytes(100),
        encode(frame_of(b"x")).head[:-1],
        encode(frame_of(b"x")).head + b"more",
        encode(frame_of(b"x")).head[:-1] + b"?",
    ],
)
def test_an_offer_that_is_no_frame_is_refused(head: bytes) -> None:
    async def scenario() -> None:
        async with node(2) as b, stranger(b) as liar:
            await liar.send(PacketKind.OFFER, 1, head)
            assert (await liar.receive())[0].kind is PacketKind.REFUSE
            assert b.reputation.score(LIAR) < 0
            await assert_lives(b)

    run(scenario)


@pytest.mark.parametrize(
    "data",
    [
        pack("<BBHIQQ", 99, 0, 0, 0, 1, 0),  # no such kind
        pack("<BBHIQQ", PacketKind.PIECE, 1, 0, 0, 1, 0),  # a reserved bit
        pack("<BBHIQQ", PacketKind.OFFER, 0, 0, 2**30, 1, 0),  # a header of 1 GiB
        pack("<BBHIQQ", PacketKind.PIECE, 0, 0, MIB + 1, 1, 0),
        pack("<BBHIQQ", PacketKind.DONE, 0, 0, 1, 1, 0),
        bytes(24),
        b"\xff" * 24,
    ],
)
def test_a_packet_that_cannot_be_ends_the_connection(data: bytes) -> None:
    async def scenario() -> None:
        async with node(2) as b, stranger(b) as liar:
            await liar.stream.send_all(data)
            await assert_cut(liar)
            await until(lambda: b.reputation.score(LIAR) < 0)
            await assert_lives(b)

    run(scenario)


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (1, BLOCK_BYTES),  # between blocks
        (0, 100),  # half a block
        (2 * MIB, BLOCK_BYTES),  # behind the body
        (2**63, BLOCK_BYTES),
        (MIB - BLOCK_BYTES, 2 * BLOCK_BYTES),  # in two chunks
        (0, 0),
        (MIB, 200),  # more than the last block has
    ],
)
def test_a_piece_of_nothing_ends_the_connection(offset: int, length: int) -> None:
    async def scenario() -> None:
        async with node(2) as b, stranger(b) as liar:
            assert await offered(liar, encode(frame_of(bytes(MIB + 100)))) is PacketKind.ACCEPT
            await liar.send(PacketKind.PIECE, 1, bytes(length), extra=offset)
            await assert_cut(liar)
            await until(lambda: b.reputation.score(LIAR) < 0)
            await assert_lives(b)

    run(scenario)


def test_a_transfer_number_used_twice_ends_the_connection() -> None:
    async def scenario() -> None:
        async with node(2) as b, stranger(b) as liar:
            assert await offered(liar, encode(frame_of(bytes(MIB)))) is PacketKind.ACCEPT
            await liar.send(PacketKind.OFFER, 1, encode(frame_of(bytes(MIB + 1))).head)
            await assert_cut(liar)
            await until(lambda: b.reputation.score(LIAR) < 0)

    run(scenario)


def test_a_resumed_transfer_must_be_the_same_one() -> None:
    async def scenario() -> None:
        async with node(2) as b, stranger(b) as liar:
            assert await offered(liar, encode(frame_of(bytes(MIB)))) is PacketKind.ACCEPT
            await liar.send(PacketKind.OFFER, 1, encode(frame_of(b"other")).head, serial=1)
            await assert_cut(liar)

    run(scenario)


def test_a_request_that_was_answered_is_not_handled_again() -> None:
    async def scenario() -> None:
        async with node(2) as b, stranger(b) as liar:
            question = encode(Frame("swallow"))
            for serial in range(3):
                await liar.send(PacketKind.OFFER, 1, question.head, serial=serial)
            kinds = [(await liar.receive())[0].kind for _ in range(4)]
            assert sorted(kinds) == sorted([PacketKind.DONE] * 3 + [PacketKind.OFFER])
            assert len(b.heard) == 1

    run(scenario)


def test_an_answer_nobody_asked_for_is_refused() -> None:
    async def scenario() -> None:
        async with node(2) as b, stranger(b) as liar:
            await liar.send(PacketKind.OFFER, 1, encode(Frame("answer")).head, extra=12345)
            header, reason = await liar.receive()
            assert header.kind is PacketKind.REFUSE
            assert b"No request waits" in reason

    run(scenario)


def test_a_verified_chunk_cannot_be_changed_afterwards() -> None:
    """The second connection gets memory for a block; then the first one sends the same block, and completes it."""
    good = bytes(range(256)) * (2 * MIB // 256)

    async def scenario() -> None:
        async with node(2) as b, stranger(b) as first, stranger(b) as second:
            assert await offered(first, encode(frame_of(good))) is PacketKind.ACCEPT
            start = packet(PacketKind.PIECE, 1, b"!" * BLOCK_BYTES, extra=0)
            await second.stream.send_all(start[:-100])
            entry = b.pool._links[LIAR]._exchange.receiver._entries[1]
            await until(lambda: bool(entry.transfer._filling))
            await first.send(PacketKind.PIECE, 1, good[:MIB], extra=0)
            await until(lambda: b.pool.connection_count == 1)
            with suppress(ConnectionLostError):
                await second.stream.send_all(start[-100:])
            await first.send(PacketKind.PIECE, 1, good[MIB:], extra=MIB)
            header, _ = await first.receive()
            assert header.kind is PacketKind.DONE
            header, head = await first.receive()
            assert header.kind is PacketKind.OFFER
            assert head.endswith(encode(Frame("answer", {"n": 1}, frame_of(good).tensors)).head[-32:])
            await assert_cut(second)

    run(scenario)


def test_one_byte_a_second_is_cut() -> None:
    async def scenario() -> None:
        async with node(2, QUICK) as b, stranger(b) as slow:
            assert await offered(slow, encode(frame_of(bytes(MIB)))) is PacketKind.ACCEPT
            started = anyio.current_time()
            piece = packet(PacketKind.PIECE, 1, bytes(MIB), extra=0)

            async def drip() -> None:
                for byte in piece:
                    await slow.stream.send_all(bytes((byte,)))
                    await anyio.sleep(0.1)

            with pytest.raises(ConnectionLostError):
                await drip()
            assert anyio.current_time() - started < 5
            await until(lambda: b.budget.used == 0 and b.reputation.score(LIAR) < 0)
            await assert_lives(b)

    run(scenario)


def test_memory_is_not_held_for_a_peer_that_sends_nothing() -> None:
    async def scenario() -> None:
        async with node(2, QUICK) as b, stranger(b) as silent:
            assert await offered(silent, encode(frame_of(bytes(MIB)))) is PacketKind.ACCEPT
            assert b.budget.used == MIB
            await until(lambda: b.budget.used == 0)
            await assert_cut(silent)
            await until(lambda: b.reputation.score(LIAR) < 0)

    run(scenario)


def test_who_asks_without_reading_the_answers_is_cut() -> None:
    async def scenario() -> None:
        async with node(2, QUICK) as b, stranger(b) as greedy:
            offer = packet(PacketKind.OFFER, 1, encode(Frame("unheard-of")).head)

            async def ask_on() -> None:
                while True:
                    await greedy.stream.send_all(offer * 1000)

            with pytest.raises(ConnectionLostError):
                await ask_on()
            await until(lambda: b.reputation.score(LIAR) < 0)
            await assert_lives(b)

    run(scenario)


def test_only_so_many_requests_of_one_peer_at_once() -> None:
    waiting = anyio.Event()

    async def wait(_: NodeId, __: Frame) -> Frame:
        await waiting.wait()
        return Frame("answer")

    async def scenario() -> None:
        async with node(2, replace(POOL_LOOPBACK, max_transfers_per_peer=8)) as b, stranger(b) as greedy:
            b.server.serve("wait", wait, FrameLimits(), 64)
            for number in range(1, 11):
                await greedy.send(PacketKind.OFFER, number, encode(Frame("wait")).head)
            answers = [await greedy.receive() for _ in range(10)]
            kinds = [header.kind for header, _ in answers]
            assert kinds.count(PacketKind.DONE) == 8
            assert kinds.count(PacketKind.REFUSE) == 2
            assert b"busy" in answers[-1][1]
            waiting.set()

    run(scenario)


def test_an_answer_to_another_request_or_a_late_one_is_not_taken() -> None:
    """The hostile side is the one that is asked: it answers a number that nobody used, then one that timed out."""

    async def scenario() -> None:
        async with node(1) as a, stranger(a) as liar:
            with pytest.raises(RequestTimeoutError):
                await a.pool.request(LIAR, Frame("question"), LIMITS, timeout_seconds=0.3)
            question, _ = await liar.receive()
            cancel, _ = await liar.receive()
            assert (question.kind, cancel.kind) == (PacketKind.OFFER, PacketKind.CANCEL)
            for number, answers in ((1, question.transfer), (2, question.transfer + 1)):
                await liar.send(PacketKind.OFFER, number, encode(Frame("answer")).head, extra=answers)
                assert (await liar.receive())[0].kind is PacketKind.REFUSE

    run(scenario)


def test_a_request_gets_one_answer_at_a_time() -> None:
    """Else each would hold memory, or a place in the queue for it, as often as the peer likes."""

    async def scenario() -> None:
        async with node(1) as a, stranger(a) as liar, anyio.create_task_group() as tasks:
            tasks.start_soon(partial(a.pool.request, LIAR, Frame("question"), LIMITS, timeout_seconds=5))
            question, _ = await liar.receive()
            answer = encode(frame_of(bytes(MIB)))
            kinds: list[PacketKind] = []
            for number in range(1, 4):
                await liar.send(PacketKind.OFFER, number, answer.head, extra=question.transfer)
                kinds.append((await liar.receive())[0].kind)
            assert kinds == [PacketKind.ACCEPT, PacketKind.REFUSE, PacketKind.REFUSE]
            assert a.budget.used == MIB
            await liar.send(PacketKind.PIECE, 1, bytes(MIB), extra=0)
            assert (await liar.receive())[0].kind is PacketKind.DONE

    run(scenario)


def test_an_answer_that_is_never_taken_is_given_up() -> None:
    async def scenario() -> None:
        async with node(2, replace(POOL_LOOPBACK, answer_seconds=0.5)) as b, stranger(b) as peer:
            data = bytes(4 * MIB)
            assert await offered(peer, encode(frame_of(data))) is PacketKind.ACCEPT
            for start in range(0, len(data), MIB):
                await peer.send(PacketKind.PIECE, 1, data[start : start + MIB], extra=start)
            assert (await peer.receive())[0].kind is PacketKind.DONE
            exchange = b.pool._links[LIAR]._exchange
            await until(lambda: bool(exchange._outgoing))
            await until(lambda: not exchange._outgoing and not exchange._answering)
            assert b.pool.connection_count == 1

    run(scenario)


def test_masks_of_the_wrong_size_or_of_blocks_never_sent_end_the_connection() -> None:
    async def scenario() -> None:
        for mask in (b"\0", b"\xff\xff" * 9):
            async with node(1) as a, stranger(a) as liar, anyio.create_task_group() as tasks:
                tasks.start_soon(_ask_in_vain, a)
                question, _ = await liar.receive()
                await liar.send(PacketKind.ACCEPT, question.transfer, mask)
                await assert_cut(liar)
                await until(lambda: a.reputation.score(LIAR) < 0)

    run(scenario)


async def _ask_in_vain(a: Node) -> None:
    with pytest.raises(RequestTimeoutError):
        await a.pool.request(LIAR, frame_of(bytes(9 * MIB)), LIMITS, timeout_seconds=1)
