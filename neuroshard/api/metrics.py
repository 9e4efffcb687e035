"""The snapshot and the counters as Prometheus text. Each request has its own registry, so that nothing is global."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from neuroshard.api.rendering import encodable
from neuroshard.status.data import RefreshState
from neuroshard.status.owner_policy import TrainingAction
from neuroshard.status.pipeline import PipelineFlow, PipelineStage
from neuroshard.status.snapshot import ConnectionKind, NetworkState, NodeState, NodeStatus, StageStatus
from neuroshard.status.values import counted
from neuroshard.telemetry.counters import CounterValue

PREFIX: Final = "neuroshard_"


def known_gauges(values: Iterable[tuple[str, str, float | None]]) -> Iterator[Metric]:
    """Yield a gauge for each (name, help, value) whose value is a finite number."""
    for name, help_text, value in values:
        if value is not None and isfinite(value):
            yield GaugeMetricFamily(PREFIX + name, help_text, value)


def data_metrics(status: NodeStatus) -> Iterator[Metric]:
    """Metrics of the training data; none before the manifest was read, or on a node that reads no data."""
    data = status.data
    if data is None or not data.source:
        return
    coverage = data.coverage
    waiting = sum(one.retry_at is not None for one in data.downloads)
    gauges: list[tuple[str, str, float | None]] = [
        ("data_shards", "Shards of the data set, as the run pins it", data.total_shards),
        ("data_verified", "1 when every shard is checked against a signed digest", data.verified),
        ("data_cached_shards", "Shards in the cache", data.cached_shards),
        ("data_cached_bytes", "Bytes of the cache", data.cached_bytes),
        ("data_cache_limit_bytes", "Limit the owner set", data.cache_limit_bytes),
        ("data_next_shard_ready", "1 when the next shard is in the cache", data.next_shard_ready),
        ("data_newest_shards", "Shards of the newest manifest at the source", data.refresh.newest_shards),
        ("data_shards_held", "Shards that some node of the run can give", coverage.shards if coverage else None),
        ("data_giving_nodes", "Nodes of the run that can give shards", coverage.nodes if coverage else None),
        ("data_downloads", "Files on their way", len(data.downloads)),
        ("data_downloads_waiting", "Files whose source failed", waiting),
    ]
    yield from known_gauges(gauges)
    states = GaugeMetricFamily(PREFIX + "data_refresh", "1 for what the last look has shown", labels=["state"])
    for state in RefreshState:
        states.add_metric([state.value], data.refresh.state is state)
    yield states
    given = "Files that other nodes gave because the source failed"
    yield CounterMetricFamily(PREFIX + "data_files_from_nodes", given, data.files_from_nodes)


def pipeline_metrics(status: NodeStatus) -> Iterator[Metric]:
    """Metrics of the stages, once they are known, and of the microbatches, if this node drives any."""
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


_BY_STAGE = ("stage",)
_BY_REASON = ("stage", "reason")


def round_metrics(status: NodeStatus) -> Iterator[Metric]:
    """Counts of certified rounds since this node's start, and the phases of each stage's last round."""
    completed = _counter("rounds_completed", "Certified rounds that completed", _BY_STAGE)
    abandoned = _counter("rounds_abandoned", "Certified rounds that came to nothing here", _BY_REASON)
    accepted = _counter("round_contributions_accepted", "Contributions to completed rounds", _BY_STAGE)
    refused = _counter("round_contributions_refused", "Contributions refused in completed rounds", _BY_REASON)
    sent = _counter("round_sent_bytes", "Bytes of rounds sent", _BY_STAGE)
    received = _counter("round_received_bytes", "Bytes of rounds received", _BY_STAGE)
    seconds = GaugeMetricFamily(PREFIX + "round_seconds", "Of the last round", labels=["stage", "phase"])
    for one in status.diloco.rounds:
        stage = str(one.stage)
        completed.add_metric([stage], one.completed)
        accepted.add_metric([stage], one.accepted)
        sent.add_metric([stage], one.bytes_sent)
        received.add_metric([stage], one.bytes_received)
        for reason, count in one.abandoned:
            abandoned.add_metric([stage, reason.value], count)
        for refusal, count in one.refused:
            refused.add_metric([stage, encodable(refusal)], count)
        for phase, value in vars(one.recent[-1].phases).items() if one.recent else ():
            if isfinite(value):
                seconds.add_metric([stage, phase], value)
    yield from (completed, abandoned, accepted, refused, sent, received, seconds)


def _counter(name: str, help_text: str, labels: tuple[str, ...]) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, help_text, labels=labels)


CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4


def metrics_text(status: NodeStatus, counters: Sequence[CounterValue], age_seconds: float) -> bytes:
    """Encode all metrics in Prometheus' text format. `age_seconds` is the age of the snapshot."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Values([*snapshot_metrics(status, age_seconds), *_counted(counters)]))
    return generate_latest(registry)


class _Values(Collector):
    """Passes finished values to a registry."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = tuple(metrics)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry holds only this collector, so there are no duplicates to check."""
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def snapshot_metrics(status: NodeStatus, age_seconds: float) -> Iterator[Metric]:
    """Gauges and counters of one snapshot. Unknown values are left out."""
    yield InfoMetricFamily(PREFIX + "node", "This node", {"version": status.version, "node_id": status.node_id or ""})
    states = GaugeMetricFamily(PREFIX + "state", "1 for the state the node is in", labels=["state"])
    for state in NodeState:
        states.add_metric([state.value], 1.0 if status.state is state else 0.0)
    yield states
    actions = GaugeMetricFamily(PREFIX + "training_allowed", "1 for what training may do", labels=["action"])
    for action in TrainingAction:
        actions.add_metric([action.value], 1.0 if status.kindness.decision.action is action else 0.0)
    yield actions
    yield from _gauges(status, age_seconds)
    yield from _totals(status)
    yield from _network(status)
    yield from _swarm(status)
    yield from data_metrics(status)
    yield from pipeline_metrics(status)
    yield from round_metrics(status)


def _gauges(status: NodeStatus, age_seconds: float) -> Iterator[Metric]:
    training, held_out, memory = status.training, status.training.held_out, status.memory
    values: list[tuple[str, str, float | None]] = [
        ("uptime_seconds", "Seconds since the start", status.uptime_seconds + age_seconds),
        ("snapshot_age_seconds", "Age of the newest snapshot", age_seconds),
        (
            "training_verified",
            "1 when held-out data shows that the model learns",
            status.verification.training_verified,
        ),
        ("loss", "Loss of the last step, nats per token", training.loss),
        ("loss_ema", "Smoothed training loss, nats per token", training.loss_ema),
        ("held_out_loss", "Loss on the pinned held-out sequences", held_out[-1].loss if held_out else None),
        ("learning_rate", "Inner learning rate", training.lr),
        ("tokens_per_second", "Tokens trained on a second", training.tokens_per_second),
        ("step_seconds", "Duration of an inner step", training.step_seconds),
        ("inner_step", "Inner steps since the last outer step", status.diloco.inner_step),
        (
            "transferred_month_bytes",
            "Moved in this calendar month",
            status.kindness.transferred_megabytes * 1e6,
        ),
        ("compute_share", "Share of the time in which training may compute", status.kindness.decision.share),
        ("peers", "Other nodes", len(status.peers)),
        ("memory_limit_bytes", "Memory limit", memory.limit_mb * 1e6 if memory else None),
        ("resident_memory_bytes", "Resident memory", memory.resident_mb * 1e6 if memory else None),
        ("cpu_cores", "CPU use of this process, in cores", status.resources.cpu_cores),
        ("disk_free_bytes", "Free space of the data folder's disk", status.resources.disk_free_bytes),
        ("checkpoint_could_lose_steps", "Steps that a kill now would lose", status.checkpoints.could_lose_steps),
    ]
    yield from known_gauges(values)
    threads = GaugeMetricFamily(PREFIX + "thread_cpu_cores", "CPU use of a thread, in cores", labels=["thread"])
    for thread in status.resources.threads:
        if isfinite(thread.cores):
            threads.add_metric([thread.name], thread.cores)
    yield threads


def _totals(status: NodeStatus) -> Iterator[Metric]:
    values = [
        ("steps", "Inner steps", status.training.steps),
        ("tokens", "Tokens trained on", status.training.tokens),
        ("skipped_steps", "Steps skipped for a non-finite loss or gradient", status.training.skipped_steps),
        ("outer_steps", "Outer steps", status.diloco.outer_steps),
        ("successful_syncs", "Rounds that completed", status.diloco.successful_syncs),
        ("failed_syncs", "Rounds that were aborted", status.diloco.failed_syncs),
        ("shard_rotations", "Changes of the data shard", status.data.rotations if status.data else 0),
    ]
    for name, help_text, value in values:
        yield CounterMetricFamily(PREFIX + name, help_text, value)


def _network(status: NodeStatus) -> Iterator[Metric]:
    network = status.network
    gauges = [
        ("connections", "Open connections to other nodes", network.connections),
        ("banned_peers", "Peers that are refused for a while", network.banned_peers),
        ("network_upload_bytes_per_second", "Bytes sent a second", network.upload_rate),
        ("network_download_bytes_per_second", "Bytes received a second", network.download_rate),
        ("network_upload_limit_bytes_per_second", "Limit the owner set", network.upload_limit),
    ]
    yield from known_gauges(gauges)
    yield CounterMetricFamily(PREFIX + "network_sent_bytes", "Bytes sent to other nodes", network.bytes_sent)
    yield CounterMetricFamily(PREFIX + "network_received_bytes", "Bytes received from nodes", network.bytes_received)
    states = GaugeMetricFamily(PREFIX + "network_state", "1 for the state the network is in", labels=["state"])
    for state in NetworkState:
        states.add_metric([state.value], 1.0 if network.state is state else 0.0)
    kinds = GaugeMetricFamily(PREFIX + "connected_peers", "Peers by how they are reached", labels=["kind"])
    for kind in ConnectionKind:
        kinds.add_metric([kind.value], sum(peer.connection is kind for peer in status.peers))
    refused = CounterMetricFamily(PREFIX + "network_refused", "What peers sent and was refused", labels=["reason"])
    for reason, count in counted(network.refused).items():
        refused.add_metric([encodable(reason)], count)
    yield from (states, kinds, refused)


def _swarm(status: NodeStatus) -> Iterator[Metric]:
    swarm = status.swarm
    if swarm is None:
        return
    gauges = [
        ("swarm_nodes", "Nodes of the run, this one included", swarm.nodes),
        ("swarm_training_nodes", "Nodes of the run that train", swarm.training_nodes),
        ("swarm_loss", "Token-weighted loss of all nodes, nats per token", swarm.global_loss),
        ("swarm_tokens_per_second", "Tokens all nodes train on a second", swarm.tokens_per_second),
        ("swarm_shards_covered", "Shards that some node has read", swarm.shards_covered),
    ]
    yield from known_gauges(gauges)
    yield CounterMetricFamily(PREFIX + "swarm_steps", "Inner steps of all nodes", swarm.total_steps)
    yield CounterMetricFamily(PREFIX + "swarm_tokens", "Tokens all nodes trained on", swarm.total_tokens)


def _counted(counters: Sequence[CounterValue]) -> Iterator[Metric]:
    for counter in counters:
        yield CounterMetricFamily(f"{PREFIX}events_{counter.name}", counter.help, counter.value)
