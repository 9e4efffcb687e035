"""What a node knows of its training data: frozen values for the snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from neuroshard.types import ShardId, ShardRange


class RefreshState(StrEnum):
    """What the last look at the source of the data has shown; training goes on in all of them."""

    PENDING = "pending"  # nobody looked yet
    CURRENT = "current"  # it has what the run pins, and no more
    GROWN = "grown"  # it has more: for a new run
    OLDER = "older"  # it shows less than was there before: a cache on the way is behind
    INCOMPLETE = "incomplete"  # parts of a publication do not fit each other yet
    REFUSED = "refused"  # what it shows is not to be trusted
    UNREACHABLE = "unreachable"  # it does not answer, or has no manifest


@dataclass(frozen=True)
class RefreshStatus:
    """The newest description of the data that its source gave. Times are seconds since the epoch, for people."""

    state: RefreshState = RefreshState.PENDING
    explanation: str = "The source was not looked at again since the start."
    checked_at: float | None = None
    next_at: float | None = None
    newest_shards: int | None = None  # of the newest manifest that can be trusted
    newest_tokens: int | None = None
    newest_ids: int | None = None  # of its tokenizer table
    updated_at: str = ""  # when it was published, as its maker says


@dataclass(frozen=True)
class DownloadStatus:
    """What the data client is fetching, and how it goes."""

    name: str  # "shard_17.pt"
    bytes_done: int
    bytes_total: int | None
    bytes_per_second: float
    attempt: int
    error: str | None = None  # last failure, in words
    retry_at: float | None = None  # seconds since the epoch


@dataclass(frozen=True)
class DataStatus:
    """Genesis data on this node."""

    source: str  # URL or folder
    verified: bool  # signed manifest with digest pages
    explanation: str
    is_demo: bool = False
    total_shards: int = 0
    total_tokens: int = 0
    held_out_shards: int = 0
    shard: ShardId | None = None
    shard_windows_done: int = 0
    shard_windows_total: int = 0
    passes: int = 0  # whole passes over the assignment
    shards_seen: int = 0  # distinct shards trained on so far
    rotations: int = 0
    last_rotation_reason: str = ""
    cached_shards: int = 0
    cached_bytes: int = 0
    cache_limit_bytes: int = 0
    next_shard_ready: bool = False
    downloads: tuple[DownloadStatus, ...] = ()
    shared: tuple[ShardRange, ...] = ()  # shards that other nodes can get from here
    files_from_nodes: int = 0  # that the source did not give
    refresh: RefreshStatus = field(default_factory=RefreshStatus)
