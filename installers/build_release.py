"""Builds every package of a release around a frozen program, with a list of its components and checksums.

python installers/build_release.py --program dist/neuroshard --out dist/release     (or: make release)

The folder then has the wheel and the source archive, the Debian package, the Linux archives, the Windows installer and
the macOS archive, `neuroshard-VERSION.cdx.json` (a CycloneDX bill of materials) and `SHA256SUMS`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).parent))
from build_deb import ROOT, package_version

HERE = Path(__file__).parent
FROZEN_EXTRAS = ("export", "genesis", "s3", "tray")  # what the frozen program contains
SUMS = "SHA256SUMS"


def build_packages(program: Path, out: Path) -> None:
    """Run every builder. A failure ends the release: no folder is left that looks complete."""
    with_program = ("--program", str(program), "--out", str(out))
    commands = (
        (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(ROOT)),
        (sys.executable, str(HERE / "build_deb.py"), *with_program),
        (sys.executable, str(HERE / "build_tarball.py"), *with_program),
        (sys.executable, str(HERE / "build_payload.py"), "windows", "--out", str(out)),
        (sys.executable, str(HERE / "build_payload.py"), "macos", "--out", str(out)),
    )
    for command in commands:
        subprocess.run(command, check=True, cwd=ROOT)


def components(name: str, extras: Iterable[str]) -> Iterator[dict[str, object]]:
    """Yield every installed package that a package needs, in the order of their names, without the package itself."""
    waiting, found = [(name, frozenset(extras))], dict[str, frozenset[str]]()
    while waiting:
        package, wanted = waiting.pop()
        if package in found and wanted <= found[package]:
            continue
        wanted |= found.get(package, frozenset())
        try:
            installed = distribution(package)
        except PackageNotFoundError:
            raise SystemExit(
                f"{package} is not installed here. Build the release in the environment that built the program."
            ) from None
        found[package] = wanted
        for line in installed.requires or ():
            requirement = Requirement(line)
            if any(requirement.marker is None or requirement.marker.evaluate({"extra": x}) for x in ("", *wanted)):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    for package in sorted(found.keys() - {name}):
        installed = distribution(package)
        version = installed.version.partition("+")[0]  # without the mark of a local build
        licence = installed.metadata.get("License-Expression") or ""
        item: dict[str, object] = {
            "type": "library",
            "bom-ref": f"pkg:pypi/{package}@{version}",
            "name": package,
            "version": version,
            "purl": f"pkg:pypi/{package}@{version}",
        }
        yield item | ({"licenses": [{"expression": licence}]} if licence else {})


def bill_of_materials(version: str, timestamp: str) -> dict[str, object]:
    """CycloneDX document of the program with the packages of this environment."""
    parts = list(components("neuroshard", FROZEN_EXTRAS))
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([version, parts], sort_keys=True))
    program = {"type": "application", "bom-ref": "neuroshard", "name": "neuroshard", "version": version}
    licence = [{"license": {"id": "Apache-2.0"}}]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"timestamp": timestamp, "component": program | {"licenses": licence}},
        "components": parts,
        "dependencies": [{"ref": "neuroshard", "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS of all other files: `sha256sum --check SHA256SUMS` verifies them."""
    lines = list[str]()
    for path in sorted(folder.iterdir()):
        if path.name != SUMS:
            with path.open("rb") as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (folder / SUMS).write_text("".join(lines), encoding="ascii")


def main() -> None:
    """Build the release and print its files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=ROOT / "dist/neuroshard")
    parser.add_argument("--out", type=Path, default=ROOT / "dist/release")
    parser.add_argument("--timestamp", required=True, help="of the release, such as 2026-01-31T12:00:00Z")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if any(arguments.out.iterdir()):
        raise SystemExit(f"{arguments.out} is not empty.")
    version = package_version()
    build_packages(arguments.program, arguments.out)
    bill = json.dumps(bill_of_materials(version, arguments.timestamp), indent=1) + "\n"
    (arguments.out / f"neuroshard-{version}.cdx.json").write_text(bill, encoding="utf-8")
    write_sums(arguments.out)
    for path in sorted(arguments.out.iterdir()):
        print(path)


if __name__ == "__main__":
    main()
