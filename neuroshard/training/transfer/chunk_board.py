"""Which chunks of a snapshot are missing, who can give them and who has failed: plain bookkeeping of one download."""

from __future__ import annotations

from collections import Counter, deque
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
        self._givers = Counter(index for can in self._can.values() for index in can)
        self._orphans = {index for index in self.missing if not self._givers[index]}
        self._queues: dict[NodeId, deque[int]] = {}  # what each donor may give, the rarest first; some not any more
        self._line_up()
        self._failures: dict[NodeId, int] = {}
        self.troubles: list[str] = []  # why donors were given up

    @property
    def is_done(self) -> bool:
        """Whether everything is here."""
        return not self.missing

    @property
    def is_hopeless(self) -> bool:
        """Whether there is a missing chunk that no donor can give."""
        return bool(self._orphans)

    def has(self, donor: NodeId) -> bool:
        """Whether a donor was not given up."""
        return donor in self._can

    def take(self, donor: NodeId) -> int | None:
        """A chunk for this donor to give now; None when there is none at present. The rarest ones first."""
        queue = self._queues.get(donor, deque())
        while queue:
            index = queue.popleft()
            if index in self._waiting:
                self._waiting.discard(index)
                return index
        return None

    def arrived(self, donor: NodeId, index: int) -> None:
        """A chunk is here."""
        self.missing.discard(index)
        self._orphans.discard(index)
        self._failures.pop(donor, None)

    def failed(self, donor: NodeId, index: int, trouble: str) -> None:
        """A donor did not give a chunk; after a few failures in a row it is given up."""
        self._put_back(index)
        self._failures[donor] = self._failures.get(donor, 0) + 1
        if self._failures[donor] >= TRIES:
            self.give_up(donor, trouble)

    def give_up(self, donor: NodeId, trouble: str, index: int | None = None) -> None:
        """Ask a donor for nothing more; `index` is what it was asked for."""
        if index is not None:
            self._put_back(index)
        could = self._can.pop(donor, None)
        if could is not None:
            self.troubles.append(f"{donor}: {trouble}")
            self._givers.subtract(could)
            self._orphans |= {index for index in could & self.missing if not self._givers[index]}
            self._line_up()

    def _put_back(self, index: int) -> None:
        """Nobody fetches it at the moment: it is the next one of all who can give it."""
        self._waiting.add(index)
        for donor, can in self._can.items():
            if index in can:
                self._queues[donor].appendleft(index)

    def _line_up(self) -> None:
        """What is waiting, for every donor in the order of `take`; again only when a donor is given up."""
        self._queues = {
            donor: deque(sorted(can & self._waiting, key=lambda index: (self._givers[index], index)))
            for donor, can in self._can.items()
        }
