"""SIGKILL at random moments: the store always opens with a whole state, not older than the last one reported."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest
import torch

from neuroshard.state.checkpoint_store import CheckpointStore
from tests.worlds.checkpoints import EXPECTED, meta_at, same, staged, tensors_at


def write_forever(folder: Path, start: int) -> None:
    store = CheckpointStore(folder)
    for step in range(start, start + 1_000_000):
        store.write(meta_at(step, outer_step=step // 7, inner_step=step % 7), staged(step, size=20_000))
        os.write(1, b"step %d\n" % step)


def main(folder: Path) -> None:
    """Fork a child for every step number on stdin; the child writes checkpoints from there and reports each whole one.

    Forking after the import of torch makes twenty kills take seconds. Lines out: "pid N", "step N", "dead".
    """
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            write_forever(folder, int(line))
        os.write(1, b"pid %d\n" % child)
        os.waitpid(child, 0)
        os.write(1, b"dead\n")


KILLS = 20


class Reports:
    """What the writer printed so far."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self.pid, self.step, self.dead = 0, 0, False

    def read_line(self) -> None:
        word, *number = self._pipe.readline().split()
        match word:
            case b"pid":
                self.pid = int(number[0])
            case b"step":
                self.step = int(number[0])
            case _:
                self.dead = True

    def follow(self, seconds: float) -> None:
        """Until the child has reported once, and then for so long."""
        while not (self.pid and self.step):
            self.read_line()
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._pipe], [], [], left)[0]:
                self.read_line()

    def drain(self) -> None:
        while not self.dead:
            self.read_line()


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_sigkill_at_twenty_random_moments_never_leaves_an_unreadable_state(tmp_path: Path) -> None:
    moments = random.Random(20)
    script = Path(__file__)
    reported = 0
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": str(script.parents[2])},
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for _ in range(KILLS):
            writer.stdin.write(b"%d\n" % (reported + 1))
            reports = Reports(writer.stdout)
            reports.follow(moments.uniform(0.0, 0.15))
            os.kill(reports.pid, signal.SIGKILL)
            reports.drain()
            restoration = CheckpointStore(tmp_path).load_newest(EXPECTED, staged(0, size=20_000))
            assert restoration.warnings == ()
            assert restoration.loaded is not None
            step = restoration.loaded.meta.step
            assert step >= reports.step
            assert same(restoration.loaded.tensors, tensors_at(step, size=20_000))
            assert restoration.loaded.meta == meta_at(step, outer_step=step // 7, inner_step=step % 7)
            reported = step
        writer.stdin.close()
    assert not list(tmp_path.glob(".tmp-*"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
