"""The protocols of a place for data sets, for reading and for writing, and the names allowed in it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from neuroshard.errors import ConflictError

MAX_OBJECT_BYTES = 256 * 1024 * 1024  # the largest shard has half of it
Version = NewType("Version", str)  # of one object: other content, other version


class Condition(Enum):
    """What must be there before a write that names no version."""

    ANY = "any"  # or nothing
    ABSENT = "absent"


ExpectedVersion = Condition | Version


@dataclass(frozen=True)
class StoredObject:
    """An object as it was read."""

    content: bytes
    version: Version


class ObjectReader(Protocol):
    """Named objects. Names are relative, with forward slashes."""

    @property
    def description(self) -> str:
        """The folder or URL, for people."""
        ...

    def read(self, name: str, max_bytes: int) -> StoredObject | None:
        """The object, or None when there is none of this name.

        Raises DataError, before anything is read, when it has more than `max_bytes`; StorageError when it cannot be
        read; DataUnavailableError when the place does not answer now.
        """
        ...


class ObjectStore(ObjectReader, Protocol):
    """Objects that can be written too, each replaced as a whole."""

    def write(self, name: str, content: bytes, *, expected: ExpectedVersion = Condition.ANY) -> Version:
        """Write an object durably: who reads it sees what was there before, or all of `content`.

        Raises ConflictError when what is there is not as `expected`, and then writes nothing; DiskFullError or
        StorageError when it cannot be written; DataUnavailableError when the place does not answer now.
        """
        ...


def put_once(store: ObjectStore, name: str, content: bytes) -> Version:
    """Write an object that never changes once it is published; the same content that is there already is as good.

    What an interrupted writer left under this name is replaced. Raises ConflictError when it changes meanwhile.
    """
    try:
        return store.write(name, content, expected=Condition.ABSENT)
    except ConflictError:
        return put_current(store, name, content, max_bytes=MAX_OBJECT_BYTES)


def put_current(store: ObjectStore, name: str, content: bytes, *, max_bytes: int) -> Version:
    """Write an object unless it has this content already. Raises ConflictError when it changes meanwhile."""
    there = store.read(name, max_bytes)
    if there is not None and there.content == content:
        return there.version
    return store.write(name, content, expected=Condition.ABSENT if there is None else there.version)


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
