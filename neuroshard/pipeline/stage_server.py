"""Server of one stage, for this node's driver and for peers alike: each microbatch is accumulated exactly once."""

from __future__ import annotations

from collections.abc import Callable, Container
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from math import inf, isfinite, sqrt
from statistics import median
from typing import assert_never

import anyio
from torch import Tensor

from neuroshard.aggregation.slices import dot_product
from neuroshard.pipeline.arithmetic import Executor, Passed
from neuroshard.pipeline.executor import ComputeThread, PassResult, Priority
from neuroshard.pipeline.microbatch import (
    AcceleratorFullError,
    MicrobatchKey,
    RefusedTensorError,
    SiteFailedError,
    SpoiltMicrobatchError,
    StageBusyError,
    StageError,
    StageGoneError,
    StagePausedError,
    UnknownMicrobatchError,
)
from neuroshard.pipeline.sessions import MicrobatchWork, SessionLimits, SessionTable, StepIntake
from neuroshard.pipeline.stage_texts import StageTexts, TextLimits
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import NodeId
from neuroshard.waiting import sleep_to_tick

MEDIANS = 3.0  # a longer gradient is clipped to this multiple of the median
WINDOW = 64  # number of gradients from which the median is computed
FEWEST = 8  # nothing is clipped before this number of gradients
SPOILT_MICROBATCHES = 3  # in a row, with valid inputs and values that are not finite: the weights are spoilt


@dataclass(frozen=True)
class GradientLimit:
    """Norms of the gradients received from the next stage, each divided by the square root of its tokens, newest last.

    Gradients are of summed losses, so the norm for n tokens grows like sqrt(n). Clipped gradients count with their
    clipped norm: a sender of huge gradients moves the limit only slowly.
    """

    norms: tuple[float, ...] = ()
    clipped: int = 0  # number of clipped gradients since the start

    @property
    def largest(self) -> float:
        """Largest norm, divided by the square root of the tokens, that passes unclipped."""
        return MEDIANS * median(self.norms) if len(self.norms) >= FEWEST else float("inf")

    def limited(self, gradient: Tensor) -> tuple[Tensor, GradientLimit]:
        """Return the gradient (b, t, d), clipped if it is too long, and the updated limit.

        Raises RefusedTensorError for values that are not finite.
        """
        values = gradient.flatten()
        norm = sqrt(dot_product(values, values) / gradient[..., 0].numel())  # the squares could overflow in fp32
        if not isfinite(norm):
            raise RefusedTensorError("A gradient with values that are not numbers was refused.")
        largest = self.largest
        kept = replace(self, norms=(*self.norms, min(norm, largest))[-WINDOW:])
        if norm <= largest:
            return gradient, kept
        return gradient * (largest / norm), replace(kept, clipped=self.clipped + 1)


class DrainReason(StrEnum):
    """Why a stage stops accepting microbatches, for a while or for good."""

    ROUND = "round"
    PAUSE = "pause"
    END = "end"
    ABANDON = "abandon"  # an end while another stage is empty, so that no microbatch can pass through all stages


@dataclass(frozen=True)
class ServiceLimits:
    """Time and memory limits of a stage server."""

    sessions: SessionLimits = field(default_factory=SessionLimits)
    texts: TextLimits = field(default_factory=TextLimits)
    wait_seconds: float = 10.0  # a new microbatch waits this long for the step to end, then it is refused
    waiting: int = 32  # more waiting microbatches are refused at once
    drain_seconds: float = 30.0  # time for open microbatches after the intake has closed; then they are given up
    pause_seconds: float = 0.5  # the same before a pause or a hasty end: the owner or the swarm waits for this node
    leave_seconds: float = 10.0  # the same before the node ends; must leave time for a final checkpoint
    look_seconds: float = 15.0  # interval between checks for idle sessions

    def patience(self, hold: DrainReason) -> float:
        """Seconds that open microbatches have to end."""
        match hold:
            case DrainReason.ROUND:
                return self.drain_seconds
            case DrainReason.PAUSE | DrainReason.ABANDON:
                return self.pause_seconds
            case DrainReason.END:
                return self.leave_seconds
            case _:
                assert_never(hold)


@dataclass
class ServiceCounts:
    """Counts of microbatches at this stage since the start."""

    microbatches: int = 0  # accumulated
    repeated: int = 0  # repeated requests that were answered from memory
    given_up: int = 0  # begun but never accumulated
    recomputed: int = 0  # accumulated ones whose forward pass was computed twice


class StageServer:
    """Runs one stage's forward and backward passes, once per key, with bounded sessions and a bounded intake.

    Methods belong to the event loop's thread, all arithmetic to the compute thread. A call is at most one job. A
    repeated call gets the first call's answer without a job. A cancelled call leaves nothing behind except finished
    work.
    """

    def __init__(
        self,
        compute: ComputeThread,
        executor: Executor,
        *,
        sequences_per_step: int,
        batch_size: int,
        limits: ServiceLimits | None = None,
        kept_graphs: int | None = None,
    ) -> None:
        """Up to `kept_graphs` microbatches keep the graph of their forward pass, the others compute it twice.

        With None, all keep it.
        """
        self.compute = compute
        self.executor = executor
        self.intake = StepIntake(sequences_per_step)
        self.changed = self.intake.changed  # also for changes of the sessions and of the state of the stage
        self.counts = ServiceCounts()
        self._limits = limits or ServiceLimits()
        self._shapes = StageShapes.of(executor.model, batch_size)
        self.texts = StageTexts(compute, executor, self._shapes, self._limits.texts)
        self._table = SessionTable(self._limits.sessions)
        self._gradient_limit = GradientLimit()
        self._kept_graphs = self._limits.sessions.open_microbatches if kept_graphs is None else kept_graphs
        self._graphs = 0  # kept graphs of microbatches that are open or about to be
        self._waiting = 0
        self._complete_since: float | None = None  # since then the step's microbatches are admitted, not all done
        self._is_leaving = False
        self._spoilt_in_a_row = 0
        self.lacks_ranks = False  # a rank of the site ended, with its part of the gradients
        self.lacks_memory = False  # a microbatch ran out of memory and may have left part of its gradients

    @property
    def is_spoilt(self) -> bool:
        """Whether the weights are spoilt: valid inputs have repeatedly given values that are not finite."""
        return self._spoilt_in_a_row >= SPOILT_MICROBATCHES

    @property
    def is_filled(self) -> bool:
        """Whether collecting must end: the step is complete, the weights are spoilt, or the accelerator has failed."""
        is_broken = self.lacks_memory or self.lacks_ranks or self.compute.lost is not None
        return self.intake.is_full or self.is_spoilt or is_broken

    @property
    def needs_ids(self) -> bool:
        """Whether inputs come with the ids of their tokens."""
        return self._shapes.needs_ids

    @property
    def gradient_limit(self) -> GradientLimit:
        """Limit for the gradients that the stage receives, with their recent norms."""
        return self._gradient_limit

    @property
    def open_of_driver(self) -> int:
        """Number of microbatches that one driver may have open here. More of them would only wait."""
        return min(self._limits.sessions.open_of_driver, self._limits.sessions.open_microbatches)

    @property
    def most_open(self) -> int:
        """Number of microbatches that all drivers together may have open here."""
        return self._limits.sessions.open_microbatches

    @property
    def session_count(self) -> int:
        """Number of sessions that are not closed."""
        return self._table.session_count

    def computed(self, key: MicrobatchKey) -> tuple[float, bool]:
        """Compute seconds of a microbatch so far, and whether its forward pass is computed twice.

        (0.0, False) for an unknown microbatch.
        """
        work = self._table.peek(key)
        return (0.0, False) if work is None else (work.compute_seconds, work.keeps_graph is False)

    async def run(self) -> None:
        """Close idle sessions and forget idle texts until cancelled."""
        while True:
            await sleep_to_tick(self._limits.look_seconds)
            self._let_go(self._table.expire(anyio.current_time()))
            self.texts.expire()

    async def forward(self, key: MicrobatchKey, inputs: Tensor, ids: Tensor | None = None) -> Tensor:
        """Compute the activations (b, t, d) for the next stage from token ids (b, t) or activations (b, t, d).

        Coefficients (b, t, k) of a subspace come with the `ids` (b, t) of their tokens, here and below.

        Raises StageError: StageBusyError when there is no room in time, ClosedSessionError, RefusedTensorError, and
        SpoiltMicrobatchError for activations that are not finite.
        """
        self._shapes.check_forward(inputs, ids)
        work = await self._work_of(key, inputs, opens=True)
        async with work.turn:
            if not self._is_repeated(work, is_answered=work.output is not None):
                if self._shapes.sends_ids:
                    work.ids = inputs if self._shapes.is_first else ids
                is_kept = work.keeps_graph is not False
                job = partial(self.executor.forward_pass, self._shapes, inputs, keeps_graph=is_kept, ids=ids)
                await self._run(work, job)
        return _present(work.output)

    async def loss(
        self, key: MicrobatchKey, inputs: Tensor, labels: Tensor, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run both passes of the last stage in one job. Returns the summed loss and the inputs' gradient (b, t, d).

        The gradient is None if the stage is also the first one. Raises StageError as `forward` does, and
        SpoiltMicrobatchError for a gradient that is not finite.
        """
        self._shapes.check_loss(inputs, labels, ids)
        work = await self._work_of(key, inputs, opens=False)
        async with work.turn:
            if not self._is_repeated(work, is_answered=work.done):
                await self._run(work, partial(self.executor.loss_pass, self._shapes, inputs, labels, ids))
        return _present(work.loss_sum), work.gradient_to_send()

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        """Accumulate gradients from the gradient of `forward`'s output. Returns the gradient of the inputs.

        Returns None from the first stage. Raises UnknownMicrobatchError without a forward pass, RefusedTensorError,
        ClosedSessionError, SpoiltMicrobatchError.
        """
        self._shapes.check_activations(gradient)
        work = self._table.find(key, anyio.current_time())
        if work is None or work.output is None:
            raise UnknownMicrobatchError(f"Microbatch {key.microbatch} is not open.", "Begin it again.")
        if gradient.shape != work.output.shape:
            raise RefusedTensorError(f"A gradient of shape {tuple(gradient.shape)} for {tuple(work.output.shape)}.")
        async with work.turn:
            if not self._is_repeated(work, is_answered=work.done):
                await self._run(work, partial(self._backward_pass, work, gradient))
        return work.gradient_to_send()

    async def remembered(self, key: MicrobatchKey, *, is_forward: bool) -> MicrobatchWork | None:
        """Return a microbatch whose forward pass, or whose last pass, was done before; None if it was not done.

        Waits while a pass runs. Raises ClosedSessionError, and UnknownMicrobatchError for one that was given up.
        """
        work = self._table.find(key, anyio.current_time())
        if work is None:
            return None
        async with work.turn:
            is_answered = work.output is not None if is_forward else work.done
            return work if self._is_repeated(work, is_answered=is_answered) else None

    def ids_to_send(self, key: MicrobatchKey) -> Tensor | None:
        """The ids (b, t) of a microbatch's tokens, if the next stage needs them with its output."""
        work = self._table.peek(key)
        return None if work is None else work.ids

    def is_open(self, key: MicrobatchKey) -> bool:
        """Whether a microbatch waits for its backward pass here."""
        work = self._table.peek(key)
        return work is not None and work.output is not None and not work.done

    async def infer(self, inputs: Tensor, labels: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """Run a forward pass, also between steps: activations, or with labels the summed loss (b,) of each sequence.

        Raises RefusedTensorError, StagePausedError, and StageGoneError once the node ends.
        """
        self._shapes.check_inputs(inputs, ids)
        if labels is not None:
            self._shapes.check_loss(inputs, labels, ids)
        self._require_work()

        def work() -> Tensor:
            self._shapes.check_values(inputs, labels, ids)
            return self.executor.infer(inputs, labels, ids).cpu()

        return await self.compute.run(work)

    async def read(
        self, requester: NodeId, session: int, position: int, inputs: Tensor, ids: Tensor | None = None
    ) -> Tensor:
        """Read a peer's text as StageTexts.read does. Raises StagePausedError and StageGoneError as `infer` does."""
        self._require_work()
        return await self.texts.read(requester, session, position, inputs, ids)

    def close(self, driver: NodeId, session: int) -> None:
        """Close a session for good: its open microbatches are given up and later requests of it are refused."""
        self._let_go(self._table.close(driver, session))

    def keep_only(self, nodes: Container[NodeId]) -> None:
        """Forget the texts and close the sessions of all nodes that are not in `nodes`."""
        self.texts.keep_only(nodes)
        self._let_go(self._table.keep_only(nodes))

    def open(self) -> None:
        """Admit microbatches, which get the full time to end."""
        self._complete_since = None
        self.intake.open()

    async def filled(self) -> None:
        """Wait until `is_filled`."""
        while not self.is_filled:
            await self.wait_for_change()

    async def wait_for_change(self, deadline: float = inf) -> None:
        """Wait for the next change, or until a deadline on the event loop's clock.

        If microbatches stay open for too long after the last one of a step was admitted, those of drivers without any
        request since then are given up, so that others can take their place.
        """
        now, intake = anyio.current_time(), self.intake
        if intake.missing > 0 or intake.is_full:
            self._complete_since = None
        elif self._complete_since is None:
            self._complete_since = now
        since = self._complete_since
        stalled_at = inf if since is None else since + self._limits.drain_seconds
        with anyio.CancelScope(deadline=min(deadline, stalled_at)):
            await self.changed.wait()
            return
        if since is not None and anyio.current_time() >= stalled_at:
            self._complete_since = None
            self._let_go([work for work in self._table.of_idle(since) if not (work.done or work.running)])

    async def _until_idle(self) -> None:
        while not self.intake.is_idle:
            await self.changed.wait()

    async def drain(self, reason: str, hold: DrainReason = DrainReason.ROUND, *, began: float | None = None) -> None:
        """Close the intake and wait until nothing is open. Microbatches that take too long after `began` are given up.

        `began` is now by default. With a pause or an end, further requests are sent to other replicas.
        """
        self._is_leaving = self._is_leaving or hold in {DrainReason.END, DrainReason.ABANDON}
        self.intake.close(reason, is_paused=hold is DrainReason.PAUSE)
        until = (anyio.current_time() if began is None else began) + self._limits.patience(hold)
        with anyio.CancelScope(deadline=until):
            await self._until_idle()
            return
        # A running job cannot be stopped: `_give_up` only marks its microbatch, and `_run` drops it when the job has
        # ended.
        self._give_up_open()
        await self._until_idle()

    async def discard(self, reason: str, *, is_paused: bool = False) -> None:
        """Close the intake and drop the present step."""
        self.intake.close(reason, is_paused=is_paused)
        self._give_up_open()
        await self._until_idle()
        self.intake.take()
        self._spoilt_in_a_row, self.lacks_memory, self.lacks_ranks = 0, False, False
        await self.compute.run(self.executor.zero, Priority.SMALL)

    def note_lost_ranks(self, errors: BaseExceptionGroup[StageError]) -> None:
        """Collect no more if a rank has failed: the gradients of the present step are incomplete."""
        self.lacks_ranks |= errors.subgroup(SiteFailedError) is not None
        self.intake.notify()

    async def leave(self) -> None:
        """Drop the present step for good. Further requests are sent to other replicas."""
        self._is_leaving = True
        await self.discard("The node stops.")

    async def suspend(self) -> None:
        """Free the accelerator and keep the present step. The intake must be drained."""
        self.intake.close("The node is paused.", is_paused=True)
        self.texts.clear()
        await self.compute.run(self.executor.suspend, Priority.SMALL)

    async def resume(self) -> None:
        """Move the stage back to the accelerator. Raises AcceleratorFullError and AcceleratorLostError."""
        await self.compute.run(self.executor.resume, Priority.SMALL)
        self.intake.close("The stage is not ready yet.")

    def _require_work(self) -> None:
        if self._refuses_more:
            raise self._refusal(self.intake.closed_because or "The node stops.")

    async def _work_of(self, key: MicrobatchKey, inputs: Tensor, *, opens: bool) -> MicrobatchWork:
        """Return the microbatch of a key: a known one, or a new one once there is room.

        With `opens`, a new microbatch stays open until its backward pass.
        """
        sequences, tokens = inputs.shape[0], inputs.shape[0] * inputs.shape[1]
        kept_bytes = self._shapes.kept_bytes(tokens)
        await self._room_for(key, kept_bytes)
        # A repeated request may have been admitted during the wait. From here to `admit` nothing awaits, so that a key
        # is admitted only once.
        known = self._table.find(key, anyio.current_time())
        if known is not None:
            return known
        work = MicrobatchWork(key, sequences, tokens, kept_bytes)
        self._table.admit(work, anyio.current_time())
        if opens:
            work.keeps_graph = self._graphs < self._kept_graphs
            self._graphs += work.keeps_graph
        self.intake.begin(key, sequences)
        self.intake.notify()
        return work

    async def _room_for(self, key: MicrobatchKey, kept_bytes: int) -> None:
        """Wait until the microbatch is known or can begin.

        Raises StageBusyError when this takes too long. Raises StagePausedError and StageGoneError at once.
        """
        obstacle = self._obstacle(key, kept_bytes)
        if obstacle is not None and not self._refuses_more:
            if self._waiting >= self._limits.waiting:
                raise StageBusyError(obstacle, "Too many requests wait already.")
            self._waiting += 1
            try:
                with anyio.move_on_after(self._limits.wait_seconds):
                    while not self._refuses_more and self._obstacle(key, kept_bytes) is not None:
                        await self.changed.wait()
            finally:
                self._waiting -= 1
            obstacle = self._obstacle(key, kept_bytes)
        if obstacle is not None:
            raise self._refusal(obstacle)

    @property
    def _refuses_more(self) -> bool:
        """Whether waiting is useless because the stage is paused or leaving."""
        return self._is_leaving or self.intake.is_paused

    def _refusal(self, obstacle: str) -> StageError:
        """Error for a refused request: go elsewhere for good, go elsewhere for a while, or wait."""
        kind = StagePausedError if self.intake.is_paused else StageBusyError
        return (StageGoneError if self._is_leaving else kind)(obstacle)

    def _obstacle(self, key: MicrobatchKey, kept_bytes: int) -> str | None:
        """Reason why a microbatch must wait. None for a known one, which already has its place or its answer."""
        if self._table.knows(key):
            return None
        if self.intake.is_open:
            return self._table.obstacle(key, kept_bytes)
        return self.intake.closed_because or "The stage is making its step."

    def _is_repeated(self, work: MicrobatchWork, *, is_answered: bool) -> bool:
        """Whether an earlier call has the answer. Raises UnknownMicrobatchError if the microbatch was given up."""
        if is_answered:
            self.counts.repeated += 1
        elif work.dropped:
            raise UnknownMicrobatchError(f"Microbatch {work.key.microbatch} was given up.", "Begin it again.")
        return is_answered

    async def _run(self, work: MicrobatchWork, job: Callable[[], Passed]) -> None:
        """Run one pass of a microbatch and keep its result, even if the caller was cancelled meanwhile."""
        work.running = True
        result: Future[PassResult] | None = None
        try:
            result = self.compute.submit(job)
            await self.compute.finish(result)
        except AcceleratorFullError:
            self.lacks_memory = True
            raise
        except SiteFailedError:
            self.lacks_ranks = True
            raise
        finally:
            work.running = False
            # `finish` waits for a running job even when cancelled. Its gradients are accumulated then, so its result
            # must be kept: a repeated request gets this answer instead of accumulating a second time.
            if result is not None and not result.cancelled() and result.exception() is None:
                self._keep(work, result.result())
            if work.done:
                self._count(work)
            elif work.dropped or work.opened is None:
                self._give_up(work)
            self.intake.notify()
        if work.is_refused:
            raise SpoiltMicrobatchError("This microbatch contains values that are not numbers.")

    def _keep(self, work: MicrobatchWork, result: PassResult) -> None:
        """Keep the result of a pass. Activations and losses that are not finite are dropped.

        Inputs are bounded. If non-finite values are computed from them repeatedly, the weights are spoilt. A stage that
        is both the first and the last one checks this in its step, so that it need not wait for the accelerator here.
        """
        work.compute_seconds += result.seconds
        is_backward = result.opened is None and result.loss_sum is None
        if not is_backward and not (self._shapes.is_first and self._shapes.is_last):
            work.is_refused = result.is_spoilt if result.opened is not None else result.gradient is None
            self._spoilt_in_a_row = self._spoilt_in_a_row + 1 if work.is_refused else 0
            if work.is_refused:
                return
        if result.opened is not None:
            work.opened, work.output = result.opened, result.output
            return
        work.loss_sum, work.gradient = result.loss_sum, result.gradient
        work.spoilt, work.done = result.is_spoilt, True

    def _count(self, work: MicrobatchWork) -> None:
        """Count a microbatch as accumulated for the present step. Its graph is no longer kept."""
        work.counted = True
        self._graphs -= work.keeps_graph is True
        self.intake.finish(work.key, work.tokens)
        self.counts.microbatches += 1
        self.counts.recomputed += work.keeps_graph is False

    def _give_up(self, work: MicrobatchWork) -> None:
        """Drop a microbatch that is not accumulated. If its job runs, `_run` drops it when the job has ended."""
        work.dropped = True
        if work.running or work.counted:
            return
        work.counted = True
        self._graphs -= work.keeps_graph is True
        work.opened = work.output = None
        self._table.drop(work)
        self.intake.withdraw(work.key)
        self.counts.given_up += 1

    def _give_up_open(self) -> None:
        self._let_go([work for work in self._table.works() if not work.done])

    def _let_go(self, works: list[MicrobatchWork]) -> None:
        for work in works:
            self._give_up(work)
        self.intake.notify()

    def _backward_pass(self, work: MicrobatchWork, gradient: Tensor) -> Passed:
        """Run on the compute thread, where the gradients of all drivers pass the limit one after the other."""
        self._shapes.check_bounded(gradient)
        limited, self._gradient_limit = self._gradient_limit.limited(gradient)
        opened, work.opened = work.opened, None
        if opened is None:
            raise UnknownMicrobatchError(f"Microbatch {work.key.microbatch} is not open.", "Begin it again.")
        return self.executor.backward_pass(opened, limited)


def _present(tensor: Tensor | None) -> Tensor:
    """Return what a job has left. Raises UnknownMicrobatchError if the microbatch was given up meanwhile."""
    if tensor is None:
        raise UnknownMicrobatchError("The microbatch was given up.", "Begin it again.")
    return tensor
