"""What others say before this node enters a round is kept: the newest, of a bounded number of nodes, in few bytes."""

from __future__ import annotations

from neuroshard.consensus.round_messages import MAX_CALLED, AggregateWanted
from neuroshard.consensus.round_runner import MOST_BYTES, MOST_MESSAGES, MessageBuffer
from neuroshard.types import NodeId

SENDER = NodeId("a")


def message(number: int) -> AggregateWanted:
    return AggregateWanted("step", "value", (number,))


def heard_of(heard: MessageBuffer, node: NodeId = SENDER) -> list[int]:
    return [said.slices[0] for sender, said in heard if sender == node and isinstance(said, AggregateWanted)]


def test_of_each_node_the_newest_messages_are_kept() -> None:
    heard = MessageBuffer()
    for number in range(MOST_MESSAGES + 3):
        heard.keep(SENDER, message(number), 1, counts=True)
    assert heard_of(heard) == list(range(3, MOST_MESSAGES + 3))


def test_large_messages_push_out_those_before_them_and_nobody_elses() -> None:
    heard = MessageBuffer()
    heard.keep(NodeId("b"), message(7), 1, counts=True)
    for number in range(4):
        heard.keep(SENDER, message(number), MOST_BYTES // 2, counts=True)
    assert heard_of(heard) == [2, 3]
    heard.keep(SENDER, message(4), MOST_BYTES + 1, counts=True)
    assert heard_of(heard) == []
    assert heard_of(heard, NodeId("b")) == [7]


def test_of_too_many_nodes_who_was_silent_longest_is_forgotten() -> None:
    heard = MessageBuffer()
    for number in range(MAX_CALLED):
        heard.keep(NodeId(f"n{number}"), message(number), 1, counts=True)
    heard.keep(NodeId("n0"), message(0), 1, counts=True)
    heard.keep(NodeId("new"), message(0), 1, counts=True)
    nodes = {sender for sender, _ in heard}
    assert len(nodes) == MAX_CALLED
    assert NodeId("n1") not in nodes
    assert {NodeId("n0"), NodeId("new")} <= nodes


def test_no_number_of_free_names_displaces_a_node_that_counts() -> None:
    heard = MessageBuffer()
    heard.keep(SENDER, message(7), 1, counts=True)
    for number in range(200):
        heard.keep(NodeId(f"free {number}"), message(0), 1, counts=False)
    assert heard_of(heard) == [7]
    assert [node for node, _ in heard] == [SENDER, *(f"free {number}" for number in range(180, 200))]
