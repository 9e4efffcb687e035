"""Generations on disk: exact, pruned, never lost to damage, another model, or a full disk."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuroshard.errors import CheckpointError, DiskFullError, StorageError
from neuroshard.state.checkpoint_catalogue import saved_stages
from neuroshard.state.checkpoint_store import CheckpointStore, find_stage_folders, go_back, stage_folder
from neuroshard.state.disk_space import StorageLimits, used_bytes
from neuroshard.state.export import export_torch
from tests.worlds.checkpoints import EXPECTED, SHAPE, meta_at, same, staged, tensors_at


def write_steps(store: CheckpointStore, *steps: int, size: int = 50) -> None:
    for step in steps:
        store.write(meta_at(step), staged(step, size))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


def test_what_is_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "a")
    generation = store.write(meta_at(10), staged(10))
    restored = store.load_newest(EXPECTED, staged(0)).loaded
    assert restored is not None
    assert restored.meta == meta_at(10)
    assert same(restored.tensors, tensors_at(10))
    assert same(store.open(Path(generation.path)).tensors, tensors_at(10))
    assert names(tmp_path / "a") == {"step-10.json", "step-10.safetensors"}
    assert generation.bytes == (tmp_path / "a" / "step-10.safetensors").stat().st_size


def test_an_empty_or_missing_folder_holds_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "missing")
    assert store.generations() == ()
    assert store.load_newest(EXPECTED, staged(0)).loaded is None
    assert not (tmp_path / "missing").exists()


def test_the_newest_three_and_the_last_outer_step_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(10, 100, 10):
        outer = step // 40
        store.write(meta_at(step, outer_step=outer, inner_step=step - 40 * outer), staged(step))
    assert [item.step for item in store.generations()] == [90, 80, 70]
    store.write(meta_at(100, outer_step=2, inner_step=20), staged(100))
    store.write(meta_at(110, outer_step=2, inner_step=30), staged(110))
    assert [item.step for item in store.generations()] == [110, 100, 90, 80]
    assert len(names(tmp_path)) == 8


def test_saving_a_step_again_replaces_it_without_a_gap(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write_steps(store, 10)
    store.write(replace(meta_at(10), tokens=77), staged(11))
    restored = store.load_newest(EXPECTED, staged(0)).loaded
    assert restored is not None
    assert (restored.meta.tokens, same(restored.tensors, tensors_at(11))) == (77, True)
    assert names(tmp_path) == {"step-10.json", "step-10-2.safetensors"}


@pytest.mark.parametrize("victim", ["step-30.safetensors", "step-30.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "remove", "replace"])
def test_a_damaged_newest_generation_falls_back_and_is_named(tmp_path: Path, victim: str, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    write_steps(store, 10, 20, 30)
    path = tmp_path / victim
    content = bytearray(path.read_bytes())
    match damage:
        case "truncate":
            path.write_bytes(content[:-1])
        case "flip":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        case "empty":
            path.write_bytes(b"")
        case "remove":
            path.unlink()
        case _:
            path.write_bytes(b"\x80\x04cos\nsystem\n" + bytes(content))
    fresh = CheckpointStore(tmp_path)
    restoration = fresh.load_newest(EXPECTED, staged(0))
    assert restoration.loaded is not None
    assert restoration.loaded.meta.step == 20
    assert same(restoration.loaded.tensors, tensors_at(20))
    if (victim, damage) != ("step-30.json", "remove"):  # a generation without JSON was never complete
        assert "step-30" in restoration.warnings[0]
        assert "step-20" in restoration.warnings[1]
        assert any((tmp_path / "damaged").iterdir())
    assert [item.step for item in fresh.generations()] == [20, 10]


def test_all_damaged_is_no_state_and_all_are_kept_for_inspection(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write_steps(store, 10, 20)
    for step in (10, 20):
        (tmp_path / f"step-{step}.safetensors").write_bytes(b"\0" * 100)
    restoration = CheckpointStore(tmp_path).load_newest(EXPECTED, staged(0))
    assert restoration.loaded is None
    assert len(restoration.warnings) == 2
    assert len(names(tmp_path / "damaged")) == 4


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_crashes_or_goes_unnoticed(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / data.draw(st.uuids()).hex
    store = CheckpointStore(folder)
    write_steps(store, 1, 2)
    path = folder / data.draw(st.sampled_from(["step-2.safetensors", "step-2.json"]))
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[position:]
    path.write_bytes(content)
    restored = CheckpointStore(folder).load_newest(EXPECTED, staged(0)).loaded
    assert restored is not None
    assert same(restored.tensors, tensors_at(restored.meta.step))
    assert restored.meta == meta_at(restored.meta.step)


def test_another_architecture_is_set_aside_named_and_never_overwritten(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write_steps(store, 10, 20)
    other = replace(EXPECTED, architecture=replace(SHAPE, hidden_size=16))
    before = (tmp_path / "step-20.safetensors").read_bytes()
    restoration = store.load_newest(other, staged(0))
    assert restoration.loaded is None
    folder = tmp_path / "set-aside-width8-depth2-vocabulary100-layers0to2"
    assert "another architecture" in restoration.warnings[0]
    assert str(folder) in restoration.warnings[0]
    assert (folder / "step-20.safetensors").read_bytes() == before
    write_steps(store, 20)
    store.load_newest(other, staged(0))
    assert names(folder) == {"step-10.json", "step-10.safetensors", "step-20.json", "step-20.safetensors"}
    assert names(folder.with_name(f"{folder.name}-2")) == {"step-20.json", "step-20.safetensors"}


def test_other_tensors_or_a_newer_format_are_set_aside_too(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write_steps(store, 10)
    wanted = staged(0, size=51)
    restoration = store.load_newest(EXPECTED, wanted)
    assert "model/embedding.weight is torch.float32 [50, 3], not torch.float32 [51, 3]" in restoration.warnings[0]
    assert "set-aside-tensors" in restoration.warnings[0]
    write_steps(store, 20)
    document = json.loads((tmp_path / "step-20.json").read_text())
    (tmp_path / "step-20.json").write_text(json.dumps(document | {"format_version": 2}))
    restoration = store.load_newest(EXPECTED, staged(0))
    assert "format version 2" in restoration.warnings[0]
    assert (tmp_path / "set-aside-format2" / "step-20.safetensors").exists()


FORBIDDEN_FILE = """
import os, sys, tempfile
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.worlds.checkpoints import EXPECTED, meta_at, staged
from neuroshard.errors import CheckpointError, StorageError
from neuroshard.state.checkpoint_store import CheckpointStore
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    folder.chmod(0o777)
    store = CheckpointStore(folder)
    store.write(meta_at(10), staged(10))
    (folder / "step-10.safetensors").chmod(0)
    if os.getuid() == 0:
        os.seteuid(65534)  # root may read everything
    try:
        store.load_newest(EXPECTED, staged(0))
    except StorageError as error:
        os.seteuid(os.getuid())
        moved = not (folder / "step-10.safetensors").exists()
        sys.exit(7 if not moved and not isinstance(error, CheckpointError) else 9)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX permissions")
def test_a_file_that_may_not_be_read_is_not_damage() -> None:
    script = FORBIDDEN_FILE.format(root=str(Path(__file__).parents[2]))
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 7


def test_leftovers_of_a_kill_disappear_with_the_next_write(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write_steps(store, 10)
    (tmp_path / ".tmp-step-20.safetensors-ab").write_bytes(b"x")
    (tmp_path / "step-20.safetensors").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("mine")
    write_steps(store, 30)
    assert names(tmp_path) == {
        "notes.txt",
        *(f"step-{step}.{end}" for step in (10, 30) for end in ("json", "safetensors")),
    }


def test_the_own_limit_deletes_old_generations_but_never_the_newest(tmp_path: Path) -> None:
    size = staged(0).layout.file_bytes
    store = CheckpointStore(tmp_path, StorageLimits(own_bytes=2 * size, reserve_bytes=0))
    write_steps(store, 10, 20, 30)
    assert [item.step for item in store.generations()] == [30, 20]
    store.change_limits(StorageLimits(own_bytes=2 * size - 1, reserve_bytes=0))
    with pytest.raises(DiskFullError, match="max_checkpoint_storage"):
        write_steps(store, 40)
    assert [item.step for item in store.generations()] == [30, 20]


def test_states_of_other_runs_set_aside_or_damaged_count_and_are_never_deleted(tmp_path: Path) -> None:
    """Own generations but the newest make room; when that is not enough, nothing is deleted and the alarm says so."""
    tree = tmp_path / "checkpoints"
    own = stage_folder(tmp_path, EXPECTED.wallet_id, EXPECTED.run_id, EXPECTED.layers)
    size = staged(0, size=5_000).layout.file_bytes  # beside which what the JSON files take is little
    other_run = CheckpointStore(tree / ("w" * 16) / ("e" * 64) / "layers-0-2")
    write_steps(other_run, 10, size=5_000)
    limit = used_bytes(tree) + 3 * size + 10_000
    store = CheckpointStore(own, StorageLimits(own_bytes=10**9, reserve_bytes=0, all_bytes=limit, counted=(tree,)))
    write_steps(store, 10, 20, size=5_000)
    go_back(store, at=1010.0)  # step 20 is set aside
    write_steps(store, 30, 40, size=5_000)
    assert [item.step for item in store.generations()] == [40, 30]
    assert used_bytes(tree) <= limit
    before = {path: path.read_bytes() for path in tree.rglob("*.*")}
    (own / "damaged").mkdir()
    shutil.copy(own / "step-40.safetensors", own / "damaged")
    with pytest.raises(DiskFullError, match=r"Other runs, copies and what was set aside take .*max_check"):
        write_steps(store, 50, size=5_000)
    assert {path: path.read_bytes() for path in tree.rglob("*.*") if path.parent.name != "damaged"} == before
    assert other_run.generations()


def test_an_old_generation_that_cannot_be_deleted_does_not_fail_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    write_steps(store, 10, 20, 30)

    def gone(_: object) -> None:
        raise CheckpointError("it is gone")

    monkeypatch.setattr(store, "_delete", gone)
    write_steps(store, 40)
    assert store.generations()[0].step == 40
    assert "cannot be deleted: it is gone" in caplog.text


def test_too_little_free_space_is_noticed_before_writing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, StorageLimits(reserve_bytes=10**18))
    with pytest.raises(DiskFullError, match="No room"):
        write_steps(store, 10)
    assert names(tmp_path) == set()


FULL_DISK = """
import resource, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.worlds.checkpoints import meta_at, staged
from neuroshard.errors import DiskFullError
from neuroshard.state.checkpoint_store import CheckpointStore
store = CheckpointStore(Path({folder!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    store.write(meta_at(30), staged(30))
except DiskFullError:
    sys.exit(7)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
@pytest.mark.parametrize("share", [0.0, *(pytest.param(share, marks=pytest.mark.long) for share in (0.01, 0.5)), 0.999])
def test_a_disk_that_fills_up_at_any_byte_leaves_the_old_generations(tmp_path: Path, share: float) -> None:
    store = CheckpointStore(tmp_path)
    write_steps(store, 10, 20)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    limit = int(staged(30).layout.file_bytes * share)
    script = FULL_DISK.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path), limit=limit)
    result = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert result.returncode == 7
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        write_steps(CheckpointStore(tmp_path / "file" / "x"), 10)


def test_a_json_that_names_another_file_is_refused(tmp_path: Path) -> None:
    from neuroshard.state.checkpoint_manifest import CheckpointManifest, TensorFile, encode_manifest

    store = CheckpointStore(tmp_path)
    for name in ("../x.safetensors", "/etc/passwd", "step-11.safetensors", "step-10.safetensors/"):
        path = tmp_path / "step-10.json"
        path.write_bytes(encode_manifest(CheckpointManifest(meta_at(10), TensorFile(name, 1, "00"))))
        with pytest.raises(CheckpointError):
            store.read_manifest(path)


def test_verify_tells_damage_and_changes_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    generation = store.write(meta_at(10), staged(10))
    assert store.verify(generation).step == 10
    path = tmp_path / "step-10.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(CheckpointError, match="SHA-256"):
        store.verify(generation)
    assert names(tmp_path) == {"step-10.json", "step-10.safetensors"}


def test_export_has_the_classic_keys_and_needs_no_unpickler(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.write(meta_at(10, outer_step=2), staged(10))
    stages = saved_stages([tmp_path])
    export_torch(stages, tmp_path / "classic.pt")
    content = torch.load(tmp_path / "classic.pt", weights_only=True)
    classic = "layer_ids architecture layers optimizer diloco training_rounds current_loss timestamp"
    assert set(classic.split()) <= content.keys()
    assert content["layer_ids"] == [0, 1]
    assert torch.equal(content["layers"][0]["norm.weight"], tensors_at(10)["model/layers.0.norm.weight"])
    assert torch.equal(content["outside_layers"]["embedding.weight"], tensors_at(10)["model/embedding.weight"])
    assert content["optimizer"]["state"]["layers.0.norm.weight"]["step"].item() == 10
    assert torch.equal(content["diloco"]["anchor"], tensors_at(10)["outer/anchor"])
    with pytest.raises(StorageError):
        export_torch(stages, tmp_path / "missing" / "classic.pt")


def test_the_stage_folder_follows_the_contract(tmp_path: Path) -> None:
    folder = stage_folder(tmp_path, EXPECTED.wallet_id, EXPECTED.run_id, EXPECTED.layers)
    assert folder == tmp_path / "checkpoints" / ("w" * 16) / ("r" * 64) / "layers-0-2"
    assert find_stage_folders(tmp_path) == ()
    write_steps(CheckpointStore(folder), 10)
    assert find_stage_folders(tmp_path) == (folder,)
