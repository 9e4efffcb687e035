"""Relocation: the nodes that move to other stages, their new stages and the time of each move. Pure.

All nodes with the same coverage plan the same moves. While a stage is empty, nodes with nothing to lose or from stages
with other replicas fill it, or a node with spare memory holds it next to its own stages. If no node can fill it
directly, one node makes room for another. After that, nodes of one wallet move apart, then the most covered stages
help the least covered ones. Each kind of move makes one of these measures strictly better and none of the earlier ones
worse, so moves come to an end.

A node waits until the coverage has settled, and moves only in its turn, so that two nodes do not take one stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from math import inf
from typing import TypeAlias

from neuroshard.identity import hash_parts
from neuroshard.membership.stage_coverage import StageCoverage, StageHolder, StageRange
from neuroshard.types import NodeId, WalletId


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


class StageOccupancy:
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

    def after(self, option: MoveOption, *, arrived: bool) -> StageOccupancy:
        """When a node has begun a move, or has arrived where it goes; it moves no more."""
        holder, window = option.holder, option.window
        places = copy(self)
        places.replicas, places._ready = list(self.replicas), list(self._ready)
        places._of_wallet = self._of_wallet.copy()
        places._alike = {kind: [h for h in alike if h is not holder] for kind, alike in self._alike.items()}
        places._count(holder, holder.stages, -1, is_ready=holder.is_ready)
        places._count(holder, window, 1, is_ready=holder.is_ready and arrived)
        return places

    def without_more(self) -> StageOccupancy:
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


UNEVEN_RATIO = 2  # a stage with more than so many times as many replicas helps another one
MOST_DETOURS = 8  # first steps of a chain that are looked at

Advice: TypeAlias = "tuple[MoveOption, int | WalletId]"


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
    takes_on: bool = False  # it holds more stages then


def planned_moves(coverage: StageCoverage) -> tuple[Move, ...]:
    """The moves of the most urgent kind that should be made now, all at the same time.

    While an empty stage can be filled, or somebody is on the way who makes it possible, nothing else is moved.
    """
    if is_settled(coverage):
        return ()
    places = StageOccupancy(coverage)
    if moves := _moves(MoveReason.EMPTY_STAGE, places):
        return moves
    if _ways_to_empty_stages(places.without_more()) is not None:
        return ()
    return _moves(MoveReason.SAME_WALLET, places) or _moves(MoveReason.UNEVEN, places)


def is_settled(coverage: StageCoverage) -> bool:
    """Whether it is plain that nothing can get better. That is so nearly always, and every node asks all the time."""
    fewest, most = min(coverage.replicas), max(coverage.replicas)
    is_even = fewest > 0 and most <= UNEVEN_RATIO * fewest
    return is_even and len({holder.wallet_id for holder in coverage.holders}) == len(coverage.holders)


def further_moves(
    reason: MoveReason, coverage: StageCoverage, barred: frozenset[NodeId], draw: int = 0
) -> tuple[Move, ...]:
    """The moves of one kind when some nodes do not go; `draw` numbers the orders of equally well placed ones."""
    return _moves(reason, StageOccupancy(coverage, barred, draw))


def _moves(reason: MoveReason, places: StageOccupancy) -> tuple[Move, ...]:
    """Moves that can be made at the same time and together leave no stage alone.

    A node takes more stages on only where the model is then complete: else nothing is won, and somebody may be coming.
    """
    moves, after = _all_moves(reason, places)
    if 0 in after.replicas and any(move.takes_on for move in moves):
        moves, _ = _all_moves(reason, places.without_more())
    return moves


def _all_moves(reason: MoveReason, places: StageOccupancy) -> tuple[tuple[Move, ...], StageOccupancy]:
    """With what is then."""
    moves: list[Move] = []
    while (advice := _advice(reason, places)) is not None:
        option, about = advice
        moves.append(Move(option.holder.node_id, option.window, reason, about, option.takes_on))
        places = places.after(option, arrived=False)
    return tuple(moves), places


def _advice(reason: MoveReason, places: StageOccupancy) -> Advice | None:
    match reason:
        case MoveReason.EMPTY_STAGE:
            return _fill(places)
        case MoveReason.SAME_WALLET:
            return _spread(places)
        case MoveReason.UNEVEN:
            return _even(places)


def _fill(places: StageOccupancy) -> Advice | None:
    """A move into an empty stage, or the first step of the shortest chain of moves that ends in one."""
    found = _ways_to_empty_stages(places)
    if found is None:
        return None
    steps, ways = found
    stages = {option: stage for option, stage in ways if not option.waits}
    for _ in range(min(len(stages), MOST_DETOURS)):
        option = places.best(list(stages))
        if steps == 0 or _is_nearer(places.after(option, arrived=True), steps):
            return option, stages[option]
        del stages[option]
    return None


def _is_nearer(places: StageOccupancy, steps: int) -> bool:
    """Whether fewer steps than so many come before a stage can be filled."""
    found = _ways_to_empty_stages(places)
    return found is not None and found[0] < steps


def _ways_to_empty_stages(places: StageOccupancy) -> tuple[int, list[tuple[MoveOption, int]]] | None:
    """How many must make room before an empty stage is filled, and who may be the first of them, for which stage.

    Breadth first, from the empty stages back: a node that would leave stages alone needs another one there before.
    """
    wanted = {StageRange(stage, stage + 1): stage for stage, count in enumerate(places.replicas) if count == 0}
    seen = set(wanted)
    steps = 0
    while wanted:
        options: list[tuple[MoveOption, int]] = []
        further: dict[StageRange, int] = {}
        for target, stage in wanted.items():
            for option, alone in _ways_to(places, target):
                if alone is None:
                    options.append((option, stage))
                elif alone not in seen:
                    seen.add(alone)
                    further[alone] = stage
        if options:
            return steps, options
        wanted, steps = further, steps + 1
    return None


def _ways_to(places: StageOccupancy, target: StageRange) -> Iterator[tuple[MoveOption, StageRange | None]]:
    """Moves that cover the target, each with the stages that it would leave to nobody."""
    is_empty = all(places.replicas[stage] == 0 for stage in target)
    for holder in places.movable:
        if holder.stages.covers(target):
            continue
        more = places.extensions(holder, target) if is_empty else ()
        for window in chain(places.windows(holder, target), more):
            held = [stage for stage in places.left(holder, window) if not places.can_leave(holder, stage)]
            alone = [stage for stage in held if places.replicas[stage] == 1]
            option = MoveOption(holder, window, waits=bool(held))
            yield option, StageRange(alone[0], alone[-1] + 1) if alone else None


def _spread(places: StageOccupancy) -> Advice | None:
    """A move that brings fewer nodes of one wallet together."""
    options = [
        MoveOption(holder, window)
        for holder in places.movable
        if (met := places.overlap(holder, holder.stages))
        for window in places.all_windows(holder)
        if places.overlap(holder, window) < met and places.is_free(holder, window)
        if places.has_donors(stage for stage in window if stage not in holder.stages)
    ]
    if not options:
        return None
    best = places.best(options)
    return best, best.holder.wallet_id


def _even(places: StageOccupancy) -> Advice | None:
    """A move from stages with many replicas to the least covered stage that such a move can help."""
    counts = places.replicas
    most = max(counts)
    for stage in sorted(range(len(counts)), key=lambda stage: counts[stage]):
        enough = UNEVEN_RATIO * counts[stage]
        if not (0 < enough < most and places.has_donors([stage])):
            continue
        options = [
            MoveOption(holder, window)
            for holder in places.movable
            if stage not in holder.stages
            for window in places.windows(holder, StageRange(stage, stage + 1))
            if all(counts[left] > enough for left in places.left(holder, window))
            and places.overlap(holder, window) <= places.overlap(holder, holder.stages)
            and places.is_free(holder, window)
        ]
        if options:
            return places.best(options), stage
    return None


TURNS_A_DRAW = 16  # after so many the turns begin anew, in another order


@dataclass(frozen=True)
class RelocationTiming:
    """When nodes act on what they see; settle and half a turn must be well above the time that news takes to spread."""

    settle_seconds: float = 5.0  # an empty stage stays empty for so long before anybody moves
    more_seconds: float = 45.0  # the same before a node holds it beside its own: others may be starting
    calm_seconds: float = 60.0  # the same for moves that can wait
    turn_seconds: float = 20.0  # who has the turn begins within its first half; after it, it is the next ones' turn
    claim_seconds: float = 3.0  # from the word that a node goes to its going: twice what the word takes to all others


@dataclass(frozen=True)
class PendingRelocation:
    """What should change, and since when this node has seen that; the beginning is `PendingRelocation()`."""

    coverage: StageCoverage | None = None  # as it was seen last
    moves: tuple[Move, ...] = ()  # of the first turn
    since: float = 0.0  # seconds of any clock that only goes forward

    def seen(self, coverage: StageCoverage, now: float) -> PendingRelocation:
        """After a look at the swarm, this node included, where it truly is.

        The time starts anew when other stages are empty or the reason to move is another.
        """
        if coverage == self.coverage:
            return self
        moves = planned_moves(coverage)
        return PendingRelocation(coverage, moves, self.since if _causes(moves) == _causes(self.moves) else now)


def should_move(
    node_id: NodeId, unrest: PendingRelocation, now: float, times: RelocationTiming | None = None
) -> Move | None:
    """What this node should do about the unrest that it has seen, the present look included; None: stay.

    The nodes that are best placed have the first turn. Those that did not go in their turn are passed over in the next
    one, so that a node that cannot go stops nobody.
    """
    times = times or RelocationTiming()
    if unrest.coverage is None or not unrest.moves:
        return None
    reason = unrest.moves[0].reason
    patience = _patience(unrest.moves, times)
    turn, within = divmod(now - unrest.since - patience, times.turn_seconds)
    if turn < 0 or within > times.turn_seconds / 2:
        return None
    moves = _moves_of_turn(reason, unrest.coverage, int(turn)) if turn else unrest.moves
    move = next((move for move in moves if move.node_id == node_id), None)
    is_early = move is not None and move.takes_on and now - unrest.since < times.more_seconds
    return None if is_early else move


def may_proceed(mover: StageHolder, move: Move, before: StageCoverage, after: StageCoverage) -> bool:
    """Whether a node that has said where it goes should go, by what it has heard since then.

    `mover` is how it stood `before`, when it decided. Nodes that see deaths at different moments may decide for the
    same stage: of those that said so the one with the lowest lot goes, and whoever works there by now wins. What the
    others do meanwhile must not leave the stages alone that it gives up.
    """
    others = after.without(mover.node_id)
    given_up = [stage for stage in mover.stages if stage not in move.stages]
    kept_by = others.ready_replicas if mover.is_ready else others.replicas
    if any(kept_by[stage] == 0 for stage in given_up):
        return False
    were_there = {(holder.node_id, stage) for holder in before.holders for stage in holder.stages}
    rivals = [
        holder
        for holder in others.holders
        for stage in holder.stages
        if stage in move.stages and stage not in mover.stages and (holder.node_id, stage) not in were_there
    ]
    return not any(rival.is_ready or _lot(before, rival.node_id) < _lot(before, mover.node_id) for rival in rivals)


def _lot(coverage: StageCoverage, node_id: NodeId) -> bytes:
    return hash_parts("neuroshard/rivals", coverage.run_id, node_id)


def _patience(moves: Iterable[Move], times: RelocationTiming) -> float:
    if any(move.reason is not MoveReason.EMPTY_STAGE for move in moves):
        return times.calm_seconds
    return times.more_seconds if all(move.takes_on for move in moves) else times.settle_seconds


def _moves_of_turn(reason: MoveReason, coverage: StageCoverage, turn: int) -> tuple[Move, ...]:
    draw, turn = divmod(turn, TURNS_A_DRAW)
    passed_over = frozenset[NodeId]()
    for _ in range(turn):
        moves = further_moves(reason, coverage, passed_over, draw)
        # when all were asked, they are asked again
        passed_over = passed_over | {move.node_id for move in moves} if moves else frozenset[NodeId]()
    return further_moves(reason, coverage, passed_over, draw)


def _causes(moves: Iterable[Move]) -> set[tuple[MoveReason, int | WalletId | None]]:
    return {(move.reason, move.about if move.reason is MoveReason.EMPTY_STAGE else None) for move in moves}
