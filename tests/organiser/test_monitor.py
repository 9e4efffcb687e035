"""The monitor counts what certificates prove, shows reports as reports, and keeps its history."""

from __future__ import annotations

import gzip
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from neuroshard.identity import SignedRunParameters
from neuroshard.model.architecture import flops_per_token, plan_of
from neuroshard.organiser import history
from neuroshard.organiser.monitor import FRESH_SECONDS, SHOWN_POINTS, SHOWN_ROUNDS
from neuroshard.organiser.observations import (
    ObserverEnded,
    ReadyNode,
    ReportedDevice,
    StageSight,
    observation_line,
    read_observation,
)
from neuroshard.organiser.observer_process import OBSERVER
from neuroshard.organiser.places import DOWNLOADING_AT_ONCE
from neuroshard.organiser.public import PUBLIC_SECONDS
from neuroshard.runs.offer import checked_offer
from neuroshard.runs.stored_runs import JoinedRuns
from neuroshard.types import DAY_SECONDS, NodeId, WalletId
from tests.organiser.desks import OFFER, OWNER, PARAMETERS, START, node
from tests.organiser.watched import ADA, BOB, LATER_FOUNDATION, SIGHT, STAGES, TOKENS, VALUE, Watched

FLOPS = [flops_per_token(PARAMETERS.architecture, layers) for layers in plan_of(PARAMETERS)]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.close()


def test_the_leaderboard_is_the_sum_of_the_certificates(watched: Watched) -> None:
    chance, proven = Random(1), dict[WalletId, int]()
    for height in range(1, 200):
        for stage in range(STAGES):
            sequences = chance.randrange(1, 1000)
            kind = chance.choice(["aggregate", "aggregate", "alone", "entries"])
            accepted = tuple(wallet for wallet in (ADA, BOB) if chance.random() < 0.8)
            watched.value(height, stage, sequences=sequences, kind=kind, accepted=accepted)
            for wallet in accepted if kind == "aggregate" else ():
                proven[wallet] = proven.get(wallet, 0) + sequences * TOKENS * FLOPS[stage]
    assert len(FLOPS) == STAGES
    for _ in range(2):
        board = watched.monitor.leaderboard()
        assert {each["wallet"]: each["pflop"] for each in board["wallets"]} == {
            wallet: flops / 10**15 for wallet, flops in proven.items()
        }
        assert board["pflop_total"] == sum(proven.values()) / 10**15 == watched.monitor.run_facts()["pflop_total"]
        watched.again()


def test_a_certificate_counts_once_however_often_it_is_reported(watched: Watched) -> None:
    watched.value(1)
    before = watched.monitor.leaderboard()
    watched.value(1)
    watched.again()
    watched.value(1)
    assert watched.monitor.leaderboard() == before
    assert before["wallets"][0]["rounds"] == 1
    assert watched.monitor.run_facts()["successful_syncs"] == 1


def test_old_certificates_become_sums_and_nothing_is_lost(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    for height in range(1, 40):
        watched.value(height, sequences=height)
    before, facts = watched.monitor.leaderboard(), watched.monitor.run_facts()
    monkeypatch.setattr(history, "KEPT_VALUES", 10)
    watched.value(40, sequences=40, kind="entries")
    watched.value(3, sequences=3)  # a sum already
    assert len(watched.history.values()) == 10
    watched.again()
    assert watched.monitor.leaderboard() == before
    after = watched.monitor.run_facts()
    assert (after["successful_syncs"], after["started_at"]) == (39, facts["started_at"])
    assert after["certificates"][0] == {"stage": 0, "height": 40, "known": 40, "missing": 0}


def test_a_later_foundation_makes_the_values_after_its_start_void(watched: Watched) -> None:
    for height in range(1, 6):
        watched.value(height)
    watched.value(4, statement=LATER_FOUNDATION, start_height=3, accepted=(BOB,))
    board = {each["wallet"]: each["rounds"] for each in watched.monitor.leaderboard()["wallets"]}
    assert board == {ADA: 3, BOB: 4}
    assert watched.monitor.run_facts()["certificates"][0]["height"] == 4


def test_missing_certificates_are_shown(watched: Watched) -> None:
    watched.value(1)
    watched.value(130)
    assert watched.monitor.run_facts()["certificates"][0]["missing"] == 128


def test_the_rate_is_that_of_the_last_stage_and_no_sum_of_stages(watched: Watched) -> None:
    for stage in range(STAGES):
        watched.value(1, stage, sequences=100, seconds=50)
    watched.desk.now = START + 120
    facts = watched.monitor.run_facts()
    assert facts["tokens_per_second"] == 2 * 100 * TOKENS / 50
    assert facts["flops_per_second"] == facts["tokens_per_second"] * sum(FLOPS)
    watched.desk.now = START + 3600
    assert watched.monitor.run_facts()["tokens_per_second"] is None


def test_the_page_says_what_the_monitor_needs(watched: Watched) -> None:
    assert watched.monitor.explanation == "The monitor has not reported yet."
    unfounded = (StageSight(0, trouble="No foundation."),) * STAGES
    watched.sight(stages=unfounded, explanation="Name a node.")
    assert watched.monitor.explanation == "Name a node."
    watched.sight(stages=unfounded)
    assert watched.monitor.explanation == "No foundation."
    watched.monitor.note(ObserverEnded("exit code 3"))
    assert "has ended (exit code 3)" in watched.monitor.explanation
    watched.start_observer()
    watched.sight()
    assert watched.monitor.explanation == ""


def test_a_step_alone_proves_no_work(watched: Watched) -> None:
    watched.value(1, kind="alone", sequences=0, members=0, accepted=())
    assert watched.monitor.leaderboard()["wallets"] == []
    assert [each["kind"] for each in watched.monitor.run_facts()["rounds"]] == ["alone"]


def test_the_share_of_work_counts_the_same_time_on_both_sides(watched: Watched) -> None:
    watched.value(1)  # before the observer came
    watched.start_observer()
    watched.desk.now = START + 100
    watched.sight(new_tokens=0)
    assert watched.monitor.run_facts()["share_of_work_in_aggregates"] is None
    watched.sight(new_tokens=3200)
    watched.value(2)  # it began before the observer did
    assert watched.monitor.run_facts()["share_of_work_in_aggregates"] == 0
    watched.value(3)
    assert watched.monitor.run_facts()["share_of_work_in_aggregates"] == 2 * 100 * TOKENS / 3200
    watched.again()
    assert watched.monitor.run_facts()["share_of_work_in_aggregates"] == 0.5


def test_reports_become_null_when_they_are_old(watched: Watched) -> None:
    watched.sight()
    facts = watched.monitor.run_facts()
    assert (facts["participants_now"], facts["training_nodes"], facts["global_loss"]) == (3, 2, 3.5)
    assert watched.monitor.stages()[0][0] == SIGHT.stages[0]
    watched.desk.now += FRESH_SECONDS + 1
    facts = watched.monitor.run_facts()
    assert (facts["participants_now"], facts["global_loss"], facts["seen_at"]) == (None, None, START)
    assert watched.monitor.stages()[0][0] is None


def test_devices_speed_and_reach_are_those_of_the_reports(watched: Watched) -> None:
    devices = (ReportedDevice("NVIDIA H200", 2), ReportedDevice("<b>cpu</b>", 1))
    watched.sight(flops_per_second=3e15, reachable_nodes=2, unreachable_nodes=1, devices=devices)
    client = TestClient(watched.app, "http://organiser")
    facts = client.get("/api/run").json()
    assert facts["reported_flops_per_second"] == 3e15
    assert (facts["reachable_nodes"], facts["unreachable_nodes"]) == (2, 1)
    assert facts["devices"] == [{"device": "NVIDIA H200", "nodes": 2}, {"device": "<b>cpu</b>", "nodes": 1}]
    metrics = client.get("/metrics").text
    assert "neuroshard_run_reported_flops_per_second 3e+15" in metrics
    assert "neuroshard_run_reachable_nodes 2.0" in metrics
    watched.desk.now += FRESH_SECONDS + 6
    assert client.get("/api/run").json()["devices"] is None


def test_the_history_is_kept_and_bounded(watched: Watched) -> None:
    for minute in range(3 * 1440):
        watched.desk.now = START + 60 * minute
        watched.sight(held_out_loss=5 - minute // 100 / 100)
    watched.desk.now += 5
    watched.sight(loss=9.9)  # too soon after the last sample
    stored = watched.history.samples()
    assert 1440 <= len(stored) <= 1440 + 50  # the last day by minutes, the days before by hours
    facts = watched.monitor.run_facts()
    assert len(facts["history"]) == SHOWN_POINTS
    assert (facts["history"][-1]["at"], facts["history"][-1]["loss"]) == (int(stored[-1].at), 3.5)
    losses = [point["loss"] for point in facts["held_out"]]
    assert losses == sorted(set(losses), reverse=True)
    watched.again()
    assert watched.monitor.run_facts()["history"] == facts["history"]


def test_join_times_are_those_of_the_last_day(watched: Watched) -> None:
    for number, seconds in enumerate((10.0, 30.0, 500.0)):
        watched.desk.now += 1
        watched.sight(ready=(ReadyNode(NodeId(f"node-{number}"), START, seconds),))
    assert watched.monitor.run_facts()["join_seconds"] == {"median": 30.0, "nodes": 3}
    watched.desk.now += DAY_SECONDS + 10
    assert watched.monitor.run_facts()["join_seconds"] == {"median": None, "nodes": 0}


def test_a_database_that_cannot_be_written_costs_history_only(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(watched.history, "keep_sample", full)
        watched.sight()
    assert "disk is full" in watched.monitor.trouble
    assert watched.monitor.run_facts()["global_loss"] == 3.5
    watched.desk.now += 60
    watched.sight()
    assert watched.monitor.trouble == ""


def test_a_name_is_shown_until_its_owner_removes_it(watched: Watched) -> None:
    desk = watched.desk
    desk.join(1, name="<b>Ada</b>")
    place = desk.database.place_of(node(1))
    assert place is not None
    watched.value(1, accepted=(place.wallet, BOB))
    board = {each["wallet"]: each["name"] for each in watched.monitor.leaderboard()["wallets"]}
    assert board == {place.wallet: "<b>Ada</b>", BOB: None}
    desk.database.free(node(1), desk.now)
    assert watched.history.names() == {place.wallet: "<b>Ada</b>"}
    desk.join(1, name="Ada")
    assert watched.history.names() == {place.wallet: "Ada"}
    desk.join(1)
    assert {each["name"] for each in watched.monitor.leaderboard()["wallets"]} == {None}
    desk.join(2, name="Ada")  # nobody has it any more


def test_public_answers_are_cached_compressed_and_without_cookies(watched: Watched) -> None:
    client = TestClient(watched.app, "http://organiser")
    watched.sight()
    watched.value(1)
    for path, media in (
        ("/api/run", "application/json"),
        ("/api/leaderboard", "application/json"),
        ("/metrics", "text/plain"),
        ("/", "text/html"),
        ("/page.css", "text/css"),
        ("/page.js", "text/javascript"),
    ):
        with client.stream("GET", path, headers={"Accept-Encoding": "gzip"}) as answer:
            raw = b"".join(answer.iter_raw())
        plain = client.get(path, headers={"Accept-Encoding": "identity"})
        assert answer.headers["content-encoding"] == "gzip"
        assert gzip.decompress(raw) == plain.content
        assert plain.headers["content-type"].startswith(media)
        assert plain.headers["cache-control"] == "public, max-age=5"
        assert "set-cookie" not in plain.headers
        assert "default-src 'none'" in plain.headers["content-security-policy"]
    watched.sight(loss=1.0)
    assert client.get("/api/run").json()["global_loss"] == 3.5
    watched.desk.now += 5
    assert client.get("/api/run").json()["global_loss"] == 1.0


def test_prometheus_reads_the_metrics(watched: Watched) -> None:
    for stage in range(STAGES):
        watched.value(1, stage)
    watched.desk.now = START + 60
    watched.sight()
    text = TestClient(watched.app, "http://organiser").get("/metrics").text
    found = {
        (one.name, *one.labels.values()): one.value for f in text_string_to_metric_families(text) for one in f.samples
    }
    assert found["neuroshard_run_outer_step",] == 1
    assert found["neuroshard_run_tokens_per_second",] == 2 * 100 * TOKENS / 60
    assert found["neuroshard_run_stage_replicas", "head-0"] == 2
    assert found["neuroshard_run_held_out_loss",] == 3.25
    assert all(name.startswith("neuroshard_run_") for name, *_ in found)


def test_rounds_are_shown_newest_first_and_bounded(watched: Watched) -> None:
    for height in range(1, SHOWN_ROUNDS + 20):
        watched.value(height)
    heights = [each["height"] for each in watched.monitor.run_facts()["rounds"]]
    assert heights == list(range(SHOWN_ROUNDS + 19, 19, -1))


def test_lines_between_the_processes_are_read_back() -> None:
    for message in (VALUE, SIGHT):
        assert read_observation(observation_line(message)) == message
    too_many = msgspec.json.encode({"type": "value"})
    with pytest.raises(ValueError, match="required field"):
        read_observation(too_many)


def test_the_first_ones_of_the_queue_get_addresses_and_the_state_of_their_stage(watched: Watched) -> None:
    hosts = [f"203.0.{number}.7" for number in range(DOWNLOADING_AT_ONCE + 4)]
    watched.value(1, stage=0)
    watched.value(2, stage=0)

    def join(number: int) -> dict[str, Any]:
        announced = (f"/ip4/{hosts[number]}/tcp/4001/p2p/{node(number)}",)
        client = TestClient(watched.app, "http://organiser", client=(hosts[number], 4000))
        return dict(client.put("/api/join", content=watched.desk.claim(number, addresses=announced)).json())

    answers = list[dict[str, Any]]()
    for number in range(len(hosts)):
        watched.desk.now += 1
        answers.append(join(number))
    members, queued, waitlisted = answers[:3], answers[3:-1], answers[-1]
    assert [each["status"] for each in members] == ["admitted"] * 3
    assert len(queued) == DOWNLOADING_AT_ONCE
    for each in queued:
        assert (each["status"], each["stage"]) == ("queued", "head-0")
        assert each["state"] == {"outer_step": 2, "certified_at": int(START) + 120}
        assert {address.split("/")[2] for address in each["seeds"]} == set(hosts[:3])  # no other node that waits
    assert (waitlisted["status"], waitlisted["seeds"], waitlisted["state"]) == ("waitlisted", [], None)
    poll = {name: queued[0][name] for name in ("request_id", "session_token")}
    polled = TestClient(watched.app, "http://organiser").put("/api/authorization_status", json=poll).json()
    assert polled["state"] == queued[0]["state"]


@pytest.mark.parametrize("place", [".", OBSERVER])
def test_a_running_organiser_shows_a_new_version_and_its_first_step(watched: Watched, place: str) -> None:
    client = TestClient(watched.app, "http://organiser")

    def shown() -> tuple[int, int, list[tuple[int | None, int | None]]]:
        offer = checked_offer(OFFER.run_id, client.get("/api/parameters").content)
        facts = client.get("/api/run").json()
        stages = [(stage["version"], stage["version_from"]) for stage in facts["stages"]]
        return offer.parameters.version, facts["version"], stages[:STAGES]

    watched.monitor.note(SIGHT)
    assert shown() == (1, 1, [(1, 0)] * STAGES)
    changed = replace(PARAMETERS, version=2, inner=replace(PARAMETERS.inner, learning_rate=0.5))
    newer = OFFER.with_version(SignedRunParameters.sign(OWNER, changed))
    (watched.folder / place).mkdir(exist_ok=True)
    JoinedRuns(watched.folder / place).keep(newer)  # `organise set` here, or a member that the observer has met
    watched.desk.now += PUBLIC_SECONDS
    assert shown() == (2, 2, [(1, 0)] * STAGES)
    certified = tuple(StageSight(2, version=2, version_from=number) for number in range(12, 12 + STAGES))
    watched.monitor.note(structs.replace(SIGHT, at=watched.desk.now, stages=certified))
    watched.desk.now += PUBLIC_SECONDS
    assert shown() == (2, 2, [(2, 12), (2, 13), (2, 14)])
