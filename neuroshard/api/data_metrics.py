"""The training data as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from neuroshard.api.metric_families import PREFIX, known_gauges
from neuroshard.status.data import RefreshState
from neuroshard.status.snapshot import NodeStatus


def data_metrics(status: NodeStatus) -> Iterator[Metric]:
    """Nothing before the manifest was read, or while this node reads no data."""
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
