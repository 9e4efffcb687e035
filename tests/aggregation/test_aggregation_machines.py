"""What must hold on every machine: the same bits with other kernels and threads, and little memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def output_of(script: str, *arguments: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1]), **environment},
    ).stdout


@pytest.mark.process
def test_neither_kernels_nor_threads_change_a_bit() -> None:
    plain = output_of("bit_identity.py", "1", ATEN_CPU_CAPABILITY="default")
    assert len(plain.splitlines()) == 16
    for kernels, threads in (("default", "4"), ("avx2", "2"), ("avx512", "1")):
        assert output_of("bit_identity.py", threads, ATEN_CPU_CAPABILITY=kernels) == plain, (kernels, threads)


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of resident memory is read from /proc")
@pytest.mark.parametrize(("codec", "most"), [("int8", 1.3), ("fp32", 3.3)])
@pytest.mark.parametrize("count", ["2", "32"])
def test_a_reducer_stays_within_its_memory(codec: str, most: float, count: str) -> None:
    assert 0.2 < float(output_of("reducer_peak.py", codec, count)) < most
