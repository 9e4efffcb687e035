"""Status of a run's pipeline at one moment: the holders of each stage, and the times of the microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import nan
from typing import Annotated

from neuroshard.status.values import EXCLUDED, Number, Stale, about, derived
from neuroshard.types import LayerRange, NodeId


@dataclass(frozen=True)
class StateCopyStatus:
    """The copy that another node keeps of a stage with a single holder."""

    age_seconds: Annotated[
        float | None, about("age of the copy: the work that would be lost with the holder; null: no copy yet", "s")
    ]


@dataclass(frozen=True)
class PipelineStage:
    """One stage of the run's plan and the nodes that hold it, this node before the others."""

    index: Annotated[int, about("counted from 0", label="stage")]
    layers: LayerRange
    ready: Annotated[tuple[NodeId, ...], about("can work on it now", gauge="pipeline_holders{state=ready}")] = ()
    paused: Annotated[
        tuple[NodeId, ...], about("have its weights and do not work now", gauge="pipeline_holders{state=paused}")
    ] = ()
    joining: Annotated[tuple[NodeId, ...], about("prepare for it", gauge="pipeline_holders{state=joining}")] = ()
    copy: StateCopyStatus | None = None  # None: no copy is needed, or its holder has not reported one

    @property
    def is_missing(self) -> bool:
        """Whether no node has its weights. Nothing is trained until one does."""
        return not (self.ready or self.paused)

    @property
    def is_resting(self) -> bool:
        """Whether all nodes with its weights are paused. Nothing is trained until one of them resumes."""
        return bool(self.paused) and not self.ready

    @property
    def has_single_holder(self) -> bool:
        """Whether only one node has its weights."""
        return len(self.ready) + len(self.paused) == 1

    @property
    def holders(self) -> tuple[NodeId, ...]:
        """All nodes of this stage; the nodes that prepare for it come last."""
        return (*self.ready, *self.paused, *self.joining)


@dataclass(frozen=True)
class HopTimes:
    """Times of one stage's part of one microbatch, forward and backward pass together."""

    node_id: Annotated[NodeId, about("node that completed it")]
    compute_seconds: Annotated[Number, about("compute time, as the stage reports it", "s")]
    wait_seconds: Annotated[Number, about("wait at the stage for other work or its optimizer step", "s")]
    wire_seconds: Annotated[Number, about("encoding and transfer in both directions; 0 on this node", "s")]
    recompute_seconds: Annotated[
        Number, about("part of the compute time: the forward pass repeated for the backward pass", "s")
    ] = 0.0
    bytes_sent: Annotated[int, about("tensors that the driver sent", "bytes")] = 0
    bytes_received: Annotated[int, about("tensors that the driver received", "bytes")] = 0
    bytes_handed: Annotated[
        int, about("tensors that the stage sent to the stages before and after it, as it reports", "bytes")
    ] = 0

    @property
    def stage_seconds(self) -> float:
        """Seconds at the stage, without the transfer."""
        return self.compute_seconds + self.wait_seconds

    @property
    def seconds(self) -> float:
        """Seconds at the stage and on the wire."""
        return self.stage_seconds + self.wire_seconds


@dataclass(frozen=True)
class Takeover:
    """A stage of a microbatch whose work another replica took over in the middle of it."""

    stage: Annotated[int, about("number of the stage, counted from 0")]
    before: Annotated[NodeId, about("node that began")]
    after: Annotated[NodeId, about("node that completed it")]
    is_exact: Annotated[bool, about("both reported equal weights")]


@dataclass(frozen=True)
class StarEdge:
    """Two nodes with neighbouring stages that cannot hand tensors to each other now. The driver passes theirs on."""

    one: NodeId
    other: NodeId


@dataclass(frozen=True)
class MicrobatchTrace:
    """One microbatch on its way through all stages and back."""

    session: Annotated[int, about("session of the driver at the stages")]
    microbatch: Annotated[int, about("number of the microbatch in its session")]
    ended_at: Annotated[float, about("time of the last answer", "s since 1970")]
    seconds: Annotated[Number, about("from the first request to the last answer", "s")]
    tokens: Annotated[int, about("tokens of the microbatch", "tokens")]
    hops: Annotated[tuple[HopTimes, ...], about("one for each stage, in order")]
    takeovers: Annotated[tuple[Takeover, ...], about("replacements of a replica in the middle of it")] = ()
    failures: Annotated[int, about("requests after which another node was asked")] = 0

    @derived("time outside the stages: routing, repeated requests, lost work", "s")
    @property
    def other_seconds(self) -> Number:
        """Seconds outside the stages: routing, repeated requests, and lost work of nodes that were replaced."""
        return max(0.0, self.seconds - sum(hop.seconds for hop in self.hops))


@dataclass(frozen=True)
class StageLoad:
    """Mean times of one stage for a microbatch, over all its nodes."""

    stage: Annotated[int, about("number of the stage, counted from 0", label="stage")]
    compute_seconds: Annotated[
        Number, about("mean compute time of a microbatch", "s", gauge="pipeline_stage_seconds{part=compute}")
    ]
    wait_seconds: Annotated[
        Number, about("mean wait for other work or an optimizer step", "s", gauge="pipeline_stage_seconds{part=wait}")
    ]
    wire_seconds: Annotated[
        Number,
        about("mean time for encoding and transfer in both directions", "s", gauge="pipeline_stage_seconds{part=wire}"),
    ]
    nodes: Annotated[int, about("nodes that worked on it")]

    @property
    def stage_seconds(self) -> float:
        """Seconds at the stage."""
        return self.compute_seconds + self.wait_seconds


@dataclass(frozen=True)
class Bottleneck:
    """The stage at which microbatches spend most time, and the slowest of its nodes."""

    stage: Annotated[
        int, about("stage at which microbatches spend most time, counted from 0", gauge="pipeline_bottleneck_stage")
    ]
    node_id: Annotated[NodeId, about("slowest node of this stage")]
    seconds: Annotated[Number, about("mean time of a microbatch at this stage, compute and wait", "s")]
    share: Annotated[Number, about("share of the time at all stages", "0..1")]


@dataclass(frozen=True)
class PipelineFlow:
    """The microbatches that this node drove: rates of the last minute, and counts since the start."""

    window_seconds: Annotated[
        Number, about("period that the rates cover; at most 60", "s", stale=Stale.NOT_TRAINING)
    ] = 0.0
    microbatches: Annotated[int | None, about("microbatches that ended in this period", stale=Stale.NOT_TRAINING)] = 0
    tokens: Annotated[int | None, about("tokens of those microbatches", "tokens", stale=Stale.NOT_TRAINING)] = 0
    bubble_share: Annotated[
        Number | None,
        about(
            "1 - compute seconds / (computers x window): the share of their time in which the computers of the stages "
            "did nothing for this driver; null without microbatches",
            "0..1",
            stale=Stale.NOT_TRAINING,
            gauge="pipeline_bubble_ratio",
        ),
    ] = None
    recompute_share: Annotated[
        Number | None,
        about(
            "share of the compute time spent on repeated forward passes, which save memory",
            "0..1",
            stale=Stale.NOT_TRAINING,
            gauge="pipeline_recompute_ratio",
        ),
    ] = None
    wire_bytes_per_token: Annotated[
        Number | None,
        about(
            "bytes of tensors that this driver sent and received per token",
            "bytes/token",
            stale=Stale.NOT_TRAINING,
            gauge="pipeline_wire_bytes_per_token",
        ),
    ] = None
    busiest_upload_per_token: Annotated[
        Number | None,
        about(
            "bytes of tensors per token that the node with most of them sends, the driver or a stage",
            "bytes/token",
            stale=Stale.NOT_TRAINING,
            gauge="pipeline_busiest_upload_per_token",
        ),
    ] = None
    loads: Annotated[
        tuple[StageLoad, ...], about("one for each stage; empty without microbatches", stale=Stale.NOT_TRAINING)
    ] = ()
    bottleneck: Annotated[
        Bottleneck | None,
        about("slowest stage; null with one stage, and without microbatches", stale=Stale.NOT_TRAINING),
    ] = None
    exact_takeovers: Annotated[
        int, about("takeovers between equal weights, since the start", counter="pipeline_takeovers{weights=equal}")
    ] = 0
    approximate_takeovers: Annotated[
        int,
        about(
            "takeovers between weights not known to be equal, since the start",
            counter="pipeline_takeovers{weights=unknown}",
        ),
    ] = 0
    failures: Annotated[
        int, about("requests after which another node was asked, since the start", counter="pipeline_failures")
    ] = 0
    given_up: Annotated[int, about("microbatches dropped for good, since the start", counter="pipeline_given_up")] = 0
    unanswered: Annotated[
        tuple[int, ...], about("stages for which microbatches wait now because every holder fails")
    ] = ()
    star_edges: Annotated[
        tuple[StarEdge, ...],
        about("neighbours that cannot hand tensors to each other now: the driver passes theirs on"),
    ] = ()
    recent: Annotated[tuple[MicrobatchTrace, ...], about("at most 32 microbatches, the newest last")] = ()

    @derived(
        "rate of this driver over the last minute",
        "tokens/s",
        stale=Stale.NOT_TRAINING,
        gauge="pipeline_tokens_per_second",
    )
    @property
    def tokens_per_second(self) -> Number:
        """Tokens per second that this node drove."""
        if self.tokens is None:
            return nan
        return 0.0 if self.window_seconds == 0 else self.tokens / self.window_seconds


def missing_ranges(stages: Iterable[PipelineStage]) -> tuple[LayerRange, ...]:
    """Layers that no node has, with neighbouring stages merged into one range. `stages` are in order."""
    ranges: list[LayerRange] = []
    for layers in (stage.layers for stage in stages if stage.is_missing):
        if ranges and ranges[-1].stop == layers.start:
            ranges[-1] = LayerRange(ranges[-1].start, layers.stop)
        else:
            ranges.append(layers)
    return tuple(ranges)


@dataclass(frozen=True)
class PipelineStatus:
    """Summary of the run's stages; /api/pipeline returns all of them."""

    stages: Annotated[tuple[PipelineStage, ...], EXCLUDED]  # stages of the run's plan, in order
    missing: Annotated[
        str,
        about("layers that no node has at hand, in a sentence, counted from 1; may be empty", brief="missing layers"),
    ] = ""
    flow: Annotated[PipelineFlow | None, EXCLUDED] = None  # None on a node that drives no microbatches

    @derived("stages of the run's plan", gauge="pipeline_stages")
    @property
    def stage_count(self) -> int:
        return len(self.stages)

    @derived("stages that no node has", gauge="pipeline_missing_stages")
    @property
    def missing_stages(self) -> int:
        return sum(stage.is_missing for stage in self.stages)

    @derived("stages that only one node has", gauge="pipeline_single_stages")
    @property
    def single_stages(self) -> int:
        return sum(stage.has_single_holder for stage in self.stages)

    @derived("the same layers as ranges counted from 0, neighbouring stages as one")
    @property
    def missing_layers(self) -> tuple[LayerRange, ...]:
        return missing_ranges(self.stages)
