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
    """A possible move of a holder to other stages."""

    holder: StageHolder
    window: StageRange
    waits: bool = False  # a node that it needs on the stages it leaves is not ready there yet

    @property
    def takes_on(self) -> bool:
        """Whether a node with spare memory will hold more stages than before."""
        return self.holder.stages not in self.holder.windows and len(self.window) > len(self.holder.stages)


class StageOccupancy:
    """Counts over the holders of a coverage. Barred holders do not move. A value: `after` returns a new one.

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
        self._alike: dict[object, list[StageHolder]] = {}  # holders that differ only in their names
        for holder in coverage.holders:
            if holder.node_id not in barred:
                wallet = holder.wallet_id if holder.wallet_id in self._large_wallets else None
                kind = holder.stages, holder.windows, holder.is_ready, wallet
                self._alike.setdefault(kind, []).append(holder)
        for holders in self._alike.values():
            holders.sort(key=self._lot)

    def after(self, option: MoveOption, *, arrived: bool) -> StageOccupancy:
        """Return the occupancy after a node has begun a move, or has arrived. That node does not move again."""
        holder, window = option.holder, option.window
        places = copy(self)
        places.replicas, places._ready = list(self.replicas), list(self._ready)
        places._of_wallet = self._of_wallet.copy()
        places._alike = {kind: [h for h in alike if h is not holder] for kind, alike in self._alike.items()}
        places._count(holder, holder.stages, -1, is_ready=holder.is_ready)
        places._count(holder, window, 1, is_ready=holder.is_ready and arrived)
        return places

    def without_more(self) -> StageOccupancy:
        """Return the occupancy in which no node takes on more stages than it holds."""
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
        """Yield the other positions in which a holder can hold all of these stages.

        A holder at its limit will be at its limit there as well; one with spare memory keeps its number of stages.
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
        """Yield the ranges in which a holder with spare memory holds these stages next to those it has or must keep."""
        if holder.stages in holder.windows or not self.may_take_on:
            return
        held = [stage for stage in holder.stages if not self.can_leave(holder, stage)]
        empty = [stage for stage, count in enumerate(self.replicas) if count == 0]
        for kept in ([*holder.stages], held, [*holder.stages, *empty], [*held, *empty]):
            both = StageRange(min([*kept, target.start]), max([*kept, target.stop - 1]) + 1)
            if len(both) > len(holder.stages) and any(room.covers(both) for room in holder.windows):
                yield both

    def all_windows(self, holder: StageHolder) -> set[StageRange]:
        """Return all other positions of a holder, each of them once."""
        stages = range(len(self.replicas))
        return {window for stage in stages for window in self.windows(holder, StageRange(stage, stage + 1))}

    def left(self, holder: StageHolder, window: StageRange) -> list[int]:
        """Return the stages that a holder gives up if it moves to a window."""
        return [stage for stage in holder.stages if stage not in window]

    def can_leave(self, holder: StageHolder, stage: int) -> bool:
        """Return whether other nodes hold the stage: its weights, or as little of them as this node itself."""
        return self._ready[stage] > 1 if holder.is_ready else self.replicas[stage] > 1

    def is_free(self, holder: StageHolder, window: StageRange) -> bool:
        """Return whether a holder can leave all stages that it would give up."""
        return all(self.can_leave(holder, stage) for stage in self.left(holder, window))

    def has_donors(self, stages: Iterable[int]) -> bool:
        """Return whether each stage has more nodes that can send its weights than nodes that download them.

        One node may always download.
        """
        return all(self.replicas[stage] - self._ready[stage] < max(1, self._ready[stage]) for stage in stages)

    def overlap(self, holder: StageHolder, stages: StageRange) -> int:
        """Return how many times another node of the same wallet holds one of these stages."""
        if holder.wallet_id not in self._large_wallets:
            return 0
        return sum(self._of_wallet[holder.wallet_id, stage] - (stage in holder.stages) for stage in stages)

    def best(self, options: Sequence[MoveOption]) -> MoveOption:
        """Return the option to take; a draw decides between equally good ones."""
        return min(options, key=lambda option: (self._merit(option), self._lot(option.holder), option.window))

    def _merit(self, option: MoveOption) -> tuple[int, int, int, bool, float]:
        """The sort key of an option; the lowest one is taken.

        In this order: it fills most empty stages, meets fewest nodes of its wallet, takes on fewest stages, has least
        to lose, and leaves most replicas behind. The last two depend on the nodes' own reports. In further draws, after
        no node has moved, they do not count.
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
    """The windows of `length` stages in `room` that cover the target; `room` itself if it is shorter."""
    length = min(length, len(room))
    for start in range(max(room.start, target.stop - length), min(target.start, room.stop - length) + 1):
        yield StageRange(start, start + length)


UNEVEN_RATIO = 2  # a stage with more than this ratio of the replicas of another one helps it
MOST_DETOURS = 8  # first steps of a chain to consider

Advice: TypeAlias = "tuple[MoveOption, int | WalletId]"


class MoveReason(StrEnum):
    """The reason for a move, which also decides how long nodes wait before they make it."""

    EMPTY_STAGE = "empty_stage"
    SAME_WALLET = "same_wallet"
    UNEVEN = "uneven"


@dataclass(frozen=True)
class Move:
    """A planned move of one node to other stages."""

    node_id: NodeId
    stages: StageRange  # its new ones
    reason: MoveReason
    about: int | WalletId  # the stage that gains, or the wallet whose nodes move apart
    takes_on: bool = False  # it holds more stages afterwards


def planned_moves(coverage: StageCoverage) -> tuple[Move, ...]:
    """Return the most urgent kind of moves that should be made now, all at the same time.

    While an empty stage can be filled, or a node that makes it possible is on the way, no other move is made.
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
    """Return whether no move can improve anything: nearly always the case, and cheap to check."""
    fewest, most = min(coverage.replicas), max(coverage.replicas)
    is_even = fewest > 0 and most <= UNEVEN_RATIO * fewest
    return is_even and len({holder.wallet_id for holder in coverage.holders}) == len(coverage.holders)


def further_moves(
    reason: MoveReason, coverage: StageCoverage, barred: frozenset[NodeId], draw: int = 0
) -> tuple[Move, ...]:
    """Return the moves of one kind if barred nodes stay. `draw` changes the order of nodes that are equally placed."""
    return _moves(reason, StageOccupancy(coverage, barred, draw))


def _moves(reason: MoveReason, places: StageOccupancy) -> tuple[Move, ...]:
    """Moves that can be made at the same time and together leave no stage empty.

    A node takes on more stages only if that completes the model: otherwise nothing is gained, and a new node may
    come.
    """
    moves, after = _all_moves(reason, places)
    if 0 in after.replicas and any(move.takes_on for move in moves):
        moves, _ = _all_moves(reason, places.without_more())
    return moves


def _all_moves(reason: MoveReason, places: StageOccupancy) -> tuple[tuple[Move, ...], StageOccupancy]:
    """All moves of one kind, each planned after the moves before it."""
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
    """Whether an empty stage can be filled within this number of steps."""
    found = _ways_to_empty_stages(places)
    return found is not None and found[0] < steps


def _ways_to_empty_stages(places: StageOccupancy) -> tuple[int, list[tuple[MoveOption, int]]] | None:
    """The number of nodes that must make room before an empty stage is filled, and the candidates for the first move.

    Breadth first, from the empty stages back: a node that would leave a stage empty needs another one there before.
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
    """Moves that cover the target, each with the stages that it would leave empty."""
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


TURNS_A_DRAW = 16  # after this number the turns restart in another order


@dataclass(frozen=True)
class RelocationTiming:
    """The times, in seconds, that nodes wait before they move.

    Settle time and half a turn must be well above the time that a report travels.
    """

    settle_seconds: float = 4.0  # an empty stage stays empty for this time before any node moves
    more_seconds: float = 45.0  # the same before a node adds it to its own stages: other nodes may be starting
    calm_seconds: float = 60.0  # the same for moves that can wait
    turn_seconds: float = 20.0  # a node begins in the first half of its turn; after the turn come the next nodes
    claim_seconds: float = 3.0  # from a node's announcement of its move to the move: twice the travel time of a report


@dataclass(frozen=True)
class PendingRelocation:
    """The moves that should be made, and since when this node has seen the need. `PendingRelocation()` is the start."""

    coverage: StageCoverage | None = None  # at the last look
    moves: tuple[Move, ...] = ()  # of the first turn
    since: float = 0.0  # seconds of any monotonic clock

    def seen(self, coverage: StageCoverage, now: float) -> PendingRelocation:
        """Return the state after a look at the swarm, including this node at its real position.

        The time restarts when other stages are empty or the reason to move changes.
        """
        if coverage == self.coverage:
            return self
        moves = planned_moves(coverage)
        return PendingRelocation(coverage, moves, self.since if _causes(moves) == _causes(self.moves) else now)


def should_move(
    node_id: NodeId, pending: PendingRelocation, now: float, times: RelocationTiming | None = None
) -> Move | None:
    """Return the move that this node should make now, or None if it should stay.

    The best placed nodes have the first turn. Nodes that did not move in their turn are skipped in the next one, so
    that a node that cannot move blocks no other.
    """
    times = times or RelocationTiming()
    if pending.coverage is None or not pending.moves:
        return None
    reason = pending.moves[0].reason
    patience = _patience(pending.moves, times)
    turn, within = divmod(now - pending.since - patience, times.turn_seconds)
    if turn < 0 or within > times.turn_seconds / 2:
        return None
    moves = _moves_of_turn(reason, pending.coverage, int(turn)) if turn else pending.moves
    move = next((move for move in moves if move.node_id == node_id), None)
    is_early = move is not None and move.takes_on and now - pending.since < times.more_seconds
    return None if is_early else move


def may_proceed(mover: StageHolder, move: Move, before: StageCoverage, after: StageCoverage) -> bool:
    """Return whether a node that announced a move should make it, by the reports that arrived since then.

    `mover` is its position `before`, at the decision. Nodes that see failures at different times may choose the same
    stage: among the announced ones the node with the lowest lot goes, and a node already at work there has priority.
    The moves of others must not leave empty the stages that it gives up.
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
        # after every node had a turn, all of them get another one
        passed_over = passed_over | {move.node_id for move in moves} if moves else frozenset[NodeId]()
    return further_moves(reason, coverage, passed_over, draw)


def _causes(moves: Iterable[Move]) -> set[tuple[MoveReason, int | WalletId | None]]:
    return {(move.reason, move.about if move.reason is MoveReason.EMPTY_STAGE else None) for move in moves}
