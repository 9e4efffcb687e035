"""The body of a frame as it arrives: chunks in any order, each one verified before it counts."""

from __future__ import annotations

from blake3 import blake3

from neuroshard.wire.frame import DamagedChunkError, Frame, MalformedFrameError, TensorPart
from neuroshard.wire.head import CHUNK_BYTES, FrameHead


class ChunkAssembly:
    """Memory for one body and a record of which chunks are in it.

    A chunk comes whole with `accept`, or into the memory itself: fill `receive_buffer(index)`, then `commit(index)`.
    The memory (head.body_bytes) is allocated here and nowhere else.
    """

    def __init__(self, head: FrameHead) -> None:
        self._head = head
        self._body = bytearray(head.body_bytes)
        self._missing = set(range(len(head.chunk_digests)))
        self._lent: dict[int, memoryview] = {}

    @property
    def head(self) -> FrameHead:
        """The head this body belongs to."""
        return self._head

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is here."""
        return not self._missing

    def missing(self) -> tuple[int, ...]:
        """Indices of the chunks that are not here yet, ascending; lent ones count as missing."""
        return tuple(sorted(self._missing))

    def accept(self, index: int, data: bytes | bytearray | memoryview) -> bool:
        """Take a whole chunk; False when it was here already or is lent, then `data` is not looked at.

        Raises IndexError, MalformedFrameError for a wrong length or DamagedChunkError; the chunk then stays missing.
        """
        size = self._head.chunk_bytes(index)
        if index not in self._missing or index in self._lent:
            return False
        if len(data) != size:
            raise MalformedFrameError(f"Chunk {index} of a frame has {len(data)} bytes; it needs {size}.")
        self._verify(index, data)
        self._view(index)[:] = data
        self._missing.discard(index)
        return True

    def receive_buffer(self, index: int) -> memoryview:
        """The memory of a missing chunk, lent until `commit` or `give_back`. Raises IndexError, or ValueError."""
        self._head.chunk_bytes(index)
        if index not in self._missing or index in self._lent:
            raise ValueError(f"chunk {index} is here or lent already")
        self._lent[index] = self._view(index)
        return self._lent[index]

    def commit(self, index: int) -> None:
        """The lent memory was filled. Raises DamagedChunkError; the chunk then stays missing."""
        with self._lent.pop(index) as view:
            self._verify(index, view)
        self._missing.discard(index)

    def give_back(self, index: int) -> None:
        """The lent memory will not be filled; somebody else may bring the chunk."""
        self._lent.pop(index).release()

    def frame(self) -> Frame:
        """The whole frame; its tensors are writable views of the one body. Raises MalformedFrameError if incomplete."""
        if self._missing:
            raise MalformedFrameError(f"A frame lacks {len(self._missing)} of {len(self._head.chunk_digests)} chunks.")
        body, start = memoryview(self._body), 0
        parts: list[TensorPart] = []
        for spec in self._head.specs:
            parts.append(TensorPart(spec, body[start : start + spec.byte_count]))
            start += spec.byte_count
        return Frame(self._head.kind, self._head.header, tuple(parts))

    def _view(self, index: int) -> memoryview:
        start = index * CHUNK_BYTES
        return memoryview(self._body)[start : start + self._head.chunk_bytes(index)]

    def _verify(self, index: int, data: bytes | bytearray | memoryview) -> None:
        if blake3(data).digest() != self._head.chunk_digests[index]:
            raise DamagedChunkError(index)
