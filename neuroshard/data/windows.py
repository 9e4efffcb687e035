"""Converts a shard to batches: disjoint windows in a keyed order, gathered without a Python loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuroshard.data.shard_file import TokenArray
from neuroshard.identity.signing import hash_parts
from neuroshard.types import DataPosition, NodeId, RunId, ShardId

_WINDOW_DOMAIN = "neuroshard/windows"
_HELD_OUT_WINDOW_DOMAIN = "neuroshard/held-out-windows"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Batch:
    """Token ids for one forward pass; labels are the inputs shifted by one."""

    input_ids: Tensor  # (sequences, sequence_length) int64
    labels: Tensor  # the same shape
    position: DataPosition  # the first window after this batch: where to resume
    token_count: int


def window_count(token_count: int, sequence_length: int) -> int:
    """Count the disjoint windows of sequence_length + 1 tokens in a shard; a remainder is not used."""
    return token_count // (sequence_length + 1)


def window_key(run_id: RunId, node_id: NodeId, shard: ShardId) -> bytes:
    """Return the key of the order in which a node visits the windows of a shard."""
    return hash_parts(_WINDOW_DOMAIN, run_id, node_id, shard)


def held_out_window_key(run_id: RunId, shard: ShardId) -> bytes:
    """Return the key of the order that selects the pinned held-out windows, the same for all nodes of a run."""
    return hash_parts(_HELD_OUT_WINDOW_DOMAIN, run_id, shard)


def window_order(key: bytes, count: int) -> NDArray[np.int64]:
    """Return a permutation of 0..count-1 that depends only on the 32-byte key, not on a library's random generator.

    Window i gets the number mix(mix(a + (i + 1) G) xor b) modulo 2**64, where a and b are the first two big-endian
    64-bit words of the key, G is 0x9E3779B97F4A7C15 and mix the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    Every step is a bijection, so the numbers differ; the windows are visited in their ascending order.
    """
    a, b = (np.uint64(int.from_bytes(key[i : i + 8])) for i in (0, 8))
    index = np.arange(1, count + 1, dtype=np.uint64)
    numbers = _mix(_mix(index * _GOLDEN + a) ^ b)
    return np.argsort(numbers, kind="stable").astype(np.int64)


def gather_windows(
    tokens: TokenArray, order: NDArray[np.int64], start: int, sequences: int, sequence_length: int
) -> TokenArray:
    """Return windows order[start : start + sequences] of a shard's (n,) tokens as (sequences, sequence_length + 1)."""
    width = sequence_length + 1
    windows = tokens[: len(order) * width].reshape(len(order), width)
    return windows[order[start : start + sequences]]


def make_batch(parts: list[TokenArray], position: DataPosition) -> Batch:
    """Build inputs and labels from window blocks of one or more shards, each (b_i, sequence_length + 1)."""
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    sequences, width = rows.shape
    inputs = np.empty((sequences, width - 1), dtype=np.int64)
    labels = np.empty((sequences, width - 1), dtype=np.int64)
    inputs[...] = rows[:, :-1]
    labels[...] = rows[:, 1:]
    return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), position, sequences * (width - 1))  # pyright: ignore[reportUnknownMemberType]


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of SplitMix64; unsigned array arithmetic wraps modulo 2**64 without a warning."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
