"""Votes as they come in: who said what, in which view. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from neuroshard.swarm.certified.bodies import Phase, Value, Vote
from neuroshard.swarm.certified.messages import Quorum, Signed
from neuroshard.swarm.certified.roster import Step
from neuroshard.types import NodeId

MAX_VIEWS = 64  # whose votes are kept, of each voter the newest: a liar's votes push out its own only


class Ballots:
    """The votes of one step. Of each voter the first one of a phase and view counts."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._votes: dict[tuple[int, Phase], dict[NodeId, Signed[Vote]]] = {}

    def add(self, signed: Signed[Vote]) -> bool:
        """Whether it is a voter's, and new."""
        vote = signed.body
        if vote.step_id != self._step.id or signed.member not in self._step.roster.members:
            return False
        said = self._votes.setdefault((vote.view, vote.phase), {})
        if signed.member.node_id in said:
            return False
        said[signed.member.node_id] = signed
        own = sorted(key for key, of_all in self._votes.items() if signed.member.node_id in of_all)
        for old in own[: -2 * MAX_VIEWS]:
            del self._votes[old][signed.member.node_id]
            if not self._votes[old]:
                del self._votes[old]
        return True

    def other_vote(self, signed: Signed[Vote]) -> Signed[Vote] | None:
        """The vote for another value that this voter gave in the same phase and view: nobody honest does that."""
        vote = signed.body
        first = self._votes.get((vote.view, vote.phase), {}).get(signed.member.node_id)
        is_other = first is not None and vote.step_id == self._step.id and first.body.value != vote.value
        return first if is_other else None

    def decided(self, view: int, phase: Phase) -> str | None:
        """The value (hex digest) that a quorum has voted for."""
        counts: dict[str, int] = {}
        for signed in self._votes.get((view, phase), {}).values():
            counts[signed.body.value] = counts.get(signed.body.value, 0) + 1
        return next((value for value, count in counts.items() if count >= self._step.quorum), None)

    def committed(self) -> tuple[int, str] | None:
        """View and value of a quorum of commits in any view."""
        found = ((view, self.decided(view, phase)) for view, phase in self._votes if phase is Phase.COMMIT)
        return next(((view, value) for view, value in found if value is not None), None)

    def quorum(self, view: int, phase: Phase, value: Value) -> Quorum:
        """The votes for this value."""
        return Quorum(value, view, phase, tuple(self.of(view, phase, value.digest)))

    def of(self, view: int, phase: Phase, value: str) -> Iterable[Signed[Vote]]:
        """Who voted for this value (hex digest)."""
        said = self._votes.get((view, phase), {})
        return [said[node] for node in sorted(said) if said[node].body.value == value]
