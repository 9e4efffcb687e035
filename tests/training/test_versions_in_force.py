"""A later version of a run's parameters takes force at its outer step, on every node, also across a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio

from neuroshard.config.run_parameters import OuterOptimization, RunParameters
from neuroshard.consensus.sync_strategies import StageRounds
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import TensorSchema, flatten, initialise, load_vector
from neuroshard.optim.outer import LineProgress, fresh_outer_state
from neuroshard.optim.schedule import learning_rate_at
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.training.outer_sync import OuterSync
from neuroshard.training.parts import TrainerParts
from neuroshard.training.trainer import Trainer
from tests.worlds.replicas import MeetingPlace
from tests.worlds.stages import (
    ARCHITECTURE,
    IDENTITY,
    PARAMETERS,
    executor_around,
    make_replica,
    make_stage,
    make_trainer,
    state_digest,
)

INNER_STEPS = 3
FIRST = replace(PARAMETERS, outer=replace(PARAMETERS.outer, inner_steps=INNER_STEPS))
SECOND = replace(
    FIRST, version=2, holds_from_outer_step=2, inner=replace(FIRST.inner, learning_rate=3e-4, warmup_steps=0)
)


def versions(outer_step: int) -> RunParameters:
    return FIRST if outer_step < SECOND.holds_from_outer_step else SECOND


def trainer_of(compute: ComputeThread, folder: Path) -> Trainer:
    return make_trainer(compute, make_stage(compute, folder, FIRST), parameters=FIRST)


def train(compute: ComputeThread, folder: Path, last_step: int) -> Trainer:
    stage = make_stage(compute, folder, FIRST)
    trainer = make_trainer(compute, stage, parameters=FIRST, versions=versions)
    trio.run(trainer.run, last_step)
    return trainer


def test_the_learning_rate_changes_with_the_first_step_after_the_outer_step(
    compute: ComputeThread, tmp_path: Path
) -> None:
    trainer = train(compute, tmp_path, 9)
    used = {point.step: point.lr for point in trainer.record.history.snapshot()}
    before = {step: learning_rate_at(step - 1, FIRST.inner) for step in range(1, 7)}
    after = {step: learning_rate_at(step - 1, SECOND.inner) for step in range(7, 10)}
    assert used == pytest.approx(before | after)
    assert trainer.snapshot().training.lr == learning_rate_at(9, SECOND.inner)


def test_a_restart_on_either_side_of_the_change_is_none(compute: ComputeThread, tmp_path: Path) -> None:
    whole = state_digest(train(compute, tmp_path / "whole", 9))
    assert whole != state_digest(train_first_only(compute, tmp_path / "first", 9))
    for stop in (5, 6, 7):
        train(compute, tmp_path / f"stopped-{stop}", stop)
        assert state_digest(train(compute, tmp_path / f"stopped-{stop}", 9)) == whole


def test_a_step_takes_more_sequences_and_the_schedule_keeps_their_count(compute: ComputeThread, tmp_path: Path) -> None:
    larger = replace(FIRST, version=2, sequences_per_step=2 * FIRST.sequences_per_step)

    def at(outer_step: int) -> RunParameters:
        return FIRST if outer_step < 2 else larger

    trainer = make_trainer(compute, make_stage(compute, tmp_path, FIRST), parameters=FIRST, versions=at)
    trio.run(trainer.run, 9)
    per_step = FIRST.sequences_per_step * ARCHITECTURE.sequence_length
    assert trainer.record.progress.tokens == 6 * per_step + 3 * 2 * per_step
    used = {point.step: point.lr for point in trainer.record.history.snapshot()}
    # 24 sequences in the first six steps are three of the larger ones
    after = {step: learning_rate_at(3 + step - 7, larger.inner) for step in range(7, 10)}
    assert {step: used[step] for step in after} == pytest.approx(after)


def train_first_only(compute: ComputeThread, folder: Path, last_step: int) -> Trainer:
    trainer = trainer_of(compute, folder)
    trio.run(trainer.run, last_step)
    return trainer


def test_without_versions_the_parameters_hold_all_the_time(compute: ComputeThread, tmp_path: Path) -> None:
    stage = make_replica(compute, make_stage(compute, tmp_path, FIRST), FIRST)
    trainer = Trainer(TrainerParts(FIRST, (stage,)))
    assert trainer.snapshot().training.lr == learning_rate_at(0, FIRST.inner)
    assert stage.outer.parameters is FIRST


def test_rounds_use_what_holds_at_their_outer_step(compute: ComputeThread) -> None:
    """Three members: the mean until outer step 1, the median from it on; the rate of the outer step changes with it."""
    first = OuterOptimization(aggregator="mean", momentum=0.0, learning_rate=1.0, codec="fp32")
    second = OuterOptimization(aggregator="median", momentum=0.0, learning_rate=0.5, codec="fp32")

    def at(outer_step: int) -> OuterOptimization:
        return first if outer_step < 1 else second

    def version_at(outer_step: int) -> RunParameters:
        return replace(PARAMETERS, outer=at(outer_step))

    models = [StageModel(ARCHITECTURE) for _ in range(3)]
    for model in models:
        initialise(model, 1)
    schema = TensorSchema.of(models[0])

    place = MeetingPlace(StageRounds(IDENTITY.run_id, 0, schema, first, version_at), len(models))
    nodes = [
        OuterSync(
            compute=compute,
            executor=executor_around(model),
            versions=lambda outer_step: replace(FIRST, outer=at(outer_step)),
            state=replace(fresh_outer_state(flatten(model)), line=LineProgress(4 * 300)),
        )
        for model in models
    ]

    async def round_of() -> float:
        """How far the anchor goes, in every coordinate, when each member's weights went further in a third of them."""
        anchor = nodes[0].state.anchor
        thirds = torch.arange(len(anchor)) % 3
        for number, model in enumerate(models):
            load_vector(model, anchor + 0.10 + 0.05 * (thirds == number))
        async with trio.open_nursery() as nursery:
            for node in nodes:
                node.after_step(4)
                nursery.start_soon(node.run_round, place.exchange, 0.0)
        went = nodes[0].state.anchor - anchor
        assert torch.equal(nodes[0].state.anchor, nodes[2].state.anchor)
        torch.testing.assert_close(went, went[:1].expand_as(went), rtol=0, atol=1e-4)
        return float(went.mean())

    async def main() -> None:
        assert await round_of() == pytest.approx(0.35 / 3, abs=1e-4)  # the mean
        assert nodes[0].parameters.outer is second
        assert await round_of() == pytest.approx(0.05, abs=1e-4)  # half of the median

    trio.run(main)
