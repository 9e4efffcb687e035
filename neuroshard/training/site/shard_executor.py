"""One rank's part of a stage in mode `shard`: rows of every tensor. A pass gathers the weights block by block."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor, nn

from neuroshard.config.run_parameters import RunParameters
from neuroshard.model.backward import backward_from_gradient
from neuroshard.model.subspace import subspace_of
from neuroshard.model.transformer import IGNORED_LABEL, KeyValueCache, StageModel
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.pipeline.executor import OpenMicrobatch, StageExecutor, StepResult, autocast
from neuroshard.pipeline.tensor_checks import is_loss
from neuroshard.training.site.commands import PassKind
from neuroshard.training.site.process_group import ProcessGroup
from neuroshard.types import LayerRange


def rows_of(length: int, rank: int, width: int) -> slice:
    """Rows of a tensor that a rank has, as FSDP2 divides them: the last ranks may have fewer rows, or none."""
    share = -(-length // width)
    return slice(min(rank * share, length), min((rank + 1) * share, length))


def sharded(model: StageModel, device: torch.device) -> list[nn.Parameter]:
    """Divide a model among the ranks, and return this rank's rows of each parameter, which share the model's memory."""
    from torch.distributed.device_mesh import DeviceMesh  # they load PyTorch's compiler, which costs 100 MB
    from torch.distributed.fsdp import fully_shard

    world = cast("Any", torch.distributed).group.WORLD
    mesh = DeviceMesh.from_group(world, device.type)
    for module in [*cast("Iterable[nn.Module]", model.layers.values()), model]:
        part = fully_shard(module, mesh=mesh)
        part.set_gradient_divide_factor(1.0)  # the gradients of all ranks add up
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other operation
    model.to(device)  # buffers; FSDP2 has moved the parameters
    return [nn.Parameter(local_of(parameter)) for parameter in model.parameters()]


def local_of(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor that FSDP2 has divided, in the same memory."""
    return cast("Any", tensor).detach().to_local()


def forget_pass(model: StageModel) -> None:
    """Free the gathered weights, and let FSDP2 forget the last forward pass; PyTorch before 2.13 only frees them."""
    getattr(model, "reset_iter_state", cast("Any", model).reshard)()


class ShardExecutor(StageExecutor):
    """A stage whose tensors are divided among the ranks.

    Every pass gathers the weights of one block after the other from all ranks, and a backward pass adds their gradients
    and divides them again. So all ranks run each pass at the same time. A rank without a microbatch calls `idle`.
    """

    def __init__(
        self, parameters: RunParameters, layers: LayerRange, device: torch.device, group: ProcessGroup
    ) -> None:
        """Build the stage with zeros; all ranks do this at the same time."""
        model = StageModel(parameters.architecture, layers, subspace_of(parameters))
        self._parts = nn.ParameterList(sharded(model, device))
        super().__init__(model, make_inner_optimizer(self._parts, parameters.inner), device)
        self.is_sharded = True
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._names = dict(zip(self.shapes, self._parts, strict=True))
        self._group = group
        self._aside: list[Tensor] = []
        self._squares = 0.0
        self._bytes = [tensor.untyped_storage().nbytes() for tensor in self._owned()]

    @property
    def weights(self) -> tuple[object, ...]:
        return self._steps, sum(part._version for part in self._parts), id(self)

    # Passes

    def forward(self, inputs: Tensor, *, keeps_graph: bool = True, ids: Tensor | None = None) -> OpenMicrobatch:
        """Run the forward pass without a graph: the backward pass computes it again, on all ranks."""
        opened = super().forward(inputs, keeps_graph=False, ids=ids)
        self._release()
        return opened

    def loss(self, inputs: Tensor, labels: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Run both passes of the last stage, as StageExecutor does.

        If the loss of any rank is not plausible, this rank computes nothing in its place, and all ranks begin again.
        """
        leaf = self._leaf(inputs)
        loss_sum = self._loss_sum(leaf, labels, ids)
        if not self.model.is_first:
            is_bad = not is_loss(loss_sum.item(), labels.numel())
            flag = torch.tensor(float(is_bad))
            self._group.add([flag])
            if flag.item():
                refused = loss_sum.detach()
                forget_pass(self.model)
                leaf, labels, ids = self._nothing() if is_bad else (self._leaf(inputs), labels, ids)
                loss_sum = self._loss_sum(leaf, labels, ids)
                if is_bad:
                    torch.autograd.backward(loss_sum)
                    return refused, None
        self._loss_sums.append(loss_sum.detach())
        torch.autograd.backward(loss_sum)
        return loss_sum.detach(), None if self.model.is_first else leaf.grad

    def _leaf(self, inputs: Tensor) -> Tensor:
        return self._sent(inputs, collects_gradient=not self.model.is_first)

    def _loss_sum(self, leaf: Tensor, labels: Tensor, ids: Tensor | None) -> Tensor:
        with autocast(self.device, self.precision):
            return self.model.loss_sum(self.model(leaf, ids=ids), labels.to(self.device))

    def idle(self, operation: PassKind) -> None:
        """Take part in a pass of other ranks, with one token that counts nothing."""
        leaf, labels, ids = self._nothing()
        match operation:
            case PassKind.FORWARD:
                self.forward(leaf, ids=ids)
            case PassKind.LOSS:
                self.loss(leaf, labels, ids)
            case PassKind.BACKWARD:
                output = self._activations(leaf, ids)
                backward_from_gradient(output, torch.zeros_like(output))

    def _nothing(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs, labels and ids of one token that has no loss."""
        model, zero = self.model, torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        ids = zero if model.architecture.subspace_rank and not model.is_first else None
        inputs = zero if model.is_first else torch.zeros((1, 1, model.architecture.wire_size))
        return self._leaf(inputs), torch.full_like(zero, IGNORED_LABEL), ids

    def infer(self, inputs: Tensor, labels: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        try:
            return super().infer(inputs, labels, ids)
        finally:
            self._release()

    def read(
        self, inputs: Tensor, cache: KeyValueCache, *, every_position: bool = False, ids: Tensor | None = None
    ) -> Tensor:
        try:
            return super().read(inputs, cache, every_position=every_position, ids=ids)
        finally:
            self._release()

    def _release(self) -> None:
        """Free the gathered weights after a pass that no backward pass follows."""
        forget_pass(self.model)

    # Steps

    def add_squares(self) -> None:
        """Add the squares of all ranks' gradients, for the norm of a step. All ranks do this at the same time."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for part, parameter in zip(self._parts, self.model.parameters(), strict=True):
            part.grad = None if parameter.grad is None else local_of(parameter.grad)
            if part.grad is not None:
                squares += part.grad.double().square().sum()
        self._group.add([squares])
        self._squares = squares.item()

    def _measured(self, token_count: int) -> StepResult:
        if token_count < 1 or all(part.grad is None for part in self._parts):
            raise ValueError("a step needs the gradients of at least one microbatch")
        norm = self._squares**0.5 / token_count
        loss = torch.stack(self._loss_sums).sum().item() / token_count if self._loss_sums else None
        return StepResult(loss, norm, finite=isfinite(norm) and (loss is None or isfinite(loss)))

    def measure(self, token_count: int) -> StepResult:
        """Measure the gradients after `add_squares`, and clear them."""
        result = self._measured(token_count)
        self.zero()
        return result

    def zero(self) -> None:
        super().zero()
        self.model.zero_grad(set_to_none=True)

    # Tensors

    def part(self, name: str) -> Tensor:
        """This rank's rows of a tensor by its name in a checkpoint; of a gradient by "gradient/<name>"."""
        kind, _, rest = name.partition("/")
        if self.is_dropped:
            raise ValueError(f"{name} has no memory")
        if kind == "model":
            return self._names[rest].detach()
        if kind == "inner":
            parameter, _, moment = rest.rpartition("/")
            return self.optimizer.state[self._names[parameter]][moment]
        gradient = self.model.get_parameter(rest).grad
        return torch.zeros_like(self._names[rest]) if gradient is None else local_of(gradient)

    def names(self) -> list[str]:
        """Names of weights and moments in the order of `stage_tensors`."""
        names = list[str]()
        for parameter, part in self._names.items():
            names.append(f"model/{parameter}")
            names += [f"inner/{parameter}/{moment}" for moment in self.optimizer.state[part]]
        return names

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor with this name."""
        kind, _, rest = name.partition("/")
        parameter, _, moment = rest.rpartition("/")
        return () if (kind, moment) == ("inner", "step") else self.shapes[parameter if kind == "inner" else rest]

    def set_aside(self) -> None:
        """Keep a copy of this rank's weights in the memory of the computer until `take_back`."""
        self._aside = [part.detach().cpu().clone() for part in self._parts]

    def take_back(self) -> None:
        """Return to the weights of `set_aside`."""
        for part, kept in zip(self._parts, self._aside, strict=True):
            part.data.copy_(kept)
        self._aside = []

    def drop_tensors(self) -> None:
        self.is_dropped = True
        for tensor in self._owned():
            tensor.untyped_storage().resize_(0)

    def allocate_tensors(self) -> None:
        for tensor, size in zip(self._owned(), self._bytes, strict=True):
            tensor.untyped_storage().resize_(size)
        self.is_dropped = False

    def _owned(self) -> list[Tensor]:
        """This rank's rows of weights and moments."""
        moments = (moment for part in self._parts for moment in self.optimizer.state[part].values())
        return [*self._parts, *(moment for moment in moments if moment.dim())]

    def _move(self, device: torch.device) -> None:
        if self._parts[0].device == device:
            return
        super()._move(device)
        for part, parameter in zip(self._parts, self.model.parameters(), strict=True):
            part.data = local_of(parameter)
