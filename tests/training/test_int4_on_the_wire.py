"""int4 of activations: exact bytes, its law of errors, and parts that no honest node sends."""

from __future__ import annotations

import json
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neuroshard.messages.tensors import part_of
from neuroshard.pipeline.activation_codes import BLOCK, quantised_to_int4, restored_from_int4
from neuroshard.pipeline.microbatch import RefusedTensorError
from neuroshard.pipeline.stage_protocol import WirePrecision, from_wire, to_wire, wire_bytes

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "wire_int4.json").read_text("utf-8")
)
INT4 = WirePrecision.INT4


def sample(size: int, seed: int = 0, rows: int = 6) -> Tensor:
    return torch.randn(1, rows, size, generator=torch.Generator().manual_seed(seed))


def blocks_of(tensor: Tensor) -> list[Tensor]:
    """The blocks (rows, values) of (1, rows, n)."""
    return list(tensor[0].split(BLOCK, dim=1))


def relative_error(activations: Tensor) -> float:
    found = restored_from_int4(*quantised_to_int4(activations), activations.shape[2])
    return ((found - activations).norm() / activations.norm()).item()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"n = {vector['size']}")
def test_rows_have_these_bytes_on_every_machine(vector: dict[str, Any]) -> None:
    """The row is made of whole numbers and powers of two, so that no other library decides about its bits."""
    size = vector["size"]
    row = torch.tensor([((7 * at * at + 3 * at) % 61 - 30) * 2.0 ** (at % 5 - 2) for at in range(size)])
    halves, scales = quantised_to_int4(row.view(1, 1, size))
    assert bytes(halves.flatten().tolist()).hex() == vector["codes"]
    assert bytes(scales.view(torch.uint8).flatten().tolist()).hex() == vector["scales"]
    assert float(restored_from_int4(halves, scales, size).double().sum()) == vector["sum_of_decoded"]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3 * BLOCK), st.floats(1e-30, 1e30), st.integers(0, 100))
def test_the_norm_of_a_blocks_error_is_at_most_half_a_scale_a_value(size: int, factor: float, seed: int) -> None:
    activations = sample(size, seed) * factor
    activations[0, 0] = 0.0
    halves, scales = quantised_to_int4(activations)
    found = restored_from_int4(halves, scales, size)
    assert bool((found[0, 0] == 0).all())
    for number, (was, now) in enumerate(zip(blocks_of(activations), blocks_of(found), strict=True)):
        scale = scales[0, :, number].double()
        bound = sqrt(was.shape[1]) * scale / 2 + 1e-6 * was.double().norm(dim=1)
        assert bool(((was.double() - now.double()).norm(dim=1) <= bound).all())


@pytest.mark.parametrize("size", [64, 40, 51, 384, 1_000])
def test_what_was_decoded_travels_again_without_another_loss(size: int) -> None:
    """A driver sends on what it received: the codes stay, or move by one where the block was rotated."""
    halves, scales = quantised_to_int4(sample(size))
    again, _ = quantised_to_int4(restored_from_int4(halves, scales, size))
    if size % BLOCK and not size % 2:
        size -= size % BLOCK  # whole blocks are rotated, the odd rest is not
    for shift in (0, 4):
        before, after = ((codes << (4 - shift)).view(torch.int8) >> 4 for codes in (halves, again))
        assert int((before - after).abs().max()) <= 1


def test_a_block_that_is_not_rotated_comes_back_as_the_same_bytes() -> None:
    halves, scales = quantised_to_int4(sample(51, rows=200))
    again, scales_again = quantised_to_int4(restored_from_int4(halves, scales, 51))
    assert torch.equal(halves, again)
    assert bool(((scales_again.float() - scales.float()).abs() <= 2**-7 * scales.float()).all())


def test_one_large_value_does_not_spoil_its_block() -> None:
    """Without the rotation it sets the step, and the others become zero: their error is 95 % of their size."""
    activations = sample(BLOCK, rows=200)
    activations[..., 5] = 30.0
    found = restored_from_int4(*quantised_to_int4(activations), BLOCK)
    others = torch.arange(BLOCK) != 5
    apart = (found - activations)[..., others].norm() / activations[..., others].norm()
    assert apart < 0.5
    assert relative_error(sample(384, rows=200)) == pytest.approx(0.108, abs=0.002)


@pytest.mark.parametrize("size", [2, 51, 64, 384, 1_000])
def test_the_bytes_are_about_half_a_byte_a_value(size: int) -> None:
    parts = to_wire("x", sample(size), INT4)
    assert [part.spec.dtype for part in parts] == ["uint8", "bfloat16"]
    assert sum(part.spec.byte_count for part in parts) == wire_bytes(6, size, INT4)
    assert wire_bytes(6, size, INT4) == 6 * (ceil(size / 2) + 2 * ceil(size / BLOCK))
    found = from_wire("x", {part.spec.name: part for part in parts}, INT4, size)
    assert torch.equal(found, restored_from_int4(*quantised_to_int4(sample(size)), size))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_is_refused(value: float) -> None:
    activations = sample(100)
    activations[0, 2, 3] = value
    parts = {part.spec.name: part for part in to_wire("x", activations, INT4)}
    with pytest.raises(RefusedTensorError, match="not a finite number"):
        from_wire("x", parts, INT4, 100)


@pytest.mark.parametrize("scale", [-1.0, -0.0, 1e-39, float("inf"), float("nan")])
def test_scales_that_no_honest_node_sends_are_refused(scale: float) -> None:
    halves, scales = quantised_to_int4(sample(100))
    scales[0, 1, 1] = scale
    with pytest.raises(RefusedTensorError, match="scale"):
        restored_from_int4(halves, scales, 100)


@pytest.mark.parametrize(("code", "reason"), [(0x08, "-8"), (0x80, "-8"), (0x88, "-8"), (0x10, "after the last")])
def test_codes_that_no_honest_node_sends_are_refused(code: int, reason: str) -> None:
    halves, scales = quantised_to_int4(sample(51))
    halves[0, 0, -1] = code
    with pytest.raises(RefusedTensorError, match=reason):
        restored_from_int4(halves, scales, 51)


def test_parts_of_another_shape_or_precision_are_refused() -> None:
    codes, scales = to_wire("x", sample(70), INT4)
    for wrong in (
        {"x": codes},
        {"x": codes, "x/scales": codes},
        {"x": codes, "x/scales": part_of("x/scales", torch.zeros(1, 6, 3, dtype=torch.bfloat16))},
        {"x": part_of("x", torch.zeros(1, 5, 35, dtype=torch.uint8)), "x/scales": scales},
    ):
        with pytest.raises(RefusedTensorError):
            from_wire("x", wrong, INT4, 70)
    whole = {"x": codes, "x/scales": scales}
    for precision in (WirePrecision.FP32, WirePrecision.BF16, WirePrecision.INT8):
        with pytest.raises(RefusedTensorError):
            from_wire("x", whole, precision, 70)
    with pytest.raises(RefusedTensorError):
        from_wire("x", whole, INT4, 68)
