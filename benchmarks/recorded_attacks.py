"""Attacks on the pseudo-gradients of an honest training, round by round, without training again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from benchmarks.laboratory import Meeting, Outcome, Scheme, Start, Texts, held_out_loss, together
from neuroshard.model.tensor_schema import TensorSchema, load_vector
from neuroshard.optim.outer import OuterState, fresh_outer_state
from neuroshard.training.strategy import strategy_at

Record = Sequence[Mapping[int, Tensor]]
"""The contributions (d,) of each round by member."""


def recorded(texts: Texts, start: Start, scheme: Scheme) -> Record:
    """What honest replicas contribute."""
    history = list[Mapping[int, Tensor]]()
    together(texts, start, scheme, Meeting(scheme, history=history))
    return history


def replayed(texts: Texts, start: Start, scheme: Scheme, record: Record) -> Outcome:
    """The outer steps that the first members' contributions lead to, the hostile ones' replaced by their attacks."""
    executor, meeting = start.executor(), Meeting(scheme)
    schema, state = TensorSchema.of(executor.model), fresh_outer_state(start.weights)
    for contributions in record:
        present = {member: contributions[member] for member in range(scheme.replicas)}
        state = _next_state(scheme, schema, state, meeting.aggregate(present, state.outer_step))
    load_vector(executor.model, state.anchor)
    return Outcome(held_out_loss(executor.model, texts), meeting.refused, meeting.caught, meeting.abandoned)


def _next_state(scheme: Scheme, schema: TensorSchema, state: OuterState, aggregate: Tensor | None) -> OuterState:
    if aggregate is None:
        return replace(state, outer_step=state.outer_step + 1)  # what was recorded next is of the next round
    return strategy_at(scheme.outer, schema, state.outer_step).next_state(state, aggregate)
