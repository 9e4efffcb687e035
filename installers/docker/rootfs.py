"""Builds the image's root file system from its Dockerfile in a chroot, for computers without docker. Needs root.

debootstrap --variant=minbase bookworm base && python installers/docker/rootfs.py --base base --out rootfs

It runs FROM, ARG, ENV, RUN and COPY as docker does, and prints the size of the result. `--bind PLACE` shows a file or
folder of this computer inside while it builds, such as a folder of wheels; `--env NAME=VALUE` sets a variable there.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = Path(__file__).parent / "Dockerfile"
IGNORED = Path(__file__).parent / "Dockerfile.dockerignore"
PATHS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Stage:
    """A stage of the Dockerfile: its root, and the variables that its later instructions see."""

    root: Path
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    variables: dict[str, str] = field(default_factory=dict[str, str])


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield (instruction, rest) of a Dockerfile; continued lines are joined, comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        word, _, rest = line.strip().partition(" ")
        yield word, rest.strip()


def copied_sources() -> list[Path]:
    """Files and folders that the .dockerignore lets into the build."""
    wanted = [line[1:] for line in IGNORED.read_text(encoding="utf-8").splitlines() if line.startswith("!")]
    return [ROOT / name for name in wanted]


class Builder:
    """Carries out a Dockerfile in folders below `place`."""

    def __init__(self, base: Path, place: Path, given: Mapping[str, str], binds: Sequence[Path]) -> None:
        self._base = base
        self._place = place
        self._given = given
        self._binds = binds
        self._stages: dict[str, Stage] = {}
        self._environment: dict[str, str] = {}
        self.config: dict[str, str] = {}  # instructions that only describe the image

    def build(self, text: str, environment: Mapping[str, str]) -> Path:
        """Run all instructions and return the root of the last stage."""
        self._environment = dict(environment)
        stage = Stage(self._place)
        for word, rest in instructions(text):
            if word == "FROM":
                _, _, name = rest.partition(" AS ")
                stage = Stage(self._place / (name or "image"))
                self._stages[name or "image"] = stage
                subprocess.run(["cp", "-a", str(self._base), str(stage.root)], check=True)
            elif word == "ARG":
                name, _, default = rest.partition("=")
                stage.arguments[name] = self._given.get(name, default)
            elif word == "ENV":
                name, _, value = rest.partition("=")
                stage.variables[name] = value
            elif word == "RUN":
                self._run(stage, rest)
            elif word == "COPY":
                self._copy(stage, shlex.split(rest))
            else:
                self.config[word] = rest
        return stage.root

    def _run(self, stage: Stage, command: str) -> None:
        mounts = "".join(
            f"mkdir -p $ROOT{place.parent}; [ -d {place} ] && mkdir -p $ROOT{place} || touch $ROOT{place}; "
            f"mount --rbind {place} $ROOT{place}; "
            for place in (Path("/proc"), Path("/dev"), Path("/etc/resolv.conf"), *self._binds)
        )
        script = f'set -e; {mounts}exec chroot "$ROOT" /bin/sh -ec "$COMMAND"'
        inside = {"PATH": PATHS, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
        visible = inside | self._environment | stage.arguments | stage.variables
        variables = {**visible, "ROOT": str(stage.root), "COMMAND": command}
        variables["PATH"] = f"{variables['PATH']}:{PATHS}"
        subprocess.run(["unshare", "--mount", "sh", "-c", script], env=variables, check=True)

    def _copy(self, stage: Stage, words: list[str]) -> None:
        origin = ROOT
        if words[0].startswith("--from="):
            origin = self._stages[words.pop(0).removeprefix("--from=")].root
        source, target = words
        place = stage.root / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if source != ".":
            subprocess.run(["cp", "-a", str(origin / source.lstrip("/")), str(place)], check=True)
            return
        skip = shutil.ignore_patterns("node_modules", "__pycache__")
        for item in copied_sources():
            goal = place / item.relative_to(ROOT)
            goal.parent.mkdir(parents=True, exist_ok=True)
            if item.is_dir():
                shutil.copytree(item, goal, ignore=skip)
            else:
                shutil.copy2(item, goal)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, a file with several names once."""
    seen: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            facts = (Path(place) / name).lstat()
            seen[facts.st_dev, facts.st_ino] = facts.st_size
    return sum(seen.values())


def main() -> None:
    """Build and print the size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--bind", action="append", default=[], type=Path)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    given, environment = (dict(item.split("=", 1) for item in many) for many in (arguments.build_arg, arguments.env))
    builder = Builder(arguments.base, arguments.out.absolute(), given, arguments.bind)
    root = builder.build(DOCKERFILE.read_text(encoding="utf-8"), environment)
    print(f"{root}: {size_of(root) / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
