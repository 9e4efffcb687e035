"""The writer thread and the keeper: in the background, one at a time, alarms that are seen and go away again."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from neuroshard.state.checkpoint_saver import (
    NICENESS,
    CheckpointPolicy,
    CheckpointSaver,
    StateCapture,
)
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.disk_space import StorageLimits
from tests.worlds.checkpoints import EXPECTED, meta_at, same, staged, tensors_at


class Clock:
    """A clock the test turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def capture(step: int) -> Callable[[], StateCapture]:
    return lambda: StateCapture(meta_at(step), tensors_at(step))


def keeper_for(folder: Path, clock: Clock, store: CheckpointStore | None = None) -> CheckpointSaver:
    return CheckpointSaver(store or CheckpointStore(folder), staged(0), CheckpointPolicy(), clock)


def test_offers_are_taken_when_due_and_restored_by_the_next_start(tmp_path: Path) -> None:
    clock = Clock()
    keeper = keeper_for(tmp_path, clock)
    assert keeper.status(5, 0.5).could_lose.startswith("everything since the start")
    taken: list[int] = []
    for step in range(1, 101):
        clock.now += 0.5
        if keeper.offer(step, capture(step)):
            taken.append(step)
            keeper.wait()  # the clock stands still meanwhile
    assert taken == [10, 70]
    status = keeper.status(100, 0.5)
    assert (status.last_saved_step, len(status.generations), status.alarm) == (70, 2, None)
    assert status.could_lose.startswith("at most")
    keeper.close()
    again = keeper_for(tmp_path, clock)
    loaded = again.restore(EXPECTED).loaded
    assert loaded is not None
    assert same(loaded.tensors, tensors_at(70))
    assert again.status(70, 0.5).restored == "Restored step 70."
    assert not again.offer(79, capture(79))
    assert again.offer(80, capture(80))
    again.close()


def test_what_others_want_is_written_sooner_but_within_the_budget(tmp_path: Path) -> None:
    clock = Clock()
    store, staging = CheckpointStore(tmp_path), staged(0)
    budget = CheckpointPolicy(bytes_per_day=staging.layout.file_bytes * 86_400 / 20)  # one in 20 s
    keeper = CheckpointSaver(store, staging, budget, clock)
    taken: list[float] = []
    for step in range(1, 101):
        clock.now += 1.0
        keeper.want()
        if keeper.offer(step, capture(step)):
            taken.append(clock.now)
            keeper.wait()
    assert taken == [1.0, 21.0, 41.0, 61.0, 81.0]
    keeper.close()


def test_save_waits_until_the_state_is_on_disk(tmp_path: Path) -> None:
    keeper = keeper_for(tmp_path, Clock())
    for step in (3, 4, 4):
        report = keeper.save(capture(step))
        assert report.generation is not None
    assert [item.step for item in CheckpointStore(tmp_path).generations()] == [4, 3]
    keeper.close()


def test_a_full_disk_is_an_alarm_until_a_write_succeeds(tmp_path: Path) -> None:
    clock = Clock()
    store = CheckpointStore(tmp_path)
    keeper = keeper_for(tmp_path, clock, store)
    keeper.save(capture(1))
    store.change_limits(StorageLimits(own_bytes=10))
    clock.now = 100.0
    report = keeper.save(capture(20))
    assert report.generation is None
    status = keeper.status(20, 0.1)
    assert status.alarm is not None
    assert "No room" in status.alarm
    assert "training continues" in status.alarm
    assert status.last_saved_step == 1
    clock.now = 1000.0
    assert "no checkpoint since step 1" in keeper.status(900, 0.1).could_lose
    store.change_limits(StorageLimits())
    assert keeper.offer(900, capture(900))
    keeper.close()
    assert keeper.status(900, 0.1).alarm is None
    assert keeper.status(900, 0.1).last_saved_step == 900


class SlowStore(CheckpointStore):
    """Waits inside a write until the test lets it go on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.started, self.go_on = threading.Event(), threading.Event()
        self.niceness = 0

    def _ensure_room(self, new_bytes: int) -> None:
        super()._ensure_room(new_bytes)
        if sys.platform == "linux":
            self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.started.set()
        self.go_on.wait(30)


def test_training_goes_on_beside_a_slow_write_which_has_its_own_copy(tmp_path: Path) -> None:
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) if sys.platform == "linux" else 0
    clock, store = Clock(), SlowStore(tmp_path)
    keeper = keeper_for(tmp_path, clock, store)
    tensors = tensors_at(10)
    assert keeper.offer(10, lambda: StateCapture(meta_at(10), tensors))
    assert store.started.wait(30)
    for tensor in tensors.values():
        tensor.zero_()
    clock.now = 500.0
    assert not keeper.offer(20, capture(20))
    store.go_on.set()
    keeper.close()
    loaded = CheckpointStore(tmp_path).load_newest(EXPECTED, staged(0)).loaded
    assert loaded is not None
    assert same(loaded.tensors, tensors_at(10))
    if sys.platform == "linux":
        assert store.niceness == NICENESS
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == usual


def test_a_write_can_be_cancelled_and_leaves_nothing(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    keeper = keeper_for(tmp_path, Clock(), store)
    assert keeper.offer(10, capture(10))
    assert store.started.wait(30)
    keeper.cancel()
    store.go_on.set()
    report = keeper.close()
    assert report is not None
    assert report.alarm is not None
    assert list(tmp_path.iterdir()) == []


def test_a_defect_in_the_writer_rises_in_the_loop(tmp_path: Path) -> None:
    class Broken(CheckpointStore):
        def _ensure_room(self, new_bytes: int) -> None:
            raise ZeroDivisionError(new_bytes)

    staging = staged(1)
    keeper = CheckpointSaver(Broken(tmp_path), staging, CheckpointPolicy())
    assert keeper.offer(10, capture(10))
    with pytest.raises(ZeroDivisionError):
        keeper.wait()
    assert not staging.in_use
    with pytest.raises(ZeroDivisionError):
        keeper.close()


def test_resuming_equals_never_having_stopped_bit_for_bit(tmp_path: Path) -> None:
    def train(state: dict[str, torch.Tensor], steps: int) -> None:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            parameter.data.copy_(state[f"model/{name}"])
            optimizer.state[parameter] = {
                key: state[f"inner/{name}/{key}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")
            }
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
        for name, parameter in parameters.items():
            state[f"model/{name}"] = parameter.detach().clone()
            state.update({f"inner/{name}/{key}": optimizer.state[parameter][key] for key in optimizer.state[parameter]})

    torch.set_num_threads(1)
    torch.manual_seed(1)
    start: dict[str, torch.Tensor] = {}
    for name, parameter in torch.nn.Linear(8, 8).named_parameters():
        start[f"model/{name}"] = parameter.detach().clone()
        start[f"inner/{name}/step"] = torch.tensor(0.0)
        start[f"inner/{name}/exp_avg"] = torch.zeros_like(parameter)
        start[f"inner/{name}/exp_avg_sq"] = torch.zeros_like(parameter)
    train(start, 7)
    from dataclasses import replace

    from neuroshard.state.staging_buffers import StagingBuffers
    from neuroshard.state.tensor_file import TensorLayout

    staging = StagingBuffers(TensorLayout.of(start))
    staging.copy_from(start)
    rng = {"torch": torch.get_rng_state().numpy().tobytes().hex()}
    CheckpointStore(tmp_path).write(replace(meta_at(7), rng=rng), staging)
    train(start, 7)
    torch.manual_seed(99)
    loaded = CheckpointStore(tmp_path).load_newest(EXPECTED, staging).loaded
    assert loaded is not None
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(loaded.meta.rng["torch"]), dtype=torch.uint8))
    resumed = {name: tensor.clone() for name, tensor in loaded.tensors.items()}
    train(resumed, 7)
    assert same(resumed, start)
