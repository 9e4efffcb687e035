"""What counts as this computer's work, and that a restart or a kill goes on from what was saved."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import trio
import trio.testing

from neuroshard.errors import StorageError
from neuroshard.host.contribution_recorder import FILE_NAME, SAVE_SECONDS, ContributionRecorder, WorkMeter, record_file
from neuroshard.status.board import Publisher, StatusBoard
from neuroshard.status.history import WorkDone
from neuroshard.status.snapshot import ModelStatus, NetworkStatus, NodeState, NodeStatus, TrainingStatus
from neuroshard.types import Architecture, LayerRange

pytestmark = pytest.mark.usefixtures("inline_threads")

START = 1_800_000_000.0
SHAPE = Architecture(64, 4, 4, 2, 160, 512, 64)


def seen(seconds: float, steps: int, *, state: NodeState = NodeState.TRAINING, sent: int = 0) -> NodeStatus:
    """A node that made a step of 500 tokens a second, and restored step 100 before."""
    return NodeStatus(
        version="0",
        started_at=START,
        time=START + seconds,
        uptime_seconds=seconds,
        state=state,
        model=ModelStatus(SHAPE, 1, LayerRange(0, 4), ()),
        training=TrainingStatus(steps=steps, tokens=steps * 500, loss_ema=5.0, batch_size=4),
        network=NetworkStatus(bytes_sent=sent),
    )


def test_only_what_was_trained_here_and_now_counts() -> None:
    meter = WorkMeter()
    looks = [
        seen(1, 0, state=NodeState.STARTING),
        seen(2, 100),  # restored
        seen(3, 102, sent=7_000),
        seen(4, 103, sent=9_000),
        seen(5, 103, sent=9_000, state=NodeState.PAUSED),
        replace(seen(6, 103, sent=9_000), is_standing_by=True),
    ]
    found = [meter.look(look) for look in looks]
    assert found == [
        None,
        WorkDone(START + 2, training_seconds=1.0),
        WorkDone(START + 3, 1_000, 2, bytes_sent=7_000, training_seconds=1.0, loss=5.0),
        WorkDone(START + 4, 500, 1, bytes_sent=2_000, training_seconds=1.0, loss=5.0),
        None,
        None,
    ]


def test_other_layers_a_step_back_and_a_sleep_are_no_work() -> None:
    meter = WorkMeter()
    meter.look(seen(1, 10))
    other = replace(seen(2, 900), model=ModelStatus(SHAPE, 1, LayerRange(2, 4), ()))
    assert meter.look(other) == WorkDone(START + 2, training_seconds=1.0)
    meter.look(seen(3, 10))
    assert meter.look(seen(4, 5)) == WorkDone(START + 4, training_seconds=1.0)
    slept = meter.look(seen(90_000, 5))
    assert slept is not None
    assert slept.training_seconds == 10.0


class Node:
    """A keeper of a folder and a board that it looks at, on a clock that jumps."""

    def __init__(self, folder: Path) -> None:
        self.board = StatusBoard(seen(0, 100))
        self.now = START
        self.keeper = ContributionRecorder(folder, self.board, Publisher(self.board), lambda: self.now)

    async def train(self, seconds: int) -> None:
        for second in range(1, seconds + 1):
            self.now = START + second
            contribution = self.board.current().contribution
            self.board.publish(replace(seen(second, 100 + second), contribution=contribution))
            await anyio.sleep(1)


def live(node: Node, seconds: int) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.keeper.run)
            await node.train(seconds)
            tasks.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def tokens_of(path: Path) -> int:
    record = record_file(path.parent).read()
    total = None if record is None else record.total
    return 0 if total is None else total.tokens


def test_the_record_goes_on_after_a_restart_and_is_published(tmp_path: Path) -> None:
    node = Node(tmp_path)
    live(node, 12)
    first = tokens_of(tmp_path / FILE_NAME)
    assert first in {10 * 500, 11 * 500}  # whoever looks first in the same second
    again = Node(tmp_path)
    live(again, 12)
    assert tokens_of(tmp_path / FILE_NAME) >= first + 10 * 500
    published = again.board.current().contribution.total
    assert published is not None
    assert published.tokens > first


def test_a_kill_costs_a_minute_at_most(tmp_path: Path) -> None:
    node = Node(tmp_path)
    saved: list[int] = []

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.keeper.run)
            await node.train(round(SAVE_SECONDS) * 2 + 30)
            saved.append(tokens_of(tmp_path / FILE_NAME))  # what a kill now would leave
            tasks.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert saved[0] >= (round(SAVE_SECONDS) * 2 - 2) * 500


def test_a_damaged_record_is_put_aside_beside_earlier_ones_and_told(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    told: list[str] = []
    for content in (b'{"format": 1, "to', b"\xff\x00 garbage"):
        path.write_bytes(content)
        told += Node(tmp_path).board.current().warnings
    assert all("cannot be read" in warning and "new record" in warning for warning in told)
    assert len(told) == 2
    assert (tmp_path / f"{FILE_NAME}.damaged").read_bytes() == b'{"format": 1, "to'
    assert (tmp_path / f"{FILE_NAME}.damaged-2").read_bytes() == b"\xff\x00 garbage"
    assert not path.exists()


def test_a_disk_that_refuses_is_told_once_and_nothing_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    with caplog.at_level(logging.WARNING):
        live(Node(folder), round(SAVE_SECONDS) * 3)
    assert caplog.text.count("cannot be saved") == 1


def test_a_record_that_cannot_be_read_is_not_set_aside(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        Node(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
