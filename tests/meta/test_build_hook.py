"""The build hook rebuilds the dashboard when, and only when, its sources changed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from source_files import ROOT


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The hook's module; hatchling itself is a build requirement and need not be installed here."""
    interface = SimpleNamespace(BuildHookInterface=object)
    for name in ("hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", interface)  # type: ignore[arg-type]
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def web(tmp_path: Path) -> Path:
    folder = tmp_path / "web"
    (folder / "src").mkdir(parents=True)
    (folder / "package-lock.json").write_text("{}")
    (folder / "src" / "main.ts").write_text("one\ntwo\n")
    return folder


def test_the_hash_follows_the_sources_and_nothing_else(hook: ModuleType, web: Path) -> None:
    first = hook.source_hash(web)
    (web / "node_modules").mkdir()
    (web / "node_modules" / "x.js").write_text("installed")
    (web / "src" / "main.ts").write_bytes(b"one\r\ntwo\r\n")
    assert hook.source_hash(web) == first
    (web / "src" / "main.ts").write_text("three\n")
    assert hook.source_hash(web) != first


def test_an_up_to_date_dashboard_is_left_alone(hook: ModuleType, web: Path, tmp_path: Path) -> None:
    static = tmp_path / "static"
    static.mkdir()
    (static / "index.html").write_text("built")
    (static / hook.LICENCES).write_text("texts")
    (static / hook.HASH_FILE).write_text(hook.source_hash(web))
    said: list[str] = []
    hook.build_dashboard(web, static, said.append)
    assert said == []
    assert (static / "index.html").read_text() == "built"


def test_an_unreachable_registry_is_named(hook: ModuleType, tmp_path: Path) -> None:
    script = "import sys; sys.stderr.write('npm error code ENOTFOUND'); sys.exit(1)"
    with pytest.raises(hook.DashboardBuildError, match="npm registry could not be reached"):
        hook.run([sys.executable, "-c", script], tmp_path, {})


def test_the_bill_of_materials_lists_the_packages_of_the_dashboard(hook: ModuleType, web: Path) -> None:
    packages = {
        "": {"name": "dashboard"},
        "node_modules/@a/shown": {"version": "1.2.3", "license": "MIT"},
        "node_modules/tool": {"version": "9.9.9", "license": "MIT", "dev": True},
    }
    (web / "package-lock.json").write_text(json.dumps({"packages": packages}))
    bill = hook.bill_of_materials(web)
    assert [(one["purl"], one["licenses"]) for one in bill["components"]] == [
        ("pkg:npm/%40a/shown@1.2.3", [{"expression": "MIT"}])
    ]
    assert bill["dependencies"] == [{"ref": "dashboard", "dependsOn": ["pkg:npm/%40a/shown@1.2.3"]}]


def test_missing_sources_are_named(hook: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(hook.DashboardBuildError, match=r"no package-lock\.json"):
        hook.source_hash(tmp_path)


def test_the_licences_of_the_dashboard_are_those_of_its_packages(hook: ModuleType, web: Path) -> None:
    packages = {
        "": {"name": "dashboard"},
        "node_modules/@a/shown": {"version": "1.2.3", "license": "MIT"},
        "node_modules/tool": {"version": "9.9.9", "license": "MIT", "dev": True},
    }
    (web / "package-lock.json").write_text(json.dumps({"packages": packages}))
    folder = web / "node_modules/@a/shown"
    folder.mkdir(parents=True)
    with pytest.raises(hook.DashboardBuildError, match="@a/shown contains no text of its licence"):
        hook.licence_texts(web)
    (folder / "LICENSE.md").write_text("Copyright of A\n")
    assert hook.licence_texts(web) == "@a/shown 1.2.3 MIT\n\nCopyright of A\n"
