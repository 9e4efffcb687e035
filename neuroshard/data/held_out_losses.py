"""Held-out losses: evaluations, paired comparison of them, and signed claims of losses. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Annotated, TypeAlias, cast

import torch
from msgspec import Meta, Struct
from torch import Tensor

from neuroshard.identity import NodeIdentity, SignedClaim, hash_parts, read_claim, sign_claim, verify_claim
from neuroshard.identity.claims import ForeignClaimError
from neuroshard.types import MAX_LOSS, HexDigest, LayerRange, NamedRun, NodeId, RunId

PINNED_SEQUENCES = 32
MAX_CLAIMED = 4096  # losses in one claim


@dataclass(frozen=True)
class Evaluation:
    """Loss of each pinned sequence at one step, in nats per token. A vote may have time for the first ones only."""

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
        return all(map(isfinite, self.losses))


@dataclass(frozen=True)
class PairedDifference:
    """Mean of (earlier - later) over the sequences, positive when the model got better, with its standard error."""

    mean: float
    standard_error: float

    def exceeds(self, errors: float, margin: float) -> bool:
        """Return whether the mean exceeds both `errors` standard errors and `margin` nats."""
        return isfinite(self.mean) and self.mean > margin and self.mean > errors * self.standard_error


def paired_difference(earlier: Sequence[float], later: Sequence[float]) -> PairedDifference:
    """Compare two evaluations' losses of the sequences that both have; pairing removes how hard each sequence is.

    Standard error = s / sqrt(n), with s the sample standard deviation of the n differences.
    """
    differences = [a - b for a, b in zip(earlier, later, strict=False)]
    n = len(differences)
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / (n - 1) if n > 1 else float("inf")
    return PairedDifference(mean, sqrt(variance / n))


def comparable_mean(baseline: Evaluation, evaluation: Evaluation) -> float:
    """Mean loss over the baseline's sequences, in nats per token.

    For an evaluation of fewer sequences it is estimated by the paired difference, so that easy ones do not count as
    progress.
    """
    if len(evaluation.losses) == len(baseline.losses):
        return evaluation.mean
    return baseline.mean - paired_difference(baseline.losses, evaluation.losses).mean


CHOICE_ERRORS = 1.0


def chosen_candidate(losses: Sequence[Sequence[float]], least: int) -> int:
    """Place of the candidate to choose by the losses of the same sequences with each, the plain mean first.

    A candidate is never chosen if it is worse than the plain mean by more than a standard error, or if its losses are
    missing, not finite, or of fewer than `least` sequences. If that is so for the plain mean, nothing else is chosen.
    """
    count = min(map(len, losses))
    plain, *others = (each[:count] for each in losses)
    if count < least or not all(map(isfinite, plain)):
        return 0
    means = {0: sum(plain) / count}
    for place, candidate in enumerate(others, 1):
        if all(map(isfinite, candidate)) and not paired_difference(candidate, plain).exceeds(CHOICE_ERRORS, 0.0):
            means[place] = sum(candidate) / count
    return min(means, key=means.__getitem__)


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
    if not all(map(isfinite, payload.losses)):
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
