"""The components of a package: a bill of materials (CycloneDX) and the texts of their licences, for every package.

The frozen program (Debian package, Linux archives) gets both from neuroshard.spec, the payloads of Windows and macOS
from build_payload.py, and the dashboard in the wheel from hatch_build.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
STANDARD_TEXTS = ROOT / "installers/licences"
DASHBOARD_TEXTS = ROOT / "neuroshard/api/static/licenses.txt"  # written by hatch_build.py
BILL, TEXTS = "neuroshard.cdx.json", "THIRD-PARTY-LICENSES.txt"
_LICENCE_FILE = re.compile(r"\.dist-info/(licen[cs]es?/|licen[cs]e|copying|notice|authors)", re.IGNORECASE)
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)


@dataclass(frozen=True)
class Component:
    """A package of others inside of ours."""

    name: str
    version: str
    purl: str
    licence: str = ""  # as the package states it
    text: str = ""  # of all its licence files

    def described(self) -> dict[str, object]:
        """The component in CycloneDX."""
        item = {"type": "library", "bom-ref": self.purl, "name": self.name, "version": self.version, "purl": self.purl}
        is_expression = re.fullmatch(r"[A-Za-z0-9.+()-]+( (AND|OR|WITH) [A-Za-z0-9.+()-]+)*", self.licence) is not None
        stated = {"expression": self.licence} if is_expression else {"license": {"name": self.licence}}
        return item | ({"licenses": [stated]} if self.licence else {})


def python_components(files: Iterable[Path]) -> list[Component]:
    """The installed packages that own these files, in the order of their names, without our own."""
    wanted = {os.path.realpath(path) for path in files}
    found = dict[str, Distribution]()
    for installed in distributions():
        name = canonicalize_name(installed.metadata["Name"])
        if name != "neuroshard" and any(os.path.realpath(file.locate()) in wanted for file in installed.files or ()):
            found[name] = installed
    return [_component(package, installed) for package, installed in sorted(found.items())]


def _component(package: str, installed: Distribution) -> Component:
    version = installed.version.partition("+")[0]  # without the mark of a local build
    metadata: Any = installed.metadata
    stated = metadata.get("License-Expression") or (metadata.get("License") or "").split("\n")[0]
    classified = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier") or () if "License ::" in line]
    licence = (stated or ", ".join(classified)).strip()[:100]
    files = [path for path in installed.files or () if _LICENCE_FILE.search(path.as_posix())]
    texts = [path.read_text(encoding="utf-8") for path in files if Path(str(path.locate())).is_file()]
    text = "\n\n".join(text.strip() for text in texts)
    if not text:
        text = _standard_text(package, licence, metadata.get("Author") or f"the authors of {package}")
    return Component(package, version, f"pkg:pypi/{package}@{version}", licence, text)


def _standard_text(package: str, licence: str, author: str) -> str:
    """The text of a licence that a package names without containing it. Raises SystemExit for another licence."""
    for path in (STANDARD_TEXTS / "MIT.txt", STANDARD_TEXTS / "BSD.txt"):
        if path.stem in licence:
            return f"Copyright (c) {author}\n\n{path.read_text(encoding='utf-8').strip()}"
    raise SystemExit(
        f"{package} contains no text of its licence ({licence or 'not stated'}). Add it to {STANDARD_TEXTS}."
    )


def dashboard_components(web: Path = ROOT / "web", texts: Path = DASHBOARD_TEXTS) -> list[Component]:
    """The packages in the built dashboard. Their texts are in one file. Raises SystemExit if it was not built."""
    if not texts.is_file():
        raise SystemExit("The dashboard has no licence texts. Build it: make web")
    packages = json.loads((web / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    shipped = {path.removeprefix("node_modules/"): one for path, one in packages.items() if path and not one.get("dev")}
    return [
        Component(name, one["version"], f"pkg:npm/{name}@{one['version']}", one["license"].strip("()"), "")
        for name, one in sorted(shipped.items())
    ]


def locked_components(*locks: str) -> list[Component]:
    """The packages of lock files, which are installed with their own licence texts."""
    pins = sorted({pin for lock in locks for pin in _PIN.findall(lock)})
    return [Component(name, version, f"pkg:pypi/{name}@{version}") for name, version in pins]


def interpreter() -> Component:
    """Python itself, which a frozen program contains. Raises SystemExit without its licence."""
    version = ".".join(map(str, sys.version_info[:3]))
    numbers = f"python{sys.version_info.major}.{sys.version_info.minor}"
    standard_library = Path(sysconfig.get_paths()["stdlib"])
    for path in (standard_library / "LICENSE.txt", Path(f"/usr/share/doc/{numbers}/copyright")):
        if path.is_file():
            text = path.read_text(encoding="utf-8").strip()
            return Component("python", version, f"pkg:generic/python@{version}", "PSF-2.0", text)
    raise SystemExit("The licence of this Python was not found.")


def system_libraries(paths: Iterable[Path]) -> list[Component]:
    """The Debian packages that own these files, such as OpenSSL next to Python. Empty on other systems.

    Raises SystemExit for a file without an owner: its licence would be missing.
    """
    if shutil.which("dpkg") is None:
        return []
    return [_debian_component(package) for package in sorted({_owner(path.resolve()) for path in paths})]


def _owner(path: Path) -> str:
    """The package of a file. /lib is a link to /usr/lib, and packages may name either."""
    places = (str(path), str(path).removeprefix("/usr"))
    asked = subprocess.run(["dpkg", "--search", *places], capture_output=True, text=True, check=False)
    package = asked.stdout.partition(":")[0]
    if not package:
        raise SystemExit(f"{path} belongs to no Debian package, so its licence is not known. Install it with apt-get.")
    return package


def _debian_component(package: str) -> Component:
    shown = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Version}\n", package], capture_output=True, text=True, check=True
    )
    version, notice = shown.stdout.split("\n")[0], Path(f"/usr/share/doc/{package}/copyright")
    if not notice.is_file():
        raise SystemExit(f"{notice} is missing. Install {package} again, with its documentation.")
    text = notice.read_text(encoding="utf-8", errors="replace").strip()
    return Component(package, version, f"pkg:deb/debian/{package}@{version}", "", text)


def bill_of_materials(version: str, timestamp: str, parts: list[Component]) -> dict[str, object]:
    """The CycloneDX document of the program with these components."""
    described = [part.described() for part in parts]
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([version, described], sort_keys=True))
    program = {"type": "application", "bom-ref": "neuroshard", "name": "neuroshard", "version": version}
    licence = [{"license": {"id": "Apache-2.0"}}]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"timestamp": timestamp, "component": program | {"licenses": licence}},
        "components": described,
        "dependencies": [{"ref": "neuroshard", "dependsOn": [part.purl for part in parts]}],
    }


def licence_texts(parts: Iterable[Component], dashboard: str = "") -> str:
    """One text with all licences."""
    return "".join(_sections(parts)) + (f"{'=' * 80}\nPackages in the dashboard\n\n{dashboard}\n" if dashboard else "")


def _sections(parts: Iterable[Component]) -> Iterator[str]:
    yield "NeuroShard contains these packages of others, under their own licences.\n\n"
    for part in parts:
        if part.text:
            yield f"{'=' * 80}\n{part.name} {part.version} {part.licence}\n\n{part.text}\n\n"


def write_notices(folder: Path, version: str, timestamp: str, parts: list[Component], dashboard: str = "") -> None:
    """Write the bill of materials and the licence texts into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    bill = json.dumps(bill_of_materials(version, timestamp, parts), indent=1) + "\n"
    (folder / BILL).write_text(bill, encoding="utf-8")
    (folder / TEXTS).write_text(licence_texts(parts, dashboard), encoding="utf-8")


def frozen_notices(folder: Path, files: Iterable[Path], binaries: Iterable[Path]) -> list[Path]:
    """Write the notices of the frozen program, which contains these files, some of them native libraries.

    Returns their paths.
    """
    inside = [Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
    if inside[-1] == Path("/usr"):  # Debian's own Python: its libraries belong to packages, too
        inside.pop()
    system = [path for path in binaries if not any(path.resolve().is_relative_to(place) for place in inside)]
    parts = [interpreter(), *python_components(files), *system_libraries(system)]
    dashboard = dashboard_components()
    texts = DASHBOARD_TEXTS.read_text(encoding="utf-8")
    timestamp = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())), UTC)
    write_notices(
        folder, distribution("neuroshard").version, f"{timestamp:%Y-%m-%dT%H:%M:%SZ}", [*parts, *dashboard], texts
    )
    return [folder / BILL, folder / TEXTS]
