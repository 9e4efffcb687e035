"""TrainingReport: what a node says about its training every few seconds, as JSON inside a signed claim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neuroshard.data.shard_ranges import MAX_RANGES
from neuroshard.identity.fields import flag_field, object_fields
from neuroshard.status.snapshot import NodeState
from neuroshard.swarm.claim_fields import (
    hash_field,
    layers_field,
    layers_to_json,
    list_field,
    real_field,
    roles_field,
    run_field,
    whole_field,
)
from neuroshard.swarm.stage_coverage import StageRange
from neuroshard.types import JsonValue, LayerRange, Role, RunId, ShardId, ShardRange

MAX_STEPS = 10**12
MAX_TOKENS = 10**16
MAX_LOSS = 1000.0  # nats a token
MAX_TOKENS_PER_SECOND = 1e9
MAX_SHARDS = 10**8
MAX_SEQUENCE = 2**53  # every JSON reader knows such numbers exactly
MAX_INTERVAL_SECONDS = 1000.0
MAX_WINDOWS = 64  # that are told; whoever could hold more different ones tells none
_LATEST = 1e11  # seconds since the epoch
_STATES = tuple(NodeState)


@dataclass(frozen=True)
class TrainingReport:
    """One node's progress. Numbers are that node's word: nothing here is proof of work."""

    run_id: RunId
    sequence: int  # rises from report to report, also over restarts
    steps: int
    tokens: int
    loss_ema: float | None  # nats a token
    shard: ShardId | None  # being read now
    shards_seen: int  # distinct shards trained on so far
    roles: tuple[Role, ...]
    layers: LayerRange | None  # None: it holds no part of the model, or none yet
    outer_step: int
    state_hash: str  # hex, after the last outer step; empty before the first
    successful_syncs: int
    failed_syncs: int
    tokens_per_second: float
    state: NodeState
    started_at: float  # seconds since the epoch
    interval_seconds: float  # until the next report, give or take a tenth
    leaving: bool = False  # the last report of this start
    inherited_steps: int = 0  # of `steps`, what others had made before this node took the first of its stages over
    inherited_tokens: int = 0
    windows: tuple[StageRange, ...] = ()  # the longest runs of stages that it can hold; () when it does not tell
    ready_percent: int = 0  # of what it fetches before it can work on its layers
    cached: tuple[ShardRange, ...] = ()  # shards that it can give to others

    def to_json(self) -> Mapping[str, JsonValue]:
        """Every field by name; rounded where more digits would only cost bytes."""
        fields: dict[str, JsonValue] = {
            "run_id": self.run_id,
            "sequence": self.sequence,
            "steps": self.steps,
            "tokens": self.tokens,
            "loss_ema": None if self.loss_ema is None else round(self.loss_ema, 5),
            "shard": self.shard,
            "shards_seen": self.shards_seen,
            "roles": list(self.roles),
            "layers": layers_to_json(self.layers),
            "outer_step": self.outer_step,
            "state_hash": self.state_hash,
            "successful_syncs": self.successful_syncs,
            "failed_syncs": self.failed_syncs,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "state": self.state.value,
            "started_at": round(self.started_at),
            "interval_seconds": round(self.interval_seconds, 1),
            "leaving": self.leaving,
            "inherited_steps": self.inherited_steps,
            "inherited_tokens": self.inherited_tokens,
        }
        if 0 < len(self.windows) <= MAX_WINDOWS:
            fields["windows"] = [[window.start, window.stop] for window in self.windows]
        if self.ready_percent:
            fields["ready_percent"] = self.ready_percent
        if self.cached:
            fields["cached"] = [[held.start, held.stop] for held in self.cached]
        return fields

    @classmethod
    def from_json(cls, value: JsonValue) -> TrainingReport:
        """Strict reading. Raises ValueError that names the field."""
        fields = object_fields(value, _FIELDS - _OPTIONAL, _OPTIONAL, "report")
        loss, shard, state_hash = fields["loss_ema"], fields["shard"], fields["state_hash"]
        return cls(
            run_id=run_field(fields["run_id"], "run_id"),
            sequence=whole_field(fields["sequence"], 0, MAX_SEQUENCE, "sequence"),
            steps=whole_field(fields["steps"], 0, MAX_STEPS, "steps"),
            tokens=whole_field(fields["tokens"], 0, MAX_TOKENS, "tokens"),
            loss_ema=None if loss is None else real_field(loss, 0, MAX_LOSS, "loss_ema"),
            shard=None if shard is None else ShardId(whole_field(shard, 0, MAX_SHARDS, "shard")),
            shards_seen=whole_field(fields["shards_seen"], 0, MAX_SHARDS, "shards_seen"),
            roles=roles_field(fields["roles"], "roles"),
            layers=layers_field(fields["layers"], "layers"),
            outer_step=whole_field(fields["outer_step"], 0, MAX_STEPS, "outer_step"),
            state_hash="" if state_hash == "" else hash_field(state_hash, "state_hash"),
            successful_syncs=whole_field(fields["successful_syncs"], 0, MAX_STEPS, "successful_syncs"),
            failed_syncs=whole_field(fields["failed_syncs"], 0, MAX_STEPS, "failed_syncs"),
            tokens_per_second=real_field(fields["tokens_per_second"], 0, MAX_TOKENS_PER_SECOND, "tokens_per_second"),
            state=_state_field(fields["state"]),
            started_at=real_field(fields["started_at"], 0, _LATEST, "started_at"),
            interval_seconds=real_field(fields["interval_seconds"], 1, MAX_INTERVAL_SECONDS, "interval_seconds"),
            leaving=flag_field(fields["leaving"], "leaving"),
            inherited_steps=whole_field(fields["inherited_steps"], 0, MAX_STEPS, "inherited_steps"),
            inherited_tokens=whole_field(fields["inherited_tokens"], 0, MAX_TOKENS, "inherited_tokens"),
            windows=_windows_field(fields.get("windows", ())),
            ready_percent=whole_field(fields.get("ready_percent", 0), 0, 100, "ready_percent"),
            cached=_cached_field(fields.get("cached", ())),
        )


_FIELDS = set(TrainingReport.__dataclass_fields__)
_OPTIONAL = {"windows", "ready_percent", "cached"}  # older nodes do not tell them


def _state_field(value: JsonValue) -> NodeState:
    if value not in _STATES:
        raise ValueError(f"state must be one of {', '.join(_STATES)}")
    return NodeState(value)


def _cached_field(value: JsonValue) -> tuple[ShardRange, ...]:
    """Ascending ranges that do not touch."""
    ranges: list[ShardRange] = []
    for item in list_field(value, MAX_RANGES, "cached"):
        bounds = [whole_field(bound, 0, MAX_SHARDS, "cached") for bound in list_field(item, 2, "cached")]
        if len(bounds) != 2 or bounds[0] >= bounds[1] or (ranges and bounds[0] <= ranges[-1].stop):
            raise ValueError("cached must be ascending ranges of shards")
        ranges.append(ShardRange(bounds[0], bounds[1]))
    return tuple(ranges)


def _windows_field(value: JsonValue) -> tuple[StageRange, ...]:
    ranges = [layers_field(item, "windows") for item in list_field(value, MAX_WINDOWS, "windows")]
    if None in ranges:
        raise ValueError("windows must be ranges of stages")
    return tuple(StageRange(window.start, window.stop) for window in ranges if window is not None)
