"""Arithmetic of one stage (forward, backward, optimizer step) and the compute thread, which alone runs it."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from functools import partial
from math import inf, isfinite
from threading import Condition, Event, Thread
from typing import Any, Protocol, TypeVar, cast

import anyio
import torch
import trio
from torch import Tensor

from neuroshard.errors import NotReadyError
from neuroshard.model.backward import backward_from_gradient
from neuroshard.model.transformer import Block, KeyValueCache, RunBlock, StageModel
from neuroshard.model.weights import flatten, load_vector, other_weights
from neuroshard.optim.inner_optimizer import MOMENTS, PINNED_KINDS, HostMomentsAdamW, clipped_step, host_memory
from neuroshard.pipeline.compilation import Compilation
from neuroshard.pipeline.microbatch import AcceleratorFullError, AcceleratorLostError
from neuroshard.pipeline.tensor_checks import LARGEST_VALUE, StageShapes, is_loss, is_within
from neuroshard.state.stage_tensors import inner_tensors, stage_tensors, without_values
from neuroshard.state.system_resources import yield_to_other_programs


class Precision(StrEnum):
    """Number format of matrix products. Weights, gradients and moments are fp32 in both."""

    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def dtype(self) -> torch.dtype:
        """Type of the factors of matrix products."""
        return torch.bfloat16 if self is Precision.BF16 else torch.float32


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Context manager for a forward pass in this precision."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision is Precision.BF16)


def synchronise(device: torch.device) -> None:
    """Wait until an accelerator has finished its work. Raises errors of that work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class StepResult:
    """Loss and gradient norm of one optimizer step."""

    loss: float | None  # mean nats per token of the accumulated microbatches; None on a stage without the loss
    grad_norm: float  # of the mean gradient, before clipping
    finite: bool  # False: no weights were changed and the gradients were dropped


@dataclass(frozen=True)
class OpenMicrobatch:
    """A microbatch between its forward and its backward pass."""

    inputs: Tensor  # a leaf that collects the activation gradient, or token ids in the first stage
    output: Tensor  # activations (b, t, n), of d values or of a subspace's k
    keeps_graph: bool  # False: the backward pass computes the forward pass again
    ids: Tensor | None = None  # of the tokens (b, t), for coefficients of a subspace


@dataclass(frozen=True)
class PassResult:
    """Result of one pass of a microbatch. Tensors for other stages are on the CPU."""

    opened: OpenMicrobatch | None = None  # after a forward pass
    output: Tensor | None = None  # activations, after a forward pass
    loss_sum: Tensor | None = None  # in the last stage
    gradient: Tensor | None = None  # of the inputs, after a backward pass; None in the first stage
    is_spoilt: bool = False  # a resulting value is not finite or implausibly large
    seconds: float = 0.0


class StageExecutor:
    """Model and optimizer of one layer range, with gradients accumulated over microbatches.

    Losses are sums over tokens. Gradients therefore add up, and a step divides them once by its number of tokens.
    """

    def __init__(
        self,
        model: StageModel,
        optimizer: torch.optim.AdamW,
        device: torch.device,
        precision: Precision = Precision.FP32,
        compilation: Compilation | None = None,
    ) -> None:
        """Without `compilation`, all passes are eager; stages of one node share it."""
        self.model = model
        self.optimizer = optimizer
        self.device = device  # compute device; while suspended, the tensors are on the CPU
        self.is_suspended = False
        self.is_dropped = False  # weights and moments have no memory and read as NaN
        self.precision = precision
        self.compilation = compilation or Compilation()
        self.width = 1  # number of microbatches that are computed at the same time
        self.is_sharded = False
        self.vector = partial(flatten, model)
        self.load_vector = partial(load_vector, model)
        self.other_weights = partial(other_weights, model)
        self.tensors = partial(stage_tensors, model, optimizer)
        self._loss_sums: list[Tensor] = []
        self._steps = 0
        self._pins = device.type in PINNED_KINDS
        self._host_moments = MOMENTS if isinstance(optimizer, HostMomentsAdamW) else ()  # never on the device

    @property
    def weights(self) -> tuple[object, ...]:
        """Token that compares equal while neither the values nor the device of the weights have changed."""
        parameters = list(self.model.parameters())
        # PyTorch counts the writes to each parameter, except those of a fused optimizer: `_steps` counts these
        written = sum(parameter._version for parameter in parameters)
        return self._steps, written, parameters[0].device

    def forward(self, inputs: Tensor, *, keeps_graph: bool = True, ids: Tensor | None = None) -> OpenMicrobatch:
        """Token ids (b, t) or activations (b, t, d) -> activations (b, t, d), with what the backward pass needs.

        Coefficients (b, t, k) of a subspace come with the ids (b, t) of their tokens and replace activations.

        With `keeps_graph=False`, only the inputs are kept. This needs far less memory and about a third more
        computation.
        """
        leaf = self._sent(inputs, collects_gradient=not self.model.is_first)
        run_block = self.compilation.run_block if keeps_graph else Block.__call__
        with torch.set_grad_enabled(keeps_graph):
            return OpenMicrobatch(leaf, self._activations(leaf, ids, run_block), keeps_graph, ids)

    def backward(self, opened: OpenMicrobatch, gradient: Tensor) -> Tensor | None:
        """Accumulate parameter gradients. Returns the gradient of the inputs (b, t, d), or None in the first stage.

        `gradient` is the gradient of the output. The microbatch cannot be used again. The weights must not have changed
        since its forward pass.
        """
        output = opened.output if opened.keeps_graph else self._activations(opened.inputs, opened.ids)
        backward_from_gradient(output, self._sent(gradient))
        return None if self.model.is_first else opened.inputs.grad

    def loss(self, inputs: Tensor, labels: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Run both passes of the last stage. Returns the summed loss, a scalar, and the gradient of the inputs.

        The gradient is None if the stage is also the first one. In other stages, a loss that is not finite or not
        plausible also returns None and accumulates nothing, because the same step contains the work of other drivers.
        """
        leaf = self._sent(inputs, collects_gradient=not self.model.is_first)
        labels = self._sent(labels)
        with autocast(self.device, self.precision):
            loss_sum = self.model.loss_sum(self.model(leaf, ids=ids, run_block=self.compilation.run_block), labels)
        if not (self.model.is_first or is_loss(loss_sum.item(), labels.numel())):
            return loss_sum.detach(), None
        self._loss_sums.append(loss_sum.detach())
        torch.autograd.backward(loss_sum)
        return loss_sum.detach(), None if self.model.is_first else leaf.grad

    def forward_pass(
        self, shapes: StageShapes, inputs: Tensor, *, keeps_graph: bool, ids: Tensor | None = None
    ) -> PassResult:
        """Run a microbatch's forward pass. Raises RefusedTensorError for input values out of range."""
        began = time.perf_counter()
        shapes.check_values(inputs, ids=ids)
        opened = self.forward(inputs, keeps_graph=keeps_graph, ids=ids)
        output = opened.output.detach().cpu()
        is_spoilt = not is_within(output, LARGEST_VALUE)
        return PassResult(opened, output, is_spoilt=is_spoilt, seconds=time.perf_counter() - began)

    def loss_pass(self, shapes: StageShapes, inputs: Tensor, labels: Tensor, ids: Tensor | None = None) -> PassResult:
        """Run both passes of the last stage. Raises RefusedTensorError for inputs or labels out of range."""
        began = time.perf_counter()
        shapes.check_values(inputs, labels, ids)
        loss_sum, gradient = self.loss(inputs, labels, ids)
        sent, is_spoilt = self._to_send(gradient)
        return PassResult(loss_sum=loss_sum, gradient=sent, is_spoilt=is_spoilt, seconds=time.perf_counter() - began)

    def backward_pass(self, opened: OpenMicrobatch, gradient: Tensor) -> PassResult:
        """Run a microbatch's backward pass with a gradient that was checked before."""
        began = time.perf_counter()
        sent, is_spoilt = self._to_send(self.backward(opened, gradient))
        return PassResult(gradient=sent, is_spoilt=is_spoilt, seconds=time.perf_counter() - began)

    @staticmethod
    def _to_send(gradient: Tensor | None) -> tuple[Tensor | None, bool]:
        return (None, False) if gradient is None else (gradient.cpu(), not is_within(gradient, LARGEST_VALUE))

    @torch.no_grad()
    def infer(self, inputs: Tensor, labels: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """Forward pass without gradients: activations (b, t, d), or with labels each sequence's summed loss (b,)."""
        with autocast(self.device, self.precision):
            output = self.model(inputs.to(self.device), ids=ids)
            if labels is None:
                return output
            labels = labels.to(self.device)
            return torch.stack([self.model.loss_sum(output[i : i + 1], labels[i : i + 1]) for i in range(len(labels))])

    def empty_cache(self) -> KeyValueCache:
        """Create the key-value cache of one text on the present device of the weights."""
        device = next(self.model.parameters()).device
        return KeyValueCache(self.model.architecture, self.model.layer_range, device=device)

    @torch.no_grad()
    def read(
        self, inputs: Tensor, cache: KeyValueCache, *, every_position: bool = False, ids: Tensor | None = None
    ) -> Tensor:
        """Read the next tokens of one text, ids (1, t) or activations (1, t, d). The cache has the tokens before them.

        Returns activations (1, t, d), or in the last stage the logits (vocabulary,) of the next token, or with
        `every_position` those after each token (t, vocabulary). Computes in fp32: for one token at a time, casting the
        weights costs more than the products.
        """
        output = self.model(inputs.to(next(self.model.parameters()).device), cache, ids)
        if not self.model.is_last:
            return output
        return (
            self.model.logits(output)[0].float() if every_position else self.model.logits(output[:, -1:])[0, 0].float()
        )

    def step(self, learning_rate: float, max_norm: float, token_count: int) -> StepResult:
        """Make one optimizer step on the accumulated gradients / token_count, with their norm clipped to max_norm.

        A loss or gradient that is not finite changes no weights. The gradients are cleared in both cases. Raises
        ValueError without gradients.
        """
        result = self._measured(token_count)
        if result.finite:
            clipped_step(
                self.optimizer, learning_rate, tokens=token_count, grad_norm=result.grad_norm, max_norm=max_norm
            )
            self._steps += 1
        self.zero()
        if self.compilation.is_waiting:
            self.compilation.begin(self.model.first_block)
        return result

    def take_gradient(self, token_count: int) -> tuple[StepResult, Tensor | None]:
        """Return the accumulated gradients as one undivided fp32 CPU vector (d,) and clear them.

        The vector is None if the loss or a gradient is not finite. Raises ValueError without gradients.
        """
        result = self._measured(token_count)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        gradient = torch.cat([part.detach().float().flatten().cpu() for part in parts]) if result.finite else None
        self.zero()
        if self.compilation.is_waiting:
            self.compilation.begin(self.model.first_block)
        return result, gradient

    def _measured(self, token_count: int) -> StepResult:
        """Mean loss and gradient norm of the accumulated microbatches."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not gradients or token_count < 1:
            raise ValueError("a step needs the gradients of at least one microbatch")
        summed_norm = torch.nn.utils.get_total_norm(gradients)
        summed_loss = torch.stack(self._loss_sums).sum() if self._loss_sums else torch.zeros((), device=self.device)
        measured = torch.stack([summed_loss, summed_norm]).cpu() / token_count  # one wait for the accelerator
        loss = measured[0].item() if self._loss_sums else None
        norm = measured[1].item()
        return StepResult(loss, norm, finite=isfinite(norm) and (loss is None or isfinite(loss)))

    def note_loss(self, loss_sum: Tensor) -> None:
        """Add the summed loss of a microbatch whose gradients another rank has accumulated."""
        self._loss_sums.append(loss_sum.to(self.device))

    def recover(self) -> str:
        """Return "": one device has no ranks that could fail."""
        return ""

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights and moments from a checkpoint, which has the names of `stage_tensors`."""
        for name, tensor in inner_tensors(self.model, self.optimizer).items():
            tensor.copy_(tensors[name])

    def zero(self) -> None:
        """Clear accumulated gradients and losses."""
        self.optimizer.zero_grad(set_to_none=True)
        self._loss_sums.clear()

    def suspend(self) -> None:
        """Move weights, accumulated gradients and moments to the CPU to free the accelerator.

        No microbatch may be open, because its activations would stay on the accelerator.
        """
        self.is_suspended = True
        self._empty_cache()  # most of the memory held activations, and the weights take seconds to move
        self._move(torch.device("cpu"))
        self._empty_cache()

    def _empty_cache(self) -> None:
        """Return the memory that holds no tensor to the device."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()

    def drop_tensors(self) -> None:
        """Free the memory of a suspended stage without gradients. Weights and moments then read as NaN.

        `allocate_tensors` must come before a checkpoint is loaded.
        """
        self.is_dropped = True
        for tensor in self._held():
            tensor.data = without_values(tensor)

    def allocate_tensors(self) -> None:
        """Reserve memory for dropped tensors. Their values are undefined until a checkpoint is loaded into them."""
        for tensor in self._held():
            is_moment = self._host_moments and not isinstance(tensor, torch.nn.Parameter)
            tensor.data = host_memory(tensor, self.device if is_moment else CPU)
        self.is_dropped = False

    def resume(self) -> None:
        """Move the tensors back to the device after `suspend`. After OutOfMemoryError, the stage is suspended again."""
        try:
            self._move(self.device)
        except torch.OutOfMemoryError:
            self.suspend()  # some of the tensors may already be on the device
            raise
        self.is_suspended = False

    def _held(self) -> Iterator[Tensor]:
        """All tensors that have the shape of a parameter: weights and moments."""
        for parameter in self.model.parameters():
            yield parameter
            for moment in self.optimizer.state[parameter].values():
                if moment.shape == parameter.shape:
                    yield moment

    def _sent(self, tensor: Tensor, *, collects_gradient: bool = False) -> Tensor:
        """Copy a tensor to the device, perhaps as a leaf that collects its gradient.

        A GPU copies from pinned memory while it computes the microbatch before, and this thread does not wait. PyTorch
        uses the pinned memory again only after the copy has ended.
        """
        pins = self._pins and tensor.device.type == "cpu"
        sent = (tensor.pin_memory() if pins else tensor).to(self.device, non_blocking=pins)
        return sent.detach().requires_grad_() if collects_gradient else sent

    def _activations(self, inputs: Tensor, ids: Tensor | None, run_block: RunBlock = Block.__call__) -> Tensor:
        with autocast(self.device, self.precision):
            return self.model(inputs, ids=ids, run_block=run_block)

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and name not in self._host_moments:
                    state[name] = value.to(device)


T = TypeVar("T")

CPU = torch.device("cpu")
# PyTorch has own types for a full accelerator and for a failed one, but its libraries and the drivers of Intel's and
# Apple's GPUs report both as a plain RuntimeError. cuBLAS cannot be initialised when no memory is left.
_FULL = re.compile(r"out of memory|OUT_OF_(DEVICE|HOST)_MEMORY|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)")
_FAILED = re.compile(
    r"device[ _](is |was )?(lost|removed|unavailable)|busy or unavailable|launch failure|STATUS_EXECUTION_FAILED",
    re.IGNORECASE,
)


class Priority(Enum):
    """Order of waiting jobs. Jobs of equal priority keep their order of arrival."""

    SMALL = auto()  # a snapshot or a change of state: waits for at most the running job
    TEXT = auto()  # some tokens of text for people: before training, but never two in a row while training waits
    TRAINING = auto()  # forward or backward of one microbatch, an optimizer step


@dataclass(frozen=True)
class _Job:
    work: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future[Any])


class PendingWave(Protocol):
    """Passes that wait for others, to be computed at the same time by the ranks of a site."""

    @property
    def due(self) -> float | None:
        """Time of perf_counter at which they no longer wait; None if no pass waits."""
        ...

    def run(self) -> None:
        """Compute them; each pass's future gets its result or its exception."""
        ...


class ComputeThread:
    """Runs one job at a time. A job takes at most one microbatch; long jobs check `cancelled`.

    A job that was cancelled before its start never runs. A running job is always waited for, because its tensors are in
    use until it ends.
    """

    def __init__(
        self,
        cpu_threads: int | None = None,
        name: str = "neuroshard-compute",
        *,
        device: torch.device = CPU,
        device_label: str = "The accelerator",
        wave: PendingWave | None = None,
    ) -> None:
        """`cpu_threads` is the thread count of torch operations, which affects results bit by bit; None: torch's.

        `device` is the one whose work counts as time of a job, and `device_label` its name in errors. A job may return
        a future, for example of a pass that `wave` computes with others; then the result of the job is that of the
        future.
        """
        self.lost: AcceleratorLostError | None = None  # the accelerator failed, and fails for the rest of this process
        self._cpu_threads = cpu_threads
        self._device = device
        self._device_label = device_label
        self._wave = wave
        self._waiting = {priority: deque[_Job]() for priority in Priority}
        self._closed = False
        self._changed = Condition()
        self._last = Priority.TRAINING
        self._share = 1.0
        self._worked = (-inf, 0.0)  # end of the last training job, and its duration in seconds
        self.cancelled = Event()
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def throttle(self, share: float) -> None:
        """Limit training to this share of the time from now on. Only training jobs rest in between.

        Raises ValueError unless 0 < share <= 1.
        """
        if not 0 < share <= 1:
            raise ValueError(f"a share of the time must be in (0, 1], got {share}")
        if share != self._share:
            with self._changed:
                self._share = share
                self._changed.notify()

    def submit(self, work: Callable[[], T | Future[T]], priority: Priority = Priority.TRAINING) -> Future[T]:
        """Queue a job from any thread. Raises NotReadyError after `close`."""
        job = _Job(work)
        with self._changed:
            if self._closed:
                raise NotReadyError("The compute thread has ended.", "Start the node again.")
            self._waiting[priority].append(job)
            self._changed.notify()
        return job.result

    async def run(self, work: Callable[[], T | Future[T]], priority: Priority = Priority.TRAINING) -> T:
        """Run a job and wait for its value without blocking the event loop. Raises the job's exception.

        When the caller is cancelled, a waiting job is dropped and a running one is waited for. Raises
        AcceleratorFullError if PyTorch finds no memory on the accelerator, and AcceleratorLostError if it has failed.
        """
        return await self.finish(self.submit(work, priority))

    async def finish(self, result: Future[T]) -> T:
        """Wait for a submitted job as `run` does. Afterwards the job has ended or was dropped, also if cancelled."""
        done = anyio.Event()
        token = trio.lowlevel.current_trio_token()
        # called on the compute thread, which may not set the event itself
        result.add_done_callback(lambda _: token.run_sync_soon(done.set))  # pyright: ignore[reportUnknownMemberType]
        try:
            await done.wait()
        finally:
            if not result.cancel() and not result.done():
                with anyio.CancelScope(shield=True):
                    await done.wait()
        try:
            return result.result()
        except RuntimeError as error:
            found = self._accelerator_error(error)
            if found is None:
                raise
            raise found from error

    def _accelerator_error(self, error: RuntimeError) -> AcceleratorFullError | AcceleratorLostError | None:
        """Error for the caller if PyTorch reports that the accelerator is full or has failed; None for other errors."""
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or _FULL.search(text):
            return AcceleratorFullError()
        if not (isinstance(error, torch.AcceleratorError) or _FAILED.search(text)):
            return None
        self.lost = AcceleratorLostError(self._device_label, text.strip().partition("\n")[0].rstrip("."))
        return self.lost

    def close(self) -> None:
        """Accept no more jobs, finish the accepted ones and join the thread. A second call does nothing."""
        with self._changed:
            self._closed = True
            self.cancelled.set()
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        yield_to_other_programs()
        if self._cpu_threads is not None:
            torch.set_num_threads(self._cpu_threads)  # OpenMP keeps this per calling thread
        while (turn := self._next()) is not None:
            began = time.perf_counter()
            is_paced = turn[1] is Priority.TRAINING and self._share < 1
            self._run_job(turn[0], to_its_end=is_paced)
            if is_paced:
                ended = time.perf_counter()
                self._worked = ended, ended - began
            del turn  # do not keep the values of a finished job alive while waiting for the next one

    def _next(self) -> tuple[_Job, Priority] | None:
        """Wait for the next job. Returns None after `close`, when no job is left."""
        small, text, training = self._waiting.values()
        with self._changed:
            while True:
                rest = 0.0
                if training and not self._closed:  # seconds until training stays within its share of the time
                    ended, worked = self._worked
                    rest = ended + worked * (1 / self._share - 1) - time.perf_counter()
                # The order of these cases is the priority: small jobs, then text, then training that need not rest.
                # Text steps aside once after each text job if training is due. `rest` is 0 when the thread is closed,
                # so that accepted jobs end.
                is_due = bool(training) and rest <= 0
                if small:
                    return small.popleft(), Priority.SMALL
                if text and not (is_due and self._last is Priority.TEXT):
                    self._last = Priority.TEXT
                    return text.popleft(), Priority.TEXT
                if is_due:
                    self._last = Priority.TRAINING
                    return training.popleft(), Priority.TRAINING
                pause = rest if training else inf
                if self._wave is not None and (due := self._wave.due) is not None:
                    if self._closed or (left := due - time.perf_counter()) <= 0:
                        return _Job(self._wave.run), Priority.TRAINING
                    pause = min(pause, left)
                if self._closed:
                    return None
                self._changed.wait(None if pause == inf else pause)

    def _run_job(self, job: _Job, *, to_its_end: bool) -> None:
        """Run one job and store its result. `to_its_end` also waits for the work that it started on the accelerator."""
        if not job.result.set_running_or_notify_cancel():
            return
        try:
            value = job.work()
            if to_its_end:
                synchronise(self._device)
        except BaseException as error:  # noqa: BLE001 - not handled here: the future carries it to the caller
            job.result.set_exception(error)
        else:
            if isinstance(value, Future):
                cast("Future[Any]", value).add_done_callback(partial(_pass_on, job.result))
            else:
                job.result.set_result(value)


def _pass_on(result: Future[Any], done: Future[Any]) -> None:
    """Give a future the result or the exception of another one."""
    error = done.exception()
    if error is None:
        result.set_result(done.result())
    else:
        result.set_exception(error)
