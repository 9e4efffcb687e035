"""What four replicas learn that agree every 25 steps, against one alone and against four that average every gradient.

All replicas live in this process; inner step, gates, aggregator, codec and outer step are the node's own.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import anyio
import torch
import trio
from torch import Tensor

from benchmarks.record import NotHereError, Report, Row
from neuroshard.aggregation import SliceRows, aggregator_config, judge, reduce_slice, reduction_by, slice_statistics
from neuroshard.compression import Codec, make_codec
from neuroshard.config.run_parameters import CodecName, InnerOptimization, OuterOptimization
from neuroshard.model.initial_weights import initialise
from neuroshard.model.tensor_schema import flatten, load_vector
from neuroshard.model.transformer import StageModel
from neuroshard.optim.inner import make_inner_optimizer
from neuroshard.optim.outer import fresh_outer_state
from neuroshard.optim.schedule import learning_rate_at
from neuroshard.training.compute import ComputeThread
from neuroshard.training.executor import StageExecutor
from neuroshard.training.outer_sync import Abandoned, Agreed, OuterSync
from neuroshard.types import Architecture, LayerRange

TEXTS = Path(os.environ.get("BENCHMARK_TEXTS", Path(__file__).parents[2] / "shared" / "data"))
SEEDS = (1, 2, 3)
REPLICAS, INNER_STEPS, ROUNDS = 4, 25, int(os.environ.get("BENCHMARK_ROUNDS", "16"))
STEPS, WARM_STEPS = INNER_STEPS * ROUNDS, 400
SHAPE = Architecture(64, 2, 4, 2, 168, 256, 64)
BATCH, HELD_OUT = 2, 512  # sequences of a replica's inner step; windows
INNER = InnerOptimization(learning_rate=2e-3, warmup_steps=20, schedule="constant")
OUTER = OuterOptimization(inner_steps=INNER_STEPS)
GOAL, AIM, CODEC_TOLERANCE = 0.5, 0.7, 0.02


class _Texts:
    """Windows of all texts at random places, a byte a token; the last tenth of each is held out."""

    def __init__(self) -> None:
        paths = sorted(TEXTS.rglob("*.txt")) if TEXTS.is_dir() else []
        if not paths:
            raise NotHereError(f"no texts in {TEXTS}: name a folder in BENCHMARK_TEXTS")
        texts = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in paths]
        self._trained = torch.cat([text[: len(text) * 9 // 10] for text in texts])
        held_out = torch.cat([text[len(text) * 9 // 10 :] for text in texts])
        stride = (len(held_out) - SHAPE.sequence_length - 1) // HELD_OUT
        self.held_out = _windows(held_out, range(0, stride * HELD_OUT, stride))

    def batch(self, sequences: int, generator: torch.Generator) -> Tensor:
        """Inputs and labels in one, (sequences, length + 1)."""
        last = len(self._trained) - SHAPE.sequence_length - 1
        return _windows(self._trained, torch.randint(0, last, (sequences,), generator=generator).tolist())


@dataclass
class _Meeting:
    """The rounds of the replicas: what a group's members do with what they sent each other."""

    codec: Codec
    keeps_residuals: bool = True
    refused: int = 0
    _contributions: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _done: anyio.Event = field(default_factory=anyio.Event)
    _aggregate: Tensor | None = None

    async def exchange(self, replica: int, contribution: Tensor, outer_step: int) -> Agreed | Abandoned:
        """See Exchange; the last one to come computes for all."""
        contributions, done = self._contributions, self._done
        contributions[replica] = contribution
        if len(contributions) == REPLICAS:
            self._aggregate = self._aggregated([contributions[index] for index in range(REPLICAS)])
            self._contributions, self._done = {}, anyio.Event()
            done.set()
        await done.wait()
        if self._aggregate is None:
            return Abandoned("the gates refused too many")
        sent = self.codec.round_trip(contribution)
        return Agreed(self._aggregate, REPLICAS, sent if self.keeps_residuals else None)

    def _aggregated(self, contributions: Sequence[Tensor]) -> Tensor | None:
        rows = torch.stack([self.codec.round_trip(row) for row in contributions])
        whole = SliceRows.of(rows)
        total = slice_statistics(whole)
        verdict = judge(rows, total)
        self.refused += len(verdict.refused)
        if verdict.abort_reason is not None:
            return None
        reduction = reduction_by(aggregator_config(OUTER), total, verdict)
        return self.codec.round_trip(reduce_slice(whole, reduction))


@dataclass(frozen=True)
class _Start:
    """Where all ways of one seed begin: what one replica has learnt in its first steps."""

    seed: int
    steps: int
    weights: Tensor
    moments: dict[str, Any]

    def executor(self) -> StageExecutor:
        """A replica that goes on from here."""
        executor = _new_executor(self.seed)
        load_vector(executor.model, self.weights)
        executor.optimizer.load_state_dict(copy.deepcopy(self.moments))
        return executor


@dataclass(frozen=True)
class _Outcome:
    """How one way of training ended."""

    loss: float  # held out, nats a byte
    refused: int = 0


def measure() -> Report:
    """One model for each seed and way."""
    texts = _Texts()
    starts = [_start(texts, seed, WARM_STEPS) for seed in SEEDS]
    bounds = _Bounds.of(texts, starts)
    fp32 = [_replicas(texts, start, "fp32") for start in starts]
    int8 = [_replicas(texts, start, "int8") for start in starts]
    plain = [_replicas(texts, start, "int8", keeps_residuals=False) for start in starts]
    unlearnt = [_start(texts, seed, 0) for seed in SEEDS]
    new_bounds = _Bounds.of(texts, unlearnt)
    new = [_replicas(texts, start, "fp32") for start in unlearnt]
    by = _differences(int8, fp32)
    refused = sum(way.refused for way in (*fp32, *int8, *plain, *new))
    rows = (
        *bounds.rows(),
        *bounds.share_rows("rounds in fp32", fp32),
        *bounds.share_rows("rounds in int8 with error feedback", int8),
        Row("int8 with error feedback - fp32", by[0], f"within {CODEC_TOLERANCE}", abs(by[1]) <= CODEC_TOLERANCE),
        Row("int8 without error feedback - fp32", _differences(plain, fp32)[0], "report", None),
        *new_bounds.rows("from nothing, "),
        *new_bounds.share_rows("from nothing, rounds in fp32", new),
        Row("contributions refused by the gates", str(refused), "report", None),
    )
    return Report("diloco", "Replicas that agree every 25 steps", rows, (_conditions(),))


@dataclass(frozen=True)
class _Bounds:
    """What rounds can be between, by seed."""

    alone: Sequence[_Outcome]
    together: Sequence[_Outcome]

    @staticmethod
    def of(texts: _Texts, starts: Sequence[_Start]) -> _Bounds:
        """Train both from every start."""
        return _Bounds(
            [_apart(texts, start, BATCH) for start in starts],
            [_apart(texts, start, REPLICAS * BATCH) for start in starts],
        )

    def rows(self, prefix: str = "") -> tuple[Row, Row]:
        """Their losses."""
        return (
            Row(f"{prefix}one replica alone: held-out loss", _listed(self.alone), "report", None),
            Row(f"{prefix}every gradient averaged: held-out loss", _listed(self.together), "report", None),
        )

    def share_rows(self, name: str, ways: Sequence[_Outcome]) -> tuple[Row, Row]:
        """The losses of a way, and how much of the gap between the bounds it closes."""
        shares = [
            (one.loss - way.loss) / (one.loss - all_.loss)
            for one, way, all_ in zip(self.alone, ways, self.together, strict=True)
        ]
        share = f"{fmean(shares):.0%} ± {stdev(shares):.0%} ({', '.join(f'{share:.0%}' for share in shares)})"
        return (
            Row(f"{name}: held-out loss", _listed(ways), "report", None),
            Row(f"{name}: share of the gap closed", share, f">= {GOAL:.0%}, aim {AIM:.0%}", fmean(shares) >= GOAL),
        )


def _conditions() -> str:
    count = sum(parameter.numel() for parameter in StageModel(SHAPE).parameters())
    return (
        f"{REPLICAS} replicas of {count:,} parameters begin with the model and the moments that one has after "
        f"{WARM_STEPS} steps: {ROUNDS} rounds of {INNER_STEPS} inner steps of {BATCH} x {SHAPE.sequence_length} bytes "
        f"of books; outer step {OUTER.learning_rate}, momentum from 0.5 to {OUTER.momentum}, trimmed mean. Alone: as "
        f"many steps of one replica. Every gradient averaged: as many steps of {REPLICAS} x {BATCH} sequences. All "
        f"have AdamW at {INNER.learning_rate:g}, constant after {INNER.warmup_steps} steps, the better of 2e-3 and "
        f"4e-3 for one replica alone with another seed. Seeds {', '.join(map(str, SEEDS))} for weights and data; ± is "
        f"the standard deviation between them. The held-out loss, nats a byte, is that of the last anchor on "
        f"{HELD_OUT} windows from the last tenth of each book. From nothing: without the steps that all have in common."
    )


def _apart(texts: _Texts, start: _Start, batch: int) -> _Outcome:
    """One model without rounds."""
    executor, generator = start.executor(), _generator(start.seed, 0)
    for step in range(start.steps, start.steps + STEPS):
        _inner_step(executor, texts.batch(batch, generator), step)
    return _Outcome(_held_out_loss(executor.model, texts))


def _replicas(texts: _Texts, start: _Start, codec: CodecName, *, keeps_residuals: bool = True) -> _Outcome:
    """Replicas that train on data of their own and meet every INNER_STEPS steps."""
    meeting = _Meeting(make_codec(codec), keeps_residuals)
    executors = [start.executor() for _ in range(REPLICAS)]
    with closing(ComputeThread(cpu_threads=1)) as compute:
        outer = [
            OuterSync(
                compute=compute,
                model=executor.model,
                parameters=replace(OUTER, codec=codec),
                exchange=partial(meeting.exchange, replica),
                state=fresh_outer_state(flatten(executor.model)),
            )
            for replica, executor in enumerate(executors)
        ]

        async def train() -> None:
            async with anyio.create_task_group() as tasks:
                for replica, executor in enumerate(executors):
                    inner_step = partial(_replica_step, executor, texts, _generator(start.seed, replica))
                    tasks.start_soon(_train, outer[replica], inner_step, start.steps, compute)

        trio.run(train)
    anchors = {outer_sync.state.anchor.numpy().tobytes() for outer_sync in outer}
    if len(anchors) != 1 or outer[0].progress.failed:
        raise AssertionError("the replicas did not agree")
    load_vector(executors[0].model, outer[0].state.anchor)
    return _Outcome(_held_out_loss(executors[0].model, texts), meeting.refused)


async def _train(outer: OuterSync, inner_step: Callable[[int], None], first_step: int, compute: ComputeThread) -> None:
    for done in range(STEPS):
        await compute.run(partial(inner_step, first_step + done))
        outer.after_step(BATCH)
        if (done + 1) % INNER_STEPS == 0:
            await outer.run_round(0.0)


def _replica_step(executor: StageExecutor, texts: _Texts, generator: torch.Generator, step: int) -> None:
    _inner_step(executor, texts.batch(BATCH, generator), step)


def _start(texts: _Texts, seed: int, steps: int) -> _Start:
    executor, generator = _new_executor(seed), _generator(seed, REPLICAS)
    for step in range(steps):
        _inner_step(executor, texts.batch(BATCH, generator), step)
    return _Start(seed, steps, flatten(executor.model), executor.optimizer.state_dict())


def _new_executor(seed: int) -> StageExecutor:
    model = StageModel(SHAPE, LayerRange(0, SHAPE.layer_count))
    initialise(model, seed)
    return StageExecutor(model, make_inner_optimizer(model, INNER), torch.device("cpu"))


def _inner_step(executor: StageExecutor, rows: Tensor, step: int) -> None:
    labels = rows[:, 1:]
    executor.loss(rows[:, :-1], labels)
    result = executor.step(learning_rate_at(step, INNER), INNER.max_grad_norm, labels.numel())
    if not result.finite:
        raise AssertionError(f"step {step} was not finite")


def _held_out_loss(model: StageModel, texts: _Texts) -> float:
    rows = texts.held_out
    with torch.no_grad():
        return (model.loss_sum(model(rows[:, :-1]), rows[:, 1:]) / rows[:, 1:].numel()).item()


def _windows(ids: Tensor, starts: Sequence[int]) -> Tensor:
    return torch.stack([ids[start : start + SHAPE.sequence_length + 1] for start in starts]).to(torch.int64)


def _generator(seed: int, replica: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * seed + replica)


def _differences(ours: Sequence[_Outcome], theirs: Sequence[_Outcome]) -> tuple[str, float]:
    """Over equal seeds: in words, and the mean."""
    values = [a.loss - b.loss for a, b in zip(ours, theirs, strict=True)]
    return f"{fmean(values):+.4f} ± {stdev(values):.4f} nats", fmean(values)


def _listed(ways: Sequence[_Outcome]) -> str:
    return ", ".join(f"{way.loss:.4f}" for way in ways)
