"""Forks a child for every step number on stdin; the child writes checkpoints from there and reports each complete one.

Forking after the import of torch makes twenty kills take seconds. Lines out: "pid N", "step N", "dead".
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from checkpoint_samples import meta_at, staged

from neuroshard.state.checkpoint_store import CheckpointStore


def write_forever(folder: Path, start: int) -> None:
    store = CheckpointStore(folder)
    for step in range(start, start + 1_000_000):
        store.write(meta_at(step, outer_step=step // 7, inner_step=step % 7), staged(step, size=20_000))
        os.write(1, b"step %d\n" % step)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            write_forever(folder, int(line))
        os.write(1, b"pid %d\n" % child)
        os.waitpid(child, 0)
        os.write(1, b"dead\n")


main(Path(sys.argv[1]))
