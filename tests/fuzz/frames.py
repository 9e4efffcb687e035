"""Fuzz what reads bytes of strangers: python -m tests.fuzz.frames --seconds 60 [--target NAME] [--corpus FOLDER].

With atheris the search is guided by coverage, otherwise by chance. The time is shared between the targets. Exit code 1
and the input in hexadecimal digits when one was found that breaks a target.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from neuroshard.host.computer import peak_megabytes
from tests.fuzz.target import MODULES, Target, inputs

# All that is fuzzed. A reader of another room joins by one more `Target` in one of the modules.
TARGETS: tuple[Target, ...] = tuple(target for module in MODULES for target in import_module(module).TARGETS)
MAX_INPUT_BYTES = 65_536
MAX_MEMORY_MB = 1_024
MAX_INPUT_SECONDS = 10
SUMMARY = ("DONE", "Done ", "stat::slowest", "stat::peak_rss")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when nothing was found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.frames", description="Fuzz the frame and record readers."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="time for all targets together (60)")
    parser.add_argument("--target", choices=[target.name for target in TARGETS], help="only this one")
    parser.add_argument("--corpus", type=Path, help="folder in which what was learnt is kept")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (1)")
    parser.add_argument("--unguided", action="store_true", help="do not use atheris")
    options = parser.parse_args(arguments)
    chosen = [target for target in TARGETS if options.target in {None, target.name}]
    guided = find_spec("atheris") is not None and not options.unguided
    seconds = options.seconds / len(chosen)
    if guided:
        held = [fuzz_guided(target, seconds, options.corpus, options.seed) for target in chosen]
        return 0 if all(held) else 1
    for target in chosen:
        say(fuzz_by_chance(target, seconds, options.seed))
    return 0


def fuzz_by_chance(target: Target, seconds: float, seed: int) -> str:
    """A summary. Raises what the first input raises that breaks the target, and prints that input."""
    end, count = monotonic() + seconds, 0
    for data in inputs(target, seed):
        if monotonic() > end:
            break
        try:
            target.check(data)
        except BaseException:
            say(f"{target.name}: broken by input {count}: {data.hex()}")
            raise
        count += 1
    return f"{target.name}: held, {count} inputs by chance"


def fuzz_guided(target: Target, seconds: float, corpus: Path | None, seed: int) -> bool:
    """Whether the target held; libFuzzer's summary and the input that breaks it are printed."""
    with TemporaryDirectory(prefix="neuroshard-fuzz-") as folder:
        learnt = (corpus or Path(folder)) / target.name
        learnt.mkdir(parents=True, exist_ok=True)
        for data in target.seeds():
            (learnt / sha256(data).hexdigest()).write_bytes(data)
        options = (
            f"-artifact_prefix={folder}/found-",
            f"-max_total_time={max(1, round(seconds))}",
            f"-seed={seed}",
            f"-max_len={MAX_INPUT_BYTES}",
            # the system counts what this process took at most as the other's, too: it is made as a copy of it
            f"-rss_limit_mb={MAX_MEMORY_MB + peak_megabytes()}",
            f"-timeout={MAX_INPUT_SECONDS}",
            "-print_final_stats=1",
        )
        command = (sys.executable, "-m", "tests.fuzz.target", target.name, str(learnt), *options)
        result = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
        held = result.returncode == 0
        lines = result.stderr.splitlines()
        shown = [line for line in lines if any(word in line for word in SUMMARY)] if held else lines
        say("\n  ".join([f"{target.name}: {'held' if held else 'broken'}", *shown]))
        for artifact in Path(folder).glob("found-*"):
            say(f"  {artifact.name}: {artifact.read_bytes().hex()}")
        return held


def say(text: str) -> None:
    """One line or more for whoever waits."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
