"""The word of the last stage's node for losses that it measured, so that no driver can make them up. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor

from neuroshard.identity import NodeIdentity, SignedClaim, hash_parts, sign_claim, verify_claim
from neuroshard.identity.claims import ForeignClaimError
from neuroshard.types import JsonValue, LayerRange, NodeId, RunId

DOMAIN = "held_out_losses"
MAX_AGE_SECONDS = 300.0
_DIGITS = 6


LossSigner: TypeAlias = Callable[[Tensor, Tensor], str]
"""Takes labels (b, t) and losses (b,) summed over each sequence; the encoded claim."""

LossCheck: TypeAlias = Callable[[NodeId, str, Tensor, Tensor], SignedClaim]
"""Takes who sent an encoded claim, that, labels and losses; the claim. Raises DataError."""


@dataclass(frozen=True)
class Measured:
    """What the last stage measured."""

    summed: Tensor  # (b,) nats over the tokens of each sequence
    claim: SignedClaim | None = None  # of the node that measured it; None: this one


@dataclass(frozen=True)
class MeasuredWith:
    """The weights that a loss was measured with."""

    run_id: RunId
    layers: LayerRange  # of the last stage
    outer_step: int  # of that stage
    root: str = ""  # of its state, when that names the present weights


def claim_bytes(batch_size: int) -> int:
    """The largest encoded claim about so many sequences."""
    return 1536 + 32 * batch_size


def nats_a_token(summed: Tensor, tokens: int) -> tuple[float, ...]:
    """Losses (b,) summed over the tokens of each sequence -> what is told of them and kept."""
    means = cast("list[float]", (summed / tokens).tolist())  # pyright: ignore[reportUnknownMemberType]
    return tuple(round(loss, _DIGITS) for loss in means)


def signed_losses(
    identity: NodeIdentity, weights: MeasuredWith, labels: Tensor, summed: Tensor, now: float
) -> SignedClaim:
    """A claim about the losses (b,) of the sequences that continue with these labels (b, t).

    `now` is in seconds since the epoch. Raises ValueError for losses that are not finite.
    """
    return sign_claim(identity, DOMAIN, _payload(weights, labels, summed), now)


def verified_losses(
    encoded: str, sender: NodeId, weights: MeasuredWith, labels: Tensor, summed: Tensor, *, now: float
) -> SignedClaim:
    """The claim, when it is the sender's about exactly these losses, labels, layers and run; whatever the outer step.

    Raises DataError that says what is wrong with it.
    """
    claim = SignedClaim.decode(encoded.encode(), claim_bytes(len(labels)))
    payload = verify_claim(claim, DOMAIN, now, sender, MAX_AGE_SECONDS).payload
    expected = _payload(weights, labels, summed)
    fixed = expected.keys() - {"outer_step", "root"}
    if not isinstance(payload, Mapping) or any(payload.get(name) != expected[name] for name in fixed):
        raise ForeignClaimError(f"Node {sender} signed other losses than it told.")
    return claim


def _payload(weights: MeasuredWith, labels: Tensor, summed: Tensor) -> dict[str, JsonValue]:
    ids = labels.to(torch.int32).contiguous().cpu().numpy().tobytes()
    return {
        "run_id": weights.run_id,
        "layers": [weights.layers.start, weights.layers.stop],
        "outer_step": weights.outer_step,
        "root": weights.root,
        "sequences": hash_parts("neuroshard/held-out", *labels.shape, ids).hex(),
        "losses": list(nats_a_token(summed, labels.shape[1])),
    }
