from __future__ import annotations

from random import Random
from typing import get_args

import anyio
import pytest

from neuroshard.messages import (
    DType,
    Frame,
    FrameLimits,
    FrameTooLargeError,
    TensorPart,
    TensorSpec,
    UnexpectedTensorError,
)
from neuroshard.messages.frame import ITEM_BYTES
from neuroshard.network import PeerRefusedError, PeerUnreachableError, RequestRefusedError, RequestTimeoutError
from neuroshard.network.pool import PoolOptions
from neuroshard.types import NodeId
from tests.worlds.clock import until
from tests.worlds.network_nodes import LIMITS, MIB, POOL_LOOPBACK, frame_of, line_to, node, run, tensor, two_nodes

FOUR = PoolOptions(fixed_connections=4)


def test_every_type_comes_back_as_it_went() -> None:
    random = Random(1)
    parts = tuple(
        TensorPart(TensorSpec(dtype, dtype, (3, 5, 7)), random.randbytes(105 * ITEM_BYTES[dtype]))
        for dtype in get_args(DType)
    )
    empty = TensorPart(TensorSpec("empty", "float32", (0, 4)), b"")

    async def scenario() -> None:
        async with two_nodes() as (a, b):
            answer = await a.ask(b, Frame("echo", {"step": 3, "text": "é"}, (*parts, empty)))
            assert answer.kind == "answer"
            assert answer.header == {"step": 3, "text": "é"}
            assert [(part.spec, bytes(part.data)) for part in answer.tensors] == [
                (part.spec, part.data) for part in (*parts, empty)
            ]

    run(scenario)


@pytest.mark.parametrize("options", [POOL_LOOPBACK, FOUR])
@pytest.mark.parametrize("size", [1, 64 * 1024, MIB - 1, MIB, MIB + 1, 3 * MIB + 12345])
def test_sizes_around_blocks_and_chunks(options: PoolOptions, size: int) -> None:
    data = Random(size).randbytes(size)

    async def scenario() -> None:
        async with two_nodes(options) as (a, b):
            answer = await a.ask(b, frame_of(data))
            assert answer.tensors[0].data == data
            assert (a.budget.used, b.budget.used) == (0, 0)

    run(scenario)


@pytest.mark.parametrize("options", [POOL_LOOPBACK, PoolOptions(fixed_connections=16)])
def test_64_mib_there_and_back(options: PoolOptions) -> None:
    data = Random(2).randbytes(64 * MIB)

    async def scenario() -> None:
        async with two_nodes(options) as (a, b):
            answer = await a.ask(b, frame_of(data))
            assert answer.tensors[0].data == data
            assert b.received_from(a.id) < len(data) * 1.01

    run(scenario)


def test_many_requests_in_both_directions_at_once() -> None:
    async def scenario() -> None:
        async with two_nodes(FOUR) as (a, b), anyio.create_task_group() as tasks:
            for number in range(12):
                for asker, answerer in ((a, b), (b, a)):
                    tasks.start_soon(_echo_once, asker, answerer, number)

    async def _echo_once(asker, answerer, number: int) -> None:  # type: ignore[no-untyped-def]
        data = Random(number).randbytes(number * 300_000)
        assert (await asker.ask(answerer, frame_of(data))).tensors[0].data == data

    run(scenario)


def test_connections_are_kept_for_the_next_request() -> None:
    async def scenario() -> None:
        async with two_nodes() as (a, b), line_to(b.door.endpoint()) as line:
            for _ in range(3):
                await a.ask(b, frame_of(b"x"), via=line.endpoint)
            assert line.connections == 1
            assert a.pool.traffic()[b.id].connections == 1

    run(scenario)


def test_whoever_was_dialled_asks_over_the_same_connection() -> None:
    async def scenario() -> None:
        async with two_nodes() as (a, b):
            with pytest.raises(PeerUnreachableError, match="cannot be reached"):
                await b.pool.request(a.id, frame_of(b"x"), LIMITS, timeout_seconds=60)
            await a.ask(b, frame_of(b"x"))
            answer = await b.pool.request(a.id, frame_of(b"back"), LIMITS, timeout_seconds=60)
            assert answer.tensors[0].data == b"back"

    run(scenario)


def test_a_refusal_tells_its_reason() -> None:
    async def refuse(_: NodeId, __: Frame) -> Frame:
        raise RequestRefusedError("Not today.")

    async def break_down(_: NodeId, __: Frame) -> Frame:
        raise ZeroDivisionError

    async def scenario() -> None:
        async with two_nodes() as (a, b):
            b.server.serve("refuse", refuse, FrameLimits(), 1)
            b.server.serve("break", break_down, FrameLimits(), 1)
            with pytest.raises(PeerRefusedError, match="Not today"):
                await a.ask(b, Frame("refuse"))
            with pytest.raises(PeerRefusedError, match="internal error"):
                await a.ask(b, Frame("break"))
            with pytest.raises(PeerRefusedError, match="does not answer"):
                await a.ask(b, Frame("unheard-of"))
            with pytest.raises(PeerRefusedError, match="3 bytes of tensors; 0 are allowed"):
                await a.ask(b, Frame("refuse", {}, (tensor(b"abc"),)))
            assert (await a.ask(b, frame_of(b"fine"))).tensors[0].data == b"fine"

    run(scenario)


def test_an_answer_that_cannot_travel_is_told_as_an_error() -> None:
    async def answer_nonsense(_: NodeId, __: Frame) -> Frame:
        return Frame("answer", {}, (TensorPart(TensorSpec("x", "uint8", (3,)), b"four"),))

    async def scenario() -> None:
        async with two_nodes() as (a, b):
            b.server.serve("nonsense", answer_nonsense, FrameLimits(), 1)
            with pytest.raises(PeerRefusedError, match="internal error"):
                await a.ask(b, Frame("nonsense"))

    run(scenario)


def test_an_answer_must_keep_the_limits_of_the_question() -> None:
    async def scenario() -> None:
        async with two_nodes() as (a, b):
            with pytest.raises(FrameTooLargeError):
                await a.ask(b, frame_of(bytes(1000)), FrameLimits(max_body_bytes=999))
            other = FrameLimits(max_body_bytes=1000, expected=(TensorSpec("x", "int8", (1000,)),))
            with pytest.raises(UnexpectedTensorError):
                await a.ask(b, frame_of(bytes(1000)), other)
            assert a.budget.used == 0
            assert a.reputation.score(b.id) < 0

    run(scenario)


def test_a_peer_that_never_answers_is_not_waited_for_and_its_work_ends() -> None:
    started, ended = anyio.Event(), anyio.Event()

    async def never(_: NodeId, __: Frame) -> Frame:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()
        raise AssertionError

    async def scenario() -> None:
        async with two_nodes() as (a, b):
            b.server.serve("never", never, LIMITS, 1)
            with pytest.raises(RequestTimeoutError):
                await a.ask(b, Frame("never", {}, (tensor(bytes(MIB)),)), timeout=1)
            assert started.is_set()
            await ended.wait()
            await until(lambda: b.budget.used == 0)

    run(scenario)


def test_nobody_listens() -> None:
    async def scenario() -> None:
        async with node(1) as a:
            async with node(2) as b:
                endpoint = b.door.endpoint()
            started = anyio.current_time()
            with pytest.raises(PeerUnreachableError, match="cannot be reached"):
                await a.ask(b, frame_of(b"x"), via=endpoint)
            assert anyio.current_time() - started < 5

    run(scenario)


def test_a_node_does_not_ask_itself() -> None:
    async def scenario() -> None:
        async with node(1) as a:
            with pytest.raises(PeerUnreachableError, match="itself"):
                await a.ask(a, frame_of(b"x"))

    run(scenario)
