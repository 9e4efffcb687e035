"""Installs the locked packages and this checkout into the environment of the Python that runs it, for `make`.

python installers/install_locked.py runtime|development

Every download must have a hash of installers/locks/. PyTorch is different in two cases: a build that is installed is
kept, and a wheel in a folder that pip searches (PIP_FIND_LINKS) comes before the one from the package index.
So another build, such as the one without CUDA, is a choice of the user.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "installers/locks"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
HASHED = (*PIP, "--require-hashes", "--no-build-isolation")


def is_installed(package: str) -> bool:
    """Whether the environment has the package, in any version."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def install_torch() -> None:
    """Install PyTorch unless a build is there. Raises CalledProcessError."""
    if is_installed("torch"):
        return
    lock = LOCKS / "torch.txt"
    pin = re.search(r"^torch==[^ \\]+", lock.read_text(encoding="utf-8"), re.MULTILINE)
    local = (*PIP, "--no-index", pin[0]) if pin else None
    if local is None or subprocess.run(local, check=False, capture_output=True).returncode != 0:
        subprocess.run((*HASHED, "--requirement", str(lock)), check=True)


def install(name: str) -> None:
    """Install a lock and this checkout. Raises CalledProcessError after pip's own message."""
    subprocess.run((*HASHED, "--requirement", str(LOCKS / "make-build.txt")), check=True)
    install_torch()
    subprocess.run((*HASHED, "--requirement", str(LOCKS / f"{name}.txt")), check=True)
    subprocess.run((*PIP, "--no-build-isolation", "--editable", str(ROOT)), check=True)


def main() -> int:
    """Install, and return pip's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lock", choices=("runtime", "development"))
    try:
        install(parser.parse_args().lock)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
