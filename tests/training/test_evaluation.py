from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import trio

from neuroshard.data.feed import HeldOut
from neuroshard.data.held_out_losses import Evaluation, paired_difference
from neuroshard.errors import CheckpointError
from neuroshard.pipeline.control import Control
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.training.evaluator import evaluation_is_due
from neuroshard.training.record import MAX_EVALUATIONS, EvaluationRecord
from tests.worlds.stages import MemoryFeed, make_stage, make_trainer


def test_pairing_removes_how_hard_the_sequences_are() -> None:
    earlier, later = (1.0, 5.0, 9.0), (0.9, 4.8, 8.7)
    difference = paired_difference(earlier, later)
    assert difference.mean == pytest.approx(0.2)
    assert difference.standard_error == pytest.approx(0.1 / 3**0.5)
    assert difference.exceeds(3.0, 0.0)
    assert not difference.exceeds(4.0, 0.0)
    assert not difference.exceeds(3.0, 0.25)
    assert not paired_difference(earlier, earlier).exceeds(4.0, 0.0)


def test_one_sequence_tells_nothing() -> None:
    assert not paired_difference((9.0,), (1.0,)).exceeds(4.0, 0.0)


def test_evaluations_cost_two_per_cent_of_the_time() -> None:
    assert evaluation_is_due(0.0, None)
    assert not evaluation_is_due(149.0, 3.0)
    assert evaluation_is_due(150.0, 3.0)
    assert not evaluation_is_due(4.0, 0.001)
    assert evaluation_is_due(5.0, 0.001)


def test_a_full_record_keeps_the_baseline_and_the_newest() -> None:
    record = EvaluationRecord()
    for step in range(1000):
        record.add(Evaluation(step, float(step), (1.0, 2.0)))
    steps = [evaluation.step for evaluation in record.evaluations]
    assert len(steps) < MAX_EVALUATIONS
    assert steps[0] == 0
    assert steps[-3:] == [997, 998, 999]
    assert steps == sorted(set(steps)) == [point.step for point in record.points]


def test_record_to_json_and_back() -> None:
    record = EvaluationRecord([Evaluation(0, 1.0, (3.0, 2.0)), Evaluation(9, 2.0, (2.5, 1.0))])
    again = EvaluationRecord.from_json(record.to_json())
    assert again.evaluations == record.evaluations
    assert again.points == record.points
    with pytest.raises(CheckpointError):
        EvaluationRecord.from_json([[0, 1.0, []]])
    with pytest.raises(CheckpointError):
        EvaluationRecord.from_json([[0, 1.0, ["x"]]])


def test_other_pinned_sequences_start_a_new_record(compute: ComputeThread, tmp_path: Path) -> None:
    class OtherFeed(MemoryFeed):
        async def held_out(self, count: int = 32) -> HeldOut:
            return HeldOut((await super().held_out(count)).sequences.flip(0), 4.0)

    trio.run(make_trainer(compute, make_stage(compute, tmp_path)).run, 3)
    same = make_trainer(compute, make_stage(compute, tmp_path))
    trio.run(same.run, 4)
    assert [e.step for e in same.record.evaluations.evaluations] == [0]
    other = make_trainer(compute, make_stage(compute, tmp_path), OtherFeed())
    trio.run(other.run, 5)
    assert [e.step for e in other.record.evaluations.evaluations] == [4]


def test_the_losses_of_a_vote_on_most_pinned_sequences_are_an_evaluation_once(
    compute: ComputeThread, tmp_path: Path
) -> None:
    trainer = make_trainer(compute, make_stage(compute, tmp_path))
    drive = trainer._loops.drive
    assert drive is not None
    evaluator, record, losses = drive.evaluator, trainer.record, (1.0,) * 32
    evaluator.note_vote(record, losses)  # before the sequences and the baseline are here
    trio.run(trainer.run, 3)
    before = len(record.evaluations.evaluations)
    for noted in (losses[17:], (), (*losses, 1.0), losses, losses, (math.nan, *losses[1:])):
        evaluator.note_vote(record, noted)
    newest = record.evaluations.evaluations[-1]
    assert len(record.evaluations.evaluations) == before + 1
    assert (newest.step, newest.losses) == (3, losses)
    evaluator.note_vote(record, (0.5,) * 32)  # no second one of the same step
    assert record.evaluations.evaluations[-1] is newest


def test_a_vote_whose_time_ran_out_is_compared_with_the_same_sequences(compute: ComputeThread, tmp_path: Path) -> None:
    """The 20 easiest of 32 sequences were measured: their mean is lower, but each one lost only 0.1."""
    hard = EvaluationRecord([Evaluation(0, 0.0, (*(2.0,) * 20, *(8.0,) * 12))])
    hard.add(Evaluation(3, 1.0, (1.9,) * 20))
    assert hard.points[-1].loss == pytest.approx(4.25 - 0.1)
    assert hard.points[-1].improvement == pytest.approx(0.1)
    assert [len(e.losses) for e in EvaluationRecord.from_json(hard.to_json()).evaluations] == [32, 20]

    trainer = make_trainer(compute, make_stage(compute, tmp_path))
    trio.run(trainer.run, 3)
    drive = trainer._loops.drive
    assert drive is not None
    drive.evaluator.note_vote(trainer.record, (1.0,) * 20)
    assert trainer.record.evaluations.evaluations[-1].losses == (1.0,) * 20


def test_an_evaluation_leaves_no_gradients(compute: ComputeThread, tmp_path: Path) -> None:
    trainer = make_trainer(compute, make_stage(compute, tmp_path))
    trio.run(trainer.run, 0)
    model = trainer.parts.stages[0].executor.model
    assert all(parameter.grad is None for parameter in model.parameters())
    rows = trio.run(MemoryFeed().held_out).sequences
    with torch.no_grad():
        expected = model.loss_sum(model(rows[:, :-1]), rows[:, 1:]) / rows[:, 1:].numel()
    assert trainer.record.evaluations.is_empty  # no step was wanted, so none was evaluated

    trio.run(make_trainer(compute, make_stage(compute, tmp_path / "b")).run, 1)
    fresh = make_trainer(compute, make_stage(compute, tmp_path / "b"))
    assert fresh.record.evaluations.evaluations[0].mean == pytest.approx(expected.item(), rel=1e-4)


def test_the_mean_of_the_replicas_is_measured_instead_of_the_own_weights(
    compute: ComputeThread, tmp_path: Path
) -> None:
    trainer = make_trainer(compute, make_stage(compute, tmp_path))
    trio.run(trainer.run, 3)
    drive, record = trainer._loops.drive, trainer.record
    assert drive is not None
    drive.evaluator._control = Control()  # the present one has stopped
    answers = [(), (1.0,) * 32, (1.0,) * 32]

    async def of_replicas() -> tuple[float, ...] | None:
        return answers.pop(0)

    def measured() -> float | None:
        return trio.run(drive.evaluator.measure, record, of_replicas)

    count = len(record.evaluations.evaluations)
    assert measured() is None  # it cannot be measured now
    assert measured() == 1.0
    assert record.evaluations.evaluations[-1].losses == (1.0,) * 32
    assert measured() is None  # no round since
    assert len(record.evaluations.evaluations) == count + 1
