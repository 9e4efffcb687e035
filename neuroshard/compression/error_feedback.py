"""Error feedback: what a codec lost of one contribution is part of the next one (Karimireddy et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor


def with_residual(contribution: Tensor, residual: Tensor | None) -> Tensor:
    """What to encode: contribution + residual (d,); without a residual the contribution itself."""
    return contribution if residual is None else torch.add(contribution, residual)


def next_residual(encoded: Tensor, decoded: Tensor | None, decay: float = 1.0) -> Tensor | None:
    """decay * (encoded - decode(encode(encoded))) (d,): what the others did not get; None when nothing was lost.

    It is kept when the round commits; an abort keeps the old one, and a contribution that was refused leaves none. What
    clipping or trimming took away is no part of it: that was taken on purpose.
    """
    if decoded is None or decoded is encoded:
        return None
    lost = torch.sub(encoded, decoded)
    return lost if decay == 1.0 else lost.mul_(decay)
