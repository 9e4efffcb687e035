"""Two ranks compute as one process does: steps, gradients, checkpoints and contributions. Real processes over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from torch import Tensor

from neuroshard.consensus.sync_strategies import strategy_at
from neuroshard.model.weights import TensorSchema, flatten, load_vector
from neuroshard.pipeline.executor import ComputeThread, PassResult, Precision, StageExecutor
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.stage_tensors import stage_tensors
from neuroshard.training.site.plan import SitePlan
from neuroshard.training.site.site import Site
from neuroshard.training.site.site_executor import SiteExecutor
from neuroshard.training.stage_checkpoint import build_stage
from neuroshard.types import LayerRange
from tests.worlds.stages import (
    ARCHITECTURE,
    IDENTITY,
    INPUTS,
    LABELS,
    PARAMETERS,
    MemoryFeed,
    executor_of,
    make_trainer,
)

PINS = replace(PARAMETERS.genesis, root="0" * 64, tokenizer_sha256="0" * 64)
RUN = replace(PARAMETERS, genesis=PINS)
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site(SitePlan(2), 2, "cpu", threads=1, timeout_seconds=30)
    site.begin()
    yield site
    site.close()


@pytest.fixture
def compute_on(site: Site) -> Iterator[ComputeThread]:
    compute = ComputeThread(1, wave=site)
    yield compute
    compute.close()


def shapes_of(executor: Any) -> StageShapes:
    return StageShapes.of(executor.model, 8)


def everything(executor: Any) -> dict[str, Tensor]:
    """Weights and moments by name."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in executor.model.named_parameters():
        tensors[name] = parameter.detach().clone()
        for moment, tensor in executor.optimizer.state[parameter].items():
            tensors[f"{name}/{moment}"] = tensor.clone()
    return tensors


def passed(compute: ComputeThread, executor: Any, rows: list[slice]) -> list[PassResult]:
    """The losses of microbatches with these rows, handed over together."""
    jobs: list[Future[PassResult]] = [
        compute.submit(lambda part=part: executor.loss_pass(shapes_of(executor), INPUTS[part], LABELS[part]))
        for part in rows
    ]
    return [job.result(60) for job in jobs]


def stepped(compute: ComputeThread, executor: Any, rows: list[slice]) -> Any:
    results = passed(compute, executor, rows)
    tokens = sum(LABELS[part].numel() for part in rows)
    return compute.submit(lambda: executor.step(1e-2, 1.0, tokens)).result(60), results


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Norm of the difference over the norm: AdamW makes a whole step of the last digits of a gradient that is zero."""
    for suffix in ("weight", "exp_avg", "exp_avg_sq", "step"):
        names = [name for name in theirs if name.endswith(suffix)]
        one, other = (torch.cat([tensors[name].flatten() for name in names]) for tensors in (ours, theirs))
        assert torch.linalg.vector_norm(one - other) <= 1e-6 * torch.linalg.vector_norm(other), suffix


@pytest.mark.parametrize(
    "rows",
    [
        [slice(0, 4), slice(4, 8)],
        [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)],
        [slice(0, 1)],  # one sequence on two ranks
        [slice(0, 3), slice(3, 6), slice(6, 8)],  # unequal microbatches, and a last wave of one
    ],
)
def test_two_ranks_make_the_step_of_one_process(site: Site, compute_on: ComputeThread, rows: list[slice]) -> None:
    alone = executor_of(0, ARCHITECTURE.layer_count)
    together = SiteExecutor(executor_of(0, ARCHITECTURE.layer_count), site, RUN)
    for _ in range(3):  # the copies of the weights follow from step to step
        lonely, losses = stepped(compute_on, alone, rows)
        common, their_losses = stepped(compute_on, together, rows)
        assert common.loss == pytest.approx(lonely.loss, abs=1e-6)
        assert common.grad_norm == pytest.approx(lonely.grad_norm, rel=1e-5)
        for one, other in zip(losses, their_losses, strict=True):
            assert one.loss_sum is not None
            assert other.loss_sum is not None
            assert other.loss_sum.item() == pytest.approx(one.loss_sum.item(), rel=1e-6)
        assert_close(everything(together), everything(alone))


def test_both_ranks_compute(site: Site, compute_on: ComputeThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two microbatches, rank 0 computes one."""
    together = SiteExecutor(executor_of(0, ARCHITECTURE.layer_count), site, RUN)
    computed, real = list[int](), StageExecutor.loss_pass

    def counted(self: StageExecutor, shapes: Any, inputs: Tensor, *others: Any) -> PassResult:
        computed.append(len(inputs))
        return real(self, shapes, inputs, *others)

    monkeypatch.setattr(StageExecutor, "loss_pass", counted)
    stepped(compute_on, together, [slice(0, 4), slice(4, 8)])
    assert computed == [4]


def test_stages_of_a_pipeline_give_the_same_gradients(site: Site, compute_on: ComputeThread) -> None:
    """Two stages on one site: forward and backward passes of a microbatch stay on one rank."""
    layers = ARCHITECTURE.layer_count
    made = list[tuple[Any, Any]]()
    alone = executor_of(0, 1), executor_of(1, layers)
    together = tuple(SiteExecutor(executor_of(start, stop), site, RUN) for start, stop in ((0, 1), (1, layers)))
    for first, last in (alone, together):
        parts = [slice(0, 4), slice(4, 8)]

        def forward(part: slice, stage: Any = first) -> Any:
            return stage.forward_pass(shapes_of(stage), INPUTS[part], keeps_graph=part.start == 0)

        opened = [job.result(60) for job in [compute_on.submit(lambda p=p: forward(p)) for p in parts]]
        jobs = [
            compute_on.submit(lambda o=o, p=p, stage=last: stage.loss_pass(shapes_of(stage), o.output, LABELS[p]))
            for o, p in zip(opened, parts, strict=True)
        ]
        gradients = [job.result(60).gradient for job in jobs]
        backs = [
            compute_on.submit(lambda o=o, g=g, stage=first: stage.backward_pass(o.opened, g))
            for o, g in zip(opened, gradients, strict=True)
        ]
        assert [job.result(60).gradient for job in backs] == [None, None]
        made.append(
            tuple(compute_on.submit(lambda s=s: s.take_gradient(LABELS.numel())).result(60)[1] for s in (first, last))
        )
    for ours, theirs in zip(made[1], made[0], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_written_weights_reach_the_other_rank(site: Site, compute_on: ComputeThread) -> None:
    """A round replaces the weights between two steps."""
    alone = executor_of(0, ARCHITECTURE.layer_count)
    together = SiteExecutor(executor_of(0, ARCHITECTURE.layer_count), site, RUN)
    rows = [slice(0, 4), slice(4, 8)]
    for executor in (alone, together):
        stepped(compute_on, executor, rows)
        weights = flatten(executor.model) * 0.9
        compute_on.submit(lambda e=executor, w=weights: load_vector(e.model, w)).result(60)
        stepped(compute_on, executor, rows)
        compute_on.submit(executor.suspend).result(60)
        compute_on.submit(executor.resume).result(60)
        stepped(compute_on, executor, rows)
    assert_close(everything(together), everything(alone))


def test_a_microbatch_that_was_given_up_leaves_the_other_rank(site: Site, compute_on: ComputeThread) -> None:
    first = SiteExecutor(executor_of(0, 1), site, RUN)

    def forward(part: slice) -> Any:
        return first.forward_pass(shapes_of(first), INPUTS[part], keeps_graph=True)

    jobs = [compute_on.submit(lambda p=p: forward(p)) for p in (slice(0, 4), slice(4, 8))]
    numbers = [getattr(job.result(60).opened, "number", 0) for job in jobs]
    del jobs
    compute_on.submit(first.zero).result(60)
    assert site.forgotten[-1] == max(numbers)
    compute_on.submit(lambda: forward(slice(0, 4))).result(60)
    assert not site.forgotten


def saved(compute: ComputeThread, site: Site | None, folder: Path) -> bytes:
    """The checkpoint's tensors after it was loaded by this number of ranks, trained no further, and saved again."""
    layers = LayerRange(0, ARCHITECTURE.layer_count)
    stage = compute.submit(
        lambda: build_stage(
            RUN,
            IDENTITY,
            torch.device("cpu"),
            CheckpointStore(folder),
            precision=Precision.FP32,
            site=site,
        )
    ).result(60)
    assert stage.is_restored
    assert stage.layers == layers
    tensors = stage_tensors(stage.executor.model, stage.executor.optimizer, stage.outer_state)
    if site is not None:  # the other rank has the state too, and gives it back unchanged
        passed(compute, stage.executor, [slice(0, 4), slice(4, 8)])
        compute.submit(stage.executor.zero).result(60)
    return b"".join(name.encode() + tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items())


def trained(compute: ComputeThread, site: Site | None, folder: Path, last_step: int) -> Any:
    stage = compute.submit(
        lambda: build_stage(
            RUN,
            IDENTITY,
            torch.device("cpu"),
            CheckpointStore(folder),
            precision=Precision.FP32,
            site=site,
        )
    ).result(60)
    trainer = make_trainer(compute, stage, MemoryFeed(stage.record.progress.position))
    trio.run(trainer.run, last_step)
    return trainer


def newest_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_checkpoint_is_the_same_on_two_ranks_and_on_one(
    site: Site, compute_on: ComputeThread, tmp_path: Path
) -> None:
    """2 -> 1 -> 2: trained on two ranks, loaded and saved by one, loaded by two: equal bytes."""
    trained(compute_on, site, tmp_path, 4)
    files = newest_files(tmp_path)
    on_one = saved(compute_on, None, tmp_path)
    on_two = saved(compute_on, site, tmp_path)
    assert on_one == on_two
    assert newest_files(tmp_path) == files


def test_a_contribution_has_the_bytes_of_rank_0(site: Site, compute_on: ComputeThread) -> None:
    """The vote and the codecs of a round see one vector; a site of equal weights sends the same one as one device."""
    alone = executor_of(0, ARCHITECTURE.layer_count)
    together = SiteExecutor(executor_of(0, ARCHITECTURE.layer_count), site, RUN)
    stepped(compute_on, together, [slice(0, 4), slice(4, 8)])
    compute_on.submit(lambda: load_vector(alone.model, flatten(together.model))).result(60)
    schema = TensorSchema.of(alone.model)
    strategy = strategy_at(PARAMETERS.outer, schema, 0, 0)
    from neuroshard.consensus.sync_strategies import first_outer_state

    begun = first_outer_state(PARAMETERS.outer, schema, flatten(executor_of(0, ARCHITECTURE.layer_count).model))
    made = [
        strategy.contribution(begun, compute_on.submit(lambda e=e: flatten(e.model)).result(60), None)
        for e in (alone, together)
    ]
    encoded = [repr(part).encode() if not isinstance(part, Tensor) else part.numpy().tobytes() for part in made]
    assert encoded[0] == encoded[1]
