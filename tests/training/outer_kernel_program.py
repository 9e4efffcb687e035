"""Writes the root after some outer steps; kernels are chosen by the environment, threads by argument."""

from __future__ import annotations

import sys

import torch

from neuroshard.compression import make_codec
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.consensus.sync_strategies import strategy_at
from neuroshard.model.weights import TensorSchema
from neuroshard.optim.outer import fresh_outer_state
from neuroshard.state.outer_state import state_root

LENGTH = 1_100_000  # longer than what one piece of an outer step takes


def numbers(seed: int) -> torch.Tensor:
    """Numbers of many sizes made from whole numbers, so that no generator's version matters."""
    index = torch.arange(LENGTH, dtype=torch.int64) + 7919 * seed
    scrambled = index * 6364136223846793005 + 1442695040888963407
    mantissa = ((scrambled >> 33) % 2_000_003 - 1_000_001).to(torch.float32)
    power = (127 - 8 - (scrambled >> 20) % 32) << 23  # the bits of 2^-8 to 2^-39
    return mantissa * power.to(torch.int32).view(torch.float32)


def root() -> str:
    """After six rounds that were sent in int8, with the momentum's ramp."""
    schema = TensorSchema(("weight",), ((LENGTH,),))
    codec, state = make_codec("int8"), fresh_outer_state(numbers(0))
    for number in range(1, 7):
        aggregate = codec.round_trip(numbers(number))
        state = strategy_at(OuterOptimization(), schema, state.outer_step).next_state(state, aggregate)
    return state_root(state)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    sys.stdout.write(root())
