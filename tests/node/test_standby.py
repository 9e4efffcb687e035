"""A computer that holds layers and gets nothing to do says why."""

from __future__ import annotations

from dataclasses import replace

from neuroshard.node.observation import QUIET_SECONDS, StandbyNotice
from neuroshard.status.snapshot import StageStatus
from neuroshard.types import LayerRange

STAGE = StageStatus(
    index=1,
    layers=LayerRange(2, 4),
    steps=7,
    outer_step=0,
    loss=None,
    grad_norm=1.0,
    sequences_accumulated=2,
    sequences_wanted=8,
    open_microbatches=0,
    sessions=0,
    state_root="",
    last_saved_step=None,
)


class Watch:
    """A standby and its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.standby = StandbyNotice(lambda: self.now)

    def after(self, seconds: float, stage: StageStatus = STAGE, replicas: int = 1, has_lanes: bool = True) -> str:
        self.now += seconds
        return self.standby.sentence((stage,), replicas, has_lanes=has_lanes)


def test_a_spare_replica_says_why_it_does_nothing() -> None:
    watch = Watch()
    assert watch.after(0) == ""
    assert watch.after(QUIET_SECONDS - 1) == ""
    assert "until the next outer step" in watch.after(1)
    assert watch.after(1, replace(STAGE, sequences_accumulated=3)) == ""  # something came
    assert watch.after(QUIET_SECONDS - 1, replace(STAGE, sequences_accumulated=3)) == ""


def test_a_rest_is_no_lack_of_work() -> None:
    watch = Watch()
    watch.after(0)
    assert watch.after(QUIET_SECONDS) != ""
    watch.standby.rest()
    watch.now += 3600
    assert watch.after(0) == ""
    assert watch.after(QUIET_SECONDS - 1) == ""
    assert watch.after(1) != ""


def test_a_stage_without_replicas_or_lanes_waits_for_text() -> None:
    for alone in ({"replicas": 0}, {"has_lanes": False}):
        watch = Watch()
        watch.after(0)
        assert "no computer that feeds text" in watch.after(QUIET_SECONDS, **alone)


def test_who_drives_itself_is_never_idle_for_others() -> None:
    watch = Watch()
    first = replace(STAGE, index=0)
    watch.after(0, first)
    assert watch.after(10 * QUIET_SECONDS, first) == ""
