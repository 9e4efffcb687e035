"""Top-k contributions and sparse aggregates: what travels, what is lost, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neuroshard.compression import Codec, MalformedVectorError
from neuroshard.compression.sparse import KEPT, PLACES, SparseCodec, TopKCodec, pack_places, packed_size, unpack_places

TOP_K, SPARSE = TopKCodec(), SparseCodec()
LARGEST, TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
LENGTHS = [0, 1, 2, KEPT - 1, KEPT, KEPT + 1, PLACES - 1, PLACES, PLACES + 1, 2 * PLACES + 63, 3 * PLACES + 17]
both = pytest.mark.parametrize("codec", [TOP_K, SPARSE], ids=lambda codec: codec.name)
numbers = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=200)


def normal(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def aggregate(length: int) -> torch.Tensor:
    """The mean of what three members sent."""
    return torch.stack([TOP_K.round_trip(normal(length, seed)) for seed in range(3)]).mean(dim=0)


@given(st.lists(st.integers(0, PLACES - 1), max_size=9))
def test_places_take_twelve_bits_and_come_back(places: list[int]) -> None:
    packed = pack_places(np.array(places, dtype=np.int64))
    assert len(packed) == packed_size(len(places)) == -(-12 * len(places) // 8)
    assert unpack_places(packed, len(places)).tolist() == places


def test_golden_bytes_of_top_k() -> None:
    """5, -7 and 3 are above the mean of 64 magnitudes, the zeros are not: small 0, large 5."""
    data = TOP_K.encode(torch.tensor([0.0, 5.0, -7.0, 3.0]))
    assert np.frombuffer(data[:8], "<f4").tolist() == [0.0, 5.0]
    assert data[8:14] == bytes([0x00, 0x10, 0x00, 0x02, 0x30, 0x00])  # places 0 and 1, 2 and 3
    assert data[8 + 96 :] == bytes([0b01_11_01_00]) + bytes(15)
    assert TOP_K.decode(data, 4).tolist() == [0.0, 5.0, -5.0, 5.0]


def test_golden_bytes_of_sparse() -> None:
    vector = torch.zeros(PLACES + 2)
    vector[[1, 4095, 4097]] = torch.tensor([127.0, -2.5, 1.0])
    data = SPARSE.encode(vector)
    head = np.array([1, 1 / 127], "<f4").tobytes() + np.array([2, 1], "<u2").tobytes()
    assert data == head + bytes([0x01, 0xF0, 0xFF, 0x01, 0x00]) + bytes([127, 0xFE, 127])
    assert SPARSE.decode(data, PLACES + 2)[[1, 4095]].tolist() == [127.0, -2.0]


@given(numbers)
@example([LARGEST] * 70)
@example([TINY / 2, TINY])
@example([1.0])
def test_what_top_k_loses_is_shorter_by_what_travels(values: list[float]) -> None:
    vector = torch.tensor(values, dtype=torch.float32).double()
    sent = TOP_K.round_trip(vector.float()).double()
    lost = vector - sent
    slack = 1e-5 * vector.square().sum() + len(values) * TINY
    assert lost.square().sum() <= vector.square().sum() - sent.square().sum() + slack


def test_the_largest_of_every_block_travel_with_their_signs() -> None:
    vector = normal(3 * PLACES + 17)
    sent = TOP_K.round_trip(vector)
    for numbers_, there in zip(vector.split(PLACES), sent.split(PLACES), strict=True):
        largest = numbers_.abs().topk(min(KEPT, len(numbers_))).indices
        assert set(there.nonzero().flatten().tolist()) == set(largest.tolist())
        assert torch.equal(there[largest].sign(), numbers_[largest].sign())


def test_bytes_of_a_contribution_and_of_an_aggregate() -> None:
    length = 256 * PLACES
    assert len(TOP_K.encode(normal(length))) == 120 * 256  # 0.234 bits a number
    assert len(SPARSE.encode(aggregate(length))) < 3 * KEPT * 2.5 * 256 + 6 * 256 + 1  # 0.94 bits at most, of three
    error = (SPARSE.round_trip(aggregate(length)) - aggregate(length)).abs().max()
    assert error <= aggregate(length).abs().max() / 127 / 2 * (1 + 1e-6)


@both
@pytest.mark.parametrize("length", LENGTHS)
def test_sizes_zeros_and_ranges(codec: Codec, length: int) -> None:
    for vector in (torch.zeros(length), aggregate(length)):
        data = codec.encode(vector)
        assert len(data) <= codec.encoded_size(length)
        codec.check(data, length)
        whole = codec.decode(memoryview(data), length)
        if codec is SPARSE or not vector.any():
            torch.testing.assert_close(whole, vector, atol=0.02, rtol=0)
        third = length // 3
        out = torch.full((length - third,), torch.nan)
        ranges = codec.decode_range(data, 0, third, length), codec.decode_range(data, third, length, length, out=out)
        assert torch.equal(torch.cat(ranges), whole)
        assert torch.equal(codec.round_trip(vector), whole)


@both
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_never_encoded(codec: Codec, bad: float) -> None:
    vector = torch.zeros(2 * PLACES + 3)
    vector[PLACES + 1] = bad
    with pytest.raises(ValueError, match="not finite"):
        codec.encode(vector)


@both
def test_a_payload_cut_anywhere_or_longer_is_malformed(codec: Codec) -> None:
    length = PLACES + 5
    data = codec.encode(aggregate(length))
    for wrong in [*(data[:cut] for cut in range(0, len(data), 7)), data[:-1], data + b"\0"]:
        for read in (codec.decode, codec.check):
            with pytest.raises(MalformedVectorError, match="bytes"):
                read(wrong, length)
    with pytest.raises(MalformedVectorError):
        codec.decode(bytes(100), 10**15)  # nothing is allocated for it


def changed(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


def fp32(value: float) -> bytes:
    return np.float32(value).astype("<f4").tobytes()


@pytest.mark.parametrize("magnitude", [np.nan, np.inf, -1.0, -0.0, TINY / 2], ids=str)
@pytest.mark.parametrize("place", [0, 4, 120])
def test_hostile_magnitudes_of_top_k(magnitude: float, place: int) -> None:
    data = changed(TOP_K.encode(normal(PLACES + 100)), place, fp32(magnitude))
    with pytest.raises(MalformedVectorError, match="magnitude"):
        TOP_K.check(data, PLACES + 100)


@pytest.mark.parametrize("places", [[3, 3], [4, 3]], ids=["repeated", "unsorted"])
def test_hostile_places_of_top_k(places: list[int]) -> None:
    data = changed(TOP_K.encode(normal(PLACES)), 8, pack_places(np.array(places)).tobytes())
    with pytest.raises(MalformedVectorError, match="repeat or are not in order"):
        TOP_K.decode(data, PLACES)


@pytest.mark.parametrize(("length", "last"), [(100, 100), (PLACES + 70, 4095), (10, 64)])
def test_places_of_top_k_behind_the_end(length: int, last: int) -> None:
    data = TOP_K.encode(normal(length))
    end = len(data) - 16
    other = unpack_places(np.frombuffer(data[end - 96 : end], np.uint8), KEPT)
    other[-1] = last
    with pytest.raises(MalformedVectorError, match="after its end"):
        TOP_K.check(changed(data, end - 96, pack_places(other).tobytes()), length)


def test_values_of_top_k_behind_the_end() -> None:
    data = TOP_K.encode(normal(10))
    with pytest.raises(MalformedVectorError, match="value after"):
        TOP_K.check(data[:-1] + b"\x40", 10)


def sparse_with(**changes: bytes) -> bytes:
    """Two numbers of three, places 0 and 2; `changes` replace scale, count, places or codes."""
    parts = {"scale": fp32(1), "count": b"\2\0", "places": b"\0\x20\0", "codes": b"\1\2"} | changes
    return b"".join(parts.values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scale": fp32(np.nan)}, "scale"),
        ({"scale": fp32(-1)}, "scale"),
        ({"count": b"\3\0"}, "bytes"),
        ({"count": b"\xff\xff"}, "bytes"),
        ({"places": b"\2\0\0"}, "order"),
        ({"places": b"\2\x20\0"}, "repeat"),
        ({"places": b"\0\x30\0"}, "after its end"),
        ({"codes": b"\0\2"}, "zero"),
        ({"codes": b"\1\x80"}, "code"),
        ({"count": b"\1\0", "places": b"\0\x20", "codes": b"\1"}, "bits after"),
    ],
)
def test_hostile_sparse_vectors(changes: dict[str, bytes], reason: str) -> None:
    assert SPARSE.decode(sparse_with(), 3).tolist() == [1, 0, 2]
    with pytest.raises(MalformedVectorError, match=reason):
        SPARSE.check(sparse_with(**changes), 3)


@both
@given(data=st.binary(max_size=300), length=st.integers(0, 30))
@settings(deadline=None)
def test_whatever_bytes_come_the_numbers_are_finite(codec: Codec, data: bytes, length: int) -> None:
    for candidate in (data, (data + bytes(codec.encoded_size(length)))[: codec.encoded_size(length)]):
        try:
            restored = codec.decode(candidate, length)
        except MalformedVectorError:
            with pytest.raises(MalformedVectorError):
                codec.check(candidate, length)
        else:
            codec.check(candidate, length)
            assert restored.isfinite().all()
