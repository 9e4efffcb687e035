"""What /api/pipeline, /api/status and /metrics tell of a run in several stages."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from neuroshard.api.rendering import as_json
from neuroshard.status.pipeline import PipelineStage, StateCopyStatus
from neuroshard.status.summaries import pipeline_summary
from neuroshard.types import LayerRange, NodeId
from tests.worlds.api import Api
from tests.worlds.statuses import FLOW, ME, PASSAGE, STAGES, B, C, D, in_a_pipeline, training_status


def test_every_stage_with_its_layers_roles_and_holders(api: Api) -> None:
    api.node.board.publish(in_a_pipeline())
    body = api.get("/api/pipeline").json()
    assert [(stage["stage"], stage["layers"], stage["roles"]) for stage in body["stages"]] == [
        (0, {"start": 0, "stop": 2}, ["driver"]),
        (1, {"start": 2, "stop": 3}, ["worker"]),
        (2, {"start": 3, "stop": 4}, ["validator"]),
    ]
    assert [(stage["holders"], stage["joining"]) for stage in body["stages"]] == [
        ([ME], []),
        ([B, C], []),
        ([D, C], [C]),
    ]
    assert [stage["is_here"] for stage in body["stages"]] == [True, False, False]
    assert [stage["has_single_holder"] for stage in body["stages"]] == [True, False, True]
    assert (body["stage_count"], body["layer_count"], body["layers_covered"]) == (3, 4, 4)
    assert (body["coverage"], body["complete"], body["missing"], body["missing_layers"]) == (1.0, True, "", [])


@pytest.mark.parametrize(
    ("copy", "told"),
    [(None, (None, None)), (StateCopyStatus(None), (False, None)), (StateCopyStatus(12.5), (True, 12.5))],
)
def test_the_second_copy_of_a_stage(
    api: Api, copy: StateCopyStatus | None, told: tuple[bool | None, float | None]
) -> None:
    api.node.board.publish(in_a_pipeline((replace(STAGES[0], copy=copy), *STAGES[1:])))
    stage = api.get("/api/pipeline").json()["stages"][0]
    assert (stage["has_copy"], stage["copy_age_seconds"]) == told


def test_a_stage_that_nobody_has_is_shown_and_named(api: Api) -> None:
    empty = PipelineStage(1, LayerRange(2, 3), joining=(ME,))
    api.node.board.publish(in_a_pipeline((STAGES[0], empty, PipelineStage(2, LayerRange(3, 4)))))
    body = api.get("/api/pipeline").json()
    assert [stage["is_missing"] for stage in body["stages"]] == [False, True, True]
    assert (body["stages"][1]["holders"], body["stages"][2]["holders"]) == ([ME], [])
    assert (body["layers_covered"], body["coverage"], body["complete"]) == (2, 0.5, False)
    assert body["missing"] == "Some layers are missing."
    assert body["missing_layers"] == [{"start": 2, "stop": 4}]
    summary = api.get("/api/status").json()["pipeline"]
    shared = {name: body[name] for name in ("stage_count", "missing", "missing_layers")}
    assert summary == {**shared, "missing_stages": 2, "single_stages": 1}


def test_missing_layers_with_others_between_them_are_two_ranges(api: Api) -> None:
    first, middle, last = STAGES
    gaps = (replace(first, ready=()), middle, replace(last, ready=(), joining=()))
    api.node.board.publish(in_a_pipeline(gaps))
    body = api.get("/api/pipeline").json()
    assert body["missing_layers"] == [{"start": 0, "stop": 2}, {"start": 3, "stop": 4}]


def test_a_stage_whose_holders_are_all_paused_rests_and_is_not_missing(api: Api) -> None:
    api.node.board.publish(in_a_pipeline((STAGES[0], PipelineStage(1, LayerRange(2, 3), paused=(B,)), STAGES[2])))
    body = api.get("/api/pipeline").json()
    stage = body["stages"][1]
    assert (stage["is_resting"], stage["is_missing"], stage["holders"], stage["paused"]) == (True, False, [B], [B])
    assert body["complete"] is True


def test_this_node_stands_first_also_where_it_gets_ready(api: Api) -> None:
    stage = PipelineStage(0, LayerRange(0, 4), ready=(B, C), joining=(ME,))
    api.node.board.publish(in_a_pipeline((stage,)))
    assert api.get("/api/pipeline").json()["stages"][0]["holders"] == [ME, B, C]


def test_the_flow_of_this_drivers_microbatches(api: Api) -> None:
    api.node.board.publish(in_a_pipeline())
    flow = api.get("/api/pipeline").json()["flow"]
    numbers = {name: value for name, value in flow.items() if not isinstance(value, list | dict)}
    assert numbers == {
        "window_seconds": 60.0,
        "microbatches": 30,
        "tokens": 7680,
        "tokens_per_second": 128.0,
        "bubble_share": 0.4375,
        "recompute_share": 0.125,
        "wire_bytes_per_token": 80.0,
        "busiest_upload_per_token": 96.0,
        "exact_takeovers": 2,
        "approximate_takeovers": 1,
        "failures": 4,
        "given_up": 1,
    }
    assert flow["bottleneck"] == {"stage": 1, "node_id": B, "seconds": 0.75, "share": 0.5}
    assert [load["nodes"] for load in flow["loads"]] == [1, 2, 1]
    assert flow["unanswered"] == [1]
    before, newest = flow["recent"]
    assert (before["microbatch"], newest["microbatch"], newest["session"]) == (2, 3, 7)
    assert newest["takeovers"] == [{"stage": 1, "before": C, "after": B, "is_exact": False}]
    assert newest["other_seconds"] == pytest.approx(2.0 - 1.5625)
    assert newest["hops"][1] == {
        "node_id": B,
        "compute_seconds": 0.5,
        "wait_seconds": 0.25,
        "wire_seconds": 0.125,
        "recompute_seconds": 0.125,
        "bytes_sent": 4096,
        "bytes_received": 8192,
        "bytes_handed": 16384,
    }


def test_a_node_that_drives_nothing_tells_of_its_own_stages(api: Api) -> None:
    api.node.board.publish(in_a_pipeline(flow=None))
    body = api.get("/api/pipeline").json()
    assert body["flow"] is None
    assert body["own_stages"] == [
        {
            "stage": 0,
            "layers": {"start": 0, "stop": 2},
            "steps": 20,
            "outer_step": 1,
            "loss": 6.5,
            "grad_norm": 0.5,
            "sequences_accumulated": 3,
            "sequences_wanted": 8,
            "open_microbatches": 2,
            "sessions": 1,
            "state_root": "ab" * 32,
            "last_saved_step": 10,
            "tokens_per_second": 0.0,
        }
    ]


def test_before_the_plan_is_known_the_layers_that_nodes_tell_are_the_stages(api: Api) -> None:
    api.node.board.publish(training_status())
    body = api.get("/api/pipeline").json()
    assert [stage["holders"] for stage in body["stages"]] == [["12D3KooWtest"]]
    assert (body["complete"], body["flow"], body["missing_layers"]) == (True, None, [])
    assert api.get("/api/status").json()["pipeline"] is None


def test_every_field_of_the_answer_is_described_with_its_unit(api: Api) -> None:
    schemas = api.app.openapi()["components"]["schemas"]
    plain = {"stage", "layers", "roles", "holders", "layer_count", "stages", "steps", "outer_step", "last_saved_step"}
    plain |= {"session", "microbatch", "tokens", "takeovers", "bytes_received", "tokens_per_second", "stage_count"}
    plain |= {"node_id", "own_stages", "compute_seconds", "wait_seconds", "wire_seconds"}
    for name in (
        "PipelineSummary",
        "RunStage",
        "PipelineFlow",
        "MicrobatchTrace",
        "HopTimes",
        "StageStatus",
        "Bottleneck",
    ):
        fields = schemas[name]["properties"]
        silent = {field for field, schema in fields.items() if not schema.keys() & {"description", "unit"}} - plain
        assert not silent, (name, silent)


def test_the_pipeline_is_scraped(api: Api) -> None:
    api.node.board.publish(in_a_pipeline((*STAGES[:2], PipelineStage(2, LayerRange(3, 4)))))
    lines = api.get("/metrics").text.splitlines()
    for line in (
        "neuroshard_pipeline_stages 3.0",
        "neuroshard_pipeline_missing_stages 1.0",
        "neuroshard_pipeline_single_stages 1.0",
        'neuroshard_pipeline_holders{stage="1",state="ready"} 2.0',
        "neuroshard_pipeline_bubble_ratio 0.4375",
        "neuroshard_pipeline_recompute_ratio 0.125",
        "neuroshard_pipeline_wire_bytes_per_token 80.0",
        "neuroshard_pipeline_busiest_upload_per_token 96.0",
        "neuroshard_pipeline_tokens_per_second 128.0",
        "neuroshard_pipeline_bottleneck_stage 1.0",
        'neuroshard_pipeline_stage_seconds{part="wait",stage="1"} 0.25',
        'neuroshard_pipeline_takeovers_total{weights="equal"} 2.0',
        'neuroshard_pipeline_takeovers_total{weights="unknown"} 1.0',
        "neuroshard_pipeline_failures_total 4.0",
        "neuroshard_pipeline_given_up_total 1.0",
        'neuroshard_stage_steps_total{stage="0"} 20.0',
        'neuroshard_stage_sequences{stage="0"} 3.0',
    ):
        assert line in lines, line
    api.node.board.publish(in_a_pipeline(flow=None))
    assert "bubble" not in api.get("/metrics").text


def test_sixty_four_stages_with_two_hundred_holders_each_are_answered_quickly() -> None:
    nodes = tuple(NodeId(f"12D3KooW{number:044}") for number in range(200))
    stages = tuple(PipelineStage(index, LayerRange(index, index + 1), ready=nodes) for index in range(64))
    passage = replace(PASSAGE, hops=PASSAGE.hops[1:2] * 64)
    status = in_a_pipeline(stages, replace(FLOW, recent=(passage,) * 32))
    began = time.perf_counter()
    size = len(as_json(pipeline_summary(status)))
    assert time.perf_counter() - began < 10
    assert size < 2_000_000
