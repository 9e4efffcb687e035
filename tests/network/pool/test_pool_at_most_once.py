"""A request is handled at most once, whatever breaks, is repeated or is forgotten."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import anyio
import pytest

from neuroshard.messages import EncodedFrame, Frame, encode
from neuroshard.network import PeerRefusedError, PeerUnreachableError
from neuroshard.network.limits import ByteBudget, UploadPacer
from neuroshard.network.pool import NotDeliveredError
from neuroshard.network.pool.receiving import MAX_REMEMBERED
from neuroshard.network.pool.transfers import PacketKind
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import (
    LIMITS,
    MIB,
    POOL_LOOPBACK,
    Line,
    Node,
    Stranger,
    frame_of,
    line_to,
    node,
    run,
    stranger,
)

DATA = Random(5).randbytes(12 * MIB)
SLOW = 24 * MIB
PEER = identity_of(9).node_id


class Held:
    """A handler that answers when it is let."""

    def __init__(self, here: Node) -> None:
        self.runs = 0
        self.ended = 0
        self.go_on = anyio.Event()
        here.server.serve("hold", self._answer, LIMITS, 4)

    async def _answer(self, _: NodeId, request: Frame) -> Frame:
        self.runs += 1
        try:
            await self.go_on.wait()
        finally:
            self.ended += 1
        return Frame("answer", {}, request.tensors)


@pytest.mark.parametrize("breaks_at", ["while handling", "while answering"])
def test_the_answer_is_the_one_that_was_computed_before_the_line_broke(breaks_at: str) -> None:
    async def scenario() -> None:
        async with (
            node(1) as a,
            node(2, pacer=UploadPacer(SLOW)) as b,
            line_to(b.door.endpoint()) as line,
            anyio.create_task_group() as tasks,
        ):
            held = Held(b)

            async def break_five_times() -> None:
                await until(lambda: held.runs == 1)
                for part in range(5):
                    if breaks_at == "while answering":
                        held.go_on.set()
                        await until(lambda part=part: line.bytes_back > (2 * part + 1) * MIB)
                    await until(lambda: a.pool.connection_count == 1)
                    line.cut()
                    await until(lambda: a.pool.connection_count == 0)
                held.go_on.set()

            tasks.start_soon(break_five_times)
            answer = await a.ask(b, frame_of(DATA, "hold"), via=line.endpoint)
            assert answer.tensors[0].data == DATA
            assert held.runs == 1

    run(scenario)


async def settled(peer: Stranger, question: EncodedFrame, number: int) -> None:
    """Ask and take the answer."""
    await peer.send(PacketKind.OFFER, number, question.head)
    kinds = [await peer.receive() for _ in range(2)]
    answer = next(header for header, _ in kinds if header.kind is PacketKind.OFFER)
    await peer.send(PacketKind.DONE, answer.transfer)


def test_a_request_is_known_as_long_as_it_is_handled_and_never_taken_for_a_new_one_later() -> None:
    async def scenario() -> None:
        async with node(2) as b, stranger(b) as peer:
            held = Held(b)
            await peer.send(PacketKind.OFFER, 1, encode(Frame("hold")).head)
            assert (await peer.receive())[0].kind is PacketKind.DONE
            question = encode(Frame("swallow"))
            for number in range(2, MAX_REMEMBERED + 10):
                await settled(peer, question, number)
            await peer.send(PacketKind.OFFER, 1, encode(Frame("hold")).head, serial=1)
            assert (await peer.receive())[0].kind is PacketKind.DONE
            held.go_on.set()
            answer, _ = await peer.receive()
            assert answer.kind is PacketKind.OFFER
            await peer.send(PacketKind.DONE, answer.transfer)
            await until(lambda: not b.pool._links[PEER].is_busy)
            await peer.send(PacketKind.OFFER, 1, encode(Frame("hold")).head, serial=2)
            header, reason = await peer.receive()
            assert header.kind is PacketKind.REFUSE
            assert b"older than" in reason
            assert held.runs == 1
            assert len(b.heard) == MAX_REMEMBERED + 8

    run(scenario)


def test_a_process_that_was_started_again_counts_from_where_it_likes() -> None:
    async def scenario() -> None:
        async with node(2) as b:
            for session, first in ((1, 10_000), (2, 1)):
                async with stranger(b, session=session) as peer:
                    for number in range(first, first + MAX_REMEMBERED + 2):
                        await settled(peer, encode(Frame("swallow")), number)
            assert len(b.heard) == 2 * (MAX_REMEMBERED + 2)

    run(scenario)


async def _lead_to(line: Line, other: Node) -> None:
    """From now on there is another process at the end of the line."""
    line.target = other.door.endpoint()
    line.cut()
    await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("body", [b"", b"x", DATA])
def test_what_may_have_been_handled_is_not_sent_to_the_process_that_was_started_next(body: bytes) -> None:
    async def scenario() -> None:
        async with (
            node(1) as a,
            node(2) as first,
            node(2) as second,
            line_to(first.door.endpoint()) as line,
            anyio.create_task_group() as tasks,
        ):
            before, after = Held(first), Held(second)

            async def restart() -> None:
                await until(lambda: before.runs == 1)
                await _lead_to(line, second)

            tasks.start_soon(restart)
            started = anyio.current_time()
            with pytest.raises(PeerUnreachableError, match=r"has restarted.*may have been handled") as raised:
                await a.ask(second, frame_of(body, "hold") if body else Frame("hold"), via=line.endpoint)
            assert not isinstance(raised.value, NotDeliveredError)
            assert anyio.current_time() - started < 5
            assert (await a.ask(second, frame_of(b"next"), via=line.endpoint)).tensors[0].data == b"next"
            assert (before.runs, after.runs) == (1, 0)

    run(scenario)


def test_half_a_request_is_sent_once_more_to_the_process_that_was_started_next() -> None:
    async def scenario() -> None:
        async with (
            node(1, pacer=UploadPacer(SLOW)) as a,
            node(2) as first,
            node(2) as second,
            line_to(first.door.endpoint()) as line,
            anyio.create_task_group() as tasks,
        ):

            async def restart() -> None:
                await until(lambda: line.bytes_there > 6 * MIB)
                await _lead_to(line, second)

            tasks.start_soon(restart)
            answer = await a.ask(second, frame_of(DATA), via=line.endpoint)
            assert answer.tensors[0].data == DATA
            assert (len(first.heard), len(second.heard)) == (0, 1)

    run(scenario)


def test_an_asker_is_not_left_waiting_for_what_was_given_up_while_the_line_was_down() -> None:
    async def scenario() -> None:
        async with (
            node(1) as a,
            node(2, replace(POOL_LOOPBACK, resume_seconds=0.3)) as b,
            line_to(b.door.endpoint()) as line,
            anyio.create_task_group() as tasks,
        ):
            held = Held(b)

            async def break_for_long() -> None:
                await until(lambda: held.runs == 1)
                line.is_down = True
                line.cut()
                await until(lambda: held.ended == 1)
                line.is_down = False

            tasks.start_soon(break_for_long)
            with pytest.raises(PeerUnreachableError, match="may have been handled"):
                await a.ask(b, frame_of(b"x", "hold"), via=line.endpoint)
            held.go_on.set()
            assert (await a.ask(b, frame_of(b"x", "hold"), via=line.endpoint)).kind == "answer"
            assert held.runs == 2

    run(scenario)


def test_an_asker_is_told_when_its_answer_is_given_up() -> None:
    async def scenario() -> None:
        async with (
            node(1, budget=ByteBudget(MIB, MIB)) as a,
            node(2, replace(POOL_LOOPBACK, answer_seconds=0.5)) as b,
        ):
            taken = await a.budget.reserve(NodeId("other"), MIB)
            with pytest.raises(PeerRefusedError, match="not taken"):
                await a.ask(b, frame_of(bytes(MIB)))
            taken.release()
            assert (await a.ask(b, frame_of(bytes(MIB)))).kind == "answer"
            assert (len(b.heard), a.budget.used) == (2, 0)

    run(scenario)


def test_what_is_not_offered_again_is_forgotten_without_blame() -> None:
    """Its sender gave it up while it had no connection, and could not say so."""

    async def scenario() -> None:
        async with (
            node(2, replace(POOL_LOOPBACK, resume_seconds=0.5)) as b,
            stranger(b) as first,
            stranger(b) as second,
        ):
            await first.send(PacketKind.OFFER, 1, encode(frame_of(DATA)).head)
            assert (await first.receive())[0].kind is PacketKind.ACCEPT
            assert b.budget.used == len(DATA)
            first.stream.close()
            header, reason = await second.receive()
            assert (header.kind, header.transfer) == (PacketKind.REFUSE, 1)
            assert b"not offered again" in reason
            assert (b.budget.used, b.reputation.score(PEER)) == (0, 0)
            await settled(second, encode(Frame("swallow")), 2)

    run(scenario)


def test_a_name_that_is_no_node_id_is_unreachable_and_the_pool_lives() -> None:
    async def scenario() -> None:
        async with node(1) as a, node(2) as b:
            with pytest.raises(NotDeliveredError, match="cannot be reached"):
                await a.ask_at(NodeId("nobody"), b.door.endpoint(), frame_of(b"x"))
            assert (await a.ask(b, frame_of(b"x"))).kind == "answer"

    run(scenario)
