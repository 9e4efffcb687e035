from __future__ import annotations

import pytest
import torch

from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.pipeline import precision_probe
from neuroshard.pipeline.executor import Precision
from neuroshard.pipeline.precision_probe import PrecisionProbe, probe_precision
from neuroshard.types import LayerRange
from tests.worlds.stages import ARCHITECTURE


def test_bf16_is_chosen_only_for_a_clear_gain() -> None:
    assert PrecisionProbe(1.0, 0.9).chosen is Precision.FP32
    assert PrecisionProbe(1.0, 0.8).chosen is Precision.BF16
    assert PrecisionProbe(1.0, 3.0).chosen is Precision.FP32


def test_the_probe_times_both_and_leaves_no_trace() -> None:
    for layers in (LayerRange(0, 3), LayerRange(1, 2)):
        model = StageModel(ARCHITECTURE, layers)
        initialise(model, 1)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        random_state = torch.random.get_rng_state()
        probe = probe_precision(model, torch.device("cpu"), rounds=1)
        assert probe.fp32_seconds > 0
        assert probe.bf16_seconds > 0
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(torch.random.get_rng_state(), random_state)


def test_the_fastest_of_the_timed_rounds_counts_unless_time_runs_out() -> None:
    model = StageModel(ARCHITECTURE)
    initialise(model, 1)
    times = [0.0, 0.0, 5.0, 5.0, 11.0, 11.0, 11.0, 13.0, 13.0, 14.0, 14.0, 14.0, 15.0, 15.0, 17.0]

    def probe(max_seconds: float) -> PrecisionProbe:
        ticks = iter(times)
        return probe_precision(model, torch.device("cpu"), rounds=2, max_seconds=max_seconds, clock=lambda: next(ticks))

    assert probe(100.0) == PrecisionProbe(1.0, 1.0)  # clear after two rounds
    assert probe(4.0) == PrecisionProbe(5.0, 6.0)  # the warm-up took too long: its times stand


@pytest.mark.parametrize(("slow_rounds", "chosen"), [(0, Precision.BF16), (5, Precision.BF16), (100, Precision.FP32)])
def test_a_doubtful_result_is_measured_again(slow_rounds: int, chosen: Precision) -> None:
    """Another program slows the first passes in bf16 down, so that it seems 1.1 times as fast; it is 1.3 times."""
    model, passes = StageModel(ARCHITECTURE), 0
    initialise(model, 1)

    def timed(_model: object, _inputs: object, _ids: object, precision: Precision, _clock: object) -> float:
        nonlocal passes
        passes += 1
        if precision is Precision.FP32:
            return 1.3
        return 1.18 if passes / 2 <= slow_rounds + 1 else 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision_probe, "_time_pass", timed)
        assert probe_precision(model, torch.device("cpu"), clock=lambda: 0.0).chosen is chosen
