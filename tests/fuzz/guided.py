"""Coverage-guided fuzzing of one target with atheris; ends with its process, so it is started by tests.fuzz.frames.

python -m tests.fuzz.guided TARGET [libFuzzer options and corpus folders]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import atheris

if TYPE_CHECKING:  # imported below, where it is watched with all that it imports
    from tests.fuzz.target import Target

WATCHED = ["neuroshard.wire", "neuroshard.identity", "neuroshard.swarm", "json", "tests.fuzz"]


def targets_with(name: str) -> Sequence[Target]:
    """The tuple of targets that has this one; imported here, because what is imported is watched from then on."""
    with atheris.instrument_imports(include=WATCHED):
        from tests.fuzz.wire_targets import WIRE_TARGETS

        if any(target.name == name for target in WIRE_TARGETS):
            return WIRE_TARGETS  # without the records: their room imports torch
        from tests.fuzz.targets import TARGETS

        return TARGETS


def main() -> None:
    """Fuzz until the time given by libFuzzer's options is over; libFuzzer sets the exit code."""
    name = sys.argv[1]
    target = next(target for target in targets_with(name) if target.name == name)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
