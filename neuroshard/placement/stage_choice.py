"""The stages of a node that joins: its memory decides how many, the needs of the swarm decide which ones. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeAlias

from neuroshard.identity import hash_parts
from neuroshard.membership.stage_coverage import StageCoverage, StageRange
from neuroshard.types import NodeId, WalletId

NeedKey: TypeAlias = "tuple[int, int, tuple[float, ...], bool]"


def fitting_windows(stage_count: int, fits: Callable[[StageRange], bool]) -> tuple[StageRange, ...]:
    """Return the longest runs of stages that fit, none of them inside another; () if not even one stage fits.

    If `fits` is true for a run it must be true for every part of it. Stages differ in size: the first one has the
    embedding, the last one the head.
    """
    windows: list[StageRange] = []
    stop = 0
    for start in range(stage_count):
        reached = stop
        stop = max(stop, start)
        while stop < stage_count and fits(StageRange(start, stop + 1)):
            stop += 1
        if stop > max(reached, start):
            windows.append(StageRange(start, stop))
    return tuple(windows)


def equal_windows(stage_count: int, length: int) -> tuple[StageRange, ...]:
    """Return all runs of `length` stages, or one run of all stages if there are no more than that."""
    length = min(length, stage_count)
    if length < 1:
        return ()
    return tuple(StageRange(start, start + length) for start in range(stage_count - length + 1))


def choose_stages(
    node_id: NodeId, wallet_id: WalletId, windows: Sequence[StageRange], coverage: StageCoverage
) -> StageRange | None:
    """Return the window that the swarm needs most in this node's view, or None if no window fits.

    In this order: most empty stages filled, fewest nodes of the same wallet met, least covered (the counts in ascending
    order, compared one by one), windows that tile the plan. Among equal windows each node has its own preference, so
    that nodes that do not know each other yet spread out.
    """
    if not windows:
        return None
    others = coverage.without(node_id)
    same_wallet = [0] * coverage.stage_count
    for holder in others.holders:
        if holder.wallet_id == wallet_id:
            for stage in holder.stages:
                same_wallet[stage] += 1

    def key(window: StageRange) -> tuple[NeedKey, bytes]:
        return need_key(window, others.replicas, same_wallet), _favour(coverage, node_id, window)

    return min(windows, key=key)


def need_key(window: StageRange, replicas: Sequence[int], same_wallet: Sequence[int]) -> NeedKey:
    """Return the sort key of a window; the window with the lowest key is needed most.

    `replicas` and `same_wallet` count the other nodes, and those of the same wallet, on every stage of the plan.
    """
    stage_count = len(replicas)
    counts = sorted(replicas[stage] for stage in window)
    padded = (*counts, *[inf] * (stage_count - len(window)))  # of two windows with the same need the longer one wins
    tiles = window.start % len(window) == 0 or window.stop == stage_count
    return -counts.count(0), sum(same_wallet[stage] for stage in window), padded, not tiles


def _favour(coverage: StageCoverage, node_id: NodeId, window: StageRange) -> bytes:
    return hash_parts("neuroshard/placement", coverage.run_id, node_id, window.start, window.stop)
