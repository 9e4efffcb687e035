from __future__ import annotations

import logging
import socket
import threading
import time
from functools import partial

import anyio
import psutil
import pytest
from trio.testing import wait_all_tasks_blocked

from neuroshard.errors import NetworkRefusedError, UsageError
from neuroshard.messages import Frame, FrameLimits, FrameTooLargeError, TensorPart, TensorSpec, UnexpectedTensorError
from neuroshard.network import (
    Network,
    PeerRefusedError,
    PeerUnreachableError,
    Reputation,
    RequestRefusedError,
    RequestTimeoutError,
    ScoreReason,
    TransportClosedError,
)
from neuroshard.network.libp2p import NetworkOptions, NetworkParts, libp2p_network
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import LOOPBACK, address_of, echo, nodes, port_of, run

MIB = 1024 * 1024


def frame_of(size: int, kind: str = "echo") -> Frame:
    return Frame(kind, {"n": size}, (TensorPart(TensorSpec("x", "uint8", (size,)), bytes(size)),))


def test_a_request_is_answered_with_tensors_and_the_asker_is_known() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):

            async def answer(peer: NodeId, frame: Frame) -> Frame:
                assert peer == b.transport.local_id
                return Frame("echo", {"asked_by": peer, **frame.header}, frame.tensors)

            a.transport.serve("echo", answer, FrameLimits(max_body_bytes=8 * MIB))
            assert await b.transport.connect(address_of(a)) == a.transport.local_id
            frame = frame_of(5 * MIB + 17)
            reply = await b.transport.request(
                a.transport.local_id, frame, reply=FrameLimits(max_body_bytes=8 * MIB), timeout_seconds=20
            )
            assert reply.header == {"asked_by": b.transport.local_id, "n": 5 * MIB + 17}
            assert bytes(reply.tensors[0].data) == bytes(frame.tensors[0].data)
            (connection,) = b.transport.connections()
            assert connection.kind is ConnectionKind.DIRECT
            assert connection.is_outbound
            assert connection.bytes_sent > 5 * MIB
            assert connection.bytes_received > 5 * MIB
            assert abs(connection.since - time.time()) < 20
            await until(lambda: b.transport.connections()[0].rtt_seconds is not None)
            (seen,) = a.transport.connections()
            assert (seen.peer, seen.is_outbound) == (b.transport.local_id, False)

    run(scenario)


def test_requests_go_both_ways_over_one_connection_and_many_at_once() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            for network in (a, b):
                network.transport.serve("echo", echo, FrameLimits(max_body_bytes=MIB), max_concurrent=8)
            await b.transport.connect(address_of(a))
            answers: list[int] = []

            async def ask(asker: Network, peer: NodeId, number: int) -> None:
                reply = await asker.transport.request(peer, Frame("echo", {"number": number}), timeout_seconds=20)
                assert reply.header["number"] == number
                answers.append(number)

            async with anyio.create_task_group() as tasks:
                for number in range(60):
                    tasks.start_soon(ask, b, a.transport.local_id, number)
                    tasks.start_soon(ask, a, b.transport.local_id, number)
            assert sorted(answers) == sorted([*range(60), *range(60)])
            assert len(a.transport.connections()) == len(b.transport.connections()) == 1
            assert a.transport.peers() == {b.transport.local_id}

    # 60 at once wait at the asker's side: a peer never meets the other's limits
    run(scenario)


def test_refusals_and_defects_are_told_and_the_node_lives(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):

            async def refuse(_: NodeId, frame: Frame) -> Frame:
                raise RequestRefusedError("not today")

            async def fail(_: NodeId, frame: Frame) -> Frame:
                raise ZeroDivisionError

            a.transport.serve("refuse", refuse)
            a.transport.serve("fail", fail)
            a.transport.serve("echo", echo)
            with pytest.raises(ValueError, match="already have a handler"):
                a.transport.serve("echo", echo)
            await b.transport.connect(address_of(a))
            peer = a.transport.local_id
            for kind, told in (("refuse", "not today"), ("fail", "internal error"), ("other", "does not answer")):
                with pytest.raises(PeerRefusedError, match=told):
                    await b.transport.request(peer, Frame(kind), timeout_seconds=60)
            assert (await b.transport.request(peer, Frame("echo"), timeout_seconds=60)).kind == "echo"

    with caplog.at_level(logging.ERROR, "neuroshard"):
        run(scenario)
    assert len(caplog.records) == 1
    assert "ZeroDivisionError" in caplog.text


def test_limits_hold_for_questions_and_answers() -> None:
    async def scenario() -> None:
        opinions = [Reputation(), Reputation()]
        async with nodes(2, parts=lambda i: NetworkParts(reputation=opinions[i])) as (a, b):

            async def too_much(_: NodeId, frame: Frame) -> Frame:
                return frame_of(2 * MIB)

            a.transport.serve("small", echo, FrameLimits(max_body_bytes=1000))
            a.transport.serve("too-much", too_much)
            await b.transport.connect(address_of(a))
            peer = a.transport.local_id
            with pytest.raises(PeerRefusedError, match="1000 are allowed"):
                await b.transport.request(peer, frame_of(64 * MIB, "small"), timeout_seconds=60)
            with pytest.raises(FrameTooLargeError):
                await b.transport.request(peer, Frame("too-much"), timeout_seconds=60)
            with pytest.raises(UnexpectedTensorError):
                await b.transport.request(
                    peer,
                    Frame("too-much"),
                    reply=FrameLimits(max_body_bytes=4 * MIB, expected=(TensorSpec("x", "uint8", (3,)),)),
                    timeout_seconds=60,
                )
            assert dict(opinions[0].refused()) == {ScoreReason.OVERSIZED.value: 1}
            assert opinions[0].score(b.transport.local_id) < 0
            assert {reason for reason, _ in opinions[1].refused()} >= {"oversized", "unexpected_tensor"}

    run(scenario)


def test_a_peer_that_does_not_answer_or_answers_late_costs_only_its_own_request() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            started, cancelled = anyio.Event(), anyio.Event()

            async def never(_: NodeId, frame: Frame) -> Frame:
                started.set()
                try:
                    await anyio.sleep_forever()
                finally:
                    cancelled.set()
                raise AssertionError

            a.transport.serve("never", never)
            a.transport.serve("echo", echo)
            await b.transport.connect(address_of(a))
            peer = a.transport.local_id
            with pytest.raises(RequestTimeoutError, match=r"within 0\.2 s"):
                await b.transport.request(peer, Frame("never"), timeout_seconds=0.2)
            # on a busy machine the 0.2 s may end before the other side begins to answer
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(b.transport.request, peer, Frame("never"), timeout_seconds=60))
                await started.wait()
                tasks.cancel_scope.cancel()
            await cancelled.wait()  # whoever is not waited for any more stops working
            assert (await b.transport.request(peer, Frame("echo"), timeout_seconds=60)).kind == "echo"
            assert len(b.transport.connections()) == 1

    run(scenario)


def test_a_request_to_this_node_itself_is_answered() -> None:
    async def scenario() -> None:
        async with nodes(1) as (a,):
            a.transport.serve("echo", echo, FrameLimits(max_body_bytes=10))
            reply = await a.transport.request(
                a.transport.local_id, frame_of(10), reply=FrameLimits(max_body_bytes=10), timeout_seconds=60
            )
            assert reply.header == {"n": 10}
            with pytest.raises(PeerRefusedError):
                await a.transport.request(a.transport.local_id, frame_of(11), timeout_seconds=60)

    run(scenario)


def test_closing_ends_what_waits() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):

            async def never(_: NodeId, frame: Frame) -> Frame:
                await anyio.sleep_forever()
                raise AssertionError

            a.transport.serve("never", never)
            await b.transport.connect(address_of(a))

            async def ask() -> None:
                with pytest.raises(TransportClosedError):
                    await b.transport.request(a.transport.local_id, Frame("never"), timeout_seconds=20)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await wait_all_tasks_blocked(0.1)
                await b.transport.close()

    run(scenario)


def test_a_peer_is_who_its_address_says() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            port = port_of(a)
            with pytest.raises(PeerUnreachableError, match="does not answer as that node"):
                await b.transport.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity_of(9).node_id}")
            with pytest.raises(PeerUnreachableError, match="this node itself"):
                await b.transport.connect(address_of(b))
            assert b.transport.connections() == ()
            await b.transport.connect(address_of(a))
            assert a.transport.local_id == identity_of(1).node_id

    run(scenario)


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:4001", "/ip4/127.0.0.1/tcp/4001", "/ip4/999.0.0.1/tcp/4001/p2p/x", "/ip4/127.0.0.1/udp/1/p2p/x"],
)
def test_an_address_that_is_none_is_a_mistake_of_the_user(address: str) -> None:
    async def scenario() -> None:
        async with nodes(1) as (a,):
            with pytest.raises(UsageError):
                await a.transport.connect(address)

    run(scenario)


def test_nobody_listens_there() -> None:
    async def scenario() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
            async with nodes(1) as (a,):
                with pytest.raises(PeerUnreachableError):
                    await a.transport.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity_of(9).node_id}")

    run(scenario)


def test_a_port_in_use_is_refused_in_words() -> None:
    async def scenario() -> None:
        async with nodes(1) as (a,):
            for relay in (False, True):
                taken = NetworkOptions(host="127.0.0.1", port=port_of(a), relay=relay)
                with pytest.raises(NetworkRefusedError, match="another program uses it"):
                    async with libp2p_network(identity_of(2), taken):
                        pass
            with pytest.raises(NetworkRefusedError, match=r"does not have that address.*--p2p-host"):
                async with libp2p_network(identity_of(2), NetworkOptions(host="192.0.2.1")):
                    pass

    run(scenario)


def test_an_error_within_the_block_comes_out_as_it_is() -> None:
    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            async with libp2p_network(identity_of(1), LOOPBACK):
                raise ZeroDivisionError

    run(scenario)


def test_nothing_is_left_at_the_end() -> None:
    async def scenario() -> None:
        async with nodes(3) as (a, b, c):
            a.transport.serve("echo", echo)
            for network in (b, c):
                await network.transport.connect(address_of(a))
                await network.transport.request(a.transport.local_id, Frame("echo"), timeout_seconds=60)

    run(scenario)  # imports what starts threads of its own, if anything does
    process = psutil.Process()
    threads, descriptors = threading.active_count(), process.num_fds()
    began = time.monotonic()
    run(scenario)
    assert time.monotonic() - began < 30
    assert threading.active_count() == threads
    assert process.num_fds() == descriptors
    assert process.net_connections("inet") == []


def test_a_peer_that_ends_is_noticed_and_can_come_back() -> None:
    async def scenario() -> None:
        async with nodes(1) as (a,):
            a.transport.serve("echo", echo)
            async with nodes(1, first=2) as (b,):
                await b.transport.connect(address_of(a))
                await until(lambda: len(a.transport.connections()) == 1)
            await until(lambda: a.transport.connections() == ())
            async with nodes(1, first=2) as (b,):
                await b.transport.connect(address_of(a))
                reply = await b.transport.request(a.transport.local_id, Frame("echo"), timeout_seconds=60)
                assert reply.kind == "echo"

    run(scenario)
