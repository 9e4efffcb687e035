"""What a node says about synchronisation while its nodes do not average yet."""

from __future__ import annotations

from dataclasses import replace

from neuroshard.node.observation import NOT_SYNCHRONISED, among_others
from neuroshard.status.snapshot import DilocoStatus

OWN = DilocoStatus(inner_step=3, inner_steps_total=500, outer_steps=2, explanation="Alone.")


def test_alone_the_outer_steps_explain_themselves() -> None:
    assert among_others(OWN, others=0) == OWN


def test_among_others_it_is_said_that_nothing_is_averaged_yet() -> None:
    assert among_others(OWN, others=1) == replace(OWN, explanation=NOT_SYNCHRONISED)
    assert "do not synchronise yet" in NOT_SYNCHRONISED
    assert "each trains its own" in NOT_SYNCHRONISED
    assert "later version" in NOT_SYNCHRONISED


def test_a_round_with_others_is_told_as_it_was() -> None:
    met = replace(OWN, members=3, explanation="The last round had 3 members.")
    assert among_others(met, others=2) == met
