"""The laboratory that the benchmarks of learning are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.hostile import attacked
from benchmarks.laboratory import ReducedRound, Scheme, Start, Texts, held_out_loss, together
from benchmarks.texts import TEXTS
from neuroshard.config.run_parameters import OuterOptimization

OUTER = OuterOptimization(inner_steps=3, interval="fixed", aggregator="trimmed_mean", trim_fraction=0.25)


@pytest.fixture(scope="module")
def texts() -> Texts:
    if not TEXTS.is_dir():
        pytest.skip(f"needs the texts in {TEXTS}")
    return Texts()


@pytest.mark.long
def test_a_liar_is_refused_and_the_honest_are_not(texts: Texts) -> None:
    start = Start.of(texts, seed=1, steps=2, replicas=5)
    honest = Scheme(OUTER, rounds=2, replicas=4, are_friends=False)
    hostile = replace(honest, replicas=5, attacks={4: lambda sent, own, _: 100 * sent[own]})
    lied = together(texts, start, hostile)
    assert (lied.caught, lied.refused) == (2, 0)
    assert lied.loss == pytest.approx(together(texts, start, honest).loss, rel=1e-3)


def test_adaptive_liars_do_more_than_plain_ones() -> None:
    """They know the rule: near-copies that count as one move the aggregate less than those that differ enough."""
    rows = {member: torch.randn(5000, generator=torch.Generator().manual_seed(member)) + 1 for member in range(8)}
    scheme = Scheme(OUTER, rounds=1, replicas=8, are_friends=False)
    sent = {member: attack(rows, member, 0) for member, attack in attacked(scheme, 6, "mimic").attacks.items()}
    honest = {member: rows[member] for member in range(6)}
    alone = ReducedRound.of(scheme, honest).aggregate
    assert alone is not None

    def moved(lies: dict[int, torch.Tensor]) -> float:
        aggregate = ReducedRound.of(scheme, honest | lies).aggregate
        assert aggregate is not None
        return float((aggregate - alone).norm())

    assert moved(sent) > 1.05 * moved({member: rows[0] + 1e-3 * rows[member] for member in (6, 7)})


def test_what_makes_the_model_worse_is_voted_down(texts: Texts) -> None:
    start = Start.of(texts, seed=1, steps=2, replicas=2)
    honest = Scheme(OUTER, rounds=2, replicas=2, votes=True)
    hostile = replace(honest, attacks={1: lambda sent, own, _: 1e4 * sent[own].flip(0)})  # no gate judges one of two
    calm, lied = (together(texts, start, scheme) for scheme in (honest, hostile))
    assert (calm.voted_down, calm.abandoned) == (0, 0)
    assert (lied.voted_down, lied.abandoned, lied.caught) == (2, 2, 0)
    assert lied.loss == held_out_loss(start.executor().model, texts)  # what was agreed on before


def test_contributions_weigh_as_their_work_up_to_twice_the_median() -> None:
    rows = {member: torch.ones(64) for member in range(3)}
    for member, row in rows.items():
        row[member] = 2.0
    scheme = Scheme(replace(OUTER, aggregator="mean", codec="fp32"), rounds=1, replicas=3)

    def shares(*work: int) -> list[float]:
        aggregate = ReducedRound.of(scheme, rows, work).aggregate
        assert aggregate is not None
        return (aggregate[:3] - 1).tolist()

    assert shares() == shares(5, 5, 5) == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    assert shares(1, 2, 4) == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    assert shares(1, 2, 40) == shares(1, 2, 4)
