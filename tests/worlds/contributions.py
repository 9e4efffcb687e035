"""Contributions to a round: honest ones, and those of members that attack it. Random numbers stand for gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch

from neuroshard.aggregation import (
    AggregatorConfig,
    Cluster,
    GateVerdict,
    MemberFacts,
    SliceRows,
    SliceStatistics,
    capped_weights,
    judge_statistics,
    needs_gram,
    reduce_slice,
    reduction_by,
    slice_statistics,
)


def honest_rows(count: int, length: int, seed: int = 0, common: float = 1.5) -> torch.Tensor:
    """(count, length) fp32 with a common direction of strength `common` and noise of strength 1 of their own."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(length, generator=generator)
    return common * direction + torch.randn(count, length, generator=generator)


def judge(
    contributions: torch.Tensor, total: SliceStatistics | None = None, *, are_friends: bool = False
) -> GateVerdict:
    """Verdict over (n, d) fp32 contributions of established members, whose statistics are known or made here."""
    facts = facts_of(contributions, are_friends=are_friends)
    if total is None:
        total = slice_statistics(SliceRows.of(contributions), with_gram=True, established=facts.counted)
    return judge_statistics(total, facts)


def facts_of(contributions: torch.Tensor, *, are_friends: bool = False) -> MemberFacts:
    """Established members with equal work. Rows with the same numbers are copies."""
    originals = tuple(
        next(first for first in range(row + 1) if torch.equal(contributions[first], one) or first == row)
        for row, one in enumerate(contributions)
    )
    return replace(MemberFacts.of_equals(len(contributions), are_friends=are_friends), originals=originals)


def attacked(rows: torch.Tensor, attack: str, liars: int, seed: int = 0) -> torch.Tensor:
    """The same contributions with the first `liars` replaced by an attack that knows all the others."""
    result, honest = rows.clone(), rows[liars:]
    noise = torch.randn(liars, rows.shape[1], generator=torch.Generator().manual_seed(seed + 1))
    attacks: dict[str, Callable[[], torch.Tensor]] = {
        "sign flip": lambda: -rows[:liars],
        "x100": lambda: rows[:liars] * 100,
        "x1e30": lambda: rows[:liars] * 1e30,
        "noise": lambda: noise * 5,
        "NaN": lambda: noise * math.nan,
        "one infinity": lambda: torch.cat([rows[:liars, :-1], torch.full((liars, 1), math.inf)], dim=1),
        "copies": lambda: honest[:1].expand(liars, -1),
        "zero": lambda: noise * 0,
        # "A little is enough" (Baruch, Baruch, Goldberg 2019): all of them a little off the mean, within its noise
        "ALIE": lambda: (
            (honest.mean(dim=0) - 1.0 * honest.std(dim=0, correction=min(1, len(honest) - 1))) * (1 + 1e-6 * noise)
        ),
        # "Fall of empires" (Xie, Koyejo, Gupta 2019): against the honest mean, by a little
        "inner product": lambda: -0.5 * honest.mean(dim=0) * (1 + 1e-6 * noise),
    }
    if liars:
        result[:liars] = attacks[attack]()
    return result


ATTACKS = ("sign flip", "x100", "x1e30", "noise", "NaN", "one infinity", "copies", "zero", "ALIE", "inner product")


def cut(rows: torch.Tensor, edges: list[int]) -> list[SliceRows]:
    """The slices of the rows (n, d) between 0, the edges in ascending order, and d."""
    bounds = [0, *edges, rows.shape[1]]
    return [SliceRows.of(rows[:, start:stop]) for start, stop in pairwise(bounds) if start < stop]


def accepting_all(count: int, work: list[float] | None = None) -> GateVerdict:
    """The verdict that refuses and clips nobody, for tests of what comes after the gates."""
    weights = capped_weights([1.0] * count if work is None else work, [True] * count)
    clusters = tuple(Cluster((row,), weight) for row, weight in enumerate(weights))
    return GateVerdict(tuple(range(count)), {}, (1.0,) * count, clusters, robust=count >= 3)


def aggregated(
    rows: torch.Tensor, config: AggregatorConfig, *, verdict: GateVerdict | None = None, tolerated: int = 0
) -> torch.Tensor:
    """The aggregate of whole contributions (n, d); without a verdict all of them count as they are."""
    whole, friends = SliceRows.of(rows), MemberFacts.of_equals(len(rows), are_friends=True)
    total = slice_statistics(whole, with_gram=needs_gram(config, friends))
    verdict = accepting_all(rows.shape[0]) if verdict is None else verdict
    return reduce_slice(whole, reduction_by(config, total, verdict, tolerated=tolerated))
