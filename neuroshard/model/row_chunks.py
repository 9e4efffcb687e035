"""How many rows of logits are computed at once. Needs no PyTorch, so that what only counts memory starts quickly."""

from __future__ import annotations

CPU_CHUNK_BYTES = 16 << 20  # of fp32 logits: near the cache, and large enough for full matmul speed
ACCELERATOR_CHUNK_BYTES = 256 << 20  # kernels there need some thousand rows to be busy


def chunk_bytes_on(device: str) -> int:
    """Bytes of fp32 logits at once on a kind of device: "cpu", or an accelerator's name."""
    return CPU_CHUNK_BYTES if device == "cpu" else ACCELERATOR_CHUNK_BYTES


def chunk_rows(vocabulary_size: int, chunk_bytes: int) -> int:
    """Rows of logits computed at once: as many fp32 rows as fit chunk_bytes, in sixteens, but at least 16."""
    return max(16, chunk_bytes // (64 * vocabulary_size) * 16)
