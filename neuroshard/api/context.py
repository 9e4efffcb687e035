"""What the composition root gives the API: the board it reads, the channel it writes to, and its settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from neuroshard.status.board import StatusBoard
from neuroshard.status.commands import CommandChannel
from neuroshard.telemetry.counters import Counters
from neuroshard.telemetry.redaction import Redactor
from neuroshard.telemetry.ring import LogRing
from neuroshard.types import JsonValue


@dataclass(frozen=True)
class ApiLimits:
    """What the API is willing to carry at once."""

    header_bytes: int = 16_384
    body_bytes: int = 1 << 20
    body_seconds: float = 10.0  # for a whole request body
    event_streams: int = 100
    completions: int = 4
    completion_seconds: float = 300.0
    heartbeat_seconds: float = 15.0  # of a silent event stream
    events_per_second: float = 4.0  # at most so many statuses
    peers_seconds: float = 1.0  # at least so long between two events about peers


@dataclass(frozen=True)
class ApiContext:
    """Everything the API may touch. `port` is the port really bound; `host` what it was bound to."""

    board: StatusBoard
    commands: CommandChannel
    log_ring: LogRing
    secret: str
    config_view: Callable[[], JsonValue]
    host: str
    port: int
    counters: Counters = field(default_factory=Counters)
    redactor: Redactor = field(default_factory=Redactor)  # knows the secrets of this node
    limits: ApiLimits = field(default_factory=ApiLimits)
    clock: Callable[[], float] = time.time  # seconds since the epoch
