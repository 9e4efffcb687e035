"""Held-out losses: evaluations, paired comparison of them, and signed claims of losses. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Annotated, TypeAlias, cast

import torch
from msgspec import Meta, Struct
from torch import Tensor

from neuroshard.errors import CheckpointError
from neuroshard.identity import NodeIdentity, SignedClaim, hash_parts, read_claim, sign_claim, verify_claim
from neuroshard.identity.claims import ForeignClaimError
from neuroshard.status.snapshot import HeldOutPoint
from neuroshard.types import MAX_LOSS, HexDigest, JsonValue, LayerRange, NamedRun, NodeId, RunId

PINNED_SEQUENCES = 32
TIME_SHARE = 0.02
MIN_INTERVAL_SECONDS = 5.0  # no reader needs more points
MAX_EVALUATIONS = 128
MAX_CLAIMED = 4096  # losses in one claim


@dataclass(frozen=True)
class Evaluation:
    """Loss of each pinned sequence at one step, in nats per token."""

    step: int
    time: float  # seconds since the epoch
    losses: tuple[float, ...]
    measured_by: tuple[NodeId, ...] = ()  # nodes with the last stage that signed the losses; empty: this node itself
    claims: tuple[str, ...] = ()  # the signed claims in base64; only the newest evaluation keeps them

    @property
    def mean(self) -> float:
        """Mean loss in nats per token."""
        return sum(self.losses) / len(self.losses)

    @property
    def is_finite(self) -> bool:
        """Whether every loss is finite."""
        return all(isfinite(loss) for loss in self.losses)


@dataclass(frozen=True)
class PairedDifference:
    """Mean of (earlier - later) over the sequences, positive when the model got better, with its standard error."""

    mean: float
    standard_error: float

    def exceeds(self, errors: float, margin: float) -> bool:
        """Return whether the mean exceeds both `errors` standard errors and `margin` nats."""
        return isfinite(self.mean) and self.mean > margin and self.mean > errors * self.standard_error


def paired_difference(earlier: Evaluation, later: Evaluation) -> PairedDifference:
    """Compare two evaluations of the same sequences; pairing removes how hard each sequence is.

    Standard error = s / sqrt(n), with s the sample standard deviation of the n differences.
    """
    differences = [a - b for a, b in zip(earlier.losses, later.losses, strict=True)]
    n = len(differences)
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / (n - 1) if n > 1 else float("inf")
    return PairedDifference(mean, sqrt(variance / n))


def evaluation_is_due(trained_seconds: float, cost_seconds: float | None) -> bool:
    """Return whether an evaluation of `cost_seconds` stays within 2 % of the time trained since the last one.

    The first one (cost unknown) is due at once, because all later ones are compared with it.
    """
    if cost_seconds is None:
        return True
    return trained_seconds >= max(MIN_INTERVAL_SECONDS, cost_seconds / TIME_SHARE)


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
    difference = paired_difference(baseline, evaluation)
    return HeldOutPoint(
        evaluation.step,
        evaluation.time,
        evaluation.mean,
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


KIND = "held_out_losses"
MAX_AGE_SECONDS = 300.0
_DIGITS = 6


class HeldOutLosses(Struct, frozen=True, forbid_unknown_fields=True):
    """The payload of a claim: losses of some sequences, and the weights that they were measured with."""

    run_id: NamedRun
    layers: LayerRange  # of the last stage
    outer_step: Annotated[int, Meta(ge=0, le=10**12)]  # of that stage
    root: Annotated[str, Meta(max_length=64)]  # of the stage's state, if it names the present weights
    sequences: HexDigest
    losses: Annotated[
        tuple[Annotated[float, Meta(ge=0, le=MAX_LOSS)], ...], Meta(max_length=MAX_CLAIMED)
    ]  # nats per token


LossSigner: TypeAlias = Callable[[Tensor, Tensor], bytes]
"""Takes labels (b, t) and losses (b,) summed over each sequence; the encoded claim."""

LossCheck: TypeAlias = Callable[[NodeId, bytes, Tensor, Tensor], SignedClaim[HeldOutLosses]]
"""Takes who sent an encoded claim, that, labels and losses; the claim. Raises DataError."""


@dataclass(frozen=True)
class Measured:
    """Losses that the last stage measured."""

    summed: Tensor  # (b,) nats over the tokens of each sequence
    claim: SignedClaim[HeldOutLosses] | None = None  # of the node that measured it; None: this node


@dataclass(frozen=True)
class MeasuredWith:
    """The weights that a loss was measured with."""

    run_id: RunId
    layers: LayerRange  # of the last stage
    outer_step: int  # of that stage
    root: str = ""  # of the stage's state, if it names the present weights


def claim_bytes(batch_size: int) -> int:
    """Return the size of the largest encoded claim about `batch_size` sequences."""
    return 1536 + 16 * batch_size


def nats_per_token(summed: Tensor, tokens: int) -> tuple[float, ...]:
    """Convert losses (b,), summed over the tokens of each sequence, to the means that are reported and stored."""
    means = cast("list[float]", (summed / tokens).tolist())  # pyright: ignore[reportUnknownMemberType]
    return tuple(round(loss, _DIGITS) for loss in means)


def signed_losses(
    identity: NodeIdentity, weights: MeasuredWith, labels: Tensor, summed: Tensor, now: float
) -> SignedClaim[HeldOutLosses]:
    """A claim about the losses (b,) of the sequences that continue with these labels (b, t).

    `now` is in seconds since the epoch. Raises ValueError for losses that are not finite.
    """
    payload = _payload(weights, labels, summed)
    if not all(isfinite(loss) for loss in payload.losses):
        raise ValueError("losses that are not finite are not signed")
    return sign_claim(identity, KIND, payload, now)


def verified_losses(
    encoded: bytes, sender: NodeId, weights: MeasuredWith, labels: Tensor, summed: Tensor, *, now: float
) -> SignedClaim[HeldOutLosses]:
    """Return the claim if it is the sender's about these losses, labels, layers and run; any outer step is accepted.

    Raises DataError that names the difference.
    """
    claim = read_claim(encoded, HeldOutLosses, claim_bytes(len(labels)))
    payload = verify_claim(claim, KIND, now, sender, MAX_AGE_SECONDS).payload
    expected = replace(weights, outer_step=payload.outer_step, root=payload.root)
    if payload != _payload(expected, labels, summed):
        raise ForeignClaimError(f"Node {sender} signed other losses than it sent.")
    return claim


def _payload(weights: MeasuredWith, labels: Tensor, summed: Tensor) -> HeldOutLosses:
    ids = labels.to(torch.int32).contiguous().cpu().numpy().tobytes()
    return HeldOutLosses(
        weights.run_id,
        weights.layers,
        weights.outer_step,
        weights.root,
        sequences=hash_parts("neuroshard/held-out", *labels.shape, ids).hex(),
        losses=nats_per_token(summed, labels.shape[1]),
    )
