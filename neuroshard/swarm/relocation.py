"""When a node moves to other stages: after a time to settle, and in its turn, so that two do not go for one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from neuroshard.identity import hash_parts
from neuroshard.swarm.relocation_plan import Move, MoveReason, further_moves, planned_moves
from neuroshard.swarm.stage_coverage import StageCoverage, StageHolder
from neuroshard.types import NodeId, WalletId

TURNS_A_DRAW = 16  # after so many the turns begin anew, in another order


@dataclass(frozen=True)
class MoveTimes:
    """When nodes act on what they see; settle and half a turn must be well above the time that news takes to spread."""

    settle_seconds: float = 5.0  # an empty stage stays empty for so long before anybody moves
    more_seconds: float = 45.0  # the same before a node holds it beside its own: others may be starting
    calm_seconds: float = 60.0  # the same for moves that can wait
    turn_seconds: float = 20.0  # who has the turn begins within its first half; after it, it is the next ones' turn
    claim_seconds: float = 3.0  # from the word that a node goes to its going: twice what the word takes to all others


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


def may_go_on(mover: StageHolder, move: Move, before: StageCoverage, after: StageCoverage) -> bool:
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
