"""`neuroshard update ...` as an installed version runs it, killed after STEP when asked.

STEP VERSION ROOT ARGUMENTS...
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import neuroshard
from neuroshard.config import program
from neuroshard.update import applying

step, version, root, *arguments = sys.argv[1:]
neuroshard.__version__ = version
program.installation_root = lambda version_folder=None: Path(root)  # this interpreter lies elsewhere


def die_after(done: str) -> None:
    """The power cut."""
    if done == step:
        os.kill(os.getpid(), signal.SIGKILL)


applying.apply_update = partial(applying.apply_update, on_step=die_after)
applying.roll_back = partial(applying.roll_back, on_step=die_after)
from neuroshard.cli.main import main  # noqa: E402 - after what it imports was prepared

sys.argv = ["neuroshard", "update", *arguments]
main()
