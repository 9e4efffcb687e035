"""What a node says about synchronisation before its first round with others."""

from __future__ import annotations

from dataclasses import replace

from neuroshard.node.observation import among_replicas
from neuroshard.status.snapshot import DilocoStatus

OWN = DilocoStatus(inner_step=3, inner_steps_total=500, outer_steps=2, explanation="Alone.")


def test_alone_the_outer_steps_explain_themselves() -> None:
    assert among_replicas(OWN, replicas=0, holds_all=True) == OWN


def test_who_holds_a_part_of_the_model_is_not_called_alone() -> None:
    explanation = among_replicas(OWN, replicas=0, holds_all=False).explanation
    assert explanation.startswith("No other computer holds the same layers")


def test_it_is_said_with_how_many_a_node_will_average() -> None:
    one = among_replicas(OWN, replicas=1, holds_all=False)
    assert one == replace(OWN, explanation=one.explanation)
    words = "Another node holds the same layers. From the next round on, all of them agree on one average."
    assert one.explanation == words
    assert among_replicas(OWN, replicas=3, holds_all=True).explanation.startswith("3 other nodes hold the same layers")


def test_a_round_with_others_is_told_as_it_was() -> None:
    met = replace(OWN, members=3, explanation="The last round had 3 members.")
    assert among_replicas(met, replicas=2, holds_all=False) == met
