"""Writes installers/locks/: every package of the installers with its hashes, from pyproject.toml, by `uv pip compile`.

python installers/make_locks.py            packages of Windows and macOS, from the package index
python installers/make_locks.py --cuda     PyTorch with CUDA for Windows as well, from PyTorch's own index
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import uv

LOCKS = Path(__file__).parent / "locks"
ROOT = Path(__file__).parents[1]
PYTHON = "3.12"
PLATFORMS = {"windows": "x86_64-pc-windows-msvc", "macos": "aarch64-apple-darwin"}
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"
LEAST_DRIVER = "580.88"  # of CUDA 13.0 on Windows


def compiled(requirements: str, platform: str | None, *options: str) -> str:
    """The lock of these requirements (standard input of uv). Raises CalledProcessError."""
    place = ["--python-platform", platform] if platform else ["--universal"]
    command = [uv.find_uv_bin(), "pip", "compile", "-", "--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
    command += ["--python-version", PYTHON, "--no-config", *place, *options]
    done = subprocess.run(command, input=requirements, text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout


def write(name: str, text: str) -> None:
    """Write a lock."""
    LOCKS.mkdir(exist_ok=True)
    (LOCKS / name).write_text(text, encoding="utf-8")
    print(f"{name}: {text.count('==')} packages")


def main() -> None:
    """Write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--index", default="https://pypi.org/simple")
    parser.add_argument("--cuda-index", default=CUDA_INDEX)
    arguments = parser.parse_args()
    index = ["--default-index", arguments.index]
    for name, platform in PLATFORMS.items():
        ours = f"neuroshard[export,tray] @ {ROOT.as_uri()}\n"
        write(f"{name}.txt", compiled(ours, platform, *index, "--no-emit-package", "neuroshard"))
    write("uv.txt", compiled(f"uv=={version('uv')}\n", None, *index))
    write("build.txt", compiled("setuptools\nwheel\n", None, *index))
    if arguments.cuda:
        torch = compiled("torch\n", PLATFORMS["windows"], "--default-index", arguments.cuda_index, "--no-deps")
        write("windows-cuda.txt", f"# least driver: {LEAST_DRIVER}\n--index-url {arguments.cuda_index}\n{torch}")


if __name__ == "__main__":
    sys.exit(main())
