"""Builds the installers for Windows and macOS: a payload (wheel, locks, uv) that makes an environment on the computer.

python installers/build_payload.py windows      NeuroShard-VERSION-windows-x86_64.exe, by makensis
python installers/build_payload.py macos        neuroshard-VERSION-darwin-arm64.tar.gz
Both also build VERSION-PLATFORM.update.tar.gz, which `neuroshard update` downloads.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from build_deb import ROOT, package_version
from build_tarball import add_scripts, as_root
from components import DASHBOARD_TEXTS, dashboard_components, locked_components, write_notices

HERE = Path(__file__).parent
LOCKS = HERE / "locks"
# platform: (tag of uv's wheel, uv in it, launcher, name in archives)
PLATFORMS = {
    "windows": ("win_amd64", "uv.exe", HERE / "windows/neuroshard.cmd", "win32-x86_64"),
    "macos": ("macosx_11_0_arm64", "uv", HERE / "unix/neuroshard", "darwin-arm64"),
}

MACOS_APP = ("neuroshard.applescript", "url-types.json", "document-types.json")


def pip(*arguments: str) -> None:
    """Run pip. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments], check=True)


def fetch_uv(platform: str, folder: Path) -> str:
    """Download the platform's uv into the folder. locks/uv.txt has its digest. Returns the texts of its licences."""
    tag, name, _launcher, _ = PLATFORMS[platform]
    with tempfile.TemporaryDirectory() as place:
        pip("download", "--no-deps", "--only-binary", ":all:", "--platform", tag, "--require-hashes", "-d", place,
            "-r", str(LOCKS / "uv.txt"))  # fmt: skip
        wheel = next(Path(place).glob("uv-*.whl"))
        with zipfile.ZipFile(wheel) as content:
            member = next(item for item in content.namelist() if item.endswith(f"/scripts/{name}"))
            (folder / name).write_bytes(content.read(member))
            texts = [content.read(item).decode() for item in content.namelist() if ".dist-info/licenses/" in item]
    (folder / name).chmod(0o755)
    return "\n\n".join(texts)


def write_payload_notices(folder: Path, uv_texts: str) -> None:
    """Write the bill of materials and the licences of all that the payload contains.

    The packages of its locks are in the bill. They are installed from the index, with their own licence texts.
    """
    locked = locked_components(*(path.read_text(encoding="utf-8") for path in sorted(folder.glob("lock*.txt"))))
    (uv,) = locked_components((LOCKS / "uv.txt").read_text(encoding="utf-8"))
    parts = [replace(uv, licence="MIT OR Apache-2.0", text=uv_texts), *locked, *dashboard_components()]
    timestamp = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    write_notices(folder, package_version(), timestamp, parts, DASHBOARD_TEXTS.read_text(encoding="utf-8"))


def fill_payload(platform: str, folder: Path, wheel: Path) -> None:
    """Fill the payload, except for uv. The wheel is the package with its built dashboard."""
    shutil.copy(wheel, folder)
    shutil.copy(HERE / "environment/bootstrap.py", folder)
    shutil.copy(LOCKS / f"{platform}.txt", folder / "lock.txt")
    shutil.copy(LOCKS / "build.txt", folder / "lock-build.txt")
    if platform == "windows":
        shutil.copy(LOCKS / "windows-cuda.txt", folder / "lock-cuda.txt")
    shutil.copy(PLATFORMS[platform][2], folder / "launcher")  # `neuroshard` is the program
    shutil.copy(ROOT / "LICENSE", folder)
    (folder / "VERSION").write_text(f"{package_version()}\n", encoding="ascii")


def compile_windows(payload: Path, out: Path) -> Path:
    """Compile the program that opens links, and the installer with it. A warning of the compiler is an error."""
    compile_script("link.nsi", {"VERSION": package_version(), "OUT": str(payload.resolve() / "neuroshard-link.exe")})
    target = out / f"NeuroShard-{package_version()}-windows-x86_64.exe"
    defines = {"VERSION": package_version(), "PAYLOAD": str(payload.resolve()), "OUT": str(target.resolve())}
    compile_script("neuroshard.nsi", defines)
    return target


def compile_script(name: str, defines: Mapping[str, str]) -> None:
    """Compile a script of the folder `windows`. Raises CalledProcessError, also after a warning."""
    flags = [f"-D{key}={value}" for key, value in defines.items()]
    subprocess.run(["makensis", "-WX", "-V2", *flags, str(HERE / "windows" / name)], check=True)


def pack_macos(payload: Path, out: Path) -> Path:
    """Pack the archive with the install script."""
    name = f"neuroshard-{package_version()}-darwin-arm64"
    with tarfile.open(out / f"{name}.tar.gz", "w:gz") as archive:
        archive.add(payload, f"{name}/payload", filter=as_root)
        for file in MACOS_APP:
            archive.add(HERE / "macos" / file, f"{name}/{file}", filter=as_root)
        add_scripts(archive, name)
    return out / f"{name}.tar.gz"


def pack_update(payload: Path, out: Path, platform: str) -> Path:
    """Pack the payload as `neuroshard update` reads it."""
    target = out / f"neuroshard-{package_version()}-{PLATFORMS[platform][3]}.update.tar.gz"
    with tarfile.open(target, "w:gz") as archive:
        for path in sorted(payload.iterdir()):
            archive.add(path, path.name, filter=as_root)
    return target


def main() -> None:
    """Build and print the paths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("platform", choices=PLATFORMS)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        payload, wheels = Path(place) / "payload", Path(place) / "wheels"
        payload.mkdir()
        pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(ROOT))  # with the locked build tools
        fill_payload(arguments.platform, payload, next(wheels.glob("neuroshard-*.whl")))
        write_payload_notices(payload, fetch_uv(arguments.platform, payload))
        make = compile_windows if arguments.platform == "windows" else pack_macos
        print(make(payload, arguments.out))
        print(pack_update(payload, arguments.out, arguments.platform))


if __name__ == "__main__":
    main()
