"""`neuroshard update ...` as an installed version runs it, killed after STEP when asked.

STEP VERSION ROOT ARGUMENTS...
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import neuroshard
from neuroshard.cli import update_node
from neuroshard.config import folders as program
from neuroshard.update import applying, checking

step, version, root, *arguments = sys.argv[1:]
neuroshard.__version__ = version
if "TEST_ROOT" in os.environ:  # the root of trust that this version was built with
    checking.release_root = os.environ["TEST_ROOT"].encode
program.installation_root = lambda version_folder=None: Path(root)  # this interpreter lies elsewhere


def dying(change: Callable[..., applying.Change]) -> Callable[..., applying.Change]:
    """The same, with a power cut after the step."""

    def changed(*values: object, on_step: applying.OnStep, **named: object) -> applying.Change:
        def die_after(done: str) -> None:
            on_step(done)
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)

        return change(*values, on_step=die_after, **named)

    return changed


applying.apply_update = dying(applying.apply_update)
applying.roll_back = dying(applying.roll_back)
update_node.STOP_SECONDS = float(os.environ.get("STOP_SECONDS", update_node.STOP_SECONDS))
if "UNIT" in os.environ:  # what no process of a test belongs to
    update_node._unit_of = lambda pid: os.environ["UNIT"]
from neuroshard.cli.main import main  # noqa: E402 - after what it imports was prepared

sys.argv = ["neuroshard", "update", *arguments]
main()
