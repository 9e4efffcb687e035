"""What the Windows and macOS installers do on the computer: the choice of PyTorch, locked packages, versions."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from installers.environment.bootstrap import choose_torch, without

ROOT = Path(__file__).parents[2]
BOOTSTRAP = ROOT / "installers/environment/bootstrap.py"
CUDA_LOCK = (
    "# least driver: 580.88\n--index-url https://download.example.org/cu130\ntorch==2.13.0+cu130 \\\n    --hash=x\n"
)


@pytest.mark.parametrize(
    ("driver", "lock", "is_cuda", "words"),
    [
        (None, CUDA_LOCK, False, "no NVIDIA graphics card"),
        ("591.86", CUDA_LOCK, True, "CUDA build"),
        ("580.88", CUDA_LOCK, True, "driver 580.88"),
        ("580.87", CUDA_LOCK, False, "older than 580.88"),
        ("99.10", CUDA_LOCK, False, "older"),
        ("591.86", "", False, "no locked build"),
        ("591.86", "# nothing is locked\n", False, "no locked build"),
        ("nonsense", CUDA_LOCK, False, "no usable version"),
    ],
)
def test_which_pytorch_fits(driver: str | None, lock: str, is_cuda: bool, words: str) -> None:
    choice = choose_torch(driver, lock)
    assert choice.is_cuda is is_cuda
    assert words in choice.reason


def test_one_package_leaves_a_lock_with_its_hashes() -> None:
    lock = "sympy==1 \\\n    --hash=a\ntorch==2 \\\n    --hash=b \\\n    --hash=c\ntorchish==3 \\\n    --hash=d\n"
    assert without(lock, "torch") == "sympy==1 \\\n    --hash=a\ntorchish==3 \\\n    --hash=d\n"


@pytest.mark.parametrize("name", ["windows.txt", "macos.txt", "build.txt", "uv.txt"])
def test_every_package_of_a_lock_has_a_hash(name: str) -> None:
    lines = (ROOT / "installers/locks" / name).read_text(encoding="utf-8").splitlines()
    pins = [index for index, line in enumerate(lines) if "==" in line]
    assert pins
    assert [lines[index] for index in pins if "--hash=sha256:" not in lines[index + 1]] == []


@dataclass
class Payload:
    """A payload of made packages, and the folder they come from instead of the package index."""

    folder: Path
    index: Path
    tools: Path  # first in PATH

    def lock(self, name: str, *wheels: Path) -> None:
        pins = [f"{wheel.name.split('-')[0]}=={wheel.name.split('-')[1]}" for wheel in wheels]
        hashes = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
        lines = [f"{pin} \\\n    --hash=sha256:{digest}\n" for pin, digest in zip(pins, hashes, strict=True)]
        (self.folder / name).write_text("".join(lines))

    def install(self, root: Path) -> subprocess.CompletedProcess[str]:
        variables = {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(self.index), "UV_OFFLINE": "1"}
        path = f"{self.tools}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [sys.executable, str(self.folder / "bootstrap.py"), "--root", str(root)],
            env={**outside(), **variables, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


def made_wheel(folder: Path, name: str, version: str, code: str, *, script: bool = False) -> Path:
    """A wheel with one module and perhaps a command of its name."""
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if script:
        files[f"{about}/entry_points.txt"] = f"[console_scripts]\n{name} = {name}:main\n"
    files[f"{about}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


SIX = "six-1-py3-none-any.whl"
PROGRAM = """import sys
import torch

def main():
    print('neuroshard', '{}')
    print(torch.BUILD, file=sys.stderr)
"""


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    """Version 0.2.0, which needs torch; two builds of that are locked."""
    uv = pytest.importorskip("uv", reason="uv is not installed: pip install 'neuroshard[installers]'")
    made = Payload(tmp_path / "payload", tmp_path / "index", tmp_path / "tools")
    for folder in (made.folder, made.index, made.tools):
        folder.mkdir()
    shutil.copy(BOOTSTRAP, made.folder)
    (made.folder / "uv").symlink_to(uv.find_uv_bin())
    shutil.copy(ROOT / "installers/unix/neuroshard", made.folder / "launcher")
    (made.folder / "VERSION").write_text("0.2.0\n")
    made_wheel(made.folder, "neuroshard", "0.2.0", PROGRAM.format("0.2.0"), script=True)
    made.lock("lock-build.txt", made_wheel(made.index, "setuptools", "1", ""))
    made.lock(
        "lock.txt", made_wheel(made.index, "torch", "2.0", "BUILD = 'cpu'"), made_wheel(made.index, "six", "1", "")
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    made.lock("lock-cuda.txt", made_wheel(elsewhere, "torch", "2.0+cu130", "BUILD = 'cuda'"))
    lock = made.folder / "lock-cuda.txt"
    lock.write_text(f"# least driver: 580.88\n--find-links {elsewhere}\n{lock.read_text()}")
    return made


def test_an_installation_of_locked_packages(payload: Payload, tmp_path: Path) -> None:
    done = payload.install(tmp_path / "root")
    assert done.returncode == 0, done.stderr
    assert "no NVIDIA graphics card" in done.stdout
    ran = version_of(tmp_path / "root")
    assert (ran.stdout, ran.stderr) == ("neuroshard 0.2.0\n", "cpu\n")
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["current", "neuroshard", "versions"]
    assert not (tmp_path / "root/versions/0.2.0/.uv-cache").exists()


def test_a_graphics_card_gets_its_build(payload: Payload, tmp_path: Path) -> None:
    tool = payload.tools / "nvidia-smi"
    tool.write_text("#!/bin/sh\n[ $1 = --query-gpu=driver_version ] && echo 591.86\n")
    tool.chmod(0o755)
    done = payload.install(tmp_path / "root")
    assert done.returncode == 0, done.stderr
    ran = version_of(tmp_path / "root")
    assert ran.stderr == "cuda\n"


def test_a_package_that_was_replaced_is_refused_and_the_old_version_stays(payload: Payload, tmp_path: Path) -> None:
    root = tmp_path / "root"
    old = root / "versions/0.1.0/bin"
    old.mkdir(parents=True)
    (old / "neuroshard").write_text("#!/bin/sh\necho neuroshard 0.1.0\n")
    (old / "neuroshard").chmod(0o755)
    (root / "current").write_text("0.1.0\n")
    shutil.copy(ROOT / "installers/unix/neuroshard", root)
    made_wheel(payload.index, "six", "1", "import os  # not what was locked")
    done = payload.install(root)
    assert done.returncode == 1
    assert "hash mismatch" in done.stderr.lower()
    assert "The version before is unchanged" in done.stderr
    ran = version_of(root)
    assert ran.stdout == "neuroshard 0.1.0\n"


def test_the_same_version_again_fails_and_the_one_that_works_stays(payload: Payload, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert payload.install(root).returncode == 0
    before = {path.relative_to(root) for path in root.rglob("*") if "__pycache__" not in path.parts}
    good = made_again(payload, "import os  # not what was locked")
    done = payload.install(root)
    assert done.returncode == 1
    assert "The version before is unchanged" in done.stderr
    assert version_of(root).stdout == "neuroshard 0.2.0\n"
    assert {path.relative_to(root) for path in root.rglob("*") if "__pycache__" not in path.parts} == before
    (payload.index / SIX).write_bytes(good)
    assert payload.install(root).returncode == 0
    assert version_of(root).stdout == "neuroshard 0.2.0\n"
    assert [path.name for path in (root / "versions").iterdir()] == ["0.2.0"]


def test_what_a_killed_try_had_set_aside_is_back_when_the_next_one_fails(payload: Payload, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert payload.install(root).returncode == 0
    uv = payload.folder / "uv"
    real = uv.readlink()
    uv.unlink()
    uv.write_text("#!/bin/sh\nkill -9 $PPID\n")
    uv.chmod(0o755)
    assert payload.install(root).returncode == -9
    uv.unlink()
    uv.symlink_to(real)
    made_again(payload, "import os  # not what was locked")
    done = payload.install(root)
    assert (done.returncode, "unchanged" in done.stderr) == (1, True)
    assert version_of(root).stdout == "neuroshard 0.2.0\n"
    assert [path.name for path in (root / "versions").iterdir()] == ["0.2.0"]


def test_a_version_that_cannot_be_put_back_is_told(payload: Payload, tmp_path: Path) -> None:
    """The new one's folder becomes a file that nothing replaces: as when Windows keeps files that are in use."""
    root = tmp_path / "root"
    assert payload.install(root).returncode == 0
    uv = payload.folder / "uv"
    uv.unlink()
    uv.write_text('#!/bin/sh\nrm -rf "${0%/*}" && touch "${0%/*}"; exit 1\n')
    uv.chmod(0o755)
    done = payload.install(root)
    assert done.returncode == 1
    assert "unchanged" not in done.stderr
    assert "close the programs that use this folder" in done.stderr.lower()
    assert (root / "versions/0.2.0.old/bin/neuroshard").exists()  # for the next try


def made_again(payload: Payload, code: str) -> bytes:
    """Replace a package of the index; its bytes as they were."""
    good = (payload.index / SIX).read_bytes()
    made_wheel(payload.index, "six", "1", code)
    return good


def version_of(root: Path) -> subprocess.CompletedProcess[str]:
    """What the installed program says of itself."""
    start = [str(root / "neuroshard"), "--version"]
    return subprocess.run(start, env=outside(), capture_output=True, text=True, check=True)


def outside() -> dict[str, str]:
    """The environment without what would put this checkout in the place of what is installed."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
