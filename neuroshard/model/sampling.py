"""Choosing the next token from logits; the randomness is an argument."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor


def sample_next(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draw a token id from logits (vocabulary,): softmax(logits / temperature) cut to its smallest top_p nucleus.

    Temperature 0 takes the largest logit. Entries of -inf are never drawn (Holtzman et al. 2020 for the nucleus).
    Raises ValueError for a temperature below 0, top_p outside (0, 1], or logits with NaN, +inf or nothing to draw.
    """
    if not (isfinite(temperature) and temperature >= 0 and 0 < top_p <= 1):
        raise ValueError(f"temperature must be >= 0 and top_p in (0, 1], got {temperature} and {top_p}")
    values = logits.detach().to("cpu", torch.float32).flatten()
    highest = float(values.max())  # NaN when any entry is
    if not isfinite(highest):
        raise ValueError("the logits are not finite, or forbid every token")
    if temperature == 0:
        return int(values.argmax())
    scaled = (values - highest) / max(temperature, 1e-6)
    probabilities, ids = torch.softmax(scaled, dim=0).sort(descending=True, stable=True)
    before = probabilities.cumsum(0) - probabilities  # mass ahead of each token: 0 for the first, which always stays
    nucleus = probabilities.where((before < top_p) | (before <= 0), 0)
    return int(ids[torch.multinomial(nucleus, 1, generator=generator)])
