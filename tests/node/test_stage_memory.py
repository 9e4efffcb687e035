"""What the stages of a computer have in work follows from its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.config.settings import OptimizerMemory
from neuroshard.errors import TooLittleMemoryError, UsageError
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.model.architecture import architecture_for, layer_matrices_count, parameter_count, plan_of
from neuroshard.model.memory_need import MEGABYTE, DeviceKind, PipelineLoad
from neuroshard.node.own_stages import (
    LEAST_OPEN,
    REMEMBERED_OF_DRIVER,
    DevicePlan,
    StageWork,
    best_load,
    device_plan,
    least_load,
    need_of,
    stage_work,
    windows_of,
)
from neuroshard.node.site_ranks import follow_plan
from neuroshard.pipeline.driver import MICROBATCHES_OF_SESSION
from neuroshard.pipeline.sessions import microbatches_in_flight
from neuroshard.runs.proposal import HardwareBudget, propose
from neuroshard.training.site.plan import SitePlan
from neuroshard.training.site.site import Site
from neuroshard.types import Architecture, LayerRange

PINS = GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 8192)
STAGED = RunParameters("test", 1, architecture_for(12, 8192), 4, 4, 64, 7, PINS)
MIDDLE = StageRange(1, 2)
OF_DRIVER = microbatches_in_flight(STAGED.stage_count)


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
    assert work[-1] == (2 * OF_DRIVER, 2 * OF_DRIVER)
    assert {(OF_DRIVER, 0), (OF_DRIVER, OF_DRIVER)} <= set(work)
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
    assert 0 <= load.kept_graphs <= load.open_microbatches <= min(2 * microbatches_in_flight(stage_count), microbatches)
    least = least_load(parameters, stages)
    assert least is not None
    need, least_need = (need_of(parameters, stages, here, each) for each in (load, least))
    assert least_need.host_bytes <= need.host_bytes
    assert least_need.device_bytes <= need.device_bytes


@pytest.mark.parametrize(("stage_count", "expected"), [(2, 8), (4, 8), (12, 24), (32, 64), (40, 64)])
def test_a_long_pipeline_has_as_many_microbatches_in_flight_as_keep_each_stage_busy(
    stage_count: int, expected: int
) -> None:
    """Their sessions fit the limits of the stage, too: those that still run, and as many that end."""
    shape = architecture_for(40, 8192)
    long = replace(STAGED, architecture=shape, stage_count=stage_count, batch_size=1, sequences_per_step=200)
    load = best_load(long, StageRange(1, 2), room(1_000_000))
    assert load is not None
    work = stage_work(long, plan_of(long)[1], load)
    assert work.limits is not None
    sessions = work.limits.sessions
    assert (sessions.open_of_driver, sessions.open_microbatches) == (expected, 2 * expected)
    assert sessions.sessions_of_driver * MICROBATCHES_OF_SESSION >= 2 * expected
    assert sessions.sessions >= 4 * sessions.sessions_of_driver


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


BILLION = Architecture(2048, 24, 16, 16, 5632, 32_000, 512)  # 1.36 billion parameters
WHOLE = replace(STAGED, architecture=BILLION, stage_count=1, batch_size=1, sequences_per_step=1)
ALL = StageRange(0, 1)


def gpu(megabytes: int, optimizer_memory: OptimizerMemory = "auto", *, ranks: int = 1) -> HardwareBudget:
    return HardwareBudget(100_000, "cuda", megabytes, 1e15, ranks, optimizer_memory=optimizer_memory, compiles=True)


def test_a_card_of_24_gb_trains_1_3_billion_parameters_with_moments_on_the_host() -> None:
    """21,500 MB of it may be used. Weights, gradients and moments in fp32 take 21,700."""
    room = gpu(21_500)
    assert parameter_count(BILLION) > 1.3e9
    assert device_plan(WHOLE, ALL, room) == DevicePlan(moments_on_host=True, compiles=True)
    assert need_of(WHOLE, ALL, room, None).fits(room.tier_mb, room.device_tier_mb)
    with pytest.raises(TooLittleMemoryError):
        windows_of(WHOLE, gpu(21_500, "device"), None)
    assert windows_of(WHOLE, room, None) == (ALL,)
    assert device_plan(WHOLE, ALL, gpu(40_000)) == DevicePlan(moments_on_host=False, compiles=True)
    assert device_plan(WHOLE, ALL, gpu(40_000, "host")) == DevicePlan(moments_on_host=True, compiles=True)


def test_what_can_be_given_up_is_given_up_in_order() -> None:
    """With less and less memory: compilation first, then the place of the moments, then both."""
    plans = [device_plan(WHOLE, ALL, gpu(megabytes)) for megabytes in range(40_000, 10_000, -100)]
    order = list(dict.fromkeys((plan.moments_on_host, plan.compiles) for plan in plans))
    assert order[:4] == [(False, True), (False, False), (True, True), (True, False)]


def test_moments_stay_on_the_device_of_a_processor_a_site_and_muon() -> None:
    muon = replace(WHOLE, inner=replace(WHOLE.inner, optimizer="muon"))
    for parameters, room in (
        (WHOLE, replace(gpu(21_500, "host"), device="cpu", device_tier_mb=None)),
        (WHOLE, gpu(21_500, "host", ranks=2)),
        (muon, gpu(21_500, "host")),
    ):
        assert not device_plan(parameters, ALL, room).moments_on_host
    on_host = need_of(WHOLE, ALL, gpu(21_500, "host"), None)
    assert on_host.host.moments == 8 * parameter_count(BILLION)
    assert not on_host.fits(20_000, 21_500)  # the host's limit counts them


def test_more_stages_than_fit_with_moments_on_the_device_are_not_held() -> None:
    """A node holds stages with moments on the host only if it could not hold one otherwise."""
    parameters = replace(WHOLE, stage_count=4, sequences_per_step=8)
    on_device, auto, on_host = (
        max(map(len, windows_of(parameters, gpu(12_000, place), None))) for place in ("device", "auto", "host")
    )
    assert on_device == auto < on_host


def test_a_new_run_is_larger_if_the_owner_keeps_moments_on_the_host() -> None:
    auto, on_device, on_host = (
        parameter_count(propose(gpu(8_000, place), 32_000).architecture) for place in ("auto", "device", "host")
    )
    assert auto == on_device < on_host


def test_the_copy_of_a_block_that_is_compiled_counts() -> None:
    need = need_of(WHOLE, ALL, gpu(40_000), None)
    assert need.device.compilation > 3 * 4 * layer_matrices_count(BILLION, LayerRange(0, 1))
    eager = need_of(WHOLE, ALL, replace(gpu(40_000), compiles=False), None)
    assert eager.device_bytes == pytest.approx(need.device_bytes - 1.05 * need.device.compilation)


def test_a_site_divides_only_a_stage_that_fits_no_device() -> None:
    """`site_mode` auto: replicate where one device can hold the stage, else shard; an owner may choose either."""
    run = replace(STAGED, stage_count=1, batch_size=1)
    need = need_of(run, ALL, HardwareBudget(64_000, "cuda", None, 1e9), None).device_bytes // MEGABYTE
    large, small = (HardwareBudget(64_000, "cuda", mb, 1e9, 4) for mb in (need + 1, need - 1))
    assert device_plan(run, ALL, large).mode == "replicate"
    assert device_plan(run, ALL, small).mode == "shard"
    assert device_plan(run, ALL, replace(large, site_mode="shard")).mode == "shard"
    for wish in ("auto", "shard"):
        assert device_plan(run, ALL, replace(small, ranks=1, site_mode=wish)).mode == "replicate"
    assert windows_of(run, small, None) == (ALL,)
    with pytest.raises(TooLittleMemoryError):
        windows_of(run, replace(small, site_mode="replicate"), None)
    muon = replace(run, inner=replace(run.inner, optimizer="muon"))
    assert device_plan(muon, ALL, replace(small, device_tier_mb=1000)).mode == "replicate"


def test_a_site_gives_up_compilation_before_it_divides_a_stage() -> None:
    """Whatever the owner wants for the moments, they stay on the ranks; the blocks of a divided stage stay eager."""
    plans = [
        device_plan(WHOLE, ALL, gpu(megabytes, wish, ranks=4))
        for wish in ("auto", "host")
        for megabytes in range(40_000, 10_000, -100)
    ]
    assert list(dict.fromkeys(plans)) == [DevicePlan(compiles=True), DevicePlan(), DevicePlan(mode="shard")]
    divided = need_of(WHOLE, ALL, gpu(18_000, ranks=4), None)
    assert divided.fits(100_000, 18_000)
    assert (divided.device.compilation, divided.host.moments) == (0, 0)
    assert divided.device.gathered > 0


def test_a_site_of_more_stages_than_fit_undivided_holds_no_more_of_them() -> None:
    """Dividing lets a site hold a stage at all; only the owner's wish lets it hold more of them."""
    parameters = replace(WHOLE, stage_count=4, sequences_per_step=8)
    room = gpu(12_000, ranks=4)
    undivided, auto, divided = (
        max(map(len, windows_of(parameters, replace(room, site_mode=wish), None)))
        for wish in ("replicate", "auto", "shard")
    )
    assert undivided == auto < divided


def test_a_run_with_muon_is_not_divided() -> None:
    site = Site(SitePlan(2), 2, "cpu", threads=1)
    follow_plan(site, STAGED, DevicePlan(mode="shard"))
    assert site.is_sharded
    with pytest.raises(UsageError, match="needs whole matrices"):
        follow_plan(site, replace(STAGED, inner=replace(STAGED.inner, optimizer="muon")), DevicePlan(mode="shard"))


def test_the_ranks_of_a_site_compile_only_if_the_plan_has_memory_for_it() -> None:
    site = Site(SitePlan(2), 2, "cpu", threads=1, compilation="auto")
    follow_plan(site, STAGED, DevicePlan(compiles=True))
    assert site.compilation == "auto"
    follow_plan(site, STAGED, DevicePlan())
    assert (site.compilation, site.is_sharded) == ("off", False)
