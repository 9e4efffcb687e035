"""Identities, reports, announcements, run offers and frames that look like those of real nodes.

The keys, signatures and formats are real. The values are made up, and no network carries them. Golden frames come from
the test vectors. Forged frames have right digests although their claims are false.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import trio
from blake3 import blake3
from msgspec import structs

from neuroshard.config.run_parameters import GenesisPins, OuterOptimization, RunParameters
from neuroshard.identity import Delegation, NodeIdentity, NodeKey, SignedRunParameters, TokenSecret, Wallet
from neuroshard.membership.announcements import Announcement
from neuroshard.membership.claim_intake import Statement
from neuroshard.membership.reports import TrainingReport
from neuroshard.messages import CHUNK_BYTES, Frame, FrameLimits, TensorPart, TensorSpec, WireValue
from neuroshard.network import Network
from neuroshard.runs.offer import RunOffer
from neuroshard.status.snapshot import NodeState
from neuroshard.types import Architecture, LayerRange, NodeId, Role, RunId, ShardId

AFTER_EVERY_TEST = 4e9  # seconds since 1970: neither the true clock nor a virtual one gets there


def identity_of(number: int, expires_at: float = AFTER_EVERY_TEST) -> NodeIdentity:
    """Node `number` and its own wallet, which answers for it until then."""
    wallet = Wallet.from_secret(TokenSecret("hex", (number + 1).to_bytes(32, "big")))
    key = NodeKey.from_seed((number + 1).to_bytes(32, "little"))
    return NodeIdentity(wallet.wallet_id, key.node_id, key, Delegation.issue(wallet, key.public_key, expires_at))


EPOCH = 1_700_000_000.0
DAY = 86_400.0
RUN = RunId(sha256(b"run").hexdigest())
OTHER_RUN = RunId(sha256(b"another run").hexdigest())
TOPIC = f"reports/{RUN}/0"

REPORT = TrainingReport(
    run_id=RUN,
    sequence=1,
    steps=1234,
    tokens=5_054_464,
    loss_ema=3.25,
    shard=ShardId(17),
    shards_seen=3,
    roles=(Role.DRIVER, Role.VALIDATOR),
    layers=LayerRange(0, 12),
    outer_step=2,
    state_hash=sha256(b"state").hexdigest(),
    successful_syncs=2,
    failed_syncs=1,
    tokens_per_second=1500.5,
    state=NodeState.TRAINING,
    started_at=EPOCH - 100,
    interval_seconds=10.0,
)


def altered(claim: bytes, change: Callable[[list[Any]], object]) -> bytes:
    """A claim with another content under the same signature.

    `change` gets payload, time, and body and signature of the delegation.
    """
    body, signature = msgspec.msgpack.decode(claim)
    content = msgspec.msgpack.decode(body)
    change(content)
    return msgspec.msgpack.encode([msgspec.msgpack.encode(content), signature])


def encodings_of(claim: bytes) -> list[bytes]:
    """All encodings of a claim in msgpack, those as text included. The first one is the shortest, as it travels."""
    body, signature = msgspec.msgpack.decode(claim)
    arrays = (b"\x92", b"\xdc\x00\x02", b"\xdd\x00\x00\x00\x02")
    return [b"".join(parts) for parts in product(arrays, _byte_strings(body), _byte_strings(signature))]


def _byte_strings(data: bytes) -> list[bytes]:
    forms = ((b"\xc4", 1), (b"\xc5", 2), (b"\xc6", 4), (b"\xd9", 1), (b"\xda", 2), (b"\xdb", 4))
    return [code + len(data).to_bytes(size) + data for code, size in forms if len(data) < 256**size]


def told(report: TrainingReport, **fields: Any) -> list[Any]:
    """A report as it travels, with any values in some fields."""
    values = msgspec.to_builtins(report)
    return [fields.pop(name, value) for name, value in zip(report.__struct_fields__, values, strict=True)] + [*fields]


def announcement_of(identity: NodeIdentity, **changes: Any) -> Announcement:
    announcement = Announcement(
        run_id=RUN,
        parameters_version=1,
        layers=LayerRange(0, 12),
        addresses=(f"/memory/p2p/{identity.node_id}",),
        pool="203.0.113.7:4002",
        started_at=EPOCH,
        memory_tier_mb=6500,
        is_relay=False,
        version="0.2.0",
    )
    return structs.replace(announcement, **changes)


def said(number: int, sequence: int = 1, **changes: Any) -> Statement[TrainingReport]:
    """A verified report of a node whose id is its number, without the cost of keys."""
    report = structs.replace(REPORT, sequence=sequence, **changes)
    node = NodeId(f"node {number}")
    wallet = identity_of(0).wallet_id
    return Statement(node, wallet, EPOCH + sequence, EPOCH + DAY, report)


def clock() -> float:
    """Seconds since the epoch, virtual."""
    return EPOCH + trio.current_time()


def scores_of(network: Network, *nodes: NodeId) -> Mapping[NodeId, float]:
    return {node: network.reputation.score(node) for node in nodes}


OWNER = Wallet.from_secret(TokenSecret("hex", bytes(32)))
STRANGER = Wallet.from_secret(TokenSecret("hex", bytes([1] * 32)))
SEED = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
FIRST = RunParameters(
    name="demo",
    version=1,
    architecture=Architecture(64, 2, 2, 1, 128, 512, 32),
    stage_count=1,
    batch_size=4,
    sequences_per_step=8,
    initial_weights_seed=7,
    genesis=GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 512),
    outer=OuterOptimization(inner_steps=500, learning_rate=0.7, momentum=0.9, aggregator="trimmed_mean", codec="fp32"),
)


def offer_of(current: RunParameters = FIRST, initial: RunParameters = FIRST, *, signer: Wallet = OWNER) -> RunOffer:
    """An offer whose current parameters `signer` has signed; nothing is checked."""
    return RunOffer(SignedRunParameters.sign(OWNER, initial), SignedRunParameters.sign(signer, current))


def version(number: int, outer_lr: float = 0.8, start: int | None = None) -> RunParameters:
    """A later version, which changes the outer learning rate from an outer step on (by default, of its own number)."""
    outer = replace(FIRST.outer, learning_rate=outer_lr)
    return replace(FIRST, version=number, holds_from_outer_step=number if start is None else start, outer=outer)


VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors/wire.json").read_text("utf-8"))
LARGE = FrameLimits(max_body_bytes=64 * 1024 * 1024)


def large_limits(_kind: str) -> FrameLimits:
    """64 MiB of tensors for every kind."""
    return LARGE


def pattern(size: int) -> bytes:
    """The bytes of the golden vectors."""
    return bytes((i * i + 7 * i) % 251 for i in range(251)) * (size // 251) + bytes(
        (i * i + 7 * i) % 251 for i in range(size % 251)
    )


def bytes_frame(size: int, kind: str = "bulk") -> Frame:
    """A frame with one tensor of `size` bytes."""
    return Frame(kind, {"step": 1}, (TensorPart(TensorSpec("x", "uint8", (size,)), pattern(size)),))


def golden_frame(vector: dict[str, Any]) -> Frame:
    """The frame that a golden vector describes."""
    parts = tuple(
        TensorPart(
            TensorSpec(tensor["name"], tensor["dtype"], tuple(tensor["shape"])),
            bytes.fromhex(tensor["data"]) if "data" in tensor else pattern(tensor["pattern_bytes"]),
        )
        for tensor in vector["tensors"]
    )
    return Frame(vector["kind"], vector["header"], parts)


def golden_bytes(vector: dict[str, Any]) -> bytes:
    """The bytes that a golden vector must become."""
    return bytes.fromhex(vector["head"]) + b"".join(bytes(part.data) for part in golden_frame(vector).tensors)


def forged_head(
    tensors: Sequence[Sequence[WireValue]] = (),
    *,
    kind: str = "k",
    header: bytes | None = None,
    header_bytes: int | None = None,
    body_bytes: int = 0,
) -> bytes:
    """A head that claims anything, with zeros as chunk digests and a right digest over it; written by hand."""
    packed = msgspec.msgpack.encode({"h": {}, "t": tensors}) if header is None else header
    claimed = len(packed) if header_bytes is None else header_bytes
    prefix = struct.pack("<4sBBBBIQ", b"NSHF", 1, 0, len(kind), 0, claimed, body_bytes)
    bound = prefix + kind.encode() + packed + bytes(32 * min(-(-body_bytes // CHUNK_BYTES), 1000))
    return bound + blake3(bound).digest()
