"""The messages of a round as bytes: contributions that carry their hash, and result roots."""

from __future__ import annotations

from hashlib import sha256

from torch import Tensor

from neuroshard.compression import Codec, MalformedVectorError

HASH_BYTES = 32


def contribution_frame(round_id: bytes, encoded: bytes) -> bytes:
    """Round id (32 bytes), SHA-256 of the encoded contribution (32), the encoded contribution."""
    return b"".join((round_id, sha256(encoded).digest(), encoded))


def read_contribution(frame: bytes, round_id: bytes, codec: Codec, length: int) -> Tensor | None:
    """The contribution (length,) in a frame, or None when it belongs to another round.

    Raises MalformedVectorError when its hash or its size is wrong; nothing is allocated before that check.
    """
    if not frame.startswith(round_id):
        return None
    encoded = memoryview(frame)[2 * HASH_BYTES :]
    if len(encoded) > codec.encoded_size(length):
        raise MalformedVectorError(f"A contribution of {len(encoded)} bytes is longer than the tensor schema allows.")
    if sha256(encoded).digest() != frame[HASH_BYTES : 2 * HASH_BYTES]:
        raise MalformedVectorError("A contribution does not match its hash.")
    return codec.decode(encoded, length)


def root_frame(round_id: bytes, root: bytes) -> bytes:
    """Round id (32 bytes), result root (32)."""
    return round_id + root


def read_root(frame: bytes, round_id: bytes) -> bytes | None:
    """The root in a frame, or None when it belongs to another round. Raises MalformedVectorError for another size."""
    if not frame.startswith(round_id):
        return None
    if len(frame) != 2 * HASH_BYTES:
        raise MalformedVectorError(f"A result root of {len(frame)} bytes is malformed.")
    return frame[HASH_BYTES:]


def vector_digest(vector: Tensor) -> bytes:
    """SHA-256 of an fp32 vector's little-endian bytes; the vector is not copied on the usual machines."""
    return sha256(vector.contiguous().numpy().astype("<f4", copy=False).data).digest()
