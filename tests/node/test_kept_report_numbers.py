"""A node is heard after a restart, also when its clock was set back meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from neuroshard.membership.claim_intake import REPORT_RULES, ClaimIntake, Refusal, signed_report
from neuroshard.membership.reports import NUMBER_FILE, RESERVED, kept_report_numbers
from tests.worlds.claims import EPOCH, REPORT, RUN, identity_of


@pytest.mark.parametrize("clocks", [(100.0, -100.0), (-100.0, 100.0), (0.0, 0.0)])
def test_reports_of_the_next_start_are_taken_whatever_the_clock_did(
    tmp_path: Path, clocks: tuple[float, float]
) -> None:
    intake = ClaimIntake(REPORT_RULES, RUN, lambda: EPOCH)
    for ahead in clocks:
        numbers = kept_report_numbers(tmp_path)
        for second in range(3):
            now = EPOCH + ahead + second
            report = replace(REPORT, run_id=RUN, sequence=numbers.next(now))
            assert not isinstance(intake.take(signed_report(identity_of(1), report, now)), Refusal)


def test_the_disk_is_written_to_seldom(tmp_path: Path) -> None:
    numbers = kept_report_numbers(tmp_path)
    stored = set[bytes]()
    for second in range(0, 3600, 10):
        numbers.next(EPOCH + second)
        stored.add((tmp_path / NUMBER_FILE).read_bytes())
    assert len(stored) <= 3600 * 1000 / RESERVED + 1


@pytest.mark.parametrize(
    "spoilt", [b"", b'{"reserved": -5}', b'{"reserved": "many"}', b"9" * 16, "²".encode(), b"\xff\xfe"]
)
def test_a_damaged_file_is_as_none_and_is_kept_aside(
    tmp_path: Path, spoilt: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / NUMBER_FILE
    file.parent.mkdir()
    file.write_bytes(spoilt)
    assert kept_report_numbers(tmp_path).next(EPOCH) == EPOCH * 1000
    assert file.with_name(f"{file.name}.damaged").read_bytes() == spoilt
    assert "may ignore this node's reports" in caplog.text


def test_a_disk_that_refuses_is_told_and_the_numbers_rise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "network").write_text("no folder")
    numbers = kept_report_numbers(tmp_path)
    assert numbers.next(EPOCH) < numbers.next(EPOCH - 60)
    assert "cannot be" in caplog.text
