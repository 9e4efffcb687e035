"""A driver's ledger: who does which stage of which microbatch, how far it is, and what a dead hop leaves undone.

Plain bookkeeping, bounded, of one driver. Every stage of a microbatch has one hop at a time, and in the end exactly one
whose work counts: what another one answers after it was replaced is late and counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

from neuroshard.errors import NeuroShardError
from neuroshard.types import NodeId

MOST_MICROBATCHES = 4096


class LedgerFullError(NeuroShardError):
    """Sessions were not closed."""


class Phase(IntEnum):
    """How far a hop is with its stage of a microbatch."""

    NOTHING = 0  # it was named; a replacement needs the inputs
    FORWARD_DONE = 1  # its output was used; a replacement repeats the forward pass for itself
    GRADIENT_SENT = 2  # a replacement repeats the forward pass and takes the gradient again
    COUNTED = 3  # it has accumulated its part: nobody does it again


@dataclass(frozen=True, order=True)
class Place:
    """One stage of one microbatch."""

    session: int
    microbatch: int
    stage: int


@dataclass(frozen=True)
class Owed:
    """Work that a hop was named for and that does not count yet."""

    place: Place
    phase: Phase


@dataclass(frozen=True)
class LedgerCounts:
    """Since the ledger began; closing sessions changes nothing."""

    counted: int = 0  # stages of microbatches
    replacements: int = 0  # a hop was named in another one's place
    approximate: int = 0  # of those, after its output was used, and its weights are not known to be the same
    late: int = 0  # answers of hops that had been replaced, or for what was forgotten
    given_up: int = 0  # microbatches


@dataclass
class _Work:
    """The hop named for a place."""

    hop: NodeId
    phase: Phase = Phase.NOTHING
    root: str | None = None  # of the weights behind the first output, which the next stages used; None: no output yet


@dataclass
class _Session:
    microbatches: dict[int, dict[int, _Work]] = field(default_factory=dict[int, dict[int, _Work]])  # number: stage
    asked: set[tuple[int, NodeId]] = field(default_factory=set[tuple[int, NodeId]])


class Ledger:
    """What one driver has under way."""

    def __init__(self, stage_count: int, most_microbatches: int = MOST_MICROBATCHES) -> None:
        self._stage_count = stage_count
        self._most = most_microbatches
        self._sessions: dict[int, _Session] = {}
        self._open = 0
        self._counts = LedgerCounts()

    @property
    def counts(self) -> LedgerCounts:
        """How much was done, and what happened on the way."""
        return self._counts

    def __len__(self) -> int:
        """Microbatches of sessions that are not closed."""
        return self._open

    def assign(self, place: Place, hop: NodeId) -> None:
        """Name the hop for a place, which replaces the one named before, if it is another one.

        Raises LedgerFullError, and ValueError for work that counts already: nobody does it again.
        """
        if not 0 <= place.stage < self._stage_count:
            raise ValueError(f"stage {place.stage} of {self._stage_count}")
        work = self._work(place)
        if work is None:
            self._opened(place)[place.stage] = _Work(hop)
        elif work.hop != hop:
            if work.phase is Phase.COUNTED:
                raise ValueError(f"{place} was done by {work.hop}")
            work.hop, work.phase = hop, Phase.NOTHING
            self._add(replacements=1)
        self._sessions[place.session].asked.add((place.stage, hop))

    def forward_done(self, place: Place, hop: NodeId, root: str = "") -> bool:
        """The hop gave its output, with weights of this root ("": unknown); False when it was late.

        What a replacement computes is approximate when its weights are not known to be those behind the first output,
        with which the next stages went on.
        """
        work = self._named(place, hop)
        if work is None:
            return False
        if work.phase is not Phase.NOTHING:
            return True  # said again
        work.phase = Phase.FORWARD_DONE
        if work.root is None:
            work.root = root
        else:  # by a replacement
            self._add(approximate=int(not root or root != work.root))
        return True

    def gradient_sent(self, place: Place, hop: NodeId) -> bool:
        """The hop is being sent the gradient of its output; False when it was replaced.

        Raises ValueError for a hop that did no forward pass.
        """
        work = self._named(place, hop)
        if work is None:
            return False
        if work.phase is Phase.NOTHING:
            raise ValueError(f"no forward pass by {hop} before the gradient of {place}")
        work.phase = max(work.phase, Phase.GRADIENT_SENT)
        return True

    def done(self, place: Place, hop: NodeId) -> bool:
        """The hop has accumulated its part, which counts from now on; False when it was late.

        Raises ValueError for a hop that got no gradient; the last stage makes its own.
        """
        work = self._named(place, hop)
        if work is None:
            return False
        if work.phase is Phase.COUNTED:
            return True  # said again
        if work.phase is not Phase.GRADIENT_SENT and place.stage != self._stage_count - 1:
            raise ValueError(f"no gradient was sent to {hop} for {place}")
        work.phase = Phase.COUNTED
        self._add(counted=1)
        return True

    def hop(self, place: Place) -> NodeId | None:
        """Who does or did a stage of a microbatch; None when nobody was named."""
        work = self._work(place)
        return None if work is None else work.hop

    def phase(self, place: Place) -> Phase:
        """How far its hop is."""
        work = self._work(place)
        return Phase.NOTHING if work is None else work.phase

    def route(self, session: int, microbatch: int) -> tuple[NodeId | None, ...]:
        """Who does or did each stage of a microbatch."""
        return tuple(self.hop(Place(session, microbatch, stage)) for stage in range(self._stage_count))

    def owed(self, hop: NodeId) -> tuple[Owed, ...]:
        """What is left undone when this hop is dead, in order."""
        return tuple(
            sorted(
                (
                    Owed(Place(number, microbatch, stage), work.phase)
                    for number, session in self._sessions.items()
                    for microbatch, works in session.microbatches.items()
                    for stage, work in works.items()
                    if work.hop == hop and work.phase is not Phase.COUNTED
                ),
                key=lambda owed: owed.place,
            )
        )

    def give_up(self, session: int, microbatch: int) -> None:
        """Nobody will do the rest of a microbatch; answers about it are late from now on."""
        known = self._sessions.get(session)
        if known is not None and known.microbatches.pop(microbatch, None) is not None:
            self._open -= 1
            self._add(given_up=1)

    def close(self, session: int) -> frozenset[tuple[int, NodeId]]:
        """Forget a session; every (stage, hop) that was asked for anything in it, to be told."""
        closed = self._sessions.pop(session, _Session())
        self._open -= len(closed.microbatches)
        return frozenset(closed.asked)

    def _work(self, place: Place) -> _Work | None:
        session = self._sessions.get(place.session)
        return None if session is None else session.microbatches.get(place.microbatch, {}).get(place.stage)

    def _named(self, place: Place, hop: NodeId) -> _Work | None:
        """The work of this hop; None, which is counted, when it is not the hop of this place."""
        work = self._work(place)
        if work is None or work.hop != hop:
            self._add(late=1)
            return None
        return work

    def _opened(self, place: Place) -> dict[int, _Work]:
        session = self._sessions.get(place.session)
        known = None if session is None else session.microbatches.get(place.microbatch)
        if known is not None:
            return known
        if self._open >= self._most:
            raise LedgerFullError(f"{self._open} microbatches are in the ledger.", "Close sessions first.")
        self._open += 1
        session = self._sessions.setdefault(place.session, _Session())
        return session.microbatches.setdefault(place.microbatch, {})

    def _add(
        self, *, counted: int = 0, replacements: int = 0, approximate: int = 0, late: int = 0, given_up: int = 0
    ) -> None:
        now = self._counts
        self._counts = replace(
            now,
            counted=now.counted + counted,
            replacements=now.replacements + replacements,
            approximate=now.approximate + approximate,
            late=now.late + late,
            given_up=now.given_up + given_up,
        )
