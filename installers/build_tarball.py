"""Builds two archives of a program folder: the Linux installer, and the archive that `neuroshard update` downloads.

python installers/build_tarball.py --program dist/neuroshard
"""

from __future__ import annotations

import argparse
import io
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from build_deb import ICON, ROOT, package_version

from neuroshard.update.checking import platform_name

HERE = Path(__file__).parent
SCRIPTS = ("neuroshard", "install.sh", "uninstall.sh")


def build_installer(program: Path, out: Path) -> Path:
    """`neuroshard-VERSION-linux-x86_64.tar.gz`: the program and its install scripts."""
    version = package_version()
    name = f"neuroshard-{version}-{platform_name()}"
    target = out / f"{name}.tar.gz"
    with tarfile.open(target, "w:gz", compresslevel=6) as archive:
        archive.add(program, f"{name}/program", filter=as_root)
        add_scripts(archive, name)
        for entry in ("neuroshard.desktop", "neuroshard-link.desktop", "neuroshard.xml"):
            archive.add(HERE / "linux" / entry, f"{name}/{entry}", filter=as_root)
        archive.add(ICON, f"{name}/neuroshard.svg", filter=as_root)
    return target


def add_scripts(archive: tarfile.TarFile, name: str) -> None:
    """Add the install scripts for Linux and macOS."""
    for script in SCRIPTS:
        archive.add(HERE / "unix" / script, f"{name}/{script}", filter=_executable)
    archive.add(ROOT / "LICENSE", f"{name}/LICENSE", filter=as_root)
    text = f"{package_version()}\n".encode()
    member = tarfile.TarInfo(f"{name}/VERSION")
    member.size = len(text)
    archive.addfile(member, io.BytesIO(text))


def build_artefact(program: Path, out: Path) -> Path:
    """`neuroshard-VERSION-linux-x86_64.update.tar.gz`: the program alone, for `neuroshard update`."""
    target = out / f"neuroshard-{package_version()}-{platform_name()}.update.tar.gz"
    with tarfile.open(target, "w:gz", compresslevel=6) as archive:
        for path in sorted(program.iterdir()):
            archive.add(path, path.name, filter=as_root)
    return target


def as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Replace the names of this computer's users by root."""
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _executable(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mode = 0o755
    return as_root(member)


def main() -> None:
    """Build both and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", type=Path, default=ROOT / "dist/neuroshard")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(build_installer(arguments.program, arguments.out))
    print(build_artefact(arguments.program, arguments.out))


if __name__ == "__main__":
    main()
