"""Which of the programs that the owner named run now."""

from __future__ import annotations

import os
from collections.abc import Iterable

import psutil


def running_of(wanted: Iterable[str]) -> frozenset[str]:
    """Those of the names under which a program runs: its file's name, large and small letters alike, without .exe.

    This process itself does not count. A process that ends while it is looked at, or hides, counts as gone.
    """
    names = {plain_name(name): name for name in wanted}
    found: set[str] = set()
    for process in psutil.process_iter():
        try:
            name = names.get(plain_name(process.name()))
        except psutil.Error:
            continue
        if name is not None and process.pid != os.getpid():
            found.add(name)
    return frozenset(found)


def plain_name(name: str) -> str:
    """A program's name as it is compared."""
    return name.strip().lower().removesuffix(".exe")
