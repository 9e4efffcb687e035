"""A computer whose date jumps: uptime and ages go on as if nothing had been, in every answer."""

from __future__ import annotations

import pytest

from neuroshard.status.board import Publisher, StatusBoard
from tests.worlds.api import Api, FakeNode, make_api
from tests.worlds.statuses import training_status

DAY = 86_400.0


def metric(api: Api, name: str) -> float:
    lines = api.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"neuroshard_{name} "))


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_date_that_jumps_changes_neither_uptime_nor_ages(jump: float) -> None:
    passed, date = [0.0], [1_060.0]
    node = FakeNode()
    node.board = StatusBoard(training_status(), lambda: passed[0])
    publisher = Publisher(node.board, lambda: date[0])
    api = make_api(node, clock=lambda: date[0])

    def pass_by(seconds: float) -> None:
        passed[0] += seconds
        date[0] += seconds

    pass_by(10)
    publisher.change()
    date[0] += jump
    pass_by(5)  # and no snapshot since
    assert api.get("/health").json() | {"snapshot_age_seconds": 5.0, "status": "ok"} == api.get("/health").json()
    assert (metric(api, "uptime_seconds"), metric(api, "snapshot_age_seconds")) == (75.0, 5.0)
    publisher.change()
    status = api.get("/api/status").json()
    assert (status["uptime_seconds"], status["time"]) == (75.0, 1_075.0 + jump)
    pass_by(31)
    assert api.get("/health").json()["status"] == "stale"


def test_a_warning_whose_cause_is_gone_is_removed() -> None:
    board = StatusBoard(training_status())
    publisher = Publisher(board)
    publisher.warn("The disk is nearly full.", "The clock is wrong.")
    publisher.end_warning("The clock is wrong.")
    assert board.current().warnings == ("The disk is nearly full.",)
