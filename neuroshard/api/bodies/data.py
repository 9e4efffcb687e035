"""Answers about the training data."""

from __future__ import annotations

from pydantic import Field

from neuroshard.api.bodies.base import Answer, Number, Text
from neuroshard.status.data import RefreshState, ShardOrigin, ShardUse


class DownloadBody(Answer):
    """What the data client is fetching."""

    name: Text
    bytes_done: int
    bytes_total: int | None
    bytes_per_second: Number
    attempt: int
    error: Text | None
    retry_at: Number


class ShardRangeBody(Answer):
    """Shards start, start + 1, ... stop - 1."""

    start: int
    stop: int


class ShardBody(Answer):
    """One shard that this node has or will need."""

    shard: int
    use: ShardUse
    bytes: int | None = Field(description="in the cache; null when it is not there")
    origin: ShardOrigin | None
    verified: bool = Field(description="compared with the digest in the signed manifest since the start")


class RefreshBody(Answer):
    """What the last look at the source has shown."""

    state: RefreshState
    explanation: Text
    checked_at: Number
    next_at: Number
    newest_shards: int | None
    newest_tokens: int | None
    newest_ids: int | None = Field(description="of the newest tokenizer table")
    updated_at: Text


class CoverageBody(Answer):
    """Which shards the nodes of the run say they can give, this one included."""

    nodes: int = Field(description="nodes that have any")
    shards: int = Field(description="shards that somebody has")
    copies: list[float] = Field(description="mean number of copies in equal stretches of the data set, at most 128")


class DataBody(Answer):
    """Genesis data on this node."""

    source: Text
    verified: bool
    explanation: Text
    is_demo: bool
    total_shards: int
    total_tokens: int
    held_out_shards: int
    shard: int | None
    shard_windows_done: int
    shard_windows_total: int
    passes: int
    shards_seen: int
    rotations: int
    last_rotation_reason: Text
    cached_shards: int
    cached_bytes: int
    cache_limit_bytes: int
    next_shard_ready: bool
    downloads: list[DownloadBody]
    shared: list[ShardRangeBody] = Field(description="shards that other nodes can get from here")
    files_from_nodes: int = Field(description="files that other nodes gave because the source failed")
    shards: list[ShardBody] = Field(description="in the order of their use, then those that were read; at most 24")
    refresh: RefreshBody
    coverage: CoverageBody | None = Field(description="null before the node is in a swarm")


class DataAnswer(Answer):
    """GET /api/data; `data` is null until the manifest was read."""

    data: DataBody | None
