"""Carries a stage's certified rounds out: the state machine's messages, votes and work, in their order."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from neuroshard.errors import StorageError
from neuroshard.network import ScoreReason
from neuroshard.swarm.certified.effects import (
    Accuse,
    Answer,
    Check,
    Checked,
    Complete,
    Effect,
    GiveUp,
    Judge,
    MakeStatistics,
    Persist,
    Reduce,
    Say,
    VoteRecord,
)
from neuroshard.swarm.certified.member import RoundMember
from neuroshard.swarm.certified.messages import ContributionSent, Message, author_of
from neuroshard.swarm.certified.packets import MalformedMessageError, from_frame, limits_for, to_frame
from neuroshard.swarm.certified.setting import Contribution, Setting
from neuroshard.swarm.certified.voting import help_with
from neuroshard.swarm.round import Offload
from neuroshard.training.rounds.mail import Received, RoundMail
from neuroshard.training.rounds.vote_book import KEPT_STEPS, VoteBook
from neuroshard.training.rounds.work import RoundWork
from neuroshard.types import NodeId
from neuroshard.wire import WireError, decode, encode

_LOG = logging.getLogger(__name__)

TICK_SECONDS = 1.0
MAX_EARLY = 256  # small ones, and at most one contribution of each member
KEPT_MEMBERS = 2  # the present step's and, while it ends for others, the one before


class CheckAggregate(Protocol):
    """Says which state an aggregate leads to, and whether it is worth a vote."""

    async def __call__(self, job: Check, work: RoundWork, /) -> Checked:
        """See Check."""
        ...


@dataclass(frozen=True)
class Surroundings:
    """What the rounds of a stage need of this node."""

    book: VoteBook
    check: CheckAggregate
    report: Callable[[NodeId, ScoreReason], None] = lambda _node, _reason: None
    offload: Offload = anyio.to_thread.run_sync


@dataclass
class _Running:
    """A step's member with what it computes by."""

    member: RoundMember
    work: RoundWork
    number: int


class RoundActor:
    """One stage's. Belongs to the event loop; `run` has to run for anything to happen."""

    def __init__(self, mail_of: Callable[[Received], RoundMail], around: Surroundings) -> None:
        """`mail_of` makes the stage's mail, which gives what arrives to its argument."""
        self.mail = mail_of(self._received)
        self.ended: Complete | None = None  # the newest step's end, until it is taken
        self.changed = anyio.Event()
        self.accusations: deque[Accuse] = deque(maxlen=64)
        self._around = around
        self._running: dict[str, _Running] = {}  # by step id; the newest last
        self._early: deque[tuple[NodeId, Message]] = deque(maxlen=MAX_EARLY)  # of a round that others are in already
        self._effects: deque[tuple[_Running, Effect]] = deque()
        self._waiting = anyio.Event()
        self._gave_up: str | None = None
        self._record: VoteRecord | None = None  # what was written down last
        self._archive: dict[str, Complete] = {}  # the steps that have ended, by id
        self._tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Until cancelled. Raises StorageError when what this node has voted cannot be read."""
        book, offload = self._around.book, self._around.offload
        self._record = await offload(book.newest)
        for _, complete in await offload(lambda: list(book.ended())):
            self._archive[complete.certificate.value.step_id] = complete
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                tasks.start_soon(self.mail.run)
                tasks.start_soon(self._tick)
                await self._carry_out()
            finally:
                self._tasks = None

    def locked_step(self, root: str) -> str | None:
        """The id of a step from this state that may have ended elsewhere with this node's vote."""
        lock = None if self._record is None else self._record.lock
        is_over = lock is None or lock.value.root != root or lock.value.step_id in self._archive
        return None if lock is None or is_over else lock.value.step_id

    async def enter(self, setting: Setting, number: int, work: RoundWork, contribution: Contribution) -> None:
        """Take part in a round of this step, in which this node may have been before. Raises StorageError."""
        running = self._running.get(setting.step.id)
        if running is None:
            # who votes in a step from a state has left the other steps from it
            self._running = {
                name: one
                for name, one in self._running.items()
                if one.member.completed is not None or one.member.setting.step.root != setting.step.root
            }
            record = self._record if self._record is not None and self._record.step_id == setting.step.id else None
            running = _Running(RoundMember(setting, record), work, number)
            self._running[setting.step.id] = running
            for old in list(self._running)[:-KEPT_MEMBERS]:
                del self._running[old]
            view = 0
        else:
            running.member.setting = setting
            view = running.member.view + 1
        self.ended = self._gave_up = None
        self._put(running, running.member.enter(contribution, anyio.current_time(), view))
        early, self._early = self._early, deque(maxlen=MAX_EARLY)
        for sender, message in early:
            self._put(running, running.member.hear(sender, message, anyio.current_time()))

    async def outcome(self) -> Complete | str:
        """Wait until the round that was entered last has ended, or comes to nothing, and why."""
        while self.ended is None and self._gave_up is None:
            await self.changed.wait()
        return self.ended if self.ended is not None else self._gave_up or ""

    async def _received(self, sender: NodeId, payload: bytes) -> None:
        most = max((running.work.encoded_bytes for running in self._running.values()), default=0)
        try:
            message = await self._around.offload(lambda: from_frame(decode(payload, lambda _kind: limits_for(most))))
        except (WireError, MalformedMessageError) as error:
            _LOG.info("Node %s sent what is no message of a round: %s", sender, error)
            self._around.report(sender, ScoreReason.MALFORMED_FRAME)
            return
        if author_of(message) not in (None, sender):
            self._around.report(sender, ScoreReason.FOREIGN_CLAIM)
            return
        for complete in self._archive.values():
            for effect in help_with(complete, sender, message):
                if isinstance(effect, Say):
                    await self._say(effect.to, effect.message)
        if all(running.member.completed is not None for running in self._running.values()):
            self._keep(sender, message)
        for running in list(self._running.values()):
            self._put(running, running.member.hear(sender, message, anyio.current_time()))

    def _keep(self, sender: NodeId, message: Message) -> None:
        if isinstance(message, ContributionSent):  # the newest of each member counts
            kept = [one for one in self._early if one[0] != sender or not isinstance(one[1], ContributionSent)]
            self._early = deque(kept, maxlen=MAX_EARLY)
        self._early.append((sender, message))

    async def _tick(self) -> None:
        while True:
            await anyio.sleep(TICK_SECONDS)
            for running in list(self._running.values()):
                self._put(running, running.member.tick(anyio.current_time()))

    def _put(self, running: _Running, effects: list[Effect]) -> None:
        self._effects += ((running, effect) for effect in effects)
        self._waiting.set()

    async def _carry_out(self) -> None:
        while True:
            while not self._effects:
                self._waiting = anyio.Event()
                await self._waiting.wait()
            running, effect = self._effects.popleft()
            await self._do(running, effect)

    async def _do(self, running: _Running, effect: Effect) -> None:
        book = self._around.book
        match effect:
            case Say(to, message):
                await self._say(to, message)
            case Persist(record):
                await self._written(lambda: book.write(record), running)
                self._record = record
            case Accuse(node, what):
                _LOG.warning("Node %s broke its word in a round: %s", node, what)
                self.accusations.append(effect)
                self._around.report(node, ScoreReason.BROKEN_WORD)
            case Complete():
                await self._written(lambda: book.end(running.number, effect), running)
                self._archive[effect.certificate.value.step_id] = effect
                for old in list(self._archive)[:-KEPT_STEPS]:
                    del self._archive[old]
                self.ended = effect
                self._wake()
            case GiveUp(reason):
                self._gave_up = reason
                self._wake()
            case _:
                if self._tasks is not None:
                    self._tasks.start_soon(self._compute, running, effect)

    async def _say(self, to: frozenset[NodeId], message: Message) -> None:
        def packed() -> bytes:
            frame = encode(to_frame(message))
            return b"".join((frame.head, *frame.body))

        payload = await self._around.offload(packed)
        for peer in sorted(to):
            self.mail.send(peer, payload)

    async def _written(self, write: Callable[[], None], running: _Running) -> None:
        """A vote that cannot be written down is never said: this member falls silent until there is room."""
        try:
            await self._around.offload(write)
        except StorageError as error:
            _LOG.error("%s This node takes no part in rounds until then.", error)
            self._effects = deque(one for one in self._effects if one[0] is not running)
            self._running = {name: one for name, one in self._running.items() if one is not running}
            self._gave_up = str(error)
            self._wake()

    async def _compute(self, running: _Running, job: MakeStatistics | Judge | Reduce | Check) -> None:
        answer = await self._answer(running.work, job)
        self._put(running, running.member.answered(job, answer))

    async def _answer(self, work: RoundWork, job: MakeStatistics | Judge | Reduce | Check) -> Answer:
        offload = self._around.offload
        match job:
            case MakeStatistics():
                return await offload(lambda: work.statistics(job))
            case Judge():
                return await offload(lambda: work.judged(job))
            case Reduce():
                return await offload(lambda: work.reduced(job))
            case Check():
                return await self._around.check(job, work)

    def _wake(self) -> None:
        changed, self.changed = self.changed, anyio.Event()
        changed.set()


def made_at() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000
