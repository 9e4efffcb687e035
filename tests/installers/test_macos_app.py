"""The app for links on macOS: the install script with stand-ins for Apple's tools. On macOS itself it was not run."""

from __future__ import annotations

import json
import plistlib
import re
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from installers.build_payload import MACOS_APP, pack_macos
from neuroshard import __version__
from tests.worlds.releases import program, script, unpacked_archive

MACOS = Path(__file__).parents[2] / "installers" / "macos"
TOOLS = {
    "uname": "#!/bin/sh\necho Darwin\n",
    "osacompile": """#!{python}
import plistlib, shutil, sys
from pathlib import Path
app, source = Path(sys.argv[2]), Path(sys.argv[3])
(app / "Contents/Resources").mkdir(parents=True)
shutil.copy(source, app / "Contents/Resources/main.scpt")
(app / "Contents/Info.plist").write_bytes(plistlib.dumps({{"CFBundleIdentifier": "com.apple.ScriptEditor.id.app"}}))
""",
    "plutil": """#!{python}
import json, plistlib, sys
from pathlib import Path
_, replace, key, kind, value, file = sys.argv
assert replace == "-replace"
content = plistlib.loads(Path(file).read_bytes())
content[key] = {{"-string": str, "-bool": "YES".__eq__, "-json": json.loads}}[kind](value)
Path(file).write_bytes(plistlib.dumps(content))
""",
    "codesign": '#!/bin/sh\nfor last; do :; done\ntouch "$last/Contents/signed"\n',
}


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The archive, unpacked where Apple's tools are."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in TOOLS.items():
        (tools / name).write_text(text.format(python=sys.executable) if "{python}" in text else text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    unpacked = unpacked_archive(tmp_path / "archive", program(__version__))
    for file in MACOS_APP:
        shutil.copy(MACOS / file, unpacked)
    return unpacked


def test_the_app_registers_links_and_invitation_files_and_goes_with_the_program(mac: Path, tmp_path: Path) -> None:
    home = tmp_path / "a home"
    home.mkdir()
    for _ in range(2):  # the second time over the first
        done = script(mac / "install.sh", home)
        assert (done.returncode, done.stderr) == (0, "")
    contents = home / "Applications/NeuroShard.app/Contents"
    described = plistlib.loads((contents / "Info.plist").read_bytes())
    assert described["CFBundleIdentifier"] == "ai.neuroshard.app"
    assert [kind["CFBundleURLSchemes"] for kind in described["CFBundleURLTypes"]] == [["neuroshard"]]
    (document,) = described["CFBundleDocumentTypes"]
    assert document["CFBundleTypeExtensions"] == ["neuroshard-invitation"]
    assert (contents / "signed").exists()
    assert script(home / ".local/lib/neuroshard/uninstall.sh", home).returncode == 0
    assert not contents.parent.exists()


def test_an_app_of_the_same_name_that_is_not_ours_stays(mac: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    other = home / "Applications/NeuroShard.app/Contents/Info.plist"
    other.parent.mkdir(parents=True)
    other.write_bytes(plistlib.dumps({"CFBundleIdentifier": "com.example.other"}))
    done = script(mac / "install.sh", home)
    assert done.returncode == 0
    assert "Paste invitations into the page" in done.stderr
    assert script(home / ".local/lib/neuroshard/uninstall.sh", home).returncode == 0
    assert other.exists()


def test_without_apples_tools_the_program_is_installed_all_the_same(mac: Path, tmp_path: Path) -> None:
    (tmp_path / "tools" / "osacompile").write_text("#!/bin/sh\nexit 1\n")
    home = tmp_path / "home"
    home.mkdir()
    done = script(mac / "install.sh", home)
    assert done.returncode == 0
    assert "Paste invitations into the page" in done.stderr
    assert (home / ".local/bin/neuroshard").exists()


def test_a_link_stays_one_word_of_the_command() -> None:
    """Every text from outside is quoted, and comes after the end of the options."""
    source = (MACOS / "neuroshard.applescript").read_text(encoding="utf-8")
    commands = re.findall(r"do shell script (.*)", source)
    assert len(commands) == 2
    for command in commands:
        words = re.sub(r'"[^"]*"', "", command)  # without the fixed parts
        assert all(word.strip().startswith("quoted form of ") for word in words.split("&") if word.strip()), command
    assert '" link -- " & quoted form of theText' in source
    assert {"on run", "on open location theLink", "on open theFiles"} <= set(source.splitlines())


def test_the_archive_contains_the_parts_of_the_app(tmp_path: Path) -> None:
    (tmp_path / "payload").mkdir()
    packed = pack_macos(tmp_path / "payload", tmp_path)
    with tarfile.open(packed) as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert set(MACOS_APP) <= names
    for file in ("url-types.json", "document-types.json"):
        assert json.loads((MACOS / file).read_text(encoding="utf-8"))
