"""Which chunks of a snapshot are missing, who can give them and who has failed: plain bookkeeping of one download."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from neuroshard.types import NodeId

TRIES = 3  # in a row, before a donor is given up


class ChunkBoard:
    """A donor can give the chunks whose digests are the same in its own snapshot."""

    def __init__(
        self, digests: Sequence[bytes], donors: Mapping[NodeId, Sequence[bytes]], held: Iterable[int] = ()
    ) -> None:
        """`donors` with the digests of their snapshots; `held` are the chunks that are here already."""
        self.missing = set(range(len(digests))) - set(held)
        self._waiting = set(self.missing)  # those of the missing that nobody fetches at the moment
        self._can = {
            donor: {index for index in self.missing if index < len(own) and own[index] == digests[index]}
            for donor, own in donors.items()
        }
        self._failures: dict[NodeId, int] = {}
        self.troubles: list[str] = []  # why donors were given up

    @property
    def is_done(self) -> bool:
        """Whether everything is here."""
        return not self.missing

    @property
    def is_hopeless(self) -> bool:
        """Whether there is a missing chunk that no donor can give."""
        can = set[int]().union(*self._can.values())
        return not self.missing <= can

    def has(self, donor: NodeId) -> bool:
        """Whether a donor was not given up."""
        return donor in self._can

    def take(self, donor: NodeId) -> int | None:
        """A chunk for this donor to give now; None when there is none at present. The rarest ones first."""
        offered = self._can.get(donor, set()) & self._waiting
        if not offered:
            return None
        index = min(offered, key=lambda i: (sum(i in can for can in self._can.values()), i))
        self._waiting.discard(index)
        return index

    def arrived(self, donor: NodeId, index: int) -> None:
        """A chunk is here."""
        self.missing.discard(index)
        self._failures.pop(donor, None)

    def failed(self, donor: NodeId, index: int, trouble: str) -> None:
        """A donor did not give a chunk; after a few failures in a row it is given up."""
        self._waiting.add(index)
        self._failures[donor] = self._failures.get(donor, 0) + 1
        if self._failures[donor] >= TRIES:
            self.give_up(donor, trouble)

    def give_up(self, donor: NodeId, trouble: str, index: int | None = None) -> None:
        """Ask a donor for nothing more; `index` is what it was asked for."""
        if index is not None:
            self._waiting.add(index)
        if self._can.pop(donor, None) is not None:
            self.troubles.append(f"{donor}: {trouble}")
