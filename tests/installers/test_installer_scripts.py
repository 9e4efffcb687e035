"""The scripts of the installers: their syntax, the Windows compiler, and a life on a made home folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from installers.frozen_main import restore_library_path
from neuroshard import __version__
from tests.worlds.releases import program, running, script, unpacked_archive

ROOT = Path(__file__).parents[2]
INSTALLERS = ROOT / "installers"
SHELL = [*sorted((INSTALLERS / "unix").iterdir()), INSTALLERS / "linux/prerm", INSTALLERS / "linux/postrm"]


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_shell_scripts_are_plain_and_clean(script: Path) -> None:
    assert script.read_text(encoding="utf-8").startswith("#!/bin/sh\n")
    subprocess.run(["sh", "-n", str(script)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed; sh -n found nothing")
    checked = subprocess.run(["shellcheck", "-s", "sh", str(script)], capture_output=True, text=True, check=False)
    assert checked.stdout == ""


@pytest.mark.skipif(shutil.which("makensis") is None, reason="makensis is not installed")
def test_the_windows_installer_compiles_without_a_warning(tmp_path: Path) -> None:
    payload = tmp_path / "payload"
    payload.mkdir()
    for name in ("LICENSE", "installers/environment/bootstrap.py", "installers/windows/neuroshard.cmd"):
        shutil.copy(ROOT / name, payload)
    for source, out in (
        ("link.nsi", payload / "neuroshard-link.exe"),
        ("neuroshard.nsi", tmp_path / f"NeuroShard-{__version__}-windows-x86_64.exe"),
    ):
        defines = [f"-DVERSION={__version__}", f"-DPAYLOAD={payload}", f"-DOUT={out}"]
        command = ["makensis", "-WX", "-V2", *defines, str(INSTALLERS / "windows" / source)]
        compiled = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (compiled.returncode, compiled.stdout, compiled.stderr) == (0, "", "")
        assert out.read_bytes()[:2] == b"MZ"


def test_the_windows_installer_keeps_to_its_user() -> None:
    script = (INSTALLERS / "windows/neuroshard.nsi").read_text(encoding="utf-8")
    assert "RequestExecutionLevel user" in script
    assert not re.search(r"HKLM|HKCR|RequestExecutionLevel (admin|highest)|SetShellVarContext all", script)
    assert 'Section /o "Start with Windows"' in script  # not chosen by default
    written = set(re.findall(r'WriteReg\w+ HKCU "([^"]+)"', script))
    removed = set(re.findall(r'DeleteRegKey HKCU "([^"]+)"', script))
    assert {key.removesuffix(r"\shell\open\command") for key in written} == removed
    opened = set(re.findall(r"'([^']*%1[^']*)'", script))
    assert opened == {r'"$INSTDIR\neuroshard-link.exe" "%1"'}  # never a batch file: cmd.exe would expand a link
    assert script.count("%1") == script.count(next(iter(opened)))
    assert script.count("!insertmacro STOP_NODE") == 2  # before installing and before uninstalling


def test_a_link_reaches_the_program_on_windows_as_one_argument_after_the_options() -> None:
    """Not run: that needs Windows. A link with a quotation mark, which could end the argument, is refused before."""
    script = (INSTALLERS / "windows/link.nsi").read_text(encoding="utf-8")
    code = "\n".join(line.split(";")[0] for line in script.splitlines() if not line.startswith(";"))
    assert re.findall(r"^ *(Exec\w*) (.*)$", code, re.M) == [
        ("Exec", r"""'"$EXEDIR\versions\$5\Scripts\neuroshard.exe" link -- "$0"'""")
    ]
    assert code.index("${If} $2 == '\"'") < code.index("Exec '")
    assert int(re.findall(r"MOST_CHARACTERS (\d+)", script)[0]) < 1024  # makensis cuts a longer command line
    assert "cmd.exe" not in code


def test_the_windows_installer_asks_only_a_program_that_starts_and_while_it_is_there() -> None:
    script = (INSTALLERS / "windows/neuroshard.nsi").read_text(encoding="utf-8")
    stop = script[script.index("!macro STOP_NODE") : script.index("!macro OFFER_DATA")]
    asked = re.findall(r'neuroshard\.cmd" ([a-z -]+)"', stop)
    assert asked == ["--version", "stop --demo", "stop"]
    assert stop.index("--version") < stop.index("${If} $0 == 0") < stop.index("stop --demo")
    removal = script[script.index('Section "Uninstall"') :]
    steps = ["STOP_NODE", 'cmd" folders', 'cmd" autostart off', r'RMDir /r "$INSTDIR\versions', "OFFER_DATA"]
    assert steps == sorted(steps, key=removal.index)
    for place in (r"$PROFILE\.neuroshard", r"$LOCALAPPDATA\neuroshard"):  # where home_data_dir looks, too
        assert place in removal


def test_what_the_frozen_program_names_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cheap half of `make frozen`: PyInstaller only warns about names that it does not find."""
    told: dict[str, Any] = {}
    hooks = ModuleType("PyInstaller.utils.hooks")
    vars(hooks).update(
        collect_data_files=lambda package: [(str(package_folder(package)), package)],
        collect_submodules=lambda package: [package],
        copy_metadata=lambda package: [(str(package_folder(package)), package)],
    )
    monkeypatch.setitem(sys.modules, "PyInstaller.utils.hooks", hooks)
    monkeypatch.setitem(sys.modules, "components", SimpleNamespace(frozen_notices=lambda *_: []))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def analysis(scripts: list[str], **named: object) -> SimpleNamespace:
        told.update(scripts=scripts, **named)
        return SimpleNamespace(pure=(), scripts=(), binaries=(), datas=())

    names = {name: (lambda *_args, **_named: None) for name in ("PYZ", "EXE", "COLLECT")}
    source = (ROOT / "neuroshard.spec").read_text(encoding="utf-8")
    scope: dict[str, Any] = {"SPECPATH": str(ROOT), "Analysis": analysis, **names}
    exec(compile(source, "neuroshard.spec", "exec"), scope)
    assert all(Path(script).is_file() for script in told["scripts"])
    elsewhere = {"coincurve._cffi_backend"}  # a library, not a module of the package
    assert [name for name in told["hiddenimports"] if name not in elsewhere and find_spec(name) is None] == []
    sources = [Path(source) for source, _place in told["datas"]]
    assert [path for path in sources if not path.exists() and not list(path.parent.glob(path.name))] == []
    assert not set(told["hiddenimports"]) & set(told["excludes"])
    kept = [scope["is_needed"]((f"{name}.dist-info/RECORD",)) for name in ("hypothesis-6.1", "numpy-2.4")]
    assert kept == [False, True]  # of what stays out, the bill of materials must not speak


def test_what_is_imported_by_name_travels_in_the_frozen_program() -> None:
    """PyInstaller sees import statements only; what it misses ends the program on somebody else's desktop."""
    source = (ROOT / "neuroshard.spec").read_text(encoding="utf-8")
    by_name = re.compile(r"""import_module\("([A-Za-z0-9_.]+)"\)""")
    files = sorted((ROOT / "neuroshard").rglob("*.py"))
    imported = {name.split(".")[0] for path in files for name in by_name.findall(path.read_text(encoding="utf-8"))}
    assert {"Xlib", "pynvml", "gguf"} <= imported
    assert [name for name in sorted(imported) if f'"{name}"' not in source] == []


def package_folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"LD_LIBRARY_PATH": "/opt/frozen"}, {}),
        ({"LD_LIBRARY_PATH": "/opt/frozen", "LD_LIBRARY_PATH_ORIG": "/mine"}, {"LD_LIBRARY_PATH": "/mine"}),
        ({"HOME": "/home/me"}, {"HOME": "/home/me"}),
    ],
)
def test_what_the_frozen_program_starts_finds_its_own_libraries(before: dict[str, str], after: dict[str, str]) -> None:
    restore_library_path(before)
    assert before == after


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """The archive for Linux, around a stand-in program, as a user unpacks it."""
    return unpacked_archive(tmp_path, program(__version__))


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the archive for Linux")
def test_the_life_of_the_archive_on_linux(unpacked: Path, tmp_path: Path) -> None:
    home = tmp_path / "a home"  # with a space, as some have
    home.mkdir()
    done = script(unpacked / "install.sh", home)
    assert done.returncode == 0, done.stderr
    launcher = home / ".local/bin/neuroshard"
    told = subprocess.run([str(launcher), "--version"], capture_output=True, text=True, check=True).stdout
    assert told == f"neuroshard {__version__}\n"
    entry = (home / ".local/share/applications/neuroshard.desktop").read_text(encoding="utf-8")
    assert f'Exec="{launcher}"\n' in entry
    handler = (home / ".local/share/applications/neuroshard-link.desktop").read_text(encoding="utf-8")
    assert f'Exec="{launcher}" link -- %u\n' in handler
    assert "MimeType=x-scheme-handler/neuroshard;" in handler
    assert not (home / ".config").exists()  # nothing starts by itself

    data = home / ".local/share/neuroshard"
    with running(launcher, data) as node:
        again = script(unpacked / "install.sh", home)  # the same version once more, over a running node
        assert again.returncode == 0, again.stderr
        assert node.wait(30) == 0
    (data / "wallet-phrase").write_text("precious")
    with running(launcher, data) as node:
        removed = script(home / ".local/lib/neuroshard/uninstall.sh", home)
        assert node.wait(30) == 0  # it was asked to end
    assert removed.returncode == 0, removed.stderr
    assert f"stay in {data}" in removed.stdout  # nobody could be asked
    left = {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file() or path.is_symlink()}
    assert {path for path in left if not path.startswith(".local/share/neuroshard/")} == set()
    assert (data / "wallet-phrase").read_text() == "precious"


@pytest.mark.skipif(sys.platform != "linux", reason="the archive for Linux")
def test_data_go_when_that_is_asked_for(unpacked: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    data = home / ".local/share/neuroshard"
    data.mkdir(parents=True)
    assert script(unpacked / "install.sh", home).returncode == 0
    removed = script(home / ".local/lib/neuroshard/uninstall.sh", home, "--delete-data")
    assert (removed.returncode, data.exists()) == (0, False)
    assert [path for path in home.rglob("*") if path.is_file()] == []


def test_unknown_options_change_nothing(unpacked: Path, tmp_path: Path) -> None:
    done = script(unpacked / "install.sh", tmp_path / "home", "--everything")
    assert (done.returncode, (tmp_path / "home").exists()) == (2, False)
