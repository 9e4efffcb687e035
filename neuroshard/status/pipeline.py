"""Frozen values that describe a run's pipeline at one moment: who holds which stage, and how the microbatches went."""

from __future__ import annotations

from dataclasses import dataclass

from neuroshard.types import LayerRange, NodeId


@dataclass(frozen=True)
class StateCopyStatus:
    """The copy that another node keeps of a stage with a single holder."""

    age_seconds: float | None  # of its state: what would be lost with the holder; None: there is none yet


@dataclass(frozen=True)
class PipelineStage:
    """One stage of the run's plan and the nodes that hold it, this node before the others."""

    index: int
    layers: LayerRange
    ready: tuple[NodeId, ...] = ()  # can work on it now
    paused: tuple[NodeId, ...] = ()  # hold its weights and do not work now
    joining: tuple[NodeId, ...] = ()  # get ready for it
    copy: StateCopyStatus | None = None  # None: it needs none, or its holder has not said

    @property
    def is_missing(self) -> bool:
        """Whether nobody has it: nothing is trained until somebody does."""
        return not (self.ready or self.paused)

    @property
    def is_resting(self) -> bool:
        """Whether all that have it are paused: nothing is trained until one of them goes on."""
        return bool(self.paused) and not self.ready

    @property
    def has_single_holder(self) -> bool:
        """Whether its weights are on one node only."""
        return len(self.ready) + len(self.paused) == 1

    @property
    def holders(self) -> tuple[NodeId, ...]:
        """All of them, those that get ready for it last."""
        return (*self.ready, *self.paused, *self.joining)


@dataclass(frozen=True)
class HopTimes:
    """What one stage's part of one microbatch took, both passes together, and who did it in the end."""

    node_id: NodeId
    compute_seconds: float  # at work, says the stage
    wait_seconds: float  # at the stage, behind others or behind its step
    wire_seconds: float  # on the way there and back; 0 on this node itself
    recompute_seconds: float = 0.0  # of the work: the forward pass done again for the backward pass
    bytes_sent: int = 0  # tensors only
    bytes_received: int = 0

    @property
    def stage_seconds(self) -> float:
        """At the stage."""
        return self.compute_seconds + self.wait_seconds

    @property
    def seconds(self) -> float:
        """Altogether."""
        return self.stage_seconds + self.wire_seconds


@dataclass(frozen=True)
class Takeover:
    """A stage of a microbatch whose work another replica took over in the middle of it."""

    stage: int
    before: NodeId
    after: NodeId
    is_exact: bool  # both said that their weights are the same


@dataclass(frozen=True)
class MicrobatchTrace:
    """One microbatch on its way through all stages, there and back."""

    session: int
    microbatch: int
    ended_at: float  # seconds since the epoch
    seconds: float  # from the first request to the last answer
    tokens: int
    hops: tuple[HopTimes, ...]  # one a stage
    takeovers: tuple[Takeover, ...] = ()
    failures: int = 0  # requests after which somebody else was asked

    @property
    def other_seconds(self) -> float:
        """Between the stages: looking for somebody, asking again, and what replaced nodes did in vain."""
        return max(0.0, self.seconds - sum(hop.seconds for hop in self.hops))


@dataclass(frozen=True)
class StageLoad:
    """What a stage takes for a microbatch on average, whoever does it; seconds."""

    stage: int
    compute_seconds: float
    wait_seconds: float
    wire_seconds: float
    nodes: int  # that worked on it

    @property
    def stage_seconds(self) -> float:
        """At the stage."""
        return self.compute_seconds + self.wait_seconds


@dataclass(frozen=True)
class Bottleneck:
    """The stage at which microbatches spend most time, and the slowest of the nodes that did it."""

    stage: int
    node_id: NodeId
    seconds: float  # that a microbatch spends at this stage on average, at work and waiting
    share: float  # of the time that it spends at all stages, 0..1


@dataclass(frozen=True)
class PipelineFlow:
    """How the microbatches of a driver went: those that ended within the last minute, and counts since the start."""

    window_seconds: float = 0.0  # that the numbers cover: at most a minute
    microbatches: int = 0
    tokens: int = 0
    bubble_share: float | None = None  # of the computers' time, 0..1: not spent on this driver's microbatches
    recompute_share: float | None = None  # of the compute time, 0..1: forward passes done again for lack of memory
    wire_bytes_per_token: float | None = None  # tensors sent and received by this driver
    loads: tuple[StageLoad, ...] = ()  # one a stage; () while nothing ended
    bottleneck: Bottleneck | None = None
    exact_takeovers: int = 0  # since the start, as all that follow
    approximate_takeovers: int = 0  # between replicas whose weights were not known to be the same
    failures: int = 0
    given_up: int = 0  # microbatches that were left out for good
    unanswered: tuple[int, ...] = ()  # stages for which microbatches wait at present: nobody does them
    recent: tuple[MicrobatchTrace, ...] = ()  # at most 32, the newest last

    @property
    def tokens_per_second(self) -> float:
        """Driven by this node."""
        return self.tokens / self.window_seconds if self.window_seconds > 0 else 0.0


@dataclass(frozen=True)
class PipelineStatus:
    """The pipeline of this node's run."""

    stages: tuple[PipelineStage, ...]  # of the run's plan, in order
    missing: str = ""  # which layers nobody can work on now, in a sentence; "" when there are none
    flow: PipelineFlow | None = None  # None on a node that drives no microbatches
