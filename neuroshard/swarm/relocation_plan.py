"""Which nodes should hold other stages than they do. Pure: all who know the same agree.

While a stage is empty, nodes with nothing to lose or from stages with other replicas fill it, or one that has room for
more holds it beside its own; where none can do so directly, one makes room for another. Then nodes of one wallet part,
then the most covered stages help the least covered ones. Each kind of move makes one of these strictly better and none
before it worse, so moves come to an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TypeAlias

from neuroshard.swarm.relocation_options import MoveOption, Places
from neuroshard.swarm.stage_coverage import StageCoverage, StageRange
from neuroshard.types import NodeId, WalletId

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
    places = Places(coverage)
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
    return _moves(reason, Places(coverage, barred, draw))


def _moves(reason: MoveReason, places: Places) -> tuple[Move, ...]:
    """Moves that can be made at the same time and together leave no stage alone.

    A node takes more stages on only where the model is then complete: else nothing is won, and somebody may be coming.
    """
    moves, after = _all_moves(reason, places)
    if 0 in after.replicas and any(move.takes_on for move in moves):
        moves, _ = _all_moves(reason, places.without_more())
    return moves


def _all_moves(reason: MoveReason, places: Places) -> tuple[tuple[Move, ...], Places]:
    """With what is then."""
    moves: list[Move] = []
    while (advice := _advice(reason, places)) is not None:
        option, about = advice
        moves.append(Move(option.holder.node_id, option.window, reason, about, option.takes_on))
        places = places.after(option, arrived=False)
    return tuple(moves), places


def _advice(reason: MoveReason, places: Places) -> Advice | None:
    match reason:
        case MoveReason.EMPTY_STAGE:
            return _fill(places)
        case MoveReason.SAME_WALLET:
            return _spread(places)
        case MoveReason.UNEVEN:
            return _even(places)


def _fill(places: Places) -> Advice | None:
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


def _is_nearer(places: Places, steps: int) -> bool:
    """Whether fewer steps than so many come before a stage can be filled."""
    found = _ways_to_empty_stages(places)
    return found is not None and found[0] < steps


def _ways_to_empty_stages(places: Places) -> tuple[int, list[tuple[MoveOption, int]]] | None:
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


def _ways_to(places: Places, target: StageRange) -> Iterator[tuple[MoveOption, StageRange | None]]:
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


def _spread(places: Places) -> Advice | None:
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


def _even(places: Places) -> Advice | None:
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
