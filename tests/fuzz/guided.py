"""Coverage-guided fuzzing of one target with atheris; ends with its process, so it is started by tests.fuzz.frames.

python -m tests.fuzz.guided TARGET [libFuzzer options and corpus folders]
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

import atheris

from tests.fuzz.target import MODULES

if TYPE_CHECKING:  # imported below, where it is watched with all that it imports
    from tests.fuzz.target import Target

WATCHED = [
    "neuroshard.messages",
    "neuroshard.identity",
    "neuroshard.network",
    "neuroshard.membership",
    "neuroshard.exchange",
    "neuroshard.state",
    "neuroshard.consensus",
    "neuroshard.pipeline",
    "neuroshard.training",
    "json",
    "tests.fuzz",
]


def target_named(name: str) -> Target:
    """Imported here, because what is imported is watched from then on; no more than it takes to find the target."""
    with atheris.instrument_imports(include=WATCHED):
        for module in MODULES:
            for target in import_module(module).TARGETS:
                if target.name == name:
                    return target
    raise ValueError(f"there is no target {name!r}")


def main() -> None:
    """Fuzz until the time given by libFuzzer's options is over; libFuzzer sets the exit code."""
    name = sys.argv[1]
    target = target_named(name)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
