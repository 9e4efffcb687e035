"""One microbatch's call through all stages, and statistics of such calls for the dashboard.

A call keeps the inputs of each stage, so that a lost stage can be replaced."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import anyio
import torch
from torch import Tensor

from neuroshard.data.held_out_losses import Measured
from neuroshard.pipeline.microbatch import DisputedTensorError, MicrobatchKey, Retry, StageError, UnknownMicrobatchError
from neuroshard.pipeline.routing import BlameRule, Routing
from neuroshard.pipeline.stage_client import MicrobatchResult, RequestTiming, StageClient
from neuroshard.pipeline.tensor_checks import LARGEST_ROUNDING, are_alike
from neuroshard.status.pipeline import (
    Bottleneck,
    HopTimes,
    MicrobatchTrace,
    PipelineFlow,
    StageLoad,
    StarEdge,
    Takeover,
)
from neuroshard.types import NodeId

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

RETRY_SECONDS = 0.25
PATIENCE_SECONDS = 30.0  # with a busy, paused or outdated stage, before another replica is tried


@dataclass(frozen=True)
class Replacement:
    """Stage work that was repeated during a microbatch, by another replica or by the same one after a step."""

    stage: int
    before: StageClient
    after: StageClient
    is_exact: bool  # both replicas reported the same weights and returned the same output


class MicrobatchCall:
    """Calls the stages forward and then backward for one microbatch; gradients stay accumulated in the stages.

    A stage that fails is asked again or replaced by another replica. The replacement repeats this stage's work alone,
    from the inputs that are kept here. A tensor that is refused twice ends the call. Invariant: any split of the layers
    over the stages gives the same loss and gradients as one stage that holds all layers.
    """

    def __init__(
        self,
        routing: Routing,
        key: MicrobatchKey,
        input_ids: Tensor,
        labels: Tensor,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        rounding: float = LARGEST_ROUNDING,
    ) -> None:
        stages = routing.stage_count
        self.key = key
        self.replacements: list[Replacement] = []
        self.failures = 0  # after which another replica was used
        self.waits_for: int | None = None  # the stage for which a replica is being looked for
        self.hops: list[StageClient | None] = [None] * stages
        self.asked: dict[
            tuple[int, int], tuple[int, StageClient]
        ] = {}  # every stage client that got a request; the driver closes its session there
        self._routing = routing
        self.ids, self.labels = input_ids, labels
        self._inputs: dict[int, Tensor] = {0: input_ids}  # inputs that are at this node, by stage
        self._opened: list[StageClient | None] = [None] * stages  # the replica with the open forward pass, by stage
        self._first: list[StageClient | None] = [
            None
        ] * stages  # the replica whose output the next stage received, by stage
        self._roots: dict[int, str] = {}  # root of the weights that produced the output that the next stage received
        # the replica and the seconds of its answers, for the stages whose work is not finished
        self._at_work: dict[int, tuple[StageClient, float]] = {}
        self._gradient: Tensor | None = None  # gradient of the last stage's inputs, between the two passes
        self._patience_seconds, self._rounding = patience_seconds, rounding

    @property
    def has_left_first_stage(self) -> bool:
        """Whether the first stage has processed the data, so that a later stage works on its output."""
        return self._opened[0] is not None

    async def run(self) -> MicrobatchResult:
        """Run both passes. Raises StageError for a microbatch that can never succeed."""
        result = await self.forward()
        await self.backward()
        return result

    async def forward(self) -> MicrobatchResult:
        """Run the forward pass through all stages, and the backward pass of the last stage, which is then done.

        Raises StageError for a microbatch that can never succeed.
        """
        last = self._routing.stage_count - 1
        try:
            for stage in range(last):
                self._inputs[stage + 1] = await self._at(stage, partial(self._forward, stage))
            loss_sum, self._gradient = await self._at(last, self._loss)
        except BaseException:
            self._leave_stages()
            raise
        self._finished(last)
        return MicrobatchResult(loss_sum, self.labels.numel())

    async def backward(self) -> None:
        """Run the backward pass through the other stages, after `forward`. Raises StageError as `forward` does."""
        gradient, self._gradient = self._gradient, None
        try:
            for stage in reversed(range(self._routing.stage_count - 1)):
                gradient = await self._at(stage, partial(self._backward, stage, gradient))
                self._finished(stage)
        except BaseException:
            self._leave_stages()
            raise

    def _leave_stages(self) -> None:
        """Report to the routing that this microbatch no longer needs the stages that have not finished it."""
        for stage, (hop, _) in self._at_work.items():
            self._routing.left(stage, hop)

    def _finished(self, stage: int) -> None:
        self._routing.finished(stage, *self._at_work.pop(stage))

    async def _forward(self, stage: int, hop: StageClient) -> Tensor:
        output = await hop.forward(self.key, self._inputs[stage], self.ids)
        self._note_opened(stage, hop, output)
        return output

    async def _loss(self, hop: StageClient) -> tuple[Tensor, Tensor | None]:
        return await hop.loss(self.key, self._inputs[self._routing.stage_count - 1], self.labels, self.ids)

    async def _backward(self, stage: int, gradient: Tensor | None, hop: StageClient) -> Tensor | None:
        if gradient is None:
            raise ValueError("only the first stage of a run has no gradient to send back")
        if self._opened[stage] is not hop:  # a replacement, or a stage that lost it: it has no forward pass
            await self._forward(stage, hop)
        try:
            return await hop.backward(self.key, gradient)
        except UnknownMicrobatchError:
            self._opened[stage] = None
            raise

    def _note_opened(self, stage: int, hop: StageClient, output: Tensor) -> None:
        """Record who did the forward pass, and whether a replacement is exact.

        A replacement is exact if it reports the same weights as the first replica and returns the same output up to
        rounding: the next stage has already worked on that output. The same weights with another output mean that one
        of the two reports is wrong, so this is not exact. A repeated, equal answer of the same node is not a
        replacement, even over another connection.
        """
        self._opened[stage], before = hop, self._first[stage]
        if before is None:
            self._first[stage], self._roots[stage] = hop, hop.state_root
        elif before.node_id != hop.node_id or not torch.equal(output, self._inputs[stage + 1]):
            is_alike = are_alike(output, self._inputs[stage + 1], self._rounding)
            self._note_replacement(stage, before, hop, is_alike=is_alike)

    def _note_replacement(self, stage: int, before: StageClient, hop: StageClient, *, is_alike: bool) -> None:
        root = self._roots[stage]
        is_exact = bool(root) and hop.state_root == root and is_alike
        self.replacements.append(Replacement(stage, before, hop, is_exact))

    async def _hop(self, stage: int) -> StageClient:
        """Return the replica that does a stage's work for this microbatch; waits while there is none."""
        hop = self.hops[stage]
        if hop is None:
            self.waits_for = stage
            hop = self.hops[stage] = await self._routing.hop(stage)
            self.waits_for = None
            self.asked[stage, id(hop)] = (stage, hop)
            self._at_work[stage] = hop, 0.0
        return hop

    async def _fetch(self, stage: int) -> None:
        """Get the inputs of a stage that another node has. Every stage's inputs are here unless the call is chained."""
        raise ValueError(f"the inputs of stage {stage + 1} are not here")

    async def _at(self, stage: int, work: Callable[[StageClient], Awaitable[T]]) -> T:
        """Return the answer of the first replica that completes this work. Raises StageError if no replica ever can."""
        waits_until = anyio.current_time() + self._patience_seconds
        last = self.hops[stage]  # the replica that was asked last
        blame = BlameRule(self._routing, stage)
        while True:
            hop = await self._hop(stage)
            if hop is not last:
                self.failures += last is not None and last.node_id != hop.node_id
                last, waits_until = hop, anyio.current_time() + self._patience_seconds
            if stage not in self._inputs and self._opened[stage] is not hop:
                await self._fetch(stage)
            began = anyio.current_time()
            try:
                answer = await work(hop)
            except StageError as error:
                if error.retry is Retry.NEVER:
                    raise
                blame.note(hop, error)
                if error.retry is Retry.ELSEWHERE or anyio.current_time() >= waits_until:
                    _LOG.debug("Stage %d: trying another node: %s", stage + 1, error)
                    self._routing.failed(stage, hop, error)
                    self.hops[stage] = None
                    del self._at_work[stage]
                else:
                    self._routing.busy(stage, hop, error)
                    await anyio.sleep(RETRY_SECONDS)
            else:
                self._at_work[stage] = hop, self._at_work[stage][1] + anyio.current_time() - began
                return answer


async def measured_losses(routing: Routing, input_ids: Tensor, labels: Tensor) -> Measured:
    """Measure each sequence's loss (b,), summed over its tokens, without changing gradients. Raises StageError."""
    *before, last = range(routing.stage_count)
    activations = input_ids
    for stage in before:
        activations = await _answered(routing, stage, lambda hop, inputs=activations: hop.infer(inputs, input_ids))
    return await _answered(routing, last, lambda hop: hop.measure(activations, labels, input_ids))


async def _answered(routing: Routing, stage: int, ask: Callable[[StageClient], Awaitable[T]]) -> T:
    blame = BlameRule(routing, stage)
    while True:
        hop = await routing.hop(stage)
        failure: StageError | None = None
        try:
            return await ask(hop)
        except StageError as error:
            blame.note(hop, error)
            failure = error if error.retry is Retry.ELSEWHERE else None
            if not isinstance(error, DisputedTensorError):
                raise
        finally:
            if failure is None:
                routing.left(stage, hop)
            else:
                routing.failed(stage, hop, failure)


def hop_times(node_id: NodeId, timings: Iterable[RequestTiming], key: MicrobatchKey) -> HopTimes:
    """Sum the times and bytes of one microbatch's requests to one stage, whose newest requests are `timings`."""
    known = [one for one in timings if (one.session, one.microbatch) == (key.session, key.microbatch)]
    return HopTimes(
        node_id,
        compute_seconds=sum(timing.compute_seconds for timing in known),
        wait_seconds=sum(timing.wait_seconds for timing in known),
        wire_seconds=sum(timing.wire_seconds for timing in known),
        recompute_seconds=sum(timing.recompute_seconds for timing in known),
        bytes_sent=sum(timing.bytes_sent for timing in known),
        bytes_received=sum(timing.bytes_received for timing in known),
        bytes_handed=sum(timing.bytes_handed for timing in known),
    )


def trace_of(run: MicrobatchCall, *, ended_at: float, seconds: float) -> MicrobatchTrace:
    """Describe a microbatch that every stage has accumulated; `ended_at` is in seconds since the epoch."""
    return MicrobatchTrace(
        run.key.session,
        run.key.microbatch,
        ended_at=ended_at,
        seconds=seconds,
        tokens=run.labels.numel(),
        hops=tuple(hop_times(hop.node_id, hop.timings, run.key) for hop in run.hops if hop is not None),
        takeovers=tuple(
            Takeover(one.stage, one.before.node_id, one.after.node_id, one.is_exact) for one in run.replacements
        ),
        failures=run.failures,
    )


def stage_loads(traces: Sequence[MicrobatchTrace]) -> tuple[StageLoad, ...]:
    """Mean times of each stage per microbatch; () without microbatches."""
    if not traces:
        return ()
    count = len(traces)
    return tuple(
        StageLoad(
            stage,
            compute_seconds=sum(hop.compute_seconds for hop in hops) / count,
            wait_seconds=sum(hop.wait_seconds for hop in hops) / count,
            wire_seconds=sum(hop.wire_seconds for hop in hops) / count,
            nodes=len({hop.node_id for hop in hops}),
        )
        for stage, hops in enumerate(zip(*(trace.hops for trace in traces), strict=True))
    )


def bottleneck_of(traces: Sequence[MicrobatchTrace]) -> Bottleneck | None:
    """Stage with the most compute and wait time per microbatch, and its slowest node; None with one stage."""
    loads = stage_loads(traces)
    total = sum(load.stage_seconds for load in loads)
    if len(loads) < 2 or total <= 0:
        return None
    load = max(loads, key=lambda one: one.stage_seconds)
    taken: dict[NodeId, list[float]] = {}
    for trace in traces:
        hop = trace.hops[load.stage]
        taken.setdefault(hop.node_id, []).append(hop.stage_seconds)
    slowest = max(sorted(taken), key=lambda node: sum(taken[node]) / len(taken[node]))
    return Bottleneck(load.stage, slowest, load.stage_seconds, load.stage_seconds / total)


def bubble_share(traces: Sequence[MicrobatchTrace], window_seconds: float) -> float | None:
    """1 - compute / (computers x window): the share of time in which the computers did nothing for this driver.

    Computers are the nodes that did a stage of these microbatches; several stages of one node share its compute thread.
    Compute is the time of forward and backward passes, as reported by the stages. Steps, evaluations, saving and work
    for other drivers count as bubble. None without microbatches.
    """
    computers = {hop.node_id for trace in traces for hop in trace.hops}
    if not computers or window_seconds <= 0:
        return None
    compute = sum(hop.compute_seconds for trace in traces for hop in trace.hops)
    return min(1.0, max(0.0, 1.0 - compute / (len(computers) * window_seconds)))


def recompute_share(traces: Sequence[MicrobatchTrace]) -> float | None:
    """Share of the compute time spent on repeated forward passes; None without compute time."""
    compute = sum(hop.compute_seconds for trace in traces for hop in trace.hops)
    again = sum(hop.recompute_seconds for trace in traces for hop in trace.hops)
    return again / compute if compute > 0 else None


def wire_bytes_per_token(traces: Sequence[MicrobatchTrace]) -> float | None:
    """Bytes of tensors that this driver sent and received per token; None without tokens."""
    tokens = sum(trace.tokens for trace in traces)
    moved = sum(hop.bytes_sent + hop.bytes_received for trace in traces for hop in trace.hops)
    return moved / tokens if tokens else None


def busiest_upload_per_token(traces: Sequence[MicrobatchTrace]) -> float | None:
    """Bytes of tensors per token that the node with most of them uploads; None without tokens.

    The driver uploads to the stages; each stage uploads to the driver and to its neighbours.
    """
    tokens, uploads = sum(trace.tokens for trace in traces), dict[NodeId | None, int]()
    for hop in (hop for trace in traces for hop in trace.hops):
        uploads[None] = uploads.get(None, 0) + hop.bytes_sent
        uploads[hop.node_id] = uploads.get(hop.node_id, 0) + hop.bytes_received + hop.bytes_handed
    return max(uploads.values()) / tokens if tokens else None


def flow_of(traces: Sequence[MicrobatchTrace], window_seconds: float) -> PipelineFlow:
    """Statistics of the microbatches that ended within a window of `window_seconds`."""
    return PipelineFlow(
        window_seconds=window_seconds,
        microbatches=len(traces),
        tokens=sum(trace.tokens for trace in traces),
        bubble_share=bubble_share(traces, window_seconds),
        recompute_share=recompute_share(traces),
        wire_bytes_per_token=wire_bytes_per_token(traces),
        busiest_upload_per_token=busiest_upload_per_token(traces),
        loads=stage_loads(traces),
        bottleneck=bottleneck_of(traces),
    )


WINDOW_SECONDS = 60.0
REMEMBERED_TRACES = 32
MOST_HOPS = 2048  # microbatches in the window times stages; with more, the statistics cover less than a minute
FOLD_SECONDS = 1.0  # the statistics are computed at most once in this time


@dataclass(frozen=True)
class FlowCounts:
    """Replaced stages and failed requests since the start."""

    exact_takeovers: int = 0
    approximate_takeovers: int = 0
    failures: int = 0
    given_up: int = 0

    def with_run(self, run: MicrobatchCall) -> FlowCounts:
        """Counts that include one more microbatch."""
        exact = sum(one.is_exact for one in run.replacements)
        return replace(
            self,
            exact_takeovers=self.exact_takeovers + exact,
            approximate_takeovers=self.approximate_takeovers + len(run.replacements) - exact,
            failures=self.failures + run.failures,
        )


class FlowRecord:
    """Records the start and end of microbatches. The statistics cover those that ended within the last minute."""

    def __init__(
        self,
        stage_count: int,
        *,
        monotonic: Callable[[], float],
        wall_clock: Callable[[], float],
        star_edges: Callable[[], tuple[StarEdge, ...]] = lambda: (),
    ) -> None:
        """`wall_clock` returns seconds since the epoch, `star_edges` neighbours whose tensors this node passes on."""
        self._star_edges = star_edges
        self._monotonic = monotonic
        self._wall_clock = wall_clock
        self._counts = FlowCounts()
        self._under_way: dict[MicrobatchCall, float] = {}  # microbatches in flight, with their start times
        self._window: deque[tuple[float, MicrobatchTrace]] = deque()  # traces, with their end times
        self._most = max(REMEMBERED_TRACES, MOST_HOPS // stage_count)
        self._since: float | None = None  # the window contains everything that ended after this time
        self._recent: deque[MicrobatchTrace] = deque(maxlen=REMEMBERED_TRACES)
        self._folded = PipelineFlow()
        self._folded_at = -FOLD_SECONDS

    def began(self, run: MicrobatchCall) -> None:
        """Record that a microbatch enters the first stage."""
        now = self._under_way[run] = self._monotonic()
        if self._since is None:
            self._since = now

    def gave_up(self) -> None:
        """Count a microbatch that was dropped for good."""
        self._counts = replace(self._counts, given_up=self._counts.given_up + 1)

    def ended(self, run: MicrobatchCall, *, is_accumulated: bool) -> None:
        """Record that the microbatch is no longer in flight, and whether every stage has done its work for it."""
        began = self._under_way.pop(run)
        self._counts = self._counts.with_run(run)
        if not is_accumulated:
            return
        now = self._monotonic()
        trace = trace_of(run, ended_at=self._wall_clock(), seconds=now - began)
        self._recent.append(trace)
        self._window.append((now, trace))
        if len(self._window) > self._most:
            self._since, _ = self._window.popleft()

    def flow(self) -> PipelineFlow:
        """Present statistics. Values of the window may be up to FOLD_SECONDS old."""
        now = self._monotonic()
        if self._since is not None and now - self._folded_at >= FOLD_SECONDS:
            self._folded, self._folded_at = flow_of(self._traces(now), now - self._since), now
        counts = self._counts
        for run in self._under_way:
            counts = counts.with_run(run)
        waited_for = {run.waits_for for run in self._under_way if run.waits_for is not None}
        return replace(
            self._folded,
            recent=tuple(self._recent),
            unanswered=tuple(sorted(waited_for)),
            star_edges=self._star_edges(),
            **vars(counts),
        )

    def _traces(self, now: float) -> list[MicrobatchTrace]:
        oldest = now - WINDOW_SECONDS
        while self._window and self._window[0][0] < oldest:
            self._window.popleft()
        if self._since is not None:
            self._since = max(self._since, oldest)
        return [trace for _, trace in self._window]
