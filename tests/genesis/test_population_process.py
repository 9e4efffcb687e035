"""The populator as people start it: killed, stopped, out of space, with a source that fails and comes back."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from neuroshard.dataset import verify_folder
from tests.worlds.data_sets import contents, made_up_texts, write_json_lines

TOKEN = "11" * 32
PROGRAM = "from neuroshard.cli.main import main; main()"
SMALL_FILES = (
    "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    f"resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); {PROGRAM}"
)
pytestmark = pytest.mark.process


def write_configuration(folder: Path, location: Path) -> Path:
    file = folder / "sources.toml"
    file.write_text(
        f'tokens_per_shard = 8192\n[[sources]]\nname = "lines"\nkind = "jsonl"\nlocation = "{location}"\n'
        "target_shards = 1000\n[vocabulary]\nmerges = 50\nsample_documents = 100\n"
    )
    return file


def start(folder: Path, configuration: Path, *more: str, program: str = PROGRAM) -> subprocess.Popen[str]:
    """`genesis build` into folder/g with two processes."""
    command = [sys.executable, "-c", program, "genesis", "build", "--config", str(configuration)]
    command += ["--out", str(folder / "g"), "--workers", "2", "--data-dir", str(folder / "data"), *more]
    environment = {**os.environ, "NEUROSHARD_TOKEN": TOKEN, "SOURCE_DATE_EPOCH": "1700000000"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def wait_for_shards(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until so many shards are there."""
    deadline = time.monotonic() + 120
    while sum(1 for _ in (folder / "g").glob("shard_*.bin")) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 2 MB."""
    return write_json_lines(tmp_path_factory.mktemp("lines") / "a.jsonl", made_up_texts(6_000))


@pytest.fixture(scope="module")
def uninterrupted(lines: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a build that nothing happens to makes of the lines."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    code, out, err = finish(start(folder, write_configuration(folder, lines), "--json"))
    assert code == 0, err
    assert json.loads(out)["shards"] > 60
    assert verify_folder(folder / "g").is_sound
    assert "read: lines" in (folder / "data/logs/genesis_lines.log").read_text()
    return contents(folder / "g")


def test_a_killed_build_goes_on_to_the_same_bytes(tmp_path: Path, lines: Path, uninterrupted: dict[str, str]) -> None:
    configuration = write_configuration(tmp_path, lines)
    for shards in (1, 9, 40):
        process = start(tmp_path, configuration)
        wait_for_shards(tmp_path, shards, process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert alive == []  # no tokenising process outlives the one it works for
    (tmp_path / "g/.tmp-shard_3.bin-0123").write_bytes(b"left by a kill in the middle of a write")
    assert finish(start(tmp_path, configuration))[0] == 0
    assert contents(tmp_path / "g") == uninterrupted
    assert list((tmp_path / "g").rglob(".tmp-*")) == []


def test_ctrl_c_leaves_a_whole_data_set_and_the_same_command_continues(
    tmp_path: Path, lines: Path, uninterrupted: dict[str, str]
) -> None:
    configuration = write_configuration(tmp_path, lines)
    process = start(tmp_path, configuration, "--follow")
    wait_for_shards(tmp_path, 20, process)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, "Run the same command again" in err, "Traceback" in err) == (130, True, False)
    assert verify_folder(tmp_path / "g").is_sound
    assert finish(start(tmp_path, configuration))[0] == 0
    assert contents(tmp_path / "g") == uninterrupted


def test_a_full_disk_is_told_and_the_same_command_goes_on(
    tmp_path: Path, lines: Path, uninterrupted: dict[str, str]
) -> None:
    """The limit on the size of a file stands for the disk: the system refuses the write in the same way."""
    configuration = write_configuration(tmp_path, lines)
    code, _, err = finish(start(tmp_path, configuration, program=SMALL_FILES))
    assert (code, "no space left" in err, "Traceback" in err) == (5, True, False)
    assert not (tmp_path / "g/manifest.json").exists()
    assert finish(start(tmp_path, configuration))[0] == 0
    assert contents(tmp_path / "g") == uninterrupted


def test_a_source_that_fails_in_the_middle_and_comes_back(
    tmp_path: Path, lines: Path, uninterrupted: dict[str, str]
) -> None:
    """A half archive is tried again after a second; by then the whole one is there."""
    packed = tmp_path / "in/a.jsonl.gz"
    packed.parent.mkdir()
    whole = gzip.compress(lines.read_bytes(), 1)
    packed.write_bytes(whole[: len(whole) // 2])
    log = tmp_path / "data/logs/genesis_lines.log"

    def come_back() -> None:
        while not (log.exists() and "Trying again" in log.read_text()):
            time.sleep(0.01)
        temporary = packed.with_suffix(".tmp")
        temporary.write_bytes(whole)
        temporary.replace(packed)

    process = start(tmp_path, write_configuration(tmp_path, packed.parent))
    healer = threading.Thread(target=come_back)
    healer.start()
    code, _, err = finish(process)
    healer.join()
    assert code == 0, err
    shards = {name: digest for name, digest in contents(tmp_path / "g").items() if name.startswith("shard_")}
    assert shards == {name: digest for name, digest in uninterrupted.items() if name.startswith("shard_")}


def test_a_wrong_command_or_source_has_its_exit_code(tmp_path: Path, lines: Path) -> None:
    code, _, err = finish(start(tmp_path, write_configuration(tmp_path, lines), "--text", str(tmp_path)))
    assert (code, "Exactly one" in err) == (2, True)
    file = write_configuration(tmp_path, lines)
    file.write_text(file.read_text().replace("target_shards", "target_shard"))
    code, _, err = finish(start(tmp_path, file))
    assert (code, "source 'lines', target_shard" in err) == (2, True)
    bodies = write_json_lines(tmp_path / "b.jsonl", made_up_texts(2_000, lines=1), "body")
    code, _, err = finish(start(tmp_path, write_configuration(tmp_path, bodies)))
    assert (code, "text_field" in err, "Traceback" in err) == (6, True, False)
