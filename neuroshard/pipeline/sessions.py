"""Bookkeeping of a stage: a bounded table of its drivers' open microbatches, and the intake for the next step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from functools import partial

import anyio
from torch import Tensor

from neuroshard.pipeline.executor import OpenMicrobatch
from neuroshard.pipeline.microbatch import ClosedSessionError, MicrobatchKey, SpoiltMicrobatchError, StageBusyError
from neuroshard.types import NodeId
from neuroshard.waiting import Signal

_REMEMBERED_CLOSED = 64  # closed sessions of a driver that are stored one by one; all older ones count as closed

LEAST_IN_FLIGHT, MOST_IN_FLIGHT = 8, 64


def microbatches_in_flight(stage_count: int) -> int:
    """Microbatches of one driver on their way through a model at the same time: two for each stage, 8 to 64.

    Each stage then computes one while the next one travels to it.
    """
    return min(MOST_IN_FLIGHT, max(LEAST_IN_FLIGHT, 2 * stage_count))


@dataclass(frozen=True)
class SessionLimits:
    """Limits of a stage for its drivers. A driver at its limit must close sessions; other drivers are not affected."""

    drivers: int = 1024  # including those with only closed sessions; the least recently used one is forgotten
    sessions: int = 64
    sessions_of_driver: int = 8
    microbatches_of_session: int = 256
    open_microbatches: int = 2 * LEAST_IN_FLIGHT  # between forward and backward pass; each one keeps its activations
    open_of_driver: int = LEAST_IN_FLIGHT
    kept_bytes: int = 1 << 30  # answers kept for repeated requests
    kept_bytes_of_driver: int = 1 << 29
    idle_seconds: float = 120.0  # a session is closed after its driver has sent no request at all for this time
    forgotten_seconds: float = 1800.0  # the same while its driver sends other requests: a tensor can take minutes


@dataclass(eq=False)
class MicrobatchWork:
    """State of one microbatch at this stage until its session is closed.

    Belongs to the event loop's thread, except `opened`, which a backward pass takes on the compute thread.

    A microbatch becomes `counted` exactly once: as accumulated when it is `done`, otherwise as given up when it was
    dropped or has no open forward pass.
    """

    key: MicrobatchKey
    sequences: int
    tokens: int
    kept_bytes: int
    turn: anyio.Lock = field(default_factory=partial(anyio.Lock, fast_acquire=True))  # a repeated request waits
    running: bool = False  # a job of it is queued or runs
    dropped: bool = False  # given up: its job must not be repeated
    counted: bool = False  # as accumulated or given up
    keeps_graph: bool | None = None  # in its forward pass; None: both passes are one job
    opened: OpenMicrobatch | None = None  # between forward and backward pass
    output: Tensor | None = None  # activations as they were sent, on the CPU
    ids: Tensor | None = None  # of the tokens, if the next stage needs them
    loss_sum: Tensor | None = None  # only in the last stage
    gradient: Tensor | None = None  # of the inputs as it was sent, on the CPU; None in the first stage
    done: bool = False  # its gradients are accumulated
    is_refused: bool = False  # the values of its last pass were not finite, and were dropped
    spoilt: bool = False  # its gradient is not finite
    compute_seconds: float = 0.0  # compute time of its jobs

    def gradient_to_send(self) -> Tensor | None:
        """Gradient for the previous stage, None in the first one. Raises SpoiltMicrobatchError if it is not finite."""
        if self.spoilt:
            raise SpoiltMicrobatchError("The gradient of this microbatch contains values that are not numbers.")
        return self.gradient


@dataclass
class _Session:
    last_used: float
    works: dict[int, MicrobatchWork] = field(default_factory=dict[int, MicrobatchWork])


class _Driver:
    """Sessions of one driver. A closed session number never opens again.

    A late repetition of a request can therefore never accumulate a microbatch a second time.
    """

    def __init__(self) -> None:
        self.sessions: dict[int, _Session] = {}
        self.last_used = 0.0
        self._closed: set[int] = set()
        self._all_closed_below = 0

    def works(self) -> list[MicrobatchWork]:
        works: list[MicrobatchWork] = []
        for session in self.sessions.values():
            works += session.works.values()
        return works

    def usage(self) -> tuple[int, int]:
        """Number of open microbatches, and bytes of the kept answers."""
        open_count = kept_bytes = 0
        for session in self.sessions.values():
            for work in session.works.values():
                open_count += not work.done
                kept_bytes += work.kept_bytes
        return open_count, kept_bytes

    def is_closed(self, session: int) -> bool:
        return session not in self.sessions and (session < self._all_closed_below or session in self._closed)

    def close(self, session: int) -> list[MicrobatchWork]:
        closed = self.sessions.pop(session, None)
        self._closed.add(session)
        if len(self._closed) > _REMEMBERED_CLOSED:
            oldest = min(self._closed)
            self._closed.discard(oldest)
            self._all_closed_below = max(self._all_closed_below, oldest + 1)
        return [] if closed is None else list(closed.works.values())


class SessionTable:
    """All drivers' microbatches at this stage, under limits per driver and in total."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._drivers: OrderedDict[NodeId, _Driver] = OrderedDict()

    @property
    def session_count(self) -> int:
        """Number of sessions that are not closed."""
        return sum(len(driver.sessions) for driver in self._drivers.values())

    def works(self) -> list[MicrobatchWork]:
        """All microbatches of all sessions."""
        return [work for driver in self._drivers.values() for work in driver.works()]

    def peek(self, key: MicrobatchKey) -> MicrobatchWork | None:
        """Return a microbatch without counting its session as used; None if it is unknown."""
        driver = self._drivers.get(key.driver)
        session = None if driver is None else driver.sessions.get(key.session)
        return None if session is None else session.works.get(key.microbatch)

    def knows(self, key: MicrobatchKey) -> bool:
        """Whether `find` returns the microbatch or raises."""
        driver = self._drivers.get(key.driver)
        return driver is not None and (driver.is_closed(key.session) or self.peek(key) is not None)

    def find(self, key: MicrobatchKey, now: float) -> MicrobatchWork | None:
        """Return a microbatch and count its session as used; None if unknown. Raises ClosedSessionError."""
        driver = self._drivers.get(key.driver)
        if driver is None:
            return None
        driver.last_used = now
        if driver.is_closed(key.session):
            raise ClosedSessionError(f"Session {key.session} was closed.", "Begin a new one.")
        session = driver.sessions.get(key.session)
        if session is None:
            return None
        session.last_used = now
        return session.works.get(key.microbatch)

    def obstacle(self, key: MicrobatchKey, kept_bytes: int) -> str | None:
        """Reason why there is no room for another microbatch; None if there is room."""
        limits, own = self._limits, self._drivers.get(key.driver)
        own_sessions = {} if own is None else own.sessions
        own_open, own_kept = (0, 0) if own is None else own.usage()
        session = own_sessions.get(key.session)
        all_open = all_kept = 0
        for driver in self._drivers.values():
            open_count, kept = driver.usage()
            all_open, all_kept = all_open + open_count, all_kept + kept
        obstacle = None
        if session is None and len(own_sessions) >= limits.sessions_of_driver:
            obstacle = f"This driver has {limits.sessions_of_driver} sessions open already."
        elif session is None and self.session_count >= limits.sessions:
            obstacle = f"{limits.sessions} sessions are open already."
        elif session is not None and len(session.works) >= limits.microbatches_of_session:
            obstacle = f"The session has {limits.microbatches_of_session} microbatches already."
        elif own_open >= limits.open_of_driver:
            obstacle = f"This driver has {limits.open_of_driver} microbatches open already."
        elif all_open >= limits.open_microbatches:
            obstacle = f"{limits.open_microbatches} microbatches are open already."
        elif kept_bytes > min(limits.kept_bytes_of_driver - own_kept, limits.kept_bytes - all_kept):
            obstacle = "The memory for answers is full until sessions are closed."
        return obstacle

    def admit(self, work: MicrobatchWork, now: float) -> None:
        """Add a new microbatch. Raises StageBusyError when there is no room."""
        key = work.key
        obstacle = self.obstacle(key, work.kept_bytes)
        if obstacle is not None:
            raise StageBusyError(obstacle, "Try again when others have ended.")
        driver = self._last_used(key.driver)
        driver.last_used = now
        driver.sessions.setdefault(key.session, _Session(now)).works[key.microbatch] = work

    def drop(self, work: MicrobatchWork) -> None:
        """Remove a microbatch, so that its forward pass can be done again."""
        driver = self._drivers.get(work.key.driver)
        session = None if driver is None else driver.sessions.get(work.key.session)
        if session is not None and session.works.get(work.key.microbatch) is work:
            del session.works[work.key.microbatch]

    def close(self, driver: NodeId, session: int) -> list[MicrobatchWork]:
        """Close a session for good and return its microbatches."""
        return self._last_used(driver).close(session)

    def of_idle(self, since: float) -> list[MicrobatchWork]:
        """Microbatches of drivers that have sent no request after the time `since`."""
        return [
            work
            for driver in self._drivers.values()
            if all(session.last_used <= since for session in driver.sessions.values())
            for work in driver.works()
        ]

    def keep_only(self, drivers: Container[NodeId]) -> list[MicrobatchWork]:
        """Close the sessions of all other drivers and return their microbatches."""
        gone = [driver for name, driver in self._drivers.items() if name not in drivers]
        return [work for driver in gone for number in list(driver.sessions) for work in driver.close(number)]

    def expire(self, now: float) -> list[MicrobatchWork]:
        """Close the sessions that were idle for too long and return their microbatches."""
        limits = self._limits
        idle = [
            (name, number)
            for name, driver in self._drivers.items()
            for number, session in driver.sessions.items()
            if now - driver.last_used > limits.idle_seconds or now - session.last_used > limits.forgotten_seconds
            if not any(work.running for work in session.works.values())
        ]
        return [work for name, number in idle for work in self._drivers[name].close(number)]

    def _last_used(self, name: NodeId) -> _Driver:
        """Return a driver as the one that was used last. A new one takes the place of one without sessions."""
        driver = self._drivers.get(name)
        if driver is None:
            # Never forget a driver with sessions. SessionLimits.sessions bounds their number.
            while len(self._drivers) >= self._limits.drivers:
                unused = next((name for name, driver in self._drivers.items() if not driver.sessions), None)
                if unused is None:
                    break
                del self._drivers[unused]
            driver = self._drivers[name] = _Driver()
        self._drivers.move_to_end(name)
        return driver


@dataclass(frozen=True)
class Accumulated:
    """Microbatches in the accumulated gradients of the present step."""

    sequences: int = 0
    tokens: int = 0
    keys: tuple[MicrobatchKey, ...] = ()  # in the order in which they were accumulated


class StepIntake:
    """Counts the microbatches of the present step. Once opened, it admits as many sequences as the step needs.

    Belongs to the event loop's thread. The stage server calls `notify` after every change to a microbatch.
    Open sequences count towards the step before they are accumulated, so that drivers cannot begin more microbatches
    than it needs.
    """

    def __init__(self, sequences_per_step: int) -> None:
        self.changed = Signal()
        self.closed = Signal()  # no more microbatches may begin now
        self.accumulated = Accumulated()
        self.wanted = sequences_per_step
        self.closed_because: str | None = "The stage is not ready yet."  # None: opened and not closed since
        self.is_paused = False  # closed until the owner resumes
        self._open: dict[MicrobatchKey, int] = {}  # sequences of the microbatches between forward and backward pass

    @property
    def open_microbatches(self) -> int:
        """Number of microbatches between their forward and their backward pass."""
        return len(self._open)

    @property
    def missing(self) -> int:
        """Number of sequences that the present step still needs."""
        return max(0, self.wanted - self.accumulated.sequences - sum(self._open.values()))

    @property
    def is_admitting(self) -> bool:
        """Whether it was opened and not closed since. It may already have all the sequences that it needs."""
        return self.closed_because is None

    @property
    def is_open(self) -> bool:
        """Whether another microbatch may begin."""
        return self.closed_because is None and self.missing > 0

    @property
    def is_full(self) -> bool:
        """Whether the step has all its sequences and no microbatch is open."""
        return self.accumulated.sequences >= self.wanted and not self._open

    @property
    def is_idle(self) -> bool:
        """Whether no microbatch is between its forward and its backward pass."""
        return not self._open

    def counts(self, key: MicrobatchKey) -> bool:
        """Whether a microbatch is open, or accumulated for the present step."""
        return key in self._open or key in self.accumulated.keys

    def open(self) -> None:
        """Admit microbatches."""
        self.closed_because, self.is_paused = None, False
        self.notify()

    def close(self, reason: str, *, is_paused: bool = False) -> None:
        """Admit no more microbatches. A driver that waits for data for the next one stops waiting."""
        self.closed_because, self.is_paused = reason, is_paused
        self.notify()

    def begin(self, key: MicrobatchKey, sequences: int) -> None:
        """Count an admitted microbatch as open."""
        self._open[key] = sequences

    def finish(self, key: MicrobatchKey, tokens: int) -> None:
        """Count an open microbatch as accumulated."""
        before, sequences = self.accumulated, self._open.pop(key)
        self.accumulated = Accumulated(before.sequences + sequences, before.tokens + tokens, (*before.keys, key))

    def withdraw(self, key: MicrobatchKey) -> None:
        """Remove a microbatch that was given up from the open ones."""
        del self._open[key]

    def notify(self) -> None:
        """Wake the tasks that wait for a change."""
        self.changed.notify()
        if not self.is_open:
            self.closed.notify()

    def take(self) -> Accumulated:
        """Return the accumulated microbatches and begin the next step without any."""
        taken, self.accumulated = self.accumulated, Accumulated()
        return taken
