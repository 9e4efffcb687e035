"""`neuroshard` as a program that starts in milliseconds: it has `preloaded` fork, and stands for the fork to its end.

`python -I -S forked_program.py SOCKET ARGUMENTS` gives the fork its streams, environment and folder, passes signals on,
and ends as the fork does; a kill ends both. It imports little, because it runs for every command.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from types import FrameType

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Run the command line in a fork; return its exit code, negative after a signal."""
    path, *arguments = sys.argv[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        request = {"line": ["neuroshard", *arguments], "environment": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109 - pathlib is slow
        socket.send_fds(connection, [json.dumps(request | {"first": 0}).encode()], [0, 1, 2])
        pid = int(json.loads(connection.recv(1024))["pid"])

        def pass_on(number: int, _frame: FrameType | None) -> None:
            os.kill(pid, number)  # the fork stays a zombie until it is reaped

        for number in PASSED_ON:
            signal.signal(number, pass_on)
        waiting = select.poll()
        waiting.register(os.pidfd_open(pid), select.POLLIN)
        waiting.poll()
        connection.send(json.dumps({"reap": pid}).encode())
        return int(json.loads(connection.recv(1024))["code"])


if __name__ == "__main__":
    code = main()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
