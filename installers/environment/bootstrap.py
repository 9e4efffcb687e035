"""Makes NeuroShard's environment from a payload: hash-locked packages, and the build of PyTorch for the graphics card.

The installers and `neuroshard update` run it on Windows and macOS. It needs only Python 3.12, its standard library,
and the `uv` next to it.

    bootstrap.py --root FOLDER      install the payload as the version that the launcher starts
    bootstrap.py --into FOLDER      only make the environment, in the folder of the payload (for updates)
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

WINDOWS = sys.platform == "win32"
LOCK, CUDA_LOCK, BUILD_LOCK = "lock.txt", "lock-cuda.txt", "lock-build.txt"
CACHE = ".uv-cache"
COMPLETE = ".complete"  # the last file that is written to a version's folder
LAUNCHER = "neuroshard.cmd" if WINDOWS else "neuroshard"
PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==")
LEAST_DRIVER = re.compile(r"^# least driver: (\d+)\.(\d+)", re.MULTILINE)


class BootstrapError(Exception):
    """An installation failed: what happened and what to do."""


class NotRestoredError(BootstrapError):
    """The version that was installed before could not be put back."""


@dataclass(frozen=True)
class TorchChoice:
    """Which build of PyTorch, and why."""

    is_cuda: bool
    reason: str


def choose_torch(driver: str | None, cuda_lock: str) -> TorchChoice:
    """Choose the build for an NVIDIA driver (None: no such card) from those that the payload has locked."""
    if driver is None:
        return TorchChoice(False, "no NVIDIA graphics card was found; PyTorch's CPU build is installed")
    if not any(PIN.match(line) for line in cuda_lock.splitlines()):
        return TorchChoice(False, "an NVIDIA graphics card was found, but this installer has no locked build for it")
    least, here = LEAST_DRIVER.search(cuda_lock), re.match(r"(\d+)\.(\d+)", driver)
    if here is None or least is None:
        return TorchChoice(False, f"the NVIDIA driver reports no usable version: {driver[:20]!r}")
    if tuple(map(int, here.groups())) < tuple(map(int, least.groups())):
        needed = ".".join(least.groups())
        return TorchChoice(False, f"the NVIDIA driver {driver} is older than {needed}: update it and install again")
    return TorchChoice(True, f"an NVIDIA card with driver {driver} was found; PyTorch's CUDA build is installed")


def without(lock: str, package: str) -> str:
    """The lock without one package and its hashes."""
    kept: list[str] = []
    is_dropped = False
    for line in lock.splitlines():
        match = PIN.match(line)
        if match:
            is_dropped = match["name"].lower() == package
        elif not line.startswith((" ", "\t")):
            is_dropped = False
        if not is_dropped:
            kept.append(line)
    return "\n".join(kept) + "\n"


def nvidia_driver() -> str | None:
    """The driver's version, as its own tool prints it; None without a card."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        output = subprocess.run(
            [tool, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = output.stdout.split()
    return lines[0] if output.returncode == 0 and lines else None


def make_environment(folder: Path, say: object = print) -> None:
    """Make the environment in the folder, which contains the payload. Raises BootstrapError."""
    uv = folder / ("uv.exe" if WINDOWS else "uv")
    python = folder / ("Scripts/python.exe" if WINDOWS else "bin/python")
    wheels = sorted(folder.glob("neuroshard-*.whl"))
    if len(wheels) != 1 or not uv.exists():
        raise BootstrapError(f"{folder} must contain uv and one wheel. Download the installer again.")
    lock = (folder / LOCK).read_text(encoding="utf-8")
    cuda_file = folder / CUDA_LOCK
    choice = choose_torch(nvidia_driver(), cuda_file.read_text(encoding="utf-8") if cuda_file.exists() else "")
    report(say, f"PyTorch: {choice.reason}.")
    run(uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder))
    install = ("pip", "install", "--python", str(python), "--require-hashes", "--no-config")
    run(uv, *install, "-r", str(folder / BUILD_LOCK))
    locked = folder / "lock-used.txt"
    locked.write_text(without(lock, "torch") if choice.is_cuda else lock, encoding="utf-8")
    if choice.is_cuda:
        run(uv, *install, "-r", str(cuda_file))
    run(uv, *install, "--no-build-isolation", "-r", str(locked))
    run(uv, "pip", "install", "--python", str(python), "--no-config", "--no-deps", "--no-index", str(wheels[0]))
    shutil.rmtree(folder / CACHE, ignore_errors=True)


def program_of(folder: Path) -> Path:
    """The program that starts the version."""
    return folder / ("Scripts/neuroshard.exe" if WINDOWS else "bin/neuroshard")


def install_version(payload: Path, root: Path) -> str:
    """Install the payload next to earlier versions; the pointer moves last. Raises BootstrapError, OSError."""
    version = (payload / "VERSION").read_text(encoding="ascii").strip()
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise BootstrapError(f"{payload / 'VERSION'} contains no version. Download the installer again.")
    folder = root / "versions" / version
    with replaced(folder):
        shutil.copytree(payload, folder)
        make_environment(folder)
        output = run(program_of(folder), "--version")
        if output.split() != ["neuroshard", version]:
            raise BootstrapError(f"The new program reports version {output.strip()!r}, not {version}.")
        if hasattr(os, "sync"):
            os.sync()  # after a power cut, .complete must not be next to empty files; Windows has no such call
        (folder / COMPLETE).touch()
        pointer = root / "current"
        old = pointer.read_text(encoding="ascii").strip() if pointer.exists() else version
        if old != version:
            place(root / "previous", f"{old}\n".encode())
        place(root / LAUNCHER, (payload / "launcher").read_bytes())
        (root / LAUNCHER).chmod(0o755)
        place(pointer, f"{version}\n".encode())
    return version


@contextmanager
def replaced(folder: Path) -> Generator[None]:
    """Set the old content of `folder` aside while the block creates it again, and restore it if the block fails.

    The new content cannot be made elsewhere and moved: an environment's scripts contain its path. Content that
    a killed attempt had set aside counts as the old content. Raises NotRestoredError, OSError.
    """
    aside = folder.with_name(f"{folder.name}.old")
    if aside.exists() and (folder / COMPLETE).exists():
        shutil.rmtree(aside)
    elif aside.exists():
        restore(folder, aside)
    if folder.exists():
        folder.rename(aside)
    try:
        yield
    except BaseException as first:
        try:
            restore(folder, aside)
        except OSError as error:
            action = "Close the programs that use this folder, then install again."
            raise NotRestoredError(f"{first}\n{folder} is incomplete: {error}. {action}") from first
        raise
    shutil.rmtree(aside, ignore_errors=True)  # not in use; the next installation tries again


def restore(folder: Path, aside: Path) -> None:
    """Remove an incomplete version and restore the old content, if there was any. Raises OSError."""
    if folder.exists():
        shutil.rmtree(folder)
    if aside.exists():
        aside.rename(folder)


def place(path: Path, content: bytes) -> None:
    """Write a file by a rename, so that a kill leaves the old content or the new."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(content)
    temporary.replace(path)


def run(program: Path, *arguments: str) -> str:
    """Run a program and return its output. Raises BootstrapError with the program's own message."""
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
    environment["UV_CACHE_DIR"] = str(program.parent / CACHE)  # removed with the version
    try:
        done = subprocess.run([str(program), *arguments], env=environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BootstrapError(f"{program} cannot be started: {error}.") from error
    if done.returncode != 0:
        raise BootstrapError(f"{program.name} {arguments[0]} failed:\n{(done.stdout + done.stderr).strip()[-3000:]}")
    return done.stdout


def report(say: object, text: str) -> None:
    """Print without delay: the installer's window shows it."""
    if callable(say):
        say(text)
    sys.stdout.flush()


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    place_of = parser.add_mutually_exclusive_group(required=True)
    place_of.add_argument("--root", type=Path, help="folder of the installation")
    place_of.add_argument("--into", type=Path, help="folder that contains the payload")
    arguments = parser.parse_args()
    try:
        if arguments.into is not None:
            make_environment(arguments.into.resolve())
        else:
            version = install_version(Path(__file__).resolve().parent, arguments.root.resolve())
            print(f"NeuroShard {version} is installed in {arguments.root}.")
    except NotRestoredError as error:
        print(f"The installation failed, and the version before could not be restored.\n{error}", file=sys.stderr)
        return 1
    except (BootstrapError, OSError) as error:
        print(f"The installation failed. The version before is unchanged.\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
