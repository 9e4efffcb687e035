"""Hostile members: each attack knows the honest contributions of its round and the rule that judges them.

Sources: ALIE (Baruch, Baruch, Goldberg 2019), inner-product manipulation (Xie, Koyejo, Gupta 2019), mimic (Karimireddy,
He, Jaggi 2022); the others are what comes to mind first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor

from benchmarks.laboratory import Attack, ReducedRound, Rule, Scheme

Contributions: TypeAlias = Mapping[int, Tensor]
Lie: TypeAlias = Callable[[Contributions, int, int, float], Tensor]
"""A contribution (d,) from the honest ones by member, the liar's number, the outer step and a strength."""
SPREADS = (1e-3, 0.4, 0.8)  # norm of the noise that tells liars apart, relative to their contribution
POISONED = 0.05  # of the vector: one slice of 20


def attacked(scheme: Scheme, honest: int, name: str) -> Scheme:
    """The scheme in which all members after the first `honest` ones attack it."""
    members, liars = frozenset(range(honest)), frozenset(range(honest, scheme.replicas))
    attack = attacks(members, liars, lambda sent: ReducedRound.of(scheme, sent).aggregate)[name]
    return replace(scheme, attacks=dict.fromkeys(liars, attack))


def attacks(honest: frozenset[int], hostile: frozenset[int], rule: Rule) -> Mapping[str, Attack]:
    """Every attack by name on a rule; `honest` are the members whose contributions a liar looks at."""

    def others(contributions: Contributions) -> Tensor:
        return torch.stack([contributions[member] for member in sorted(honest)])

    def a_little(contributions: Contributions, _own: int, _step: int, strength: float) -> Tensor:
        rows = others(contributions)
        return rows.mean(dim=0) - strength * rows.std(dim=0)

    def against(contributions: Contributions, own: int, _step: int, strength: float) -> Tensor:
        return contributions[own] - strength * others(contributions).mean(dim=0)

    def poisoned(contributions: Contributions, own: int, _step: int, strength: float) -> Tensor:
        vector = contributions[own].clone()
        vector[: int(POISONED * len(vector))] *= -strength
        return vector

    def drift(contributions: Contributions, own: int, step: int, strength: float) -> Tensor:
        vector = contributions[own]  # all of them always into the same direction
        return vector + min(1.0, strength * (step + 1)) * _noise(vector, 0, 0)

    def adaptive(lie: Lie, *strengths: float) -> Attack:
        return _AdaptiveLiars(lie, strengths, honest, hostile, rule)

    return {
        "sign flip": lambda contributions, own, _: -contributions[own],
        "x100": lambda contributions, own, _: 100.0 * contributions[own],
        "x9.9": lambda contributions, own, _: 9.9 * contributions[own],
        "Gaussian noise": lambda contributions, own, step: _noise(contributions[own], own, step),
        "a little is enough": adaptive(a_little, 0.5, 1.0, 1.5),
        "inner product": adaptive(against, 0.5, 1.0, 1.5),
        "mimic": adaptive(lambda contributions, _own, _step, _: contributions[min(honest)], 1.0),
        "one poisoned slice": adaptive(poisoned, 1.0, 3.0, 10.0),
        "NaN": lambda contributions, own, _: torch.full_like(contributions[own], math.nan),
        "zero": lambda contributions, own, _: torch.zeros_like(contributions[own]),
        "copy": lambda contributions, _own, _step: contributions[min(honest)].clone(),
        "slow drift": adaptive(drift, 0.1, 0.3, 1.0),
    }


@dataclass
class _AdaptiveLiars:
    """Liars that act together. In each round they try how strong their lie is and how similar they are to each other.

    They send what moves the aggregate farthest from that of the honest members alone.
    """

    lie: Lie
    strengths: tuple[float, ...]
    honest: frozenset[int]
    hostile: frozenset[int]
    rule: Rule
    _step: int = -1
    _chosen: Mapping[int, Tensor] | None = None

    def __call__(self, contributions: Contributions, own: int, step: int) -> Tensor:
        if self._chosen is None or self._step != step:
            self._step, self._chosen = step, self._best(contributions, step)
        return self._chosen[own]

    def _best(self, contributions: Contributions, step: int) -> Mapping[int, Tensor]:
        honest = {member: contributions[member] for member in sorted(self.honest)}
        wanted = self.rule(honest)

        def harm(lies: Mapping[int, Tensor]) -> float:
            found = self.rule({**honest, **lies})
            return 0.0 if found is None or wanted is None else float((found - wanted).norm())

        candidates = [self._lies(contributions, step, *one) for one in product(self.strengths, SPREADS)]
        return max(candidates, key=harm)

    def _lies(self, contributions: Contributions, step: int, strength: float, spread: float) -> dict[int, Tensor]:
        lies = {own: self.lie(contributions, own, step, strength) for own in sorted(self.hostile)}
        return {own: vector + spread * _noise(vector, own, step) for own, vector in lies.items()}


def _noise(vector: Tensor, own: int, step: int) -> Tensor:
    """Normal noise with the norm of a vector (d,)."""
    generator = torch.Generator().manual_seed(1000 * step + own)
    return torch.randn(len(vector), generator=generator) * vector.norm() / math.sqrt(len(vector))


ATTACKS = tuple(attacks(frozenset({0}), frozenset({1}), lambda _: None))
