"""The measured upload speed of the line, and the limit that follows from it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.config.settings import Settings
from neuroshard.network import Connection
from neuroshard.network.line import (
    ASSUMED_UPLOAD,
    LINE_FILE,
    TRIAL_BYTES,
    VALID_SECONDS,
    LineMeter,
    LineSpeed,
    StoredLine,
    UploadLine,
    upload_limit,
)
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId
from tests.worlds.clock import until
from tests.worlds.network_nodes import MIB, frame_of, run, two_nodes

START = 1_700_000_000.0
FAR = Connection(NodeId("far"), "", ConnectionKind.DIRECT, is_outbound=True, since=0.0, is_far=True)


def sending(rate: float, seconds: float, busy: float = 1.0, base: Connection = FAR) -> list[Connection]:
    """A connection at looks every half second. It sends at `rate` while data is on its way, a share of the time."""
    times = [number / 2 for number in range(int(2 * seconds) + 1)]
    return [
        replace(
            base,
            bytes_sent=int(rate * busy * time),
            bytes_arrived=int(rate * busy * time),
            busy_seconds=busy * time,
        )
        for time in times
    ]


def measured(looks: Iterable[Connection], meter: LineMeter | None = None) -> LineSpeed | None:
    """The fastest of all measurements."""
    meter = meter or LineMeter()
    found = [meter.look([one], START + number / 2) for number, one in enumerate(looks)]
    return max((one for one in found if one is not None), key=lambda one: one.upload, default=None)


@pytest.mark.parametrize("rate", [150_000.0, 1_250_000.0, 5e6, 125e6])
def test_a_transfer_that_fills_the_line_measures_it(rate: float) -> None:
    found = measured(sending(rate, 10))
    assert found is not None
    assert found.upload == pytest.approx(rate, rel=0.01)


@given(st.floats(1e4, 1e8), st.floats(0.01, 1.0))
def test_pauses_between_transfers_do_not_make_the_line_slower(rate: float, busy: float) -> None:
    """Each burst fills the line; the time without data on its way counts for nothing."""
    found = measured(sending(rate, 8, busy))
    assert found is None or found.upload == pytest.approx(rate, rel=0.05)


def test_small_messages_measure_nothing() -> None:
    assert measured(sending(20_000, 60, busy=0.5)) is None


def test_computers_of_the_same_network_say_nothing_about_the_line() -> None:
    meter = LineMeter()
    assert measured(sending(100e6, 10, base=replace(FAR, is_far=False)), meter) is None
    assert (meter.has_far_peer, meter.far_bytes) == (False, 0)


def test_a_clock_that_is_set_back_makes_no_line_fast() -> None:
    meter = LineMeter()
    looks = [replace(one, busy_seconds=0.0) for one in sending(4e6, 4)]  # as where the system does not report the time
    found = [meter.look([one], START + 0.001 * number) for number, one in enumerate(looks)]
    assert found == [None] * len(looks)


def settings(folder: Path, **given: object) -> Settings:
    return Settings.model_validate({"data_dir": folder, **given})


def fill(line: UploadLine, rate: float, begin: float, seconds: float = 6.0) -> None:
    for number, one in enumerate(sending(rate, seconds)):
        line.look([one], begin + number / 2)


def test_before_the_first_measurement_the_share_is_one_of_an_assumed_line(tmp_path: Path) -> None:
    line = UploadLine(tmp_path)
    assert line.limit(settings(tmp_path, upload_percent=50)) == ASSUMED_UPLOAD / 2
    assert line.limit(settings(tmp_path)) is None


def test_the_share_follows_the_measurement_and_a_restart_remembers_it(tmp_path: Path) -> None:
    line = UploadLine(tmp_path)
    fill(line, 4e6, START)
    again = UploadLine(tmp_path)
    assert again.speed == line.speed
    for one in (line, again):
        assert one.limit(settings(tmp_path, upload_percent=25)) == pytest.approx(1e6, rel=0.01)
        own = settings(tmp_path, upload_percent=25, max_upload=2)
        assert one.limit(own) == 250_000  # the lower one of both


def test_the_first_bytes_to_a_far_computer_measure_the_line_without_the_share(tmp_path: Path) -> None:
    line, half, own = UploadLine(tmp_path), settings(tmp_path, upload_percent=50), settings(tmp_path, max_upload=2)
    line.look([FAR], START)
    assert line.limit(half) is None
    assert line.limit(own) == 250_000  # the owner's number always applies
    line.look([replace(FAR, bytes_sent=TRIAL_BYTES)], START + 100)  # in small messages, which measure nothing
    assert line.limit(half) == ASSUMED_UPLOAD / 2


def test_the_share_applies_after_three_measurements(tmp_path: Path) -> None:
    line, half = UploadLine(tmp_path), settings(tmp_path, upload_percent=50)
    limits: list[float | None] = []
    for number, one in enumerate(sending(0.4e6, 12)):  # each measurement takes 3 s
        line.look([one], START + number / 2)
        limits.append(line.limit(half))
    assert limits[:18] == [None] * 18
    assert limits[18:] == [pytest.approx(0.2e6, rel=0.01)] * 7


def test_a_slower_measurement_counts_only_when_the_last_one_is_old(tmp_path: Path) -> None:
    line = UploadLine(tmp_path)
    for rate, begin, expected in (
        (4e6, START, 4e6),
        (1e6, START + 100, 4e6),
        (5e6, START + 200, 5e6),
        (1e6, START + 300 + VALID_SECONDS, 1e6),
    ):
        fill(line, rate, begin)
        assert line.speed is not None
        assert line.speed.upload == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("content", ["", "{}", '{"sent_bytes": 1, "seconds": 0, "measured_at": 1}', "[" * 2_000])
def test_a_damaged_measurement_is_made_again(tmp_path: Path, content: str) -> None:
    file = tmp_path / LINE_FILE
    file.parent.mkdir()
    file.write_text(content)
    assert StoredLine(tmp_path).read() is None
    fill(UploadLine(tmp_path), 4e6, START)
    assert StoredLine(tmp_path).read() is not None


@given(st.none() | st.floats(0.1, 1e6), st.integers(1, 100), st.floats(0.1, 1e6))
def test_the_limit_is_the_lowest_of_all(most: float | None, percent: int, line: float) -> None:
    limit = upload_limit(most, percent, line)
    assert (limit is None) == (most is None and percent == 100)
    if limit is not None:
        assert most is None or limit <= most
        assert percent == 100 or limit <= line * percent / 100


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not report it")
def test_a_pool_counts_what_arrived_and_the_time_that_it_took() -> None:
    async def scenario() -> None:
        async with two_nodes() as (a, b):
            await a.ask(b, frame_of(bytes(8 * MIB), "swallow"))
            await until(lambda: all(one.bytes_arrived >= 8 * MIB for one in a.pool.traffic().values()))
            traffic = next(iter(a.pool.traffic().values()))
            assert traffic.bytes_arrived <= 1.05 * traffic.bytes_sent
            assert traffic.busy_seconds > 0

    run(scenario)
