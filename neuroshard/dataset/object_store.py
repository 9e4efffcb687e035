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
Version = NewType("Version", str)  # of one object: other content has another version


class Condition(Enum):
    """The state that a write without a version requires."""

    ANY = "any"  # or nothing
    ABSENT = "absent"


ExpectedVersion = Condition | Version


@dataclass(frozen=True)
class StoredObject:
    """An object's content and version, as read."""

    content: bytes
    version: Version


class ObjectReader(Protocol):
    """Named objects. Names are relative, with forward slashes."""

    @property
    def description(self) -> str:
        """The folder or URL, for display."""
        ...

    def read(self, name: str, max_bytes: int) -> StoredObject | None:
        """Return the object, or None when no object has this name.

        Raises DataError, before it reads anything, when the object has more than `max_bytes`; StorageError when it
        cannot be read; DataUnavailableError when the place does not answer now.
        """
        ...


class ObjectStore(ObjectReader, Protocol):
    """Objects that can be written too, each replaced as a whole."""

    def write(self, name: str, content: bytes, *, expected: ExpectedVersion = Condition.ANY) -> Version:
        """Write an object durably: a reader sees the previous content or all of `content`.

        Raises ConflictError, and writes nothing, when the present object is not as `expected`; DiskFullError or
        StorageError when it cannot be written; DataUnavailableError when the place does not answer now.
        """
        ...


def put_once(store: ObjectStore, name: str, content: bytes) -> Version:
    """Write an object that never changes once published; an existing object with the same content is kept.

    An interrupted writer's object under this name is replaced. Raises ConflictError when it changes meanwhile.
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
    writes its own state (checkpoints.json) with `expected` set to the version that it read or wrote last, so that a
    populator that lost its claim cannot continue where another one works.
    """

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield all object names that begin with `prefix`, sorted. Raises StorageError or DataUnavailableError."""
        ...

    def claim(self, purpose: str) -> AbstractContextManager[None]:
        """Exclude other writers until the context ends; `purpose` is shown to those that are refused.

        The claim of a process that died ends by itself. Raises ConflictError, naming the holder, when another process
        has it.
        """
        ...

    def close(self) -> None:
        """Release connections; a second call does nothing."""
        ...


def checked_name(name: str) -> str:
    """Return the name if it stays inside any folder. Raises ValueError."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not the name of an object")
    return name


def holder_name(purpose: str) -> str:
    """Describe this process as the holder of a claim, for others."""
    return f"{purpose} (process {os.getpid()} on {socket.gethostname()})"
