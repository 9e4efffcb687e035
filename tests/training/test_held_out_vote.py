"""The vote on an aggregate by the held-out loss, with a small model that has learned something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio
from torch import Tensor

from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.data.feed import HeldOut
from neuroshard.model.weights import flatten, load_vector, other_weights
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.training.held_out_vote import HeldOutVote, VoteRule
from neuroshard.training.outer_sync import OuterSync
from neuroshard.training.stage_checkpoint import Stage
from neuroshard.types import LayerRange
from tests.worlds.stages import IDENTITY, PARAMETERS, make_replica, make_stage, train, windows

ROOT, OTHER_ROOT = "1" * 64, "2" * 64


@pytest.fixture(scope="module")
def compute() -> Iterator[ComputeThread]:
    thread = ComputeThread(cpu_threads=1)
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def local(compute: ComputeThread, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Weights (d,) that have learned something."""
    trainer = train(compute, tmp_path_factory.mktemp("trained"), 40)
    return compute.submit(lambda: flatten(trainer.parts.stages[0].executor.model)).result()


@pytest.fixture
def learned(compute: ComputeThread, local: Tensor, tmp_path: Path) -> tuple[Stage, OuterSync, Tensor]:
    """A stage whose anchor are the weights it began with, and what was learned since as a pseudo-gradient (d,)."""
    stage = make_stage(compute, tmp_path)
    outer = make_replica(compute, stage).outer
    return stage, outer, outer.state.anchor - local


def vote_of(compute: ComputeThread, stage: Stage, outer: OuterSync, rule: VoteRule | None = None) -> HeldOutVote:
    vote = HeldOutVote(compute, stage.executor, outer, PARAMETERS.batch_size, rule)
    vote.pin(HeldOut(windows(-1, 32), 4.0))
    return vote


def test_what_was_learned_passes_and_its_opposite_does_not(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor]
) -> None:
    stage, outer, gained = learned
    vote = vote_of(compute, stage, outer)
    assert trio.run(vote.objection, gained, ROOT) == ""
    assert "No objection: held-out loss" in vote.explanation
    assert "on 32 sequences" in vote.explanation
    objection = trio.run(vote.objection, -gained, OTHER_ROOT)
    assert "held-out loss" in objection
    assert vote.explanation == f"Voted no: {objection}."


def test_a_difference_within_four_standard_errors_is_no_objection(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor]
) -> None:
    stage, outer, gained = learned
    noise = 1e-4 * torch.randn(gained.shape, generator=torch.Generator().manual_seed(5))
    assert trio.run(vote_of(compute, stage, outer).objection, noise, ROOT) == ""
    strict = VoteRule(standard_errors=-1e9)  # now anything that is not far better is worse
    assert trio.run(vote_of(compute, stage, outer, strict).objection, 1e3 * noise, ROOT)


@pytest.mark.parametrize("value", [float("nan"), 1e39])
def test_weights_that_are_no_numbers_are_an_objection(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor], value: float
) -> None:
    stage, outer, gained = learned
    objection = trio.run(vote_of(compute, stage, outer).objection, torch.sign(gained) * value, ROOT)
    assert objection == "the weights it leads to are not finite"


def test_a_state_that_left_the_memory_is_no_objection(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor]
) -> None:
    stage, outer, gained = learned
    outer.drop_tensors()
    vote = vote_of(compute, stage, outer)
    assert trio.run(vote.objection, -gained, ROOT) == ""
    assert vote.explanation == "No objection: not measured, because the node is paused."


def test_a_loss_that_is_no_number_is_an_objection_unless_it_was_none_before(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor]
) -> None:
    stage, outer, gained = learned
    infer, is_sound = stage.executor.infer, [True] * (32 // PARAMETERS.batch_size)

    def spoilt_by_and_by(inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        return infer(inputs, labels) * (1.0 if is_sound and is_sound.pop() else float("nan"))

    stage.executor.infer = spoilt_by_and_by  # type: ignore[method-assign]
    assert trio.run(vote_of(compute, stage, outer).objection, gained, ROOT) == "the held-out loss is not a number"
    assert trio.run(vote_of(compute, stage, outer).objection, gained, ROOT) == ""


def test_weights_are_the_same_bytes_after_an_evaluation_also_after_one_that_raises(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor]
) -> None:
    stage, outer, gained = learned
    model = stage.executor.model
    load_vector(model, flatten(model) + 0.01)  # training has gone on from the anchor
    before, places = flatten(model), [parameter.data_ptr() for parameter in model.parameters()]
    written = stage.executor.weights
    vote = vote_of(compute, stage, outer)
    trio.run(vote.objection, gained, ROOT)
    vote.pin(HeldOut(windows(-1, 32) + 1000, 4.0))  # ids that the vocabulary does not have
    with pytest.raises(IndexError):
        trio.run(vote.objection, gained, OTHER_ROOT)
    assert torch.equal(flatten(model), before)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert stage.executor.weights == written


def test_open_graphs_stay_valid_while_a_model_computes_with_other_weights(
    compute: ComputeThread, tmp_path: Path
) -> None:
    executor = make_stage(compute, tmp_path).executor
    rows = windows(3, 2)
    gradients = list[Tensor]()
    for evaluates in (False, True):
        executor.zero()
        loss = executor.model.loss_sum(executor.model(rows[:, :-1]), rows[:, 1:])
        if evaluates:
            with other_weights(executor.model, 2 * flatten(executor.model)):
                assert executor.infer(rows[:, :-1], rows[:, 1:]).sum() != loss
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in executor.model.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


def test_without_held_out_data_or_time_it_says_why_nothing_was_measured(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor]
) -> None:
    stage, outer, gained = learned
    vote = vote_of(compute, stage, outer, VoteRule(seconds=0.0))
    assert trio.run(vote.objection, -gained, ROOT) == ""
    assert "there was time for only 0 sequences" in vote.explanation
    vote = HeldOutVote(compute, stage.executor, outer, PARAMETERS.batch_size)
    assert trio.run(vote.objection, -gained, ROOT) == ""
    assert "the held-out sequences are not here" in vote.explanation


def test_a_paused_node_does_not_compute_for_a_vote(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor]
) -> None:
    stage, outer, gained = learned
    vote = vote_of(compute, stage, outer)
    compute.submit(stage.executor.suspend).result()
    assert trio.run(vote.objection, -gained, ROOT) == ""
    assert "not measured" in vote.explanation
    compute.submit(stage.executor.resume).result()
    assert "held-out loss" in trio.run(vote.objection, -gained, ROOT)


def test_a_full_accelerator_measures_nothing_and_the_weights_are_those_of_before(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, outer, gained = learned
    vote, weights = vote_of(compute, stage, outer), flatten(stage.executor.model)

    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(stage.executor, "infer", full)
    assert trio.run(vote.objection, -gained, ROOT) == ""
    assert "not measured" in vote.explanation
    assert torch.equal(flatten(stage.executor.model), weights)


def test_a_state_is_measured_once(compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor]) -> None:
    """Also when the same aggregate is voted on again."""
    stage, outer, gained = learned
    vote = vote_of(compute, stage, outer)
    jobs, infer = list[int](), stage.executor.infer

    def counted(inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        jobs.append(len(inputs))
        return infer(inputs, labels)

    stage.executor.infer = counted  # type: ignore[method-assign]
    outer.progress = replace(outer.progress, state_root=ROOT)
    trio.run(vote.objection, gained, OTHER_ROOT)
    trio.run(vote.objection, gained, OTHER_ROOT)
    assert sum(jobs) == 2 * 32
    assert max(jobs) == PARAMETERS.batch_size  # a job takes a microbatch at most


def test_the_losses_of_the_mean_are_known_after_the_round(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor]
) -> None:
    stage, outer, gained = learned
    vote = vote_of(compute, stage, outer)
    assert trio.run(vote.objection, gained, ROOT) == ""
    assert vote.mean_losses == ()
    outer.progress = replace(outer.progress, state_root=ROOT)
    assert len(vote.mean_losses) == 32
    outer.progress = replace(outer.progress, state_root=OTHER_ROOT)
    assert vote.mean_losses == ()


def test_a_state_whose_root_is_not_known_yet_is_not_taken_for_the_one_before(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor]
) -> None:
    stage, outer, gained = learned
    vote = vote_of(compute, stage, outer)
    assert outer.progress.state_root == ""
    assert trio.run(vote.objection, gained, ROOT) == ""
    outer.replace_state(replace(outer.state, anchor=outer.state.anchor - gained))
    assert "held-out loss" in trio.run(vote.objection, -gained, OTHER_ROOT)  # back to where it began


def test_a_round_about_a_part_is_measured_in_the_own_weights_by_as_great_a_part_of_the_sequences(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor], local: Tensor
) -> None:
    stage, _, _ = learned
    outer = make_replica(compute, stage, replace(PARAMETERS, outer=OuterOptimization(strategy="sparta"))).outer
    compute.submit(lambda: load_vector(stage.executor.model, local)).result()
    gained = outer.strategy.contribution(outer.state, local, None)
    vote = vote_of(compute, stage, outer)
    infer, jobs = stage.executor.infer, list[int]()

    def counted(inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        jobs.append(len(inputs))
        return infer(inputs, labels)

    stage.executor.infer = counted  # type: ignore[method-assign]
    outer.progress = replace(outer.progress, state_root=ROOT)
    assert trio.run(vote.objection, gained, OTHER_ROOT) == ""
    assert "on 8 sequences" in vote.explanation
    assert sum(jobs) == 2 * 8
    assert "held-out loss" in trio.run(vote.objection, -20 * gained, "5" * 64)
    assert trio.run(vote.objection, torch.ones(len(gained) + 1), "4" * 64) == "it is of another step"
    assert torch.equal(compute.submit(lambda: flatten(stage.executor.model)).result(), local)


def test_a_part_that_fits_the_weights_is_no_worse_for_an_anchor_that_it_does_not_fit(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor], local: Tensor
) -> None:
    """The other parts of the anchor were agreed on long ago: it gets worse by a part that is learned with others."""
    stage, _, _ = learned
    outer = make_replica(compute, stage, replace(PARAMETERS, outer=OuterOptimization(strategy="sparta"))).outer
    compute.submit(lambda: load_vector(stage.executor.model, local)).result()
    order = torch.randperm(len(local), generator=torch.Generator().manual_seed(1))
    outer.replace_state(replace(outer.state, anchor=local[order], outer_step=2))
    gained = outer.strategy.contribution(outer.state, local, None)
    vote = vote_of(compute, stage, outer)
    assert trio.run(vote.objection, gained, ROOT) == ""
    compute.submit(lambda: load_vector(stage.executor.model, local[order])).result()
    assert "held-out loss" in trio.run(vote.objection, gained, OTHER_ROOT)  # in weights like the anchor


def test_a_part_of_the_model_objects_to_nothing_finite(compute: ComputeThread, tmp_path: Path) -> None:
    parameters, identity = replace(PARAMETERS, stage_count=3), replace(IDENTITY, layers=LayerRange(0, 1))
    stage = make_stage(compute, tmp_path, parameters, identity)
    outer = make_replica(compute, stage, parameters, identity).outer
    vote = vote_of(compute, stage, outer)
    change = torch.ones(outer.state.anchor.shape)
    assert trio.run(vote.objection, change, ROOT) == ""
    assert "a part of the model only" in vote.explanation
    assert trio.run(vote.objection, change / 0, ROOT)


def test_among_friends_a_measurement_rests_for_many_times_its_cost(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    stage, outer, gained = learned
    now = 1_000.0
    rule = VoteRule(rest=50.0, early_rest=10.0, early_measurements=2)
    vote = HeldOutVote(compute, stage.executor, outer, PARAMETERS.batch_size, rule, clock=lambda: now)
    vote.pin(HeldOut(windows(-1, 32), 4.0))
    assert trio.run(vote.objection, gained, ROOT) == ""
    assert "held-out loss" in vote.explanation
    cost = vote._cost
    assert cost > 0
    now += 9 * cost
    assert trio.run(vote.objection, -gained, OTHER_ROOT) == ""
    with caplog.at_level("INFO"):
        assert trio.run(vote.objection, -gained, OTHER_ROOT) == ""
    assert vote.explanation == "No objection: not measured, because the last measurement is recent."
    assert "not measured" not in caplog.text  # said in the vote before
    spoilt = torch.full_like(gained, float("nan"))
    assert trio.run(vote.objection, spoilt, OTHER_ROOT) == "the weights it leads to are not finite"  # always looked at
    now += 2 * cost
    assert trio.run(vote.objection, -gained, OTHER_ROOT)  # after the first measurements ten times the cost is enough
    cost, now = vote._cost, now + 49 * vote._cost
    assert trio.run(vote.objection, -gained, "4" * 64) == ""
    now += 2 * cost
    assert trio.run(vote.objection, -gained, "5" * 64)


def test_strangers_measure_every_aggregate(compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor]) -> None:
    stage, outer, gained = learned
    vote = HeldOutVote(compute, stage.executor, outer, PARAMETERS.batch_size, clock=lambda: 0.0)
    vote.pin(HeldOut(windows(-1, 32), 4.0))
    assert trio.run(vote.objection, gained, ROOT) == ""
    assert trio.run(vote.objection, -gained, OTHER_ROOT)


def test_the_mean_of_the_last_round_is_measured_once_and_only_while_it_is_known(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, Tensor], local: Tensor
) -> None:
    stage, outer, _ = learned
    vote = vote_of(compute, stage, outer, VoteRule(seconds=0.0))  # a slow computer has no time for votes
    assert trio.run(vote.measured_mean) is None  # no round yet
    velocity = torch.randn(local.shape, generator=torch.Generator().manual_seed(1))
    outer.replace_state(replace(outer.state, anchor=local - 0.5 * velocity, velocity=velocity))
    outer.progress = replace(outer.progress, lead=0.5)
    assert trio.run(vote.measured_mean) == ()  # until the root of the state is known
    trio.run(outer.update_root)
    infer, passes = stage.executor.infer, list[int]()

    def counted(inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        passes.append(len(inputs))
        return infer(inputs, labels)

    stage.executor.infer = counted  # type: ignore[method-assign]
    measured = trio.run(vote.measured_mean)
    rows = windows(-1, 32)
    with other_weights(stage.executor.model, local):
        expected = infer(rows[:, :-1], rows[:, 1:]) / (rows.shape[1] - 1)
    assert measured == pytest.approx(expected.tolist(), rel=1e-4)
    assert vote.mean_losses == trio.run(vote.measured_mean) == measured
    assert sum(passes) == 32
    outer.progress = replace(outer.progress, last_failure="nobody answered")
    assert trio.run(vote.measured_mean) is None
