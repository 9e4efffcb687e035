"""A voter that only asks how a step has ended, as after a restart, hinders nobody who still works on it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neuroshard.consensus.chain import Step
from neuroshard.consensus.effects import Effect, RoundConfig, Say
from neuroshard.consensus.round_messages import (
    Intent,
    IntentSaid,
    NewView,
    NewViewSaid,
    ProposalSaid,
    VerifiedBody,
    commitment_of,
)
from tests.worlds.rounds import Envelope, Participant, World

DELAY_SECONDS, LONGEST_SECONDS = 5, 300


class DelayedWorld(World):
    """Every message takes a while, and the last voter to propose only asks: nobody calls it to the round."""

    def __init__(self) -> None:
        super().__init__("abcde")
        self.asker = self.proposer(4)
        self._on_the_way: list[tuple[float, Envelope]] = []

    def run(self) -> None:
        """Until all others have ended the step, or for `LONGEST_SECONDS`."""
        while self.now < LONGEST_SECONDS and not all(one.done for one in self.others()):
            self._send_off()
            arrived = [message for due, message in self._on_the_way if due <= self.now]
            self._on_the_way = [(due, message) for due, message in self._on_the_way if due > self.now]
            for message in arrived:
                self.pending.append(message)
                self.deliver(len(self.pending) - 1)
                self._send_off()
            self.advance(1)

    def others(self) -> list[Participant]:
        """Who works on the step."""
        return [one for node, one in self.nodes.items() if node != self.asker]

    def _send_off(self) -> None:
        self._on_the_way += [(self.now + DELAY_SECONDS, message) for message in self.pending]
        self.pending = []

    def _setting(self, one: Participant, step: Step) -> RoundConfig:
        return replace(super()._setting(one, step), expected=frozenset(self.nodes) - {self.asker})


@pytest.mark.parametrize("asks", [False, True])
def test_views_still_grow_and_the_step_ends(asks: bool) -> None:
    world = DelayedWorld()
    for one in world.others():
        world.start(one.member.node_id)
    if asks:
        world.ask_for_the_end(world.asker)
    world.run()
    assert len({root for one in world.others() for _, _, root in one.done}) == 1
    assert all(one.done for one in world.others())


def test_an_asker_whose_turn_comes_waits_for_the_others() -> None:
    world = World("abcdefg")
    asker = world.proposer(1)
    world.ask_for_the_end(asker)
    (machine,) = world.nodes[asker].machines.values()
    step = machine.setting.step
    effects = list[Effect]()
    others = [one.member for node, one in world.nodes.items() if node != asker]
    for member in others:
        intent = VerifiedBody.of(member, Intent(step.id, 1, commitment_of(()), 1, 1, 1, 1), b"x")
        new_view = VerifiedBody.of(member, NewView(step.id, 1, ()), b"x")
        for message in (IntentSaid(intent), NewViewSaid(new_view, None)):
            effects += machine.hear(member.node_id, message, 0.0)
    for second in range(60):
        effects += machine.tick(float(second))
    said = [effect.message for effect in effects if isinstance(effect, Say)]
    (proposal,) = [each for each in said if isinstance(each, ProposalSaid)]
    assert {one.member.node_id for one in proposal.intents} == {member.node_id for member in others}
