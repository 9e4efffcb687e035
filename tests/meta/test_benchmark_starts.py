"""Every benchmark and every process that one starts can be imported, and is listed under a name."""

from __future__ import annotations

import subprocess
import sys

import pytest
from source_files import ROOT

from benchmarks.__main__ import BENCHMARKS

MODULES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in {"__init__", "__main__"})
NEEDS_HIVEMIND = {
    "hivemind_averager",
    "hivemind_directory",
    "hivemind_home",
    "hivemind_round_trip",
}  # run by a Python that has it

IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"benchmarks.{name}")
"""


def test_every_benchmark_starts() -> None:
    names = [name for name in MODULES if name not in NEEDS_HIVEMIND]
    command = [sys.executable, "-c", IMPORT_ALL, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", sorted({module for module, _ in BENCHMARKS.values()}))
def test_a_listed_benchmark_has_a_module(module: str) -> None:
    assert module in MODULES
