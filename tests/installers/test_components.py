"""The packages of others: each is in the bill of materials, and the text of its licence is in the package."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def components(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "installers"), *sys.path])
    return import_module("components")


def test_each_package_of_the_frozen_program_has_the_text_of_its_licence(components: ModuleType, tmp_path: Path) -> None:
    texts = tmp_path / "licenses.txt"
    texts.write_text("uplot 1.0.0 MIT\n")
    parts = components.python_components("neuroshard", components.FROZEN_EXTRAS)
    dashboard = components.dashboard_components(texts=texts)
    components.write_notices(tmp_path, "1.2.3", "2026-01-31T12:00:00Z", [*parts, *dashboard], texts.read_text())
    written = (tmp_path / components.TEXTS).read_text(encoding="utf-8")
    assert [part.name for part in parts if not part.licence or f"\n{part.name} {part.version} " not in written] == []
    assert "Apache License" in written
    assert written.endswith("uplot 1.0.0 MIT\n\n")
    bill = json.loads((tmp_path / components.BILL).read_text(encoding="utf-8"))
    listed = {one["purl"] for one in bill["components"]}
    assert {"pkg:npm/preact", "pkg:pypi/torch", "pkg:pypi/libp2p"} <= {purl.partition("@")[0] for purl in listed}
    assert "typescript" not in {one["name"] for one in bill["components"]}
    assert all(one["licenses"] for one in bill["components"])


def test_a_package_without_a_text_gets_the_standard_one_of_its_licence(components: ModuleType) -> None:
    (part,) = [part for part in components.python_components("neuroshard", ()) if part.name == "varint"]
    assert part.text.startswith("Copyright (c) ")
    assert "Permission is hereby granted" in part.text
    with pytest.raises(SystemExit, match="contains no text of its licence"):
        components._standard_text("x", "Secret", "x")


def test_a_dashboard_without_texts_is_not_packed(components: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make web"):
        components.dashboard_components(texts=tmp_path / "missing")


def test_python_itself_and_the_libraries_of_the_system_are_named(components: ModuleType, tmp_path: Path) -> None:
    assert "PYTHON SOFTWARE FOUNDATION" in components.interpreter().text.upper()
    dpkg = tmp_path / "dpkg"
    assert components.system_libraries([dpkg]) == []  # no package owns it
    if not Path("/usr/bin/dpkg").exists():
        return
    (owner,) = components.system_libraries([Path("/usr/bin/dpkg")])
    assert (owner.name, owner.purl) == ("dpkg", f"pkg:deb/debian/dpkg@{owner.version}")


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
