"""bf16, int8 and int4: their bytes, their error bounds, and what they refuse on either side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neuroshard.compression import BLOCK, INT4_BLOCK, Codec, MalformedVectorError, make_codec


def made_vector(length: int) -> torch.Tensor:
    """Numbers of every size that fp32 has, from whole numbers, so that no generator's version matters."""
    index = torch.arange(length, dtype=torch.int64)
    bits = (index * 2654435761 + 12345) % 2**32
    finite = torch.where(bits & 0x7F800000 == 0x7F800000, bits & 0x7FFFFF, bits)
    wild = torch.where(finite >= 2**31, finite - 2**32, finite).to(torch.int32).view(torch.float32)
    tame = (bits % 2003 - 1001).to(torch.float32) / 1000
    return torch.where(index // 5000 % 2 == 0, tame, wild)


def digests() -> list[str]:
    """Of bytes and of decoded numbers, for int8, bf16 and int4."""
    vector = made_vector(600_000)
    found: list[str] = []
    for name in ("int8", "bf16", "int4"):
        codec = make_codec(name)
        data = codec.encode(vector)
        found += [sha256(data).hexdigest(), sha256(codec.decode(data, len(vector)).numpy().tobytes()).hexdigest()]
    return found


VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "compression.json").read_text("utf-8"))
LARGEST = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)
LENGTHS = [0, 1, 2, 127, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 65 * BLOCK + 1]
INT8, BF16, INT4, FP32 = (make_codec(name) for name in ("int8", "bf16", "int4", "fp32"))
lossy = pytest.mark.parametrize("codec", [INT8, BF16, INT4], ids=lambda codec: codec.name)
every = pytest.mark.parametrize("codec", [INT8, BF16, INT4, FP32], ids=lambda codec: codec.name)
whole = pytest.mark.parametrize(("codec", "largest"), [(INT8, 127), (INT4, 7)], ids=["int8", "int4"])
numbers = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20)


def vector_of(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def normal(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("golden", VECTORS["encoded"], ids=lambda golden: golden["name"])
def test_golden_bytes(golden: dict[str, Any]) -> None:
    codec, values = make_codec(golden["codec"]), [float.fromhex(value) for value in golden["values"]]
    data = bytes.fromhex(golden["bytes"])
    assert codec.encode(vector_of(values)) == data
    assert codec.decode(data, len(values)).tolist() == [float.fromhex(value) for value in golden["decoded"]]


def test_threads_and_kernels_and_flushing_of_subnormal_numbers_change_no_bit() -> None:
    program = Path(__file__)
    expected = VECTORS["digests"]
    assert digests() == expected
    started: list[subprocess.Popen[str]] = []
    for kernels, threads, subnormal in (("default", "1", "flush"), ("avx2", "4", "keep")):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": kernels, "PYTHONPATH": str(program.parents[2])}
        command = [sys.executable, str(program), threads, subnormal]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    told = [process.communicate(timeout=120)[0].split() for process in started]
    assert [words[-len(expected) :] for words in told] == [expected, expected], told  # before them the kernels' name


@whole
@given(values=numbers)
@example(values=[LARGEST, -LARGEST])
@example(values=[LARGEST, TINY])
@example(values=[127 * TINY, TINY])
@example(values=[126 * TINY, TINY / 2])
@example(values=[6.9 * TINY, TINY / 2])
@example(values=[600.0, 1200.0])  # halfway between two codes
def test_whole_codes_err_by_half_a_scale_at_most(codec: Codec, largest: int, values: list[float]) -> None:
    vector = vector_of(values)
    restored = codec.round_trip(vector).double()
    scale = max(map(abs, values), default=0.0) / largest
    # a scale below the smallest normal number is none: the block is zeros
    rounding = 2**-24 * 2 * largest * scale  # of the scale and of the restored number in fp32
    bound = scale / 2 + rounding if scale >= TINY else largest * TINY
    assert ((vector.double() - restored).abs() <= bound).all()


@pytest.mark.parametrize(
    ("codec", "size", "largest"), [(INT8, BLOCK, 127), (INT4, INT4_BLOCK, 7)], ids=["int8", "int4"]
)
def test_every_block_has_a_scale_of_its_own(codec: Codec, size: int, largest: int) -> None:
    sizes = torch.tensor([1e-20, 1e20, 1, 1e-3]).repeat_interleave(size)[: 3 * size + 5]
    vector = normal(len(sizes)) * sizes
    error = (vector - codec.round_trip(vector)).abs()
    for block, mistake in zip(vector.split(size), error.split(size), strict=True):
        assert 0 < mistake.max() <= block.abs().max() / largest / 2 * (1 + 1e-6)


@given(numbers)
@example([LARGEST, -LARGEST])
def test_bf16_errs_by_half_of_its_last_place_and_keeps_what_it_can_say(values: list[float]) -> None:
    vector = vector_of(values)
    restored = BF16.round_trip(vector)
    assert restored.isfinite().all()
    bound = (vector.double().abs() / 256).clamp(min=2.0**-134)
    in_range = vector.abs() < 3.3895e38
    assert ((vector.double() - restored.double()).abs() <= bound)[in_range].all()
    assert torch.equal(restored[in_range], vector.to(torch.bfloat16).float()[in_range])
    assert torch.equal(BF16.round_trip(restored), restored)


def test_ties_go_to_even() -> None:
    halves = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    assert INT8.round_trip(vector_of(halves)).tolist() == [127, 0, 2, 2, 0, -2, -2]
    assert INT4.round_trip(vector_of([7.0, *halves[1:]])).tolist() == [7, 0, 2, 2, 0, -2, -2]
    assert BF16.round_trip(vector_of([1 + 1 / 256, 1 + 3 / 256])).tolist() == [1, 1 + 4 / 256]


@every
@pytest.mark.parametrize("length", LENGTHS)
def test_sizes_are_as_announced_and_zeros_stay_zeros(codec: Codec, length: int) -> None:
    for vector in (torch.zeros(length), normal(length)):
        data = codec.encode(vector)
        assert len(data) == codec.encoded_size(length)
        restored = codec.decode(data, length)
        torch.testing.assert_close(restored, vector, atol=0.4 if codec is INT4 else 0.03, rtol=0.01)
        assert not restored[vector == 0].any()
        codec.check(data, length)


@pytest.mark.parametrize(("codec", "share"), [(INT8, 0.2503), (INT4, 0.1290)], ids=["int8", "int4"])
def test_the_share_of_the_bytes_of_fp32(codec: Codec, share: float) -> None:
    assert len(codec.encode(torch.ones(2_500_000))) <= share * len(FP32.encode(torch.ones(2_500_000)))


@every
@given(cuts=st.lists(st.integers(0, 3 * BLOCK + 17), max_size=5), into=st.booleans())
@settings(max_examples=30, deadline=None)
def test_ranges_of_a_vector_are_the_vector(codec: Codec, cuts: list[int], into: bool) -> None:
    length = 3 * BLOCK + 17
    data = codec.encode(normal(length))
    whole, found = codec.decode(data, length), torch.full((length,), torch.nan)
    bounds = [0, *sorted(cuts), length]
    for start, stop in pairwise(bounds):
        out = found[start:stop]
        if into:
            assert codec.decode_range(memoryview(data), start, stop, length, out=out) is out
        else:
            out.copy_(codec.decode_range(data, start, stop, length))
    assert torch.equal(found, whole)


@every
def test_a_range_outside_of_the_vector_or_without_its_room_is_a_mistake(codec: Codec) -> None:
    data = codec.encode(torch.ones(10))
    for start, stop in ((-1, 3), (3, 11), (4, 3)):
        with pytest.raises(ValueError, match="not a range of 10"):
            codec.decode_range(data, start, stop, 10)
    for out in (torch.empty(2), torch.empty(6)[::2], torch.empty(3, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"fit|needed"):
            codec.decode_range(data, 0, 3, 10, out=out)


@lossy
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 70 * BLOCK + 2])
def test_numbers_that_are_not_finite_are_never_encoded(codec: Codec, bad: float, place: int) -> None:
    vector = torch.zeros(70 * BLOCK + 3)
    vector[place] = bad
    with pytest.raises(ValueError, match="not finite"):
        codec.encode(vector)


@every
@pytest.mark.parametrize("length", [1, 5, BLOCK + 1])
def test_a_payload_cut_at_any_byte_or_longer_is_malformed(codec: Codec, length: int) -> None:
    data = bytes(codec.encode(torch.ones(length)))
    tails = range(len(data)) if length < BLOCK else (0, 1, 7, 8, 9, len(data) - 1)
    for wrong in [*(data[:cut] for cut in tails), data + b"\0"]:
        for read in (lambda data: codec.decode(data, length), lambda data: codec.decode_range(data, 0, 1, length)):
            with pytest.raises(MalformedVectorError, match=f"{len(wrong)} bytes"):
                read(wrong)
        with pytest.raises(MalformedVectorError, match=f"{len(wrong)} bytes"):
            codec.check(wrong, length)


@every
def test_nothing_is_allocated_for_a_length_that_the_bytes_do_not_have(codec: Codec) -> None:
    with pytest.raises(MalformedVectorError):
        codec.decode(b"\0" * 100, 10**15)


def hostile(length: int, *, scale: bytes | None = None, code: int | None = None, place: int = 0) -> bytes:
    """An int8 vector in which one block's scale, or one code, is another."""
    data = bytearray(INT8.encode(normal(length)))
    if scale is not None:
        data[4 * place : 4 * place + 4] = scale
    if code is not None:
        data[len(data) - length + place] = code
    return bytes(data)


def fp32(value: float) -> bytes:
    return np.float32(value).astype("<f4").tobytes()


@pytest.mark.parametrize(
    "scale", [np.nan, -np.nan, np.inf, -1.0, -0.0, TINY / 2, -TINY, 1e-45, 2.68e36, LARGEST], ids=str
)
@pytest.mark.parametrize("block", [0, 1, 2])
def test_hostile_scales_are_malformed(scale: float, block: int) -> None:
    length = 2 * BLOCK + 5
    data = hostile(length, scale=fp32(scale), place=block)
    reads: list[Callable[[], Any]] = [
        lambda: INT8.decode(data, length),
        lambda: INT8.check(data, length),
        lambda: INT8.decode_range(data, block * BLOCK + 1, block * BLOCK + 3, length),
    ]
    for read in reads:
        with pytest.raises(MalformedVectorError, match="scale"):
            read()


@pytest.mark.parametrize("place", [0, BLOCK, 2 * BLOCK + 4])
def test_the_code_without_a_meaning_is_malformed(place: int) -> None:
    length = 2 * BLOCK + 5
    data = hostile(length, code=0x80, place=place)
    with pytest.raises(MalformedVectorError, match="-128"):
        INT8.decode(data, length)
    with pytest.raises(MalformedVectorError, match="-128"):
        INT8.check(data, length)


@pytest.mark.parametrize("scale", [np.nan, -1.0, -0.0, TINY / 2, LARGEST / 6.99], ids=str)
def test_hostile_scales_of_int4_are_malformed(scale: float) -> None:
    data = fp32(1.0) + fp32(scale) + bytes(INT4_BLOCK // 2 + 1)
    with pytest.raises(MalformedVectorError, match="scale"):
        INT4.decode(data, INT4_BLOCK + 1)
    with pytest.raises(MalformedVectorError, match="scale"):
        INT4.check(data, INT4_BLOCK + 1)
    assert not INT4.decode_range(data, 0, INT4_BLOCK, INT4_BLOCK + 1).any()  # the other block's is not read


@pytest.mark.parametrize(
    ("code", "length", "reason"), [(0x08, 4, "-8"), (0x80, 4, "-8"), (0x80, 3, "-8"), (0x10, 3, "after")]
)
def test_codes_of_int4_without_a_meaning_are_malformed(code: int, length: int, reason: str) -> None:
    data = fp32(1.0) + bytes([0x11, code])
    with pytest.raises(MalformedVectorError, match=reason):
        INT4.decode(data, length)
    with pytest.raises(MalformedVectorError, match=reason):
        INT4.check(data, length)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_bf16_numbers_that_are_not_finite_are_malformed(bits: int) -> None:
    data = b"\0\0" + bits.to_bytes(2, "little")
    with pytest.raises(MalformedVectorError, match="not finite"):
        BF16.decode(data, 2)
    with pytest.raises(MalformedVectorError, match="not finite"):
        BF16.check(data, 2)


@lossy
@given(data=st.binary(max_size=60), length=st.integers(0, 30))
@settings(deadline=None)
def test_whatever_bytes_come_the_numbers_are_finite(codec: Codec, data: bytes, length: int) -> None:
    padded = (data + bytes(codec.encoded_size(length)))[: codec.encoded_size(length)]
    for candidate in (data, padded):
        try:
            restored = codec.decode(candidate, length)
        except MalformedVectorError:
            with pytest.raises(MalformedVectorError):
                codec.check(candidate, length)
        else:
            codec.check(candidate, length)
            assert restored.isfinite().all()


@lossy
def test_memory_beside_input_and_result_stays_small(codec: Codec) -> None:
    """Chunks: no fp32 copy of the vector on either way (numpy tells tracemalloc what it allocates)."""
    vector = normal(4_000_000)
    data = codec.encode(vector)
    assert _allocated(lambda: codec.encode(vector)) < 2.2 * len(data) + 8_000_000
    out = torch.empty_like(vector)
    assert _allocated(lambda: codec.decode_range(data, 0, len(vector), len(vector), out=out)) < 4_000_000


def _allocated(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    torch.set_flush_denormal(sys.argv[2] == "flush")
    sys.stdout.write(" ".join([torch.backends.cpu.get_cpu_capability(), *digests()]))
