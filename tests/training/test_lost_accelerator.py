"""An accelerator that fails while the node trains: it pauses with the reason and the remedy, and ends nothing.

Simulated is only the failure: functions of PyTorch raise what they raise once a device is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import trio

from neuroshard.errors import StorageError
from neuroshard.network import InMemoryNetwork
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import AcceleratorFullError, AcceleratorLostError
from neuroshard.state import staging_buffers
from neuroshard.state.staging_buffers import StagingBuffers
from neuroshard.state.tensor_file import TensorLayout
from neuroshard.status.snapshot import NodeState
from neuroshard.training.trainer import Trainer
from tests.worlds.stages import make_stage, make_trainer, paused_after, state_becomes, state_digest, train
from tests.worlds.trainers import NAMES, node_of

CUDA = torch.AcceleratorError(
    "CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure' in https://docs.nvidia.com/cuda/"
)
INTEL = RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)")
PAUSED = (
    "Paused: NVIDIA H200 (cuda:1) no longer works: CUDA error: unspecified launch failure. Start NeuroShard again: "
    "training resumes from the last checkpoint. If this returns, restart the computer, update the driver, or set the "
    "device to cpu."
)
# functions that read or write the device's memory in a pass, in a step, in a pause and in a checkpoint or a round
OF_THE_DEVICE = ((torch.autograd, "backward"), (torch.nn.utils, "get_total_norm"), (torch.nn.Module, "to"))


@pytest.fixture
def device() -> Iterator[ComputeThread]:
    with closing(ComputeThread(1, "lost", device_label="NVIDIA H200 (cuda:1)")) as thread:
        yield thread


@dataclass
class Loss:
    """A device that is lost from the given call of one function on; then each of the others fails too."""

    monkeypatch: pytest.MonkeyPatch
    error: Exception = CUDA
    is_lost: bool = False

    def at(self, place: Any, name: str, call: int = 1) -> None:
        self._replace(place, name, call)
        for other, of_other in (*OF_THE_DEVICE, (torch.Tensor, "copy_")):
            if (other, of_other) != (place, name):
                self._replace(other, of_other, None)

    def _replace(self, place: Any, name: str, call: int | None) -> None:
        works, calls = getattr(place, name), 0

        def perhaps(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            if threading.current_thread().name == "lost":
                calls += 1
                self.is_lost = self.is_lost or calls == call
                if self.is_lost:
                    raise self.error
            return works(*arguments, **options)

        self.monkeypatch.setattr(place, name, perhaps)


async def refused_to_resume(trainer: Trainer) -> tuple[NodeState, str]:
    trainer.resume()
    return await trainer.wait_until_resumed(), trainer.snapshot().reason


@pytest.mark.parametrize(("number", "call"), [(0, 6), (1, 3)], ids=["in a backward pass", "in a step"])
def test_a_lost_device_pauses_training_and_the_next_start_resumes_from_the_checkpoint(
    device: ComputeThread,
    compute: ComputeThread,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    number: int,
    call: int,
) -> None:
    train(device, tmp_path / "lost", 6)
    trainer = make_trainer(device, make_stage(device, tmp_path / "lost"))
    Loss(monkeypatch).at(*OF_THE_DEVICE[number], call)
    shown = list[tuple[NodeState, str]]()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            await state_becomes(trainer, NodeState.PAUSED)
            shown.append((NodeState.PAUSED, trainer.snapshot().reason))
            shown.append(await refused_to_resume(trainer))
            with pytest.raises(StorageError, match=r"NVIDIA H200 \(cuda:1\) no longer works"):
                await trainer.save_now()
            trainer.stop()

    trio.run(main)
    assert shown == [(NodeState.PAUSED, PAUSED)] * 2
    assert trainer.steps == 8  # the last two were on the device only
    assert trainer.last_save_failed
    monkeypatch.undo()
    assert make_stage(compute, tmp_path / "lost").record.progress.steps == 6
    again = train(compute, tmp_path / "lost", 12)
    assert state_digest(again) == state_digest(train(compute, tmp_path / "calm", 12))


def test_a_device_that_is_lost_in_a_pause_keeps_the_node_paused_and_the_saved_state(
    device: ComputeThread, compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, shown = make_trainer(device, make_stage(device, tmp_path / "lost")), list[tuple[NodeState, str]]()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            await paused_after(trainer, 3)
            await trainer.save_now()
            Loss(monkeypatch).at(torch.nn.Module, "to")
            shown.append(await refused_to_resume(trainer))
            await trainer.save_now()  # the state is on the disk already
            trainer.stop()

    trio.run(main)
    assert shown == [(NodeState.PAUSED, PAUSED)]
    assert not trainer.last_save_failed
    monkeypatch.undo()
    assert make_stage(compute, tmp_path / "lost").record.progress.steps == trainer.steps


def test_a_checkpoint_that_cannot_be_read_from_the_device_pauses_training(
    device: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(device, make_stage(device, tmp_path))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            while trainer.steps < 2:
                await anyio.sleep(0.001)
            Loss(monkeypatch).at(torch.Tensor, "copy_")
            with pytest.raises(StorageError, match="no longer works"):
                await trainer.save_now()
            await state_becomes(trainer, NodeState.PAUSED)
            assert trainer.snapshot().reason == PAUSED
            trainer.stop()

    trio.run(main)


def test_a_member_that_loses_its_device_in_a_round_pauses_and_the_other_one_trains_on(
    device: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        with InMemoryNetwork() as network, anyio.fail_after(200), closing(ComputeThread(1)) as other:
            lost = node_of(device, tmp_path, NAMES[0], network, 0)
            well = node_of(other, tmp_path, NAMES[1], network, 1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lost.trainer.run)
                nursery.start_soon(well.trainer.run)
                while not (lost.weights and well.weights):  # a round together
                    await anyio.sleep(0.01)
                Loss(monkeypatch, INTEL).at(torch.Tensor, "copy_")  # the weights of a round, read from the device
                await state_becomes(lost.trainer, NodeState.PAUSED)
                assert "UR_RESULT_ERROR_DEVICE_LOST" in lost.trainer.snapshot().reason
                steps = well.trainer.steps
                while well.trainer.steps < steps + 8:
                    await anyio.sleep(0.01)
                lost.trainer.stop()
                well.trainer.stop()

    trio.run(main)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CUDA, AcceleratorLostError),
        (INTEL, AcceleratorLostError),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), AcceleratorLostError),
        (torch.AcceleratorError("CUDA error: device is busy or unavailable"), AcceleratorLostError),
        (torch.AcceleratorError("CUDA error: out of memory"), AcceleratorFullError),
        (RuntimeError("Native API failed: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"), AcceleratorFullError),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"), AcceleratorFullError),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.0 GB)"), AcceleratorFullError),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError),
        (ValueError("device lost"), ValueError),
    ],
)
def test_which_errors_mean_that_the_device_is_lost_or_full(
    device: ComputeThread, error: Exception, expected: type[Exception]
) -> None:
    def fail() -> None:
        raise error

    async def main() -> None:
        await device.run(fail)

    with pytest.raises(expected) as caught:
        trio.run(main)
    assert type(caught.value) is expected
    assert (device.lost is not None) == (expected is AcceleratorLostError)


def test_a_snapshot_on_a_lost_device_is_a_checkpoint_that_was_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy to the host runs while training continues, so its error comes out in the thread that writes."""
    gone = list[bool]()

    class Stream:
        def __init__(self, _device: torch.device) -> None: ...

        def wait_stream(self, _other: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def record_event(self) -> Stream:
            return self

        def synchronize(self) -> None:
            if gone:
                raise CUDA

    def module(_device: torch.device) -> type:
        return type(
            "module",
            (),
            {
                "Stream": Stream,
                "current_stream": staticmethod(Stream),
                "stream": staticmethod(lambda stream: stream),
                "mem_get_info": staticmethod(lambda _device: (10**9, 10**9)),
                "memory_reserved": staticmethod(lambda _device: 0),
                "max_memory_allocated": staticmethod(lambda _device: 0),
            },
        )

    monkeypatch.setattr(torch, "get_device_module", module)
    monkeypatch.setattr(staging_buffers, "PINNED_KINDS", {"cpu"})
    tensors = {"weight": torch.arange(6.0)}
    buffers = StagingBuffers(TensorLayout.of(tensors))
    buffers.copy_from(tensors)
    assert torch.equal(buffers.tensors()["weight"], tensors["weight"])
    buffers.copy_from(tensors)
    gone.append(True)
    with pytest.raises(StorageError, match="accelerator failed"):
        buffers.tensors()
    assert torch.equal(buffers.destination("weight"), tensors["weight"])  # a checkpoint can be loaded into them
