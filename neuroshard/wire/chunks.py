"""The body of a frame as it arrives: chunks in any order, each one verified before it counts."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
from blake3 import blake3

from neuroshard.wire.frame import DamagedChunkError, Frame, MalformedFrameError, TensorPart
from neuroshard.wire.head import CHUNK_BYTES, FrameHead


class ChunkCheck:
    """The check of one chunk in the memory of a body, which may run in any thread while nobody writes there."""

    def __init__(self, index: int, data: memoryview, digest: bytes) -> None:
        self.index = index
        self._data = data
        self._digest = digest
        self._is_good: bool | None = None

    @property
    def byte_count(self) -> int:
        """Of the chunk."""
        return len(self._data)

    def run(self) -> None:
        """Hash the chunk."""
        self._is_good = blake3(self._data).digest() == self._digest

    def end(self) -> None:
        """Let go of the memory. Raises DamagedChunkError unless it is what was promised, ValueError before `run`."""
        if self._is_good is None:
            raise ValueError(f"chunk {self.index} was not checked")
        self._data.release()
        if not self._is_good:
            raise DamagedChunkError(self.index)


class ChunkAssembly:
    """Memory for one body and a record of which chunks are in it.

    A chunk comes whole with `accept`, or is written into the memory itself: inside `receiving(index)`, or between
    `lend(index)` and `check(index)`, whose result `settle` takes.
    The memory (head.body_bytes) is allocated here and nowhere else.
    """

    def __init__(self, head: FrameHead) -> None:
        self._head = head
        # Not a bytearray: zeroing it costs page faults before a byte came, and a peer that never sends would hold real
        # memory. What is not verified is never read, so what stood there before does not matter.
        self._body = np.empty(head.body_bytes, np.uint8).data
        self._missing = set(range(len(head.chunk_digests)))
        self._lent: set[int] = set()

    @property
    def head(self) -> FrameHead:
        """The head this body belongs to."""
        return self._head

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is here."""
        return not self._missing

    def missing(self) -> tuple[int, ...]:
        """Indices of the chunks that are not here yet, ascending; those being received count too."""
        return tuple(sorted(self._missing))

    def accept(self, index: int, data: bytes | bytearray | memoryview) -> bool:
        """Take a whole chunk; False when it is here or being received already, then `data` is not looked at.

        Raises IndexError, MalformedFrameError for a wrong length or DamagedChunkError; the chunk then stays missing.
        """
        size = self._head.chunk_bytes(index)
        if index not in self._missing or index in self._lent:
            return False
        if len(data) != size:
            raise MalformedFrameError(f"Chunk {index} of a frame has {len(data)} bytes; it needs {size}.")
        self._verify(index, data)
        start = index * CHUNK_BYTES
        self._body[start : start + size] = data
        self._missing.discard(index)
        return True

    @contextmanager
    def receiving(self, index: int) -> Generator[memoryview]:
        """The memory of a missing chunk, to be filled inside the block; verified when it ends, given back if it raises.

        Raises IndexError, ValueError for a chunk that is here or being received, or at the end DamagedChunkError; the
        chunk then stays missing.
        """
        memory = self.lend(index)
        try:
            with memory as view:
                yield view
                self._verify(index, view)
        finally:
            self._lent.discard(index)
        self._missing.discard(index)

    def lend(self, index: int) -> memoryview:
        """The memory of a missing chunk, to be filled and then checked.

        Raises IndexError, ValueError for a chunk that is here or being received.
        """
        view = self._memory_of(index)
        if index not in self._missing or index in self._lent:
            raise ValueError(f"chunk {index} is here or being received already")
        self._lent.add(index)
        return view

    def check(self, index: int) -> ChunkCheck:
        """The check of a chunk that was lent and is filled. Raises ValueError for one that was not lent."""
        if index not in self._lent:
            raise ValueError(f"chunk {index} is not being received")
        return ChunkCheck(index, self._memory_of(index), self._head.chunk_digests[index])

    def settle(self, check: ChunkCheck) -> None:
        """A check has run. Raises DamagedChunkError; the chunk then stays missing."""
        self._lent.discard(check.index)
        check.end()
        self._missing.discard(check.index)

    def frame(self) -> Frame:
        """The whole frame; its tensors are writable views of the one body. Raises MalformedFrameError if incomplete."""
        if self._missing:
            raise MalformedFrameError(f"A frame lacks {len(self._missing)} of {len(self._head.chunk_digests)} chunks.")
        start = 0
        parts: list[TensorPart] = []
        for spec in self._head.specs:
            parts.append(TensorPart(spec, self._body[start : start + spec.byte_count]))
            start += spec.byte_count
        return Frame(self._head.kind, self._head.header, tuple(parts))

    def _memory_of(self, index: int) -> memoryview:
        size = self._head.chunk_bytes(index)
        return self._body[index * CHUNK_BYTES : index * CHUNK_BYTES + size]

    def _verify(self, index: int, data: bytes | bytearray | memoryview) -> None:
        if blake3(data).digest() != self._head.chunk_digests[index]:
            raise DamagedChunkError(index)
