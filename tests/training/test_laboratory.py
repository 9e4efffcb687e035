"""The laboratory that the benchmarks of learning are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.laboratory import Scheme, Start, Texts, held_out_loss, together
from benchmarks.recorded_attacks import recorded, replayed
from benchmarks.texts import TEXTS
from neuroshard.config.run_parameters import OuterOptimization

OUTER = OuterOptimization(inner_steps=3, trim_fraction=0.25)


@pytest.fixture(scope="module")
def texts() -> Texts:
    if not TEXTS.is_dir():
        pytest.skip(f"needs the texts in {TEXTS}")
    return Texts()


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_replaying_what_all_contributed_ends_where_the_training_ended(texts: Texts, codec: str) -> None:
    start = Start.of(texts, seed=1, steps=2, replicas=4)
    scheme = Scheme(replace(OUTER, codec=codec), rounds=2, replicas=4)
    record = recorded(texts, start, scheme)
    assert replayed(texts, start, scheme, record).loss == together(texts, start, scheme).loss


def test_a_replayed_liar_is_refused(texts: Texts) -> None:
    start = Start.of(texts, seed=1, steps=2, replicas=5)
    scheme = Scheme(OUTER, rounds=2, replicas=5)
    record = recorded(texts, start, scheme)
    lied = replayed(texts, start, replace(scheme, attacks={4: lambda honest, own, _: 100 * honest[own]}), record)
    honest = replayed(texts, start, replace(scheme, replicas=4), record)
    assert (lied.caught, lied.refused) == (2, 0)
    assert lied.loss == pytest.approx(honest.loss, rel=1e-3)  # what is trimmed depends on how many there were


@pytest.mark.parametrize("is_recorded", [False, True])
def test_what_makes_the_model_worse_is_voted_down(texts: Texts, is_recorded: bool) -> None:
    start = Start.of(texts, seed=1, steps=2, replicas=2)
    honest = Scheme(OUTER, rounds=2, replicas=2, votes=True)
    hostile = replace(honest, attacks={1: lambda sent, own, _: 1e4 * sent[own].flip(0)})  # no gate judges one of two
    if is_recorded:
        record = recorded(texts, start, honest)
        calm, lied = (replayed(texts, start, scheme, record) for scheme in (honest, hostile))
    else:
        calm, lied = (together(texts, start, scheme) for scheme in (honest, hostile))
    assert (calm.voted_down, calm.abandoned) == (0, 0)
    assert (lied.voted_down, lied.abandoned, lied.caught) == (2, 2, 0)
    assert lied.loss == held_out_loss(start.executor().model, texts)  # what was agreed on before
