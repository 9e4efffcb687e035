"""What comes before the proposal of its round is kept for it, up to a limit that no number of senders moves."""

from __future__ import annotations

from dataclasses import replace

from neuroshard.consensus.round_messages import MAX_MEMBERS, ContributionSent
from neuroshard.consensus.slices import SlicePlan
from neuroshard.consensus.views import EARLY_OF_EACH, EARLY_SLICES_OF_ALL, Views
from neuroshard.types import NodeId
from tests.worlds.rounds import World

ROUND = "ab" * 32


def views(count: int) -> Views:
    """Of a member whose vectors have so many slices."""
    world = World("abc", plan=SlicePlan(count * 4096))
    node = world.proposer(0)
    world.ask_for_the_end(node)
    (machine,) = world.nodes[node].machines.values()
    return Views(replace(machine.setting, plan=world.plan))


def whole_contribution(author: NodeId, count: int) -> ContributionSent:
    return ContributionSent(ROUND, author, (), dict.fromkeys(range(count), b"part"))


def test_strangers_in_any_number_leave_room_for_a_member_that_sends_little() -> None:
    count, honest = 64, NodeId("honest")
    kept = views(count)
    kept.keep_early(honest, ContributionSent(ROUND, honest, (), {0: b"part"}), ROUND)
    for number in range(50):
        liar = NodeId(f"liar {number}")
        kept.keep_early(liar, whole_contribution(liar, count), ROUND)
    found = list(kept.take_early(ROUND))
    slices = sum(len(message.slices) for _, message in found if isinstance(message, ContributionSent))
    assert slices <= EARLY_SLICES_OF_ALL * count + EARLY_OF_EACH * MAX_MEMBERS
    assert honest in {sender for sender, _ in found}


def test_messages_without_slices_are_not_kept_without_end_either() -> None:
    kept = views(1)
    for number in range(1000):
        sender = NodeId(f"liar {number}")
        kept.keep_early(sender, ContributionSent(ROUND, sender, (), {}), ROUND)
    assert len(list(kept.take_early(ROUND))) <= EARLY_SLICES_OF_ALL + EARLY_OF_EACH * MAX_MEMBERS


def test_all_that_the_members_of_a_large_group_send_is_kept() -> None:
    kept = views(1)  # two of them reduce its one slice
    for number in range(MAX_MEMBERS):
        sender = NodeId(f"member {number}")
        kept.keep_early(sender, whole_contribution(sender, 1), ROUND)
    assert len(list(kept.take_early(ROUND))) == MAX_MEMBERS
