"""A site as rank 0 sees it: waves of passes, commands to the other ranks, their failures and their next start."""

from __future__ import annotations

import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from torch import Tensor

from neuroshard.errors import SiteRestartError, UsageError
from neuroshard.pipeline.executor import PassResult, Precision
from neuroshard.pipeline.microbatch import SiteFailedError
from neuroshard.training.site.commands import Command, Done, EndSite, ForgetStages, PassKind, RunPass, to_message
from neuroshard.training.site.meeting_folder import make_meeting_folder
from neuroshard.training.site.plan import SitePlan
from neuroshard.training.site.process_group import LostRankError, ProcessGroup, form_of, meet
from neuroshard.training.site.rank_processes import RankProcesses, RankStart
from neuroshard.training.site.worker import rank_facts

_LOG = logging.getLogger(__name__)

WAVE_SECONDS = 0.02  # a pass waits this long for others
MEETING_SECONDS = 120.0
NAMING_SECONDS = 2.0  # after a broken connection, until the end of the process names the cause
MOST_RESTARTS, RESTART_SECONDS = 3, 600.0


class LocalPart(Protocol):
    """The part of a stage that rank 0 computes itself."""

    def prepare(self) -> None:
        """Bring the other ranks to the weights of rank 0."""
        ...

    def compute(self, operation: PassKind, part: PassPart | None) -> None:
        """Compute rank 0's part of a wave. An error that it raises leaves the other ranks waiting."""
        ...

    def take(self, part: PassPart, rank: int, done: Done, tensors: Sequence[Tensor | None]) -> PassResult:
        """Make the result of a pass that another rank has run."""
        ...


@dataclass(frozen=True)
class WaveKind:
    """Properties that all passes of one wave have in common."""

    stage: int
    operation: PassKind
    precision: Precision
    keeps_graph: bool
    forms: tuple[object, ...]


@dataclass(eq=False)
class PassPart:
    """One pass that waits for its wave. `tensors` are inputs, labels and ids, or the gradient."""

    kind: WaveKind
    tensors: tuple[Tensor | None, ...]
    number: int  # of the microbatch
    here: Callable[[], PassResult]  # computes it on rank 0
    result: Future[PassResult] = field(default_factory=Future[PassResult])


class Site:
    """The ranks of one node. Belongs to the compute thread, except `begin` and `close`, which come before and after.

    A failure of a rank fails all passes, and the present step of every stage, with SiteFailedError until `restart`.
    """

    def __init__(
        self,
        plan: SitePlan,
        width: int,
        device: str,
        *,
        threads: int,
        timeout_seconds: float = 60.0,
        compilation: str = "off",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`device` is the kind of the ranks' devices, and `threads` the CPU threads of each rank."""
        self.width = width
        self.device = device
        self.compilation = compilation  # the setting `compile`
        self.is_sharded = False  # whether the next stages divide their tensors among the ranks
        self.failure = ""  # of a rank, without a full stop; "" while all work
        self.incarnation = 0  # number of the present start of the ranks
        self.numbers = count(1)  # of microbatches and stages
        self.forgotten = deque[int]()  # microbatches without a backward pass; any thread may append
        self.forgotten_stages = deque[int]()
        self._plan = plan
        self.threads = threads  # of each rank
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._group: ProcessGroup | None = None
        self._processes: RankProcesses | None = None
        self._folder: Path | None = None
        self._ended = dict[int, str]()  # reasons, as the watchers report them
        self._restarts = deque[float]()
        self._wave = list[PassPart | None]()
        self._owner: LocalPart | None = None
        self._due: float | None = None

    # Start and end

    def begin(self) -> None:
        """Start and meet the other ranks. Raises UsageError if they do not fit together or do not come."""
        try:
            self._start()
        except LostRankError as error:
            raise UsageError(f"The site cannot start: {self._named(error)}.", "Start all ranks together.") from error

    def _start(self) -> None:
        self._ended.clear()
        facts = rank_facts(self.width, self.device)
        try:
            if not self._plan.is_launched:
                self._folder = make_meeting_folder()
                self._processes = RankProcesses(self._starts(self._folder), self._note_end)
            store = meet(self._plan, facts, self._folder, MEETING_SECONDS, self._check_ended)
            self._group = ProcessGroup(self._plan, facts, store, self._timeout_seconds)
        except (LostRankError, UsageError):
            self.close()
            raise
        self.failure = ""
        self.incarnation += 1

    def _starts(self, folder: Path) -> list[RankStart]:
        return [
            RankStart(rank, self.width, str(folder), self.device, self.threads, self._timeout_seconds)
            for rank in range(1, self.width)
        ]

    @property
    def host_shares(self) -> int:
        """Number of parts into which the ranks divide the memory of this computer: those that train on the CPU."""
        return self.width if self.device == "cpu" and not self._plan.is_launched else 1

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks that this process has started."""
        return {} if self._processes is None else self._processes.pids

    def _note_end(self, rank: int, reason: str) -> None:
        self._ended[rank] = reason
        self.failure = self.failure or f"{self._name(rank)} ended: {reason}"

    def _check_ended(self) -> None:
        for rank, reason in list(self._ended.items()):
            raise LostRankError(rank, reason)

    def restart(self) -> str:
        """Start the ranks again after a failure; return "" or the reason why they stay away.

        Raises SiteRestartError if a launcher must do it. After MOST_RESTARTS within RESTART_SECONDS, the next call
        begins to count again.
        """
        while self.failure:
            if self._plan.is_launched:
                action = "The launcher must start all ranks again."
                raise SiteRestartError(f"The site has failed: {self.failure}.", action)
            now = self._clock()
            while self._restarts and now - self._restarts[0] > RESTART_SECONDS:
                self._restarts.popleft()
            if len(self._restarts) >= MOST_RESTARTS:
                self._restarts.clear()
                return (
                    f"{self.failure}, after {MOST_RESTARTS} starts of the ranks within {RESTART_SECONDS / 60:g} minutes"
                )
            self._restarts.append(now)
            _LOG.warning("The site has failed: %s. Its ranks start again.", self.failure)
            self.close()
            try:
                self._start()
            except (LostRankError, UsageError) as error:
                self.failure = str(error)
        return ""

    def plan_stages(self, *, is_sharded: bool, compiles: bool = True) -> None:
        """Divide the tensors of the next stages among the ranks, or copy them; compile only if `compiles`."""
        self.is_sharded = is_sharded
        if not compiles:
            self.compilation = "off"

    def close(self) -> None:
        """End the other ranks."""
        group, self._group = self._group, None
        if group is not None and self._plan.is_launched and not self.failure:
            try:
                group.command(to_message(EndSite()))
            except LostRankError as error:
                _LOG.debug("A rank has ended before the site: %s", error)
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()
        if group is not None and not (self._plan.is_launched and self.failure):  # it would wait for a rank that hangs
            group.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    # Waves

    @property
    def due(self) -> float | None:
        """When the waiting passes are computed, at the latest; None if none waits."""
        return self._due

    def add(self, owner: LocalPart, part: PassPart, rank: int | None = None) -> Future[PassResult]:
        """Add a pass to the present wave: on a rank, or on any that is free. Runs the wave if that makes it full.

        A pass that does not fit into the present wave runs this wave first.
        """
        is_free = not self._wave or (rank is None or self._wave[rank] is None)
        present = next((other for other in self._wave if other is not None), None)
        if present is not None and (present.kind != part.kind or not is_free):
            self.run()
        if not self._wave:
            self._wave = list[PassPart | None]([None] * self.width)
            self._due = time.perf_counter() + WAVE_SECONDS
        self._owner = owner
        self._wave[self._wave.index(None) if rank is None else rank] = part
        if None not in self._wave:
            self.run()
        return part.result

    def run(self) -> None:
        """Compute the waiting passes on their ranks."""
        wave, owner = self._wave, self._owner
        self._wave, self._owner, self._due = list[PassPart | None](), None, None
        if owner is None:
            return
        try:
            with self.failing() as group:
                self._run(group, owner, wave)
        except SiteFailedError as error:
            for part in wave:
                if part is not None and not part.result.done():
                    part.result.set_exception(error)

    def _run(self, group: ProcessGroup, owner: LocalPart, wave: list[PassPart | None]) -> None:
        owner.prepare()
        kind = next(part.kind for part in wave if part is not None)
        forms = tuple(form_of(tensor) for tensor in next(part for part in wave if part is not None).tensors)
        forgotten = tuple(self.forgotten.popleft() for _ in range(len(self.forgotten)))
        numbers = tuple(0 if part is None else part.number for part in wave)
        self.command(
            RunPass(kind.stage, kind.operation, kind.precision.value, kind.keeps_graph, numbers, forms, forgotten),
            is_answered=False,
        )
        others = [(rank, part) for rank, part in enumerate(wave) if rank > 0 and part is not None]
        for rank, part in others:
            group.send_tensors(part.tensors, rank)
        owner.compute(kind.operation, wave[0])
        for rank, part in others:
            done = group.receive(rank, Done)
            tensors = group.receive_tensors(done.tensors, rank)
            part.result.set_result(owner.take(part, rank, done, tensors))

    # Commands

    def command(self, command: Command, *, is_answered: bool = True) -> list[Done]:
        """Send a command to all ranks, and return their answers. Raises SiteFailedError."""
        if not isinstance(command, ForgetStages | RunPass) and self.forgotten_stages:
            stages = tuple(self.forgotten_stages.popleft() for _ in range(len(self.forgotten_stages)))
            self.command(ForgetStages(stages))
        with self.failing() as group:
            group.command(to_message(command))
        return self.answers() if is_answered else []

    @property
    def group(self) -> ProcessGroup:
        """The process group. Raises SiteFailedError after a failure."""
        return self._present()

    def answers(self) -> list[Done]:
        """Wait for an answer of each rank. Raises SiteFailedError."""
        with self.failing() as group:
            return [group.receive(rank, Done) for rank in range(1, self.width)]

    def transfer(self, work: Callable[[ProcessGroup], object]) -> None:
        """Transfer between all ranks, which expect it. Raises SiteFailedError."""
        with self.failing() as group:
            work(group)

    def _present(self) -> ProcessGroup:
        if self.failure or self._group is None:
            raise SiteFailedError(self.failure or "the ranks of the site have not started")
        return self._group

    @contextmanager
    def failing(self) -> Generator[ProcessGroup]:
        """A block in which other ranks wait for this one, so any error fails the site. Raises SiteFailedError."""
        group = self._present()
        try:
            yield group
        except SiteFailedError:
            raise
        except Exception as error:
            self.failure = self._named(group.lost(error))
            raise SiteFailedError(self.failure) from error

    def _named(self, error: LostRankError) -> str:
        """Words for a failure: the end of a process explains a broken connection."""
        deadline = time.monotonic() + NAMING_SECONDS
        while not (self._ended or error.is_explained or self._processes is None) and time.monotonic() < deadline:
            time.sleep(0.02)
        for rank, reason in list(self._ended.items()):
            return f"{self._name(rank)} ended: {reason}"
        rank = 1 if error.rank is None and self.width == 2 else error.rank
        return f"{'a rank' if rank is None else self._name(rank)}: {error}"

    def _name(self, rank: int) -> str:
        """Name of a rank for people, with its device."""
        on_device = self.device != "cpu" and not self._plan.is_launched
        return f"GPU {rank} (rank {rank})" if on_device else f"rank {rank}"
