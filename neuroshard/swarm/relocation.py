"""Which nodes should hold other stages than they do, and whose turn it is to go. Pure: all who know the same agree.

While a stage is empty, nodes with nothing to lose or from stages with other replicas fill it; where none can go there
directly, one makes room for another. Then nodes of one wallet part, then the most covered stages help the least covered
ones. Each kind of move makes one of these strictly better and none before it worse, so moves come to an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import inf
from typing import TypeAlias

from neuroshard.identity import hash_parts
from neuroshard.swarm.stage_coverage import StageCoverage, StageHolder, StageRange
from neuroshard.types import NodeId, WalletId

UNEVEN_RATIO = 2  # a stage with more than so many times as many replicas helps another one
MOST_DETOURS = 8  # first steps of a chain that are looked at
TURNS_A_DRAW = 16  # after so many the turns begin anew, in another order


class MoveReason(StrEnum):
    """Why a node should move."""

    EMPTY_STAGE = "empty_stage"
    SAME_WALLET = "same_wallet"
    UNEVEN = "uneven"


@dataclass(frozen=True)
class Move:
    """A node that should hold other stages."""

    node_id: NodeId
    stages: StageRange  # its new ones
    reason: MoveReason
    about: int | WalletId  # the stage that gains, or the wallet whose nodes part


def planned_moves(coverage: StageCoverage) -> tuple[Move, ...]:
    """The moves of the most urgent kind that should be made now, all at the same time.

    While an empty stage can be filled, or somebody is on the way who makes it possible, nothing else is moved.
    """
    swarm = _Swarm(coverage)
    if moves := _moves(MoveReason.EMPTY_STAGE, swarm):
        return moves
    if _ways_to_empty_stages(swarm) is not None:
        return ()
    return _moves(MoveReason.SAME_WALLET, swarm) or _moves(MoveReason.UNEVEN, swarm)


@dataclass(frozen=True)
class MoveTimes:
    """When nodes act on what they see; settle and half a turn must be well above the time that news takes to spread."""

    settle_seconds: float = 5.0  # an empty stage stays empty for so long before anybody moves
    calm_seconds: float = 60.0  # the same for moves that can wait
    turn_seconds: float = 20.0  # who has the turn begins within its first half; after it, it is the next ones' turn


@dataclass(frozen=True)
class Unrest:
    """What should change, and since when this node has seen that; the beginning is `Unrest()`."""

    coverage: StageCoverage | None = None  # as it was seen last
    moves: tuple[Move, ...] = ()  # of the first turn
    since: float = 0.0  # seconds of any clock that only goes forward

    def seen(self, coverage: StageCoverage, now: float) -> Unrest:
        """After a look at the swarm. The time starts anew when other stages are empty or the reason is another."""
        if coverage == self.coverage:
            return self
        moves = planned_moves(coverage)
        return Unrest(coverage, moves, self.since if _causes(moves) == _causes(self.moves) else now)


def should_move(node_id: NodeId, unrest: Unrest, now: float, times: MoveTimes | None = None) -> Move | None:
    """What this node should do about the unrest that it has seen, the present look included; None: stay.

    The nodes that are best placed have the first turn. Those that did not go in their turn are passed over in the next
    one, so that a node that cannot go stops nobody.
    """
    times = times or MoveTimes()
    if unrest.coverage is None or not unrest.moves:
        return None
    reason = unrest.moves[0].reason
    patience = times.settle_seconds if reason is MoveReason.EMPTY_STAGE else times.calm_seconds
    turn, within = divmod(now - unrest.since - patience, times.turn_seconds)
    if turn < 0 or within > times.turn_seconds / 2:
        return None
    moves = _moves_of_turn(reason, unrest.coverage, int(turn)) if turn else unrest.moves
    return next((move for move in moves if move.node_id == node_id), None)


def _causes(moves: Iterable[Move]) -> set[tuple[MoveReason, int | WalletId | None]]:
    return {(move.reason, move.about if move.reason is MoveReason.EMPTY_STAGE else None) for move in moves}


def _moves_of_turn(reason: MoveReason, coverage: StageCoverage, turn: int) -> tuple[Move, ...]:
    draw, turn = divmod(turn, TURNS_A_DRAW)
    passed_over = frozenset[NodeId]()
    for _ in range(turn):
        moves = _moves(reason, _Swarm(coverage, passed_over, draw))
        # when all were asked, they are asked again
        passed_over = passed_over | {move.node_id for move in moves} if moves else frozenset[NodeId]()
    return _moves(reason, _Swarm(coverage, passed_over, draw))


def _moves(reason: MoveReason, swarm: _Swarm) -> tuple[Move, ...]:
    """Moves of one kind that can be made at the same time and leave no stage alone; none of a barred node."""
    moves: list[Move] = []
    while (move := _find(reason, swarm)) is not None:
        moves.append(move)
        swarm = swarm.after(move, arrived=False)
    return tuple(moves)


@dataclass(frozen=True)
class _Option:
    """A move that could be made."""

    holder: StageHolder
    window: StageRange
    waits: bool  # somebody it needs is on the way


class _Swarm:
    """Counts over the holders of a coverage. `draw` numbers the orders of nodes that are equally well placed."""

    def __init__(self, coverage: StageCoverage, barred: frozenset[NodeId] = frozenset(), draw: int = 0) -> None:
        self.coverage = coverage
        self.barred = barred
        self.replicas = coverage.replicas
        self._ready = coverage.ready_replicas
        self._draw = draw

    @cached_property
    def _of_wallet(self) -> Counter[tuple[WalletId, int]]:
        return Counter((holder.wallet_id, stage) for holder in self.coverage.holders for stage in holder.stages)

    @cached_property
    def _large_wallets(self) -> frozenset[WalletId]:
        counts = Counter(holder.wallet_id for holder in self.coverage.holders)
        return frozenset(wallet for wallet, count in counts.items() if count > 1)

    def after(self, move: Move, *, arrived: bool) -> _Swarm:
        """The swarm when a node has begun this move, or has arrived; it moves no more."""
        moved = next(holder for holder in self.coverage.holders if holder.node_id == move.node_id)
        moved = replace(moved, stages=move.stages, is_ready=arrived and moved.is_ready)
        return _Swarm(self.coverage.with_holder(moved), self.barred | {move.node_id}, self._draw)

    def movable(self) -> Iterator[StageHolder]:
        """Holders that are not barred."""
        return (holder for holder in self.coverage.holders if holder.node_id not in self.barred)

    def windows(self, holder: StageHolder, target: StageRange) -> Iterator[StageRange]:
        """Where else a holder may go to hold all of these stages."""
        if holder.windows:
            found: Iterable[StageRange] = (window for window in holder.windows if window.covers(target))
        else:
            length = len(holder.stages)
            starts = range(max(0, target.stop - length), min(target.start, self.coverage.stage_count - length) + 1)
            found = (StageRange(start, start + length) for start in starts)
        return (window for window in found if window != holder.stages)

    def can_leave(self, holder: StageHolder, stage: int) -> bool:
        """Whether others hold the stage: a copy of the weights, or as little as this node itself."""
        if holder.is_ready:
            return self._ready[stage] > 1
        return self.replicas[stage] > 1

    def has_donors(self, stages: Iterable[int]) -> bool:
        """Whether each of the stages has more nodes that can hand out its weights than nodes that fetch them."""
        return all(self.replicas[stage] - self._ready[stage] < max(1, self._ready[stage]) for stage in stages)

    def left(self, holder: StageHolder, window: StageRange) -> list[int]:
        """Stages that a holder would give up."""
        return [stage for stage in holder.stages if stage not in window]

    def overlap(self, holder: StageHolder, stages: StageRange) -> int:
        """Nodes of the same wallet that a holder would meet on these stages."""
        wallet, own = holder.wallet_id, holder.stages
        if wallet not in self._large_wallets:
            return 0
        return sum(self._of_wallet[wallet, stage] - (stage in own) for stage in stages)

    def filled(self, window: StageRange) -> int:
        """Empty stages among these."""
        return sum(self.replicas[stage] == 0 for stage in window)

    def merit(self, option: _Option) -> tuple[int, int, bool, float]:
        """The lowest goes: it fills most, meets fewest of its wallet, has least to lose, and leaves most behind.

        The last two are what nodes say of themselves; in further draws, when nobody has gone, they do not count.
        """
        holder, window = option.holder, option.window
        needed = -self.filled(window), self.overlap(holder, window)
        if self._draw:
            return *needed, False, 0.0
        behind = min((self.replicas[stage] for stage in self.left(holder, window)), default=inf)
        return *needed, holder.is_ready, -behind

    def draw(self, option: _Option) -> bytes:
        """The lowest of the equally good ones goes."""
        holder, window = option.holder, option.window
        name = holder.node_id, window.start, window.stop
        return hash_parts("neuroshard/move", self.coverage.run_id, self._draw, *name)

    def best(self, options: Sequence[_Option]) -> _Option:
        """The first of the options; the hashes of those that are not the best ones are never needed."""
        merits = [self.merit(option) for option in options]
        most = min(merits)
        return min((o for o, merit in zip(options, merits, strict=True) if merit == most), key=self.draw)


_Found: TypeAlias = "tuple[int, list[tuple[_Option, int]]] | None"


def _fill(swarm: _Swarm) -> Move | None:
    """A move into an empty stage, or the first step of the shortest chain of moves that ends in one."""
    found = _ways_to_empty_stages(swarm)
    if found is None:
        return None
    steps, options = found
    stages = {option: stage for option, stage in options if not option.waits}
    for _ in range(min(len(stages), MOST_DETOURS)):
        option = swarm.best(list(stages))
        move = Move(option.holder.node_id, option.window, MoveReason.EMPTY_STAGE, stages.pop(option))
        if steps == 0 or _is_nearer(swarm.after(move, arrived=True), steps):
            return move
    return None


def _is_nearer(swarm: _Swarm, steps: int) -> bool:
    """Whether fewer steps than so many come before a stage can be filled."""
    found = _ways_to_empty_stages(swarm)
    return found is not None and found[0] < steps


def _ways_to_empty_stages(swarm: _Swarm) -> _Found:
    """How many must make room before an empty stage is filled, and who may be the first of them, for which stage.

    Breadth first, from the empty stages back: a node that would leave stages alone needs another one there before.
    """
    wanted = {StageRange(stage, stage + 1): stage for stage in swarm.coverage.empty}
    seen = set(wanted)
    steps = 0
    while wanted:
        options: list[tuple[_Option, int]] = []
        further: dict[StageRange, int] = {}
        for target, stage in wanted.items():
            for option, alone in _ways_to(swarm, target):
                if alone is None:
                    options.append((option, stage))
                elif alone not in seen:
                    seen.add(alone)
                    further[alone] = stage
        if options:
            return steps, options
        wanted, steps = further, steps + 1
    return None


def _ways_to(swarm: _Swarm, target: StageRange) -> Iterator[tuple[_Option, StageRange | None]]:
    """Moves that cover the target, each with the stages that it would leave to nobody."""
    for holder in swarm.movable():
        if holder.stages.covers(target):
            continue
        for window in swarm.windows(holder, target):
            held = [stage for stage in swarm.left(holder, window) if not swarm.can_leave(holder, stage)]
            alone = [stage for stage in held if swarm.replicas[stage] == 1]
            yield (
                _Option(holder, window, waits=bool(held)),
                StageRange(alone[0], alone[-1] + 1) if alone else None,
            )


def _spread(swarm: _Swarm) -> Move | None:
    """A move that brings fewer nodes of one wallet together."""
    options = [
        _Option(holder, window, waits=False)
        for holder in swarm.movable()
        if (met := swarm.overlap(holder, holder.stages))
        for window in _all_windows(swarm, holder)
        if swarm.overlap(holder, window) < met and _is_free(swarm, holder, window)
        if swarm.has_donors(stage for stage in window if stage not in holder.stages)
    ]
    if not options:
        return None
    best = swarm.best(options)
    return Move(best.holder.node_id, best.window, MoveReason.SAME_WALLET, best.holder.wallet_id)


def _even(swarm: _Swarm) -> Move | None:
    """A move from stages with many replicas to the least covered stage that such a move can help."""
    counts = swarm.replicas
    most = max(counts)
    for stage in sorted(range(len(counts)), key=lambda stage: counts[stage]):
        if not (0 < UNEVEN_RATIO * counts[stage] < most and swarm.has_donors([stage])):
            continue
        options = [
            _Option(holder, window, waits=False)
            for holder in swarm.movable()
            if stage not in holder.stages
            for window in swarm.windows(holder, StageRange(stage, stage + 1))
            if all(counts[left] > UNEVEN_RATIO * counts[stage] for left in swarm.left(holder, window))
            and swarm.overlap(holder, window) <= swarm.overlap(holder, holder.stages)
            and _is_free(swarm, holder, window)
        ]
        if options:
            best = swarm.best(options)
            return Move(best.holder.node_id, best.window, MoveReason.UNEVEN, stage)
    return None


def _all_windows(swarm: _Swarm, holder: StageHolder) -> set[StageRange]:
    stages = range(swarm.coverage.stage_count)
    return {window for stage in stages for window in swarm.windows(holder, StageRange(stage, stage + 1))}


def _is_free(swarm: _Swarm, holder: StageHolder, window: StageRange) -> bool:
    return all(swarm.can_leave(holder, stage) for stage in swarm.left(holder, window))


def _find(reason: MoveReason, swarm: _Swarm) -> Move | None:
    match reason:
        case MoveReason.EMPTY_STAGE:
            return _fill(swarm)
        case MoveReason.SAME_WALLET:
            return _spread(swarm)
        case MoveReason.UNEVEN:
            return _even(swarm)
