"""Averaged gradients: the same bytes for all, plain AdamW where nothing is compressed, and no work lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from neuroshard.compression import make_codec, with_residual
from neuroshard.config.run_parameters import CodecName, InnerOptimization, OuterOptimization
from neuroshard.consensus.gradient_averaging import BASIS, RIGHT, GradientAveraging, first_state
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import TensorSchema, flatten, initialise, load_vector
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.optim.outer import OuterState, fresh_outer_state
from neuroshard.pipeline.executor import StageExecutor
from neuroshard.state.outer_state import state_root
from neuroshard.types import Architecture, LayerRange

ARCHITECTURE = Architecture(32, 1, 2, 2, 64, 96, 16)
INNER = InnerOptimization(learning_rate=1e-2, warmup_steps=2, schedule="cosine", decay_steps=20)
CLIPPED = 0.5  # as long may a gradient be


def new_model() -> StageModel:
    model = StageModel(ARCHITECTURE, LayerRange(0, 1))
    initialise(model, 3)
    return model


def new_executor() -> StageExecutor:
    model = new_model()
    return StageExecutor(model, make_inner_optimizer(model, INNER), torch.device("cpu"))


SCHEMA = TensorSchema.of(new_model())


def averaging_of(rank: int) -> GradientAveraging:
    outer = OuterOptimization(strategy="averaging", aggregator="mean", codec="fp32", rank=rank)
    return GradientAveraging.of(SCHEMA, outer, INNER, CLIPPED)


@dataclass
class Replica:
    """One member, with the data of its number; its rounds are calls."""

    averaging: GradientAveraging
    number: int
    state: OuterState = field(init=False)
    waiting: Tensor = field(init=False)  # (d,)
    residual: Tensor | None = None

    def __post_init__(self) -> None:
        self.executor = new_executor()
        self.state = first_state(self.averaging.plan, flatten(self.executor.model))
        self.data = torch.Generator().manual_seed(self.number)

    def gather(self) -> None:
        rows = torch.randint(0, 96, (2, 17), generator=self.data)
        self.executor.loss(rows[:, :-1], rows[:, 1:])
        gradients = [p.grad.flatten() for p in self.executor.model.parameters() if p.grad is not None]
        self.waiting = torch.cat(gradients) / 32
        self.executor.zero()

    def contribution(self) -> Tensor:
        return self.averaging.contribution(self.state, self.waiting, self.residual)

    def commit(self, aggregate: Tensor, sent: Tensor | None) -> None:
        before, residual = self.state, self.residual
        if not self.averaging.phase(before.outer_step).makes_basis:
            self.residual = self.averaging.next_residual(before, self.waiting, residual, sent)
        self.state = self.averaging.next_state(before, aggregate)
        load_vector(self.executor.model, self.state.anchor)


def phase(replicas: list[Replica], codec: CodecName = "fp32") -> list[Tensor]:
    """One round of all; what they sent."""
    transport = make_codec(codec)
    sent = [transport.round_trip(replica.contribution()) for replica in replicas]
    aggregate = transport.round_trip(torch.stack(sent).mean(dim=0))
    for replica, own in zip(replicas, sent, strict=True):
        replica.commit(aggregate, own)
    return sent


def step(replicas: list[Replica], codec: CodecName = "fp32") -> None:
    for replica in replicas:
        replica.gather()
    for _ in range(replicas[0].averaging.phases):
        phase(replicas, codec)


def synchronous(replicas: int, steps: int) -> Tensor:
    """The weights (d,) after steps of AdamW on the mean gradient, in one process."""
    executor = new_executor()
    data = [torch.Generator().manual_seed(number) for number in range(replicas)]
    averaging = averaging_of(10_000)
    for number in range(steps):
        for generator in data:
            rows = torch.randint(0, 96, (2, 17), generator=generator)
            executor.loss(rows[:, :-1], rows[:, 1:])
        executor.step(averaging.learning_rate(number), CLIPPED, 32 * replicas)
    return flatten(executor.model)


def test_without_compression_it_is_synchronous_adamw() -> None:
    averaging = averaging_of(10_000)
    assert averaging.phases == 1
    replicas = [Replica(averaging, number) for number in range(3)]
    for _ in range(8):
        step(replicas)
    torch.testing.assert_close(replicas[0].state.anchor, synchronous(3, 8), atol=2e-5, rtol=1e-4)
    assert replicas[0].state.outer_step == 8


def test_a_few_directions_go_where_synchronous_adamw_goes() -> None:
    replicas = [Replica(averaging_of(8), number) for number in range(2)]
    for _ in range(8):
        step(replicas)
    start, exact = flatten(new_model()), synchronous(2, 8)
    cosine = torch.nn.functional.cosine_similarity(replicas[0].state.anchor - start, exact - start, dim=0)
    assert 0.7 < float(cosine) < 0.9999


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("rank", [3, 10_000])
def test_replicas_hold_the_same_bytes_after_every_phase(codec: CodecName, rank: int) -> None:
    replicas = [Replica(averaging_of(rank), number) for number in range(4)]
    roots = list[str]()
    for _ in range(3):
        for replica in replicas:
            replica.gather()
        for _ in range(replicas[0].averaging.phases):
            phase(replicas, codec)
            assert len({state_root(replica.state) for replica in replicas}) == 1
            roots.append(state_root(replicas[0].state))
    assert len(set(roots)) == 3 * replicas[0].averaging.phases


def test_the_first_phase_leaves_the_weights_and_the_second_moves_them() -> None:
    replicas = [Replica(averaging_of(3), number) for number in range(2)]
    averaging, start = replicas[0].averaging, replicas[0].state
    for replica in replicas:
        replica.gather()
    assert (averaging.phase(0).makes_basis, averaging.phase(1).makes_basis) == (True, False)
    assert [len(sent) for sent in phase(replicas)] == [averaging.plan.left_length] * 2
    middle = replicas[0].state
    assert torch.equal(middle.anchor, start.anchor)
    assert torch.equal(averaging.parts(middle)[RIGHT], averaging.parts(start)[RIGHT])
    assert averaging.parts(middle)[BASIS].any()
    assert [len(sent) for sent in phase(replicas)] == [averaging.plan.projection_length] * 2
    after = replicas[0].state
    assert not torch.equal(after.anchor, start.anchor)
    assert not torch.equal(averaging.parts(after)[RIGHT], averaging.parts(start)[RIGHT])
    assert after.outer_step == 2
    assert all(replica.residual is not None for replica in replicas)


def test_what_travels_is_a_part_of_the_gradient() -> None:
    averaging = averaging_of(3)
    travels = averaging.plan.left_length + averaging.plan.projection_length
    assert travels < 0.3 * SCHEMA.total_size
    lengths = [averaging.phase(number).length for number in range(2)]
    assert lengths == [averaging.plan.left_length, averaging.plan.projection_length]
    assert averaging.phase(0).terms != averaging.phase(1).terms
    assert averaging.phase(0).terms != averaging_of(4).phase(0).terms


@pytest.mark.parametrize("aborted", [0, 1])
def test_an_aborted_phase_changes_nothing_and_its_work_comes_later(aborted: int) -> None:
    """Nothing is called for a round that came to nothing; the next one goes on where the state is."""
    replicas = [Replica(averaging_of(3), number) for number in range(2)]
    for replica in replicas:
        replica.gather()
    for _ in range(aborted):
        phase(replicas)
    held = [(state_root(one.state), one.waiting.clone(), one.residual) for one in replicas]
    for replica in replicas:  # offered, and then the round comes to nothing
        replica.contribution()
    for replica, (root, waiting, residual) in zip(replicas, held, strict=True):
        assert state_root(replica.state) == root
        assert torch.equal(replica.waiting, waiting)
        assert replica.residual is residual
    for _ in range(2 - aborted):
        phase(replicas)
    whole = [Replica(averaging_of(3), number) for number in range(2)]
    step(whole)
    assert state_root(replicas[0].state) == state_root(whole[0].state)


def test_applied_and_residual_together_are_the_gradients() -> None:
    """What a member handed in is in the aggregate or in its residual, in a lossy codec too."""
    replicas = [Replica(averaging_of(3), number) for number in range(3)]
    averaging = replicas[0].averaging
    for _ in range(3):
        for replica in replicas:
            replica.gather()
        offered = torch.stack([with_residual(one.waiting, one.residual) for one in replicas]).mean(dim=0)
        phase(replicas, "int8")
        before, sent = replicas[0].state, phase(replicas, "int8")
        mean = averaging.gradient(before, torch.stack(sent).mean(dim=0))
        kept = torch.stack([one.residual for one in replicas if one.residual is not None]).mean(dim=0)
        torch.testing.assert_close(mean + kept, offered, atol=1e-5, rtol=1e-4)


def test_a_refused_contribution_leaves_no_residual() -> None:
    replicas = [Replica(averaging_of(3), number) for number in range(2)]
    step(replicas)
    replica = replicas[0]
    assert replica.residual is not None
    replica.gather()
    phase(replicas)
    replica.commit(replica.contribution(), None)
    assert replica.residual is None


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_not_offered(bad: float) -> None:
    replica = Replica(averaging_of(3), 0)
    replica.gather()
    replica.waiting[5] = bad
    with pytest.raises(ValueError, match="not finite"):
        replica.contribution()


def test_what_was_agreed_on_and_is_not_finite_shows_in_the_weights() -> None:
    averaging = averaging_of(3)
    start = first_state(averaging.plan, flatten(new_model()))
    state = averaging.next_state(start, torch.zeros(averaging.phase(0).length))
    after = averaging.next_state(state, torch.full((averaging.phase(1).length,), torch.nan))
    assert not after.anchor.isfinite().any()


def test_a_state_of_another_strategy_is_refused() -> None:
    averaging = averaging_of(3)
    with pytest.raises(ValueError, match="numbers and the weights"):
        averaging.contribution(fresh_outer_state(flatten(new_model())), torch.zeros(SCHEMA.total_size), None)


def test_it_goes_on_from_moments_and_steps() -> None:
    """A model that has trained keeps what AdamW knows of it."""
    averaging, weights = averaging_of(10_000), flatten(new_model())
    moments = torch.ones_like(weights), torch.ones_like(weights)
    state = first_state(averaging.plan, weights, moments, 7)
    assert state.outer_step == 7
    after = averaging.next_state(state, torch.zeros_like(weights))
    assert not torch.equal(after.anchor, weights)  # the first moment alone moves it
    fresh = averaging.next_state(first_state(averaging.plan, weights), torch.zeros_like(weights))
    assert float((fresh.anchor - weights).norm()) < 0.1 * float((after.anchor - weights).norm())  # its decay alone
