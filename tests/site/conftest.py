"""Ranks that start in milliseconds: forks of a process that has imported PyTorch, which is most of a rank's start."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks import preloaded
from neuroshard.training.site import rank_processes, worker

OPEN_RANK = rank_processes.open_rank


@pytest.fixture(scope="module", autouse=True)
def _forked_ranks() -> Iterator[None]:
    """Start ranks as forks where the system can; `own_ranks` starts them as a node does."""
    with pytest.MonkeyPatch.context() as patch:
        if preloaded.is_wanted():
            script = Path(worker.__file__)
            patch.setattr(rank_processes, "open_rank", partial(preloaded.forker().start_piped, script))
        yield


@pytest.fixture
def own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the ranks of this test as a node does: each imports for itself."""
    monkeypatch.setattr(rank_processes, "open_rank", OPEN_RANK)
