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


class ShardUse(StrEnum):
    """What a node has a shard for."""

    IN_USE = "in_use"  # its windows are being trained on
    NEXT = "next"  # fetched ahead
    ASSIGNED = "assigned"  # to be read later
    HELD_OUT = "held_out"  # measured with, never trained on
    READ = "read"  # was used, and is kept while there is room


class ShardOrigin(StrEnum):
    """Where the contents of a shard came from."""

    SOURCE = "source"
    NODE = "node"  # another node of the run, while the source failed
    EARLIER = "earlier"  # it lay in the cache when this node started


@dataclass(frozen=True)
class ShardStatus:
    """One shard that this node has or will need."""

    shard: ShardId
    use: ShardUse
    bytes: int | None = None  # in the cache; None: it is not there
    origin: ShardOrigin | None = None  # None: not known
    verified: bool = False  # its contents were compared with the digest in the signed manifest since the start


@dataclass(frozen=True)
class DataCoverage:
    """Which shards the nodes of the run say they can give, this one included."""

    nodes: int = 0  # that have any
    shards: int = 0  # that somebody has
    copies: tuple[float, ...] = ()  # mean number of copies in equal stretches of the data set, in order


@dataclass(frozen=True)
class DownloadStatus:
    """What the data client is fetching, and how it goes."""

    name: str  # "shard_17.bin"
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
    shards: tuple[ShardStatus, ...] = ()  # in the order of their use, then those that were read; the first ones only
    refresh: RefreshStatus = field(default_factory=RefreshStatus)
    coverage: DataCoverage | None = None  # None before the node is in a swarm
