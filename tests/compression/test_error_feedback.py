"""Error feedback: what is sent over many rounds adds up to what was contributed."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from neuroshard.aggregation import TrimmedMean
from neuroshard.compression import Codec, is_sparse, make_codec, next_residual, with_residual
from neuroshard.config.run_parameters import CodecName
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.slices import SlicePlan


def contribution(round_index: int, size: int = 5000) -> torch.Tensor:
    """Numbers of very different sizes in one block, as in a model: the small ones are lost without feedback."""
    generator = torch.Generator().manual_seed(round_index)
    return torch.randn(size, generator=generator).sign() * 0.001 * torch.linspace(0, 1, size) + torch.eye(1, size)[0]


def total(codec: Codec, rounds: int, *, feedback: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    sent, residual = torch.zeros(5000, dtype=torch.float64), None
    for index in range(rounds):
        encoded = with_residual(contribution(index), residual)
        decoded = codec.round_trip(encoded)
        residual = next_residual(encoded, decoded) if feedback else None
        sent += decoded
    return sent, residual


@pytest.mark.parametrize("name", ["int8", "bf16", "int4"])
def test_what_was_sent_and_the_residual_are_what_was_contributed(name: str) -> None:
    codec = make_codec(name)
    wanted = sum((contribution(index).double() for index in range(40)), torch.zeros(5000, dtype=torch.float64))
    sent, residual = total(codec, 40, feedback=True)
    assert residual is not None
    torch.testing.assert_close(sent + residual, wanted, atol=1e-5, rtol=0)
    assert residual.abs().max() <= {"int8": 1.01 / 127 / 2, "bf16": 0.01, "int4": 1.1 / 7 / 2}[name]
    plain, _ = total(codec, 40, feedback=False)
    if name == "int8":
        assert (plain - wanted).abs().max() > 3 * (sent - wanted).abs().max()


def test_of_what_top_k_holds_back_a_part_is_forgotten_every_round() -> None:
    codec, vector = make_codec("topk"), contribution(0)
    sent = codec.round_trip(vector)
    residual = next_residual(vector, sent, codec.residual_decay)
    assert residual is not None
    torch.testing.assert_close(residual, 0.95 * (vector - sent))
    assert make_codec("int4").residual_decay == 1.0
    for _ in range(60):  # everything has its turn: 5,000 numbers, 64 + 64 of them a round
        residual = next_residual(residual, codec.round_trip(residual), 1.0)
        assert residual is not None
    assert residual.norm() < 0.2 * (vector - sent).norm()


@pytest.mark.parametrize("name", get_args(CodecName))
def test_what_is_sparse_forgets_and_adds_up_to_something_else(name: CodecName) -> None:
    codec = make_codec(name)
    assert is_sparse(codec) == (name == "topk")
    assert (codec.residual_decay < 1.0) == is_sparse(codec)
    assert (RoundWork(SlicePlan(1), codec, TrimmedMean()).results.name != codec.name) == is_sparse(codec)


def test_nothing_lost_is_no_residual_and_no_copy() -> None:
    codec, vector = make_codec("fp32"), contribution(0)
    assert with_residual(vector, None) is vector
    assert next_residual(vector, codec.round_trip(vector)) is None
    assert next_residual(vector, None) is None


def test_values_are_new_ones() -> None:
    codec, vector, residual = make_codec("int8"), contribution(0), contribution(1)
    before = vector.clone(), residual.clone()
    encoded = with_residual(vector, residual)
    after = next_residual(encoded, codec.round_trip(encoded))
    assert after is not None
    assert torch.equal(vector, before[0])
    assert torch.equal(residual, before[1])
