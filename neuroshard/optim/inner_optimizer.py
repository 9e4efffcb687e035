"""The inner step of one stage: AdamW, or Muon for the matrices of layers, with gradient clipping.

`EagerAdamW` avoids PyTorch's compiler, which torch.optim loads at its first call: 85 MB and seconds for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import unwrap
from math import sqrt
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from neuroshard.config.run_parameters import InnerOptimization


class EagerAdamW(AdamW):
    """torch.optim.AdamW whose methods are the plain functions under the decorators that load the compiler."""

    add_param_group = unwrap(Optimizer.add_param_group)
    load_state_dict = unwrap(Optimizer.load_state_dict)
    state_dict = unwrap(Optimizer.state_dict)
    step = torch.no_grad()(unwrap(AdamW.step))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    zero_grad = unwrap(Optimizer.zero_grad)


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


def make_inner_optimizer(model: nn.Module, parameters: InnerOptimization) -> EagerAdamW:
    """Fused AdamW or Muon, as the run's parameters say, with moments of zero. Weight decay applies to matrices only.

    The embedding is a matrix, norm scales are not. Parameters keep the order of `named_parameters()` within the
    groups: matrices of AdamW, vectors, matrices of Muon.
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
    scale = torch.tensor(divisor, dtype=torch.float32, device=device)
    optimizer.grad_scale = scale  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.found_inf = torch.zeros_like(scale)  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.step()  # pyright: ignore[reportUnknownMemberType]
