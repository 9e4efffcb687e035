"""Commands that work while no node runs: wallets, Genesis folders, saved states."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import torch

from benchmarks.node_process import TOKEN
from neuroshard.config.folders import NodePaths
from neuroshard.identity import NodeKey, Wallet, parse_token
from neuroshard.state.checkpoint_manifest import CheckpointManifest, decode_manifest, encode_manifest
from neuroshard.state.checkpoint_store import CheckpointStore, find_stage_folders
from tests.worlds.commands import Command

pytestmark = pytest.mark.process


@pytest.fixture
def stopped(trained_folder: Path, tmp_path: Path) -> Path:
    """Data folder of a stopped node, ours to spoil."""
    return shutil.copytree(trained_folder, tmp_path / "node")


def test_a_new_wallet_can_be_used_at_once(neuroshard: Command) -> None:
    made = neuroshard("wallet", "new", "--json").json()
    assert len(made["phrase"].split()) == 12
    shown = neuroshard.having(NEUROSHARD_TOKEN=made["phrase"])("wallet", "show", "--json").json()
    assert shown["wallet_id"] == made["wallet_id"]
    other = neuroshard("wallet", "new", "--words", "24")
    assert len(other.out.split()) == 24  # the words alone: the advice goes to standard error
    assert "Write the words down" in other.err


def test_a_token_file_is_read(neuroshard: Command, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    shown = neuroshard("wallet", "show", "--token-file", tmp_path / "token")
    assert shown.code == 0
    assert Wallet.from_secret(parse_token(TOKEN)).wallet_id in shown.out
    assert TOKEN not in shown.out


def test_the_node_identity_is_shown_once_there_is_one(neuroshard: Command, tmp_path: Path) -> None:
    owner = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)
    place = NodePaths.below(tmp_path / "node").node_key
    before = owner("wallet", "show", "--data-dir", tmp_path / "node")
    assert f"node_id      none yet: the first start creates it\nnode_key     {place}\n" in before.out
    assert not place.exists()
    key = NodeKey.load_or_create(place)
    shown = owner("wallet", "show", "--data-dir", tmp_path / "node", "--json").json()
    assert (shown["node_id"], shown["node_key"]) == (key.node_id, str(place))


def test_a_genesis_folder_is_built_and_verified(neuroshard: Command, small_text: Path, tmp_path: Path) -> None:
    owner = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)
    build = ("genesis", "build", "--text", small_text, "--out", tmp_path / "genesis", "--vocabulary", "300")
    built = owner(*build)
    assert built.code == 0
    assert f"signed by wallet {Wallet.from_secret(parse_token(TOKEN)).wallet_id}" in built.out
    assert owner(*build).out.startswith("Already there")
    sound = neuroshard("genesis", "verify", tmp_path / "genesis", "--json")
    assert sound.code == 0
    assert sound.json() == {
        "sound": True,
        "shards": 16,
        "checked": 16,
        "signed_by": Wallet.from_secret(parse_token(TOKEN)).public_key.hex(),
        "problems": [],
        "notes": [],
    }
    flip(tmp_path / "genesis" / "shard_3.bin")
    damaged = neuroshard("genesis", "verify", tmp_path / "genesis")
    assert damaged.code == 6
    assert "shard_3.bin" in damaged.out


def test_a_genesis_folder_is_served_until_the_end(neuroshard: Command, small_genesis: Path) -> None:
    command = neuroshard.arguments("genesis", "serve", small_genesis, "--port", "0")
    neuroshard.home.mkdir()
    with subprocess.Popen(command, env=neuroshard.environment(), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            told = server.stdout.readline()
            url = told.rsplit(" ", 1)[1].strip()
            manifest = httpx.get(f"{url}/manifest.json", trust_env=False).raise_for_status().json()
            assert manifest["total_shards"] == 16
        finally:
            server.terminate()
        assert server.wait(20) == 0


def test_saved_states_are_listed_newest_first(neuroshard: Command, stopped: Path) -> None:
    states = saved_states(stopped)
    found = neuroshard("checkpoint", "list", "--data-dir", stopped, "--json").json()
    assert [item["path"] for item in found] == [str(path) for path in states]
    steps = [item["step"] for item in found]
    assert len(steps) >= 3
    assert steps == sorted(steps, reverse=True)
    lines = neuroshard("checkpoint", "list", "--data-dir", stopped).out.splitlines()
    assert [line.split()[1] for line in lines] == [f"{step:,}" for step in steps]


REPLACED_MEANWHILE = """
from pathlib import Path
from neuroshard.cli import main
from neuroshard.state.checkpoint_store import CheckpointStore
verify = CheckpointStore.verify
def verify_late(self, generation):
    if generation.path == OLDEST:
        Path(OLDEST).rename(OLDEST + ".away")
    return verify(self, generation)
CheckpointStore.verify = verify_late
main.main()
"""


def test_a_state_that_a_running_node_replaces_meanwhile_is_not_damaged(neuroshard: Command, stopped: Path) -> None:
    oldest = saved_states(stopped)[-1]
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            f"OLDEST = {str(oldest)!r}{REPLACED_MEANWHILE}",
            "checkpoint",
            "verify",
            "--data-dir",
            str(stopped),
        ],
        env=neuroshard.environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    oldest.with_name(f"{oldest.name}.away").rename(oldest)
    assert f"gone     {oldest}: the node has since replaced it" in ran.stdout
    assert f"DAMAGED  {oldest}" not in ran.stdout
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_damaged_state_is_5_and_named(neuroshard: Command, stopped: Path) -> None:
    newest = saved_states(stopped)[0]
    flip(newest.with_name(decode_manifest(newest.read_bytes()).tensors.file))
    outcome = neuroshard("checkpoint", "verify", "--data-dir", stopped)
    assert outcome.code == 5
    assert f"DAMAGED  {newest}" in outcome.out
    assert "ok " in outcome.out
    told = neuroshard("checkpoint", "verify", "--data-dir", stopped, "--json")
    assert told.code == 5
    assert [item["path"] for item in told.json() if not item["sound"]] == [str(newest)]


def test_the_exported_file_has_the_classic_keys(neuroshard: Command, stopped: Path, tmp_path: Path) -> None:
    chosen = saved_states(stopped)[1]
    export = ("checkpoint", "export", "--data-dir", stopped, "--out")
    outcome = neuroshard(*export, tmp_path / "model.pt", "--format", "torch", "--checkpoint", chosen, "--json")
    assert outcome.code == 0
    written = outcome.json()
    assert (written["out"], written["format"]) == (str(tmp_path / "model.pt"), "torch")
    assert [stage["path"] for stage in written["stages"]] == [str(chosen)]
    classic = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {"layer_ids", "architecture", "layers", "optimizer", "diloco", "training_rounds"} <= classic.keys()
    assert classic["training_rounds"] == decode_manifest(chosen.read_bytes()).meta.step
    assert neuroshard(*export, tmp_path / "x", "--format", "onnx").code == 2


def test_an_exported_folder_of_a_distributed_checkpoint_is_never_overwritten(
    neuroshard: Command, stopped: Path, tmp_path: Path
) -> None:
    export = ("checkpoint", "export", "--data-dir", stopped, "--format", "dcp", "--out", tmp_path / "model")
    assert neuroshard(*export).code == 0
    assert {"params.json", ".metadata"} < {path.name for path in (tmp_path / "model").iterdir()}
    again = neuroshard(*export)
    assert (again.code, "is not empty" in again.err) == (5, True)
    assert neuroshard(*export, "--push", "me/model").code == 2


def test_what_cannot_be_assembled_is_refused_at_once(neuroshard: Command, tmp_path: Path) -> None:
    owner, out = neuroshard.having(NEUROSHARD_TOKEN=TOKEN), tmp_path / "out"
    assemble = ("checkpoint", "assemble", "--out", out, "--data-dir", tmp_path / "assembler")
    run = ("--run", "ab" * 32)
    assert neuroshard(*assemble, *run).code == 3  # no token
    nowhere = owner(*assemble)
    assert (nowhere.code, "--run" in nowhere.err) == (2, True)
    both = owner(*assemble, *run, "--at", "2026-01-31T18:00", "--outer-step", "3")
    assert (both.code, "exclude each other" in both.err) == (2, True)
    out.mkdir()
    (out / "file").touch()
    taken = owner(*assemble, *run)
    assert (taken.code, "is not empty" in taken.err) == (2, True)
    (out / "file").unlink()
    silent = owner(*assemble, *run, "--wait", "1")
    assert (silent.code, "--peer ADDRESS" in silent.err) == (4, True)
    lonely = owner("checkpoint", "export", "--peer", "/ip4/127.0.0.1/tcp/1", "--out", tmp_path / "model")
    assert (lonely.code, "--from-run" in lonely.err) == (2, True)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT for one process")
def test_ctrl_c_ends_an_assembly_with_a_word(neuroshard: Command, tmp_path: Path) -> None:
    owner = neuroshard.having(NEUROSHARD_TOKEN=TOKEN)
    owner.home.mkdir(exist_ok=True)
    where = ("--out", tmp_path / "out", "--data-dir", tmp_path / "assembler", "--run", "ab" * 32)
    command = owner.arguments("checkpoint", "assemble", *where)
    with subprocess.Popen(command, env=owner.environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("Looking for nodes of run" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert (process.wait(60), "The same command continues" in said) == (130, True), said


def test_a_damaged_state_is_passed_over_in_an_export(neuroshard: Command, stopped: Path, tmp_path: Path) -> None:
    newest, before, *_ = saved_states(stopped)
    flip(newest.with_name(decode_manifest(newest.read_bytes()).tensors.file))
    outcome = neuroshard("checkpoint", "export", "--data-dir", stopped, "--out", tmp_path / "model")
    assert outcome.code == 0
    assert f"{newest} is damaged" in outcome.err
    assert f"Step {decode_manifest(before.read_bytes()).meta.step:,} written" in outcome.out
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    names |= {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == names
    again = neuroshard("checkpoint", "export", "--data-dir", stopped, "--out", tmp_path / "model")
    assert again.code == 5
    assert "is not empty" in again.err


@pytest.mark.skipif(sys.platform == "win32", reason="the test holds the export at a named pipe")
@pytest.mark.parametrize("format_name", ["hf", "gguf"])
def test_a_state_that_the_node_replaces_during_an_export_gives_way_to_the_newer_one(
    neuroshard: Command, stopped: Path, small_genesis: Path, tmp_path: Path, format_name: str
) -> None:
    """The export reads the tokenizer after it has listed the states: the pipe holds it there while a node saves."""
    if format_name == "gguf" and find_spec("gguf") is None:
        pytest.skip("gguf is not installed")
    newest, *older = saved_states(stopped)
    hidden = tmp_path / "saved later"
    hidden.mkdir()
    for path in files_of(newest):
        path.rename(hidden / path.name)
    pipe = tmp_path / "tokenizer.json"
    os.mkfifo(pipe)

    def replace_states() -> None:
        with suppress(BrokenPipeError), pipe.open("wb") as writer:  # opens when the export reads
            for path in hidden.iterdir():
                path.rename(newest.with_name(path.name))
            for path in (path for state in older for path in files_of(state)):
                path.unlink()
            shutil.copy(small_genesis / "tokenizer.json", tmp_path / "copy")
            (tmp_path / "copy").replace(pipe)  # the next reader finds a file
            writer.write(pipe.read_bytes())

    with ThreadPoolExecutor(1) as pool:
        replaced = pool.submit(replace_states)
        export = ("checkpoint", "export", "--data-dir", stopped, "--out", tmp_path / "model", "--format", format_name)
        outcome = neuroshard(*export, "--tokenizer", pipe)
        os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # so that the thread ends if the export did not read
        replaced.result()
    assert outcome.code == 0, outcome.err
    assert f"The node has deleted {older[0]}" in outcome.err
    assert f"Step {decode_manifest(newest.read_bytes()).meta.step:,} written" in outcome.out


def test_the_tokenizer_of_an_export_is_the_one_of_the_run(
    neuroshard: Command, stopped: Path, small_genesis: Path, tmp_path: Path
) -> None:
    for copy in (stopped / "data_cache" / "descriptions").glob("tokenizer-*.json"):
        copy.unlink()
    export = ("checkpoint", "export", "--data-dir", stopped, "--out", tmp_path / "model")
    assert neuroshard(*export).err.startswith(f"warning: {tmp_path / 'model'} has no tokenizer")
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "other.json").write_text("{}")
    other = neuroshard(*export, "--tokenizer", tmp_path / "other.json")
    assert other.code == 6
    assert "is not the table that the run was made with" in other.err
    assert neuroshard(*export, "--tokenizer", tmp_path / "nowhere.json").code == 6
    given = neuroshard(*export, "--format", "huggingface", "--tokenizer", small_genesis / "tokenizer.json")
    assert (given.code, given.err) == (0, "")
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    if find_spec("gguf") is None:
        pytest.skip("gguf is not installed")
    one_file = ("checkpoint", "export", "--data-dir", stopped, "--out", tmp_path / "m.gguf", "--format", "gguf")
    assert neuroshard(*one_file).code == 6
    assert neuroshard(*one_file, "--tokenizer", small_genesis / "tokenizer.json").code == 0
    assert (tmp_path / "m.gguf").read_bytes().startswith(b"GGUF")


def test_the_time_in_the_list_is_the_time_to_go_back_to(neuroshard: Command, stopped: Path) -> None:
    """Whoever copies a time from the list gets that state, wherever on earth the computer stands."""
    states = saved_states(stopped)
    place_in_time(states)
    elsewhere = neuroshard.having(TZ="Asia/Kolkata")
    line = elsewhere("checkpoint", "list", "--data-dir", stopped).out.splitlines()[1]
    step, time = line.split()[1:3]
    outcome = elsewhere("checkpoint", "restore", "--data-dir", stopped, "--at", time)
    assert outcome.code == 0
    assert f"resumes from step {step}: {states[1]}" in outcome.out
    assert saved_states(stopped) == states[1:]
    aside = [Path(told.removeprefix("set aside: ")) for told in outcome.out.splitlines() if "set aside" in told]
    assert [(path / states[0].name).is_file() for path in aside] == [True]
    older = saved_states(stopped)[0]
    again = elsewhere("checkpoint", "restore", "--data-dir", stopped, "--at", time, "--json").json()
    assert ([item["path"] for item in again["resumes_from"]], again["set_aside"]) == ([str(older)], [])


def files_of(state: Path) -> list[Path]:
    """The JSON file of a state and its tensors."""
    return [state, state.with_name(decode_manifest(state.read_bytes()).tensors.file)]


def saved_states(data_dir: Path) -> list[Path]:
    """The JSON files of the states in a data folder, newest first."""
    (folder,) = find_stage_folders(data_dir)
    return [Path(item.path) for item in CheckpointStore(folder).generations()]


def place_in_time(states: list[Path]) -> None:
    """Give the states times half an hour apart, none of them at a whole second."""
    first = datetime(2026, 1, 1).astimezone().timestamp()
    for age, path in enumerate(states):
        manifest = decode_manifest(path.read_bytes())
        moved = replace(manifest.meta, time=first - 1800 * age + 0.7)
        path.write_bytes(encode_manifest(CheckpointManifest(moved, manifest.tensors)))


def flip(path: Path) -> None:
    """Damage one byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def test_a_source_that_does_not_answer_is_one_clear_line_of_the_doctor(neuroshard: Command) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        program = "from neuroshard.cli import doctor, main; doctor.MANIFEST_SECONDS = 1.0; main.main()"
        neuroshard.home.mkdir()
        ran = subprocess.run(
            [sys.executable, "-c", program, "doctor", "--genesis", address],
            env=neuroshard.environment(),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert (ran.returncode, ran.stderr) == (1, "")
    told = [line for line in ran.stdout.splitlines() if address in line and not line.startswith(" ")]
    assert len(told) == 1
    assert " ".join(told[0].split()).startswith(
        f"BAD data {address} does not answer within 1 s: 127.0.0.1 cannot be reached"
    )
    assert "tries again" not in ran.stdout


def test_the_folders_with_a_user_s_data_are_told(neuroshard: Command, tmp_path: Path) -> None:
    home = neuroshard.home / ".local/share/neuroshard"
    assert neuroshard("folders").out == f"{home}\n"
    assert not home.exists()
    home.mkdir(parents=True)
    (home / "config.toml").write_text(f'data_dir = "{tmp_path}/ä disk"\n')  # which need not be there
    assert neuroshard("folders", "--json").json() == {"folders": [f"{tmp_path}/ä disk", str(home)]}
    (home / "config.toml").write_text(f'data_dir = "{home}"\n')
    assert neuroshard("folders").out == f"{home}\n"
