"""What the stages of a computer have in work follows from its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.errors import TooLittleMemoryError, UsageError
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.model.architecture import architecture_for, plan_of
from neuroshard.model.memory_need import MEGABYTE, DeviceKind, PipelineLoad
from neuroshard.node.own_stages import (
    LEAST_OPEN,
    MOST_OPEN,
    REMEMBERED_OF_DRIVER,
    USUAL_OPEN,
    StageWork,
    best_load,
    least_load,
    need_of,
    site_mode,
    stage_work,
    windows_of,
)
from neuroshard.node.site_ranks import choose_mode
from neuroshard.runs.proposal import HardwareBudget
from neuroshard.training.site.plan import SitePlan
from neuroshard.training.site.site import Site

PINS = GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 8192)
STAGED = RunParameters("test", 1, architecture_for(12, 8192), 4, 4, 64, 7, PINS)
MIDDLE = StageRange(1, 2)


def room(tier_mb: int, device: DeviceKind = "cpu", device_mb: int | None = None) -> HardwareBudget:
    return HardwareBudget(tier_mb, device, device_mb, 1e9)


def chosen(tier_mb: int, parameters: RunParameters = STAGED, stages: StageRange = MIDDLE) -> PipelineLoad:
    load = best_load(parameters, stages, room(tier_mb))
    assert load is not None
    return load


def test_a_model_in_one_stage_is_as_it_was() -> None:
    whole = replace(STAGED, stage_count=1)
    assert best_load(whole, StageRange(0, 1), room(9_000)) is None
    assert least_load(whole, StageRange(0, 1)) is None
    assert stage_work(whole, plan_of(whole)[0], None) == StageWork(None, None)


def test_memory_goes_to_the_microbatches_of_a_driver_then_to_their_activations_then_to_other_drivers() -> None:
    found = [chosen(tier) for tier in range(500, 12_000, 100)]
    work = [(load.open_microbatches, load.kept_graphs) for load in found]
    assert work == sorted(work)
    assert work[0] == (LEAST_OPEN, 0)
    assert work[-1] == (MOST_OPEN, MOST_OPEN)
    assert {(USUAL_OPEN, 0), (USUAL_OPEN, USUAL_OPEN)} <= set(work)
    assert any(0 < kept < opened for opened, kept in work)


@given(
    tiers=st.integers(2, 40),
    stage_count=st.integers(1, 12),
    batch=st.integers(1, 8),
    microbatches=st.integers(1, 40),
    device=st.sampled_from(["cpu", "cuda"]),
    data=st.data(),
)
def test_what_is_chosen_fits_or_is_the_least(
    *, tiers: int, stage_count: int, batch: int, microbatches: int, device: DeviceKind, data: st.DataObject
) -> None:
    parameters = replace(STAGED, stage_count=stage_count, batch_size=batch, sequences_per_step=batch * microbatches)
    start = data.draw(st.integers(0, stage_count - 1))
    stages = StageRange(start, data.draw(st.integers(start + 1, stage_count)))
    here = room(500 * tiers, device, None if device == "cpu" else 500 * tiers)
    load = best_load(parameters, stages, here)
    if stage_count == 1:
        assert load is None
        return
    assert load is not None
    fits = need_of(parameters, stages, here, load).fits(here.tier_mb, here.device_tier_mb)
    assert fits or load == least_load(parameters, stages)
    assert 0 <= load.kept_graphs <= load.open_microbatches <= min(MOST_OPEN, microbatches)
    least = least_load(parameters, stages)
    assert least is not None
    need, least_need = (need_of(parameters, stages, here, each) for each in (load, least))
    assert least_need.host_bytes <= need.host_bytes
    assert least_need.device_bytes <= need.device_bytes


@pytest.mark.parametrize("stage", range(4))
def test_a_service_keeps_no_more_than_the_need_says(stage: int) -> None:
    load = PipelineLoad((plan_of(STAGED)[stage],), 8, 3)
    work = stage_work(STAGED, plan_of(STAGED)[stage], load)
    assert work.limits is not None
    sessions, stream = work.limits.sessions, 4 * 4 * STAGED.architecture.sequence_length * 768
    assert STAGED.architecture.hidden_size == 768
    ends = 1 if stage in (0, 3) else 2
    assert (sessions.open_microbatches, sessions.open_of_driver, work.kept_graphs) == (8, 8, 3)
    assert sessions.kept_bytes_of_driver == (8 + REMEMBERED_OF_DRIVER) * ends * stream < sessions.kept_bytes
    need = need_of(STAGED, StageRange(stage, stage + 1), room(9_000), load)
    assert sessions.kept_bytes <= need.device.sessions + need.host.answers


def test_activations_of_open_microbatches_count() -> None:
    loads = [PipelineLoad((plan_of(STAGED)[1],), 8, kept) for kept in (0, 1, 7, 8)]
    none, one, seven, all_ = (need_of(STAGED, MIDDLE, room(9_000), load).device.activations for load in loads)
    assert one - none == pytest.approx((seven - one) / 6, rel=0.01)
    assert all_ == seven  # nothing is computed again, which would need the room of one more
    last = PipelineLoad((plan_of(STAGED)[3],), 8, 8)
    assert need_of(STAGED, StageRange(3, 4), room(9_000), last).device.activations == none  # both passes in one job


def test_a_site_divides_only_a_stage_that_fits_no_device() -> None:
    """`site_mode` auto: replicate where one device can hold the stage, else shard; an owner may choose either."""
    run = replace(STAGED, stage_count=1, batch_size=1)
    whole = StageRange(0, 1)
    need = need_of(run, whole, HardwareBudget(64_000, "cuda", None, 1e9), None).device_bytes // MEGABYTE
    large, small = (HardwareBudget(64_000, "cuda", mb, 1e9, 4) for mb in (need + 1, need - 1))
    assert site_mode(run, whole, large) == "replicate"
    assert site_mode(run, whole, small) == "shard"
    assert site_mode(run, whole, replace(small, ranks=1)) == "replicate"
    assert site_mode(run, whole, replace(large, site_mode="shard")) == "shard"
    assert windows_of(run, small, None) == (whole,)
    with pytest.raises(TooLittleMemoryError):
        windows_of(run, replace(small, site_mode="replicate"), None)
    muon = replace(run, inner=replace(run.inner, optimizer="muon"))
    assert site_mode(muon, whole, replace(small, device_tier_mb=1000)) == "replicate"


def test_a_run_with_muon_is_not_divided() -> None:
    site = Site(SitePlan(2), 2, "cpu", threads=1)
    choose_mode(site, STAGED, "shard")
    assert site.is_sharded
    with pytest.raises(UsageError, match="needs whole matrices"):
        choose_mode(site, replace(STAGED, inner=replace(STAGED.inner, optimizer="muon")), "shard")
