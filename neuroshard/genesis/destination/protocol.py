"""What a populator needs of the place that it publishes to."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from neuroshard.data.genesis.object_store import ObjectStore

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*", re.ASCII)


class Destination(ObjectStore, Protocol):
    """An object store that one populator at a time may write to.

    A GenesisWriter writes its shards, pages and manifest through it. A populator does all its work under `claim`, and
    writes its own state (checkpoints.json) with `expected` set to the version that it read or wrote last, so that even
    one whose claim was lost cannot go on where another one works.
    """

    def names(self, prefix: str = "") -> Iterator[str]:
        """Names of all objects that begin with `prefix`, sorted. Raises StorageError or DataUnavailableError."""
        ...

    def claim(self, purpose: str) -> AbstractContextManager[None]:
        """Keep all others from writing until the context ends; `purpose` is told to who is kept out.

        The claim of a process that died ends by itself. Raises ConflictError, naming the holder, when somebody has it.
        """
        ...

    def close(self) -> None:
        """Release connections; a second call does nothing."""
        ...


def checked_name(name: str) -> str:
    """The name, if it stays inside any folder. Raises ValueError."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no name of an object")
    return name


def holder_name(purpose: str) -> str:
    """How a claim of this process is told to others."""
    return f"{purpose} (process {os.getpid()} on {socket.gethostname()})"
