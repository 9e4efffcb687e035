"""What /api/data and /metrics tell of the training data."""

from __future__ import annotations

from dataclasses import replace

from neuroshard.status.data import (
    DataCoverage,
    DataStatus,
    DownloadStatus,
    RefreshState,
    RefreshStatus,
    ShardOrigin,
    ShardStatus,
    ShardUse,
)
from neuroshard.types import ShardId
from tests.worlds.api import Api
from tests.worlds.statuses import training_status

DATA = DataStatus(
    "https://cdn.example",
    verified=True,
    explanation="Signed.",
    total_shards=16,
    cached_shards=2,
    cached_bytes=9_792,
    cache_limit_bytes=2_000_000_000,
    next_shard_ready=True,
    downloads=(DownloadStatus("shard_6.bin", 10, 100, 0.0, 2, "HTTP 503", retry_at=5.0),),
    files_from_nodes=3,
    shards=(
        ShardStatus(ShardId(4), ShardUse.IN_USE, 4896, ShardOrigin.SOURCE, verified=True),
        ShardStatus(ShardId(5), ShardUse.NEXT, 4896, ShardOrigin.NODE, verified=True),
        ShardStatus(ShardId(6), ShardUse.ASSIGNED),
    ),
    refresh=RefreshStatus(RefreshState.GROWN, "Newer data.", 90.0, 400.0, 40, 16_000, 32_000, "2026-01-01"),
    coverage=DataCoverage(2, 12, (1.0, 2.0, 0.5)),
)


def test_shards_news_and_coverage_are_told(api: Api) -> None:
    api.node.board.publish(replace(training_status(), data=DATA))
    body = api.get("/api/data").json()["data"]
    assert body["shards"] == [
        {"shard": 4, "use": "in_use", "bytes": 4896, "origin": "source", "verified": True},
        {"shard": 5, "use": "next", "bytes": 4896, "origin": "node", "verified": True},
        {"shard": 6, "use": "assigned", "bytes": None, "origin": None, "verified": False},
    ]
    assert body["refresh"] == {
        "state": "grown",
        "explanation": "Newer data.",
        "checked_at": 90.0,
        "next_at": 400.0,
        "newest_shards": 40,
        "newest_tokens": 16_000,
        "newest_ids": 32_000,
        "updated_at": "2026-01-01",
    }
    assert body["coverage"] == {"nodes": 2, "shards": 12, "copies": [1.0, 2.0, 0.5]}
    assert api.get("/api/status").json()["data"] == body


def test_the_data_are_scraped(api: Api) -> None:
    api.node.board.publish(replace(training_status(), data=DATA))
    lines = api.get("/metrics").text.splitlines()
    for line in (
        "neuroshard_data_shards 16.0",
        "neuroshard_data_verified 1.0",
        "neuroshard_data_cached_bytes 9792.0",
        "neuroshard_data_cache_limit_bytes 2e+09",
        "neuroshard_data_newest_shards 40.0",
        "neuroshard_data_shards_held 12.0",
        "neuroshard_data_giving_nodes 2.0",
        "neuroshard_data_downloads_waiting 1.0",
        'neuroshard_data_refresh{state="grown"} 1.0',
        'neuroshard_data_refresh{state="refused"} 0.0',
        "neuroshard_data_files_from_nodes_total 3.0",
    ):
        assert line in lines


def test_a_node_without_data_scrapes_none(api: Api) -> None:
    api.node.board.publish(replace(training_status(), data=None))
    assert "neuroshard_data_" not in api.get("/metrics").text
