"""Status of the training data on this node: frozen values for the snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from neuroshard.status.values import Number, Stale, about, derived
from neuroshard.types import ShardId, ShardRange


class RefreshState(StrEnum):
    """Result of the last check of the data source. Training continues in every state."""

    PENDING = "pending"  # not checked yet
    CURRENT = "current"  # the source has exactly what the run pins
    GROWN = "grown"  # the source has more; a new run can use it
    OLDER = "older"  # the source shows less than before: a cache on the way is behind
    INCOMPLETE = "incomplete"  # the parts of a publication do not match each other yet
    REFUSED = "refused"  # the answer cannot be trusted
    UNREACHABLE = "unreachable"  # no answer, or no manifest


@dataclass(frozen=True)
class RefreshStatus:
    """The newest description of the data that its source gave."""

    state: Annotated[RefreshState, about("result of the last check of the data source", gauge="data_refresh")] = (
        RefreshState.PENDING
    )
    explanation: str = "The source was not checked again since the start."
    checked_at: Annotated[float | None, about("time of the last check", "s since 1970")] = None
    next_at: Annotated[float | None, about("time of the next check", "s since 1970")] = None
    newest_shards: Annotated[
        int | None, about("shards in the newest manifest that can be trusted", gauge="data_newest_shards")
    ] = None
    newest_tokens: Annotated[int | None, about("tokens in that manifest", "tokens")] = None
    newest_ids: Annotated[int | None, about("entries in its tokenizer table")] = None
    updated_at: Annotated[str, about("publication time, as the publisher states it")] = ""


class ShardUse(StrEnum):
    """Purpose of a shard on this node."""

    IN_USE = "in_use"  # the node trains on its windows
    NEXT = "next"  # fetched ahead
    ASSIGNED = "assigned"  # to be read later
    HELD_OUT = "held_out"  # used for evaluation, never for training
    READ = "read"  # used already, and kept while there is room


class ShardOrigin(StrEnum):
    """Source of a shard's contents."""

    SOURCE = "source"
    NODE = "node"  # another node of the run, while the source failed
    EARLIER = "earlier"  # in the cache when this node started


@dataclass(frozen=True)
class ShardStatus:
    """One shard that this node has or will need."""

    shard: ShardId
    use: ShardUse
    bytes: Annotated[int | None, about("size in the cache; null: not in the cache", "bytes")] = None
    origin: Annotated[ShardOrigin | None, about("null: not known")] = None
    verified: Annotated[bool, about("compared with the digest in the signed manifest since the start")] = False


@dataclass(frozen=True)
class DataCoverage:
    """Shards that the nodes of the run offer, this node included."""

    nodes: Annotated[int, about("nodes that have any shard", gauge="data_giving_nodes")] = 0
    shards: Annotated[int, about("shards that at least one node has", gauge="data_shards_held")] = 0
    copies: Annotated[
        tuple[float, ...],
        about("mean number of copies in equal parts of the data set, in order; at most 128 parts"),
    ] = ()


@dataclass(frozen=True)
class DownloadStatus:
    """A file that the data client fetches."""

    name: Annotated[str, about('file name, such as "shard_17.bin"', brief="file")]
    bytes_done: Annotated[int, about(unit="bytes")]
    bytes_total: Annotated[int | None, about("null: not known", "bytes")]
    bytes_per_second: Annotated[Number | None, about(unit="bytes/s", stale=Stale.OLD_SNAPSHOT, brief="speed")]
    attempt: int
    error: Annotated[str | None, about("last failure", brief="error")] = None
    retry_at: Annotated[float | None, about("time of the next attempt", "s since 1970", brief="next attempt")] = None


@dataclass(frozen=True)
class DataStatus:
    """Genesis data on this node."""

    source: Annotated[str, about("URL or folder")]
    verified: Annotated[
        bool, about("every shard is checked against a digest in the signed manifest", gauge="data_verified")
    ]
    explanation: Annotated[str, about(brief="data")]
    is_demo: bool = False
    total_shards: Annotated[int, about("shards of the data set, as the run pins it", gauge="data_shards")] = 0
    total_tokens: Annotated[int, about("tokens of the data set", "tokens")] = 0
    held_out_shards: int = 0
    shard: Annotated[ShardId | None, about("shard in use")] = None
    shard_windows_done: int = 0
    shard_windows_total: int = 0
    passes: Annotated[int, about("complete passes over the shards assigned to this node")] = 0
    shards_seen: Annotated[int, about("distinct shards trained on", over_swarm="size of the union")] = 0
    rotations: Annotated[int, about("changes of the shard", counter="shard_rotations")] = 0
    last_rotation_reason: str = ""
    cached_shards: Annotated[int, about("shards in the cache", gauge="data_cached_shards")] = 0
    cached_bytes: Annotated[int, about("size of the cache", "bytes", gauge="data_cached_bytes")] = 0
    cache_limit_bytes: Annotated[int, about("limit that the owner set", "bytes", gauge="data_cache_limit_bytes")] = 0
    next_shard_ready: Annotated[bool, about("the next shard is in the cache", gauge="data_next_shard_ready")] = False
    downloads: Annotated[
        tuple[DownloadStatus, ...], about("files that are being fetched", gauge="data_downloads", brief="download")
    ] = ()
    shared: Annotated[tuple[ShardRange, ...], about("shards that other nodes can get from this node")] = ()
    files_from_nodes: Annotated[
        int, about("files that other nodes gave because the source failed", counter="data_files_from_nodes")
    ] = 0
    shards: Annotated[tuple[ShardStatus, ...], about("in the order of use, then those that were read; at most 24")] = ()
    refresh: RefreshStatus = field(default_factory=RefreshStatus)
    coverage: Annotated[DataCoverage | None, about("null before the node is in a swarm")] = None

    @derived("files whose source failed; each is tried again", gauge="data_downloads_waiting")
    @property
    def downloads_waiting(self) -> int:
        return sum(one.retry_at is not None for one in self.downloads)
