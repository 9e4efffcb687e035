"""The locks: every dependency is in them at a version that pyproject.toml allows, and every entry has hashes."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "installers/locks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EVERYWHERE = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.12"}


def entries(name: str) -> list[str]:
    """The entries of a lock, each with its hashes."""
    text = (LOCKS / name).read_text(encoding="utf-8")
    return [entry for entry in re.split(r"^(?=\S)", text, flags=re.MULTILINE) if "==" in entry]


def needed(*extras: str) -> Iterator[Requirement]:
    """The requirements of the package with these extras, and of the extras that they name."""
    project = PROJECT["project"]
    lines = [*project["dependencies"], *(line for one in extras for line in project["optional-dependencies"][one])]
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == "neuroshard":
            yield from needed(*requirement.extras)
        elif requirement.marker is None or requirement.marker.evaluate(EVERYWHERE):
            yield requirement


def pins(*names: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for entry in (entry for name in names for entry in entries(name)):
        pin = re.match(r"([A-Za-z0-9._-]+)==([^ ;\\]+)", entry)
        assert pin is not None, entry
        found.setdefault(canonicalize_name(pin[1]), set()).add(pin[2])
    return found


@pytest.mark.parametrize("name", sorted(path.name for path in LOCKS.glob("*.txt")))
def test_every_entry_has_a_version_and_hashes(name: str) -> None:
    for entry in entries(name):
        head, *hashes = re.split(r" \\\n\s+", entry.strip())
        assert re.match(r"[A-Za-z0-9._-]+==[0-9][^ ;]*( ; .+)?$", head), head
        assert hashes, head
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), head


@pytest.mark.parametrize(
    ("locks", "extras"),
    [
        (("runtime.txt", "torch.txt"), ()),
        (("development.txt", "torch.txt"), ("dev", "installers")),
        (("windows.txt",), ("export", "tray")),
        (("macos.txt",), ("export", "tray")),
    ],
)
def test_a_lock_has_every_dependency(locks: tuple[str, ...], extras: tuple[str, ...]) -> None:
    found = pins(*locks)
    is_unix = "windows.txt" not in locks and "macos.txt" not in locks
    for requirement in needed(*extras):
        if is_unix or "sys_platform" not in str(requirement.marker):
            versions = found.get(canonicalize_name(requirement.name), set())
            assert versions, f"{requirement.name} is in none of {locks}: python installers/make_locks.py"
            assert all(requirement.specifier.contains(version) for version in versions), requirement


def test_what_builds_the_package_is_locked() -> None:
    found = pins("make-build.txt")
    for requirement in map(Requirement, PROJECT["build-system"]["requires"]):
        assert all(requirement.specifier.contains(version) for version in found[canonicalize_name(requirement.name)])


@pytest.mark.parametrize(
    ("builder", "arguments"), [("build_release", ["--program", "x"]), ("build_payload", ["macos"])]
)
def test_wheels_are_built_with_the_locked_tools(
    builder: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without this option pip downloads the newest tools that the project allows, without a hash."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "installers"), *sys.path])
    monkeypatch.setattr(sys, "argv", [builder, *arguments, "--out", str(tmp_path)])
    commands = list[tuple[str, ...]]()

    class NothingRunsError(Exception):
        pass

    def run(command: Sequence[str], **_: object) -> None:
        commands.append(tuple(command))
        raise NothingRunsError

    module = import_module(builder)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(NothingRunsError):
        module.main()
    (command,) = commands
    assert "wheel" in command
    assert "--no-build-isolation" in command


def test_users_and_developers_get_the_same_versions() -> None:
    users, developers = pins("runtime.txt"), pins("development.txt")
    assert {name: versions for name, versions in users.items() if not versions <= developers[name]} == {}
    assert not {"torch", "triton", "nvidia-cublas"} & developers.keys()  # install_locked.py chooses the build
