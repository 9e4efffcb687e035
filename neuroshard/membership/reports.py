"""Training reports: their fields, their packed form for gossip, their intervals and their sequence numbers. Pure.

A packed report contains keys, signatures and the run id as raw bytes. The rest is JSON, deflated with a dictionary of
the words that all reports share. A report of 980 bytes is sent as 300 bytes, of which 224 are keys, signatures and the
run id, which cannot be compressed."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from struct import Struct

from neuroshard.config.state_file import make_folder, write_atomically
from neuroshard.data.assignment import MAX_RANGES
from neuroshard.identity import (
    ClaimTooLargeError,
    Delegation,
    MalformedClaimError,
    SignedClaim,
    canonical_json,
    parse_json,
)
from neuroshard.identity.strict_json import (
    exact_object,
    flag_field,
    hash_field,
    hex_field,
    layers_field,
    layers_to_json,
    list_field,
    object_fields,
    real_field,
    roles_field,
    run_field,
    text_field,
    whole_field,
)
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.status.snapshot import NodeState
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


MAX_PACKED_BYTES = 2048
MAX_REPORT_BYTES = 4096  # of the JSON, inflated
_MAX_DOMAIN_CHARACTERS = 64
_RUN_BYTES = 32
_RAW_DEFLATE = -15  # no header and no checksum: the signature is the checksum
_FORMAT = b"\x02"  # names head and dictionary below; whoever changes those must change this
_HEAD = Struct("!64s32s32s64sQd32s")  # signature, keys of node and wallet, its signature, expiry, time, run
HEAD_BYTES = len(_FORMAT) + _HEAD.size
_DICTIONARY = (
    b'["validator"]["worker"]["driver"]"state":"paused""state":"not_training""state":"waiting_for_data"'
    b'"state":"starting""loss_ema":null,"layers":null,"shard":null,"leaving":true,"ready_percent":1"state_hash":"",'
    b'0123456789abcdef{"domain":"report","payload":{"failed_syncs":0,"inherited_steps":0,"inherited_tokens":0,'
    b'"interval_seconds":10.0,"layers":[0,4],"leaving":false,"loss_ema":3.,"outer_step":0,'
    b'"roles":["driver","validator"],"sequence":17,"shard":1,"shards_seen":1,"started_at":17,"state":"training",'
    b'"state_hash":"","steps":1,"successful_syncs":0,"tokens":1,"tokens_per_second":1,"windows":[[0,1],[1,2]]}}'
)


def packed(claim: SignedClaim) -> bytes:
    """A claim about a run as it travels by gossip. Raises ClaimTooLargeError, ValueError when it names no run."""
    payload = dict(claim.payload) if isinstance(claim.payload, Mapping) else {}
    run = hex_field(payload.pop("run_id", None), _RUN_BYTES, "run_id")
    delegation = claim.delegation
    head = _HEAD.pack(
        claim.signature,
        delegation.node_public_key,
        delegation.wallet_public_key,
        delegation.signature,
        delegation.expires_at,
        claim.issued_at,
        run,
    )
    content = canonical_json({"domain": claim.domain, "payload": payload})
    deflate = zlib.compressobj(9, zlib.DEFLATED, _RAW_DEFLATE, zdict=_DICTIONARY)
    data = _FORMAT + head + deflate.compress(content) + deflate.flush()
    if len(data) > MAX_PACKED_BYTES or len(content) > MAX_REPORT_BYTES:
        raise ClaimTooLargeError(f"A packed claim has {len(data)} bytes; at most {MAX_PACKED_BYTES} are allowed.")
    return data


def unpacked(data: bytes) -> SignedClaim:
    """Read what `packed` wrote, without verifying; never more than MAX_REPORT_BYTES are inflated.

    Raises ClaimTooLargeError or MalformedClaimError.
    """
    if len(data) > MAX_PACKED_BYTES:
        raise ClaimTooLargeError(f"A packed claim has {len(data)} bytes; at most {MAX_PACKED_BYTES} are allowed.")
    if not data.startswith(_FORMAT):
        raise MalformedClaimError("A packed claim is of a format that this version does not know.")
    if len(data) < HEAD_BYTES:
        raise MalformedClaimError("A packed claim is cut off.")
    signature, node, wallet, wallet_signature, expires_at, issued_at, run = _HEAD.unpack_from(data, len(_FORMAT))
    if not isfinite(issued_at):
        raise MalformedClaimError("A packed claim was made at no time.")
    domain, payload = _inflated(data[HEAD_BYTES:])
    delegation = Delegation(node, wallet, expires_at, wallet_signature)
    return SignedClaim(domain, {**payload, "run_id": run.hex()}, issued_at, signature, delegation)


def _inflated(deflated: bytes) -> tuple[str, Mapping[str, JsonValue]]:
    """Domain and payload without the run."""
    inflate = zlib.decompressobj(_RAW_DEFLATE, zdict=_DICTIONARY)
    try:
        content = inflate.decompress(deflated, MAX_REPORT_BYTES + 1)
    except zlib.error:
        raise MalformedClaimError("A packed claim cannot be unpacked.") from None
    if len(content) > MAX_REPORT_BYTES:
        raise ClaimTooLargeError(f"A packed claim is inflated to more than {MAX_REPORT_BYTES} bytes.")
    if not inflate.eof:
        raise MalformedClaimError("A packed claim is cut off.")
    if inflate.unused_data:
        raise MalformedClaimError("A packed claim has bytes after its end.")
    try:
        fields = exact_object(parse_json(content, MAX_REPORT_BYTES), {"domain", "payload"}, "claim")
        payload = fields["payload"]
        if not isinstance(payload, Mapping) or "run_id" in payload:
            raise ValueError("payload must be a JSON object without the run")  # noqa: TRY301 - malformed input
        return text_field(fields["domain"], _MAX_DOMAIN_CHARACTERS, "domain"), payload
    except (ValueError, OverflowError) as error:
        raise MalformedClaimError(f"A claim cannot be read: {error}.") from None


REPORT_SECONDS = 10.0
MEMBERS_AT_FULL_PACE = 100  # more of them report more seldom, so that everybody's gossip stays the same
LONGEST_REPORT_SECONDS = 1000.0
SILENT_INTERVALS = 6
LEAST_SILENCE_SECONDS = 60.0
EARLY_SECONDS = 1.0  # after the last report at least
NEWS_SECONDS = 0.2  # the same for what a node does now, for others wait for it
NEWS_AT_ONCE = 4  # then one in EARLY_SECONDS: everybody counts how often a node speaks
MEMBERS_THAT_ALL_ANSWER = 16  # in a larger swarm a newcomer learns of the others by and by
MEMBERS_TO_CATCH_UP = 64


def report_interval(members: int) -> float:
    """Seconds from one report to the next: 10 up to 100 members, then in proportion to them, 1,000 at most."""
    return min(REPORT_SECONDS * max(1.0, members / MEMBERS_AT_FULL_PACE), LONGEST_REPORT_SECONDS)


def silence_limit(interval_seconds: float, members: int) -> float:
    """Seconds without a report after which a node is forgotten: six intervals, at least a minute.

    The interval is the longer one of what the silent node announced and what is due in a swarm as large as it is now.
    """
    return max(SILENT_INTERVALS * max(interval_seconds, report_interval(members)), LEAST_SILENCE_SECONDS)


def next_report_at(last: float, share: float, members: int) -> float:
    """When the next report is due when nobody appears: `share` of an interval after the last one."""
    return last + share * report_interval(members)


def is_worth_an_early_report(members: int, members_at_last_report: int) -> bool:
    """Whether the newcomers of the last second deserve a report of their own, which everybody receives.

    In a small swarm always; in a larger one they learn of this node with its next regular report. A node that has just
    found its first few others reports to them: the report before reached nobody.
    """
    return members <= MEMBERS_THAT_ALL_ANSWER or (members_at_last_report <= 1 and members <= MEMBERS_TO_CATCH_UP)


RESERVED = 600_000  # numbers, of which one is used in a millisecond at most: so the reserve lasts for ten minutes


class ReportNumbers:
    """Milliseconds since the epoch, or one more than the last: also while the clock is set back."""

    def __init__(self, reserved: int = 0, reserve: Callable[[int], None] = lambda _: None) -> None:
        """`reserve` stores up to where numbers may be used without a word; `reserved` is what it stored last."""
        self._last = self._reserved = reserved
        self._reserve = reserve

    def next(self, now: float) -> int:
        """The next one; `now` in seconds since the epoch. Raises what `reserve` raises."""
        self._last = max(self._last + 1, int(now * 1000))
        if self._last > self._reserved:
            self._reserved = self._last + RESERVED
            self._reserve(self._reserved)
        return self._last


log = logging.getLogger(__name__)

NUMBER_FILE = "network/report-number"
MOST_DIGITS = 15  # some thousand years of milliseconds; a report carries no more than 2**53


def kept_report_numbers(data_dir: Path) -> ReportNumbers:
    """Above those of earlier starts. Where the disk refuses, they rise over restarts as long as the clock does."""
    file = data_dir / NUMBER_FILE

    def keep(number: int) -> None:
        try:
            make_folder(file.parent, data_dir)
            write_atomically(file, str(number).encode())
        except OSError as error:
            log.warning("The number of this node's last report cannot be written to %s: %s", file, error)

    return ReportNumbers(_read(file), keep)


def _read(file: Path) -> int:
    try:
        with file.open("rb") as stored:
            text = stored.read(MOST_DIGITS + 1)
    except FileNotFoundError:
        return 0
    except OSError as error:
        log.warning("The number of this node's last report cannot be read: %s", error)
        return 0
    return int(text) if text.isdigit() and len(text) <= MOST_DIGITS else 0
