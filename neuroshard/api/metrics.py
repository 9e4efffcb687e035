"""The snapshot and the counters as Prometheus text; a registry of its own each time, nothing global."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from neuroshard.api.data_metrics import data_metrics
from neuroshard.api.metric_families import PREFIX, known_gauges
from neuroshard.api.pipeline_metrics import pipeline_metrics
from neuroshard.api.round_metrics import round_metrics
from neuroshard.api.views.network import refusals
from neuroshard.status.kindness import Action
from neuroshard.status.snapshot import ConnectionKind, NetworkState, NodeState, NodeStatus
from neuroshard.telemetry.counters import CounterValue

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4


def metrics_text(status: NodeStatus, counters: Sequence[CounterValue], age_seconds: float) -> bytes:
    """Everything a scrape sees when the newest snapshot is so old."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Values([*snapshot_metrics(status, age_seconds), *_counted(counters)]))
    return generate_latest(registry)


class _Values(Collector):
    """Hands ready values to a registry."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = tuple(metrics)

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: the registry holds this collector only."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The values."""
        return self._metrics


def snapshot_metrics(status: NodeStatus, age_seconds: float) -> Iterator[Metric]:
    """Gauges and counters of one snapshot; what is not known is left out."""
    yield InfoMetricFamily(PREFIX + "node", "This node", {"version": status.version, "node_id": status.node_id or ""})
    states = GaugeMetricFamily(PREFIX + "state", "1 for the state the node is in", labels=["state"])
    for state in NodeState:
        states.add_metric([state.value], 1.0 if status.state is state else 0.0)
    yield states
    actions = GaugeMetricFamily(PREFIX + "training_allowed", "1 for what training may do", labels=["action"])
    for action in Action:
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
        ("loss", "Loss of the last step, nats a token", training.loss),
        ("loss_ema", "Smoothed training loss, nats a token", training.loss_ema),
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
    for reason, count in refusals(network.refused).items():
        refused.add_metric([reason], count)
    yield from (states, kinds, refused)


def _swarm(status: NodeStatus) -> Iterator[Metric]:
    swarm = status.swarm
    if swarm is None:
        return
    gauges = [
        ("swarm_nodes", "Nodes of the run, this one included", swarm.nodes),
        ("swarm_training_nodes", "Nodes of the run that train", swarm.training_nodes),
        ("swarm_loss", "Token-weighted loss of all nodes, nats a token", swarm.global_loss),
        ("swarm_tokens_per_second", "Tokens all nodes train on a second", swarm.tokens_per_second),
        ("swarm_shards_covered", "Shards that some node has read", swarm.shards_covered),
    ]
    yield from known_gauges(gauges)
    yield CounterMetricFamily(PREFIX + "swarm_steps", "Inner steps of all nodes", swarm.total_steps)
    yield CounterMetricFamily(PREFIX + "swarm_tokens", "Tokens all nodes trained on", swarm.total_tokens)


def _counted(counters: Sequence[CounterValue]) -> Iterator[Metric]:
    for counter in counters:
        yield CounterMetricFamily(f"{PREFIX}events_{counter.name}", counter.help, counter.value)
