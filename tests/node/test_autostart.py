"""Starting with the computer: what is written for each system, in a home folder, and that nothing of it stays."""

from __future__ import annotations

import configparser
import plistlib
import shlex
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.config.loading import load_settings
from neuroshard.errors import StorageError, TokenError, UsageError
from neuroshard.host.autostart import (
    RUN_VALUE,
    Place,
    RunKeyPlace,
    desktop_entry,
    launch_agent,
    places_here,
    program_of_agent,
    program_of_entry,
    program_of_run_key,
    program_of_unit,
    read_autostart,
    run_key_value,
    start_command,
    systemd_unit,
    turn_off,
    turn_on,
)

AWKWARD = ("/opt/my programs/neuroshard", "--data-dir", '/mnt/100% "big" $HOME \\disk', "--headless")
TOKEN = "correct horse battery staple"


@pytest.fixture
def runtime(tmp_path: Path) -> dict[str, str]:
    """Environment of a user whom systemd serves. The socket is all that tells."""
    folder = tmp_path / "run" / "systemd"
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "private"))
    return {"XDG_RUNTIME_DIR": str(tmp_path / "run")}


def files(home: Path) -> list[str]:
    return [path.relative_to(home).as_posix() for path in sorted(home.rglob("*")) if not path.is_dir()]


def test_the_unit_gives_every_argument_as_it_was(tmp_path: Path) -> None:
    """systemd itself reads the file: it complains about what it does not understand."""
    unit = tmp_path / "neuroshard.service"
    program = shutil.which("true")
    assert program
    text = systemd_unit((program, *AWKWARD[1:]))
    line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    read = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line.removeprefix("ExecStart="))]
    assert read == [program, *AWKWARD[1:]]
    unit.write_text(text, encoding="utf-8")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd on this computer: its own reading of the unit is not tested")
    looked = subprocess.run(
        ["systemd-analyze", "--man=no", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert [told for told in looked.stderr.splitlines() if "neuroshard" in told] == []


def test_a_desktop_entry_quotes_twice() -> None:
    parser = configparser.RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(desktop_entry(AWKWARD))
    entry = parser["Desktop Entry"]
    value = entry["Exec"].replace("\\\\", "\\")  # the file's own escapes come first
    shell = f"for word in {value}; do printf '%s\\n' \"$word\"; done"  # which quotes by the same rules
    read = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=20, check=True).stdout
    assert [word.replace("%%", "%") for word in read.splitlines()] == list(AWKWARD)
    assert (entry["Type"], entry["Terminal"]) == ("Application", "false")


def test_a_launch_agent_holds_the_command_as_it_is() -> None:
    agent = plistlib.loads(launch_agent(AWKWARD))
    assert agent["ProgramArguments"] == list(AWKWARD)
    assert agent["RunAtLoad"] is True
    assert agent["KeepAlive"] == {"Crashed": True}  # who stops the node has stopped it


@dataclass
class Values:
    """Values of a registry key."""

    values: dict[str, str] = field(default_factory=dict[str, str])

    def get(self, name: str) -> str | None:
        return self.values.get(name)

    def set(self, name: str, value: str) -> None:
        self.values[name] = value

    def delete(self, name: str) -> None:
        self.values.pop(name, None)


def test_the_run_key_holds_a_command_line_of_windows() -> None:
    values = Values({"Another": "other.exe"})
    place = RunKeyPlace(values)
    command = (r"C:\Program Files\NeuroShard\neuroshard.exe", "--headless", "--data-dir", r"D:\big disk")
    assert turn_on([place], command).is_on
    expected = r'"C:\Program Files\NeuroShard\neuroshard.exe" --headless --data-dir "D:\big disk"'
    assert values.values == {"Another": "other.exe", RUN_VALUE: expected}
    assert read_autostart([place]).content == run_key_value(command)
    assert not turn_off([place]).is_on
    assert values.values == {"Another": "other.exe"}
    with pytest.raises(UsageError, match="at most 260 characters"):
        turn_on([place], (*command, "x" * 260))
    assert values.values == {"Another": "other.exe"}


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("darwin", ["Library/LaunchAgents/ai.neuroshard.node.plist"]),
        ("linux", [".config/autostart/neuroshard.desktop"]),
    ],
)
def test_on_and_off_in_a_home_folder(tmp_path: Path, platform: str, expected: list[str]) -> None:
    home = tmp_path / "home"
    places = places_here(platform, home, {})
    assert not read_autostart(places).is_on
    assert turn_on(places, AWKWARD).path == str(home / expected[0])
    turn_on(places, AWKWARD)  # a second time changes nothing
    assert files(home) == expected
    assert not turn_off(places).is_on
    turn_off(places)
    assert files(home) == []


def test_systemd_is_preferred_and_nothing_starts_twice(tmp_path: Path, runtime: dict[str, str]) -> None:
    home = tmp_path / "home"
    turn_on(places_here("linux", home, {}), AWKWARD)
    with_systemd = places_here("linux", home, runtime)
    assert read_autostart(with_systemd).kind == "desktop autostart entry"
    on = turn_on(with_systemd, AWKWARD)
    unit = home / ".config/systemd/user/neuroshard.service"
    link = unit.parent / "default.target.wants/neuroshard.service"
    assert (on.kind, on.path, link.resolve()) == ("systemd user unit", str(unit), unit)
    assert files(home) == [
        ".config/systemd/user/default.target.wants/neuroshard.service",
        ".config/systemd/user/neuroshard.service",
    ]
    turn_off(places_here("linux", home, {}))  # in a session without systemd
    assert files(home) == []
    assert not link.parent.exists()


def test_a_runtime_folder_that_nobody_may_look_at_is_none(tmp_path: Path) -> None:
    first, _ = places_here("linux", tmp_path, {"XDG_RUNTIME_DIR": "/" + "a" * 5_000})
    assert first.kind == "desktop autostart entry"


def test_the_unit_of_a_package_that_was_switched_on_is_seen_and_switched_off(
    tmp_path: Path, runtime: dict[str, str]
) -> None:
    packaged = tmp_path / "usr/neuroshard.service"
    packaged.parent.mkdir()
    packaged.write_text(systemd_unit(("/bin/sh", "--headless")))
    places = places_here("linux", tmp_path / "home", runtime)
    link = tmp_path / "home/.config/systemd/user/default.target.wants/neuroshard.service"
    link.parent.mkdir(parents=True)
    link.symlink_to(packaged)
    found = read_autostart(places)
    assert (found.is_on, found.path, found.missing) == (True, str(link), None)
    assert not turn_off(places).is_on
    assert packaged.exists()
    assert not link.is_symlink()


NAMES = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1).map(
    lambda name: f"/opt/{name.strip()}x"
)


@given(NAMES)
def test_the_program_of_every_text_is_found_again(program: str) -> None:
    command = (program, "--headless", 'a "b" %h $HOME')
    assert program_of_unit(systemd_unit(command), "/home/me") == program
    assert program_of_entry(desktop_entry(command)) == program
    assert program_of_agent(launch_agent(command).decode()) == program
    if '"' not in program:
        assert program_of_run_key(run_key_value(command)) == program


@given(st.text())
def test_what_an_owner_wrote_by_hand_is_read_or_not(text: str) -> None:
    for content in (text, f"ExecStart={text}", f"Exec={text}", f'ExecStart="{text}'):
        for read in (lambda told: program_of_unit(told, "/home/me"), program_of_entry, program_of_agent):
            assert read(content) != ""
        program_of_run_key(content)


def test_a_unit_by_hand() -> None:
    text = "ExecStart=-%h/.venv/bin/neuroshard --headless --token-file %h/token\n"
    assert program_of_unit(text, "/home/me") == "/home/me/.venv/bin/neuroshard"
    assert program_of_unit("ExecStart=%i --headless\n", "/home/me") is None


def test_other_links_in_the_folder_stay(tmp_path: Path, runtime: dict[str, str]) -> None:
    places = places_here("linux", tmp_path / "home", runtime)
    turn_on(places, AWKWARD)
    other = tmp_path / "home/.config/systemd/user/default.target.wants/other.service"
    other.symlink_to("/nonexistent/other.service")
    turn_off(places)
    assert other.is_symlink()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / ".config").write_text("a file where a folder should be")
    places: tuple[Place, ...] = places_here("linux", tmp_path, {})
    with pytest.raises(StorageError, match="cannot be written"):
        places[0].write(AWKWARD)


def test_an_unknown_system_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sunos"):
        places_here("sunos", tmp_path, {})


def test_no_secret_stands_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    given = load_settings({"token_file": file, "data_dir": tmp_path}, {})
    assert start_command(given)[-5:] == ("--headless", "--data-dir", str(tmp_path), "--token-file", str(file))
    (tmp_path / "config.toml").write_text('token_file = "token"\n')
    stored = start_command(load_settings({"data_dir": tmp_path}, {}))
    assert stored[-3:] == ("--headless", "--data-dir", str(tmp_path))
    for loaded in (
        load_settings({"data_dir": tmp_path / "new"}, {"NEUROSHARD_TOKEN": TOKEN}),
        load_settings({"data_dir": tmp_path}, {"NEUROSHARD_TOKEN": TOKEN}),
        load_settings({"data_dir": tmp_path / "new"}, {}),
    ):
        with pytest.raises(TokenError, match="token in a file"):
            start_command(loaded)
