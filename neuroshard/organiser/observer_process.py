"""The observer as a process of its own: started with the organiser, and again when it ends.

The organiser signs an admission for it every half hour, and reads its observations. It never sees the authority key.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import IO

from neuroshard.identity.admissions import ADMISSION_SECONDS, Admission, sign_admission
from neuroshard.identity.signing import SigningKey
from neuroshard.organiser.observations import (
    MAX_LINE_BYTES,
    GivenAdmission,
    Observation,
    ObserverEnded,
    ObserverStarted,
    observation_line,
    read_observation,
)
from neuroshard.types import RunId

_LOG = logging.getLogger(__name__)

OBSERVER = "observer"  # its folder below that of the run, and the stage of its admission
ADMISSION_PAUSE_SECONDS = ADMISSION_SECONDS / 2
AGAIN_SECONDS = 5.0
LONGEST_AGAIN_SECONDS = 300.0
END_SECONDS = 10.0


class ObserverProcess:
    """Keeps the observer running from `start` to `stop`, and passes on what it reports."""

    def __init__(
        self,
        command: Sequence[str],
        run_id: RunId,
        authority: SigningKey,
        note: Callable[[Observation], object],
        *,
        output: Path,
        now: Callable[[], float],
    ) -> None:
        """`note` is called on the thread that reads; the errors of the process go to the file `output`."""
        self._command = tuple(command)
        self._run_id = run_id
        self._authority = authority
        self._note = note
        self._output = output
        self._now = now
        self._stopping = Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = Thread(target=self._keep, name="observer", daemon=True)

    def start(self) -> None:
        """Start the process, without waiting for it."""
        self._thread.start()

    def stop(self) -> None:
        """End the process, which notices the end of its input, and wait for it."""
        self._stopping.set()
        process = self._process
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        self._thread.join(END_SECONDS)

    def _keep(self) -> None:
        pause = AGAIN_SECONDS
        while not self._stopping.is_set():
            began = self._now()
            try:
                code = f"exit code {self._run()}"
            except OSError as error:
                code = str(error)
            if self._stopping.is_set():
                return
            pause = AGAIN_SECONDS if self._now() - began > LONGEST_AGAIN_SECONDS else pause
            _LOG.error("The monitor ended (%s) and starts again. %s may name the reason.", code, self._output)
            self._note(ObserverEnded(str(code)))
            self._stopping.wait(pause)
            pause = min(2 * pause, LONGEST_AGAIN_SECONDS)

    def _run(self) -> int:
        """Run the process once; return its exit code. Raises OSError if it cannot start."""
        with (
            self._output.open("wb") as errors,
            subprocess.Popen(  # noqa: S603 - this very program
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            ) as process,
        ):
            self._process = process
            done = Event()
            try:
                assert process.stdout is not None
                assert process.stdin is not None
                if self._stopping.is_set():
                    process.stdin.close()
                self._read(process.stdout, process.stdin, done)
            finally:
                done.set()
        return process.returncode

    def _read(self, lines: IO[bytes], answers: IO[bytes], done: Event) -> None:
        while line := lines.readline(MAX_LINE_BYTES):
            try:
                observation = read_observation(line)
            except ValueError as error:
                _LOG.error("A line of the monitor cannot be read: %s", error)
                continue
            if isinstance(observation, ObserverStarted):
                Thread(target=self._admit, args=(observation, answers, done), daemon=True).start()
            self._note(observation)

    def _admit(self, observer: ObserverStarted, answers: IO[bytes], done: Event) -> None:
        """Sign admissions for the observer's node until its process has ended."""
        while True:
            at = int(self._now())
            admission = Admission(
                self._run_id, observer.node, observer.wallet, OBSERVER, None, at, at, at + ADMISSION_SECONDS
            )
            given = GivenAdmission(sign_admission(self._authority, admission))
            try:
                answers.write(observation_line(given))
                answers.flush()
            except (OSError, ValueError):  # it has ended
                return
            if done.wait(ADMISSION_PAUSE_SECONDS):
                return
