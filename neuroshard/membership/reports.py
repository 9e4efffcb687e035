"""Training reports: their fields, their intervals and their sequence numbers.

A report travels as an array without the names of its fields: each node sends one every few seconds. It takes about 450
bytes, of which 192 are keys and signatures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from neuroshard.config.state_file import StateFile
from neuroshard.data.shard_assignment import MAX_RANGES
from neuroshard.errors import StorageError
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.status.snapshot import NodeState
from neuroshard.types import (
    MAX_LOSS,
    MAX_SHARDS,
    PRINTABLE,
    LayerRange,
    NamedRun,
    Role,
    ShardId,
    ShardRange,
    UnixSeconds,
)

MAX_STEPS = 10**12
MAX_TOKENS = 10**16
MAX_TOKENS_PER_SECOND = 1e9
MAX_SEQUENCE = 2**53  # every JSON reader represents integers up to this one exactly
MAX_INTERVAL_SECONDS = 1000.0
MAX_FLOPS_PER_SECOND = 1e21
MAX_DEVICE_CHARACTERS = 40
MAX_WINDOWS = 64  # in a report; a node with more of them reports none
MAX_REPORT_BYTES = 1536  # of a signed report
_Count = Annotated[int, Meta(ge=0, le=MAX_STEPS)]
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class TrainingReport(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One node's progress. The numbers are claims of that node and no proof of work."""

    run_id: NamedRun
    sequence: Annotated[int, Meta(ge=0, le=MAX_SEQUENCE)]  # rises from report to report, also over restarts
    steps: _Count
    tokens: _Tokens
    loss_ema: Annotated[float, Meta(ge=0, le=MAX_LOSS)] | None  # nats per token
    shard: Annotated[ShardId, Meta(ge=0, le=MAX_SHARDS)] | None  # being read now
    shards_seen: Annotated[int, Meta(ge=0, le=MAX_SHARDS)]  # distinct shards trained on so far
    roles: Annotated[tuple[Role, ...], Meta(max_length=len(Role))]
    layers: LayerRange | None  # None: it holds no part of the model, or none yet
    outer_step: _Count
    state_hash: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]  # of the last outer step; "" before it
    successful_syncs: _Count
    failed_syncs: _Count
    tokens_per_second: Annotated[float, Meta(ge=0, le=MAX_TOKENS_PER_SECOND)]
    state: NodeState
    started_at: UnixSeconds
    interval_seconds: Annotated[float, Meta(ge=1, le=MAX_INTERVAL_SECONDS)]  # until the next report, within a tenth
    leaving: bool = False  # the last report of this start
    inherited_steps: _Count = 0  # of `steps`, those made by other nodes before this node took over its first stage
    inherited_tokens: _Tokens = 0
    # the longest runs of stages that the node can hold; () when it does not say
    windows: Annotated[tuple[StageRange, ...], Meta(max_length=MAX_WINDOWS)] = ()
    ready_percent: Annotated[int, Meta(ge=0, le=100)] = 0  # of the data to fetch before it can work on its layers
    cached: Annotated[tuple[ShardRange, ...], Meta(max_length=MAX_RANGES)] = ()  # shards that it can send to others
    held_out_loss: Annotated[float, Meta(ge=0, le=MAX_LOSS)] | None = None  # last evaluation on the pinned sequences
    held_out_step: _Count = 0  # inner step of that evaluation
    device: Annotated[str, Meta(max_length=MAX_DEVICE_CHARACTERS, pattern=PRINTABLE)] = ""  # that computes
    flops_per_second: Annotated[float, Meta(ge=0, le=MAX_FLOPS_PER_SECOND)] = 0.0  # forward and backward, its layers
    reachable: bool | None = None  # whether the run's organiser reached it from outside; None: it did not look

    def __post_init__(self) -> None:
        if len(set(self.roles)) != len(self.roles):
            raise ValueError("roles must be distinct")
        if any(after.start <= before.stop for before, after in pairwise(self.cached)):
            raise ValueError("cached must be ascending ranges of shards that do not touch")


REPORT_SECONDS = 10.0
MEMBERS_AT_FULL_PACE = 100  # more members report less often, so that the gossip of each node stays the same
LONGEST_REPORT_SECONDS = 1000.0
SILENT_INTERVALS = 6
LEAST_SILENCE_SECONDS = 60.0
EARLY_SECONDS = 1.0  # after the last report at least
NEWS_SECONDS = 0.2  # the same for a change of what a node does, because others wait for it
NEWS_AT_ONCE = 4  # then one per EARLY_SECONDS: the others limit the rate of reports
MEMBERS_THAT_ALL_ANSWER = 16  # in a larger swarm a newcomer learns of the others gradually
MEMBERS_TO_CATCH_UP = 64


def report_interval(members: int) -> float:
    """Return the seconds between two reports: 10 up to 100 members, then in proportion to them, at most 1,000."""
    return min(REPORT_SECONDS * max(1.0, members / MEMBERS_AT_FULL_PACE), LONGEST_REPORT_SECONDS)


def silence_limit(interval_seconds: float, members: int) -> float:
    """Return the seconds without a report after which a node is forgotten: six intervals, at least a minute.

    The interval is the longer one of the interval that the silent node announced and the interval for the swarm's
    present size.
    """
    return max(SILENT_INTERVALS * max(interval_seconds, report_interval(members)), LEAST_SILENCE_SECONDS)


def next_report_at(last: float, share: float, members: int) -> float:
    """Return when the next report is due if no node appears: `share` of an interval after the last one."""
    return last + share * report_interval(members)


def is_worth_an_early_report(members: int, members_at_last_report: int) -> bool:
    """Return whether the newcomers of the last second justify an extra report, which every node receives.

    In a small swarm they always do; in a larger one they learn of this node with its next regular report. A node that
    has just found its first few others reports to them, because its previous report reached no node.
    """
    return members <= MEMBERS_THAT_ALL_ANSWER or (members_at_last_report <= 1 and members <= MEMBERS_TO_CATCH_UP)


RESERVED = 600_000  # numbers; at most one per millisecond is used, so a reserve lasts ten minutes


class ReportNumbers:
    """Rising sequence numbers: milliseconds since the epoch, or the last number plus one after a clock change."""

    def __init__(self, reserved: int = 0, reserve: Callable[[int], None] = lambda _: None) -> None:
        """Start above `reserved`, the number that `reserve` stored last.

        `reserve` stores an upper bound. Numbers up to it may be used without another call.
        """
        self._last = self._reserved = reserved
        self._reserve = reserve

    def next(self, now: float) -> int:
        """Return the next number; `now` is in seconds since the epoch. Raises the errors of `reserve`."""
        self._last = max(self._last + 1, int(now * 1000))
        if self._last > self._reserved:
            self._reserved = self._last + RESERVED
            # Stored before the number is returned: after a kill the next start begins above every number in use.
            self._reserve(self._reserved)
        return self._last


_LOG = logging.getLogger(__name__)

NUMBER_FILE = "network/report-number.json"


class ReservedNumber(Struct, frozen=True):
    """A number that is at least as high as every number this node has used."""

    reserved: Annotated[int, Meta(ge=0, le=MAX_SEQUENCE)]


def kept_report_numbers(data_dir: Path) -> ReportNumbers:
    """Return numbers above those of earlier starts, by a bound kept in the data folder.

    If the disk refuses or the file is damaged, the numbers rise over restarts only if the clock does.
    """
    file = StateFile(
        data_dir / NUMBER_FILE,
        ReservedNumber,
        "set_aside",
        "other nodes may ignore this node's reports for some minutes if its clock was set back",
        data_dir=data_dir,
    )

    def keep(number: int) -> None:
        try:
            file.write(ReservedNumber(number))
        except StorageError as error:
            _LOG.warning("The number of this node's last report cannot be stored: %s", error)

    try:
        stored = file.read()
    except StorageError as error:
        _LOG.warning("The number of this node's last report is not known: %s", error)
        stored = None
    return ReportNumbers(0 if stored is None else stored.reserved, keep)
