"""The process of a node: lock of its data folder and port, signals, end of input, the request to stop, its share."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from types import FrameType
from typing import TYPE_CHECKING, Self

from neuroshard.api.access import new_entrance
from neuroshard.api.address import dashboard_url
from neuroshard.config.instance_lock import InstanceLock, LockOwner
from neuroshard.errors import ConflictError
from neuroshard.host.desktop import open_browser_at

if TYPE_CHECKING:
    import trio


@dataclass(frozen=True)
class ListenerHandover:
    """Lock and listening socket that a first run passes to its node; without a listener the node binds its own."""

    lock: InstanceLock
    listener: socket.socket | None


def show_first_instance(data_dir: Path, running: LockOwner, *, open_browser: bool) -> int:
    """Show the page of the node that already runs on this data folder; return exit code 0."""
    url = dashboard_url(running.host, running.port) if running.port else "its dashboard"
    does = "already waits for its set-up" if running.is_setup else "already runs"
    sys.stdout.write(f"A node {does} on this data folder (process {running.pid}): {url}\n")
    if open_browser and running.port:
        open_browser_at(new_entrance(Path(running.page_folder or data_dir), url, time.time()).page.as_uri())
    return 0


class StopRequest:
    """Requests a stop from any thread, even before the event loop runs. The first reason wins."""

    def __init__(self, *, may_restart: bool = True) -> None:
        """With `may_restart` false nothing would start the node again, so a request to restart is refused."""
        self._may_restart = may_restart
        self._lock = Lock()
        self._token: trio.lowlevel.TrioToken | None = None
        self._reaction: Callable[[], object] = _nothing
        self.reason: str | None = None
        self.starts_again = False

    def ask_restart(self, reason: str) -> None:
        """Request a stop after which the node starts again in this process, for example with another run.

        Raises ConflictError if nothing would start it again.
        """
        if not self._may_restart:
            raise ConflictError("This node cannot start itself again.", "Stop it, and start it again.")
        self._ask(reason, starts_again=True)

    def ask(self, reason: str) -> None:
        """Request a stop. The first call keeps its reason and runs the present reaction on the event loop.

        After it, nothing starts again, also if a restart was requested before.
        """
        self._ask(reason, starts_again=False)

    def _ask(self, reason: str, *, starts_again: bool) -> None:
        with self._lock:
            is_first, self.reason = self.reason is None, self.reason or reason
            self.starts_again = starts_again and (is_first or self.starts_again)
            if is_first and self._token is not None:
                import trio

                with suppress(trio.RunFinishedError):  # the loop has ended already: nothing is left to stop
                    self._token.run_sync_soon(self._happen)  # pyright: ignore[reportUnknownMemberType]

    def react(self, reaction: Callable[[], object]) -> None:
        """Set the reaction to a stop, called on the event loop's thread; it replaces the one of work that has ended.

        If a stop was requested already, the reaction runs at once. The lock ensures that a concurrent `ask` is seen
        either here or by the new reaction, never lost between both.
        """
        import trio  # here, because the dashboard answers before the event loop is loaded

        with self._lock:
            self._token = trio.lowlevel.current_trio_token()
            self._reaction = reaction
            was_asked = self.reason is not None
        if was_asked:
            reaction()

    def _happen(self) -> None:
        self._reaction()


def _nothing() -> None:
    """The reaction before `react` is called: none."""


def _wait_for_end_of_input(stop: StopRequest) -> None:
    while os.read(0, 4096):  # not sys.stdin: its lock would be held when the interpreter ends
        pass
    stop.ask("the program that started this node has ended")


class MainThreadWaker:
    """Lets the main thread sleep until a signal arrives or another thread wakes it. Close it after use.

    The system may deliver a signal to any thread, but Python runs its handler only when the main thread executes code.
    A wait on a lock would therefore delay the handler. So the main thread waits on a socket, and the interpreter
    writes a byte to it as soon as a signal arrives.
    """

    def __init__(self) -> None:
        self._receiving, self._sending = socket.socketpair()
        self._sending.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._receiving.close()
        self._sending.close()

    def fileno(self) -> int:
        """Descriptor of the socket for `signal.set_wakeup_fd`."""
        return self._sending.fileno()

    def wake(self) -> None:
        """End the present wait, or the next one. Any thread may call this, also after the end of the waits."""
        with suppress(OSError):  # closed, or full: then a wake-up is already waiting
            self._sending.send(b"\0")

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for a signal or for `wake`, at most for this time."""
        self._receiving.settimeout(timeout_seconds)
        with suppress(TimeoutError):
            self._receiving.recv(4096)


@contextmanager
def outside_requests(stop: StopRequest, waker: MainThreadWaker, *, ends_with_stdin: bool) -> Generator[None]:
    """SIGINT and SIGTERM ask for a clean stop; a second one ends the process at once.

    The main thread enters this block, and calls `waker.wait` in it.
    """
    if ends_with_stdin:
        Thread(target=_wait_for_end_of_input, args=(stop,), name="neuroshard-leash", daemon=True).start()
    received = 0

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 1:
            os._exit(128 + number)
        stop.ask(f"{signal.Signals(number).name} received")

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    descriptor = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in previous.items():
            signal.signal(number, handler)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
LARGEST_KEPT = 2**31 - 1  # bytes; the most that mallopt takes
LARGEST_IN_HEAP = 32 * 2**20  # bytes; glibc refuses more


def use_one_heap() -> None:
    """Let all threads allocate from one heap, where the C library is glibc. Call it before threads are started.

    By default glibc gives each thread a heap of its own. Other threads then cannot use the memory that a thread frees,
    and a block that stays keeps the pages around it: a paused node kept 13 MB more. Threads that allocate at the same
    time wait for each other, which is rare here: nearly all of them hold Python's lock.

    The heap keeps what a step frees, because the next step needs it again. Otherwise each step of 5 M parameters in
    bf16 fetched 15,000 pages from the system, 500 now, which took 8 % of its processor time. A pause gives them back.
    Options that the owner has set in the environment stay.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if option is None:
        return
    for name, parameter, value in (
        ("MALLOC_ARENA_MAX", M_ARENA_MAX, 1),
        ("MALLOC_TRIM_THRESHOLD_", M_TRIM_THRESHOLD, LARGEST_KEPT),
        ("MALLOC_MMAP_THRESHOLD_", M_MMAP_THRESHOLD, LARGEST_IN_HEAP),
    ):
        if name not in os.environ:
            option(ctypes.c_int(parameter), ctypes.c_int(value))


SESSION_NICENESS = 14  # next to one busy program of another session: 4 % of a processor


def lower_session_share() -> None:
    """Give the session of this process a small share of a busy processor, if this process leads it.

    Linux divides a processor between sessions first ("autogroup", sched(7)), and between the threads of each by their
    niceness. A node that the system started has a session of its own, so the niceness of its threads alone would leave
    it half of the processor. In a terminal the shell leads the session, and its share is not changed.
    """
    if sys.platform == "linux" and os.getsid(0) == os.getpid():
        with suppress(OSError):  # a kernel without it
            Path("/proc/self/autogroup").write_text(str(SESSION_NICENESS), encoding="ascii")
