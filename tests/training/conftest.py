"""One compute thread per test, joined at its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from neuroshard.pipeline.executor import ComputeThread


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    """A compute thread with one CPU thread."""
    thread = ComputeThread(cpu_threads=1)
    yield thread
    thread.close()
