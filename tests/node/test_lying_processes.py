"""Four ordinary processes vote in a run of strangers, and one of them lies in every role: the others go on as one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node_process import TOKEN, NodeProcess, running_node
from neuroshard.config.folders import NodePaths
from neuroshard.consensus.committee import Committee, Seat
from neuroshard.consensus.foundation import StageStart
from neuroshard.identity import NodeKey, Wallet, parse_token
from neuroshard.runs.foundations import StoredFoundations, no_foundations
from neuroshard.runs.stored_runs import JoinedRuns, find_run
from neuroshard.types import RunId
from tests.worlds import liar_process
from tests.worlds.liar_process import LIES, OMISSION, told_in
from tests.worlds.processes import LONGEST_SECONDS, Run, made, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

CONFIG = """
admission = "strangers"
architecture = { depth = 2, sequence_length = 64 }
batch_size = 1
inner_steps = 10
interval = "fixed"
"""
SEATS, LIAR = 4, 3
FOUND = {"two_statistics", "wrong_results", "both_votes"}  # those that nobody else can be responsible for
MOST_VIEWS = 2  # of a step with one lie


def token_of(number: int) -> str:
    return f"{number:02x}" * 32 if number else TOKEN


def founded(run: Run, folders: Sequence[Path]) -> list[str]:
    """Give each node a seat: by work the first four take half an hour. Returns the nodes' ids."""
    offer, owner = find_run(run.data_dir, RunId(run.run_id)), Wallet.from_secret(parse_token(TOKEN))
    assert offer is not None
    seats = list[Seat]()
    for number, folder in enumerate(folders):
        wallet = Wallet.from_secret(parse_token(token_of(number)))
        seats.append(Seat(wallet.wallet_id, NodeKey.load_or_create(NodePaths.below(folder).node_key).node_id, 0))
    start, none = StageStart(0, Committee.founded(seats, is_open=True)), no_foundations(offer)
    trusted = tuple(seat.wallet_id for seat in seats[1:])
    foundations = none.with_statements([none.next(owner, [start], trusted=trusted)])
    for folder in folders:
        JoinedRuns(folder).keep(offer)
        StoredFoundations(folder).write(offer, foundations)
    return [seat.node_id for seat in seats]


def step_of(node: NodeProcess) -> int:
    return int(node.get("/api/status")["diloco"]["outer_steps"])


def records_of(node: NodeProcess, step: int) -> list[dict[str, Any]]:
    """What a node says about its rounds of a step."""
    return [record for record in node.get("/api/rounds")["rounds"] if record["outer_step"] == step]


def accused_by(folder: Path) -> set[str]:
    """Those of whose lies a node keeps proofs."""
    lines = [line for file in folder.rglob("proofs.jsonl") for line in file.read_text().splitlines()]
    return {json.loads(line)["node"] for line in lines}


def lines_of(nodes: Sequence[NodeProcess]) -> set[tuple[int, str]]:
    told = [node.get("/api/status")["diloco"] for node in nodes]
    return {(one["outer_steps"], one["state_root"]) for one in told}


@pytest.mark.long  # the same lies in one process: tests/swarm/test_certified_rounds.py, test_seats_among_strangers.py
def test_a_liar_among_four_processes_keeps_the_others_from_nothing(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(CONFIG, small_genesis, tmp_path)
    folders = [run.data_dir, *(tmp_path / f"node-{number}" for number in range(1, SEATS))]
    names, lie = founded(run, folders), tmp_path / "lie"
    lie.write_text("")
    place = [sys.executable, str(Path(liar_process.__file__)), str(lie)]
    with ExitStack() as stack:
        nodes = list[NodeProcess]()
        peers = list[str]()
        for number, folder in enumerate(folders):
            arguments = [*quick[:-2], "--run", run.run_id, *peers]
            variables = {"NEUROSHARD_TOKEN": token_of(number), "PYTHONPATH": str(Path(__file__).parents[2])}
            where = place if number == LIAR else []
            nodes.append(stack.enter_context(running_node(folder, arguments, variables=variables, place=where)))
            if not peers:
                status = nodes[0].wait_for("address", lambda one: bool(one["network"]["addresses"]), LONGEST_SECONDS)
                peers = ["--peer", status["network"]["addresses"][0]]
        stack.callback(lambda: [node.kill() for node in nodes])
        honest = nodes[:LIAR]
        nodes[0].wait_for("a step of all", lambda one: one["diloco"]["members"] == SEATS, LONGEST_SECONDS)
        for name in (OMISSION, *LIES):
            lie.write_text(name)
            until(f"the lie {name}", lambda: told_in(lie).exists() and name in told_in(lie).read_text())  # noqa: B023
            step = int(told_in(lie).read_text().splitlines()[-1].split()[1])
            until("two more steps", lambda: min(map(step_of, honest)) >= step + 2)  # noqa: B023
            for node in honest:
                (completed,) = [one for one in records_of(node, step) if one["result"] == "completed"]
                assert completed["views"] <= MOST_VIEWS, (name, completed)
            accused = [accused_by(folder) for folder in folders[:LIAR]]
            assert set().union(*accused) <= {names[LIAR]}, name
            assert name not in FOUND or any(accused), name
        for node in honest:
            node.post("/api/training/pause")
        until("one root", lambda: len(lines_of(honest)) == 1)
