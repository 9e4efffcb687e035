"""Time until a model in four stages has learnt as much over a slow line: dense in three formats, and subspaces.

The measure is that of ProtocolNanoGPT: optimizer steps to a loss, times the seconds of a step. The stages compute here,
one after another, with the codecs of the wire between them. The seconds on the line follow from the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median, stdev

import torch
from torch import Tensor

from benchmarks.plots import Plot, Point
from benchmarks.record import Report, Row
from benchmarks.seeds import of_each
from benchmarks.sizes import size
from benchmarks.together import BATCH, SHAPE, Corpus
from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.model.architecture import parameter_count
from neuroshard.model.subspace import Subspace
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.optim.schedule import learning_rate_at
from neuroshard.pipeline.executor import PassResult, StageExecutor
from neuroshard.pipeline.stage_protocol import WirePrecision, from_wire, to_wire, wire_bytes
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import ID_BYTES, Architecture, LayerRange

DENSE = size(Architecture(256, 8, 8, 4, 704, 256, 64), Architecture(32, 4, 2, 2, 64, 256, 64))
CUTS = size((0, 2, 4, 6, 8), (0, 1, 2, 3, 4))
FREE_BLOCKS = CUTS[-1] - CUTS[-2]  # as many as a run has by default
EDGES = len(CUTS) - 2
BATCHES = size(4, 1)  # of the corpus, in a step
STEPS = size(300, 4)  # the loss of dense bf16 after these is the target
MOST_STEPS = 3  # times STEPS: an arm that needs more has failed
LOOK = size(25, 2)  # steps between two looks at the held-out loss
WINDOWS = size(64, 2)  # held-out sequences
SEEDS = size((1, 2, 3), (1, 2))  # the first for all arms, all for dense bf16 and the two best
TUNING_SEED, TUNING_STEPS = 9, size(100, 2)
RATES = (1e-3, 2e-3, 4e-3)
WARMUP = 20
TIMED_STEPS = size(12, 1)  # of each arm in turn
LATENCY = size(0.05, 0.0)  # seconds, one way
LINE_SHARE = 0.95  # of a step of dense bf16
GOAL = 0.33
BF16, INT8, INT4 = WirePrecision.BF16, WirePrecision.INT8, WirePrecision.INT4


@dataclass(frozen=True)
class Arm:
    """What travels between two stages."""

    name: str
    precision: WirePrecision
    rank: int = 0  # of the subspace; 0: whole activations
    is_wider: bool = False  # the parameters that the subspace saves go to the feed-forward network

    @property
    def shape(self) -> Architecture:
        """Its model."""
        if self.rank == 0:
            return DENSE
        shape = replace(DENSE, subspace_rank=self.rank, free_blocks=FREE_BLOCKS)
        while self.is_wider and parameter_count(shape) < parameter_count(DENSE):
            shape = replace(shape, feed_forward_size=shape.feed_forward_size + 8)
        return shape

    @property
    def token_bytes(self) -> int:
        """Bytes of a token over an edge, there and back."""
        coded = wire_bytes(1, self.shape.wire_size, self.precision)
        return 2 * coded + (ID_BYTES if self.rank else 0)


def rank_of_bytes(count: int) -> int:
    """The largest rank whose coefficients and id travel in so many bytes per token in int8."""
    ranks = range(8, DENSE.hidden_size // 2 + 1)
    return max(rank for rank in ranks if wire_bytes(1, rank, INT8) + ID_BYTES <= count)


BASELINE = Arm("dense bf16", BF16)
RANKS = [DENSE.hidden_size // part for part in size((8, 16, 32), (4,))]
EQUAL_RANK = rank_of_bytes(wire_bytes(1, DENSE.hidden_size, INT4))
ARMS = (
    BASELINE,
    Arm("dense int8", INT8),
    Arm("dense int4", INT4),
    *(Arm(f"subspace {rank} int8", INT8, rank) for rank in RANKS),
    *(Arm(f"subspace {rank} int8, equal parameters", INT8, rank, is_wider=True) for rank in RANKS),
    Arm(f"subspace {EQUAL_RANK} int8, the bytes of dense int4", INT8, EQUAL_RANK),
)


@dataclass(frozen=True)
class Job:
    """One training."""

    arm: Arm
    seed: int
    rate: float
    steps: int
    target: float | None = None  # it ends at this held-out loss

    def learnt(self) -> Learnt:
        """Train it."""
        return _Pipeline(self.arm, self.seed, self.rate).train(self.steps, self.target)


@dataclass(frozen=True)
class Learnt:
    """Held-out losses of one training."""

    losses: tuple[float, ...]  # nats a byte, after each LOOK steps

    def steps_to(self, target: float) -> float | None:
        """Steps until the loss is reached, between two looks by proportion; None if it is not."""
        before = float("inf")
        for number, loss in enumerate(self.losses, 1):
            if loss <= target:
                share = 1.0 if before == float("inf") else (before - target) / (before - loss)
                return LOOK * (number - 1 + share)
            before = loss
        return None


class _Pipeline:
    """Four stages, one after another, with the wire's codecs between them."""

    def __init__(self, arm: Arm, seed: int, rate: float) -> None:
        shape = arm.shape
        subspace = Subspace(shape, seed) if shape.subspace_rank else None
        inner = InnerOptimization(learning_rate=rate, warmup_steps=WARMUP, schedule="constant")
        self._corpus, self._inner, self._precision = Corpus.read(None), inner, arm.precision
        self._data = torch.Generator().manual_seed(seed)
        self._stages = list[StageExecutor]()
        for start, stop in pairwise(CUTS):
            model = StageModel(shape, LayerRange(start, stop), subspace)
            initialise(model, seed)
            self._stages.append(StageExecutor(model, make_inner_optimizer(model, inner), torch.device("cpu")))
        self._shapes = [StageShapes.of(stage.model, 1024) for stage in self._stages]

    def train(self, steps: int, target: float | None) -> Learnt:
        """Train until a number of steps or a held-out loss."""
        losses = list[float]()
        for step in range(1, steps + 1):
            self.step(step)
            if step % LOOK == 0:
                losses.append(self._held_out_loss())
                if target is not None and losses[-1] <= target:
                    break
        return Learnt(tuple(losses))

    def step(self, step: int) -> None:
        """One optimizer step of all stages."""
        rows = torch.cat([self._corpus.batch(self._data) for _ in range(BATCHES)])
        ids, labels = rows[:, :-1], rows[:, 1:].contiguous()
        *before, last = zip(self._stages, self._shapes, strict=True)
        opened, values = list[PassResult](), ids
        for stage, shapes in before:
            of_tokens = ids if shapes.needs_ids else None
            opened.append(stage.forward_pass(shapes, values, keeps_graph=True, ids=of_tokens))
            values = self._sent(opened[-1].output)
        end = last[0].loss_pass(last[1], values, labels, ids if last[1].needs_ids else None)
        gradient = end.gradient
        for (stage, _), passed in zip(reversed(before), reversed(opened), strict=True):
            assert passed.opened is not None
            gradient = stage.backward_pass(passed.opened, self._sent(gradient)).gradient
        rate = learning_rate_at(step, self._inner)
        for stage in self._stages:
            stage.step(rate, self._inner.max_grad_norm, labels.numel())

    def _sent(self, values: Tensor | None) -> Tensor:
        assert values is not None
        parts = {part.spec.name: part for part in to_wire("values", values, self._precision)}
        return from_wire("values", parts, self._precision, values.shape[2])

    def _held_out_loss(self) -> float:
        rows = self._corpus.held_out[:WINDOWS]
        ids = values = rows[:, :-1]
        for stage, shapes in zip(self._stages[:-1], self._shapes, strict=False):
            values = self._sent(stage.infer(values, ids=ids if shapes.needs_ids else None))
        of_tokens = ids if self._shapes[-1].needs_ids else None
        return self._stages[-1].infer(values, rows[:, 1:], of_tokens).sum().item() / rows[:, 1:].numel()


def measure() -> Report:
    """Tune each kind, find the target, train all arms to it with one seed, and the best ones with all seeds."""
    rates = _tuned_rates()
    first, *others = SEEDS
    long = MOST_STEPS * STEPS
    baselines = of_each(Job.learnt, [Job(BASELINE, seed, rates[BASELINE], STEPS) for seed in SEEDS])
    targets = {job.seed: learnt.losses[-1] for job, learnt in baselines.items()}
    found = {(job.arm, job.seed): learnt for job, learnt in baselines.items()}
    jobs = [Job(arm, first, rates[arm], long, targets[first]) for arm in ARMS if arm != BASELINE]
    found |= {(job.arm, job.seed): learnt for job, learnt in of_each(Job.learnt, jobs).items()}
    compute = _compute_seconds(rates)
    meter = Meter(found, targets, compute)
    best = sorted((arm for arm in ARMS if arm != BASELINE), key=lambda arm: meter.ratio(arm, first) or float("inf"))
    jobs = [Job(arm, seed, rates[arm], long, targets[seed]) for arm in best[:2] for seed in others]
    found |= {(job.arm, job.seed): learnt for job, learnt in of_each(Job.learnt, jobs).items()}
    return _report(Meter(found, targets, compute), rates, best[:2])


def _tuned_rates() -> dict[Arm, float]:
    """The best learning rate of dense models, and of each rank, by the loss after a few steps with another seed."""
    kinds = {arm.rank: arm for arm in ARMS if arm.rank == 0 or not arm.is_wider}
    jobs = [Job(arm, TUNING_SEED, rate, TUNING_STEPS) for arm in kinds.values() for rate in RATES]
    losses = {job: learnt.losses[-1] for job, learnt in of_each(Job.learnt, jobs).items()}
    chosen = {
        rank: min((job for job in jobs if job.arm == arm), key=lambda job: losses[job]).rate
        for rank, arm in kinds.items()
    }
    return {arm: chosen[arm.rank] for arm in ARMS}


def _compute_seconds(rates: dict[Arm, float]) -> dict[Arm, float]:
    """Medians of the seconds that a step computes, with one thread; the arms take turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pipelines = {arm: _Pipeline(arm, SEEDS[0], rates[arm]) for arm in ARMS}
    seconds = {arm: list[float]() for arm in ARMS}
    for step in range(1, TIMED_STEPS + 1):
        for arm, pipeline in pipelines.items():
            began = time.perf_counter()
            pipeline.step(step)
            seconds[arm].append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return {arm: median(taken) for arm, taken in seconds.items()}


@dataclass(frozen=True)
class Meter:
    """Steps times seconds of each training."""

    found: dict[tuple[Arm, int], Learnt]  # by arm and seed
    targets: dict[int, float]  # by seed
    compute: dict[Arm, float]  # seconds that a step computes in all stages

    @property
    def rate(self) -> float:
        """Bytes per second of the line on which dense bf16 spends LINE_SHARE of a step."""
        line = self.compute[BASELINE] * LINE_SHARE / (1 - LINE_SHARE)
        return _step_bytes(BASELINE) / (line - 2 * EDGES * LATENCY)

    def step_seconds(self, arm: Arm) -> float:
        """Seconds of a step: all stages one after another, and the line."""
        return self.compute[arm] + 2 * EDGES * LATENCY + _step_bytes(arm) / self.rate

    def steps(self, arm: Arm, seed: int) -> float | None:
        """Steps to the target of a seed."""
        return self.found[arm, seed].steps_to(self.targets[seed])

    def ratio(self, arm: Arm, seed: int) -> float | None:
        """Time to the target in times of that of dense bf16."""
        steps, whole = self.steps(arm, seed), self.steps(BASELINE, seed)
        assert whole is not None
        return None if steps is None else steps * self.step_seconds(arm) / (whole * self.step_seconds(BASELINE))


def _step_bytes(arm: Arm) -> int:
    return EDGES * BATCHES * BATCH * SHAPE.sequence_length * arm.token_bytes


def _report(meter: Meter, rates: dict[Arm, float], best: Sequence[Arm]) -> Report:
    rows, points = list[Row](), list[Point]()
    for arm in ARMS:
        seeds = [seed for seed in SEEDS if (arm, seed) in meter.found]
        ratios = [ratio for seed in seeds if (ratio := meter.ratio(arm, seed)) is not None]
        item = f"{arm.name}: {arm.token_bytes} B per token and edge, {parameter_count(arm.shape):,} parameters"
        if len(ratios) < len(seeds):
            rows.append(Row(item, f"target not reached in {MOST_STEPS * STEPS} steps", "report", None))
            continue
        steps = fmean(meter.steps(arm, seed) or 0.0 for seed in seeds)
        spread = f" ± {stdev(ratios):.3f}" if len(ratios) > 1 else ""
        figure = f"{steps:,.0f} steps x {meter.step_seconds(arm):.2f} s = {fmean(ratios):.3f}{spread} of dense bf16"
        is_goal = arm == best[0]
        rows.append(
            Row(item, figure, f"<= {GOAL}" if is_goal else "report", fmean(ratios) <= GOAL if is_goal else None)
        )
        points.append(Point(arm.name, arm.token_bytes, fmean(ratios)))
    return Report(
        "protocol_nano",
        "Time to a loss over a slow line: formats of activations, and subspaces",
        tuple(rows),
        _notes(meter, rates),
        Plot("bytes per token and edge, there and back", "time to the loss, of dense bf16", tuple(points)),
    )


def _notes(meter: Meter, rates: dict[Arm, float]) -> tuple[str, ...]:
    first, seeds = SEEDS[0], ", ".join(map(str, SEEDS))
    chosen = ", ".join(f"{arm.name} {rates[arm]:g}" for arm in ARMS if not arm.is_wider)
    tried = ", ".join(f"{rate:g}" for rate in RATES)
    model = (
        f"{DENSE.layer_count} layers of {DENSE.hidden_size} in {len(CUTS) - 1} stages, {BATCHES * BATCH} x "
        f"{SHAPE.sequence_length} bytes of books per step, AdamW at a constant rate after {WARMUP} steps. Rates by the "
        f"loss of seed {TUNING_SEED} after {TUNING_STEPS} steps, of {tried}: {chosen}. The target of a seed is the "
        f"held-out loss of dense bf16 after {STEPS} steps: {meter.targets[first]:.4f} nats a byte with seed {first}. "
        f"Seeds {seeds} for dense bf16 and the two best arms, {first} for the others."
    )
    line = (
        f"Computed: a step is the measured arithmetic of all stages on one thread, and over each of {EDGES} edges, "
        f"there and back, {LATENCY * 1000:.0f} ms and the bytes at {meter.rate / 125_000:.2f} Mbit/s. On this line "
        f"dense bf16 spends {LINE_SHARE:.0%} of a step, as in the reference. Nothing overlaps."
    )
    wider = "Equal parameters: the numbers that the subspace saves go to the feed-forward network, as in the reference."
    return model, line, wider
