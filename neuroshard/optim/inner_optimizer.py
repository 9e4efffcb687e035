"""The inner step of one stage: AdamW, or Muon for the matrices of layers, with gradient clipping.

`EagerAdamW` avoids PyTorch's compiler, which torch.optim loads at its first call: 85 MB and seconds for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import unwrap
from math import sqrt
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.adam import adam

from neuroshard.config.run_parameters import InnerOptimization


class EagerAdamW(AdamW):
    """torch.optim.AdamW whose methods are the plain functions under the decorators that load the compiler."""

    add_param_group = unwrap(Optimizer.add_param_group)
    load_state_dict = unwrap(Optimizer.load_state_dict)
    state_dict = unwrap(Optimizer.state_dict)
    step = torch.no_grad()(unwrap(AdamW.step))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    zero_grad = unwrap(Optimizer.zero_grad)


CHUNK = 1 << 22  # numbers: long enough for the full speed of the bus, short enough for small buffers
BUFFERS = 2
BUFFER_BYTES = BUFFERS * 2 * 4 * CHUNK  # on the device, for both moments in fp32
PINNED_KINDS = frozenset({"cuda", "xpu"})  # devices that copy from and to pinned host memory while they compute
MOMENTS = ("exp_avg", "exp_avg_sq")


def host_memory(like: Tensor, device: torch.device) -> Tensor:
    """Memory on the host for a moment of the shape and type of `like`, from which this device copies fast."""
    pinned = device.type in PINNED_KINDS
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)


class HostMomentsAdamW(EagerAdamW):
    """AdamW with moments of zero in the host's memory, for a stage that would not fit its accelerator with them.

    Weights, gradients and numbers of steps stay on the device. A step streams the moments through the device in chunks:
    while one chunk is computed, the next one arrives and the one before it leaves. The arithmetic is AdamW's on the
    device.
    """

    def __init__(self, groups: list[dict[str, Any]], device: torch.device, **options: Any) -> None:
        super().__init__(groups, fused=True, **options)
        self._device = device
        for parameter in self._parameters():
            moments = {name: host_memory(parameter, device).zero_() for name in MOMENTS}
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            self.state[parameter] = {"step": step, **moments}

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from cast("list[nn.Parameter]", group["params"])

    @torch.no_grad()
    def step(self) -> None:
        """Make a step. The moments on the host are complete when this returns."""
        bus = _Bus(self._device, min(CHUNK, max(parameter.numel() for parameter in self._parameters())))
        for number, chunk in enumerate(self._chunks()):
            buffer = bus.buffers[number % BUFFERS]
            first, second = bus.fetch(chunk, buffer)
            group = chunk.group
            adam(
                [chunk.weights],
                [chunk.gradient],
                [first],
                [second],
                [],
                [chunk.step],
                fused=True,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                decoupled_weight_decay=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            bus.give_back(chunk, buffer)
        bus.finish()

    def _chunks(self) -> Iterator[_Chunk]:
        """The parameters that have gradients, in parts. Only the last part of each counts its step."""
        for group in self.param_groups:
            for parameter in cast("list[nn.Parameter]", group["params"]):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                weights, gradient = parameter.view(-1), parameter.grad.reshape(-1)
                first, second = (cast("Tensor", state[name]).view(-1) for name in MOMENTS)
                for start in range(0, parameter.numel(), CHUNK):
                    part = slice(start, min(start + CHUNK, parameter.numel()))
                    is_last = part.stop == parameter.numel()
                    step = state["step"] if is_last else state["step"].clone()
                    yield _Chunk(weights[part], gradient[part], (first[part], second[part]), step, group)


@dataclass(frozen=True)
class _Chunk:
    """A part of a parameter: weights and gradient (n,) on the device, moments (n,) on the host."""

    weights: Tensor
    gradient: Tensor
    moments: tuple[Tensor, Tensor]
    step: Tensor
    group: dict[str, Any]


@dataclass
class _Buffer:
    """Memory on the device for the two moments of one chunk."""

    moments: tuple[Tensor, Tensor]
    left: torch.Event | None = None  # recorded when the chunk before has left it


class _Bus:
    """Copies moments to the device and back, on streams of their own where the device has them."""

    def __init__(self, device: torch.device, size: int) -> None:
        first, second = ((torch.empty(size, device=device), torch.empty(size, device=device)) for _ in range(BUFFERS))
        self.buffers = (_Buffer(first), _Buffer(second))
        self._streams = (torch.Stream(device), torch.Stream(device)) if device.type in PINNED_KINDS else None
        self._device = device
        if self._streams is not None:
            for stream in self._streams:  # the memory of the buffers may still be in use by work before the step
                stream.wait_stream(torch.accelerator.current_stream(device))

    def fetch(self, chunk: _Chunk, buffer: _Buffer) -> tuple[Tensor, Tensor]:
        """Copy a chunk's moments into a buffer. Work that the caller starts afterwards sees them."""
        size = chunk.weights.numel()
        first, second = (memory[:size] for memory in buffer.moments)
        with self._streams[0] if self._streams else nullcontext():
            if self._streams and buffer.left is not None:
                self._streams[0].wait_event(buffer.left)
            for there, here in zip((first, second), chunk.moments, strict=True):
                there.copy_(here, non_blocking=True)
        if self._streams:
            torch.accelerator.current_stream(self._device).wait_stream(self._streams[0])
        return first, second

    def give_back(self, chunk: _Chunk, buffer: _Buffer) -> None:
        """Copy a chunk's moments to the host when the caller's work has ended."""
        size = chunk.weights.numel()
        if self._streams:
            self._streams[1].wait_stream(torch.accelerator.current_stream(self._device))
        with self._streams[1] if self._streams else nullcontext():
            for here, there in zip(chunk.moments, buffer.moments, strict=True):
                here.copy_(there[:size], non_blocking=True)
        if self._streams:
            buffer.left = self._streams[1].record_event()

    def finish(self) -> None:
        """Wait until all moments are on the host."""
        if self._streams:
            self._streams[1].synchronize()


MUON_MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
ADAMW_UPDATE_SIZE = 0.2  # root mean square of AdamW's usual update, in learning rates

Rows = tuple[int, ...]
"""Rows of each logical matrix of a packed matrix, in order."""


class Muon(EagerAdamW):
    """Muon for some matrices, AdamW for all other parameters (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982).

    A matrix moves along the orthogonal matrix next to its Nesterov momentum, with the root mean square of AdamW's
    update, so one learning rate and one weight decay suit both. Packed matrices are orthogonalised one logical matrix
    at a time. A step uses up the gradients.
    """

    def __init__(self, groups: list[dict[str, Any]], matrices: Mapping[nn.Parameter, Rows], **options: Any) -> None:
        """`matrices` are the parameters of the last group; `options` are AdamW's, which is fused."""
        super().__init__(groups, fused=True, **options)
        self._matrices = matrices

    @torch.no_grad()
    def step(self) -> None:
        gradients = {matrix: matrix.grad for matrix in self._matrices if matrix.grad is not None}
        for matrix in gradients:
            matrix.grad = None  # AdamW leaves parameters without a gradient alone
        super().step()  # pyright: ignore[reportUnknownMemberType]
        rate, decay = self.param_groups[-1]["lr"], self.param_groups[-1]["weight_decay"]
        divisor: Tensor | float = getattr(self, "grad_scale", 1.0)
        for matrix, gradient in gradients.items():
            momentum = self.state[matrix]["momentum_buffer"]
            momentum.lerp_(gradient.div_(divisor), 1 - MUON_MOMENTUM)
            direction = gradient.lerp_(momentum, MUON_MOMENTUM)
            matrix.mul_(1 - rate * decay)
            first = 0
            for rows in self._matrices[matrix]:
                part = slice(first, first + rows)
                matrix[part].sub_(muon_update(direction[None, part])[0], alpha=rate)
                first += rows


def muon_update(momentum: Tensor) -> Tensor:
    """The update (b, m, n) fp32 of matrices per learning rate: orthogonalised momentum with AdamW's update size.

    Five Newton-Schulz steps with Jordan's coefficients bring every singular value to about 1; bf16 is exact enough
    for that, and faster on accelerators.
    """
    rows, columns = momentum.shape[1:]
    x = momentum / momentum.square().sum(dim=(1, 2), keepdim=True).sqrt().clamp_min(1e-7)
    x = x if x.device.type == "cpu" else x.bfloat16()
    x = x.transpose(1, 2) if rows > columns else x
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    x = x.transpose(1, 2) if rows > columns else x
    return x.float() * (ADAMW_UPDATE_SIZE * sqrt(max(rows, columns)))


@runtime_checkable
class Packed(Protocol):
    """A module whose parameter is a matrix with one or more logical matrices, one below the other."""

    outputs: Rows


def muon_matrices(model: nn.Module) -> dict[nn.Parameter, Rows]:
    """The matrices of a model's layers: all that Muon trains."""
    found = dict[nn.Parameter, Rows]()
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if name.startswith("layers.") and isinstance(module, Packed):
            found[parameter] = module.outputs
    return found


def zero_moments(model: nn.Module, parameters: InnerOptimization) -> dict[nn.Parameter, dict[str, Tensor]]:
    """The moments of each parameter before the first step: one of Muon, two and the number of steps of AdamW."""
    matrices = muon_matrices(model) if parameters.optimizer == "muon" else {}
    found = dict[nn.Parameter, dict[str, Tensor]]()
    for parameter in model.parameters():
        # not zeros_like: for a parameter without memory it loads 100 MB of symbolic mathematics
        names = ("momentum_buffer",) if parameter in matrices else ("exp_avg", "exp_avg_sq")
        zeros = {name: torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device) for name in names}
        # on the device: it is fused
        steps = {} if parameter in matrices else {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        found[parameter] = steps | zeros
    return found


def make_inner_optimizer(
    model: nn.Module, parameters: InnerOptimization, *, moments_on_host: bool = False
) -> EagerAdamW:
    """Fused AdamW or Muon, as the run's parameters say, with moments of zero. Weight decay applies to matrices only.

    The embedding is a matrix, norm scales are not. Parameters keep the order of `named_parameters()` within the
    groups: matrices of AdamW, vectors, matrices of Muon. With `moments_on_host` the moments of AdamW are in the host's
    memory; those of Muon are always on the device.
    """
    matrices = muon_matrices(model) if parameters.optimizer == "muon" else {}
    others = [p for p in model.parameters() if p.requires_grad and p not in matrices]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": parameters.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
        {"params": list(matrices), "weight_decay": parameters.weight_decay},
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": parameters.learning_rate, "betas": (parameters.beta1, parameters.beta2)}
    if moments_on_host and not matrices:
        return HostMomentsAdamW(groups, others[0].device, **options)
    optimizer = Muon(groups, matrices, **options) if matrices else EagerAdamW(groups, fused=True, **options)
    for parameter, moments in zero_moments(model, parameters).items():
        optimizer.state[parameter] = moments
    return optimizer


def clipped_step(optimizer: AdamW, learning_rate: float, *, tokens: int, grad_norm: float, max_norm: float) -> None:
    """Make one step on the mean gradient per token, with its norm clipped to max_norm.

    The parameters have the gradients of losses summed over `tokens`. `grad_norm` is the norm of their mean before it is
    clipped; it must be finite.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    # Fused AdamW divides the gradients as it reads them, which saves a pass over them.
    divisor = tokens * max(1.0, grad_norm / max_norm)
    device = optimizer.param_groups[0]["params"][0].device
    scale = torch.full((), divisor, dtype=torch.float32, device=device)  # torch.tensor would wait for the device
    optimizer.grad_scale = scale  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.found_inf = torch.zeros_like(scale)  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.step()  # pyright: ignore[reportUnknownMemberType]
