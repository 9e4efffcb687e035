"""The processes of the ranks that rank 0 starts itself: their start, the reason of their end, and their end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from threading import Lock, Thread

import msgspec
from msgspec import Struct

from neuroshard.training.site.plan import LAUNCHER_VARIABLES

WORKER = "neuroshard.training.site.worker"
REASON = "reason: "  # begins the line with which a rank reports why it ends
END_SECONDS = 3.0


class RankStart(Struct, frozen=True):
    """First line of a rank's standard input. The rank ends when this input ends."""

    rank: int
    width: int
    folder: str  # of the meeting file
    device: str  # its kind
    threads: int
    timeout_seconds: float


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a rank: without the node's settings and token, and without a launcher's variables."""
    return {
        name: value
        for name, value in environment.items()
        if not (name.startswith("NEUROSHARD_") or name in LAUNCHER_VARIABLES)
    }


def end_words(code: int) -> str:
    """Words for the exit status of a process: a signal or an exit code."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def open_rank(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process of a rank, with pipes for its standard input and output."""
    return subprocess.Popen(  # noqa: S603 - this very program
        [sys.executable, "-m", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl+C reaches rank 0 only, which ends the others after its last checkpoint
    )


class RankProcesses:
    """Processes of ranks 1 and up. A thread for each of them waits for its end, and calls `on_end` once."""

    def __init__(self, starts: list[RankStart], on_end: Callable[[int, str], None]) -> None:
        """`on_end` gets the rank and the reason, such as "signal 9" or "out of memory", on another thread."""
        self._on_end = on_end
        self._lock = Lock()
        self._is_closing = False
        self._processes = dict[int, subprocess.Popen[bytes]]()
        self._watchers = list[Thread]()
        for start in starts:
            self._start(start)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def _start(self, start: RankStart) -> None:
        process = open_rank(rank_environment(os.environ))
        self._processes[start.rank] = process
        if process.stdin is not None:
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            process.stdin.flush()
        watcher = Thread(target=self._watch, args=(start.rank, process), name=f"rank-{start.rank}", daemon=True)
        watcher.start()
        self._watchers.append(watcher)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        reason = ""
        for line in process.stdout or ():
            text = line.decode(errors="replace").strip()
            if text.startswith(REASON):
                reason = text.removeprefix(REASON)
        code = process.wait()
        with self._lock:
            is_closing = self._is_closing
        if not is_closing:
            self._on_end(rank, reason or end_words(code))

    def close(self) -> None:
        """End all processes: by the end of their input, or after END_SECONDS by a signal."""
        with self._lock:
            self._is_closing = True
        for process in self._processes.values():
            if process.stdin is not None:
                try:
                    process.stdin.close()
                except OSError:  # the process has ended, and input that was not sent cannot be
                    continue
        for process, watcher in zip(self._processes.values(), self._watchers, strict=True):
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM)
                process.wait()
            watcher.join()
            if process.stdout is not None:
                process.stdout.close()
