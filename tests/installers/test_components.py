"""The packages of others: each is in the bill of materials, and the text of its licence is in the package."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "installers/locks"
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==", re.MULTILINE)


@pytest.fixture
def components(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "installers"), *sys.path])
    return import_module("components")


def files_of_runtime() -> list[Path]:
    """All files of the packages that a program may contain."""
    pins = [pin for lock in ("runtime", "torch") for pin in _PIN.findall((LOCKS / f"{lock}.txt").read_text())]
    files = list[Path]()
    for name in {*pins, "torch"}:
        with suppress(PackageNotFoundError):  # for another system
            files += [Path(str(file.locate())) for file in distribution(name).files or ()]
    return files


def test_each_package_of_the_frozen_program_has_the_text_of_its_licence(components: ModuleType, tmp_path: Path) -> None:
    texts = tmp_path / "licenses.txt"
    texts.write_text("uplot 1.0.0 MIT\n")
    parts = components.python_components(files_of_runtime())
    dashboard = components.dashboard_components(texts=texts)
    components.write_notices(tmp_path, "1.2.3", "2026-01-31T12:00:00Z", [*parts, *dashboard], texts.read_text())
    written = (tmp_path / components.TEXTS).read_text(encoding="utf-8")
    assert [part.name for part in parts if not part.licence or f"\n{part.name} {part.version} " not in written] == []
    assert "Apache License" in written
    assert written.endswith("uplot 1.0.0 MIT\n\n")
    bill = json.loads((tmp_path / components.BILL).read_text(encoding="utf-8"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    names = [one["name"] for one in bill["components"]]
    assert len(names) == len(set(names)) == len(bill["dependencies"][0]["dependsOn"])
    listed = {one["purl"] for one in bill["components"]}
    assert {"pkg:npm/preact", "pkg:pypi/torch", "pkg:pypi/libp2p"} <= {purl.partition("@")[0] for purl in listed}
    assert "typescript" not in names
    assert all(one["licenses"] for one in bill["components"])


def test_what_a_program_contains_is_listed_also_when_nothing_requires_it(components: ModuleType) -> None:
    inside = [Path(pytest.__file__), Path(json.__file__), ROOT / "neuroshard/__init__.py"]
    (part,) = components.python_components(inside)
    assert part.name == "pytest"
    assert "Permission is hereby granted" in part.text


def test_a_package_without_a_text_gets_the_standard_one_of_its_licence(components: ModuleType) -> None:
    (part,) = components.python_components([Path(str(distribution("varint").locate_file("varint.py")))])
    assert part.text.startswith("Copyright (c) ")
    assert "Permission is hereby granted" in part.text
    with pytest.raises(SystemExit, match="contains no text of its licence"):
        components._standard_text("x", "Secret", "x")


def test_a_dashboard_without_texts_is_not_packed(components: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make web"):
        components.dashboard_components(texts=tmp_path / "missing")


def test_python_itself_and_the_libraries_of_the_system_are_named(components: ModuleType, tmp_path: Path) -> None:
    assert "PYTHON SOFTWARE FOUNDATION" in components.interpreter().text.upper()
    if not Path("/usr/bin/dpkg").exists():
        assert components.system_libraries([tmp_path]) == []
        return
    (owner,) = components.system_libraries([Path("/usr/bin/dpkg")])
    assert (owner.name, owner.purl) == ("dpkg", f"pkg:deb/debian/dpkg@{owner.version}")
    with pytest.raises(SystemExit, match="belongs to no Debian package"):
        components.system_libraries([tmp_path / "libmine.so"])


def test_a_library_is_found_in_the_folder_that_its_package_names(components: ModuleType) -> None:
    """Debian packages name /lib, which is a link to /usr/lib."""
    library = next(Path("/usr/lib").glob("*/libz.so.1"), None)
    if library is None or not Path("/usr/bin/dpkg").exists():
        pytest.skip("this is no Debian")
    (owner,) = components.system_libraries([library])
    assert owner.name == "zlib1g"
    assert owner.text


def test_a_payload_lists_what_its_locks_install(components: ModuleType) -> None:
    lock = (ROOT / "installers/locks/windows.txt").read_text(encoding="utf-8")
    parts = components.locked_components(lock, lock)
    assert len(parts) == lock.count("==")
    assert {"torch", "tuf", "libp2p"} <= {part.name for part in parts}


def test_the_payload_has_the_licence_of_uv(
    components: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = import_module("build_payload")
    (tmp_path / "licenses.txt").write_text("uplot 1.0.0 MIT\n")
    monkeypatch.setattr(payload, "DASHBOARD_TEXTS", tmp_path / "licenses.txt")
    monkeypatch.setattr(payload, "dashboard_components", list)
    (tmp_path / "lock.txt").write_text("torch==2.13.0 \\\n    --hash=sha256:00\n")
    payload.write_payload_notices(tmp_path, "The licence of uv")
    assert "The licence of uv" in (tmp_path / components.TEXTS).read_text(encoding="utf-8")
    names = {one["name"] for one in json.loads((tmp_path / components.BILL).read_text())["components"]}
    assert names == {"torch", "uv"}
