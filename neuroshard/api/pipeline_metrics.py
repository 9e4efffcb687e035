"""The pipeline as Prometheus metrics: stages of the run, stages of this node, and this driver's microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from neuroshard.api.metric_families import PREFIX, known_gauges
from neuroshard.status.pipeline import PipelineFlow, PipelineStage
from neuroshard.status.snapshot import NodeStatus, StageStatus


def pipeline_metrics(status: NodeStatus) -> Iterator[Metric]:
    """Nothing before the run's stages are known; nothing of microbatches where none are driven."""
    if status.pipeline is not None:
        yield from _stages(status.pipeline.stages)
        if status.pipeline.flow is not None:
            yield from _flow(status.pipeline.flow)
    yield from _own_stages(status.stages)


def _stages(stages: Sequence[PipelineStage]) -> Iterator[Metric]:
    gauges = [
        ("pipeline_stages", "Stages of the run", len(stages)),
        ("pipeline_missing_stages", "Stages that nobody has", sum(stage.is_missing for stage in stages)),
        ("pipeline_single_stages", "Stages on one node only", sum(stage.has_single_holder for stage in stages)),
    ]
    yield from known_gauges(gauges)
    holders = GaugeMetricFamily(PREFIX + "pipeline_holders", "Nodes of a stage", labels=["stage", "state"])
    for stage in stages:
        for state, nodes in (("ready", stage.ready), ("paused", stage.paused), ("joining", stage.joining)):
            holders.add_metric([str(stage.index), state], len(nodes))
    yield holders


def _flow(flow: PipelineFlow) -> Iterator[Metric]:
    gauges = [
        ("pipeline_tokens_per_second", "Tokens that this driver drove a second, last minute", flow.tokens_per_second),
        (
            "pipeline_bubble_ratio",
            "Share of their time the stages' computers did not compute for it",
            flow.bubble_share,
        ),
        ("pipeline_recompute_ratio", "Share of the compute time for forward passes done again", flow.recompute_share),
        ("pipeline_wire_bytes_per_token", "Bytes of tensors sent and received a token", flow.wire_bytes_per_token),
        ("pipeline_bottleneck_stage", "Where microbatches spend most time", flow.bottleneck and flow.bottleneck.stage),
    ]
    yield from known_gauges(gauges)
    seconds = GaugeMetricFamily(
        PREFIX + "pipeline_stage_seconds", "Mean seconds a microbatch, last minute", labels=["stage", "part"]
    )
    for load in flow.loads:
        parts = (("compute", load.compute_seconds), ("wait", load.wait_seconds), ("wire", load.wire_seconds))
        for part, value in parts:
            if isfinite(value):
                seconds.add_metric([str(load.stage), part], value)
    takeovers = CounterMetricFamily(
        PREFIX + "pipeline_takeovers", "Stages taken over in the middle of a microbatch", labels=["weights"]
    )
    takeovers.add_metric(["equal"], flow.exact_takeovers)
    takeovers.add_metric(["unknown"], flow.approximate_takeovers)
    yield from (seconds, takeovers)
    yield CounterMetricFamily(PREFIX + "pipeline_failures", "Requests after which another was asked", flow.failures)
    yield CounterMetricFamily(PREFIX + "pipeline_given_up", "Microbatches left out for good", flow.given_up)


def _own_stages(stages: Sequence[StageStatus]) -> Iterator[Metric]:
    steps = CounterMetricFamily(PREFIX + "stage_steps", "Optimizer steps of a stage held here", labels=["stage"])
    sequences = GaugeMetricFamily(PREFIX + "stage_sequences", "Accumulated for the step in work", labels=["stage"])
    microbatches = GaugeMetricFamily(PREFIX + "stage_open_microbatches", "Between their passes", labels=["stage"])
    for stage in stages:
        steps.add_metric([str(stage.index)], stage.steps)
        sequences.add_metric([str(stage.index)], stage.sequences_accumulated)
        microbatches.add_metric([str(stage.index)], stage.open_microbatches)
    yield from (steps, sequences, microbatches)
