"""A few seconds of fuzzing, always with the same inputs; `python -m tests.fuzz.frames` goes on where this ends."""

from __future__ import annotations

import tracemalloc
from itertools import islice
from pathlib import Path

import pytest

from neuroshard.errors import NeuroShardError
from neuroshard.identity import read_claim
from neuroshard.messages import Frame
from tests.fuzz.frames import TARGETS, fuzz_by_chance, fuzz_guided, main
from tests.fuzz.target import MODULES, Target, inputs
from tests.fuzz.wire_targets import check_frame, frame_seeds, outcome, sealed

INPUTS = 200
every_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@every_target
def test_no_input_breaks_a_reader(target: Target) -> None:
    for data in islice(inputs(target, seed=1), target.short_inputs):
        target.check(data)


def test_every_file_of_targets_is_fuzzed_and_every_name_names_one_target() -> None:
    files = {f"tests.fuzz.{path.stem}" for path in Path(__file__).parent.glob("*_target*.py")}
    assert files == set(MODULES)
    assert len({target.name for target in TARGETS}) == len(TARGETS)


@every_target
def test_the_inputs_are_the_same_for_the_same_seed_and_differ_otherwise(target: Target) -> None:
    first, again, other = (list(islice(inputs(target, seed), INPUTS)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(set(first)) > INPUTS * 0.7


def test_the_seeds_reach_behind_the_first_checks() -> None:
    """Some are read to the end: mutants of them fail late, not all at the magic."""
    by_name = {target.name: target.seeds() for target in TARGETS}
    assert sum(isinstance(outcome(seed[1:], 100), Frame) for seed in by_name["frame"]) >= 3
    assert sum(isinstance(outcome(sealed(seed[1:]), 100), Frame) for seed in by_name["sealed-frame"]) >= 3
    assert len({str(outcome(sealed(seed[1:]), 100)) for seed in by_name["sealed-frame"] if seed}) > 20
    assert len([seed for seed in by_name["claim"] if is_claim(seed)]) == 7


def is_claim(data: bytes) -> bool:
    try:
        read_claim(data, object)
    except NeuroShardError:
        return False
    return True


@every_target
def test_no_input_takes_more_memory_than_the_limits_allow(target: Target) -> None:
    tracemalloc.start()
    try:
        for data in islice(inputs(target, seed=3), target.short_inputs // 10):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            target.check(data)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < target.max_memory_bytes + 10 * len(data), data.hex()
    finally:
        tracemalloc.stop()


def test_a_reader_with_a_defect_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    def careless(data: bytes) -> None:
        check_frame(data)
        if data[1:5] == b"NSHF" and data[5:6] == b"\x81":
            raise IndexError

    with pytest.raises(IndexError):
        fuzz_by_chance(Target("careless", careless, frame_seeds), seconds=60, seed=1)
    assert "careless: broken by input" in capsys.readouterr().out


def test_the_command_says_what_held(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "0.2", "--target", "header", "--unguided"]) == 0
    assert capsys.readouterr().out.startswith("header: held")


def test_the_guided_search_says_what_held(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("atheris")
    header = next(target for target in TARGETS if target.name == "header")
    assert fuzz_guided(header, seconds=1, corpus=None, seed=1)
    assert "header: held" in capsys.readouterr().out
