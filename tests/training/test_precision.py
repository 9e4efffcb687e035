from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from neuroshard.cli.doctor import Case, precision
from neuroshard.config.loading import load_settings
from neuroshard.host.computer import processor_name
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.pipeline import precision_probe
from neuroshard.pipeline.executor import Precision
from neuroshard.pipeline.precision_probe import (
    MOST_REMEMBERED,
    MOST_ROUNDS,
    PrecisionProbe,
    RememberedProbes,
    precision_file,
    probe_precision,
)
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


def timed_passes(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Precision, int], float]) -> list[Precision]:
    """Let passes take `seconds` by precision and by the number of passes before; returns the list of passes."""
    passes = list[Precision]()

    def timed(_model: object, _inputs: object, _ids: object, precision: Precision, _clock: object) -> float:
        passes.append(precision)
        return seconds(precision, len(passes) - 1)

    monkeypatch.setattr(precision_probe, "_time_pass", timed)
    return passes


def untrained() -> StageModel:
    model = StageModel(ARCHITECTURE)
    initialise(model, 1)
    return model


CPU = torch.device("cpu")
IN_TRUTH = {Precision.FP32: 1.3, Precision.BF16: 1.0}


def test_the_median_counts_and_neither_precision_is_always_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up is slow, the computer slows down by and by, and one pass in bf16 is disturbed."""
    disturbed = {5: 3.0}
    passes = timed_passes(
        monkeypatch,
        lambda precision, count: (
            50.0 if count < 2 else IN_TRUTH[precision] * (1 + 0.02 * count) * disturbed.get(count, 1.0)
        ),
    )
    probe = probe_precision(untrained(), CPU, rounds=5, clock=lambda: 0.0)
    assert probe.gain == pytest.approx(1.3, rel=0.05)
    assert passes[2:8] == [*Precision, *reversed(Precision), *Precision]
    assert len(passes) == 2 + 2 * 5


def test_a_slow_model_is_measured_once_after_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = timed_passes(monkeypatch, lambda precision, count: 60.0 if count < 2 else IN_TRUTH[precision])
    now = iter((0.0, 120.0))
    assert probe_precision(untrained(), CPU, max_seconds=4.0, clock=lambda: next(now)) == PrecisionProbe(1.3, 1.0)
    assert len(passes) == 4


@pytest.mark.parametrize(("slow_rounds", "chosen"), [(0, Precision.BF16), (5, Precision.BF16), (100, Precision.FP32)])
def test_a_doubtful_result_is_measured_again(
    slow_rounds: int, chosen: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program slows the first passes in bf16 down, so that it seems 1.1 times as fast; it is 1.3 times."""
    timed_passes(
        monkeypatch,
        lambda precision, count: (
            1.18 if precision is Precision.BF16 and count < 2 * slow_rounds else IN_TRUTH[precision]
        ),
    )
    assert probe_precision(untrained(), CPU, clock=lambda: 0.0).chosen is chosen


def test_later_starts_use_the_first_result_of_the_same_machine_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gain is so near to the least one that each measurement may choose another precision."""
    gains = iter((1.16, 1.14, 1.13, 1.12, 1.11, 1.2))
    monkeypatch.setattr(precision_probe, "probe_precision", lambda *_, **__: PrecisionProbe(next(gains), 1.0))
    model = untrained()

    def chosen(device_name: str = "a processor", threads: int = 2, sequences: int = 2) -> PrecisionProbe:
        return RememberedProbes(tmp_path, device_name, threads).probe(model, CPU, sequences)

    first = chosen()
    assert first.chosen is Precision.BF16
    assert chosen() == first
    assert first.is_steady
    assert chosen("another processor").gain == 1.14
    assert chosen(threads=4).gain == 1.13
    assert chosen(sequences=4).gain == 1.12
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.0")
        assert chosen().gain == 1.11
    assert chosen() == first
    (tmp_path / "precision.json").unlink()  # as `neuroshard doctor` advises
    assert chosen().gain == 1.2


def test_a_result_from_a_busy_computer_counts_for_one_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program takes half of the passes: their median is far above the fastest."""
    passes = timed_passes(monkeypatch, lambda precision, count: IN_TRUTH[precision] * (2.0 if count % 8 < 5 else 1.0))
    busy = probe_precision(untrained(), CPU, clock=lambda: 0.0)
    assert not busy.is_steady
    assert busy.gain == 1.3
    assert len(passes) == 2 + 2 * 5 * MOST_ROUNDS
    results = iter((busy, PrecisionProbe(1.3, 1.0, 1.1), PrecisionProbe(1.0, 1.0)))
    monkeypatch.setattr(precision_probe, "probe_precision", lambda *_, **__: next(results))
    probes = RememberedProbes(tmp_path, "a processor", 2)
    assert [probes.probe(untrained(), CPU, 2).gain for _ in range(3)] == [busy.gain, 1.3, 1.3]


def test_programs_that_slow_one_precision_only_choose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take nearly all of the time of most passes in fp32."""
    timed_passes(
        monkeypatch,
        lambda precision, count: 9.0 if precision is Precision.FP32 and count % 10 else 1.0,
    )
    probe = probe_precision(untrained(), CPU, clock=lambda: 0.0)
    assert (probe.gain, probe.chosen, probe.is_steady) == (1.0, Precision.FP32, False)


def test_a_start_measures_without_a_file_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precision_probe, "probe_precision", lambda *_, **__: PrecisionProbe(2.0, 1.0))
    (tmp_path / "precision.json").write_text('{"measured": [{"gain": NaN}]}')
    assert RememberedProbes(tmp_path, "a processor", 2).probe(untrained(), CPU, 2).gain == 2.0
    assert precision_file(tmp_path).read() is not None  # the new measurement replaced it
    assert "the precision is measured again" in caplog.text
    assert RememberedProbes(tmp_path / "gone", "a processor", 2).probe(untrained(), CPU, 2).gain == 2.0
    assert "measures the precision again" in caplog.text
    assert not (tmp_path / "gone").exists()


def test_the_file_keeps_the_newest_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_probe, "probe_precision", lambda *_, **__: PrecisionProbe(2.0, 1.0))
    for threads in range(1, MOST_REMEMBERED + 4):
        RememberedProbes(tmp_path, "a processor with a long name " * 20, threads).probe(untrained(), CPU, 2)
    stored = precision_file(tmp_path).read()
    assert stored is not None
    assert [measured.machine.threads for measured in stored.measured] == list(range(4, MOST_REMEMBERED + 4))


def test_the_doctor_shows_the_measurement_and_how_to_repeat_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(load_settings({"data_dir": tmp_path}, {}), None)
    assert "nothing is measured yet" in precision(case).detail
    monkeypatch.setattr(precision_probe, "probe_precision", lambda *_, **__: PrecisionProbe(1.32, 1.0))
    RememberedProbes(tmp_path, "Fast 9000", 2).probe(untrained(), CPU, 2)
    finding = precision(case)
    assert finding.is_well
    assert finding.detail == (
        f"the last measurement chose bf16: bf16 had 1.32 times the speed on Fast 9000 with 2 CPU threads and "
        f"PyTorch {torch.__version__}"
    )
    assert finding.action.endswith(f"delete {tmp_path / 'precision.json'}.")
    running = Case(case.loaded, {"training": {"precision": "fp32"}})
    assert precision(running).detail.startswith("the running node computes in fp32; the last measurement chose bf16")
    (tmp_path / "precision.json").write_text("{")
    assert "is damaged" in precision(case).action
    assert (tmp_path / "precision.json").read_text() == "{"  # doctor changes nothing


def test_the_processor_has_the_name_that_its_maker_gave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast 9000 @ 3.00GHz\nmodel name\t: other\n")
    assert processor_name(tmp_path) == "Fast 9000 @ 3.00GHz"
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert processor_name(tmp_path / "elsewhere") == "riscv64"  # the system reports no name
