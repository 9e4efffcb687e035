"""Writes installers/locks/: every package of the installers with its hashes, from pyproject.toml, by `uv pip compile`.

python installers/make_locks.py            all packages from the package index
python installers/make_locks.py --cuda     PyTorch with CUDA for Windows as well, from PyTorch's own index

runtime.txt and development.txt are for `make` on any system. torch.txt has PyTorch for it, with the libraries of CUDA.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import version
from pathlib import Path

import uv

LOCKS = Path(__file__).parent / "locks"
ROOT = Path(__file__).parents[1]
PYTHON = "3.12"
PLATFORMS = {"windows": "x86_64-pc-windows-msvc", "macos": "aarch64-apple-darwin"}
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"
LEAST_PYTHON = "3.11"  # of `make`
OF_TORCH = re.compile(r"(torch|triton|nvidia-(?!ml-py)[a-z0-9-]+|cuda-[a-z-]+)==")
PIN = re.compile(r"^[A-Za-z0-9._-]+==[^\\\n]+", re.MULTILINE)  # with its marker
LEAST_DRIVER = "580.88"  # of CUDA 13.0 on Windows


def compiled(requirements: str, platform: str | None, *options: str) -> str:
    """The lock of these requirements (standard input of uv). Raises CalledProcessError."""
    place = ["--python-platform", platform] if platform else ["--universal"]
    command = [uv.find_uv_bin(), "pip", "compile", "-", "--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
    command += [
        "--no-config",
        *place,
        *(() if "--python-version" in options else ("--python-version", PYTHON)),
        *options,
    ]
    done = subprocess.run(command, input=requirements, text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout


def split(lock: str) -> tuple[str, str]:
    """A lock without PyTorch and the libraries of CUDA, and a lock with these alone."""
    entries = re.split(r"^(?=\S)", lock, flags=re.MULTILINE)
    of_torch = [entry for entry in entries if OF_TORCH.match(entry)]
    return "".join(entry for entry in entries if not OF_TORCH.match(entry)), "".join(of_torch)


def write(name: str, text: str) -> None:
    """Write a lock."""
    LOCKS.mkdir(exist_ok=True)
    (LOCKS / name).write_text(text, encoding="utf-8")
    print(f"{name}: {text.count('==')} packages")


def write_for_make(index: list[str]) -> None:
    """Write the locks of `make`: the same versions for users, developers and the frozen program."""
    any_python = (*index, "--python-version", LEAST_PYTHON, "--no-emit-package", "neuroshard")
    whole = compiled(f"neuroshard[dev,installers] @ {ROOT.as_uri()}\n", None, *any_python)
    development, torch = split(whole)
    write("development.txt", development)
    write("torch.txt", torch)
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    build = "\n".join(("setuptools", "wheel", "editables", *requires)) + "\n"
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write("\n".join(PIN.findall(whole)))
        pins.flush()
        same = (*any_python, "--constraint", pins.name)
        write("runtime.txt", split(compiled(f"neuroshard @ {ROOT.as_uri()}\n", None, *same))[0])
        write("make-build.txt", compiled(build, None, *same))


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
    write_for_make(index)
    if arguments.cuda:
        torch = compiled("torch\n", PLATFORMS["windows"], "--default-index", arguments.cuda_index, "--no-deps")
        write("windows-cuda.txt", f"# least driver: {LEAST_DRIVER}\n--index-url {arguments.cuda_index}\n{torch}")


if __name__ == "__main__":
    sys.exit(main())
