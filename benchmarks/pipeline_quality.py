"""What a model learns in three and six stages, against the same model in one piece, at equal tokens and seeds.

The stages talk through the in-memory network, so that nothing but the split and the precision on the wire differs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from pydoc_data import topics
from statistics import fmean, stdev

import anyio
import torch
import trio
from torch import Tensor

from benchmarks.record import Report, Row
from benchmarks.seeds import of_each
from benchmarks.sizes import size
from neuroshard.config.run_parameters import GenesisPins, InnerOptimization, OuterOptimization, RunParameters
from neuroshard.data.feed import HeldOut
from neuroshard.data.windows import Batch
from neuroshard.model.transformer import StageModel
from neuroshard.network import InMemoryNetwork
from neuroshard.pipeline.executor import ComputeThread, Precision
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import LocalStageClient, RemoteStageClient, StageClient, StageClientOptions
from neuroshard.pipeline.stage_protocol import StageAddress, WirePrecision
from neuroshard.pipeline.stage_requests import StageRequestHandler
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.state.checkpoint_saver import CheckpointPolicy
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.status.data import DataStatus
from neuroshard.training.parts import DriverParts, TrainerParts
from neuroshard.training.record import StageIdentity
from neuroshard.training.stage_checkpoint import build_stage
from neuroshard.training.stage_replica import StageReplica
from neuroshard.training.trainer import Trainer
from neuroshard.types import Architecture, DataPosition, LayerRange, NodeId, RunId, ShardId, WalletId

STEPS = int(os.environ.get("BENCHMARK_STEPS", size(300, 1)))
SEEDS = size((1, 2, 3), (1, 2))
SHAPE = Architecture(64, 3, 4, 2, 192, 256, 128)
BATCH, MICROBATCHES, HELD_OUT = 2, 4, 64
RUN, WALLET = RunId("1" * 64), WalletId("0" * 16)


@dataclass(frozen=True)
class _Way:
    """How a model is trained."""

    cuts: tuple[int, ...]  # first layer of each stage, and the number of layers
    precision: WirePrecision = WirePrecision.FP32  # of activations
    gradients: WirePrecision = WirePrecision.FP32
    max_grad_norm: float = InnerOptimization.max_grad_norm

    @property
    def shape(self) -> Architecture:
        """The model's shape: a layer for each stage, or as many in one piece."""
        return replace(SHAPE, layer_count=self.cuts[-1])

    @property
    def options(self) -> StageClientOptions:
        """How numbers travel."""
        return StageClientOptions(self.precision, self.gradients)


WHOLE, CUT, CUT_IN_SIX = (0, 3), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6)
NO_LIMIT = 1e9
BF16, INT8, INT4, RANK8 = WirePrecision.BF16, WirePrecision.INT8, WirePrecision.INT4, WirePrecision.INT4_RANK8
CODED = {  # of activations, and of gradients
    "bf16": (BF16, BF16),
    "int8": (INT8, INT8),
    "int4": (INT4, INT4),
    "int4 with int8 gradients": (INT4, INT8),
    "int4-rank8": (RANK8, RANK8),
    "int4-rank8 with int8 gradients": (RANK8, INT8),
}
GOALS = {name: 0.01 if "int4" in name else 0.002 for name in CODED}  # nats
WAYS = {
    "one piece": _Way(WHOLE),
    "three stages, fp32": _Way(CUT),
    **{
        f"{count} stages, {name}": _Way(cuts, *precisions)
        for count, cuts in (("three", CUT), ("six", CUT_IN_SIX))
        for name, precisions in CODED.items()
    },
    "six stages, fp32": _Way(CUT_IN_SIX),
    "one piece, gradients of any norm": _Way(WHOLE, max_grad_norm=NO_LIMIT),
    "three stages, gradients of any norm": _Way(CUT, max_grad_norm=NO_LIMIT),
}


class _Bytes:
    """Windows of the embedded text at random places, a byte a token; the last tenth is held out. See Feed."""

    def __init__(self, seed: int) -> None:
        text = "".join(topics.topics.values()).encode()
        ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)
        cut = len(ids) * 9 // 10
        self._ids, self._held_out = ids[:cut], ids[cut:]
        self._generator = torch.Generator().manual_seed(seed)
        self.position = DataPosition(0, ShardId(0), 0)

    async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
        """Random windows."""
        length = SHAPE.sequence_length
        starts = torch.randint(0, len(self._ids) - length - 1, (sequences,), generator=self._generator)
        rows = torch.stack([self._ids[start : start + length + 1] for start in starts.tolist()])
        self.position = replace(self.position, window=self.position.window + sequences)
        return Batch(rows[:, :-1], rows[:, 1:], self.position, rows[:, 1:].numel())

    async def held_out(self, count: int = HELD_OUT) -> HeldOut:
        """The same windows whatever the seed."""
        return HeldOut(self.rows(count), 4.0)

    def rows(self, count: int = HELD_OUT) -> Tensor:
        """Held-out windows of inputs and labels, (count, length + 1)."""
        width = SHAPE.sequence_length + 1
        stride = (len(self._held_out) - width) // count
        return torch.stack([self._held_out[stride * number :][:width] for number in range(count)])

    def note_evaluation(self, train_loss: float, held_out_loss: float | None, step: int) -> None:
        """Nothing follows from it."""

    def rewind(self, position: DataPosition) -> None:
        """Only a pause asks for it, and there is none."""
        raise NotImplementedError

    def status(self) -> DataStatus:
        """For nobody."""
        return DataStatus(source="memory", verified=False, explanation="")


def measure() -> Report:
    """One model for each seed and way."""
    found = of_each(_held_out_loss, [(name, seed) for name in WAYS for seed in SEEDS])
    losses = {name: [found[name, seed] for seed in SEEDS] for name in WAYS}
    whole, fp32 = losses["one piece"], losses["three stages, fp32"]
    noise, apart = stdev(whole), _mean_difference(fp32, whole)
    unlimited = _mean_difference(
        losses["three stages, gradients of any norm"], losses["one piece, gradients of any norm"]
    )
    unlimited_whole = _mean_difference(fp32, losses["one piece, gradients of any norm"])
    return Report(
        "pipeline_quality",
        "What a model learns in three stages and in one piece",
        (
            Row("three stages - one piece, fp32", f"{apart:+.4f} nats", f"within {noise:.4f}", abs(apart) <= noise),
            Row("the same where no gradient is limited", f"{unlimited:+.4f} nats", "report", None),
            Row("three stages with limits - one piece without", f"{unlimited_whole:+.4f} nats", "report", None),
            *(
                Row(f"{count} stages, {name} - fp32 on the wire", f"{by:+.4f} nats", f"<= {goal}", by <= goal)
                for count in ("three", "six")
                for name, goal in GOALS.items()
                for by in [_mean_difference(losses[f"{count} stages, {name}"], losses[f"{count} stages, fp32"])]
            ),
            *(Row(f"held-out loss, {way}", _listed(values), "report", None) for way, values in losses.items()),
        ),
        (_conditions(), _cause(apart, unlimited)),
    )


def _cause(apart: float, unlimited: float) -> str:
    return (
        f"Of the {apart:+.4f} nats between three stages and one piece {unlimited:+.4f} are left where no gradient is "
        "limited. The rest is the limit: one piece keeps the norm of all gradients together below 1, a stage only its "
        "own below 1/sqrt(3), and the last one, which has the largest, below 5/sqrt(3). Here that is next to no limit, "
        "and at this learning rate the stricter one helps."
    )


def _conditions() -> str:
    return (
        f"{STEPS} steps of {BATCH * MICROBATCHES} x {SHAPE.sequence_length} bytes of Python's own documentation, seeds "
        f"{', '.join(map(str, SEEDS))}; differences are means over equal seeds, and the goal of the first is the "
        "standard deviation between the seeds in one piece. Each stage limits the norm of its own gradient."
    )


def _mean_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return fmean(a - b for a, b in zip(ours, theirs, strict=True))


def _listed(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)


def _held_out_loss(job: tuple[str, int]) -> float:
    """Of the model that a run with this way and seed has in the end, nats a byte."""
    name, seed = job
    way, feed = WAYS[name], _Bytes(seed)
    compute = ComputeThread(cpu_threads=1)
    with tempfile.TemporaryDirectory() as folder, closing(compute):
        parameters = _parameters(way, seed)
        stages = [
            _stage(compute, Path(folder), parameters, LayerRange(start, stop), number)
            for number, (start, stop) in enumerate(pairwise(way.cuts))
        ]
        trio.run(_train, parameters, stages, feed, way.options)
    whole = StageModel(way.shape)
    whole.load_state_dict(
        {name: tensor for part in stages for name, tensor in part.executor.model.state_dict().items()}
    )
    rows = feed.rows()
    with torch.no_grad():
        return (whole.loss_sum(whole(rows[:, :-1]), rows[:, 1:]) / rows[:, 1:].numel()).item()


def _parameters(way: _Way, seed: int) -> RunParameters:
    return RunParameters(
        name="benchmark",
        version=1,
        architecture=way.shape,
        stage_count=len(way.cuts) - 1,
        batch_size=BATCH,
        sequences_per_step=BATCH * MICROBATCHES,
        initial_weights_seed=seed,
        genesis=GenesisPins("00", 16, None, "00", 256),
        inner=InnerOptimization(
            learning_rate=3e-3, warmup_steps=20, decay_steps=STEPS, max_grad_norm=way.max_grad_norm
        ),
        outer=OuterOptimization(inner_steps=50),
        data_plane="star",  # the chain computes the same numbers, and its server belongs to a whole node
    )


async def _train(
    parameters: RunParameters, stages: Sequence[StageReplica], feed: _Bytes, options: StageClientOptions
) -> None:
    """STEPS steps of every stage; the first one's node drives."""
    with InMemoryNetwork() as network:
        route = _route(network, stages, options)
        driving = DriverParts(stages[0].member.node_id, feed, FixedRouting(route), in_flight=MICROBATCHES)
        async with anyio.create_task_group() as tasks:
            for part in stages:
                parts = TrainerParts(parameters, (part,), None if part.index else driving)
                tasks.start_soon(Trainer(parts).run, STEPS)


def _route(network: InMemoryNetwork, stages: Sequence[StageReplica], options: StageClientOptions) -> list[StageClient]:
    """The first stage is the driver's own, the others are peers."""
    first, *others = stages
    driver = first.member.node_id
    transport = network.join(driver)
    route: list[StageClient] = [LocalStageClient(first.service, driver)]
    for part in others:
        shapes = StageShapes.of(part.executor.model, BATCH)
        stage = StageAddress(RUN, part.layers, 1)
        StageRequestHandler(part.service, stage, shapes).serve(network.join(part.member.node_id))
        route.append(RemoteStageClient(transport, part.member.node_id, stage, shapes, options))
    return route


def _stage(
    compute: ComputeThread, folder: Path, parameters: RunParameters, layers: LayerRange, number: int
) -> StageReplica:
    """A stage without other replicas."""
    identity = StageIdentity(WALLET, NodeId(f"node {number}"), RUN, parameters.architecture, layers, 1)
    policy, store = CheckpointPolicy(every_steps=10, min_seconds=1e9), CheckpointStore(folder / str(number))
    device = torch.device("cpu")
    stage = compute.submit(
        lambda: build_stage(parameters, identity, device, store, policy=policy, precision=Precision.FP32)
    ).result()
    return StageReplica(compute, stage, identity, parameters, number, versions=lambda _: parameters)
