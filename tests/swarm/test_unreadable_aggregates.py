"""Voters that lie together end a step with bytes that nobody can read: whoever hears of it does not apply them."""

from __future__ import annotations

import pytest
from msgspec import structs

from neuroshard.consensus.effects import Complete
from neuroshard.consensus.round_machine import RoundStateMachine
from neuroshard.consensus.round_messages import AggregateSent, CertificateSaid, Phase, Quorum, Vote
from neuroshard.consensus.slices import digest_of
from tests.worlds.rounds import World, signed_as

SLICE, NO_SLICE = b"r" * 32, b"r" * 65  # the world's slices have 64 bytes at most


def asker() -> tuple[World, RoundStateMachine]:
    world = World("abc")
    world.ask_for_the_end(world.proposer(0))
    (machine,) = world.nodes[world.proposer(0)].machines.values()
    return world, machine


def certificate_of(machine: RoundStateMachine, slices: tuple[bytes, ...]) -> Quorum:
    """By all voters but the asker, who are a quorum."""
    step, own = machine.setting.step, machine.setting.member
    digests = tuple(digest_of(one).hex() for one in slices)
    members = tuple(sorted(step.committee.members))
    value = structs.replace(
        step.first_value(), round_id="0" * 64, aggregate=digests, members=members, next_root="1" * 64, sequences=1
    )
    said = Vote(step.id, 0, Phase.COMMIT, value.digest)
    votes = tuple(signed_as(member, said) for member in members if member != own)
    return Quorum(value, 0, Phase.COMMIT, votes)


def ends(machine: RoundStateMachine, slices: tuple[bytes, ...]) -> bool:
    certificate, sender = certificate_of(machine, slices), max(machine.setting.step.seats)
    effects = machine.hear(sender, CertificateSaid(certificate), 0.0)
    sent = AggregateSent(certificate.value.digest, dict(enumerate(slices)))
    effects += machine.hear(sender, sent, 1.0)
    return any(isinstance(effect, Complete) for effect in effects)


UNREADABLE = [(SLICE, NO_SLICE, SLICE), (SLICE,) * 2, (SLICE,) * 4, ()]


@pytest.mark.parametrize(("slices", "is_readable"), [((SLICE,) * 3, True), *((slices, False) for slices in UNREADABLE)])
def test_a_step_ends_only_with_an_aggregate_that_can_be_read(slices: tuple[bytes, ...], is_readable: bool) -> None:
    world, machine = asker()
    assert world.plan.count == 3
    assert ends(machine, slices) is is_readable
