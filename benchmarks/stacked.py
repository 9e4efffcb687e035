"""Many replicas of one small model in one stack of weights: every operation computes all of them at once."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.model.transformer import StageModel, rotary_angles, rotate
from neuroshard.model.weights import flatten
from neuroshard.optim.adamw import EPSILON
from neuroshard.optim.inner_optimizer import MUON_MOMENTUM, muon_matrices, muon_update
from neuroshard.types import Architecture


class StackedReplicas:
    """R replicas of one model: `weights` (R, d) in the order of `flatten`. Each has its own data and learning rate.

    The computation is that of StageModel and make_inner_optimizer; a test compares them.
    """

    def __init__(self, models: list[StageModel], inner: InnerOptimization) -> None:
        """One row for each model; all have one architecture."""
        self.architecture = models[0].architecture
        self.weights = torch.stack([flatten(model) for model in models])
        self._inner = inner
        self._gradients, self._first, self._second = (torch.zeros_like(self.weights) for _ in range(3))
        self._decay = torch.zeros_like(self.weights[0])
        self._matrices = dict[tuple[int, ...], list[slice]]()  # logical matrices of Muon by shape, in the vector
        packed = muon_matrices(models[0]) if inner.optimizer == "muon" else {}
        self._leaves = dict[str, Tensor]()
        self._slots = list[Tensor]()  # of the leaves, in the gradients
        self._steps, start = 0, 0
        for name, parameter in models[0].named_parameters():
            stop = start + parameter.numel()
            shape = (len(models), *parameter.shape)
            leaf = self.weights[:, start:stop].view(shape).detach().requires_grad_()
            self._slots.append(self._gradients[:, start:stop].view(shape))
            self._leaves[name] = leaf
            self._decay[start:stop] = inner.weight_decay if parameter.dim() >= 2 else 0.0
            for rows in packed.get(parameter, ()):
                place = slice(start, start + rows * parameter.shape[1])
                self._matrices.setdefault((rows, parameter.shape[1]), []).append(place)
                start = place.stop
            start = stop
        self._momentum = {
            shape: torch.zeros(len(places), len(models), shape[0] * shape[1])
            for shape, places in self._matrices.items()
        }

    def step(self, rows: Tensor, rates: Tensor) -> None:
        """One inner step on inputs and labels in one, (R, b, t + 1), with a learning rate for each replica (R,)."""
        tokens = rows.shape[1] * (rows.shape[2] - 1)
        gradients = torch.autograd.grad(self._losses(rows).sum() / tokens, list(self._leaves.values()))
        with torch.no_grad():
            for slot, gradient in zip(self._slots, gradients, strict=True):
                slot.copy_(gradient)
            norms = self._gradients.norm(dim=1, keepdim=True)
            self._gradients.mul_((self._inner.max_grad_norm / (norms + 1e-6)).clamp_(max=1.0))
            update = self._adamw_update(rates[:, None])
            self._replace_by_muon(update, rates[:, None])
            self.weights.mul_(1 - rates[:, None] * self._decay)
            self.weights.sub_(update)

    def held_out_losses(self, rows: Tensor, at_once: int = 64) -> Tensor:
        """Nats per token (R,) of each replica on the same sequences (n, t + 1)."""
        total = torch.zeros(len(self.weights))
        with torch.no_grad():
            for start in range(0, len(rows), at_once):
                part = rows[start : start + at_once]
                total += self._losses(part.expand(len(self.weights), *part.shape))
        return total / (len(rows) * (rows.shape[1] - 1))

    def _adamw_update(self, rates: Tensor) -> Tensor:
        inner, gradients = self._inner, self._gradients
        self._steps += 1
        self._first.lerp_(gradients, 1 - inner.beta1)
        self._second.mul_(inner.beta2).addcmul_(gradients, gradients, value=1 - inner.beta2)
        root = sqrt(1 - inner.beta2**self._steps)
        update = self._first / (self._second.sqrt().div_(root).add_(EPSILON))
        return update.mul_(rates / (1 - inner.beta1**self._steps))

    def _replace_by_muon(self, update: Tensor, rates: Tensor) -> None:
        """Put Muon's updates into the places of its matrices; equal shapes of all replicas are one product."""
        for (rows, columns), places in self._matrices.items():
            momenta = self._momentum[rows, columns]
            gradients = torch.stack([self._gradients[:, place] for place in places])
            momenta.lerp_(gradients, 1 - MUON_MOMENTUM)
            mixed = gradients.lerp_(momenta, MUON_MOMENTUM)
            found = muon_update(mixed.view(-1, rows, columns)).reshape(mixed.shape)
            for place, each in zip(places, found, strict=True):
                update[:, place] = each * rates

    def _losses(self, rows: Tensor) -> Tensor:
        """Summed loss (R,) of each replica on its sequences (R, b, t + 1)."""
        shape, leaves = self.architecture, self._leaves
        replicas, batch, time = rows.shape[0], rows.shape[1], rows.shape[2] - 1
        inputs, labels = rows[:, :, :-1].reshape(replicas, -1), rows[:, :, 1:].reshape(replicas, -1)
        index = inputs[:, :, None].expand(-1, -1, shape.hidden_size)
        x = leaves["embedding.weight"].gather(1, index)  # (R, b t, d)
        angles = rotary_angles(shape, torch.arange(time))
        for layer in range(shape.layer_count):
            name = f"layers.{layer}"
            mixed = self._attention(self._norm(x, f"{name}.attention_norm"), f"{name}.attention", batch, angles)
            x = x + mixed
            gate, up = self._project(self._norm(x, f"{name}.feed_forward_norm"), f"{name}.feed_forward.gate_up").chunk(
                2, dim=-1
            )
            x = x + self._project(functional.silu(gate) * up, f"{name}.feed_forward.down")
        logits = self._project(self._norm(x, "norm"), "head")
        each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return each.view(replicas, -1).sum(dim=1)

    def _project(self, x: Tensor, name: str) -> Tensor:
        return torch.bmm(x, self._leaves[f"{name}.weight"].transpose(1, 2))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        normed = functional.rms_norm(x, x.shape[-1:], None, self.architecture.norm_epsilon)
        return normed * self._leaves[f"{name}.weight"][:, None]

    def _attention(self, x: Tensor, name: str, batch: int, angles: tuple[Tensor, Tensor]) -> Tensor:
        replicas, positions, width = x.shape
        heads, key_value_heads = self.architecture.head_count, self.architecture.key_value_head_count
        packed = self._project(x, f"{name}.query_key_value")
        packed = packed.view(replicas * batch, positions // batch, heads + 2 * key_value_heads, -1).transpose(1, 2)
        rotated = rotate(packed[:, : heads + key_value_heads], *angles)
        mixed = functional.scaled_dot_product_attention(
            rotated[:, :heads],
            rotated[:, heads:],
            packed[:, heads + key_value_heads :],
            is_causal=True,
            enable_gqa=heads != key_value_heads,
        )
        return self._project(mixed.transpose(1, 2).reshape(replicas, positions, width), f"{name}.output")


def new_models(shape: Architecture, count: int) -> list[StageModel]:
    """Models without initial weights."""
    return [StageModel(shape) for _ in range(count)]
