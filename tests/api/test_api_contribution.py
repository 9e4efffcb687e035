"""What /api/contribution tells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neuroshard.status.history import SamplesStatus, TextSample, WorkDone, WorkHistoryStatus, WorkSpan
from tests.worlds.api import Api
from tests.worlds.statuses import STARTED, training_status

WORK = WorkDone(STARTED, 1_000, 2, 30, 40, 5.0, 6.5)
MEMBERS = {"start", "tokens", "steps", "bytes_sent", "bytes_received", "training_seconds", "loss"}


@pytest.mark.parametrize(("span", "points"), [("day", 1), ("week", 2), ("all", 3)])
def test_a_span_is_told_with_the_total(api: Api, span: str, points: int) -> None:
    spans = [WorkSpan(60.0 * n, tuple(replace(WORK, start=STARTED + k) for k in range(n))) for n in (1, 2, 3)]
    api.node.board.publish(replace(training_status(), contribution=WorkHistoryStatus(WORK, *spans)))
    body = api.get(f"/api/contribution?span={span}").json()
    assert (body["span"], body["width_seconds"], len(body["points"])) == (span, 60.0 * points, points)
    assert body["points"][0] == body["total"]
    assert set(body["total"]) == MEMBERS
    assert (body["total"]["tokens"], body["total"]["loss"]) == (1_000, 6.5)


def test_before_any_work_there_is_no_total(api: Api) -> None:
    body = api.get("/api/contribution").json()
    assert (body["span"], body["points"], body["total"]) == ("day", [], None)


def test_an_unknown_span_is_named(api: Api) -> None:
    response = api.get("/api/contribution?span=year")
    assert response.status_code == 422
    assert response.json()["errors"][0]["location"] == "query.span"


def test_what_the_model_wrote_is_told(api: Api) -> None:
    sample = TextSample(10, 12, STARTED, 0.5, ("of", "the", "in"))
    status = SamplesStatus(("One", "Two", "Three"), (sample,), 100)
    api.node.board.publish(replace(training_status(), samples=status))
    assert api.get("/api/samples").json() == {
        "prompts": ["One", "Two", "Three"],
        "samples": [{"step": 10, "last_step": 12, "time": STARTED, "seconds": 0.5, "texts": ["of", "the", "in"]}],
        "next_step": 100,
        "explanation": "",
    }
