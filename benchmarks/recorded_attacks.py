"""Attacks on the pseudo-gradients of an honest training, round by round, without training again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing

import trio
from torch import Tensor

from benchmarks.laboratory import Meeting, Outcome, Scheme, Start, Texts, held_out_loss, run_of, together, vote
from neuroshard.consensus.stage_rounds import Abandoned, Agreed
from neuroshard.model.weights import load_vector
from neuroshard.optim.outer import fresh_outer_state
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.training.outer_sync import OuterSync

Record = Sequence[Mapping[int, Tensor]]
"""The contributions (d,) of each round by member."""


def recorded(texts: Texts, start: Start, scheme: Scheme) -> Record:
    """What honest replicas contribute."""
    history = list[Mapping[int, Tensor]]()
    together(texts, start, scheme, Meeting(scheme, history=history))
    return history


def replayed(texts: Texts, start: Start, scheme: Scheme, record: Record) -> Outcome:
    """The outer steps that the first members' contributions lead to, the hostile ones' replaced by their attacks."""
    executor, meeting, rounds = start.executor(), Meeting(scheme), iter(record)

    async def exchange(_: Tensor, outer_step: int) -> Agreed | Abandoned:
        contributions = next(rounds)
        present = {member: contributions[member] for member in range(scheme.replicas)}
        aggregate = await meeting.agreed(present, outer_step)
        return Abandoned("see Meeting") if aggregate is None else Agreed(aggregate, scheme.replicas)

    with closing(ComputeThread(cpu_threads=1)) as compute:
        state = fresh_outer_state(start.weights)
        outer = OuterSync(
            compute=compute, model=executor.model, versions=run_of(scheme.outer), exchange=exchange, state=state
        )
        if scheme.votes:
            meeting.objects = vote(texts, compute, executor, outer)

        async def play() -> None:
            for _ in record:
                await outer.run_round(0.0)

        trio.run(play)
    load_vector(executor.model, outer.state.anchor)
    loss = held_out_loss(executor.model, texts)
    return Outcome(loss, meeting.refused, meeting.caught, meeting.abandoned, meeting.voted_down)
