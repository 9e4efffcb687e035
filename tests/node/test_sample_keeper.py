"""A model writes its samples, keeps them through a restart, and leaves it be while it must not or cannot write."""

from __future__ import annotations

import logging
from pathlib import Path

import anyio
import pytest
import trio
import trio.testing

from neuroshard.errors import NotReadyError
from neuroshard.node.sample_texts import FOLDER, PARTIAL, RETRY_SECONDS, SampleSource, SampleTexts, SampleWriter
from neuroshard.status.board import Generate, GeneratedText, GenerationSummary, Publisher, StatusBoard
from neuroshard.status.history import SamplesStatus
from neuroshard.status.snapshot import NodeStatus
from neuroshard.training.text_generation import PROMPTS
from neuroshard.types import RunId
from tests.worlds.clock import at_once

RUN = RunId("ab" * 32)


class Model:
    """Makes ten steps a second of the clock's; writes its step."""

    def __init__(self, steps: int = 0) -> None:
        self.start = steps
        self.may_write = True
        self.failures: list[Exception] = []
        self.asked: list[Generate] = []

    @property
    def steps(self) -> int:
        return self.start + round(anyio.current_time() * 10)

    def look(self) -> SampleSource:
        return SampleSource(self.steps, self.may_write, self.steps * 0.1)

    async def generate(self, request: Generate) -> GenerationSummary:
        self.asked.append(request)
        await anyio.sleep(0.01)
        if self.failures:
            raise self.failures.pop()
        for piece in ("step ", str(self.steps)):
            request.sink(GeneratedText(piece, 1))
        return GenerationSummary(3, 2, "length")


def kept(folder: Path, model: Model | None, seconds: float) -> SamplesStatus:
    """What is published after a time with this model."""
    board = StatusBoard(NodeStatus(version="0", started_at=0.0, time=0.0))

    async def main() -> None:
        author = None if model is None else SampleWriter(model.look, model.generate)
        keeper = SampleTexts(folder, RUN, Publisher(board), author, monotonic=anyio.current_time, offload=at_once)
        with anyio.move_on_after(seconds):
            await keeper.run()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return board.current().samples


def test_a_model_writes_at_its_marks_and_is_heard_by_people(tmp_path: Path) -> None:
    model = Model()
    status = kept(tmp_path, model, 250)
    assert [sample.step for sample in status.samples] == [0, 60, 100, 1_000, 2_000]
    assert status.samples[0].texts == ("step 0", "step 0", "step 0")
    assert (status.prompts, status.next_step, status.explanation) == (PROMPTS, 4_000, "")
    assert {(request.temperature, request.prompt) for request in model.asked} == {(0.0, prompt) for prompt in PROMPTS}
    assert all(request.cancelled.is_set() for request in model.asked)


def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    before = kept(tmp_path, Model(), 30).samples
    assert [sample.step for sample in kept(tmp_path, Model(900), 30).samples] == [0, 60, 100, 1_000]
    assert kept(tmp_path, Model(900), 1).samples[:3] == before


def test_a_newcomer_begins_with_the_step_that_it_has(tmp_path: Path) -> None:
    assert [sample.step for sample in kept(tmp_path, Model(50_000), 10).samples] == [50_000]


def test_a_part_of_a_model_writes_nothing_and_says_why(tmp_path: Path) -> None:
    assert kept(tmp_path, None, 100) == SamplesStatus(PROMPTS, (), None, PARTIAL)
    assert not (tmp_path / FOLDER).exists()


def test_a_paused_model_is_left_alone(tmp_path: Path) -> None:
    model = Model()
    model.may_write = False
    assert kept(tmp_path, model, 100).samples == ()
    assert model.asked == []


@pytest.mark.parametrize("failure", [NotReadyError("no room"), ValueError("the logits are not finite")])
def test_a_text_that_fails_is_tried_again_later(tmp_path: Path, failure: Exception) -> None:
    model = Model()
    model.failures.append(failure)
    status = kept(tmp_path, model, RETRY_SECONDS + 5)
    assert [sample.step > 600 for sample in status.samples] == [True]


def test_damaged_samples_do_not_stop_a_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / f"{RUN}.json").write_text('{"format": 1', encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert len(kept(tmp_path, Model(), 1).samples) == 1
    assert "a new list of samples begins" in caplog.text
