"""The weights of a stage: initial values with the same bytes on every machine, and their order in one vector."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from math import prod, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from neuroshard.model.transformer import StageModel
from neuroshard.types import Architecture

_CHUNK = 1 << 20  # numbers drawn at once; even
DEPTH_DEVIATION = 0.02
_HALF = 1 << 23  # centres 24 random bits; the difference is exact in fp32


def initialise(model: StageModel, seed: int) -> None:
    """Fill every parameter from (seed, its name): equal bytes whatever the split, thread count, device or platform.

    Matrices are uniform with standard deviation 1/sqrt(inputs), and 1/sqrt(2 layers) of that where they write to the
    residual stream (Radford et al. 2019); the embedding has 1, the head 0.02, and norms are one. Measured on the
    demo after 240 steps: an embedding of 0.02 is 0.6 nats behind one of 1, whose scale the first updates do not
    drown.

    A factor Z of a matrix U Z has the deviation of that matrix, as if a whole one were projected; that of the embedding
    has 0.02.

    With `initialisation = "depth"` the deviations of layer l, counted from 0, do not depend on its width: 0.02 for
    queries, keys, values and gate, and 0.02/sqrt(2(l + 1)) for up, down and the attention's output, as in the
    organised runs. The head has 1/sqrt(d).
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
            else:
                generator = np.random.Philox(key=_key(seed, name))
                for rows, deviation in _deviations(name, parameter, model.architecture):
                    _fill_uniform(rows, generator, deviation)


def _deviations(name: str, parameter: Tensor, architecture: Architecture) -> tuple[tuple[Tensor, float], ...]:
    """The parts of a matrix, which are rows in their order, with their standard deviations."""
    if architecture.initialisation == "fan_in" or name.startswith("embedding."):
        return ((parameter, _standard_deviation(name, parameter.shape[1], architecture.layer_count)),)
    if name == "head.weight":
        return ((parameter, 1 / sqrt(parameter.shape[1])),)
    in_depth = DEPTH_DEVIATION / sqrt(2 * (int(name.split(".")[1]) + 1))
    if name.endswith("gate_up.weight"):
        gates = architecture.feed_forward_size
        return ((parameter[:gates], DEPTH_DEVIATION), (parameter[gates:], in_depth))
    return ((parameter, DEPTH_DEVIATION if name.endswith("query_key_value.weight") else in_depth),)


def _standard_deviation(name: str, inputs: int, layer_count: int) -> float:
    if name == "embedding.weight":
        return 1.0
    if name in {"embedding.factor", "head.weight"}:
        return 0.02
    writes_to_residual = ".attention.output." in name or ".feed_forward.down." in name
    return 1 / sqrt(inputs) / (sqrt(2 * layer_count) if writes_to_residual else 1)


def _key(seed: int, name: str) -> int:
    text = f"neuroshard/initial-weights/{seed}/{name}"
    return int.from_bytes(sha256(text.encode()).digest()[:16], "little")


def _fill_uniform(parameter: Tensor, generator: np.random.Philox, deviation: float) -> None:
    """Uniform in +-sqrt(3) deviation from 24 bits each: an exact integer times one constant, so no rounding differs."""
    scale = np.float32(sqrt(3) * deviation / _HALF)
    flat = parameter.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        count = min(_CHUNK, flat.numel() - start)
        bits: NDArray[np.uint32] = generator.random_raw((count + 1) // 2).astype("<u8").view("<u4")[:count]
        centred = (bits >> np.uint32(8)).astype(np.int32) - np.int32(_HALF)
        flat[start : start + count] = torch.from_numpy(centred.astype(np.float32) * scale)  # pyright: ignore[reportUnknownMemberType]


LAYERS = "layers."  # prefix of the name of every tensor that belongs to a layer; its number follows


@dataclass(frozen=True)
class TensorSchema:
    """Names and shapes of a stage's parameters, in vector order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> TensorSchema:
        """The schema of a model's parameters, in the order of `named_parameters()`."""
        named = list(model.named_parameters())
        return cls(tuple(name for name, _ in named), tuple(tuple(p.shape) for _, p in named))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers in each tensor."""
        return tuple(map(prod, self.shapes))

    @property
    def total_size(self) -> int:
        """Length d of the vector."""
        return sum(self.sizes)

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the names and shapes; equal digests mean exchangeable vectors."""
        entries = list(zip(self.names, self.shapes, strict=True))
        text = json.dumps(["neuroshard/tensor-schema", entries], separators=(",", ":"), ensure_ascii=True)
        return sha256(text.encode()).hexdigest()

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """First number of each layer in the vector and the one after its last, in order."""
        bounds: dict[str, tuple[int, int]] = {}
        for name, size, end in zip(self.names, self.sizes, accumulate(self.sizes), strict=True):
            if name.startswith(LAYERS):
                layer = name.removeprefix(LAYERS).partition(".")[0]
                start, _ = bounds.get(layer, (end - size, end))
                bounds[layer] = start, end
        return tuple(bounds.values())

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The tensors inside a vector (d,), sharing its memory. Raises ValueError on another length."""
        if vector.shape != (self.total_size,):
            raise ValueError(f"the schema needs a vector of {self.total_size} numbers, got shape {tuple(vector.shape)}")
        ends = list(accumulate(self.sizes))
        return {
            name: vector[end - size : end].view(shape)
            for name, shape, size, end in zip(self.names, self.shapes, self.sizes, ends, strict=True)
        }


def flatten(model: nn.Module, out: Tensor | None = None) -> Tensor:
    """All parameters as one fp32 CPU vector (d,), into `out` when given. Raises ValueError when `out` does not fit."""
    schema = TensorSchema.of(model)
    vector = torch.empty(schema.total_size) if out is None else out
    if vector.dtype != torch.float32 or vector.device.type != "cpu":
        raise ValueError(f"parameters are flattened into fp32 on the CPU, got {vector.dtype} on {vector.device}")
    views = schema.views(vector)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            views[name].copy_(parameter)
    return vector


def load_vector(model: nn.Module, vector: Tensor) -> None:
    """Set all parameters from a vector (d,); bit-exact for fp32. Raises ValueError on another length."""
    views = TensorSchema.of(model).views(vector)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(views[name])


@contextmanager
def other_weights(model: nn.Module, vector: Tensor) -> Generator[None]:
    """Let a model compute with a vector (d,) instead of its weights within the block.

    Nothing is written into the weights, so open graphs stay valid. On the CPU nothing is copied either. On an
    accelerator the weights move to the host's memory, so that the device never holds both; they stay there if the
    device has no space for them any more. Only for the thread that owns the model. Raises ValueError on another
    length.
    """
    views = TensorSchema.of(model).views(vector)
    aside = list[tuple[nn.Parameter, torch.device, Tensor]]()
    try:
        for name, parameter in model.named_parameters():
            aside.append((parameter, parameter.device, parameter.data.cpu()))
            parameter.data = views[name].to(parameter.device)
        yield
    finally:
        for parameter, _, weights in aside:  # before anything that may fail
            parameter.data = weights
        for parameter, device, weights in aside:
            parameter.data = weights.to(device)
