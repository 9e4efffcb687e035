"""A node in the queue of a real organiser downloads from a real member, and trains as soon as it is admitted."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.node_process import NodeProcess, free_port, running_node
from benchmarks.organiser_process import OrganiserProcess, running_organiser
from neuroshard.types import RunId
from tests.organiser.desks import Desk
from tests.worlds.processes import LONGEST_SECONDS, Run, made, nodes_of, steps_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
CONFIG = """admission = "admitted"
architecture = { depth = 2, sequence_length = 64 }
batch_size = 1
inner_steps = 5
"""
FIRST, SECOND = ({"NEUROSHARD_TOKEN": digits * 32} for digits in ("07", "08"))
STATE, TOKENIZER, SHARD = "The state of layers 1-2 is here", "The tokenizer is here", "the first shard are here"
FIRST_STEP_SECONDS = 10.0  # from the admission; on a machine that does other work


def reason_of(status: dict[str, Any]) -> str:
    return str(status["state_reason"])


def is_here(status: dict[str, Any], *subjects: str) -> bool:
    """Whether a node in the queue has downloaded these subjects."""
    return all(words in reason_of(status) for words in ("in the queue", *subjects))


def stopped(owner: NodeProcess) -> dict[str, Any]:
    """A member with a certified state that no longer changes."""
    owner.wait_for("an outer step", lambda status: status["diloco"]["outer_steps"] > 0, LONGEST_SECONDS)
    owner.post("/api/training/pause")
    return owner.wait_for("the pause", lambda status: status["state"] == "paused", LONGEST_SECONDS)


def test_a_queued_node_trains_from_a_state_that_no_other_node_has_any_more(
    small_genesis: Path, quick: list[str], saving_often: dict[str, str], tmp_path: Path
) -> None:
    """The member that sent the state is gone at the admission, so the node can have it only from before.

    A second node waits behind it and has no source of data but the member.
    """
    run = made(CONFIG, small_genesis, tmp_path)
    places, listen = tmp_path / "capacity.toml", f"127.0.0.1:{free_port()}"
    places.write_text("replicas = 1\n")
    run_there = ["--run", run.run_id, "--organiser", f"http://{listen}"]
    with nodes_of(run, quick, tmp_path, saving_often) as start:
        owner = start(0)
        status = stopped(owner)
        told = ["--capacity", str(places), "--listen", listen, "--peer", status["network"]["addresses"][0]]
        signed = tmp_path / "signed.json"
        with ExitStack() as stack:
            organiser = stack.enter_context(running_organiser(run.data_dir, signed, told))
            take_the_place(organiser, run)
            first = stack.enter_context(running_node(tmp_path / "first", [*quick, *run_there], variables=FIRST))
            first.wait_for("state and data", lambda status: is_here(status, STATE, SHARD), LONGEST_SECONDS)
            with running_node(tmp_path / "second", [*quick[2:], *run_there], variables=SECOND) as second:
                second.wait_for("the tokenizer", lambda status: is_here(status, STATE, TOKENIZER), LONGEST_SECONDS)
                assert any((second.data_dir / "data_cache").rglob("*"))
            before = owner.get("/api/status")["training"]["steps"]
            owner.kill()
            organiser.kill()
            places.write_text("replicas = 2\n")
            with running_organiser(run.data_dir, signed, told):
                first.wait_for("the admission", lambda status: "queue" not in reason_of(status), LONGEST_SECONDS)
                admitted_at = time.monotonic()
                first.wait_for("a step", lambda status: status["training"]["steps"] > before, 2 * FIRST_STEP_SECONDS)
                assert time.monotonic() - admitted_at <= FIRST_STEP_SECONDS
                assert steps_of(first) > before > 0


def take_the_place(organiser: OrganiserProcess, run: Run) -> None:
    desk = Desk()
    desk.now = time.time()
    claim = desk.claim(1, run=RunId(run.run_id))
    assert httpx.put(f"{organiser.url}/api/join", content=claim, trust_env=False).status_code == 200
