"""How a driver's microbatches went, in numbers for people. Pure folds; what they are made of is kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from neuroshard.status.pipeline import Bottleneck, HopTimes, Passage, PipelineFlow, StageLoad, Takeover
from neuroshard.training.microbatch_run import MicrobatchRun
from neuroshard.training.timing import HopTiming
from neuroshard.types import NodeId


def hop_times(node_id: NodeId, timings: Iterable[HopTiming]) -> HopTimes:
    """The requests of one microbatch to one stage, added up."""
    known = tuple(timings)
    return HopTimes(
        node_id,
        compute_seconds=sum(timing.compute_seconds for timing in known),
        wait_seconds=sum(timing.wait_seconds for timing in known),
        wire_seconds=sum(timing.wire_seconds for timing in known),
        recompute_seconds=sum(timing.recompute_seconds for timing in known),
        bytes_sent=sum(timing.bytes_sent for timing in known),
        bytes_received=sum(timing.bytes_received for timing in known),
    )


def passage_of(run: MicrobatchRun, *, ended_at: float, seconds: float) -> Passage:
    """A microbatch that every stage has accumulated; `ended_at` in seconds since the epoch."""
    name = (run.key.session, run.key.microbatch)
    hops = [hop for hop in run.hops if hop is not None]
    return Passage(
        *name,
        ended_at=ended_at,
        seconds=seconds,
        tokens=run.tokens,
        hops=tuple(
            hop_times(hop.node_id, (one for one in hop.timings if (one.session, one.microbatch) == name))
            for hop in hops
        ),
        takeovers=tuple(
            Takeover(one.stage, one.before.node_id, one.after.node_id, one.is_exact) for one in run.replacements
        ),
        failures=run.failures,
    )


def stage_loads(passages: Sequence[Passage]) -> tuple[StageLoad, ...]:
    """What each stage took for a microbatch on average; () without any."""
    if not passages:
        return ()
    count = len(passages)
    return tuple(
        StageLoad(
            stage,
            compute_seconds=sum(hop.compute_seconds for hop in hops) / count,
            wait_seconds=sum(hop.wait_seconds for hop in hops) / count,
            wire_seconds=sum(hop.wire_seconds for hop in hops) / count,
            nodes=len({hop.node_id for hop in hops}),
        )
        for stage, hops in enumerate(zip(*(passage.hops for passage in passages), strict=True))
    )


def bottleneck_of(passages: Sequence[Passage]) -> Bottleneck | None:
    """The stage with the largest compute + wait a microbatch, and the slowest of its nodes; None with one stage."""
    loads = stage_loads(passages)
    total = sum(load.stage_seconds for load in loads)
    if len(loads) < 2 or total <= 0:
        return None
    load = max(loads, key=lambda one: one.stage_seconds)
    taken: dict[NodeId, list[float]] = {}
    for passage in passages:
        hop = passage.hops[load.stage]
        taken.setdefault(hop.node_id, []).append(hop.stage_seconds)
    slowest = max(sorted(taken), key=lambda node: sum(taken[node]) / len(taken[node]))
    return Bottleneck(load.stage, slowest, load.stage_seconds, load.stage_seconds / total)


def bubble_share(passages: Sequence[Passage], window_seconds: float) -> float | None:
    """1 - compute / (computers x window): the share of their time in which computers did nothing for this driver.

    Computers are the nodes that did a stage of these microbatches: several stages of one node share its compute
    thread. Compute is that of forward and backward passes, as the stages told it. Steps, evaluations, saving and work
    for other drivers count as bubble. None without microbatches.
    """
    computers = {hop.node_id for passage in passages for hop in passage.hops}
    if not computers or window_seconds <= 0:
        return None
    compute = sum(hop.compute_seconds for passage in passages for hop in passage.hops)
    return min(1.0, max(0.0, 1.0 - compute / (len(computers) * window_seconds)))


def recompute_share(passages: Sequence[Passage]) -> float | None:
    """Share of the compute time in which stages did again what they had not kept; None without compute time."""
    compute = sum(hop.compute_seconds for passage in passages for hop in passage.hops)
    again = sum(hop.recompute_seconds for passage in passages for hop in passage.hops)
    return again / compute if compute > 0 else None


def wire_bytes_per_token(passages: Sequence[Passage]) -> float | None:
    """Bytes of tensors that this driver sent and received for a token; None without tokens."""
    tokens = sum(passage.tokens for passage in passages)
    moved = sum(hop.bytes_sent + hop.bytes_received for passage in passages for hop in passage.hops)
    return moved / tokens if tokens else None


def flow_of(passages: Sequence[Passage], window_seconds: float) -> PipelineFlow:
    """The numbers of microbatches that ended within a time of `window_seconds`."""
    return PipelineFlow(
        window_seconds=window_seconds,
        microbatches=len(passages),
        tokens=sum(passage.tokens for passage in passages),
        bubble_share=bubble_share(passages, window_seconds),
        recompute_share=recompute_share(passages),
        wire_bytes_per_token=wire_bytes_per_token(passages),
        loads=stage_loads(passages),
        bottleneck=bottleneck_of(passages),
    )
