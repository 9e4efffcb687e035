"""The arithmetic of one stage as the rest of a node sees it, on one device or on the ranks of a site."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from neuroshard.model.transformer import KeyValueCache, StageModel
from neuroshard.optim.outer import OuterState
from neuroshard.pipeline.executor import OpenMicrobatch, PassResult, Precision, StepResult
from neuroshard.pipeline.tensor_checks import StageShapes

Passed = PassResult | Future[PassResult]
"""Result of a pass, or the future of a pass that is computed together with others."""


class Executor(Protocol):
    """Forward and backward passes, steps and tensors of one stage; `StageExecutor` documents each call.

    Everything runs on the compute thread. `model` shows the shapes of the stage. Its values, and the moments, are read
    and written by the calls below, because the ranks of a site may each have only a part of them.
    """

    @property
    def precision(self) -> Precision: ...

    @precision.setter
    def precision(self, precision: Precision) -> None: ...

    @property
    def width(self) -> int:
        """Number of microbatches that are computed at the same time."""
        ...

    @property
    def model(self) -> StageModel: ...

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are lost when any rank ends, so that only a checkpoint has them then."""
        ...

    @property
    def is_suspended(self) -> bool: ...

    @property
    def is_dropped(self) -> bool: ...

    @property
    def weights(self) -> tuple[object, ...]: ...

    def forward_pass(
        self, shapes: StageShapes, inputs: Tensor, *, keeps_graph: bool, ids: Tensor | None = None
    ) -> Passed: ...

    def loss_pass(self, shapes: StageShapes, inputs: Tensor, labels: Tensor, ids: Tensor | None = None) -> Passed: ...

    def backward_pass(self, opened: OpenMicrobatch, gradient: Tensor) -> Passed: ...

    def infer(self, inputs: Tensor, labels: Tensor | None = None, ids: Tensor | None = None) -> Tensor: ...

    def empty_cache(self) -> KeyValueCache: ...

    def read(
        self, inputs: Tensor, cache: KeyValueCache, *, every_position: bool = False, ids: Tensor | None = None
    ) -> Tensor: ...

    def step(self, learning_rate: float, max_norm: float, token_count: int) -> StepResult: ...

    def take_gradient(self, token_count: int) -> tuple[StepResult, Tensor | None]: ...

    def zero(self) -> None: ...

    def vector(self, out: Tensor | None = None) -> Tensor:
        """All weights as one fp32 CPU vector (d,), as `flatten` returns it."""
        ...

    def load_vector(self, vector: Tensor) -> None:
        """Set all weights from a vector (d,)."""
        ...

    def other_weights(self, vector: Tensor) -> AbstractContextManager[None]:
        """Let the stage compute with a vector (d,) instead of its weights within the block."""
        ...

    def tensors(self, outer: OuterState) -> Mapping[str, Tensor]:
        """The tensors of a checkpoint, as `stage_tensors` names them. They may be gathered when they are read."""
        ...

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights and moments from a checkpoint, which has the names of `tensors`."""
        ...

    def suspend(self) -> None: ...

    def resume(self) -> None: ...

    def drop_tensors(self) -> None: ...

    def allocate_tensors(self) -> None: ...

    def recover(self) -> str:
        """Make the stage able to compute again after a SiteFailedError; return "" or the reason why it cannot.

        Nothing is accumulated afterwards.
        """
        ...
