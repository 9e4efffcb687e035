"""Going on after a stop: bit for bit, and past states that are damaged or of another model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks.node_process import running_node, start_node
from neuroshard.host.identity import node_identity
from neuroshard.identity import Wallet, parse_token
from neuroshard.node.demo import DemoOptions, EmbeddedData, demo_folder, demo_token
from neuroshard.state.checkpoint_manifest import CheckpointManifest, CheckpointMeta, decode_manifest, encode_manifest
from neuroshard.state.checkpoint_store import CheckpointStore, find_stage_folders

pytestmark = pytest.mark.process


def test_a_run_in_pieces_equals_a_run_in_one(small_text: Path, tmp_path: Path) -> None:
    """Weights, optimizer and outer state, byte for byte, across outer steps and changes of shard."""
    prepare_demo(tmp_path / "whole", small_text)
    with demo_steps(tmp_path / "whole", small_text, 1):
        pass  # the first start chooses a precision by its speed: only one of the two may choose
    shutil.copytree(tmp_path / "whole", tmp_path / "pieces")
    with demo_steps(tmp_path / "whole", small_text, 10):  # beside the others
        for steps in (4, 6):
            with demo_steps(tmp_path / "pieces", small_text, steps):
                pass
    whole, pieces = (newest_of(tmp_path / name) for name in ("whole", "pieces"))
    assert (whole.meta.step, pieces.meta.step) == (11, 11)
    assert whole.meta.outer_step == pieces.meta.outer_step == 2
    assert whole.meta.data_position == pieces.meta.data_position
    kinds = {name.split("/")[0] for name in whole.tensors}
    assert kinds == {"model", "inner", "outer"}
    assert whole.tensors.keys() == pieces.tensors.keys()
    assert [name for name in whole.tensors if bytes_of(whole.tensors[name]) != bytes_of(pieces.tensors[name])] == []


@dataclass(frozen=True)
class Spoilt:
    """What a node made of a folder whose newest state is of another model and whose second is damaged."""

    status: dict[str, Any]
    steps: tuple[int, ...]  # of the states as they were, newest first
    folder: Path
    newest_before: bytes
    files: frozenset[str]  # in the folder of the states after the start
    later_steps: int


@pytest.fixture(scope="module")
def spoilt(trained_folder: Path, quick: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spoilt]:
    """One start serves the tests below: the two kinds of trouble lie in different generations."""
    data_dir = shutil.copytree(trained_folder, tmp_path_factory.mktemp("spoilt") / "node")
    (folder,) = find_stage_folders(data_dir)
    newest, second, third = (Path(item.path) for item in CheckpointStore(folder).generations()[:3])
    manifest = decode_manifest(newest.read_bytes())
    wider = replace(manifest.meta.architecture, hidden_size=128)
    newest.write_bytes(
        encode_manifest(CheckpointManifest(replace(manifest.meta, architecture=wider), manifest.tensors))
    )
    before = newest.read_bytes()
    flip(second.with_name(decode_manifest(second.read_bytes()).tensors.file))
    with running_node(data_dir, [*quick, "--no-training"]) as node:
        status = node.wait_for("pause", lambda status: status["state"] == "paused")
        files = frozenset(path.name for path in folder.iterdir())
        node.post("/api/training/resume")
        later = node.wait_for("steps", lambda seen: seen["training"]["steps"] > status["training"]["steps"])
        yield Spoilt(
            status,
            tuple(int(path.stem.removeprefix("step-")) for path in (newest, second, third)),
            folder,
            before,
            files,
            later["training"]["steps"],
        )


def test_the_newest_whole_state_of_this_model_is_taken(spoilt: Spoilt) -> None:
    assert spoilt.status["training"]["steps"] == spoilt.steps[2]
    assert spoilt.later_steps > spoilt.steps[2]


def test_what_was_passed_over_is_told(spoilt: Spoilt) -> None:
    restored = spoilt.status["checkpoints"]["restored"]
    assert f"step-{spoilt.steps[0]} was set aside, unchanged" in restored
    assert "another architecture" in restored
    assert f"Checkpoint step-{spoilt.steps[1]} is damaged" in restored
    warnings = " ".join(spoilt.status["warnings"])
    assert f"step-{spoilt.steps[0]}" in warnings
    assert f"step-{spoilt.steps[1]}" in warnings


def test_a_state_of_another_model_is_kept_as_it_was(spoilt: Spoilt) -> None:
    name = f"step-{spoilt.steps[0]}"
    (aside,) = spoilt.folder.glob("set-aside-width128-*")
    assert (aside / f"{name}.json").read_bytes() == spoilt.newest_before
    tensors = decode_manifest(spoilt.newest_before).tensors
    assert (aside / tensors.file).stat().st_size == tensors.bytes


def test_a_damaged_state_is_moved_away(spoilt: Spoilt) -> None:
    name = f"step-{spoilt.steps[1]}"
    assert (spoilt.folder / "damaged" / f"{name}.json").is_file()
    assert f"{name}.json" not in spoilt.files


@dataclass(frozen=True)
class State:
    """A saved state, read completely."""

    meta: CheckpointMeta
    tensors: Mapping[str, Tensor]


def prepare_demo(data_dir: Path, text: Path) -> None:
    """Wallet, node key and data of a demo, so that a copy of the folder is the same node."""
    options = DemoOptions(text_folder=text)
    folder = demo_folder(data_dir, options)
    wallet = Wallet.from_secret(parse_token(demo_token(folder)))
    node_identity(wallet, folder)
    EmbeddedData(folder, options.text_folder, wallet).build(lambda _stage, _fraction: None)


@contextmanager
def demo_steps(data_dir: Path, text: Path, steps: int) -> Iterator[None]:
    """A demo on own text that makes so many steps and ends by itself with the block; every fifth is an outer step."""
    arguments = ["--text", str(text), "--steps", str(steps), "--cpu-threads", "1"]
    node = start_node(data_dir, arguments, demo=True, variables={"NEUROSHARD_INNER_STEPS": "5"})
    try:
        yield
        assert node.process.wait(100) == 0
    finally:
        node.kill()


def newest_of(data_dir: Path) -> State:
    """The newest state below the demo's data folder."""
    (folder,) = find_stage_folders(next((data_dir / "demo").glob("text-*")))
    store = CheckpointStore(folder)
    loaded = store.open(Path(store.generations()[0].path))
    return State(loaded.meta, loaded.tensors)


def bytes_of(tensor: Tensor) -> bytes:
    """The raw bytes, so that two zeros of different sign are different."""
    return tensor.contiguous().numpy().tobytes()


def flip(path: Path) -> None:
    """Damage one byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
