"""Updates from end to end with a stand-in program: applied, taken back, refused, and cut off after every step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuroshard.config.instance_lock import read_lock_owner
from tests.worlds.file_servers import HostileServer
from tests.worlds.publishers import ReleasePlace, new_key
from tests.worlds.releases import (
    Computer,
    archive_of,
    installed,
    program,
    publish,
    real_program,
    until,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform == "win32", reason="the stand-in program is a script with a #! line"),
]
STEPS_WITH_NODE = ("downloaded", "unpacked", "tried", "stopped", "started", "switched")
STEPS_WITHOUT_NODE = ("downloaded", "unpacked", "tried", "proved", "switched")


@pytest.fixture
def computer(tmp_path: Path) -> Iterator[Computer]:
    """Version 0.1.0 is installed, 0.2.0 published just now."""
    with HostileServer() as server:
        computer = Computer(tmp_path, ReleasePlace(server), installed(tmp_path / "program"))
        publish(computer, "0.2.0")
        yield computer


def test_a_running_node_becomes_the_new_version_as_it_was_started(computer: Computer) -> None:
    with computer.node():
        done = computer.update("apply", "--yes")
        assert (done.returncode, done.stderr) == (0, "")
        assert "Version 0.2.0 has replaced 0.1.0. The node runs again" in done.stdout
        arguments = f"run --data-dir {computer.data} kept"
        assert computer.starts() == [f"0.1.0 {arguments}", f"0.2.0 {arguments}"]
        assert computer.working_version() == "0.2.0"
        back = computer.update("rollback", "--yes")
        assert back.returncode == 0, back.stderr
        assert computer.starts()[2:] == [f"0.1.0 {arguments}"]
        assert computer.working_version() == "0.1.0"


def test_without_a_node_the_new_version_first_shows_that_it_comes_up(computer: Computer) -> None:
    before = files_of(computer.home)
    done = computer.update("apply", "--yes")
    assert done.returncode == 0, done.stderr
    assert computer.working_version() == "0.2.0"
    new = {path for path in files_of(computer.home) - before if path.parts[0] != "program"}
    assert new == {Path("data/update.json")}  # nothing of autostart, of settings, of a service


def test_a_version_that_does_not_come_up_is_taken_back(computer: Computer) -> None:
    publish(computer, "0.3.0", program("0.3.0", works=False))
    with computer.node():
        done = computer.update("apply", "--yes")
        assert done.returncode == 1
        assert "no such thing as this version here" in done.stderr
        assert "Version 0.1.0 runs again" in done.stderr
        assert [line.split()[0] for line in computer.starts()] == ["0.1.0", "0.1.0"]
        assert read_lock_owner(computer.data) is not None
    assert computer.working_version() == "0.1.0"
    alone = computer.update("apply", "--yes")
    assert alone.returncode == 1
    assert "no such thing" in alone.stderr
    assert computer.working_version() == "0.1.0"


def test_cut_off_after_every_step_beside_a_node_a_version_works(computer: Computer) -> None:
    """Each try goes on from what the one before left, and is cut off a step later."""
    for step in STEPS_WITH_NODE:
        with computer.node():
            before = computer.working_version()
            assert computer.update("apply", "--yes", dies_after=step).returncode == -9, step
            assert computer.working_version() == ("0.2.0" if step == "switched" else before), step
            if step in {"started", "switched"}:
                assert computer.starts()[-1].startswith("0.2.0"), step
    with computer.node():
        publish(computer, "0.3.0")
        assert computer.update("apply", "--yes", dies_after="settled").returncode == -9
        assert computer.working_version() == "0.3.0"
        assert computer.update("rollback", "--yes").returncode == 0
        assert computer.working_version() == "0.2.0"


def test_cut_off_after_every_step_without_a_node_a_version_works(computer: Computer) -> None:
    for step in STEPS_WITHOUT_NODE:
        assert computer.update("apply", "--yes", dies_after=step).returncode == -9, step
        assert computer.working_version() == ("0.2.0" if step == "switched" else "0.1.0"), step
    assert computer.update("apply", "--yes").stdout == "Version 0.2.0 is the newest.\n"


def test_half_an_unpacked_version_is_no_version(computer: Computer) -> None:
    half = computer.installation.folder("0.2.0")
    half.mkdir()
    (half / "neuroshard").write_text("half of")
    done = computer.update("apply", "--yes")
    assert done.returncode == 0, done.stderr
    assert computer.working_version() == "0.2.0"


@pytest.mark.parametrize(
    ("version", "changes", "words"),
    [
        ("0.2.0", {"signer": None}, "not signed by enough of the publisher's keys"),
        ("0.2.0", {"timestamp_days": -1}, "have expired"),
        ("0.2.0", {"minimal_version": "0.1.9"}, "too old"),
        ("0.2.0", {"size": 5_000}, "5000 were signed"),
        ("0.2.0", {"sha256": "00" * 32}, "does not match its signed digest"),
        ("0.2.0", {"unpacked_size": 1000}, "more bytes than were signed"),
        ("0.2.0", {"calls_itself": "0.9.0"}, "reports"),
    ],
)
def test_what_is_refused_changes_nothing(
    computer: Computer, version: str, changes: dict[str, object], words: str
) -> None:
    named = {**changes, **({"signer": new_key()} if "signer" in changes else {})}
    content = program(version, calls_itself=str(named.pop("calls_itself", version)))
    publish(computer, version, content, **named)
    with computer.node():
        done = computer.update("apply", "--yes")
        assert done.returncode != 0
        assert words in done.stderr
        assert len(computer.starts()) == 1  # the node was left alone
    assert computer.working_version() == "0.1.0"


def test_older_metadata_than_those_seen_are_a_replay(computer: Computer) -> None:
    kept = dict(computer.place.server.files)
    publish(computer, "0.3.0")
    assert '"version": "0.3.0"' in computer.update("check", "--json").stdout
    computer.place.server.files.update(kept)
    replayed = computer.update("apply", "--yes")
    assert (replayed.returncode, "older than those seen before" in replayed.stderr) == (1, True)


def test_an_older_version_is_no_update(computer: Computer) -> None:
    publish(computer, "0.0.9", minimal_version="0.0.1")
    done = computer.update("apply", "--yes")
    assert (done.returncode, done.stdout) == (0, "Version 0.1.0 is the newest.\n")


def test_nothing_is_installed_without_a_yes(computer: Computer) -> None:
    assert computer.update("apply").returncode == 1
    assert computer.working_version() == "0.1.0"
    assert not computer.installation.folder("0.2.0").exists()


def test_a_node_from_elsewhere_is_left_alone(computer: Computer, tmp_path: Path) -> None:
    elsewhere = tmp_path / "neuroshard"
    shutil.copy2(computer.installation.program("0.1.0"), elsewhere)
    node = subprocess.Popen([str(elsewhere), "run", "--data-dir", str(computer.data)])
    try:
        until(lambda: (owner := read_lock_owner(computer.data)) is not None and owner.port is not None)
        done = computer.update("apply", "--yes")
        assert (done.returncode, "belongs to another installation" in done.stderr) == (1, True)
        assert node.poll() is None
    finally:
        node.kill()
        node.wait()


def test_only_the_version_before_is_kept(computer: Computer) -> None:
    assert computer.update("apply", "--yes").returncode == 0
    publish(computer, "0.3.0")
    assert computer.update("apply", "--yes").returncode == 0
    kept = {path.name for path in (computer.installation.root / "versions").iterdir()}
    assert kept == {"0.2.0", "0.3.0"}
    assert not (computer.installation.root / "downloads").exists()


def files_of(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_well", [True, False])
def test_an_environment_is_made_where_it_stays(computer: Computer, is_well: bool) -> None:
    """Archives of Windows and macOS hold no program but what makes one; when that fails nothing has changed."""
    making = (
        "import pathlib, sys",
        "script = pathlib.Path(sys.argv[sys.argv.index('--into') + 1]) / 'bin/neuroshard'",
        "script.parent.mkdir()" if is_well else "sys.exit('no package index')",
        f"script.write_bytes({program('0.2.0')!r})",
        "script.chmod(0o755)",
    )
    archive = archive_of({"bootstrap.py": "\n".join(making).encode()})
    computer.place.publish("0.2.0", archive)
    done = computer.update("apply", "--yes")
    assert done.returncode == (0 if is_well else 1), done.stderr
    assert is_well or "no package index" in done.stderr
    assert computer.working_version() == ("0.2.0" if is_well else "0.1.0")


def test_a_real_node_goes_on_from_its_checkpoint_as_the_new_version(
    tmp_path: Path, quick: list[str], saving_often: dict[str, str]
) -> None:
    from benchmarks.node_process import TOKEN

    with HostileServer() as server:
        installation = installed(tmp_path / "program", content=real_program("0.1.0"))
        computer = Computer(tmp_path, ReleasePlace(server), installation)
        publish(computer, "0.2.0", real_program("0.2.0"))
        variables = {"NEUROSHARD_TOKEN": TOKEN, "NEUROSHARD_NETWORK": "false", "NEUROSHARD_PORT": "0", **saving_often}
        start = [str(installation.program("0.1.0")), *quick, "--headless", "--data-dir", str(computer.data)]
        node = subprocess.Popen(start, env={**os.environ, **variables}, stderr=subprocess.DEVNULL)
        try:
            until(lambda: steps_of(computer.data) > 10, 90)
            done = computer.update("apply", "--yes")
            assert done.returncode == 0, done.stderr
            assert node.wait(30) == 0  # the old one ended well
            from neuroshard.cli.client import connect

            status = connect(computer.data, None).get("/api/status")
            assert status["version"] == "0.2.0"
            logs = computer.data / "logs/node.log"  # the API answers before the new version has read the checkpoint
            until(lambda: "Resuming at step" in logs.read_text(encoding="utf-8").split("NeuroShard 0.2.0")[1], 90)
        finally:
            computer.end_node()
            node.kill()
            node.wait()


def steps_of(data: Path) -> int:
    """Steps of the node that runs on the folder; 0 while none answers."""
    from neuroshard.cli.client import connect
    from neuroshard.errors import NeuroShardError

    try:
        return int(connect(data, None).get("/api/status")["training"]["steps"])
    except NeuroShardError:
        return 0
