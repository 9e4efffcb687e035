"""Where the frozen program begins (see neuroshard.spec): the `neuroshard` command, also for the processes it starts."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import MutableMapping


def restore_library_path(environment: MutableMapping[str, str]) -> None:
    """Undo what the frozen program's loader set for itself: a browser must not find our libraries before its own."""
    original = environment.pop("LD_LIBRARY_PATH_ORIG", None)
    if original is not None:
        environment["LD_LIBRARY_PATH"] = original
    else:
        environment.pop("LD_LIBRARY_PATH", None)


if __name__ == "__main__":
    restore_library_path(os.environ)
    multiprocessing.freeze_support()  # a worker process of ours starts here again, with arguments of Python's own
    from neuroshard.cli.main import main

    main()
