from __future__ import annotations

import math
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
import trio
from torch import Tensor

from neuroshard.compression import make_codec
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.consensus.lone_steps import lone_exchange
from neuroshard.consensus.sync_strategies import (
    Abandoned,
    Agreed,
    Outcome,
    StageRounds,
    UnderWay,
    strategy_at,
)
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import TensorSchema, flatten, initialise, load_vector
from neuroshard.optim.outer import CertifiedWork, LineProgress, OuterState, fresh_outer_state, replica_mean
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.state.outer_state import state_root
from neuroshard.training.outer_sync import OuterSync
from tests.worlds.replicas import MeetingPlace
from tests.worlds.stages import ARCHITECTURE, IDENTITY, PARAMETERS, executor_around


def model_of(seed: int = 1) -> StageModel:
    model = StageModel(ARCHITECTURE)
    initialise(model, seed)
    return model


def rounds(parameters: OuterOptimization) -> StageRounds:
    return StageRounds(IDENTITY.run_id, 0, TensorSchema.of(model_of()), parameters)


LATE = LineProgress(4 * 400)  # where the momentum has its full value


def sync_of(
    compute: ComputeThread,
    model: StageModel,
    parameters: OuterOptimization,
    line: LineProgress = LineProgress(),  # noqa: B008 - frozen
) -> OuterSync:
    return OuterSync(
        compute=compute,
        executor=executor_around(model),
        versions=lambda _: replace(PARAMETERS, outer=parameters),
        state=replace(fresh_outer_state(flatten(model)), line=line),
    )


def move(model: StageModel, seed: int) -> None:
    """Change the weights as inner steps would."""
    vector = flatten(model)
    load_vector(model, vector + 0.01 * torch.randn(len(vector), generator=torch.Generator().manual_seed(seed)))


def test_alone_keep_leaves_weights_and_moves_the_anchor_to_them(compute: ComputeThread) -> None:
    model = model_of()
    outer = sync_of(compute, model, OuterOptimization(lone_outer="keep"))

    async def main() -> None:
        for number in range(3):
            move(model, number)
            before = flatten(model)
            outer.after_step(4)
            assert await outer.run_round(lone_exchange, now=12.0)
            assert torch.equal(flatten(model), before)
            assert torch.equal(outer.state.anchor, before)
            assert not outer.state.velocity.any()
        await outer.update_root()

    trio.run(main)
    status = outer.status()
    assert (status.outer_steps, status.successful_syncs, status.members, status.last_sync) == (3, 0, 1, 12.0)
    assert "Alone" in status.explanation
    raw = outer.state.anchor.numpy().tobytes() + outer.state.velocity.numpy().tobytes()
    head = b"neuroshard/outer-state" + (3).to_bytes(8, "big") + (12).to_bytes(8, "big") + b"\0"  # no durations
    root = sha256(head + raw).hexdigest()
    assert status.state_root == status.certified_root == root == state_root(outer.state)


def test_alone_keep_leaves_what_others_have_not_had_for_them(compute: ComputeThread) -> None:
    outer = sync_of(compute, model_of(), OuterOptimization(lone_outer="keep"))
    outer.residual = lost = torch.full_like(outer.state.anchor, 0.5)
    assert trio.run(outer.run_round, lone_exchange, 0.0)
    assert outer.residual is lost


def test_alone_apply_equals_torch_sgd_with_nesterov_momentum(compute: ComputeThread) -> None:
    model = model_of()
    parameters = OuterOptimization(lone_outer="apply", learning_rate=0.7, momentum=0.5)
    outer = sync_of(compute, model, parameters, line=LATE)
    anchor = torch.nn.Parameter(flatten(model).clone())
    reference = torch.optim.SGD([anchor], lr=0.7, momentum=0.5, nesterov=True)

    async def main() -> None:
        for number in range(4):
            move(model, number)
            anchor.grad = anchor.detach() - flatten(model)
            reference.step()
            outer.after_step(4)
            assert await outer.run_round(lone_exchange, now=0.0)
            torch.testing.assert_close(outer.state.anchor, anchor.detach(), rtol=1e-5, atol=1e-6)
            assert torch.equal(flatten(model), outer.state.anchor)

    trio.run(main)


def test_apply_with_lr_one_and_no_momentum_changes_nothing(compute: ComputeThread) -> None:
    model = model_of()
    outer = sync_of(compute, model, OuterOptimization(lone_outer="apply", learning_rate=1.0, momentum=0.0))
    move(model, 1)
    before = flatten(model)
    outer.after_step(4)
    assert trio.run(outer.run_round, lone_exchange, 0.0)
    torch.testing.assert_close(flatten(model), before, rtol=0, atol=1e-7)


def test_an_abandoned_round_changes_nothing_and_is_counted(compute: ComputeThread) -> None:
    async def nobody(_contribution: Tensor, _outer_step: int) -> Agreed | Abandoned:
        return Abandoned("nobody answered")

    model = model_of()
    outer = sync_of(compute, model, OuterOptimization(inner_steps=2, lone_outer="apply"))
    state = outer.state
    move(model, 1)
    before = flatten(model)
    for _ in range(2):
        outer.after_step(4)
    assert outer.is_due(0.0)
    assert not trio.run(outer.run_round, nobody, 0.0)
    assert outer.state is state
    assert torch.equal(flatten(model), before)
    assert not outer.is_due(0.0)
    assert (outer.status().failed_syncs, outer.status().successful_syncs) == (1, 0)
    assert "nobody answered" in outer.status().explanation


def test_the_schedule_counts_what_certificates_say_of_the_line_and_what_was_trained_since(
    compute: ComputeThread,
) -> None:
    told = [500, 300, 200]  # sequences a member, by the certificates

    async def exchange(contribution: Tensor, outer_step: int) -> Agreed:
        late_for = contribution if outer_step == 2 else None
        return Agreed(
            torch.zeros_like(contribution), 3, None, late_for, outer_step == 1, work=CertifiedWork(told[outer_step])
        )

    outer = sync_of(compute, model_of(), OuterOptimization())
    counts = list[tuple[int, int]]()
    for _ in told:
        for _ in range(2):
            outer.after_step(4)
        before = outer.scheduled_sequences
        assert trio.run(outer.run_round, exchange, 0.0)
        counts.append((before, outer.scheduled_sequences))
    assert counts == [(8, 500), (508, 800), (808, 1000)]
    assert outer.progress.sequences == 0


def test_alone_the_schedule_counts_every_sequence_once(compute: ComputeThread) -> None:
    model = model_of()
    outer = sync_of(compute, model, OuterOptimization())
    for number in range(3):
        move(model, number)
        for _ in range(2):
            outer.after_step(4)
        assert trio.run(outer.run_round, lone_exchange, 0.0)
        outer.after_step(4)
    assert outer.scheduled_sequences == 36


class Rounds:
    """An exchange that gives the outcomes it was told to, and remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.next: str = "accepted"

    async def exchange(self, contribution: Tensor, _outer_step: int) -> Agreed | Abandoned:
        self.given.append(contribution.clone())
        sent = make_codec("int8").round_trip(contribution)
        if self.next == "aborted":
            return Abandoned("made up")
        return Agreed(sent.clone(), 3, sent if self.next == "accepted" else None)


def test_what_the_codec_lost_is_part_of_the_next_contribution_once_a_round_commits(compute: ComputeThread) -> None:
    model, rounds_ = model_of(), Rounds()
    outer = sync_of(compute, model, OuterOptimization(codec="int8"))

    def play(kind: str) -> Tensor:
        """A round of this kind; the work that is new in what was contributed."""
        rounds_.next = kind
        move(model, len(rounds_.given))
        work = outer.state.anchor - flatten(model)
        assert trio.run(outer.run_round, rounds_.exchange, 0.0) == (kind != "aborted")
        return work

    first = play("accepted")
    assert torch.equal(rounds_.given[0], first)
    lost = outer.residual
    assert lost is not None
    assert torch.equal(lost, first - make_codec("int8").round_trip(first))
    assert lost.any()
    second = play("aborted")
    assert torch.equal(rounds_.given[1], second + lost)
    assert outer.residual is lost
    third = play("accepted")  # the residual counts once, however often it was contributed
    assert torch.equal(rounds_.given[2], third + lost)
    assert outer.residual is not None
    assert torch.equal(outer.residual, rounds_.given[2] - make_codec("int8").round_trip(rounds_.given[2]))
    play("refused")
    assert outer.residual is None


class BesideTraining:
    """An exchange whose first call begins a round and whose second one tells how it has ended."""

    def __init__(self, others: Tensor) -> None:
        self.begun: Tensor | None = None
        self.others = others  # (d,), what the rest of the group says

    async def exchange(self, contribution: Tensor, _outer_step: int) -> Outcome:
        if self.begun is None:
            self.begun = contribution
            return UnderWay()
        sent = make_codec("int8").round_trip(self.begun)
        return Agreed((sent + self.others) / 2, 2, sent, late_for=self.begun, work=CertifiedWork(12), offered=12)


def test_the_end_of_an_overlapped_round_keeps_what_was_trained_meanwhile(compute: ComputeThread) -> None:
    """w <- a' + (w_now - w_sent), and counts and residual are those of what was sent."""
    model = model_of()
    others = 0.01 * torch.randn(len(flatten(model)), generator=torch.Generator().manual_seed(9))
    rounds_, parameters = BesideTraining(others), OuterOptimization(codec="int8", overlap=True)
    outer = sync_of(compute, model, parameters)
    anchor = outer.state
    move(model, 1)
    sent = flatten(model)
    for _ in range(3):
        outer.after_step(4)
    assert not trio.run(outer.run_round, rounds_.exchange, 0.0)
    assert outer.state is anchor
    assert torch.equal(flatten(model), sent)
    assert (outer.progress.sequences, outer.progress.failed) == (12, 0)

    move(model, 2)
    now = flatten(model)
    for _ in range(2):
        outer.after_step(4)
    assert trio.run(outer.run_round, rounds_.exchange, 0.0)
    assert rounds_.begun is not None
    decoded = make_codec("int8").round_trip(rounds_.begun)
    expected = strategy_at(parameters, TensorSchema.of(model), 0, 0).next_state(anchor, (decoded + others) / 2, 0)
    assert torch.equal(outer.state.anchor, expected.anchor)
    assert torch.equal(outer.state.velocity, expected.velocity)
    torch.testing.assert_close(flatten(model), expected.anchor + (now - sent), rtol=0, atol=1e-6)
    assert outer.residual is not None
    assert torch.equal(outer.residual, rounds_.begun - decoded)
    progress = outer.progress
    assert (progress.inner_steps, progress.sequences, progress.since_round) == (2, 8, 8)
    assert outer.scheduled_sequences == 12 + 8


def test_alone_nothing_is_lost_whatever_the_codec(compute: ComputeThread) -> None:
    models, nodes = [model_of(), model_of()], list[OuterSync]()
    for codec, model in zip(("fp32", "int8"), models, strict=True):
        nodes.append(sync_of(compute, model, OuterOptimization(codec=codec, lone_outer="apply", momentum=0.9)))
        for seed in range(3):
            move(model, seed)
            assert trio.run(nodes[-1].run_round, lone_exchange, 0.0)
    assert nodes[1].residual is None
    assert state_root(nodes[0].state) == state_root(nodes[1].state)


@pytest.mark.parametrize(
    "parameters",
    [OuterOptimization(), OuterOptimization(aggregator="krum"), OuterOptimization(aggregator="centred_clipping")],
    ids=lambda one: one.aggregator,
)
def test_alone_no_aggregator_wants_for_others(compute: ComputeThread, parameters: OuterOptimization) -> None:
    model = model_of()
    outer = sync_of(compute, model, parameters)
    move(model, 1)
    assert trio.run(outer.run_round, lone_exchange, 0.0)
    assert torch.equal(outer.state.anchor, flatten(model))


@pytest.mark.parametrize(("moved", "reason"), [(0.0, "it is zero"), (math.inf, "not finite"), (math.nan, "not finite")])
def test_alone_nothing_follows_from_no_work_or_from_no_numbers(
    compute: ComputeThread, moved: float, reason: str
) -> None:
    model = model_of()
    outer = sync_of(compute, model, OuterOptimization())
    before, weights = state_root(outer.state), flatten(model)
    weights[3] += moved
    load_vector(model, weights)
    assert not trio.run(outer.run_round, lone_exchange, 0.0)
    assert reason in outer.status().explanation
    assert state_root(outer.state) == before


def test_two_nodes_end_a_round_with_the_same_bytes(compute: ComputeThread) -> None:
    parameters = OuterOptimization(codec="fp32")
    models = [model_of(), model_of()]
    place = MeetingPlace(rounds(parameters), 2)
    nodes = [sync_of(compute, model, parameters) for model in models]
    for number, (node, model) in enumerate(zip(nodes, models, strict=True)):
        move(model, number)
        node.after_step(4)
    local = [flatten(model) for model in models]
    mean = nodes[0].state.anchor - (local[0] + local[1]) / 2
    expected = strategy_at(parameters, TensorSchema.of(models[0]), 0, 0).next_state(nodes[0].state, mean, 0)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(node.run_round, place.exchange, 0.0)

    trio.run(main)
    assert torch.equal(nodes[0].state.anchor, nodes[1].state.anchor)
    assert torch.equal(flatten(models[0]), flatten(models[1]))
    assert nodes[0].status().members == 2
    torch.testing.assert_close(nodes[0].state.anchor, expected.anchor, rtol=1e-5, atol=1e-6)


def test_a_round_is_due_by_sequences_or_by_time(compute: ComputeThread) -> None:
    outer = sync_of(compute, model_of(), OuterOptimization(inner_steps=3, max_round_seconds=60.0))
    assert not outer.is_due(1e9)  # nothing to contribute
    outer.after_step(4)
    assert not outer.is_due(59.0)
    assert outer.is_due(60.0)
    outer.after_step(4)
    assert not outer.is_due(0.0)
    outer.after_step(4)
    assert outer.is_due(0.0)


def test_momentum_ramps_only_with_applied_rounds() -> None:
    state = OuterState(torch.zeros(2), torch.tensor([1.0, 0.0]), 5)
    aggregate = torch.tensor([0.0, 1.0])
    parameters = OuterOptimization(learning_rate=1.0, momentum=0.9)
    strategy = strategy_at(parameters, TensorSchema(("weight",), ((2,),)), 5, 400)
    applied = strategy.next_state(state, aggregate, 2)
    torch.testing.assert_close(applied.velocity, torch.tensor([0.9, 1.0]))
    torch.testing.assert_close(applied.anchor, torch.tensor([-0.81, -1.9]))
    kept = strategy.kept_state(state, torch.ones(2))
    assert torch.equal(kept.anchor, torch.ones(2))
    assert torch.equal(kept.velocity, state.velocity)


@pytest.mark.parametrize(("members", "due"), [(1, 100 * 4), (2, 5 * 4 * 2), (64, 1 * 4 * 64)])
def test_the_next_round_follows_from_the_lines_work_and_the_members(
    compute: ComputeThread, members: int, due: int
) -> None:
    outer = sync_of(compute, model_of(), OuterOptimization(), line=LineProgress(4 * 20))
    assert outer.sequences_due(members) == due
    assert sync_of(compute, model_of(), OuterOptimization(7), line=LineProgress(4 * 20)).sequences_due(1) == 7 * 4


def test_the_interval_is_shown_with_its_reason(compute: ComputeThread) -> None:
    async def exchange(contribution: Tensor, _outer_step: int) -> Agreed:
        return Agreed(contribution, 3, work=CertifiedWork(8))

    outer = sync_of(compute, model_of(), OuterOptimization(50), line=LineProgress(4 * 18))
    move(outer._executor.model, 1)
    outer.after_step(8)
    assert trio.run(outer.run_round, exchange, 0.0)
    status = outer.status()
    assert status.inner_steps_total == 5
    assert "Every 5 inner steps end with a round. The interval grows with the run's 20 certified steps, up to 50." in (
        status.explanation
    )
    outer.state = replace(outer.state, line=LineProgress(4 * 800))
    assert "Every 50 inner steps end with a round, the run's longest interval." in outer.status().explanation


def test_a_vote_names_the_state_with_the_work_that_the_certificate_states(compute: ComputeThread) -> None:
    """Replicas that certify other work have another root, so no two of them can disagree about the interval."""
    outer = sync_of(compute, model_of(), OuterOptimization())
    aggregate = torch.ones_like(outer.state.anchor)

    async def roots() -> list[str]:
        return [await outer.root_after(aggregate, 0, CertifiedWork(sequences)) for sequences in (8, 8, 12)]

    one, same, other = trio.run(roots)
    assert one == same != other


@pytest.mark.parametrize(
    ("parameters", "lead"),
    [(OuterOptimization(), 0.75), (OuterOptimization(momentum=0.0), 0.0), (OuterOptimization(learning_rate=0.7), None)],
)
def test_the_mean_of_the_replicas_follows_from_the_state_after_the_round(
    compute: ComputeThread, parameters: OuterOptimization, lead: float | None
) -> None:
    model = model_of()
    outer = sync_of(compute, model, parameters, LATE)
    distances = list[Tensor]()

    async def exchange(contribution: Tensor, outer_step: int) -> Agreed:
        distances.append(contribution * 0.5)
        return Agreed(distances[-1].clone(), 3, contribution.clone(), work=CertifiedWork(4))

    for seed in (2, 3):
        before = outer.state
        move(model, seed)
        outer.after_step(4)
        assert trio.run(outer.run_round, exchange, 0.0)
        assert outer.progress.lead == lead
        if lead is not None:
            mean = replica_mean(outer.state.anchor, outer.state.velocity, lead)
            torch.testing.assert_close(mean, before.anchor - distances[-1], rtol=0, atol=1e-6)
    move(model, 4)
    outer.after_step(4)
    assert trio.run(outer.run_round, lone_exchange, 0.0)
    assert outer.progress.lead is None  # nobody else was there
