"""A line that is cut without a word ends its connections, on either side, whoever was to speak next."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import trio
from namespaces import FAR, NEAR, local_network

from neuroshard.network.keepalive import QUIET_SECONDS, TRIES, UNANSWERED_SECONDS
from neuroshard.network.libp2p.sockets import SocketBytes
from neuroshard.network.pool import tcp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what it was told")


def told(connection: socket.socket) -> tuple[int, int, int, int]:
    return (
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
    )


EXPECTED = (1, QUIET_SECONDS, TRIES, 1000 * UNANSWERED_SECONDS)


def test_connections_of_the_pool_notice_silence() -> None:
    with socket.socket() as connection:
        tcp.set_up(connection, None)
        assert told(connection) == EXPECTED


def test_connections_of_libp2p_notice_silence() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            stream = await trio.open_tcp_stream(*listener.getsockname())
            async with stream:
                SocketBytes(stream)
                assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == QUIET_SECONDS
                assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * UNANSWERED_SECONDS

    trio.run(scenario)


def test_the_end_of_a_line_is_noticed_while_nobody_speaks() -> None:
    program = Path(__file__).with_name("silence_program.py")
    with local_network() as (near, far), near.start(program, NEAR) as listener:
        assert listener.line() == "listening"
        with far.start(program, NEAR, "call") as caller:
            assert caller.line() == "connected"
            assert listener.line() == "accepted"
            far.run("ip", "address", "delete", f"{FAR}/24", "dev", "lan")  # what comes is dropped without a word
            assert listener.line(10) == "TimeoutError"
