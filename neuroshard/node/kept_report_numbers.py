"""The numbers of this node's reports rise over restarts, whatever happens to the clock: the newest lies on the disk."""

from __future__ import annotations

import logging
from pathlib import Path

from neuroshard.config.state_file import make_folder, write_atomically
from neuroshard.membership.reports import ReportNumbers

log = logging.getLogger(__name__)

NUMBER_FILE = "network/report-number"
MOST_DIGITS = 15  # some thousand years of milliseconds; a report carries no more than 2**53


def kept_report_numbers(data_dir: Path) -> ReportNumbers:
    """Above those of earlier starts. Where the disk refuses, they rise over restarts as long as the clock does."""
    file = data_dir / NUMBER_FILE

    def keep(number: int) -> None:
        try:
            make_folder(file.parent, data_dir)
            write_atomically(file, str(number).encode())
        except OSError as error:
            log.warning("The number of this node's last report cannot be written to %s: %s", file, error)

    return ReportNumbers(_read(file), keep)


def _read(file: Path) -> int:
    try:
        with file.open("rb") as stored:
            text = stored.read(MOST_DIGITS + 1)
    except FileNotFoundError:
        return 0
    except OSError as error:
        log.warning("The number of this node's last report cannot be read: %s", error)
        return 0
    return int(text) if text.isdigit() and len(text) <= MOST_DIGITS else 0
