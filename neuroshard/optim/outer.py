"""DiLoCo's outer step, the same bytes on every replica (Douillard et al. 2023), and its fragments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain
from math import ceil, floor, isqrt, log
from statistics import median_low
from typing import TypeAlias

import torch
from torch import Tensor

_CHUNK = 1 << 20  # numbers per pass: the only temporary memory of a step


@dataclass(frozen=True)
class CertifiedWork:
    """The work of a round's members that its certificate states: the lower median of their signed claims."""

    sequences: int  # per member since the round before
    # Durations in codes, see `duration_code`; None if no member knows one.
    exchange: int | None = None  # exchange of the members' last round
    sequence: int | None = None  # training of one sequence
    choice: int | None = None  # of the outer step, see `candidates_at`; None: the seats have measured nothing


MOST_CANDIDATES = 3
SEQUENCES_PER_CHOICE = 640  # per member between two measurements, which so take a twentieth of the compute
LONGEST_CODE = 100  # 1.25^100 ms are 57 days
KEPT_DURATIONS = 6  # rounds
_CODE_BASE = Fraction(5, 4)


def duration_code(seconds: float) -> int:
    """The power of 1.25 ms that is nearest to a duration, 0 to 100: clocks differ more than this between members."""
    return min(LONGEST_CODE, max(0, round(log(max(seconds, 1e-3) * 1_000) / log(_CODE_BASE))))


@dataclass(frozen=True)
class LineProgress:
    """Progress of a line of states. It is part of the state that replicas compare, so all of them have the same."""

    sequences: int = 0  # trained per member, as the line's certificates state
    durations: tuple[tuple[int, int], ...] = ()  # codes of exchange and sequence of the last rounds that state both
    choice: int = 0  # the last measured one; at first the plain mean
    chosen_at: int = 0  # `sequences` before the round in which it was measured

    @property
    def needs_choice(self) -> bool:
        """Whether the seats measure the candidates for the outer step in the next round."""
        return self.sequences - self.chosen_at >= SEQUENCES_PER_CHOICE

    def after(self, work: CertifiedWork) -> LineProgress:
        """The progress after a round with this work."""
        durations, choice, chosen_at = self.durations, self.choice, self.chosen_at
        if work.exchange is not None and work.sequence is not None:
            durations = (*durations, (work.exchange, work.sequence))[-KEPT_DURATIONS:]
        if work.choice is not None:
            choice, chosen_at = work.choice, self.sequences
        return LineProgress(self.sequences + work.sequences, durations, choice, chosen_at)

    def least_interval(self, sequences_per_step: int, round_share: float, max_round_seconds: float) -> int:
        """Inner steps between two rounds of which an exchange takes `round_share`; 0 with fewer than two durations.

        They never take more than `max_round_seconds`. The arithmetic is exact, so all members get the same number.
        """
        if len(self.durations) < 2:
            return 0
        exchange, sequence = (median_low(codes) for codes in zip(*self.durations, strict=True))
        step = _CODE_BASE**sequence * sequences_per_step / 1_000  # seconds
        wanted = _CODE_BASE**exchange / 1_000 / (Fraction(round_share) * step)
        return max(1, min(ceil(wanted), floor(Fraction(max_round_seconds) / step)))


@dataclass(frozen=True)
class OuterState:
    """The replicated state: anchor (d,) and velocity, fp32 on the CPU, after `outer_step` committed rounds."""

    anchor: Tensor  # weights on which every replica agreed at the last round
    velocity: Tensor  # (d,), or one vector with the other values that a strategy keeps with the anchor
    outer_step: int
    line: LineProgress = LineProgress()

    def __post_init__(self) -> None:
        for tensor in (self.anchor, self.velocity):
            if tensor.dim() != 1 or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
                raise ValueError(f"outer state is an fp32 vector on the CPU, got {tensor.dtype} {tuple(tensor.shape)}")
        if self.outer_step < 0:
            raise ValueError("outer_step must not be negative")


def fresh_outer_state(anchor: Tensor) -> OuterState:
    """The state before the first round: this anchor (d,), no velocity."""
    return OuterState(anchor, torch.zeros(anchor.shape, dtype=anchor.dtype, device=anchor.device), 0)


def nesterov_outer_step(state: OuterState, pseudo_gradient: Tensor, lr: float, momentum: float) -> OuterState:
    """v' = m v + d and a' = a - lr (d + m v'), for aggregate d of (anchor - local weights). Returns a new state.

    Apply it to the anchor, never to the local weights, and subtract: both other forms were measured to diverge.
    Every product and sum is rounded on its own, in fp32 on the CPU, so replicas get equal bytes whatever their
    kernels. Raises ValueError unless velocity and pseudo-gradient are fp32 CPU vectors of the anchor's length.
    """
    shape = state.anchor.shape
    if state.velocity.shape != shape:
        raise ValueError("anchor and velocity must have one length")
    if pseudo_gradient.shape != shape or pseudo_gradient.dtype != torch.float32 or pseudo_gradient.device.type != "cpu":
        raise ValueError(f"the outer step needs an fp32 CPU vector of shape {tuple(shape)}")
    anchor, velocity = torch.empty_like(state.anchor), torch.empty_like(state.velocity)
    for start in range(0, shape[0], _CHUNK):
        part = slice(start, start + _CHUNK)
        torch.mul(state.velocity[part], momentum, out=velocity[part])
        velocity[part].add_(pseudo_gradient[part])
        update = velocity[part] * momentum
        update.add_(pseudo_gradient[part])
        update.mul_(lr)
        torch.sub(state.anchor[part], update, out=anchor[part])
    return replace(state, anchor=anchor, velocity=velocity, outer_step=state.outer_step + 1)


def replica_mean(anchor: Tensor, velocity: Tensor, lead: float) -> Tensor:
    """The mean of the replicas' weights, from (parts of) the state that an outer step with learning rate 1 made of it.

    That step is a' = mean - m v', with `lead` m. While weights still move far and noisily, momentum carries the anchor
    past the mean, and each replica's own weights are noisier: the mean is the best model that the replicas have.
    """
    return torch.add(anchor, velocity, alpha=lead)


# The laws below use t, the inner steps per member that the line's certificates state. Weights move fast at first:
# replicas that drift apart for long in that phase do not meet again, and momentum carries the anchor past its target.
# `python -m benchmarks together` compares the laws with a fixed interval of 500 and momentum from the start.

_INTERVALS = ((0, 2), (20, 5), (100, 10), (300, 25), (800, 50), (1_500, 100))  # t, interval from there on
_LONGER_INTERVALS = 15  # after the table: t divided by this
MEASURED_MEMBERS = 4  # replicas for which the table was tuned
PLAIN_STEPS = 300  # until this t, the anchor becomes the plain mean of the replicas
MOMENTUM_STEPS = 100  # after `PLAIN_STEPS`, until the momentum has its full value


def interval_at(steps: int, longest: int) -> int:
    """Inner steps between two rounds at t = `steps`; at most `longest`. It never falls as t rises.

    Beyond 100, a run with a larger `longest` has t / 15, which was not measured. Raises ValueError below t = 0 or 1.
    """
    if steps < 0 or longest < 1:
        raise ValueError(f"needs steps >= 0 and a longest interval >= 1, got {steps} and {longest}")
    listed = next(interval for start, interval in reversed(_INTERVALS) if steps >= start)
    return min(longest, max(listed, steps // _LONGER_INTERVALS) if steps >= _INTERVALS[-1][0] else listed)


def interval_of_many(interval: int, members: int) -> int:
    """The interval of this number of members, from that of four: shorter by the square root of their number.

    The mean of more replicas has less noise, so what they lose while they drift apart counts for more. With 16 replicas
    half of the interval reached 1.575 instead of 1.593 nats per byte after 4,000 steps (docs/decisions/0053). Raises
    ValueError below 1 step or member.
    """
    if interval < 1 or members < 1:
        raise ValueError(f"needs at least one step and one member, got {interval} and {members}")
    return interval if members <= MEASURED_MEMBERS else max(1, isqrt(interval**2 * MEASURED_MEMBERS // members))


def momentum_at(steps: int, target: float) -> float:
    """Momentum of a round at t = `steps`: 0 until t = 300, then from half of the target to all of it at t = 400."""
    if steps < 0 or not 0 <= target < 1:
        raise ValueError(f"needs steps >= 0 and a target in [0, 1), got {steps} and {target}")
    if steps < PLAIN_STEPS:
        return 0.0
    return target * (0.5 + 0.5 * min(1.0, (steps - PLAIN_STEPS) / MOMENTUM_STEPS))


@dataclass(frozen=True)
class Nesterov:
    """Learning rate and momentum of an outer step."""

    learning_rate: float
    momentum: float


PLAIN_MEAN = Nesterov(1.0, 0.0)


def candidates_at(steps: int, learning_rate: float, momentum: float, *, measured: bool) -> tuple[Nesterov, ...]:
    """The outer steps among which a round at t = `steps` chooses. The last one has the momentum of its law.

    If they are `measured`, the plain mean comes first, then half of that momentum; equal ones count once. Until
    t = 300 the plain mean is the only one.
    """
    if steps < PLAIN_STEPS:
        return (PLAIN_MEAN,)
    present = momentum_at(steps, momentum)
    full = Nesterov(learning_rate, present)
    return tuple(dict.fromkeys((PLAIN_MEAN, Nesterov(learning_rate, present / 2), full))) if measured else (full,)


SPARTA_SLICES = 20  # a slice is 5 % of the parameters
STREAMED_FRAGMENTS = 4
_WIDEST_BLOCK = 4096
_LEAST_BLOCKS = 16  # per slice, so that slices have about equal lengths

Stretch: TypeAlias = tuple[int, int]
"""First number of a contiguous part of a vector, and the one after its last."""


@dataclass(frozen=True)
class Fragment:
    """Some of the numbers of a vector (d,), in order."""

    length: int  # d
    stretches: tuple[Stretch, ...]

    def __post_init__(self) -> None:
        places = list(chain.from_iterable(self.stretches))
        if places != sorted(places) or not places or not 0 <= places[0] < places[-1] <= self.length:
            raise ValueError("a fragment has stretches of the vector, in order and apart, and at least one number")

    @classmethod
    def whole(cls, length: int) -> Fragment:
        """All numbers of a vector (length,)."""
        return cls(length, ((0, length),))

    @cached_property
    def size(self) -> int:
        """Number of its numbers, k."""
        return sum(stop - start for start, stop in self.stretches)

    @property
    def is_whole(self) -> bool:
        return self.size == self.length

    def of(self, vector: Tensor) -> Tensor:
        """Its numbers (k,) in a vector (d,); the vector itself if whole. Raises ValueError on another length."""
        self._check(vector, self.length)
        return vector if self.is_whole else torch.cat([vector[start:stop] for start, stop in self.stretches])

    def put(self, numbers: Tensor, vector: Tensor) -> None:
        """Write its numbers (k,) into a vector (d,). Raises ValueError on another length."""
        self._check(vector, self.length)
        self._check(numbers, self.size)
        taken = 0
        for start, stop in self.stretches:
            vector[start:stop] = numbers[taken : taken + stop - start]
            taken += stop - start

    def replaced(self, vector: Tensor, numbers: Tensor) -> Tensor:
        """A vector (d,) with these numbers (k,) in their places; the numbers themselves if the fragment is whole."""
        if self.is_whole:
            self._check(numbers, self.size)
            return numbers
        copy = vector.clone()
        self.put(numbers, copy)
        return copy

    def _check(self, vector: Tensor, length: int) -> None:
        if vector.shape != (length,):
            raise ValueError(f"the fragment needs a vector of {length} numbers, got shape {tuple(vector.shape)}")


def strided_slice(length: int, index: int, count: int = SPARTA_SLICES) -> Fragment:
    """Slice `index` of `count` of a vector (length,): its blocks whose number is `index` modulo `count`.

    Raises ValueError for a vector with fewer numbers than slices.
    """
    _check_index(length, index, count)
    width = max(1, min(_WIDEST_BLOCK, length // (count * _LEAST_BLOCKS)))
    starts = range(index * width, length, count * width)
    return Fragment(length, tuple((start, min(start + width, length)) for start in starts))


def layered_fragment(length: int, layers: Sequence[Stretch], index: int, count: int = STREAMED_FRAGMENTS) -> Fragment:
    """Fragment `index` of `count` of a vector (length,): its layers whose number is `index` modulo `count`.

    Embeddings, head and the layers left over if `count` does not divide their number belong to all fragments: each
    has a contiguous share of them, so that all have equal lengths except for differences between layers. Raises
    ValueError for a vector with fewer numbers than fragments.
    """
    _check_index(length, index, count)
    dealt = layers[: len(layers) // count * count]
    rest, position = list[Stretch](), 0
    for start, stop in (*dealt, (length, length)):
        rest.append((position, start))
        position = stop
    return Fragment(length, tuple(_joined([*dealt[index::count], *_share(rest, index, count)])))


def _share(stretches: Sequence[Stretch], index: int, count: int) -> Iterable[Stretch]:
    """The part of consecutive ranges between index / count and (index + 1) / count of their numbers."""
    total = sum(stop - start for start, stop in stretches)
    first, last, passed = total * index // count, total * (index + 1) // count, 0
    for start, stop in stretches:
        begin, end = max(first - passed, 0), min(last - passed, stop - start)
        if begin < end:
            yield start + begin, start + end
        passed += stop - start


def _joined(stretches: Iterable[Stretch]) -> Iterable[Stretch]:
    """The ranges in order, with adjacent ones joined."""
    joined = list[Stretch]()
    for start, stop in sorted(stretches):
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _check_index(length: int, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise ValueError(f"there are fragments 0 to {count - 1}, not {index}")
    if length < count:
        raise ValueError(f"a vector of {length} numbers cannot be split into {count} fragments")
