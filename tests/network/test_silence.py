"""A line that is cut without a word ends its connections, on either side, whoever was to speak next."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import trio

from neuroshard.network import tcp_options as silence
from neuroshard.network.libp2p.sockets import SocketBytes
from neuroshard.network.tcp_options import QUIET_SECONDS, UNANSWERED_SECONDS
from tests.worlds.lan import FAR, NEAR, local_network

PORT = 4567


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def call(host: str) -> None:
    with socket.create_connection((host, PORT)) as connection:
        say("connected")
        connection.recv(1)  # until the test ends this program


def wait(host: str) -> None:
    silence.QUIET_SECONDS = silence.AGAIN_SECONDS = silence.TRIES = silence.UNANSWERED_SECONDS = 1
    with socket.create_server((host, PORT)) as listener:
        say("listening")
        connection, _ = listener.accept()
        with connection:
            silence.enable_keepalive(connection.setsockopt)
            say("accepted")
            try:
                connection.recv(1)
            except OSError as error:
                say(type(error).__name__)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what it was told")


def test_connections_notice_silence() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            stream = await trio.open_tcp_stream(*listener.getsockname())
            async with stream:
                SocketBytes(stream)
                assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == QUIET_SECONDS
                assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * UNANSWERED_SECONDS

    trio.run(scenario)


def test_the_end_of_a_line_is_noticed_while_nobody_speaks() -> None:
    program = Path(__file__)
    with local_network() as (near, far), near.start(program, NEAR) as listener:
        assert listener.line() == "listening"
        with far.start(program, NEAR, "call") as caller:
            assert caller.line() == "connected"
            assert listener.line() == "accepted"
            far.run("ip", "address", "delete", f"{FAR}/24", "dev", "lan")  # what comes is dropped without a word
            assert listener.line(10) == "TimeoutError"


if __name__ == "__main__":
    (call if sys.argv[2:] == ["call"] else wait)(sys.argv[1])
