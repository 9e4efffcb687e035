"""An organised run of real processes, as its organiser sees it from certificates and signed reports."""

from __future__ import annotations

from pathlib import Path
from signal import SIGTERM
from time import time
from typing import Any

import httpx
import pytest

from benchmarks.node_process import running_node
from benchmarks.organiser_process import OrganiserProcess, running_organiser
from neuroshard.model.architecture import flops_per_token, plan_of
from neuroshard.node.run_observer import SIGHT_SECONDS
from neuroshard.runs.stored_runs import read_offer_file
from tests.worlds.processes import LONGEST_SECONDS, made, neuroshard, nodes_of, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
CONFIG = """admission = "admitted"
architecture = { depth = 2, sequence_length = 64 }
num_stages = 2
batch_size = 1
inner_steps = 5
"""
OTHER = {"NEUROSHARD_TOKEN": "07" * 32}


def get(organiser: OrganiserProcess, path: str) -> dict[str, Any]:
    answer = httpx.get(organiser.url + path, timeout=30, trust_env=False)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def test_the_organiser_shows_the_work_that_certificates_prove(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(CONFIG, small_genesis, tmp_path)
    signed = tmp_path / "signed.json"
    with nodes_of(run, quick, tmp_path) as start:
        owner = start(0)
        status = owner.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        address = status["network"]["addresses"][0]
        watched = ["--peer", address]
        with running_organiser(run.data_dir, signed, watched, is_monitored=True) as organiser:
            until("a step alone", lambda: get(organiser, "/api/run").get("outer_step", 0) > 0)
            alone = get(organiser, "/api/run")
            assert (alone["participants_now"], alone["monitor"], alone["trouble"]) == (1, "", "")
            assert (alone["pflop_total"], alone["tokens_per_second"]) == (0, None)  # no certificate with others
            assert {each["kind"] for each in alone["rounds"]} == {"alone"}
            until("a worker", lambda: get(organiser, "/api/run")["stages"][0]["replicas"] == 1)
            until("a held-out loss", lambda: bool(get(organiser, "/api/run")["held_out_loss"]))
            assert get(organiser, "/api/run")["global_loss"] > 0
            told = [*quick, "--run", run.run_id, "--organiser", organiser.url, "--public-name", "Ada"]
            with running_node(tmp_path / "other", told, variables=OTHER) as other:
                until("work of both", lambda: get(organiser, "/api/run")["participants_ever"] == 2)
                network = other.get("/api/status")["network"]
                assert network["reachable"] is True
                assert network["join_line"] == f"neuroshard --run {run.run_id} --organiser {organiser.url}"
                until("the rate", lambda: get(organiser, "/api/run")["tokens_per_second"])
                other.stop()
            owner.kill()
            killed_at = time()  # answers that are on the way come within two looks of the observer
            until(
                "the last certificates", lambda: get(organiser, "/api/run")["seen_at"] > killed_at + 2 * SIGHT_SECONDS
            )
            before, board = get(organiser, "/api/run"), get(organiser, "/api/leaderboard")
            organiser.kill()
        # the sums are those of the certificates, which the page lists
        parameters = read_offer_file(signed).parameters
        per_token = [flops_per_token(parameters.architecture, layers) for layers in plan_of(parameters)]
        rounds = [each for each in before["rounds"] if each["kind"] == "aggregate"]
        assert len(rounds) == before["successful_syncs"] <= 50
        assert board["pflop_total"] == before["pflop_total"]
        assert sorted(each["name"] or "" for each in board["wallets"]) == ["", "Ada"]
        operations = [int(each["tokens"]) * per_token[int(each["stage"])] for each in rounds]
        assert board["pflop_total"] == sum(operations) / 10**15
        assert len(per_token) == 2
        with running_organiser(run.data_dir, signed, is_monitored=True) as again:
            after = get(again, "/api/run")
            kept = (
                "outer_step",
                "pflop_total",
                "participants_ever",
                "started_at",
                "held_out",
                "rounds",
                "certificates",
            )
            assert [after[name] for name in kept] == [before[name] for name in kept]
            assert get(again, "/api/leaderboard") == board
            code, said = again.end(SIGTERM)
            assert code == 0, said
            assert "torch: False" in said


def test_the_organiser_alone_hands_a_new_version_to_the_members(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(CONFIG.replace("num_stages = 2\n", ""), small_genesis, tmp_path)
    with nodes_of(run, quick, tmp_path) as start:
        owner = start(0)
        status = owner.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        watched = ["--peer", status["network"]["addresses"][0]]
        with running_organiser(run.data_dir, tmp_path / "signed.json", watched, is_monitored=True) as organiser:
            joining = [*quick, "--run", run.run_id, "--organiser", organiser.url]
            with running_node(tmp_path / "other", joining, variables=OTHER) as other:
                until("both nodes", lambda: get(organiser, "/api/run")["participants_now"] == 2)
                other.wait_for("training", lambda status: status["state"] == "training", LONGEST_SECONDS)
                assert owner.stop() == 0
                where = ("--run", run.run_id, "--data-dir", run.data_dir)
                changed = neuroshard("organise", "set", "inner_lr", "2e-4", "--yes", *where)
                assert changed.code == 0, changed.err
                heard = other.wait_for("version 2", lambda status: status["diloco"]["version"] == 2, LONGEST_SECONDS)
                assert heard["diloco"]["version_from"] is None  # no seat is here that could take it into the chain
                until("the page", lambda: get(organiser, "/api/run")["version"] == 2)
                assert get(organiser, "/api/run")["stages"][0]["version"] == 1
                assert get(organiser, "/api/parameters")["current"]["parameters"]["version"] == 2
                start(0, heard["network"]["addresses"][0])
                applied = other.wait_for(
                    "its step", lambda status: status["diloco"]["version_from"] is not None, LONGEST_SECONDS
                )
                first = applied["diloco"]["version_from"]
                until("the step on the page", lambda: stage_version(organiser) == (2, first))


def stage_version(organiser: OrganiserProcess) -> tuple[int, int]:
    stage = get(organiser, "/api/run")["stages"][0]
    return stage["version"], stage["version_from"]
