"""The outer step and its root are the same bytes whatever threads and CPU kernels compute them (DESIGN 4.3)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from outer_kernel_program import root

EXPECTED = "8f2686ecc74c4d551f0de69e9c99c55c615a135166c9f66d58ef800d7c4b190d"


def test_threads_and_kernels_change_no_bit_of_the_state_root() -> None:
    program = Path(__file__).with_name("outer_kernel_program.py")
    assert root() == EXPECTED
    started: list[subprocess.Popen[str]] = []
    for kernels, threads in (("default", "1"), ("avx2", "4")):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": kernels, "PYTHONPATH": str(program.parents[2])}
        command = [sys.executable, str(program), threads]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    assert [process.communicate(timeout=120)[0] for process in started] == [EXPECTED, EXPECTED]
