"""Waits at HOST for one connection and then for its end, or calls who waits: `silence_program.py HOST [call]`."""

from __future__ import annotations

import socket
import sys

from neuroshard.network import keepalive as silence

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


if __name__ == "__main__":
    (call if sys.argv[2:] == ["call"] else wait)(sys.argv[1])
