"""A fuzz target, and inputs for it.

A target is a reader of bytes from strangers, and the properties that it keeps whatever the bytes are. The inputs are
mutants of its seeds, always the same for the same seed, for machines without a coverage-guided fuzzer.

`python -m tests.fuzz.target TARGET [libFuzzer options and corpus folders]` fuzzes one target guided by coverage, with
atheris. That ends its process, so `tests.fuzz.frames` starts it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

VECTORS = Path(__file__).parents[1] / "vectors"
MODULES = (  # with a tuple TARGETS each; those that import most come last
    "tests.fuzz.wire_targets",
    "tests.fuzz.message_targets",
    "tests.fuzz.network_targets",
    "tests.fuzz.round_targets",
    "tests.fuzz.stage_targets",
)
SHORT_INPUTS = 1_500
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


@dataclass(frozen=True)
class Target:
    """A reader under test."""

    name: str
    check: Callable[[bytes], None]  # raises for a defect of the reader, never for bad bytes
    seeds: Callable[[], tuple[bytes, ...]]  # good and bad inputs to begin with
    max_memory_bytes: int = 2_000_000  # that one input may take at once, besides ten times its own size
    short_inputs: int = SHORT_INPUTS  # of the short run


def golden(name: str) -> Any:
    """A file of golden vectors."""
    return json.loads((VECTORS / name).read_text("utf-8"))


INTERESTING = (
    *(
        bytes([value])
        for value in (0x00, 0x01, 0x7F, 0x80, 0x81, 0x90, 0x91, 0xC0, 0xC1, 0xC4, 0xC7, 0xD4, 0xDD, 0xDF, 0xFF)
    ),
    *(value.to_bytes(4, "little") for value in (0, 1, 2**16, 2**20, 2**31, 2**32 - 1)),
    *(value.to_bytes(8, "little") for value in (0, 1, 2**20, 2**32, 2**63, 2**64 - 1)),
    *(b"\xcb\x7f\xf8" + bytes(6), b"\xdd\xff\xff\xff\xff", b'"', b"{", b"[", b"\\ud800", b"1e999", b"NaN"),
)
MOST_CHANGES = 4


def mutants(seeds: Sequence[bytes], random: Random) -> Iterator[bytes]:
    """Without end: a seed with one to four changes, sometimes spliced with another."""
    while True:
        data = bytearray(random.choice(seeds))
        for _ in range(random.randint(1, MOST_CHANGES)):
            random.choice(CHANGES)(data, random, seeds)
        yield bytes(data)


def inputs(target: Target, seed: int) -> Iterator[bytes]:
    """The seeds of a target, then their mutants; the same for the same seed."""
    seeds = target.seeds()
    yield from seeds
    yield from mutants(seeds, Random(f"{target.name} {seed}"))


def _flip(data: bytearray, random: Random, _seeds: Sequence[bytes]) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _overwrite(data: bytearray, random: Random, _seeds: Sequence[bytes]) -> None:
    start, piece = random.randint(0, len(data)), random.choice(INTERESTING)
    data[start : start + len(piece)] = piece


def _insert(data: bytearray, random: Random, _seeds: Sequence[bytes]) -> None:
    start = random.randint(0, len(data))
    data[start:start] = random.choice(INTERESTING)


def _delete(data: bytearray, random: Random, _seeds: Sequence[bytes]) -> None:
    start = random.randint(0, len(data))
    del data[start : start + random.randint(1, 8)]


def _repeat(data: bytearray, random: Random, _seeds: Sequence[bytes]) -> None:
    start = random.randint(0, len(data))
    data[start:start] = data[start : start + random.randint(1, 32)] * random.randint(1, 64)


def _splice(data: bytearray, random: Random, seeds: Sequence[bytes]) -> None:
    other = random.choice(seeds)
    data[random.randint(0, len(data)) :] = other[random.randint(0, len(other)) :]


CHANGES: tuple[Callable[[bytearray, Random, Sequence[bytes]], None], ...] = (
    _flip,
    _overwrite,
    _insert,
    _delete,
    _repeat,
    _splice,
)


def fuzz_guided(name: str, options: Sequence[str]) -> None:
    """Fuzz until the time given by libFuzzer's options is over; libFuzzer sets the exit code of this process."""
    import atheris

    def target_named() -> Target:
        # Imported here: what is imported is watched from then on. No more than it takes to find the target.
        with atheris.instrument_imports(include=WATCHED):
            for module in MODULES:
                for target in import_module(module).TARGETS:
                    if target.name == name:
                        return target
        raise ValueError(f"there is no target {name!r}")

    atheris.Setup([sys.argv[0], *options], target_named().check)
    atheris.Fuzz()


if __name__ == "__main__":
    fuzz_guided(sys.argv[1], sys.argv[2:])
