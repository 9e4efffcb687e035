"""Torch tensors there and back, bit for bit, with one copy at most."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from neuroshard.messages import Frame, MalformedFrameError, TensorPart, TensorSpec, decode, encode
from neuroshard.messages.tensors import part_of, spec_of, tensor_of
from tests.worlds.claims import large_limits

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)


def over_the_wire(*parts: TensorPart) -> list[Tensor]:
    encoded = encode(Frame("k", {}, parts))
    frame = decode(encoded.head + b"".join(encoded.body), large_limits)
    return [tensor_of(part) for part in frame.tensors]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 2**31))
def test_every_type_and_shape_survives_bit_for_bit(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    """Random bits: infinities, negative zeros and every kind of NaN are among them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    (received,) = over_the_wire(part_of("x", tensor))
    assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(bits(received), bits(tensor))


def test_the_values_are_little_endian() -> None:
    assert bytes(part_of("x", torch.tensor([1, 256], dtype=torch.int16)).data) == b"\x01\x00\x00\x01"
    assert bytes(part_of("x", torch.tensor(1.0, dtype=torch.bfloat16)).data) == b"\x80\x3f"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12, dtype=torch.float32).reshape(3, 4).T,
        torch.arange(12, dtype=torch.bfloat16)[::2],
        torch.ones(1, dtype=torch.int32).expand(3, 2),
        torch.arange(6, dtype=torch.float32, requires_grad=True),
        torch.tensor(2.5),
    ],
    ids=["transposed", "strided", "expanded", "with gradient", "scalar"],
)
def test_layouts_that_are_not_plain_are_sent_by_value(tensor: Tensor) -> None:
    (received,) = over_the_wire(part_of("x", tensor))
    assert torch.equal(received, tensor.detach())
    assert not received.requires_grad


def test_a_type_that_cannot_travel_is_refused() -> None:
    for dtype in (torch.float64, torch.bool, torch.complex64):
        with pytest.raises(MalformedFrameError, match="cannot travel"):
            spec_of("x", torch.zeros(2, dtype=dtype))


def test_a_plain_tensor_is_sent_from_its_own_memory() -> None:
    tensor = torch.zeros(4, dtype=torch.uint8)
    part = part_of("x", tensor)
    tensor[2] = 9
    assert bytes(part.data) == b"\0\0\x09\0"
    assert memoryview(part.data).readonly


def test_a_received_tensor_shares_the_memory_of_its_frame_and_keeps_it_alive() -> None:
    encoded = encode(Frame("k", {}, (part_of("x", torch.arange(1000)),)))
    frame = decode(encoded.head + b"".join(encoded.body), large_limits)
    tensor = tensor_of(frame.tensors[0])
    tensor[0] = -1
    assert tensor_of(frame.tensors[0])[0] == -1
    del frame
    gc.collect()
    assert torch.equal(tensor[1:], torch.arange(1, 1000))


def test_a_tensor_that_never_left_the_process_is_copied() -> None:
    """Over the in-memory transport two nodes must not share weights."""
    sent = torch.zeros(3)
    received = tensor_of(part_of("x", sent))
    received += 1
    assert torch.equal(sent, torch.zeros(3))


def test_tensors_across_the_alignment_of_their_type_are_read_right() -> None:
    parts = [
        part_of("a", torch.tensor([1], dtype=torch.int8)),
        part_of("b", torch.arange(3)),
        part_of("c", torch.ones(2)),
    ]
    a, b, c = over_the_wire(*parts)
    assert (a.tolist(), b.tolist(), c.tolist()) == ([1], [0, 1, 2], [1.0, 1.0])
    assert all(tensor.data_ptr() % tensor.dtype.itemsize == 0 for tensor in (a, b, c))


def test_bytes_that_do_not_fit_their_shape_are_refused() -> None:
    with pytest.raises(MalformedFrameError, match="does not have the bytes"):
        tensor_of(TensorPart(TensorSpec("x", "float32", (2,)), bytes(7)))
