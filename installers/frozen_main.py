"""Entry point of the frozen program (neuroshard.spec): the `neuroshard` command, and the processes that it starts."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import MutableMapping


def restore_library_path(environment: MutableMapping[str, str]) -> None:
    """Restore the library path that the loader of the frozen program changed: a browser needs its own libraries."""
    original = environment.pop("LD_LIBRARY_PATH_ORIG", None)
    if original is not None:
        environment["LD_LIBRARY_PATH"] = original
    else:
        environment.pop("LD_LIBRARY_PATH", None)


if __name__ == "__main__":
    restore_library_path(os.environ)
    multiprocessing.freeze_support()  # our worker processes start here too, with arguments from Python
    from neuroshard.cli.main import main

    main()
