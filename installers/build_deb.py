"""Builds the Debian package around a program folder: `python installers/build_deb.py --program dist/neuroshard`."""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from neuroshard.host.autostart import systemd_unit

HERE = Path(__file__).parent
ROOT = HERE.parent
ICON = ROOT / "web/public/favicon.svg"
LIBRARY = "usr/lib/neuroshard"
UNIT = "usr/lib/systemd/user/neuroshard.service"
# Files other than the program: (source, place, mode).
FILES = (
    (HERE / "linux/neuroshard.desktop", "usr/share/applications/neuroshard.desktop", 0o644),
    (HERE / "linux/neuroshard-link.desktop", "usr/share/applications/neuroshard-link.desktop", 0o644),
    (HERE / "linux/neuroshard.xml", "usr/share/mime/packages/neuroshard.xml", 0o644),
    (ICON, "usr/share/icons/hicolor/scalable/apps/neuroshard.svg", 0o644),
    (HERE / "linux/prerm", "DEBIAN/prerm", 0o755),
    (HERE / "linux/postrm", "DEBIAN/postrm", 0o755),
)
COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: NeuroShard

Files: *
Copyright: The NeuroShard contributors
License: Apache-2.0
 On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.
 Bundled libraries have their own licences: THIRD-PARTY-LICENSES.txt in
 /usr/lib/neuroshard/_internal. neuroshard.cdx.json there lists them all.
"""
DESCRIPTION = """Train one language model together with other computers
 Ordinary computers pre-train one language model together. The program runs in
 the background. Its dashboard at http://localhost:8000 shows whether the model
 improves.
 .
 The package contains Python and PyTorch's CPU build. For an NVIDIA GPU, install
 NeuroShard with pip. It starts by itself only if you choose that."""


def package_version() -> str:
    """The version of the sources."""
    text = (ROOT / "neuroshard/__init__.py").read_text(encoding="utf-8")
    match = re.search(r'__version__ = "([^"]+)"', text)
    if match is None:
        raise SystemExit("neuroshard/__init__.py contains no version.")
    return match[1]


def architecture() -> str:
    """Debian's name of this computer's architecture."""
    return subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()


def control(program: Path, version: str) -> str:
    """The control file. A program for another C library than the one it was built with may not start."""
    size = sum(path.lstat().st_size for path in program.rglob("*")) // 1024
    libc = (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 2.36").split()[1]
    fields = {
        "Package": "neuroshard",
        "Version": version,
        "Architecture": architecture(),
        "Maintainer": "NeuroShard contributors <contributors@neuroshard.invalid>",
        "Installed-Size": str(size),
        "Depends": f"libc6 (>= {libc})",
        "Section": "science",
        "Priority": "optional",
        "Description": DESCRIPTION,
    }
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


def fill(folder: Path, program: Path, version: str) -> None:
    """Lay out the package's tree."""
    shutil.copytree(program, folder / LIBRARY, symlinks=True)
    (folder / "usr/bin").mkdir(parents=True)
    (folder / "usr/bin/neuroshard").symlink_to("../lib/neuroshard/neuroshard")
    for source, place, mode in FILES:
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(mode)
    unit = folder / UNIT
    unit.parent.mkdir(parents=True)
    unit.write_text(systemd_unit(("/usr/bin/neuroshard", "--headless")), encoding="utf-8")
    unit.chmod(0o644)
    (folder / "DEBIAN/control").write_text(control(program, version), encoding="utf-8")
    documents = folder / "usr/share/doc/neuroshard"
    documents.mkdir(parents=True)
    (documents / "copyright").write_text(COPYRIGHT, encoding="utf-8")
    (documents / "changelog.gz").write_bytes(gzip.compress((ROOT / "CHANGELOG.md").read_bytes(), mtime=0))
    manual = folder / "usr/share/man/man1/neuroshard.1.gz"
    manual.parent.mkdir(parents=True)
    manual.write_bytes(gzip.compress((HERE / "linux/neuroshard.1").read_bytes(), mtime=0))
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)


def build(program: Path, out: Path, *, compression: str = "zstd") -> Path:
    """The package file in `out`. Raises SystemExit when the program is not there."""
    if not os.access(program / "neuroshard", os.X_OK):
        raise SystemExit(
            f"{program} does not contain the program. Build it with `make frozen`, or name another --program."
        )
    version = package_version()
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"neuroshard_{version}_{architecture()}.deb"
    with tempfile.TemporaryDirectory(prefix="neuroshard-deb-", dir=out) as folder:
        tree = Path(folder) / "tree"
        tree.mkdir(mode=0o755)
        fill(tree, program.resolve(), version)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(int(datetime(2026, 1, 1, tzinfo=UTC).timestamp()))}
        command = ["dpkg-deb", "--root-owner-group", f"-Z{compression}", "--build", str(tree), str(target)]
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    return target


def main() -> None:
    """Build and print the path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", type=Path, default=ROOT / "dist/neuroshard")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    print(build(arguments.program, arguments.out))


if __name__ == "__main__":
    main()
