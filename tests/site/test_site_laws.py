"""Two ranks compute as one process does: steps, gradients, checkpoints and contributions. Real processes over gloo."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from torch import Tensor

from neuroshard.consensus.sync_strategies import first_outer_state, strategy_at
from neuroshard.model.weights import TensorSchema, flatten
from neuroshard.optim.outer import OuterState
from neuroshard.pipeline.executor import ComputeThread, PassResult, Precision, StageExecutor
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import LocalStageClient
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.state.checkpoint_saver import StateCapture
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.training.parts import DriverParts, TrainerParts
from neuroshard.training.site.plan import SitePlan
from neuroshard.training.site.sharded_stage import ShardedStage
from neuroshard.training.site.site import Site
from neuroshard.training.site.site_executor import SiteExecutor
from neuroshard.training.stage_checkpoint import Stage, build_stage
from neuroshard.training.stage_replica import StageReplica
from neuroshard.training.trainer import Trainer
from neuroshard.types import LayerRange
from tests.worlds.stages import (
    ARCHITECTURE,
    IDENTITY,
    INPUTS,
    LABELS,
    PARAMETERS,
    MemoryFeed,
    executor_of,
    make_replica,
    make_stage,
    make_trainer,
)
from tests.worlds.trainers import SPLIT

PINS = replace(PARAMETERS.genesis, root="0" * 64, tokenizer_sha256="0" * 64)
RUN = replace(PARAMETERS, genesis=PINS)
pytestmark = pytest.mark.process


MODES = ("replicate", "shard")
by_mode = pytest.mark.parametrize("mode", MODES)


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


def on_site(compute: ComputeThread, site: Site, mode: str, start: int = 0, stop: int = ARCHITECTURE.layer_count) -> Any:
    """A stage on the ranks of a site, with the weights of `executor_of`."""
    own = executor_of(start, stop)
    if mode == "replicate":
        return SiteExecutor(own, site, RUN)

    def divided() -> ShardedStage:
        stage = ShardedStage(site, RUN, LayerRange(start, stop), torch.device("cpu"))
        stage.load_vector(own.vector())
        return stage

    return compute.submit(divided).result(60)


def shapes_of(executor: Any) -> StageShapes:
    return StageShapes.of(executor.model, 8)


def everything(compute: ComputeThread, executor: Any) -> dict[str, Tensor]:
    """Weights and moments by name."""
    empty = OuterState(torch.zeros(1), torch.zeros(1), 0)
    return compute.submit(lambda: {name: t.clone() for name, t in executor.tensors(empty).items()}).result(60)


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
@by_mode
def test_two_ranks_make_the_step_of_one_process(
    site: Site, compute_on: ComputeThread, rows: list[slice], mode: str
) -> None:
    alone = executor_of(0, ARCHITECTURE.layer_count)
    together = on_site(compute_on, site, mode)
    for _ in range(3):  # the copies of the weights follow from step to step
        lonely, losses = stepped(compute_on, alone, rows)
        common, their_losses = stepped(compute_on, together, rows)
        assert common.loss == pytest.approx(lonely.loss, abs=1e-6)
        assert common.grad_norm == pytest.approx(lonely.grad_norm, rel=1e-5)
        for one, other in zip(losses, their_losses, strict=True):
            assert one.loss_sum is not None
            assert other.loss_sum is not None
            assert other.loss_sum.item() == pytest.approx(one.loss_sum.item(), rel=1e-6)
        assert_close(everything(compute_on, together), everything(compute_on, alone))


@by_mode
def test_both_ranks_compute(site: Site, compute_on: ComputeThread, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two microbatches, rank 0 computes one."""
    together = on_site(compute_on, site, mode)
    computed, real = list[int](), StageExecutor.loss_pass

    def counted(self: StageExecutor, shapes: Any, inputs: Tensor, *others: Any) -> PassResult:
        computed.append(len(inputs))
        return real(self, shapes, inputs, *others)

    monkeypatch.setattr(StageExecutor, "loss_pass", counted)
    stepped(compute_on, together, [slice(0, 4), slice(4, 8)])
    assert computed == [4]


@by_mode
def test_stages_of_a_pipeline_give_the_same_gradients(site: Site, compute_on: ComputeThread, mode: str) -> None:
    """Two stages on one site: forward and backward passes of a microbatch stay on one rank."""
    layers = ARCHITECTURE.layer_count
    made = list[tuple[Any, Any]]()
    alone = executor_of(0, 1), executor_of(1, layers)
    together = tuple(on_site(compute_on, site, mode, start, stop) for start, stop in ((0, 1), (1, layers)))
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


@by_mode
def test_written_weights_reach_the_other_rank(site: Site, compute_on: ComputeThread, mode: str) -> None:
    """A round replaces the weights between two steps."""
    alone = executor_of(0, ARCHITECTURE.layer_count)
    together = on_site(compute_on, site, mode)
    rows = [slice(0, 4), slice(4, 8)]
    for executor in (alone, together):
        stepped(compute_on, executor, rows)
        weights = compute_on.submit(executor.vector).result(60) * 0.9
        compute_on.submit(lambda e=executor, w=weights: e.load_vector(w)).result(60)
        stepped(compute_on, executor, rows)
        compute_on.submit(executor.suspend).result(60)
        compute_on.submit(executor.resume).result(60)
        stepped(compute_on, executor, rows)
    assert_close(everything(compute_on, together), everything(compute_on, alone))


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


def stage_in(compute: ComputeThread, site: Site | None, folder: Path, mode: str) -> Stage:
    """Build a stage on one process (no site) or on a site, or restore it from the newest checkpoint in the folder."""
    if site is not None:
        site.plan_stages(is_sharded=mode == "shard")
    build = partial(
        build_stage, RUN, IDENTITY, torch.device("cpu"), CheckpointStore(folder), precision=Precision.FP32, site=site
    )
    stage = compute.submit(build).result(60)
    assert stage.executor.is_sharded == (site is not None and mode == "shard")
    return stage


def trained(compute: ComputeThread, stage: Stage, last_step: int) -> None:
    trio.run(make_trainer(compute, stage, MemoryFeed(stage.record.progress.position)).run, last_step)


def saved_again(compute: ComputeThread, site: Site | None, source: Path, target: Path, mode: str) -> Path:
    """Copy a folder of checkpoints, let this number of ranks load its newest one, and write that state as new files.

    The time is that of the first checkpoint, so that only the tensors and the record can differ.
    """
    shutil.copytree(source, target)
    stage = stage_in(compute, site, target, mode)
    assert stage.is_restored
    if site is not None:  # the other rank computes with the state before it is saved
        passed(compute, stage.executor, [slice(0, 4), slice(4, 8)])
        compute.submit(stage.executor.zero).result(60)
    manifest = CheckpointStore(target).read_manifest(max(target.glob("step-*.json")))
    for file in target.iterdir():
        file.unlink()
    capture = lambda: StateCapture(manifest.meta, stage.executor.tensors(stage.outer_state), stage.residual)  # noqa: E731
    report = compute.submit(lambda: stage.keeper.save(capture)).result(60)
    assert report.generation is not None
    compute.submit(stage.keeper.close).result(60)
    return target


def newest_files(folder: Path) -> dict[str, bytes]:
    """The two files of the newest checkpoint."""
    newest = max(folder.glob("step-*.json")).stem
    return {path.name: path.read_bytes() for path in folder.glob(f"{newest}*")}


@by_mode
def test_a_checkpoint_has_the_same_bytes_on_two_ranks_and_on_one(
    site: Site, compute_on: ComputeThread, mode: str, tmp_path: Path
) -> None:
    """Trained on two ranks; then each number of ranks loads the files of the one before and writes its own."""
    trained(compute_on, stage_in(compute_on, site, tmp_path / "2", mode), 4)
    one = saved_again(compute_on, None, tmp_path / "2", tmp_path / "1", mode)
    two = saved_again(compute_on, site, one, tmp_path / "2 again", mode)
    files = newest_files(tmp_path / "2")
    assert len(files) == 2
    assert sum(map(len, files.values())) > 100_000
    assert newest_files(one) == files
    assert newest_files(two) == files


@by_mode
def test_training_goes_on_alike_on_two_ranks_and_on_one(
    site: Site, compute_on: ComputeThread, mode: str, tmp_path: Path
) -> None:
    """2 -> 1 -> 2: the resumed steps are those of one process that has never changed, within rounding."""
    for folder, ranks in ((tmp_path / "changed", (site, None, site)), (tmp_path / "calm", (None, None, None))):
        for last_step, present in zip((2, 4, 6), ranks, strict=True):
            stage = stage_in(compute_on, present, folder, mode)
            assert stage.record.progress.steps == last_step - 2
            trained(compute_on, stage, last_step)
    ends = [
        everything(compute_on, stage_in(compute_on, None, folder, mode).executor)
        for folder in (tmp_path / "changed", tmp_path / "calm")
    ]
    assert_close(ends[0], ends[1])


@by_mode
def test_a_contribution_has_the_bytes_of_one_process(site: Site, compute_on: ComputeThread, mode: str) -> None:
    """The vote and the codecs of a round see one vector; a site of equal weights sends the same one as one device."""
    alone = executor_of(0, ARCHITECTURE.layer_count)
    together = on_site(compute_on, site, mode)
    stepped(compute_on, alone, [slice(0, 4), slice(4, 8)])
    stepped(compute_on, together, [slice(0, 4), slice(4, 8)])
    schema = TensorSchema.of(alone.model)
    assert TensorSchema.of(together.model) == schema
    begun = first_outer_state(PARAMETERS.outer, schema, flatten(executor_of(0, ARCHITECTURE.layer_count).model))
    strategy = strategy_at(PARAMETERS.outer, schema, 0, 0)
    made = [strategy.contribution(begun, compute_on.submit(e.vector).result(60), None) for e in (alone, together)]
    assert float(made[0].abs().max()) > 0
    assert made[0].numpy().tobytes() == made[1].numpy().tobytes()


@by_mode
def test_inference_uses_the_weights_of_all_ranks(site: Site, compute_on: ComputeThread, mode: str) -> None:
    alone, together = executor_of(0, ARCHITECTURE.layer_count), on_site(compute_on, site, mode)
    others = alone.vector() * 1.5
    found = list[list[Tensor]]()
    for executor in (alone, together):

        def measured(executor: Any = executor) -> list[Tensor]:
            own = executor.infer(INPUTS, LABELS)
            with executor.other_weights(others):
                other = executor.infer(INPUTS, LABELS)
            cache = executor.empty_cache()
            logits = [executor.read(INPUTS[:1, :5], cache), executor.read(INPUTS[:1, 5:6], cache)]
            return [own, other, *logits, executor.infer(INPUTS, LABELS)]

        found.append(compute_on.submit(measured).result(60))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(found[0][0], found[0][1])
    stepped(compute_on, together, [slice(0, 4), slice(4, 8)])  # both kinds of passes share the ranks


def test_a_loss_that_is_not_plausible_adds_nothing_on_any_rank(site: Site, compute_on: ComputeThread) -> None:
    """Other drivers' microbatches of the same step count, although one of the same wave was bad."""
    layers = ARCHITECTURE.layer_count
    stage, alone = on_site(compute_on, site, "shard", 1, layers), executor_of(1, layers)
    weights = alone.vector()
    TensorSchema.of(alone.model).views(weights)["layers.1.attention.query_key_value.weight"][:, 0] = 3e38
    for executor in (stage, alone):
        compute_on.submit(lambda e=executor: e.load_vector(weights)).result(60)
    bad = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1))
    good = bad.index_fill(2, torch.tensor([0]), 0.0)  # only the first number of a token overflows
    for wave in ((good, bad), (bad, good)):
        jobs = [
            compute_on.submit(lambda rows=rows: stage.loss_pass(shapes_of(stage), rows, LABELS[:4])) for rows in wave
        ]
        assert [job.result(60).gradient is None for job in jobs] == [rows is bad for rows in wave]
        assert alone.loss(bad, LABELS[:4])[1] is None
        alone.loss(good, LABELS[:4])
    ours, theirs = (
        compute_on.submit(lambda e=e: e.take_gradient(LABELS.numel())).result(60)[1] for e in (stage, alone)
    )
    assert ours is not None
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


FOUR = replace(SPLIT, genesis=PINS, architecture=replace(ARCHITECTURE, layer_count=4), stage_count=4)


@by_mode
def test_a_site_holds_stage_2_of_4(site: Site, compute_on: ComputeThread, mode: str, tmp_path: Path) -> None:
    """Four microbatches at a time pass through four stages, the second of them on two ranks."""
    ends, losses = list[dict[str, Tensor]](), list[list[float | None]]()
    for present in (None, site):
        site.plan_stages(is_sharded=mode == "shard")
        held = list[StageReplica]()
        for number in range(4):
            known = replace(IDENTITY, architecture=FOUR.architecture, layers=LayerRange(number, number + 1))
            folder = tmp_path / f"{present is None}-{number}"
            stage = make_stage(compute_on, folder, FOUR, known, site=present if number == 1 else None)
            held.append(make_replica(compute_on, stage, FOUR, known, number))
        assert held[1].executor.width == (1 if present is None else 2)
        routing = FixedRouting([LocalStageClient(part.service, IDENTITY.node_id) for part in held])
        driving = DriverParts(IDENTITY.node_id, MemoryFeed(), routing, in_flight=4)
        trainer = Trainer(TrainerParts(FOUR, tuple(held), driving))
        trio.run(trainer.run, 4)
        losses.append([point.loss for point in trainer.record.history.snapshot()])
        ends.append({name: t for part in held for name, t in everything(compute_on, part.executor).items()})
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert ends[1].keys() == ends[0].keys()
    assert_close(ends[1], ends[0])
