"""Where the frozen program begins (see neuroshard.spec): the `neuroshard` command, also for the processes it starts."""

from __future__ import annotations

import multiprocessing

if __name__ == "__main__":
    multiprocessing.freeze_support()  # a worker process of ours starts here again, with arguments of Python's own
    from neuroshard.cli.main import main

    main()
