"""Training waits for an accelerator once per step. The meta device stands for it: its tensors have no values.

Reading a value of such a tensor raises an error, as it would wait for an accelerator.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.model.transformer import StageModel
from neuroshard.optim.inner_optimizer import clipped_step, make_inner_optimizer
from neuroshard.pipeline import executor as executor_module
from neuroshard.pipeline.executor import StageExecutor
from neuroshard.types import LayerRange
from tests.worlds.stages import ARCHITECTURE

GPU = torch.device("meta")


class Copies(TorchDispatchMode):
    """Records copies between devices: where from, where to, and whether the caller goes on before their end."""

    def __init__(self) -> None:
        super().__init__()
        self.made = list[tuple[str, str, bool]]()

    def __torch_dispatch__(self, function, _types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if "_to_copy" in str(function) and isinstance(result, Tensor) and arguments[0].device != result.device:
            waits = not (options or {}).get("non_blocking", False)
            self.made.append((arguments[0].device.type, result.device.type, waits))
        return result


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the meta device be one that copies pinned memory; the list gets the sizes of the tensors that are pinned."""
    sizes = list[int]()

    def pin(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(executor_module, "PINNED_KINDS", frozenset({"meta"}))
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # there is none for the meta device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    return sizes


def executor_on_gpu(layers: LayerRange) -> StageExecutor:
    model = StageModel(ARCHITECTURE, layers)
    model.to(GPU)
    return StageExecutor(model, make_inner_optimizer(model, InnerOptimization()), GPU)


def test_the_microbatches_of_a_step_wait_for_nothing_and_come_from_pinned_memory(pinned: list[int]) -> None:
    executor = executor_on_gpu(LayerRange(0, ARCHITECTURE.layer_count))
    ids = torch.zeros(2, ARCHITECTURE.sequence_length, dtype=torch.int64)
    with Copies() as copies:
        for _ in range(3):
            executor.loss(ids, ids)  # a wait would raise an error
    assert copies.made == [("cpu", "meta", False)] * 6
    assert pinned == [ids.numel()] * 6
    with pytest.raises(NotImplementedError, match="no data"):  # loss and norm are read together
        executor.step(1e-3, 1.0, 3 * ids.numel())


def test_after_the_one_wait_of_a_step_the_optimizer_waits_for_nothing(pinned: list[int]) -> None:
    executor = executor_on_gpu(LayerRange(0, ARCHITECTURE.layer_count))
    ids = torch.zeros(2, ARCHITECTURE.sequence_length, dtype=torch.int64)
    executor.loss(ids, ids)
    with Copies() as copies:
        clipped_step(executor.optimizer, 1e-3, tokens=ids.numel(), grad_norm=3.0, max_norm=1.0)
        executor.zero()
    assert copies.made == []


def test_activations_and_their_gradients_come_from_pinned_memory(pinned: list[int]) -> None:
    executor = executor_on_gpu(LayerRange(1, 2))
    activations = torch.zeros(2, ARCHITECTURE.sequence_length, ARCHITECTURE.hidden_size)
    opened = executor.forward(activations)
    with Copies() as copies:
        gradient = executor.backward(opened, activations)
    assert copies.made == [("cpu", "meta", False)]
    assert pinned == [activations.numel()] * 2
    assert gradient is not None
    assert gradient.device == GPU


def test_the_processor_gets_its_batches_without_a_copy() -> None:
    model = StageModel(ARCHITECTURE)
    executor = StageExecutor(model, make_inner_optimizer(model, InnerOptimization()), torch.device("cpu"))
    ids = torch.zeros(1, ARCHITECTURE.sequence_length, dtype=torch.int64)
    assert executor.forward(ids).inputs is ids
