"""What hostile members do: each attack knows the honest contributions of its round.

Sources: ALIE (Baruch, Baruch, Goldberg 2019), inner-product manipulation (Xie, Koyejo, Gupta 2019), mimic (Karimireddy,
He, Jaggi 2022); the others are what comes to mind first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from benchmarks.laboratory import Attack

Contributions: TypeAlias = Mapping[int, Tensor]
ALIE_DEVIATIONS = 1.0  # that a few liars can be off the mean among 4 to 16 without being the outermost
DRIFT = 0.1  # of the own norm, added each round
POISONED = 0.05  # of the vector: one slice of 20


def attacks(honest: frozenset[int]) -> Mapping[str, Attack]:
    """Every attack by name; `honest` are the members whose contributions a liar looks at."""

    def others(contributions: Contributions) -> Tensor:
        return torch.stack([contributions[member] for member in sorted(honest)])

    def noise(vector: Tensor, own: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + own)
        return torch.randn(len(vector), generator=generator) * vector.norm() / math.sqrt(len(vector))

    def a_little(contributions: Contributions, own: int, step: int) -> Tensor:
        rows = others(contributions)
        off = rows.mean(dim=0) - ALIE_DEVIATIONS * rows.std(dim=0)
        return off + 1e-3 * noise(off, own, step)  # several liars must not be copies

    def against(contributions: Contributions, own: int, step: int) -> Tensor:
        mean = others(contributions).mean(dim=0)
        return -0.5 * mean + 1e-3 * noise(mean, own, step)

    def poisoned(contributions: Contributions, own: int, _step: int) -> Tensor:
        vector = contributions[own].clone()
        width = int(POISONED * len(vector))
        vector[:width] *= -10.0
        return vector

    def drift(contributions: Contributions, own: int, step: int) -> Tensor:
        vector = contributions[own]
        return vector + min(1.0, DRIFT * (step + 1)) * noise(vector, own, 0)  # always into the same direction

    def mimic(contributions: Contributions, own: int, step: int) -> Tensor:
        vector = contributions[min(honest)]
        return vector + 1e-3 * noise(vector, own, step)

    return {
        "sign flip": lambda contributions, own, _: -contributions[own],
        "x100": lambda contributions, own, _: 100.0 * contributions[own],
        "x9.9": lambda contributions, own, _: 9.9 * contributions[own],
        "Gaussian noise": lambda contributions, own, step: noise(contributions[own], own, step),
        "a little is enough": a_little,
        "inner product": against,
        "mimic": mimic,
        "one poisoned slice": poisoned,
        "NaN": lambda contributions, own, _: torch.full_like(contributions[own], math.nan),
        "zero": lambda contributions, own, _: torch.zeros_like(contributions[own]),
        "copy": lambda contributions, _own, _step: contributions[min(honest)].clone(),
        "slow drift": drift,
    }
