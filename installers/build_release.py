"""Builds every package of a release around a frozen program, with a list of its components and checksums.

python installers/build_release.py --program dist/neuroshard --out dist/release     (or: make release)

The folder then has the wheel and the source archive, the Debian package, the Linux archives, the Windows installer and
the macOS archive, `neuroshard-VERSION.cdx.json` (the bill of materials of the program, CycloneDX) and `SHA256SUMS`.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from build_deb import ROOT, package_version
from components import BILL

HERE = Path(__file__).parent
SUMS = "SHA256SUMS"
# With the locked build tools that `make` has installed, not with the newest ones of the package index.
LOCKED = ("--no-deps", "--no-build-isolation")


def build_packages(program: Path, out: Path) -> None:
    """Run every builder. A failure ends the release: no folder is left that looks complete."""
    with_program = ("--program", str(program), "--out", str(out))
    commands = (
        (sys.executable, "-m", "pip", "wheel", *LOCKED, "--quiet", "--wheel-dir", str(out), str(ROOT)),
        (sys.executable, str(HERE / "build_deb.py"), *with_program),
        (sys.executable, str(HERE / "build_tarball.py"), *with_program),
        (sys.executable, str(HERE / "build_payload.py"), "windows", "--out", str(out)),
        (sys.executable, str(HERE / "build_payload.py"), "macos", "--out", str(out)),
    )
    for command in commands:
        subprocess.run(command, check=True, cwd=ROOT)


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
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if any(arguments.out.iterdir()):
        raise SystemExit(f"{arguments.out} is not empty.")
    build_packages(arguments.program, arguments.out)
    shutil.copy(arguments.program / "_internal" / BILL, arguments.out / f"neuroshard-{package_version()}.cdx.json")
    write_sums(arguments.out)
    for path in sorted(arguments.out.iterdir()):
        print(path)


if __name__ == "__main__":
    main()
