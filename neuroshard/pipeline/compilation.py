"""Compilation of a model's blocks, which training never waits for.

Training begins eagerly. After the first optimizer step, a thread compiles a copy of one block. Its compiled form
replaces the eager form of all blocks, from one pass to the next, if both agree and the compiled form is faster.
Otherwise training stays eager, the log names the reason once, and this process does not compile again.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from neuroshard.model.memory_need import COMPILED_KINDS
from neuroshard.model.subspace import Subspace
from neuroshard.model.transformer import Block, KeyValueCache, RunBlock
from neuroshard.state.system_resources import yield_to_other_programs
from neuroshard.status.computer import CompilationState, CompilationStatus

_LOG = logging.getLogger(__name__)

LEAST_GAIN = 1.05
TOLERANCE_FP32, TOLERANCE_BF16 = 1e-5, 2e-2  # norm of the difference over the norm, of each output and gradient
ROUNDS = 10  # timed passes of each form; training computes meanwhile, so the fastest of them counts
LONGEST_REASON = 300  # characters

Backend = str | Callable[..., Any]
"""Backend of torch.compile: a name, or a function that makes a callable of a graph and its example inputs."""

_FAILURES: list[str] = []  # of this process


class RefusedFormError(Exception):
    """The compiled form is wrong, or not worth its use."""


@dataclass(frozen=True)
class TrainingPass:
    """Everything by which the compiled form of one training pass differs from that of another."""

    shape: torch.Size  # of the block's input (b, t, d)
    dtype: torch.dtype  # of the block's input
    device: torch.device
    cosine: Tensor
    sine: Tensor
    low_precision: torch.dtype | None  # of matrix products under autocast; None: no autocast
    cpu_threads: int

    def autocast(self) -> torch.autocast:
        """Context manager for a forward pass in the same precision."""
        return torch.autocast(self.device.type, dtype=self.low_precision, enabled=self.low_precision is not None)


class Compilation:
    """The form in which training runs the blocks of this node's stages: eager at first, perhaps compiled later.

    The compute thread calls `run_block` and `begin`; any thread may read `status`.
    """

    def __init__(
        self,
        *,
        is_wanted: bool = False,
        reason: str = "",
        backend: Backend = "inductor",
        clock: Callable[[], float] = time.perf_counter,
        failures: list[str] = _FAILURES,
    ) -> None:
        """`reason` says why it is not wanted. After one of the `failures`, nothing is compiled."""
        self.run_block: RunBlock = Block.__call__  # read once per pass, so that a pass has one form
        self.is_waiting = False
        self.status = CompilationStatus(CompilationState.OFF, reason)
        self._backend, self._clock, self._failures = backend, clock, failures
        self._seen: TrainingPass | None = None
        self._compiled: RunBlock = Block.__call__
        if not is_wanted:
            return
        if failures:
            self.status = CompilationStatus(CompilationState.REFUSED, failures[0])
        elif getattr(sys, "frozen", False):
            self._refuse("this package has no compiler")
        else:
            self.status, self.is_waiting = CompilationStatus(CompilationState.WAITING), True
            self.run_block = self._observe

    def begin(self, block: Block) -> None:
        """After an optimizer step, begin to compile a copy of this block in the background. Returns at once.

        Does nothing before the first training pass.
        """
        if self._seen is None:
            return
        self.is_waiting, self.run_block = False, Block.__call__
        if any(isinstance(module, Subspace) for module in block.modules()):
            self.status = CompilationStatus(CompilationState.OFF, "blocks of a model with a subspace are not compiled")
            _LOG.info("Training computes eagerly: %s.", self.status.reason)
            return
        self.status = CompilationStatus(CompilationState.COMPILING)
        try:
            arguments = copy.deepcopy(block), self._seen
            Thread(target=self._compile, args=arguments, name="neuroshard-compiler", daemon=True).start()
        except Exception as error:  # noqa: BLE001 - such as no memory for the copy; training must not see it
            self._refuse(reason_of(error))

    def _observe(self, block: Block, x: Tensor, cosine: Tensor, sine: Tensor, cache: KeyValueCache | None) -> Tensor:
        """Run a block eagerly, and remember the first pass."""
        if self._seen is None:
            kind = x.device.type
            low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            self._seen = TrainingPass(x.shape, x.dtype, x.device, cosine, sine, low, torch.get_num_threads())
        return block(x, cosine, sine, cache)

    def _run_compiled(
        self, block: Block, x: Tensor, cosine: Tensor, sine: Tensor, cache: KeyValueCache | None
    ) -> Tensor:
        """Run a block in its compiled form. A batch of another shape, or a model on the CPU, takes the eager form."""
        seen, is_used = self._seen, self.status.state is CompilationState.USED
        if not is_used or seen is None or (x.shape, x.device) != (seen.shape, seen.device):
            return block(x, cosine, sine, cache)
        try:
            return self._compiled(block, x, cosine, sine, cache)
        except torch.OutOfMemoryError:  # the eager form would need more
            raise
        except Exception as error:  # noqa: BLE001 - PyTorch would compile again, or the form fails: train without it
            self._refuse(reason_of(error))
            return block(x, cosine, sine, cache)

    def _compile(self, block: Block, seen: TrainingPass) -> None:
        """Compile and try the compiled form on the thread that `begin` started."""
        yield_to_other_programs()
        try:
            gain = self._gain(block, seen)
        except Exception as error:  # noqa: BLE001 - compilers fail in many ways, and training needs none
            self._refuse(reason_of(error))
        else:
            _LOG.info("Blocks are compiled from now on: %.2f times as fast as before.", gain)
            self.status = CompilationStatus(CompilationState.USED)
            self.run_block = self._run_compiled

    def _gain(self, block: Block, seen: TrainingPass) -> float:
        """Factor by which the compiled form is faster. Raises RefusedFormError, and every error of a compiler."""
        # PyTorch compiles the backward pass at its first call by default. On a GPU, that would be on the thread that
        # also runs the backward passes of training, which would wait.
        from torch._functorch import config

        torch.set_num_threads(seen.cpu_threads)  # a compiled form is valid for one number of threads
        compiled: Any = torch.compile(Block.forward, fullgraph=True, dynamic=False, backend=self._backend)  # pyright: ignore[reportUnknownMemberType]
        early: AbstractContextManager[object] = config.patch(force_non_lazy_backward_lowering=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        with own_stream(seen.device) as wait, early:
            probe = Probe(block, seen)
            torch.compiler.set_stance("default")
            found = probe.run(compiled)
            torch.compiler.set_stance("fail_on_recompile")  # a step would wait: no pass compiles from now on
            probe.check(found, probe.run(Block.forward))
            turns = [[self._seconds(probe, form, wait) for form in (compiled, Block.forward)] for _ in range(ROUNDS)]
        fastest_compiled, fastest_eager = (min(seconds) for seconds in zip(*turns, strict=True))
        gain = fastest_eager / fastest_compiled
        if not gain >= LEAST_GAIN:
            raise RefusedFormError(f"the compiled form is {gain:.2f} times as fast, and {LEAST_GAIN} would be worth it")
        self._compiled = compiled
        return gain

    def _seconds(self, probe: Probe, form: RunBlock, wait: Callable[[], None]) -> float:
        wait()
        began = self._clock()
        probe.run(form)
        wait()
        return self._clock() - began

    def _refuse(self, reason: str) -> None:
        self.run_block = Block.__call__
        self.status = CompilationStatus(CompilationState.REFUSED, reason)
        self._failures.append(reason)
        _LOG.warning("Training computes without compilation: %s.", reason)


def compilation_of(setting: str, device: torch.device, *, has_memory: bool = True) -> Compilation:
    """The compilation that the setting `compile`, "auto" or "off", means on this device.

    `has_memory` says whether the device has memory for the copy of a block that is compiled.
    """
    if setting == "off":
        return Compilation(reason="the setting compile is off")
    if device.type not in COMPILED_KINDS:
        return Compilation(reason=f"nothing is compiled for the device {device.type}")
    if not has_memory:
        return Compilation(reason="the device has no memory for the copy of a block")
    return Compilation(is_wanted=True)


class Probe:
    """A batch, and a gradient of its result, on which two forms of a block are compared. The block is a copy."""

    def __init__(self, block: Block, seen: TrainingPass) -> None:
        numbers = torch.Generator().manual_seed(0)
        self._block, self._seen = block, seen
        self._input, self._gradient = (
            torch.randn(seen.shape, generator=numbers).to(seen.device, seen.dtype) for _ in range(2)
        )

    def run(self, form: RunBlock) -> tuple[Tensor, ...]:
        """Both passes: the output, the gradient of the input, and those of the parameters."""
        x = self._input.clone().requires_grad_()
        with self._seen.autocast():
            output = form(self._block, x, self._seen.cosine, self._seen.sine, None)
        return output.detach(), *torch.autograd.grad(output, (x, *self._block.parameters()), self._gradient)

    def check(self, found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        """Raises RefusedFormError if one of the tensors differs by more than rounding."""
        tolerance = TOLERANCE_FP32 if self._seen.low_precision is None else TOLERANCE_BF16
        for one, other in zip(found, expected, strict=True):
            difference, size = (part.float().square().sum().sqrt().item() for part in (one - other, other))
            if not difference <= tolerance * size:  # not >: it is also false for NaN
                raise RefusedFormError(
                    f"the compiled form is wrong: it differs by {difference:.1e} from {size:.1e}, "
                    f"and the tolerance is {tolerance:.0e} of it"
                )


@contextmanager
def own_stream(device: torch.device) -> Generator[Callable[[], None]]:
    """Let this thread's work not wait for training on the accelerator; yields the function that waits for this work."""
    if device.type == "cpu":
        yield lambda: None
        return
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))  # which copies the block
    try:
        with stream:
            yield stream.synchronize
    finally:
        stream.synchronize()  # before the memory of the copy is given back


def reason_of(error: BaseException) -> str:
    """The error that a compiler reports, in one line without a full stop."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    text = str(error).strip()
    first = text.splitlines()[0].rstrip(".: ") if text else ""
    name = "" if isinstance(error, RefusedFormError) else type(error).__name__
    return ": ".join(part for part in (name, first) if part)[:LONGEST_REASON]
