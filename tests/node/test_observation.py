"""What a node says about synchronisation before its first round with others, and about the speed of its device."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import pytest

from neuroshard.node.observation import among_replicas, at_speed_of
from neuroshard.status.computer import AccelerationStatus
from neuroshard.status.freshness import fresh
from neuroshard.status.snapshot import DilocoStatus, NodeState, StageStatus
from tests.worlds.statuses import in_a_pipeline, training_status

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


DEVICE = AccelerationStatus("CPU", "fp32", flops_per_token=4_000, peak_flops=1e6, peak_source="measured")


def stage_at(tokens_per_second: float) -> StageStatus:
    return replace(in_a_pipeline().stages[0], tokens_per_second=tokens_per_second)


def test_the_speed_of_a_device_is_that_of_all_its_stages() -> None:
    even = at_speed_of(DEVICE, [stage_at(100.0), stage_at(100.0)], [1_000, 3_000])
    assert (even.tokens_per_second, even.flops_per_second, even.mfu) == (100.0, 400_000.0, 0.4)
    uneven = at_speed_of(DEVICE, [stage_at(100.0), stage_at(50.0)], [1_000, 3_000])
    assert uneven.flops_per_second == 100 * 1_000 + 50 * 3_000
    assert uneven.mfu == pytest.approx(0.25)


def test_before_the_first_step_and_in_a_pause_no_speed_is_shown() -> None:
    assert at_speed_of(DEVICE, [stage_at(0.0)], [4_000]) == DEVICE
    assert isnan(DEVICE.mfu)
    busy = replace(training_status(), acceleration=replace(DEVICE, tokens_per_second=100.0))
    shown = fresh(busy, 1.0).acceleration
    assert shown is not None
    assert shown.mfu == 0.4
    for hidden in (fresh(replace(busy, state=NodeState.PAUSED), 1.0), fresh(busy, 31.0)):
        assert hidden.acceleration is not None
        assert isnan(hidden.acceleration.mfu)
        assert isnan(hidden.acceleration.flops_per_second)
        assert hidden.acceleration.peak_flops == 1e6
