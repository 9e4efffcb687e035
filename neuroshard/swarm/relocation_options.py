"""Where the holders of stages could go instead, and who of them goes first. Pure bookkeeping for `relocation_plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from math import inf

from neuroshard.identity import hash_parts
from neuroshard.swarm.stage_coverage import StageCoverage, StageHolder, StageRange
from neuroshard.types import NodeId


@dataclass(frozen=True)
class MoveOption:
    """A move that could be made."""

    holder: StageHolder
    window: StageRange
    waits: bool = False  # somebody it needs is on the way

    @property
    def takes_on(self) -> bool:
        """Whether a node that holds less than it can will hold more than before."""
        return self.holder.stages not in self.holder.windows and len(self.window) > len(self.holder.stages)


class Places:
    """Counts over the holders of a coverage, of whom the barred ones do not move. A value: `after` gives a new one.

    `draw` numbers the orders of nodes that are equally well placed.
    """

    def __init__(self, coverage: StageCoverage, barred: frozenset[NodeId] = frozenset(), draw: int = 0) -> None:
        self.replicas = list(coverage.replicas)
        self._ready = list(coverage.ready_replicas)
        self._run_id = coverage.run_id
        self._draw = draw
        self.may_take_on = True
        wallets = Counter(holder.wallet_id for holder in coverage.holders)
        self._large_wallets = frozenset(wallet for wallet, count in wallets.items() if count > 1)
        self._of_wallet = Counter(
            (holder.wallet_id, stage)
            for holder in coverage.holders
            if holder.wallet_id in self._large_wallets
            for stage in holder.stages
        )
        self._alike: dict[object, list[StageHolder]] = {}  # holders that differ in nothing but their names
        for holder in coverage.holders:
            if holder.node_id not in barred:
                wallet = holder.wallet_id if holder.wallet_id in self._large_wallets else None
                kind = holder.stages, holder.windows, holder.is_ready, wallet
                self._alike.setdefault(kind, []).append(holder)
        for holders in self._alike.values():
            holders.sort(key=self._lot)

    def after(self, option: MoveOption, *, arrived: bool) -> Places:
        """When a node has begun a move, or has arrived where it goes; it moves no more."""
        holder, window = option.holder, option.window
        places = copy(self)
        places.replicas, places._ready = list(self.replicas), list(self._ready)
        places._of_wallet = self._of_wallet.copy()
        places._alike = {kind: [h for h in alike if h is not holder] for kind, alike in self._alike.items()}
        places._count(holder, holder.stages, -1, is_ready=holder.is_ready)
        places._count(holder, window, 1, is_ready=holder.is_ready and arrived)
        return places

    def without_more(self) -> Places:
        """When nobody takes more stages on than it holds."""
        places = copy(self)
        places.may_take_on = False
        return places

    def _count(self, holder: StageHolder, stages: StageRange, change: int, *, is_ready: bool) -> None:
        for stage in stages:
            self.replicas[stage] += change
            self._ready[stage] += change if is_ready else 0
            if holder.wallet_id in self._large_wallets:
                self._of_wallet[holder.wallet_id, stage] += change

    @property
    def movable(self) -> Iterator[StageHolder]:
        """Holders that may move, the first of each kind."""
        return (alike[0] for alike in self._alike.values() if alike)

    def windows(self, holder: StageHolder, target: StageRange) -> Iterator[StageRange]:
        """Where else a holder may go to hold all of these stages.

        Who holds as much as it can holds as much as it can there; who holds less, as many stages as now.
        """
        if holder.stages in holder.windows:
            found: Iterable[StageRange] = (window for window in holder.windows if window.covers(target))
        else:
            found = (
                window
                for room in holder.windows or (StageRange(0, len(self.replicas)),)
                for window in _parts(room, len(holder.stages), target)
            )
        return (window for window in dict.fromkeys(found) if window != holder.stages)

    def extensions(self, holder: StageHolder, target: StageRange) -> Iterator[StageRange]:
        """How a holder that holds less than it can may hold these stages beside its own, or those it cannot leave."""
        if holder.stages in holder.windows or not self.may_take_on:
            return
        held = [stage for stage in holder.stages if not self.can_leave(holder, stage)]
        empty = [stage for stage, count in enumerate(self.replicas) if count == 0]
        for kept in ([*holder.stages], held, [*holder.stages, *empty], [*held, *empty]):
            both = StageRange(min([*kept, target.start]), max([*kept, target.stop - 1]) + 1)
            if len(both) > len(holder.stages) and any(room.covers(both) for room in holder.windows):
                yield both

    def all_windows(self, holder: StageHolder) -> set[StageRange]:
        """Where else a holder may go."""
        stages = range(len(self.replicas))
        return {window for stage in stages for window in self.windows(holder, StageRange(stage, stage + 1))}

    def left(self, holder: StageHolder, window: StageRange) -> list[int]:
        """Stages that a holder would give up."""
        return [stage for stage in holder.stages if stage not in window]

    def can_leave(self, holder: StageHolder, stage: int) -> bool:
        """Whether others hold the stage: its weights, or as little of them as this node itself."""
        return self._ready[stage] > 1 if holder.is_ready else self.replicas[stage] > 1

    def is_free(self, holder: StageHolder, window: StageRange) -> bool:
        """Whether a holder can leave all stages that it would give up."""
        return all(self.can_leave(holder, stage) for stage in self.left(holder, window))

    def has_donors(self, stages: Iterable[int]) -> bool:
        """Whether on each of the stages more nodes can hand out its weights than fetch them; one may always fetch."""
        return all(self.replicas[stage] - self._ready[stage] < max(1, self._ready[stage]) for stage in stages)

    def overlap(self, holder: StageHolder, stages: StageRange) -> int:
        """Nodes of the same wallet that a holder would meet on these stages."""
        if holder.wallet_id not in self._large_wallets:
            return 0
        return sum(self._of_wallet[holder.wallet_id, stage] - (stage in holder.stages) for stage in stages)

    def best(self, options: Sequence[MoveOption]) -> MoveOption:
        """The one that is made: equally good ones draw lots."""
        return min(options, key=lambda option: (self._merit(option), self._lot(option.holder), option.window))

    def _merit(self, option: MoveOption) -> tuple[int, int, int, bool, float]:
        """The lowest goes: fills most, meets fewest of its wallet, takes least on, loses least, leaves most behind.

        The last two are what nodes say of themselves; in further draws, when nobody has gone, they do not count.
        """
        holder, window = option.holder, option.window
        filled = sum(self.replicas[stage] == 0 for stage in window)
        overlap = self.overlap(holder, window)
        more = len(window) - len(holder.stages) if option.takes_on else 0
        if self._draw:
            return -filled, overlap, more, False, 0.0
        behind = min((self.replicas[stage] for stage in self.left(holder, window)), default=inf)
        return -filled, overlap, more, holder.is_ready, -behind

    def _lot(self, holder: StageHolder) -> bytes:
        return hash_parts("neuroshard/move", self._run_id, self._draw, holder.node_id)


def _parts(room: StageRange, length: int, target: StageRange) -> Iterator[StageRange]:
    """The parts of a room with so many stages, or all of a smaller one, that cover the target."""
    length = min(length, len(room))
    for start in range(max(room.start, target.stop - length), min(target.start, room.stop - length) + 1):
        yield StageRange(start, start + length)
