"""Windows: disjoint, all visited once, shifted labels; and fast."""

from __future__ import annotations

import math
import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.data.windows import gather_windows, make_batch, window_count, window_order
from neuroshard.types import DataPosition, ShardId

AT = DataPosition(0, ShardId(0), 0)


@given(key=st.binary(min_size=32, max_size=32), count=st.integers(0, 300))
def test_order_is_a_permutation(key: bytes, count: int) -> None:
    assert sorted(window_order(key, count).tolist()) == list(range(count))


def test_orders_of_two_keys_differ_and_look_shuffled() -> None:
    a, b = window_order(bytes(32), 5000), window_order(bytes(31) + b"\1", 5000)
    assert (window_order(bytes(15) + b"\1" + bytes(16), 5000) != a).mean() > 0.99
    assert (a == b).all()  # the second half of the key is not used
    assert abs(np.corrcoef(a, np.arange(5000))[0, 1]) < 0.05


def mix(value: int) -> int:
    mask = 2**64 - 1
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


@given(key=st.binary(min_size=32, max_size=32), count=st.integers(0, 50))
def test_order_is_the_documented_formula_in_plain_integers(key: bytes, count: int) -> None:
    a, b = int.from_bytes(key[:8], "big"), int.from_bytes(key[8:16], "big")
    numbers = [mix(mix((a + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) ^ b) for i in range(count)]
    assert window_order(key, count).tolist() == sorted(range(count), key=numbers.__getitem__)


@given(tokens=st.integers(1, 500), length=st.integers(1, 40))
def test_every_token_is_an_input_at_most_once(tokens: int, length: int) -> None:
    windows = window_count(tokens, length)
    if not windows:
        return
    ids = np.arange(tokens, dtype=np.uint16)
    batch = make_batch([gather_windows(ids, window_order(bytes(32), windows), 0, windows, length)], AT)
    assert batch.token_count == windows * length
    inputs = batch.input_ids.reshape(-1).tolist()
    assert len(set(inputs)) == len(inputs) == windows * length
    assert (batch.labels == batch.input_ids + 1).all()
    assert batch.input_ids.is_contiguous()
    assert batch.labels.is_contiguous()


def test_batches_form_fast_enough() -> None:
    length, sequences = 512, 8
    ids = (np.arange(2_500_000) % 32_000).astype(np.uint16)
    order = window_order(bytes(32), window_count(len(ids), length))
    best = math.inf
    for _ in range(3):
        began = time.perf_counter()
        for start in range(0, 4000, sequences):
            make_batch([gather_windows(ids, order, start, sequences, length)], AT)
        best = min(best, time.perf_counter() - began)
    assert 4000 * length / best > 30e6  # 100 M tokens/s when the machine has nothing else to do
