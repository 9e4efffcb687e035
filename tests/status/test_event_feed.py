"""The event feed says what happened between two snapshots, once, in a sentence with the right numbers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from

from neuroshard.status.board import Publisher, StatusBoard
from neuroshard.status.feed import KEPT_EVENTS
from neuroshard.status.pipeline import PipelineStage, PipelineStatus
from neuroshard.status.snapshot import (
    DilocoStatus,
    LearningVerdict,
    NodeState,
    NodeStatus,
    PeerStatus,
    TrainingStatus,
    VerificationStatus,
)
from neuroshard.types import LayerRange, NodeId, WalletId
from tests.worlds.statuses import training_status


class Story:
    """A node whose snapshots are published one after the other."""

    def __init__(self, status: NodeStatus | None = None) -> None:
        self.now = 1_000.0
        self.board = StatusBoard(status or training_status())
        self.publisher = Publisher(self.board, lambda: self.now)

    def change(self, seconds: float = 1.0, **parts: object) -> None:
        self.now += seconds
        self.publisher.change(**parts)

    @property
    def sentences(self) -> list[str]:
        return [event.sentence for event in self.board.current().feed]


def peer(name: str, layers: LayerRange | None = None) -> PeerStatus:
    return PeerStatus(NodeId(name), WalletId("ab" * 16), (), layers or LayerRange(0, 4), 6.0, 100.0, last_seen=1_000.0)


def stages(*holders: tuple[str, ...]) -> PipelineStatus:
    parts = (LayerRange(0, 2), LayerRange(2, 4))
    held = (tuple(map(NodeId, names)) for names in holders)
    found = tuple(PipelineStage(n, part, nodes) for n, (part, nodes) in enumerate(zip(parts, held, strict=True)))
    return PipelineStatus(found)


def test_computers_that_join_and_leave_are_told_with_the_number_present() -> None:
    story = Story()
    story.change(peers=(peer("a"),))
    story.change(peers=(peer("a"), peer("b"), peer("c")))
    story.change(peers=(peer("b"), peer("c")))
    assert story.sentences == [
        "A computer left: 3 computers in the run.",
        "2 computers joined: 4 computers in the run.",
        "A computer joined: 2 computers in the run.",
    ]


def test_a_departure_its_gap_and_the_move_are_one_event_that_keeps_its_time() -> None:
    story = Story(
        replace(training_status(steps=40), pipeline=stages(("me",), ("b",)), peers=(peer("b", LayerRange(2, 4)),))
    )
    story.change(peers=())
    left_at = story.now
    story.change(2.0, pipeline=stages(("me",), ()), state=NodeState.WAITING_FOR_STAGES)
    assert story.sentences == ["A computer left; layers 3 to 4 wait for another computer."]
    story.change(46.0, pipeline=stages(("me",), ("c",)), state=NodeState.TRAINING)
    assert story.sentences == ["A computer left; its layers moved; 48 s, no step lost."]
    assert story.board.current().feed[0].time == left_at


def test_steps_that_a_move_cost_are_counted() -> None:
    story = Story(replace(training_status(steps=40), pipeline=stages(("me",), ())))
    story.change(pipeline=stages(("me",), ("c",)), training=TrainingStatus(steps=39))
    assert story.sentences == ["The missing layers moved; 1 s, 1 step lost."]


def test_missing_layers_at_the_start_are_no_event_and_later_ones_name_no_departure() -> None:
    story = Story(replace(training_status(steps=0), pipeline=stages((), ())))
    story.change(pipeline=stages(("me",), ("me",)))
    assert story.sentences == []
    story.change(training=TrainingStatus(steps=3), pipeline=stages(("me",), ()))
    assert story.sentences == ["Layers 3 to 4 wait for another computer."]
    story.change(100.0, pipeline=stages(("me",), ("b",)))
    assert story.sentences == ["The missing layers moved; 2 min, no step lost."]


def test_a_pause_and_its_end_are_one_event() -> None:
    story = Story()
    story.change(state=NodeState.PAUSED, state_reason="Paused: this computer is on battery.")
    assert story.sentences == ["Paused: this computer is on battery."]
    story.change(200.0, state=NodeState.TRAINING, state_reason="Training.")
    assert story.sentences == ["Training resumed after 3 min."]


def test_rounds_in_a_row_are_one_event_and_a_lone_step_is_none() -> None:
    story = Story()
    story.change(diloco=DilocoStatus(outer_steps=1, members=1))
    for number in range(2, 5):
        story.change(diloco=DilocoStatus(outer_steps=number, members=3, successful_syncs=number))
    assert story.sentences == ["Rounds 2 to 4 combined the work of 3 computers."]


def test_the_verdict_and_the_alarm_are_told_when_they_change() -> None:
    story = Story()
    verified = VerificationStatus(training_verified=True, status=LearningVerdict.VERIFIED)
    for _ in range(3):
        story.change(verification=verified)
    checkpoints = story.board.current().checkpoints
    story.change(checkpoints=replace(checkpoints, alarm="The disk is full."))
    story.change(checkpoints=checkpoints)
    assert story.sentences == [
        "Checkpoints are saved again.",
        "The disk is full.",
        "The model is learning: verified on text that it never trains on.",
    ]


@given(lists(lists(sampled_from("abcdef"), unique=True), max_size=40), integers(0, 3))
def test_the_number_present_is_always_that_of_the_newest_snapshot(steps: list[list[str]], quiet: int) -> None:
    story = Story()
    for names in steps:
        before = story.board.current()
        story.change(peers=tuple(map(peer, names)))
        for _ in range(quiet):
            story.change(warnings=())
        after = story.board.current()
        if {one.node_id for one in before.peers} == set(names):
            assert after.feed is before.feed
        else:
            count = len(names) + 1
            assert f"{count} computer{'' if count == 1 else 's'} in the run." in after.feed[0].sentence
        assert len(after.feed) <= KEPT_EVENTS
