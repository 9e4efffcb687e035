"""Every benchmark runs at its tiny size: it has rows, or says what this computer does not have. It stores nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS

ROOT = Path(__file__).parents[2]
NOT_RUN = {
    "diloco_long": "diloco is the same code with fewer rounds",
    "pipeline_takeovers": "a second copy of a stage is made every 30 s, and a silent node is given up after 60 s",
    "node_speed_2.4m": "node_speed_5m is the same code, and at the tiny size the same model",
    "node_speed_16m": "node_speed_5m is the same code, and at the tiny size the same model",
    "utilisation_int4": "utilisation_int8 is the same code with another codec",
    "wall_clock": "it changes the quotas of the processor, which takes root and the cpu controller of cgroup v1",
}
NO_LINE = (
    "network namespaces need root"
    "|the link emulator .+ is not there .+"
    "|the program (ip|gcc) is not installed"
    "|there is no /dev/net/tun"
    "|ip netns (add|exec) .+ (Operation not permitted|Permission denied|Read-only file system).*"
)
REASONS_NOT_TO_RUN = {  # what another computer may not have, in the words of the benchmark
    "line_speed": NO_LINE,
    "punched_speed": NO_LINE,
    "relayed_speed": NO_LINE,
    "shaped_rounds": NO_LINE,
    "chain_speed": NO_LINE,
    "utilisation_int8": NO_LINE,
    "node_speed_350m": "PyTorch sees no CUDA device here",
    "population": "tokenizers is not installed",
    "dashboards": "there is no Chromium",
}
GROUPS: Mapping[str, Sequence[str]] = {  # one process each, so that it imports PyTorch once
    "quick": ("together", "muon", "diloco", "codecs", "membership", "data"),
    "learning": (
        *("together_16", "together_20000", "together_1.3M", "together_5M", "schemes", "rare_rounds", "overlap"),
        *("unequal_speeds", "churn", "attacks", "attacks_2.4M", "pipeline_quality", "protocol_nano"),
    ),
    "parts": ("population", "shards", "loss_kernel", "aggregation", "meeting", "rounds", "organiser"),
    "lines": (
        "line_speed",
        "punched_speed",
        "relayed_speed",
        "loopback_speed",
        "tensor_round_trip",
        "shaped_rounds",
        "chain_speed",
        "utilisation_int8",
    ),
    "nodes": (
        *("start", "learning", "kill", "dashboards", "foreground", "paused", "node_speed_5m", "node_speed_350m", "gpu"),
        *("first_record", "state_joining", "real_together"),
    ),
    "pipelines": ("pipeline_speed", "pipeline_join", "pipeline_kills"),
}
# What they start or train, the tests of its room start or train too; the quick group has the common code of benchmarks.
LONG = ("learning", "parts", "lines", "nodes", "pipelines")


@pytest.mark.process
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=[pytest.mark.long] if group in LONG else []) for group in GROUPS]
)
def test_benchmarks_run_at_their_tiny_size(group: str) -> None:
    names, before = GROUPS[group], stored_results()
    printed = run("--tiny", *names).stdout
    for name in names:
        not_run = re.search(rf"^{name} was not run: (.+)\.$", printed, re.MULTILINE)
        if not_run is not None:
            assert re.fullmatch(REASONS_NOT_TO_RUN.get(name, ""), not_run[1]), printed
            continue
        table = re.search(rf"^{name}: .+\n\n\| item .*\n\| --- .*\n((?:\| .*\n)+)", printed, re.MULTILINE)
        assert table is not None, printed
    assert stored_results() == before


def test_every_benchmark_is_run_or_named() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted([*grouped, *NOT_RUN]) == sorted(BENCHMARKS)


def test_help_lists_every_benchmark_in_one_line() -> None:
    lines = run("--help").stdout.partition("benchmarks:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == list(BENCHMARKS)
    assert all(len(line.split()) > 1 for line in lines)


def test_an_unknown_name_is_an_error_with_the_known_names() -> None:
    refused = run("--tiny", "speed", code=2)
    assert "unknown benchmark speed" in refused.stderr
    assert "node_speed_5m" in refused.stderr


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def stored_results() -> dict[Path, bytes]:
    """The result files and the page that sums them up."""
    folder = ROOT / "benchmarks"
    return {path: path.read_bytes() for path in (*(folder / "results").iterdir(), folder / "RESULTS.md")}
