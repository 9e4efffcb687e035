"""When a node moves to other stages: after a time to settle, and in its turn, so that two do not go for one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from neuroshard.swarm.relocation_plan import Move, MoveReason, further_moves, planned_moves
from neuroshard.swarm.stage_coverage import StageCoverage
from neuroshard.types import NodeId, WalletId

TURNS_A_DRAW = 16  # after so many the turns begin anew, in another order


@dataclass(frozen=True)
class MoveTimes:
    """When nodes act on what they see; settle and half a turn must be well above the time that news takes to spread."""

    settle_seconds: float = 5.0  # an empty stage stays empty for so long before anybody moves
    more_seconds: float = 45.0  # the same before a node holds it beside its own: others may be starting
    calm_seconds: float = 60.0  # the same for moves that can wait
    turn_seconds: float = 20.0  # who has the turn begins within its first half; after it, it is the next ones' turn


@dataclass(frozen=True)
class Unrest:
    """What should change, and since when this node has seen that; the beginning is `Unrest()`."""

    coverage: StageCoverage | None = None  # as it was seen last
    moves: tuple[Move, ...] = ()  # of the first turn
    since: float = 0.0  # seconds of any clock that only goes forward

    def seen(self, coverage: StageCoverage, now: float) -> Unrest:
        """After a look at the swarm, this node included, where it truly is.

        The time starts anew when other stages are empty or the reason to move is another.
        """
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
    patience = _patience(unrest.moves, times)
    turn, within = divmod(now - unrest.since - patience, times.turn_seconds)
    if turn < 0 or within > times.turn_seconds / 2:
        return None
    moves = _moves_of_turn(reason, unrest.coverage, int(turn)) if turn else unrest.moves
    move = next((move for move in moves if move.node_id == node_id), None)
    is_early = move is not None and move.takes_on and now - unrest.since < times.more_seconds
    return None if is_early else move


def _patience(moves: Iterable[Move], times: MoveTimes) -> float:
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
