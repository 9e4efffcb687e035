"""The JSON half: strict, self-checking, and without numbers JSON has no name for."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.errors import CheckpointError
from neuroshard.state import checkpoint_manifest as metadata
from neuroshard.state.checkpoint_manifest import (
    CheckpointManifest,
    CheckpointMeta,
    IncompatibleCheckpointError,
    TensorFile,
    decode_manifest,
    encode_manifest,
)
from neuroshard.status.snapshot import HeldOutPoint, LossPoint
from neuroshard.types import Architecture, LayerRange, NodeId, RunId, WalletId
from tests.worlds.checkpoints import meta_at

FILE = TensorFile("step-7.safetensors", 100, "ab" * 32)
FULL = replace(
    meta_at(7, outer_step=3, inner_step=4),
    tokens=2**53 + 1,
    loss_ema=0.1 + 0.2,
    rng={"torch": "00ff", "cuda:0": "aa"},
    held_out=(HeldOutPoint(1, 2.0, 3.0, 0.5, 0.1),),
    history=(LossPoint(1, 1e-300, 5.0, 1e-4, 10), LossPoint(2, 2.5, 4.0, 1e-4, 20)),
    extra={"losses": [1.5, None], "nested": {"skipped": 2}, "words": "ü\u2028"},
)


def test_everything_comes_back_exactly() -> None:
    assert decode_manifest(encode_manifest(CheckpointManifest(FULL, FILE))) == CheckpointManifest(FULL, FILE)


def test_checkpoints_of_plain_models_keep_their_bytes_and_options_are_stored() -> None:
    plain = Architecture(32, 4, 4, 2, 48, 71, 24)
    meta = CheckpointMeta(
        WalletId("ab" * 8), NodeId("node"), RunId("cd" * 32), plain, LayerRange(1, 3), step=7, time=1e9
    )
    file = TensorFile("step-7.safetensors", 10, "ef" * 32)
    written = encode_manifest(CheckpointManifest(meta, file))
    assert sha256(written).hexdigest() == "cc5ea351dba4404c512051bd1f5f818ece03320737e52c5b22b1150646ba1afe"
    options = replace(plain, qk_norm="width", norm_reorder=True, trainable_rmsnorm=False, initialisation="depth")
    changed = CheckpointManifest(replace(meta, architecture=options), file)
    assert decode_manifest(encode_manifest(changed)) == changed
    assert encode_manifest(CheckpointManifest(FULL, FILE)) == encode_manifest(CheckpointManifest(FULL, FILE))


@given(loss=st.floats(allow_nan=False, allow_infinity=False), step=st.integers(0, 2**60))
def test_numbers_come_back_exactly(loss: float, step: int) -> None:
    meta = replace(FULL, loss=loss, tokens=step, extra={"a": loss})
    assert decode_manifest(encode_manifest(CheckpointManifest(meta, FILE))).meta == meta


def test_what_is_not_finite_becomes_null_or_is_left_out() -> None:
    nan, infinite = float("nan"), float("inf")
    meta = replace(
        FULL,
        loss=nan,
        loss_ema=infinite,
        held_out=(HeldOutPoint(1, 2.0, nan, 0.5, 0.1), *FULL.held_out),
        history=(LossPoint(1, 1.0, infinite, 1e-4, 10), *FULL.history),
        extra={"a": nan, "b": [infinite, {"c": (nan, 1.0)}]},
    )
    back = decode_manifest(encode_manifest(CheckpointManifest(meta, FILE))).meta
    assert (back.loss, back.loss_ema) == (None, None)
    assert (back.held_out, back.history) == (FULL.held_out, FULL.history)
    assert back.extra == {"a": None, "b": [None, {"c": [None, 1.0]}]}


def signed(**changes: Any) -> bytes:
    """A manifest with changed content whose own digest is right: strictness must not rest on the digest."""
    content = json.loads(encode_manifest(CheckpointManifest(FULL, FILE)))["content"]
    content["meta"] |= changes
    return json.dumps({"format_version": 1, "content": content, "sha256": metadata._digest(content)}).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"unknown": 1},
        {"step": "7"},
        {"step": 7.5},
        {"step": True},
        {"layers": {"start": 3, "stop": 1}},
        {"layers": {"start": 0, "stop": 1, "x": 1}},
        {"rng": {"torch": 5}},
        {"history": [{"step": 1}]},
        {"data_position": []},
        {"wallet_id": None},
    ],
)
def test_wrong_or_unknown_fields_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="wrong or unknown field"):
        decode_manifest(signed(**changes))


def test_a_newer_version_is_not_damage() -> None:
    document = json.loads(encode_manifest(CheckpointManifest(FULL, FILE)))
    with pytest.raises(IncompatibleCheckpointError, match="version 2"):
        decode_manifest(json.dumps(document | {"format_version": 2}).encode())
    for version in (0, "1", None, 1.5):
        with pytest.raises(CheckpointError):
            decode_manifest(json.dumps(document | {"format_version": version}).encode())


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 200_000, b"1" * 5000, b" " * 4_000_001, b'{"format_version": NaN}'],
)
def test_rubbish_is_damage(raw: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode_manifest(raw)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_damage(raw: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode_manifest(raw)


def test_metadata_has_a_size_limit() -> None:
    with pytest.raises(ValueError, match="exceeds"):
        encode_manifest(CheckpointManifest(replace(FULL, extra={"a": "x" * 4_000_000}), FILE))
