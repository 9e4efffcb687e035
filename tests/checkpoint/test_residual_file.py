"""The residual beside a generation: read bit for bit, gone with it, and never another one's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from neuroshard.state.checkpoint_store import CheckpointStore, LoadedCheckpoint, go_back
from tests.worlds.checkpoints import EXPECTED, meta_at, same, staged, tensors_at

RESIDUAL = torch.randn(50, generator=torch.Generator().manual_seed(5))


def write(store: CheckpointStore, step: int, residual: torch.Tensor | None = RESIDUAL) -> None:
    store.write(meta_at(step), staged(step), residual=residual)


def load(store: CheckpointStore) -> LoadedCheckpoint:
    loaded = store.load_newest(EXPECTED, staged(0)).loaded
    assert loaded is not None
    return loaded


def test_it_is_read_bit_for_bit_and_the_tensor_file_is_the_same_without_it(tmp_path: Path) -> None:
    store, plain = CheckpointStore(tmp_path / "a"), CheckpointStore(tmp_path / "b")
    write(store, 10)
    write(plain, 10, None)
    loaded = load(store)
    assert loaded.residual is not None
    assert torch.equal(loaded.residual, RESIDUAL)
    assert same(loaded.tensors, tensors_at(10))
    assert load(plain).residual is None
    for name in ("step-10.safetensors", "step-10.json"):  # what others fetch
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def shortened(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def huge(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a hole: it takes no space


@pytest.mark.parametrize("damage", [cut, shortened, flipped, empty, huge])
def test_a_damaged_one_costs_only_itself(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 10)
    damage(tmp_path / "step-10.residual")
    with caplog.at_level(logging.WARNING):
        loaded = load(store)
    assert (loaded.meta.step, loaded.residual) == (10, None)
    assert same(loaded.tensors, tensors_at(10))
    assert "next round begins without it" in caplog.text


def test_it_belongs_to_one_generation(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 10)
    (tmp_path / "step-10.residual").rename(tmp_path / "kept")
    write(store, 20)
    (tmp_path / "kept").rename(tmp_path / "step-20.residual")
    assert load(store).residual is None


def test_it_goes_with_its_generation(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(10, 60, 10):
        write(store, step)
    assert sorted(path.name for path in tmp_path.glob("*.residual")) == [f"step-{n}.residual" for n in (30, 40, 50)]
    (tmp_path / "step-70.residual").write_bytes(b"an orphan")
    write(store, 60, None)
    assert sorted(path.name for path in tmp_path.glob("*.residual")) == ["step-40.residual", "step-50.residual"]
    kept, moved = go_back(store, at=meta_at(40).time)
    assert kept is not None
    assert {path.name for place in moved for path in place.iterdir()} >= {"step-50.residual", "step-60.json"}
    loaded = load(store)
    assert loaded.meta.step == 40
    assert loaded.residual is not None


def test_a_step_that_is_saved_again_has_its_own(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 10)
    write(store, 10, RESIDUAL + 1)
    loaded = load(store)
    assert loaded.residual is not None
    assert torch.equal(loaded.residual, RESIDUAL + 1)
    assert len(list(tmp_path.glob("*.residual"))) == 1
