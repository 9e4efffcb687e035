"""A stage whose tensors are divided among the ranks of a site (mode `shard`), as rank 0 sees it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from neuroshard.config.run_parameters import RunParameters
from neuroshard.model.transformer import KeyValueCache
from neuroshard.model.weights import TensorSchema
from neuroshard.optim.outer import OuterState
from neuroshard.pipeline.executor import PassResult, StepResult
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.state.stage_tensors import ANCHOR, OUTER_TENSORS, VELOCITY
from neuroshard.training.site.commands import (
    AddGradients,
    ApplyGradients,
    Movement,
    PassKind,
    ReadRows,
    RunPass,
    WriteRows,
)
from neuroshard.training.site.process_group import ProcessGroup, form_of
from neuroshard.training.site.shard_executor import ShardExecutor, rows_of
from neuroshard.training.site.site import PassPart, Site
from neuroshard.training.site.site_executor import SiteExecutor
from neuroshard.types import LayerRange


class ShardedStage(SiteExecutor):
    """An `Executor` of which no rank has all weights. Whole tensors are gathered one after the other on rank 0's host.

    The state ends with any rank. After a failure, the tensors count as dropped until a checkpoint is loaded.
    """

    def __init__(self, site: Site, parameters: RunParameters, layers: LayerRange, device: torch.device) -> None:
        self._shard = ShardExecutor(parameters, layers, device, site.group)
        super().__init__(self._shard, site, parameters)
        self._shard_of = site.incarnation

    # Passes

    def compute(self, operation: PassKind, part: PassPart | None) -> None:
        """Take part in a pass of all ranks, also without a microbatch. After any error the others wait for the rest."""
        if part is None:
            self._shard.idle(operation)
        else:
            part.result.set_result(part.here())

    def prepare(self) -> None:
        """Build the stage on the other ranks, if they have started since it was built."""
        self._build_on_ranks()

    def forward_pass(
        self, shapes: StageShapes, inputs: Tensor, *, keeps_graph: bool, ids: Tensor | None = None
    ) -> Future[PassResult]:
        """Run a forward pass without a graph, so that every rank can take part in the backward pass."""
        return super().forward_pass(shapes, inputs, keeps_graph=False, ids=ids)

    def infer(self, inputs: Tensor, labels: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        return self._run_alone(partial(self._shard.infer, inputs, labels, ids))

    def read(
        self, inputs: Tensor, cache: KeyValueCache, *, every_position: bool = False, ids: Tensor | None = None
    ) -> Tensor:
        return self._run_alone(partial(self._shard.read, inputs, cache, every_position=every_position, ids=ids))

    def _run_alone(self, work: Callable[[], Tensor]) -> Tensor:
        """Run a pass of rank 0, in which the others take part with nothing."""
        site = self._ready()
        none = (0,) * self.width
        passed = RunPass(self.stage, PassKind.FORWARD, self.precision.value, False, none, (None, None, None), ())
        site.command(passed, is_answered=False)
        with site.failing():
            return work()

    # Steps

    def _gather(self) -> None:
        site = self._ready()
        site.command(AddGradients(self.stage))

        def add(group: ProcessGroup) -> None:
            group.send_all(b"")
            self._shard.add_squares()

        site.transfer(add)

    def take_gradient(self, token_count: int) -> tuple[StepResult, Tensor | None]:
        gradient = torch.empty(self._schema.total_size)
        views = self._schema.views(gradient)
        self._read([f"gradient/{name}" for name in views], views.values())
        self._gather()
        try:
            result = self._shard.measure(token_count)
        finally:
            self._let_apply(ApplyGradients(is_step=False))
        return result, gradient if result.finite else None

    # Tensors

    @property
    def _schema(self) -> TensorSchema:
        return TensorSchema.of(self.model)

    def vector(self, out: Tensor | None = None) -> Tensor:
        schema = self._schema
        vector = torch.empty(schema.total_size) if out is None else out
        views = schema.views(vector)
        self._read([f"model/{name}" for name in views], views.values())
        return vector

    def load_vector(self, vector: Tensor) -> None:
        views = self._schema.views(vector)
        self._write([f"model/{name}" for name in views], views.values())

    @contextmanager
    def other_weights(self, vector: Tensor) -> Generator[None]:
        """Let the stage compute with a vector (d,); every rank keeps its own rows on its host meanwhile."""
        self._ready()
        self._shard.set_aside()
        self._move(Movement.ASIDE)
        try:
            self.load_vector(vector)
            yield
        finally:
            self._shard.take_back()
            self._move(Movement.BACK)

    def tensors(self, outer: OuterState) -> Mapping[str, Tensor]:
        self._ready()
        return GatheredTensors(self, self._shard.names(), {ANCHOR: outer.anchor, VELOCITY: outer.velocity})

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        names = [name for name in self._shard.names() if name not in OUTER_TENSORS]
        self._write(names, (tensors[name] for name in names))

    def whole(self, name: str) -> Tensor:
        """Gather the tensor with this name in a checkpoint."""
        out = torch.empty(self._shard.shape_of(name))
        self._read([name], [out])
        return out

    def _read(self, names: Sequence[str], into: Iterable[Tensor]) -> None:
        """Gather tensors on the host of rank 0, one after the other."""
        site = self._ready()
        site.command(ReadRows(self.stage, tuple(names)), is_answered=False)
        for name, out in zip(names, into, strict=True):
            part = self._shard.part(name)
            if not out.dim():  # the same on all ranks
                out.copy_(part)
                site.transfer(lambda group, out=out: self._receive(group, out, whole=True))
                continue
            out[rows_of(len(out), 0, self.width)].copy_(part)
            site.transfer(lambda group, out=out: self._receive(group, out, whole=False))

    def _receive(self, group: ProcessGroup, out: Tensor, *, whole: bool) -> None:
        for rank in range(1, self.width):
            rows = out if whole else out[rows_of(len(out), rank, self.width)]
            if rows.numel():
                (found,) = group.receive_tensors([form_of(rows)], rank)
                if found is not None:
                    rows.copy_(found)

    def _write(self, names: Sequence[str], values: Iterable[Tensor]) -> None:
        """Divide tensors among the ranks, one after the other."""
        site = self._ready()
        site.command(WriteRows(self.stage, tuple(names)), is_answered=False)
        for name, value in zip(names, values, strict=True):
            part = self._shard.part(name)
            part.copy_(value if not value.dim() else value[rows_of(len(value), 0, self.width)])
            site.transfer(lambda group, value=value: self._send(group, value))
        site.answers()

    def _send(self, group: ProcessGroup, value: Tensor) -> None:
        for rank in range(1, self.width):
            rows = value if not value.dim() else value[rows_of(len(value), rank, self.width)]
            if rows.numel():
                group.send_tensors([rows], rank)

    def _ready(self) -> Site:
        """Finish the waiting passes, and build the stage where it is missing. Raises SiteFailedError."""
        self._site.run()
        self._check_complete()
        self._build_on_ranks()
        return self._site

    # Failures

    def recover(self) -> str:
        obstacle = super().recover()
        if obstacle:
            self._own.is_dropped = True
        elif self._shard_of != self._site.incarnation:
            precision, layers = self.precision, self.model.layer_range
            self._own = self._shard = ShardExecutor(self._parameters, layers, self._shard.device, self._site.group)
            self._shard_of, self.precision, self._own.is_dropped = self._site.incarnation, precision, True
        return obstacle


class GatheredTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint that are gathered when they are read, so that only one of them is in memory twice."""

    def __init__(self, stage: ShardedStage, names: list[str], outer: dict[str, Tensor]) -> None:
        self._stage, self._names, self._outer = stage, dict.fromkeys([*names, *outer]), outer

    def __getitem__(self, name: str) -> Tensor:
        return self._outer[name] if name in self._outer else self._stage.whole(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
