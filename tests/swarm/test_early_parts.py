"""What comes before the proposal of its round is kept for it, up to a limit that no number of senders moves."""

from __future__ import annotations

from dataclasses import replace

from neuroshard.consensus.round_messages import MAX_MEMBERS, ContributionSent
from neuroshard.consensus.slices import SlicePlan
from neuroshard.consensus.views import EARLY_OF_EACH, EARLY_SLICES_OF_ALL, Views
from neuroshard.types import NodeId
from tests.worlds.rounds import World

ROUND = "ab" * 32


def views(count: int, *, is_open: bool = False) -> Views:
    """Of a member whose vectors have so many slices."""
    world = World("abc", plan=SlicePlan(count * 4096), is_open=is_open)
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


def test_two_hundred_free_names_displace_nothing_that_a_seat_has_sent() -> None:
    """The results of a reducer are many slices, and each name sends a few."""
    count = 64
    kept = views(count, is_open=True)
    for seat in map(NodeId, "bc"):
        kept.keep_early(seat, whole_contribution(seat, count), ROUND)
    for number in range(200):
        name = NodeId(f"free {number}")
        kept.keep_early(name, whole_contribution(name, 8), ROUND)
    found = {sender: len(message.slices) for sender, message in kept.take_early(ROUND) if message}  # type: ignore[union-attr]
    assert [found[NodeId(seat)] for seat in "bc"] == [count, count]
    assert len(found) > 2


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
