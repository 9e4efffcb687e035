"""Frames: golden ones, and forged ones whose digests are right although their claims are false."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from neuroshard.messages import CHUNK_BYTES, Frame, FrameLimits, TensorPart, TensorSpec, WireValue

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
