"""The outer step and its root are the same bytes whatever threads and CPU kernels compute them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
        state = strategy_at(OuterOptimization(), schema, state.outer_step, 400).next_state(state, aggregate, 2)
    return state_root(state)


EXPECTED = "725b69209a737e070d7035b3455565643a095106d39c9b1dd3a51fedd2720f61"


def test_threads_and_kernels_change_no_bit_of_the_state_root() -> None:
    program = Path(__file__)  # started as a program, this file prints the root
    assert root() == EXPECTED
    started: list[subprocess.Popen[str]] = []
    for kernels, threads in (("default", "1"), ("avx2", "4")):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": kernels, "PYTHONPATH": str(program.parents[2])}
        command = [sys.executable, str(program), threads]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    assert [process.communicate(timeout=120)[0] for process in started] == [EXPECTED, EXPECTED]


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    sys.stdout.write(root())
