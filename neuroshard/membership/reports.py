"""Training reports: their fields, their packed form for gossip, their intervals and their sequence numbers.

A packed report contains keys, signatures and the run id as raw bytes. The rest is JSON, deflated with a dictionary of
the words that all reports share. A report of 980 bytes is sent as 300 bytes, of which 224 are keys, signatures and the
run id, which cannot be compressed."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path
from struct import Struct
from typing import Annotated

import msgspec
from msgspec import Meta

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
from neuroshard.identity.strict_json import declared, exact_object, hex_field, text_field
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.status.snapshot import NodeState
from neuroshard.types import MAX_SHARDS, JsonValue, LayerRange, NamedRun, Role, ShardId, ShardRange

MAX_STEPS = 10**12
MAX_TOKENS = 10**16
MAX_LOSS = 1000.0  # nats per token
MAX_TOKENS_PER_SECOND = 1e9
MAX_SEQUENCE = 2**53  # every JSON reader represents integers up to this one exactly
MAX_INTERVAL_SECONDS = 1000.0
MAX_WINDOWS = 64  # in a report; a node with more of them reports none
_LATEST = 1e11  # seconds since the epoch
_Count = Annotated[int, Meta(ge=0, le=MAX_STEPS)]
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


@dataclass(frozen=True)
class TrainingReport:
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
    started_at: Annotated[float, Meta(ge=0, le=_LATEST)]  # seconds since the epoch
    interval_seconds: Annotated[float, Meta(ge=1, le=MAX_INTERVAL_SECONDS)]  # until the next report, within a tenth
    leaving: bool = False  # the last report of this start
    inherited_steps: _Count = 0  # of `steps`, those made by other nodes before this node took over its first stage
    inherited_tokens: _Tokens = 0
    # the longest runs of stages that the node can hold; () when it does not say
    windows: Annotated[tuple[StageRange, ...], Meta(max_length=MAX_WINDOWS)] = ()
    ready_percent: Annotated[int, Meta(ge=0, le=100)] = 0  # of the data to fetch before it can work on its layers
    cached: Annotated[tuple[ShardRange, ...], Meta(max_length=MAX_RANGES)] = ()  # shards that it can send to others

    def to_json(self) -> Mapping[str, JsonValue]:
        """Return every field by name, rounded to the useful digits; empty optional fields are left out."""
        fields: dict[str, JsonValue] = msgspec.json.decode(msgspec.json.encode(self))
        fields |= {
            "loss_ema": None if self.loss_ema is None else round(self.loss_ema, 5),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "started_at": round(self.started_at),
            "interval_seconds": round(self.interval_seconds, 1),
        }
        if len(self.windows) > MAX_WINDOWS:
            del fields["windows"]
        return {name: value for name, value in fields.items() if name not in _OPTIONAL or value}

    @classmethod
    def from_json(cls, value: JsonValue) -> TrainingReport:
        """Read a report. Raises ValueError that names the field."""
        report = declared(value, cls)
        if len(set(report.roles)) != len(report.roles):
            raise ValueError("roles must be distinct")
        if any(after.start <= before.stop for before, after in pairwise(report.cached)):
            raise ValueError("cached must be ascending ranges of shards that do not touch")
        return report


_OPTIONAL = {"windows", "ready_percent", "cached"}  # left out if empty, as in most reports


MAX_PACKED_BYTES = 2048
MAX_REPORT_BYTES = 4096  # of the JSON, inflated
_MAX_DOMAIN_CHARACTERS = 64
_RUN_BYTES = 32
_RAW_DEFLATE = -15  # no header and no checksum: the signature is the checksum
_FORMAT = b"\x02"  # version of head and dictionary below: change it with them
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
    """Pack a claim about a run for gossip. Raises ClaimTooLargeError, or ValueError if it names no run."""
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
    """Read the bytes that `packed` wrote, without verifying; inflates at most MAX_REPORT_BYTES.

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
    """Domain and payload, without the run id that the head contains."""
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


log = logging.getLogger(__name__)

NUMBER_FILE = "network/report-number"
MOST_DIGITS = 15  # enough for thousands of years in milliseconds; a report allows at most 2**53


def kept_report_numbers(data_dir: Path) -> ReportNumbers:
    """Return numbers above those of earlier starts, by a bound kept in the data folder.

    If the disk refuses, the numbers rise over restarts only if the clock does.
    """
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
