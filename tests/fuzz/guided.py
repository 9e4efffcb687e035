"""Coverage-guided fuzzing of one target with atheris; ends with its process, so it is started by tests.fuzz.frames.

python -m tests.fuzz.guided TARGET [libFuzzer options and corpus folders]
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["neuroshard.wire", "neuroshard.identity", "json", "msgpack.fallback"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Fuzz until the time given by libFuzzer's options is over; libFuzzer sets the exit code."""
    target = next(target for target in TARGETS if target.name == sys.argv[1])
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
