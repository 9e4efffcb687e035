"""Training record of a stage: progress, loss curve, evaluations, and their form in a checkpoint's metadata."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import isfinite
from typing import Any

import torch

from neuroshard.data.held_out_losses import Evaluation, comparable_mean, paired_difference
from neuroshard.data.shard_assignment import RotationRule
from neuroshard.errors import CheckpointError
from neuroshard.optim.outer import LineProgress
from neuroshard.pipeline.executor import Precision
from neuroshard.state.checkpoint_manifest import CheckpointMeta
from neuroshard.state.outer_state import OuterProgress, line_from_json, line_to_json
from neuroshard.status.snapshot import HeldOutPoint, LossPoint
from neuroshard.types import Architecture, DataPosition, JsonValue, LayerRange, NodeId, RunId, WalletId

CAPACITY = 2_000
SNAPSHOT_POINTS = 1_000
RECENT_POINTS = 200
STEPS_BEFORE_RESTORE = 3  # without a finite loss and gradient, in a row


class LossCurve:
    """Points of the loss curve, oldest first. `tokens` of a point is the total up to its step.

    All points stand for the same number of steps. At the capacity, neighbours are merged, and each later point stands
    for twice the number of steps.
    """

    def __init__(self, points: Sequence[LossPoint] = (), capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._points = list(points)
        self._stride = _stride(points)
        self._open: LossPoint | None = None  # incomplete last point
        self._open_steps = 0
        self._recent = deque(points[-RECENT_POINTS:], maxlen=RECENT_POINTS)
        self._snapshot: tuple[LossPoint, ...] | None = None
        self._shown: list[LossPoint] = []  # complete groups of the last snapshot; the next snapshot only adds to them
        self._shown_size = 1
        while len(self._points) >= self._capacity:
            self._halve()

    def __len__(self) -> int:
        return len(self._points) + (self._open is not None)

    def add(self, point: LossPoint) -> None:
        """Add the loss of one step to the curve."""
        self._recent.append(point)
        mean = 0.0 if self._open is None else self._open.loss
        self._open_steps += 1
        self._open = replace(point, loss=mean + (point.loss - mean) / self._open_steps)
        self._snapshot = None
        if self._open_steps >= self._stride:
            self._points.append(self._open)
            self._open, self._open_steps = None, 0
            if len(self._points) >= self._capacity:
                self._halve()

    def recent(self, count: int) -> tuple[LossPoint, ...]:
        """Newest steps one by one, oldest first; at most 200 are kept."""
        return tuple(self._recent)[-count:]

    def snapshot(self) -> tuple[LossPoint, ...]:
        """Return at most 1,000 points for display. The object stays the same until a step is added."""
        if self._snapshot is None:
            size = max(1, -(-len(self) // SNAPSHOT_POINTS))
            if size != self._shown_size:
                self._shown, self._shown_size = [], size
            complete = len(self._points) - len(self._points) % size
            self._shown += merge_neighbours(self._points[len(self._shown) * size : complete], size)
            rest = self._points[complete:] if self._open is None else [*self._points[complete:], self._open]
            self._snapshot = (*self._shown, *merge_neighbours(rest, size))
        return self._snapshot

    def _halve(self) -> None:
        """Merge neighbours, which halves the number of points."""
        self._points = merge_neighbours(self._points, 2)
        self._stride *= 2
        self._shown = []


def merge_neighbours(points: Sequence[LossPoint], size: int) -> list[LossPoint]:
    """Merge each `size` neighbours to one point: their mean loss, at the position of the last one."""
    if size == 1:
        return list(points)
    return [_merged(points[i : i + size]) for i in range(0, len(points), size)]


def successive_noise(losses: Sequence[float]) -> float:
    """Standard deviation of a curve around its trend, computed from successive differences to exclude the trend.

    sigma^2 = sum (x_{i+1} - x_i)^2 / (2 (n - 1)), von Neumann et al. 1941. Zero for fewer than two losses.
    """
    if len(losses) < 2:
        return 0.0
    squares = [(b - a) ** 2 for a, b in pairwise(losses)]
    return (sum(squares) / (2 * len(squares))) ** 0.5


def _merged(points: Sequence[LossPoint]) -> LossPoint:
    last = points[-1]
    loss = sum(point.loss for point in points) / len(points)
    return LossPoint(last.step, last.time, loss, last.lr, last.tokens)


def _stride(points: Sequence[LossPoint]) -> int:
    """Number of steps for which a point of a stored curve stands."""
    if len(points) < 2:
        return 1
    gaps = sorted(b.step - a.step for a, b in pairwise(points))
    return max(1, gaps[len(gaps) // 2])


MAX_EVALUATIONS = 128


class EvaluationRecord:
    """Evaluations of a run. A full record keeps the first one and drops every second one in the middle."""

    def __init__(self, evaluations: Sequence[Evaluation] = (), capacity: int = MAX_EVALUATIONS) -> None:
        self._capacity = capacity
        self._evaluations: list[Evaluation] = []
        self._points: list[HeldOutPoint] = []
        for evaluation in evaluations:
            self.add(evaluation)

    @property
    def is_empty(self) -> bool:
        """Whether there is no baseline yet."""
        return not self._evaluations

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """Evaluations, oldest first; the first one is the baseline."""
        return tuple(self._evaluations)

    @property
    def points(self) -> tuple[HeldOutPoint, ...]:
        """The evaluations as points for display."""
        return tuple(self._points)

    def add(self, evaluation: Evaluation) -> None:
        """Append the newest evaluation."""
        if self._evaluations:
            self._evaluations[-1] = replace(self._evaluations[-1], claims=())
        self._evaluations.append(evaluation)
        self._points.append(_point(self._evaluations[0], evaluation))
        if len(self._evaluations) >= self._capacity:
            keep = [0, *range(2, self._capacity // 2, 2), *range(self._capacity // 2, len(self._evaluations))]
            self._evaluations = [self._evaluations[i] for i in keep]
            self._points = [self._points[i] for i in keep]

    def to_json(self) -> JsonValue:
        """Return the rows for a checkpoint."""
        return [_row(evaluation) for evaluation in self._evaluations]

    @classmethod
    def from_json(cls, rows: JsonValue) -> EvaluationRecord:
        """Read the record of a checkpoint. Raises CheckpointError for rows that `to_json` cannot have written."""
        if not isinstance(rows, list) or len(rows) > MAX_EVALUATIONS:
            raise CheckpointError("The evaluations of the checkpoint are malformed.")
        return cls([_evaluation(row) for row in rows])


def _point(baseline: Evaluation, evaluation: Evaluation) -> HeldOutPoint:
    difference = paired_difference(baseline.losses, evaluation.losses)
    return HeldOutPoint(
        evaluation.step,
        evaluation.time,
        comparable_mean(baseline, evaluation),
        difference.mean,
        difference.standard_error,
        evaluation.measured_by,
    )


def _texts(rest: Sequence[JsonValue]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return nodes and claims. Raises CheckpointError for any other values."""
    match rest:
        case [[*nodes], [*claims]]:
            texts = [each for each in (*nodes, *claims) if isinstance(each, str)]
            if len(texts) == len(nodes) + len(claims):
                return tuple(texts[: len(nodes)]), tuple(texts[len(nodes) :])
        case _:
            pass
    raise CheckpointError("The checkpoint names the node that measured an evaluation in a malformed way.")


def _row(evaluation: Evaluation) -> JsonValue:
    """Return the row of an evaluation; without other nodes' measurements it has the older, shorter form."""
    row: list[JsonValue] = [evaluation.step, evaluation.time, list(evaluation.losses)]
    return [*row, list(evaluation.measured_by), list(evaluation.claims)] if evaluation.measured_by else row


def _evaluation(row: JsonValue) -> Evaluation:
    match row:
        case [int(step), float() | int() as time, [*losses], *rest] if losses:
            numbers = tuple(float(loss) for loss in losses if isinstance(loss, float | int))
            nodes, claims = _texts(rest) if rest else ((), ())
            if len(numbers) == len(losses) and all(isfinite(loss) for loss in numbers):
                return Evaluation(step, float(time), numbers, tuple(map(NodeId, nodes)), claims)
        case _:
            pass
    raise CheckpointError("An evaluation of the checkpoint is malformed.")


EMA_MEMORY = 0.95
INITIAL_STEPS = 10  # their mean is the "initial loss"
NOTED_LOSSES = RotationRule().losses


@dataclass(frozen=True)
class NotedLoss:
    """Losses that the data feed got after one step. A resumed feed gets them again to make the same choices."""

    step: int
    train_loss: float
    held_out_loss: float | None


@dataclass(frozen=True)
class SkippedSteps:
    """Counts skipped steps. Several in a row mean that the weights are spoilt and not the data."""

    skipped: int = 0  # since the start of the run
    in_a_row: int = 0
    last_step: int | None = None  # step of the last non-finite value

    def after_step(self, step: int, finite: bool) -> SkippedSteps:
        """Update the counts after a step was applied (finite) or skipped."""
        if finite:
            return replace(self, in_a_row=0)
        return SkippedSteps(self.skipped + 1, self.in_a_row + 1, step)

    @property
    def must_restore(self) -> bool:
        """Whether training must return to the last good checkpoint."""
        return self.in_a_row >= STEPS_BEFORE_RESTORE

    def restored(self) -> SkippedSteps:
        """Reset the steps in a row after a checkpoint was restored."""
        return replace(self, in_a_row=0)


@dataclass(frozen=True)
class Progress:
    """Counters of one stage. Every step creates a new value."""

    steps: int = 0  # applied inner steps
    tokens: int = 0
    sequences: int = 0
    loss: float | None = None  # of the last applied step, nats per token
    loss_ema: float | None = None
    initial_loss: float | None = None  # mean of the first steps
    grad_norm: float | None = None
    position: DataPosition | None = None  # first window that no step has used
    noted: tuple[NotedLoss, ...] = ()  # losses on the present shard, newest last
    non_finite: SkippedSteps = field(default_factory=SkippedSteps)

    def after_step(
        self,
        loss: float | None,
        tokens: int,
        sequences: int,
        *,
        position: DataPosition | None,
        finite: bool,
        grad_norm: float | None = None,
    ) -> Progress:
        """Count a step's worth of data, no matter which node made the step.

        `loss` is None if this node has neither measured nor received it, `grad_norm` if another node made the step, and
        `position` if the step used none of this node's data. A new shard clears the noted losses. A step that is not
        finite changes only the position and the count of skipped steps.
        """
        is_same_shard = position is None or (self.position is not None and position.order == self.position.order)
        counted = replace(
            self,
            position=position or self.position,
            noted=self.noted if is_same_shard else (),
            non_finite=self.non_finite.after_step(self.steps + 1, finite=finite),
        )
        if not finite:
            return counted
        loss_ema, initial_loss = self.loss_ema, self.initial_loss
        if loss is not None:
            loss_ema = loss if loss_ema is None else EMA_MEMORY * loss_ema + (1 - EMA_MEMORY) * loss
            if self.steps < INITIAL_STEPS:
                initial_loss = ((initial_loss or 0.0) * self.steps + loss) / (self.steps + 1)
        return replace(
            counted,
            steps=self.steps + 1,
            tokens=self.tokens + tokens,
            sequences=self.sequences + sequences,
            loss=loss,
            loss_ema=loss_ema,
            initial_loss=initial_loss,
            grad_norm=grad_norm,
        )


_TORCH_GENERATOR = "torch"


@dataclass(frozen=True)
class StageIdentity:
    """Owner, run and shape of a stage. A checkpoint must match them."""

    wallet_id: WalletId
    node_id: NodeId
    run_id: RunId
    architecture: Architecture
    layers: LayerRange
    threads: int  # of one torch operation: results are bit-identical only with the same number
    subspace_seed: int | None = None  # None without a subspace


@dataclass(frozen=True)
class Inherited:
    """Work of other nodes in a stage when this node received it. It does not count as this node's work."""

    steps: int = 0
    tokens: int = 0


@dataclass
class TrainingRecord:
    """Training state without tensors. Only the trainer writes it."""

    progress: Progress = field(default_factory=Progress)
    history: LossCurve = field(default_factory=LossCurve)
    evaluations: EvaluationRecord = field(default_factory=EvaluationRecord)
    evaluation_seconds: float | None = None  # duration of the last evaluation
    node_id: NodeId | None = None  # node whose data position a restored record contains
    pinned_digest: str = ""  # SHA-256 of the pinned sequences: results on other sequences are not comparable
    inherited: Inherited = field(default_factory=Inherited)

    def replace_with(self, other: TrainingRecord) -> None:
        """Replace all values by those of another record, such as one from a checkpoint."""
        vars(self).update(vars(other))

    def note_loss(self, loss: float | None, time: float, learning_rate: float) -> None:
        """Add the last step to the curve; `time` is in seconds since the epoch."""
        if loss is not None:
            self.history.add(LossPoint(self.progress.steps, time, loss, learning_rate, self.progress.tokens))


def to_meta(
    record: TrainingRecord,
    *,
    outer: OuterProgress,
    outer_step: int,
    line: LineProgress,
    identity: StageIdentity,
    precision: Precision,
    time: float,
) -> CheckpointMeta:
    """Create the metadata of a checkpoint of the present state; `time` is in seconds since the epoch."""
    progress = record.progress
    extra: dict[str, JsonValue] = {
        "evaluations": record.evaluations.to_json(),
        "evaluation_seconds": record.evaluation_seconds,
        "pinned_digest": record.pinned_digest,
        "initial_loss": progress.initial_loss,
        "grad_norm": progress.grad_norm,
        "noted": [[n.step, n.train_loss, n.held_out_loss] for n in progress.noted],
        "non_finite": asdict(progress.non_finite),
        "outer": asdict(outer) | line_to_json(line),
        "inherited": asdict(record.inherited),
    }
    return CheckpointMeta(
        wallet_id=identity.wallet_id,
        node_id=identity.node_id,
        run_id=identity.run_id,
        architecture=identity.architecture,
        layers=identity.layers,
        step=progress.steps,
        time=time,
        tokens=progress.tokens,
        sequences=progress.sequences,
        loss=progress.loss,
        loss_ema=progress.loss_ema,
        outer_step=outer_step,
        inner_step=outer.inner_steps,
        data_position=progress.position,
        rng={_TORCH_GENERATOR: torch.random.get_rng_state().numpy().tobytes().hex()},
        threads=identity.threads,
        precision=precision.value,
        held_out=record.evaluations.points,
        history=record.history.snapshot(),
        extra=extra,
        subspace_seed=identity.subspace_seed,
    )


def from_meta(meta: CheckpointMeta) -> tuple[TrainingRecord, OuterProgress, LineProgress]:
    """Read a checkpoint's record and the counts of its outer state. Raises CheckpointError if they are malformed."""
    extra: Mapping[str, Any] = meta.extra
    try:
        progress = Progress(
            steps=meta.step,
            tokens=meta.tokens,
            sequences=meta.sequences,
            loss=meta.loss,
            loss_ema=meta.loss_ema,
            initial_loss=extra["initial_loss"],
            grad_norm=extra["grad_norm"],
            position=meta.data_position,
            noted=tuple(NotedLoss(int(step), float(loss), held_out) for step, loss, held_out in extra["noted"]),
            non_finite=SkippedSteps(**extra["non_finite"]),
        )
        record = TrainingRecord(
            progress,
            LossCurve(meta.history),
            EvaluationRecord.from_json(extra["evaluations"]),
            extra["evaluation_seconds"],
            meta.node_id,
            str(extra["pinned_digest"]),
            Inherited(**extra.get("inherited", {})),
        )
        line = line_from_json(extra["outer"])
        counted: dict[str, Any] = {"since_round": meta.sequences, **extra["outer"]}
        return record, OuterProgress(**{key: counted[key] for key in counted.keys() - line_to_json(line)}), line
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError("The checkpoint's training record is malformed.") from error


def restore_random_state(meta: CheckpointMeta) -> None:
    """Restore the state of torch's random generator. Raises CheckpointError for a malformed state."""
    state = meta.rng.get(_TORCH_GENERATOR)
    if state is None:
        return
    try:
        torch.random.set_rng_state(torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8))
    except (ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError("The checkpoint's random state is malformed.") from error
