from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.pipeline.activation_codes import BLOCK, quantised, restored_activations
from neuroshard.pipeline.microbatch import RefusedTensorError
from neuroshard.pipeline.stage_protocol import WirePrecision, from_wire, to_wire, wire_bytes, wire_specs


def sample(hidden: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, hidden, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("hidden", [1, 32, BLOCK, BLOCK + 1, 200])
@pytest.mark.parametrize(
    ("precision", "error"), [(WirePrecision.FP32, 0.0), (WirePrecision.BF16, 2**-8), (WirePrecision.INT8, 1 / 254)]
)
def test_what_travels_comes_back_within_its_precision(hidden: int, precision: WirePrecision, error: float) -> None:
    activations = sample(hidden)
    parts = to_wire("x", activations, precision)
    assert tuple(part.spec for part in parts) == wire_specs("x", (2, 3, hidden), precision)
    assert sum(part.spec.byte_count for part in parts) == wire_bytes(6, hidden, precision)
    found = from_wire("x", {part.spec.name: part for part in parts}, precision, hidden)
    assert found.dtype == torch.float32
    largest = activations.abs().amax() if precision is WirePrecision.INT8 else activations.abs()
    assert bool(((found - activations).abs() <= 1.01 * error * largest).all())


def test_int8_takes_about_a_byte_a_value() -> None:
    assert wire_bytes(100, 512, WirePrecision.INT8) == pytest.approx(100 * 512 * 1.0625)
    assert wire_bytes(100, 512, WirePrecision.BF16) == 100 * 512 * 2


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3 * BLOCK), st.floats(1e-30, 1e30), st.integers(0, 100))
def test_the_error_of_int8_is_half_a_scale_of_its_own_block(hidden: int, size: float, seed: int) -> None:
    activations = sample(hidden, seed) * size
    activations[0, 0] = 0.0
    values, scales = quantised(activations)
    assert values.dtype == torch.int8
    found = restored_activations(values, scales)
    assert bool((found[0, 0] == 0).all())
    each = scales.repeat_interleave(BLOCK, dim=2)[..., :hidden]
    assert bool(((found - activations).abs() <= 0.501 * each).all())


def test_parts_that_do_not_fit_are_refused() -> None:
    parts = {part.spec.name: part for part in to_wire("x", sample(70), WirePrecision.INT8)}
    scales = parts["x/scales"]
    for wrong in (
        {},
        {"x": parts["x"]},
        {"x/scales": scales},
        {"x": scales, "x/scales": scales},
        {"x": to_wire("x", sample(70), WirePrecision.FP32)[0], "x/scales": scales},
        {"x": to_wire("x", sample(200), WirePrecision.FP32)[0]},
    ):
        with pytest.raises(RefusedTensorError):
            from_wire("x", wrong, WirePrecision.INT8, 70)
    with pytest.raises(RefusedTensorError):
        from_wire("x", parts, WirePrecision.BF16, 70)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", [WirePrecision.FP32, WirePrecision.BF16, WirePrecision.INT8])
def test_what_is_not_a_number_stays_visible(value: float, precision: WirePrecision) -> None:
    activations = sample(100)
    activations[1, 2, 3] = value
    parts = {part.spec.name: part for part in to_wire("x", activations, precision)}
    assert not torch.isfinite(from_wire("x", parts, precision, 100)).all()
