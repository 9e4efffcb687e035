"""Runs a module of these benchmarks with another Python, one that has hivemind 1.1.12: $BENCHMARK_HIVEMIND_PYTHON."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

LONGEST_SECONDS = 120


def hivemind_python() -> str | None:
    """That Python, if it is there."""
    python = os.environ.get("BENCHMARK_HIVEMIND_PYTHON")
    return python if python and Path(python).exists() else None


def hivemind_facts(module: str, *arguments: int) -> dict[str, Any] | str:
    """The JSON object that it prints last, or why it did not run. Whatever it leaves behind is ended."""
    python = hivemind_python()
    if python is None:
        return "hivemind was not run: BENCHMARK_HIVEMIND_PYTHON names no Python that has it."
    command = [python, "-m", module, *map(str, arguments)]
    if sys.platform == "linux" and os.geteuid() == 0 and shutil.which("unshare"):
        command = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *command]
    with tempfile.TemporaryFile("w+") as output:  # no pipe: processes that it leaves behind would keep one open
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            process.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            return f"hivemind did not finish within {LONGEST_SECONDS} s."
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = [line for line in output if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else f"hivemind ended with exit code {process.returncode}."
