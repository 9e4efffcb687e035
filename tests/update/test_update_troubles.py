"""What an update leaves when it is interrupted, when nodes do not end or start, and when a service manager fails it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuroshard.config.instance_lock import InstanceLock, read_lock_owner
from tests.worlds.file_servers import HostileServer
from tests.worlds.publishers import ReleasePlace
from tests.worlds.releases import Computer, installed, program, publish, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform == "win32", reason="the stand-in program is a script with a #! line"),
]
UNIT = "neuroshard.service"


@pytest.fixture
def computer(tmp_path: Path) -> Iterator[Computer]:
    """Version 0.1.0 is installed, 0.2.0 published just now."""
    with HostileServer() as server:
        computer = Computer(tmp_path, ReleasePlace(server), installed(tmp_path / "program"))
        publish(computer, "0.2.0")
        yield computer


def test_ctrl_c_during_the_final_checkpoint_has_the_node_start_again(computer: Computer, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with computer.node(GATE=str(gate)):
        command = computer.begin_update("apply", "--yes")
        until((computer.data / "asked-to-stop").exists)
        command.send_signal(signal.SIGINT)
        assert command.stderr is not None
        assert command.stderr.readline() == "The previous version starts the node again.\n"
        gate.touch()
        _, err = command.communicate(timeout=60)
        assert command.returncode == 1
        assert "interrupted" in err
        assert "Version 0.1.0 runs again" in err
        assert [line.split()[0] for line in computer.starts()] == ["0.1.0", "0.1.0"]
        assert read_lock_owner(computer.data) is not None
    assert computer.working_version() == "0.1.0"


def test_a_second_ctrl_c_ends_the_command_and_says_what_is_left(computer: Computer, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with computer.node(GATE=str(gate)):
        command = computer.begin_update("apply", "--yes")
        until((computer.data / "asked-to-stop").exists)
        command.send_signal(signal.SIGINT)
        assert command.stderr is not None
        assert "starts the node again" in command.stderr.readline()
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
        assert command.returncode == 1
        assert "A node still holds the data folder" in err
        gate.touch()
        until(lambda: read_lock_owner(computer.data) is None)
        assert len(computer.starts()) == 1
    assert computer.working_version() == "0.1.0"


def test_a_node_that_does_not_end_in_time_is_told(computer: Computer, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with computer.node(GATE=str(gate)):
        done = computer.update("apply", "--yes", STOP_SECONDS="0.2")
        assert done.returncode == 1
        assert "has not ended within" in done.stderr
        assert "A node still holds the data folder" in done.stderr
        gate.touch()
    assert computer.working_version() == "0.1.0"


def test_when_neither_version_starts_both_reasons_are_told_and_that_nothing_runs(computer: Computer) -> None:
    publish(computer, "0.3.0", program("0.3.0", works=False))
    with computer.node():
        old = computer.installation.program("0.1.0")
        old.unlink()  # the node that runs has the file open
        old.write_text('#!/bin/sh\necho "the old one is broken too"; exit 9\n')
        old.chmod(0o755)
        done = computer.update("apply", "--yes")
    assert done.returncode == 1
    assert "no such thing as this version here" in done.stderr
    assert "the old one is broken too" in done.stderr
    assert "No node runs now" in done.stderr


def test_an_older_version_that_cannot_be_removed_is_told_beside_the_success(computer: Computer) -> None:
    obstacle = computer.installation.folder("0.0.9")
    obstacle.write_text("no folder")
    done = computer.update("apply", "--yes")
    assert done.returncode == 0, done.stderr
    assert "Version 0.2.0 has replaced 0.1.0." in done.stdout
    assert f"Older versions in {obstacle.parent} could not be removed" in done.stdout
    assert computer.working_version() == "0.2.0"


def test_while_the_wizard_is_open_nothing_is_tried(computer: Computer) -> None:
    lock = InstanceLock.acquire(computer.data)
    lock.announce("127.0.0.1", 8000, is_setup=True)
    try:
        done = computer.update("apply", "--yes")
    finally:
        lock.release()
    assert done.returncode == 1
    assert "The wizard is open in the browser" in done.stderr
    assert "Finish it there" in done.stderr
    assert not computer.installation.folder("0.2.0").exists()  # nothing was fetched either
    assert computer.working_version() == "0.1.0"


def service_manager(computer: Computer, tmp_path: Path, start: str) -> dict[str, str]:
    """The environment of a user whose `systemctl --user start` runs these lines of shell; it notes what it is told."""
    folder = tmp_path / "tools"
    folder.mkdir()
    lines = f"""#!/bin/sh
[ "$1" = --user ] && [ "$3" = {UNIT} ] || exit 64
echo "$2" >>{tmp_path}/told
case $2 in
    start) {start} ;;
    is-active) test -e {tmp_path}/active ;;
esac
"""
    (folder / "systemctl").write_text(lines)
    (folder / "systemctl").chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "UNIT": UNIT}


def test_a_service_is_given_back_to_its_manager(computer: Computer, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[2] / "installers/unix/neuroshard", computer.installation.root)
    begin = f"{computer.installation.root}/neuroshard run --data-dir {computer.data} >/dev/null 2>&1 &"
    variables = service_manager(computer, tmp_path, f"touch {tmp_path}/active; MARK=service {begin}")
    with computer.node():
        done = computer.update("apply", "--yes", **variables)
        assert (done.returncode, done.stderr) == (0, "")
        assert "outside its service" not in done.stdout
        assert [(line.split()[0], line.split()[-1]) for line in computer.starts()] == [
            ("0.1.0", "kept"),
            ("0.2.0", "kept"),
            ("0.2.0", "service"),
        ]
        assert read_lock_owner(computer.data) is not None


@pytest.mark.parametrize(
    ("start", "words"),
    [("echo 'Failed to connect to bus' >&2; exit 1", "Failed to connect to bus"), ("true", "does not start")],
    ids=["no bus", "it fails"],
)
def test_a_manager_that_does_not_start_its_service_leaves_a_node(
    computer: Computer, tmp_path: Path, start: str, words: str
) -> None:
    variables = service_manager(computer, tmp_path, start)
    with computer.node():
        done = computer.update("apply", "--yes", **variables)
        assert done.returncode == 0, done.stderr
        assert "The node runs again" in done.stdout
        assert words in done.stdout
        assert f"systemctl --user start {UNIT}" in done.stdout
        assert [line.split()[0] for line in computer.starts()] == ["0.1.0", "0.2.0", "0.2.0"]
        assert read_lock_owner(computer.data) is not None
    assert computer.working_version() == "0.2.0"


def test_a_service_that_nothing_starts_again_is_no_success(computer: Computer, tmp_path: Path) -> None:
    """The manager fails, and the new version was started once and never again."""
    program_file = computer.installation.folder("0.2.0") / "neuroshard"
    broken = f"printf '#!/bin/sh\\necho no more; exit 9\\n' >{program_file}.new; chmod +x {program_file}.new"
    variables = service_manager(computer, tmp_path, f"{broken}; mv {program_file}.new {program_file}; exit 1")
    with computer.node():
        done = computer.update("apply", "--yes", **variables)
    assert done.returncode == 1
    assert "Version 0.2.0 is installed, but its node could not be started again" in done.stderr
    assert "no more" in done.stderr
    assert "No node runs now" in done.stderr
