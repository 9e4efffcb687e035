"""What /api/rounds and /metrics tell of certified rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neuroshard.status.rounds import Voter
from tests.worlds.api import Api
from tests.worlds.statuses import (
    ABANDONED,
    FAR,
    FIRST,
    FIRST_STAGE,
    ME,
    SECOND,
    SECOND_STAGE,
    STARTED,
    WALLET,
    after_rounds,
)


def test_a_round_is_told_whole(api: Api) -> None:
    api.node.board.publish(after_rounds(replace(FIRST_STAGE, recent=FIRST_STAGE.recent[:1])))
    (body,) = api.get("/api/rounds").json()["rounds"]
    assert body == {
        "stage": 0,
        "layers": {"start": 0, "stop": 4},
        "outer_step": 3,
        "result": "completed",
        "abandoned_for": None,
        "reason": "",
        "is_late": False,
        "ended_at": STARTED + 50,
        "seconds": 2.0,
        "phases": {"gather": 0.25, "exchange": 1.5, "vote": 0.25},
        "members": [
            {"node_id": FIRST.node_id, "wallet_id": FIRST.wallet_id, "part": "accepted", "refusal": "", "reason": ""},
            {
                "node_id": SECOND.node_id,
                "wallet_id": SECOND.wallet_id,
                "part": "refused",
                "refusal": "norm",
                "reason": FAR,
            },
            {"node_id": ME, "wallet_id": WALLET, "part": "accepted", "refusal": "", "reason": ""},
        ],
        "bytes_sent": 4_000,
        "bytes_received": 3_000,
        "strategy": "streaming",
        "part": "quarter 4 of 4",
        "codec": "int8",
        "aggregator": "trimmed_mean(0.2)",
        "views": 2,
        "skipped_audits": 1,
        "certificate": {"value": "0123456789abcdef", "votes": 3, "voters": 3, "sequences": 0},
    }


def test_rounds_of_all_stages_come_newest_first_and_add_up(api: Api) -> None:
    api.node.board.publish(after_rounds(FIRST_STAGE, SECOND_STAGE))
    body = api.get("/api/rounds").json()
    assert [(one["stage"], one["ended_at"] - STARTED) for one in body["rounds"]] == [(0, 58), (1, 55), (0, 50)]
    abandoned = body["rounds"][0]
    assert (abandoned["result"], abandoned["abandoned_for"]) == ("abandoned", "no_answer")
    assert (abandoned["reason"], abandoned["certificate"]) == (ABANDONED.reason, None)
    assert (body["completed"], body["abandoned"]) == (5, {"no_answer": 3, "node": 1})
    assert (body["accepted"], body["refused"]) == (9, {"norm": 5, "zero": 1})
    assert (body["bytes_sent"], body["bytes_received"], body["skipped_audits"]) == (21_000, 16_000, 3)
    assert body["sync_success_rate"] == pytest.approx(5 / 9)
    assert api.get("/api/training/verify").json()["sync_success_rate"] == body["sync_success_rate"]


def test_contributors_with_most_rounds_come_first(api: Api) -> None:
    api.node.board.publish(after_rounds(FIRST_STAGE, SECOND_STAGE))
    told = [
        (one["node_id"], one["is_here"], one["rounds"], one["accepted"], one["refused"], one["absent"])
        for one in api.get("/api/rounds").json()["contributors"]
    ]
    assert told == [
        (FIRST.node_id, False, 5, 5, 0, 2),
        (SECOND.node_id, False, 4, 0, 4, 0),
        (ME, True, 4, 4, 0, 0),
    ]


def test_the_voters_of_each_stage_come_in_order_of_seating(api: Api) -> None:
    seats = Voter(FIRST.node_id, FIRST.wallet_id, True, False), Voter(ME, WALLET, False, True)
    api.node.board.publish(after_rounds(replace(FIRST_STAGE, voters=seats), replace(SECOND_STAGE, voters=seats[:1])))
    told = [
        (one["stage"], one["node_id"], one["is_owner"], one["is_online"], one["is_here"])
        for one in api.get("/api/rounds").json()["voters"]
    ]
    assert told == [(0, FIRST.node_id, True, False, False), (0, ME, False, True, True), (1, *told[0][1:])]


def test_a_node_without_rounds_tells_of_none(api: Api) -> None:
    body = api.get("/api/rounds").json()
    assert (body["rounds"], body["contributors"], body["completed"], body["abandoned"]) == ([], [], 0, {})
    assert (body["sync_success_rate"], body["hash_agreement_rate"]) == (None, 1.0)


def test_the_status_does_not_carry_the_rounds(api: Api) -> None:
    """It goes to every dashboard several times a second."""
    api.node.board.publish(after_rounds(FIRST_STAGE))
    assert "rounds" not in api.get("/api/status").json()["diloco"]


def test_a_node_whose_root_is_another_than_the_certified_one_is_seen(api: Api) -> None:
    status = after_rounds(FIRST_STAGE)
    api.node.board.publish(status)
    assert api.get("/api/rounds").json()["hash_agreement_rate"] == 1.0
    api.node.board.publish(replace(status, diloco=replace(status.diloco, state_root="bb" * 32)))
    assert api.get("/api/rounds").json()["hash_agreement_rate"] == pytest.approx(2 / 3)
    unknown = replace(status.diloco, state_root="")  # not computed yet
    api.node.board.publish(replace(status, diloco=unknown))
    assert api.get("/api/rounds").json()["hash_agreement_rate"] == 1.0


def test_the_rounds_are_scraped(api: Api) -> None:
    api.node.board.publish(after_rounds(FIRST_STAGE, SECOND_STAGE))
    lines = api.get("/metrics").text.splitlines()
    for line in (
        'neuroshard_rounds_completed_total{stage="0"} 4.0',
        'neuroshard_rounds_abandoned_total{reason="no_answer",stage="1"} 2.0',
        'neuroshard_rounds_abandoned_total{reason="node",stage="1"} 1.0',
        'neuroshard_round_contributions_accepted_total{stage="0"} 8.0',
        'neuroshard_round_contributions_refused_total{reason="norm",stage="0"} 4.0',
        'neuroshard_round_sent_bytes_total{stage="0"} 20000.0',
        'neuroshard_round_received_bytes_total{stage="0"} 15000.0',
        'neuroshard_round_seconds{phase="exchange",stage="0"} 1.5',
        'neuroshard_round_seconds{phase="vote",stage="1"} 0.25',
    ):
        assert line in lines, line


def test_every_field_of_the_answer_about_rounds_is_described(api: Api) -> None:
    schemas = api.app.openapi()["components"]["schemas"]
    plain = {"node_id", "wallet_id", "layers", "outer_step", "phases", "members", "bytes_sent", "bytes_received"}
    plain |= {"aggregator", "completed", "accepted", "refused"}
    for name in (
        "RoundsSummary",
        "RunRound",
        "RoundContribution",
        "PhaseSeconds",
        "CertificateStatus",
        "RunContributor",
        "StageVoter",
    ):
        fields = schemas[name]["properties"]
        silent = {field for field, schema in fields.items() if not schema.keys() & {"description", "unit"}} - plain
        assert not silent, (name, silent)
