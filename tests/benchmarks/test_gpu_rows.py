"""`python -m benchmarks gpu` names every figure, measured or not, and keeps the results of each GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu, record
from benchmarks.node_speed import Comparison, Segment
from benchmarks.record import WAS_NOT_RUN, Report, Row, store
from neuroshard.model.architecture import flops_per_token, parameter_count


def measured(*, stall_seconds: float, pause_seconds: float, tokens_a_second: float = 100_000.0) -> gpu.Measured:
    case = gpu.MODELS["350M"]
    architecture = case.architecture(case.vocabulary)
    comparison = Comparison(
        case=case,
        architecture=architecture,
        node=[Segment(tokens_a_second, 1.0)] * 2,
        bare=[Segment(100_000.0, 1.0)] * 2,
        thread_shares={},
        precision="bf16",
        fp32_rate=1.0,
        compiled_rate=None,
        write_seconds=1.0,
        stall_seconds=stall_seconds,
        step_seconds=0.2,
        matmul_flops=1e12,
        flops_per_token=flops_per_token(architecture),
        parameters=1,
        first_steps_seconds=9.0,
        device_megabytes=900.0,
        pause_seconds=pause_seconds,
    )
    peak = 2 * 100_000.0 * comparison.flops_per_token
    return gpu.Measured(comparison, peak, planned_megabytes=1_000.0, first_step_seconds=9.0)


def test_figures_meet_their_goals_or_miss_them() -> None:
    good, bad = (
        measured(stall_seconds=0.01, pause_seconds=0.9),
        measured(stall_seconds=0.1, pause_seconds=1.1, tokens_a_second=90_000.0),
    )
    rows = [[figure.row("350M", one) for figure in gpu.FIGURES] for one in (good, bad)]
    assert [row.figure for row in rows[0]] == ["0.500", "100,000", "1.000", "0.050", "0.90 s", "0.900", "9.0 s"]
    assert [row.met for row in rows[0]] == [True, None, True, True, True, None, True]
    assert [row.met for row in rows[1]] == [False, None, False, False, False, None, True]


def test_without_a_gpu_every_figure_was_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "devices_of", lambda _kind: [])
    report = gpu.measure()
    assert len(report.rows) == len(gpu.MODELS) * len(gpu.FIGURES)
    assert {(row.figure, row.met) for row in report.rows} == {(WAS_NOT_RUN, None)}
    assert {">= 0.50", ">= 0.98", "<= 0.05", "<= 1 s", "<= 10 s"} <= {row.goal for row in report.rows}
    assert not report.was_run


def test_the_models_have_the_sizes_of_their_names() -> None:
    counts = {name: parameter_count(case.architecture(case.vocabulary)) / 1e6 for name, case in gpu.MODELS.items()}
    assert counts["350M"] == pytest.approx(350, rel=0.1)
    assert counts["1B"] == pytest.approx(1_000, rel=0.1)


def test_results_of_two_gpus_are_kept_with_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS_FOLDER", tmp_path / "results")
    monkeypatch.setattr(record, "REPORT_FILE", tmp_path / "RESULTS.md")
    for device in ("NVIDIA H200", "NVIDIA GeForce RTX 4090"):
        store(Report("gpu", f"A node on a GPU: {device}", (Row("MFU", "0.5", ">= 0.50", True),), device=device))
    files = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert files == ["gpu_nvidia_geforce_rtx_4090.json", "gpu_nvidia_h200.json"]
    assert json.loads((tmp_path / "results" / files[1]).read_text())["device"] == "NVIDIA H200"
    record.write_results_page()
    assert "`python -m benchmarks gpu` on" in (tmp_path / "RESULTS.md").read_text()
    assert "(NVIDIA H200, " in (tmp_path / "RESULTS.md").read_text()
