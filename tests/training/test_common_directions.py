from __future__ import annotations

import pytest
import torch
from torch import Tensor

from neuroshard.messages.tensors import part_of
from neuroshard.pipeline.common_directions import (
    DIRECTIONS,
    LEAST_SIZE,
    LEAST_TOKENS,
    common_part,
    has_directions,
    without_common_part,
)
from neuroshard.pipeline.microbatch import RefusedTensorError
from neuroshard.pipeline.stage_protocol import WirePrecision, from_wire, to_wire, wire_bytes, wire_specs

INT4, RANK8 = WirePrecision.INT4, WirePrecision.INT4_RANK8


def sample(size: int = 96, tokens: int = 100, *, strong: int = 5, seed: int = 0) -> Tensor:
    """Activations (2, tokens, size) with a mean and a few strong directions."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, tokens, size, generator=generator)
    directions = torch.randn(strong, size, generator=generator)
    amounts = 3 * torch.randn(2, tokens, strong, generator=generator)
    return noise + amounts @ directions + 4 * torch.randn(size, generator=generator)


def sent(activations: Tensor, precision: WirePrecision) -> Tensor:
    parts = {part.spec.name: part for part in to_wire("x", activations, precision)}
    return from_wire("x", parts, precision, activations.shape[2])


def size_of(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def error(activations: Tensor, precision: WirePrecision) -> float:
    return size_of(sent(activations, precision) - activations) / size_of(activations)


def test_a_mean_and_strong_directions_leave_a_smaller_error() -> None:
    activations = sample()
    assert error(activations, RANK8) < 0.2 * error(activations, INT4)
    noise = torch.randn(2, 100, 96, generator=torch.Generator().manual_seed(1))
    assert error(noise, RANK8) < error(noise, INT4)


@pytest.mark.parametrize(("sequences", "tokens", "size"), [(1, 1, 96), (1, 63, 96), (2, 32, 63), (8, 64, 48)])
def test_few_tokens_or_values_travel_as_int4(sequences: int, tokens: int, size: int) -> None:
    activations = sample(size, tokens)[:sequences].repeat(-(-sequences // 2), 1, 1)[:sequences]
    assert not has_directions(*activations.shape)
    assert wire_specs("x", (sequences, tokens, size), RANK8) == wire_specs("x", (sequences, tokens, size), INT4)
    assert torch.equal(sent(activations, RANK8), sent(activations, INT4))


def test_a_token_costs_eight_bytes_more_than_in_int4_and_a_microbatch_its_directions() -> None:
    rows = 2 * 96 * (1 + DIRECTIONS)
    assert wire_bytes(200, 96, RANK8) == wire_bytes(200, 96, INT4) + 200 * DIRECTIONS + rows
    parts = to_wire("x", sample(), RANK8)
    assert tuple(part.spec for part in parts) == wire_specs("x", (2, 100, 96), RANK8)
    assert sum(part.spec.byte_count for part in parts) == wire_bytes(200, 96, RANK8)
    # no frame is larger than in fp32, for which receivers reserve memory
    assert wire_bytes(LEAST_TOKENS, LEAST_SIZE, RANK8) < wire_bytes(LEAST_TOKENS, LEAST_SIZE, WirePrecision.FP32)


def test_equal_activations_have_equal_bytes_and_nothing_else_does_harm() -> None:
    first, second = (to_wire("x", sample(), RANK8) for _ in range(2))
    assert [bytes(part.data) for part in first] == [bytes(part.data) for part in second]
    for flat in (torch.zeros(2, 64, 64), torch.full((2, 64, 64), 3.0)):
        assert torch.equal(sent(flat, RANK8), flat)
    for size in (1e-30, 1e30):
        assert error(sample() * size, RANK8) < 0.05


def test_the_rest_and_the_common_part_are_the_whole() -> None:
    activations = sample()
    rest, amounts, rows = without_common_part(activations)
    assert (rows.dtype, amounts.dtype) == (torch.bfloat16, torch.int8)
    torch.testing.assert_close(rest + common_part(amounts, rows), activations, rtol=1e-5, atol=1e-5)
    assert size_of(rest) < 0.3 * size_of(activations)


def test_every_machine_decodes_the_same_numbers() -> None:
    """One direction after the other is added in fp32: 2**24 + 1 - 2**24 is 0 in this order and 1 in another."""
    rows = torch.zeros(1 + DIRECTIONS, 64, dtype=torch.bfloat16)
    rows[0], rows[1], rows[8] = 2.0**24, 1.0, -(2.0**24)
    amounts = torch.zeros(1, 64, DIRECTIONS, dtype=torch.int8)
    amounts[..., 0], amounts[..., 7] = 1, 1
    assert torch.equal(common_part(amounts, rows), torch.zeros(1, 64, 64))
    rows[1] = 2.0
    assert torch.equal(common_part(amounts, rows), torch.full((1, 64, 64), 2.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_is_refused(value: float) -> None:
    activations = sample()
    activations[1, 2, 3] = value
    with pytest.raises(RefusedTensorError, match="finite number"):
        sent(activations, RANK8)


def test_parts_of_another_form_are_refused() -> None:
    parts = {part.spec.name: part for part in to_wire("x", sample(), RANK8)}
    others = {part.spec.name: part for part in to_wire("x", sample(), INT4)}
    rows = torch.zeros(1 + DIRECTIONS, 97, dtype=torch.bfloat16)
    for wrong in (
        others,
        {name: part for name, part in parts.items() if name != "x/rows"},
        {name: part for name, part in parts.items() if name != "x/amounts"},
        {**parts, "x/rows": part_of("x/rows", rows)},
        {**parts, "x/amounts": part_of("x/amounts", torch.zeros(2, 100, 9, dtype=torch.int8))},
    ):
        with pytest.raises(RefusedTensorError):
            from_wire("x", wrong, RANK8, 96)
    with pytest.raises(RefusedTensorError):
        from_wire("x", parts, INT4, 96)
