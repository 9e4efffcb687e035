from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.compression import Fp32Codec, MalformedVectorError, make_codec

floats = st.lists(st.floats(width=32), max_size=20)


@given(floats)
def test_fp32_loses_nothing_and_is_little_endian(numbers: list[float]) -> None:
    codec = make_codec("fp32")
    vector = torch.tensor(numbers, dtype=torch.float32)
    data = codec.encode(vector)
    assert data == struct.pack(f"<{len(numbers)}f", *vector.tolist()) or any(map(math.isnan, numbers))
    assert len(data) == codec.encoded_size(len(numbers))
    assert codec.encode(codec.decode(data, len(numbers))) == data
    assert codec.round_trip(vector) is vector


def test_an_encoded_fp32_vector_is_its_memory_and_keeps_it() -> None:
    vector = torch.ones(3)
    data = Fp32Codec().encode(vector)
    vector[0] = 2
    assert data == struct.pack("<3f", 2, 1, 1)
    assert data.readonly
    del vector
    assert Fp32Codec().decode(data, 3).tolist() == [2, 1, 1]


def test_a_decoded_vector_has_memory_of_its_own() -> None:
    data = Fp32Codec().encode(torch.ones(3))
    Fp32Codec().decode(data, 3).zero_()
    assert Fp32Codec().decode(data, 3).tolist() == [1, 1, 1]


@given(data=st.binary(max_size=40), length=st.integers(0, 10))
def test_bytes_of_another_length_are_malformed(data: bytes, length: int) -> None:
    if len(data) == 4 * length:
        assert Fp32Codec().decode(data, length).shape == (length,)
    else:
        with pytest.raises(MalformedVectorError, match=f"{len(data)} bytes"):
            Fp32Codec().decode(data, length)


@pytest.mark.parametrize(
    "vector",
    [torch.zeros(2, 2), torch.zeros(2, dtype=torch.float64), torch.zeros(4)[::2], torch.zeros(2, device="meta")],
    ids=["matrix", "float64", "strided", "meta"],
)
def test_only_fp32_vectors_are_encoded(vector: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="fp32 CPU vector"):
        Fp32Codec().encode(vector)
