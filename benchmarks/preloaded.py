"""Nodes and commands that start without importing anything, as forks of a process that has imported all they use.

For the tiny size of the benchmarks and for tests, where imports are most of the work. A fork runs the same command
from its first line; only its choice of a precision is not measured until it is clear. `python -m benchmarks.preloaded
FD FD` is the process that forks; it ends with its client.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import IO, Any, NoReturn
from weakref import finalize

VARIABLE = "BENCHMARK_PRELOAD"  # set in the environment of those who want it
MODULES = (
    "neuroshard.cli.main",
    "neuroshard.node.launch",
    "neuroshard.node.application",
    "neuroshard.node.assembly",
    "neuroshard.membership.network_opening",
    "neuroshard.network.libp2p",
    "neuroshard.node.demo",
    "neuroshard.dataset",
    "neuroshard.training.site.worker",
    "typer.rich_utils",
    "pydantic.v1",
    "netaddr",
)
# A node sets these before it imports PyTorch, which is too late in a fork.
THREADS = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000"}
MESSAGE_BYTES = 1 << 20
LONGEST_QUEUE = 64


class ForkedProcess:
    """A process that another one has forked, with the methods of `subprocess.Popen` that callers use."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._forker = forker
        self._end = os.pidfd_open(pid)  # readable once the process has ended; it stays a zombie until it is reaped
        finalize(self, os.close, self._end)  # and no earlier: several threads may wait

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        return self.returncode if self.returncode is not None or not self._has_ended(0) else self._reap()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is not None:
            return self.returncode
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired("neuroshard", timeout or 0.0)
        return self._reap()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _has_ended(self, seconds: float | None) -> bool:
        waiting = select.poll()  # select.select knows no file descriptors above 1023
        waiting.register(self._end, select.POLLIN)
        return bool(waiting.poll(None if seconds is None else max(0.0, seconds) * 1000))

    def _reap(self) -> int:
        with self._forker.lock:
            if self.returncode is None:
                self.returncode = int(self._forker.ask({"reap": self.pid})["code"])
        return self.returncode


class PipedProcess(ForkedProcess):
    """A forked process whose standard input and output are pipes of this one."""

    def __init__(self, forker: Forker, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        super().__init__(forker, pid)
        self.stdin = stdin
        self.stdout = stdout


class Forker:
    """The client of the process that forks, which is started here."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._folder = Path(mkdtemp(prefix="forker-"))
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self.path))
            listener.listen(LONGEST_QUEUE)
            numbers = (theirs.fileno(), listener.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.preloaded", *map(str, numbers)],
                env={**os.environ, **THREADS, "PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    @property
    def path(self) -> Path:
        """Of the socket for `forked_program`."""
        return self._folder / "socket"

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: Sequence[int] = (),
        *,
        script: Path | None = None,
        has_session: bool = False,
    ) -> ForkedProcess:
        """Start `neuroshard`, or a script instead of it, with these arguments in the present folder.

        `streams` are the file descriptors of its standard output and standard error; without them nothing is kept.
        With a session of its own, no terminal controls it.
        """
        line = ["neuroshard" if script is None else str(script), *arguments]
        request: dict[str, Any] = {"line": line, "environment": {**environment}, "folder": str(Path.cwd())}
        request["has_session"] = has_session
        with self.lock:
            return ForkedProcess(self, int(self.ask(request, streams)["pid"]))

    def start_piped(self, script: Path, environment: Mapping[str, str]) -> PipedProcess:
        """Run a script in a session of its own, with pipes for its standard input and output."""
        theirs, stdin = os.pipe()
        stdout, output = os.pipe()
        request: dict[str, Any] = {"line": [str(script)], "environment": {**environment}, "folder": str(Path.cwd())}
        request |= {"first": 0, "has_session": True}
        try:
            with self.lock:
                pid = int(self.ask(request, (theirs, output))["pid"])
                return PipedProcess(self, pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"))
        finally:
            os.close(theirs)
            os.close(output)

    def ask(self, request: Mapping[str, Any], streams: Sequence[int] = ()) -> dict[str, Any]:
        """Return the answer to a request. Raises RuntimeError if the process that forks has ended."""
        with self.lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
            answer = self._socket.recv(MESSAGE_BYTES)
        if not answer:
            raise RuntimeError(f"the process that forks ended with code {self._process.wait()}")
        return dict(json.loads(answer))

    def close(self) -> None:
        """End the process that forks; it kills what it started."""
        self._socket.close()
        self._process.wait()
        rmtree(self._folder)


def is_wanted() -> bool:
    """Whether nodes are forked here."""
    return sys.platform == "linux" and bool(os.environ.get(VARIABLE))


@cache
def forker() -> Forker:
    """Return the one of this process. It ends with this process."""
    made = Forker()
    atexit.register(made.close)
    return made


def program() -> list[str]:
    """Return the command line of `neuroshard` for those who start it as a process of their own: a fork, if wanted."""
    if not is_wanted():
        return [sys.executable, "-m", "neuroshard"]
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("forked_program.py")), str(forker().path)]


def serve(client: socket.socket, listener: socket.socket) -> list[str] | None:
    """Fork for each request. Return the command line in a child, None in the parent when the client has gone.

    Others come over the listener. What a client has started is killed when the client goes.
    """
    living = {client: set[int]()}
    while client in living:
        ready = select.select([listener, *living], [], [])[0]
        if listener in ready:
            living[listener.accept()[0]] = set()
        for connection in living.keys() & set(ready):
            data, streams, *_ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
            if not data:
                connection.close()
                _kill(living.pop(connection))
                continue
            request = json.loads(data)
            if pid := request.get("reap"):
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                living[connection].discard(pid)
                _tell(connection, {"code": code})
                continue
            pid = os.fork()
            if pid == 0:
                for each in (listener, *living):
                    each.close()
                _become(request, streams)
                return list(request["line"])
            for stream in streams:
                os.close(stream)
            living[connection].add(pid)
            _tell(connection, {"pid": pid})
    for pids in living.values():
        _kill(pids)
    return None


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _tell(connection: socket.socket, answer: Mapping[str, int]) -> None:
    with suppress(BrokenPipeError):  # it has gone, which its connection says next
        connection.send(json.dumps(answer).encode())


def _become(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Take the folder, the environment and the streams of a request; `first` is the number of the first stream."""
    if request.get("has_session"):
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, stream in enumerate(streams, request.get("first", 1)):
        os.dup2(stream, number)
        os.close(stream)


def main() -> None:
    """Import, then fork until the client has gone; each child runs its command line."""
    # who starts this process needs none of these
    from neuroshard.network.libp2p.lean_import import lean_libp2p
    from neuroshard.pipeline import precision_probe

    for name in MODULES:
        import_module(name)
    with lean_libp2p():
        import_module("neuroshard.network.libp2p.network")
    precision_probe.MOST_ROUNDS = 1  # beside other tests no pass is steady, and each node would measure for 4 s
    gc.collect()
    gc.freeze()  # the children do not copy the pages of what is collected never
    client, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    line = serve(client, listener)
    if line is not None:
        sys.argv = line
        try:
            if line[0] == "neuroshard":
                runpy.run_module("neuroshard", run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(line[0], run_name="__main__")
        except SystemExit as end:
            leave(end.code)
        leave(0)


def leave(code: str | int | None) -> NoReturn:
    """End a fork as the interpreter would, but without taking every module apart: that writes to each page.

    What it copies then is most of the work of a short command.
    """
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - waits for the threads that are no daemons
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(bool(code)))


if __name__ == "__main__":
    main()
